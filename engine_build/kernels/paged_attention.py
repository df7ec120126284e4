"""The kernels of `PagedAttention`: write this step's keys and values, then attend through the block tables.

```
step       write_kv ──► attend_context      sequences of many rows: tiles of rows, whole context in each
                   └──► attend_generation   sequences of few rows: split along the context
                          └──► reduce_splits     what the splits found, joined
```

Launched in this order on one stream, every key and value is in the pool before anything reads it, those of the rows at
hand included: no program waits for another. Each kernel looks at its sequences' row counts and leaves the others alone,
so grids depend on shapes only, never on what lies in device memory.

Parameters come in the order inputs, scalars, outputs; capital ones are compiled in. Scores are kept in base 2:
`exp2(score * log2(e))` is one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of(subsequence_begins, num_sequences, index, ROWS: tl.constexpr, TILES_PER_SEQUENCE: tl.constexpr):
    """The last sequence whose first tile is at or before `index`.

    Sequence b begins with tile `begins[b] // ROWS + b * TILES_PER_SEQUENCE`: with one extra tile for each sequence the
    rows of two sequences never share a tile, and the number of tiles is known from the shapes.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(subsequence_begins + middle) // ROWS + middle * TILES_PER_SEQUENCE
        low = tl.where(first <= index, middle, low)
        high = tl.where(first <= index, high, middle)
    return low


@triton.jit
def _write_rows(rows, is_row, pool, chunks, slot, HEAD_SIZE, TOKENS_PER_BLOCK, MAXIMUM: tl.constexpr, elements):
    """Put `rows` [kv_heads, head_size] into one slot of as many chunks, in the pool's type."""
    targets = pool + chunks[:, None] + slot * HEAD_SIZE + elements[None, :]
    if MAXIMUM == 0:
        tl.store(targets, rows.to(pool.dtype.element_ty), mask=is_row)
    else:
        largest = tl.max(tl.abs(rows), axis=1)
        scales = tl.div_rn(tl.maximum(largest, 1e-30), MAXIMUM)
        quotients = tl.div_rn(rows, tl.broadcast_to(scales[:, None], rows.shape))
        if pool.dtype.element_ty == tl.int8:
            quotients = tl.floor(quotients + 0.5)
        tl.store(targets, quotients.to(pool.dtype.element_ty), mask=is_row)
        scale_pool = (pool + chunks + TOKENS_PER_BLOCK * HEAD_SIZE).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scale_pool + slot, scales, mask=tl.max(is_row.to(tl.int32), axis=1) > 0)


@triton.jit(do_not_specialize=["num_sequences"])
def write_kv(
    key,
    value,
    past_lens,
    subsequence_begins,
    block_indices,
    block_indices_begins,
    num_sequences,
    key_pool,
    value_pool,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    MAXIMUM: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    """Write one row's keys and values. Grid: (T,)."""
    row = tl.program_id(0)
    sequence = _sequence_of(subsequence_begins, num_sequences, row, 1, 0)
    position = tl.load(past_lens + sequence) + row - tl.load(subsequence_begins + sequence)
    table = block_indices + tl.load(block_indices_begins + sequence)
    block = tl.load(table + position // TOKENS_PER_BLOCK).to(tl.int64)
    slot = position % TOKENS_PER_BLOCK

    heads = tl.arange(0, PADDED_KV_HEADS)
    elements = tl.arange(0, PADDED_HEAD_SIZE)
    is_row = (heads < NUM_KV_HEADS)[:, None] & (elements < HEAD_SIZE)[None, :]
    sources = (row.to(tl.int64) * NUM_KV_HEADS + heads)[:, None] * HEAD_SIZE + elements[None, :]
    chunks = (block * NUM_KV_HEADS + heads) * CHUNK
    keys = tl.load(key + sources, mask=is_row, other=0.0).to(tl.float32)
    _write_rows(keys, is_row, key_pool, chunks, slot, HEAD_SIZE, TOKENS_PER_BLOCK, MAXIMUM, elements)
    values = tl.load(value + sources, mask=is_row, other=0.0).to(tl.float32)
    _write_rows(values, is_row, value_pool, chunks, slot, HEAD_SIZE, TOKENS_PER_BLOCK, MAXIMUM, elements)


@triton.jit
def _attend(
    maximum,
    total,
    weighted,
    queries,
    query_positions,
    table,
    key_pool,
    value_pool,
    kv_head,
    begin,
    end,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EIGHT_BIT: tl.constexpr,
    SCALE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Softmax over positions `begin` to `end`, on top of what was found before.

    `maximum` and `total` are [queries], `weighted` [queries, PADDED_HEAD_SIZE]: the largest score, the sum of
    `exp2(score - maximum)`, and the values weighted so. Without MASKED every query sees every position, and
    `end - begin` is a multiple of TILE_TOKENS.
    """
    elements = tl.arange(0, PADDED_HEAD_SIZE)
    is_element = elements < HEAD_SIZE
    for first in tl.range(begin, end, TILE_TOKENS):
        positions = first + tl.arange(0, TILE_TOKENS)
        is_position = positions < end
        if MASKED:
            blocks = tl.load(table + positions // TOKENS_PER_BLOCK, mask=is_position, other=0)
        else:
            blocks = tl.load(table + positions // TOKENS_PER_BLOCK)
        chunks = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * CHUNK
        slots = positions % TOKENS_PER_BLOCK
        rows = chunks + slots * HEAD_SIZE

        key_pointers = key_pool + rows[None, :] + elements[:, None]
        value_pointers = value_pool + rows[:, None] + elements[None, :]
        if MASKED or PADDED_HEAD_SIZE != HEAD_SIZE:
            keys = tl.load(key_pointers, mask=is_element[:, None] & is_position[None, :], other=0.0)
            values = tl.load(value_pointers, mask=is_position[:, None] & is_element[None, :], other=0.0)
        else:
            keys = tl.load(key_pointers)
            values = tl.load(value_pointers)

        if key_pool.dtype.element_ty == tl.int8:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee")
        if EIGHT_BIT:
            scales = chunks + TOKENS_PER_BLOCK * HEAD_SIZE
            key_scales = (key_pool + scales).to(tl.pointer_type(tl.float32), bitcast=True) + slots
            value_scales = (value_pool + scales).to(tl.pointer_type(tl.float32), bitcast=True) + slots
            scores *= tl.load(key_scales, mask=is_position, other=0.0)[None, :]
        if SOFT_CAP != 0:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right at both infinities.
            doubled = tl.exp2(scores * (2 * SCALE / SOFT_CAP * LOG2_E))
            scores = (SOFT_CAP * LOG2_E) * (1 - 2 / (doubled + 1))
        else:
            scores *= SCALE * LOG2_E
        if MASKED:
            is_seen = is_position[None, :] & (positions[None, :] <= query_positions[:, None])
            if SLIDING_WINDOW != 0:
                is_seen &= positions[None, :] > query_positions[:, None] - SLIDING_WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A query that has seen nothing yet has no largest score; -inf - -inf would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        correction = tl.exp2(maximum - shift)
        total = total * correction + tl.sum(weights, axis=1)
        if EIGHT_BIT:
            weights *= tl.load(value_scales, mask=is_position, other=0.0)[None, :]
        weighted = weighted * correction[:, None]
        weighted = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), weighted, input_precision="ieee")
        maximum = new_maximum
    return maximum, total, weighted


@triton.jit
def _tile(first_row, num_rows, kv_head, NUM_HEADS, GROUP, HEAD_SIZE, PADDED_HEAD_SIZE, TILE_QUERIES):
    """A tile of queries, row by row and within a row head by head: offsets, mask, row of each."""
    queries = tl.arange(0, TILE_QUERIES)
    rows = queries // GROUP
    heads = kv_head * GROUP + queries % GROUP
    elements = tl.arange(0, PADDED_HEAD_SIZE)
    offsets = ((first_row + rows).to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_SIZE + elements[None, :]
    mask = (rows < num_rows)[:, None] & (elements < HEAD_SIZE)[None, :]
    return offsets, mask, rows


@triton.jit(do_not_specialize=["num_sequences"])
def attend_context(
    query,
    past_lens,
    subsequence_begins,
    block_indices,
    block_indices_begins,
    key_pool,
    value_pool,
    num_sequences,
    output,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EIGHT_BIT: tl.constexpr,
    SCALE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    GENERATION_ROWS: tl.constexpr,
):
    """A tile of rows of a sequence that has more than GENERATION_ROWS. Grid: (T // rows of a tile + B, kv heads).

    With GENERATION_ROWS 0 all sequences are computed here, in one order of summation: a row's bits then depend neither
    on what else is in the step nor on where its sequence was cut into steps.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    ROWS: tl.constexpr = TILE_QUERIES // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(subsequence_begins, num_sequences, tile, ROWS, 1)
    begin_row = tl.load(subsequence_begins + sequence)
    num_rows = tl.load(subsequence_begins + sequence + 1) - begin_row
    first_row = (tile - begin_row // ROWS - sequence) * ROWS
    if (first_row >= num_rows) | (num_rows <= GENERATION_ROWS):
        return
    past = tl.load(past_lens + sequence)
    table = block_indices + tl.load(block_indices_begins + sequence)
    tile_rows = tl.minimum(num_rows - first_row, ROWS)
    first_position = past + first_row
    end = first_position + tile_rows

    offsets, mask, rows = _tile(
        begin_row + first_row, tile_rows, kv_head, NUM_HEADS, GROUP, HEAD_SIZE, PADDED_HEAD_SIZE, TILE_QUERIES
    )
    queries = tl.load(query + offsets, mask=mask, other=0.0)
    positions = first_position + rows
    maximum = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    weighted = tl.zeros([TILE_QUERIES, PADDED_HEAD_SIZE], tl.float32)
    begin = 0
    if SLIDING_WINDOW != 0:
        begin = tl.maximum(first_position - SLIDING_WINDOW + 1, 0) // TILE_TOKENS * TILE_TOKENS
    elif GENERATION_ROWS != 0:
        # Tiles that every row sees whole need no mask.
        begin = (first_position + 1) // TILE_TOKENS * TILE_TOKENS
        maximum, total, weighted = _attend(
            maximum, total, weighted, queries, positions, table, key_pool, value_pool, kv_head, 0, begin,
            NUM_KV_HEADS, HEAD_SIZE, TOKENS_PER_BLOCK, CHUNK, EIGHT_BIT, SCALE, SLIDING_WINDOW, SOFT_CAP,
            PADDED_HEAD_SIZE, TILE_TOKENS, False,
        )  # fmt: skip
    maximum, total, weighted = _attend(
        maximum, total, weighted, queries, positions, table, key_pool, value_pool, kv_head, begin, end,
        NUM_KV_HEADS, HEAD_SIZE, TOKENS_PER_BLOCK, CHUNK, EIGHT_BIT, SCALE, SLIDING_WINDOW, SOFT_CAP,
        PADDED_HEAD_SIZE, TILE_TOKENS, True,
    )  # fmt: skip
    tl.store(output + offsets, (weighted / total[:, None]).to(output.dtype.element_ty), mask=mask)


@triton.jit
def attend_generation(
    query,
    past_lens,
    subsequence_begins,
    block_indices,
    block_indices_begins,
    key_pool,
    value_pool,
    output,
    split_weighted,
    split_sums,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    EIGHT_BIT: tl.constexpr,
    SCALE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    GENERATION_ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """One split of the context of a sequence of at most GENERATION_ROWS rows. Grid: (B, kv heads, NUM_SPLITS).

    With one split the output is written here. Else `split_weighted` [B, kv_heads, NUM_SPLITS, TILE_QUERIES,
    PADDED_HEAD_SIZE] and `split_sums` [B, kv_heads, NUM_SPLITS, 2, TILE_QUERIES] (largest scores, sums) are, both
    float32.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    begin_row = tl.load(subsequence_begins + sequence)
    num_rows = tl.load(subsequence_begins + sequence + 1) - begin_row
    if num_rows > GENERATION_ROWS:
        return
    past = tl.load(past_lens + sequence)
    table = block_indices + tl.load(block_indices_begins + sequence)
    context_len = past + num_rows
    window_begin = 0
    if SLIDING_WINDOW != 0:
        window_begin = tl.maximum(past - SLIDING_WINDOW + 1, 0) // TILE_TOKENS * TILE_TOKENS
    tokens_per_split = tl.cdiv(tl.cdiv(context_len - window_begin, TILE_TOKENS), NUM_SPLITS) * TILE_TOKENS
    begin = window_begin + split * tokens_per_split
    end = tl.minimum(begin + tokens_per_split, context_len)

    offsets, mask, rows = _tile(
        begin_row, num_rows, kv_head, NUM_HEADS, GROUP, HEAD_SIZE, PADDED_HEAD_SIZE, TILE_QUERIES
    )
    queries = tl.load(query + offsets, mask=mask, other=0.0)
    positions = past + rows
    maximum = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    weighted = tl.zeros([TILE_QUERIES, PADDED_HEAD_SIZE], tl.float32)
    if SLIDING_WINDOW == 0:
        whole = tl.minimum((past + 1) // TILE_TOKENS * TILE_TOKENS, tl.maximum(end, begin) // TILE_TOKENS * TILE_TOKENS)
        maximum, total, weighted = _attend(
            maximum, total, weighted, queries, positions, table, key_pool, value_pool, kv_head, begin, whole,
            NUM_KV_HEADS, HEAD_SIZE, TOKENS_PER_BLOCK, CHUNK, EIGHT_BIT, SCALE, SLIDING_WINDOW, SOFT_CAP,
            PADDED_HEAD_SIZE, TILE_TOKENS, False,
        )  # fmt: skip
        begin = tl.maximum(begin, whole)
    maximum, total, weighted = _attend(
        maximum, total, weighted, queries, positions, table, key_pool, value_pool, kv_head, begin, end,
        NUM_KV_HEADS, HEAD_SIZE, TOKENS_PER_BLOCK, CHUNK, EIGHT_BIT, SCALE, SLIDING_WINDOW, SOFT_CAP,
        PADDED_HEAD_SIZE, TILE_TOKENS, True,
    )  # fmt: skip
    if NUM_SPLITS == 1:
        tl.store(output + offsets, (weighted / total[:, None]).to(output.dtype.element_ty), mask=mask)
    else:
        part = ((sequence * NUM_KV_HEADS + kv_head) * NUM_SPLITS + split).to(tl.int64) * TILE_QUERIES
        queries_of_tile = tl.arange(0, TILE_QUERIES)
        elements = tl.arange(0, PADDED_HEAD_SIZE)
        tl.store(
            split_weighted + (part + queries_of_tile)[:, None] * PADDED_HEAD_SIZE + elements[None, :],
            weighted,
            mask=mask,
        )
        tl.store(split_sums + 2 * part + queries_of_tile, maximum)
        tl.store(split_sums + 2 * part + TILE_QUERIES + queries_of_tile, total)


@triton.jit
def reduce_splits(
    split_weighted,
    split_sums,
    subsequence_begins,
    output,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    GENERATION_ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Join what the splits of one sequence found. Grid: (B, kv heads)."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    begin_row = tl.load(subsequence_begins + sequence)
    num_rows = tl.load(subsequence_begins + sequence + 1) - begin_row
    if num_rows > GENERATION_ROWS:
        return
    offsets, mask, _rows = _tile(
        begin_row, num_rows, kv_head, NUM_HEADS, GROUP, HEAD_SIZE, PADDED_HEAD_SIZE, TILE_QUERIES
    )
    queries_of_tile = tl.arange(0, TILE_QUERIES)
    elements = tl.arange(0, PADDED_HEAD_SIZE)
    maximum = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE_QUERIES], tl.float32)
    weighted = tl.zeros([TILE_QUERIES, PADDED_HEAD_SIZE], tl.float32)
    first_part = ((sequence * NUM_KV_HEADS + kv_head) * NUM_SPLITS).to(tl.int64) * TILE_QUERIES
    for split in range(NUM_SPLITS):
        part = first_part + split * TILE_QUERIES
        split_maximum = tl.load(split_sums + 2 * part + queries_of_tile)
        split_total = tl.load(split_sums + 2 * part + TILE_QUERIES + queries_of_tile)
        values = tl.load(
            split_weighted + (part + queries_of_tile)[:, None] * PADDED_HEAD_SIZE + elements[None, :],
            mask=mask,
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, split_maximum)
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        old_weight = tl.exp2(maximum - shift)
        new_weight = tl.exp2(split_maximum - shift)
        total = total * old_weight + split_total * new_weight
        weighted = weighted * old_weight[:, None] + values * new_weight[:, None]
        maximum = new_maximum
    tl.store(output + offsets, (weighted / total[:, None]).to(output.dtype.element_ty), mask=mask)
