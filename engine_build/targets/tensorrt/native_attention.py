"""`PagedAttention` as standard ONNX operators: for targets that take no operator of ours.

```
rows       | a a a | b | c c |                 every row has a sequence and a position in it
columns    | block a0 | block b0 | block c0 | block c1 | a a a | b | c c |
             past: tokens_per_block columns for         this step's rows themselves
             each entry of the tables
mask         row sees column  <=>  same sequence; a past column is one of past_lens, a row's is not later;
                                   and it is within the window
```

All blocks that the step's tables name are gathered from the pool, and every row attends to all columns under a mask
that leaves it its own. Sequences need not be padded to one length, and the mask and every index are computed once for
all layers. What it costs: scores with the columns of other sequences, which are masked.

Where scores are bounded (`soft_cap`), attention is products, `Tanh` and `Softmax`, in float32 between the products: the
standard's `Attention` leaves open whether a bound comes before the mask.

New keys and values are scattered into the pools, which come out of the graph as `key_cache_{i}_out` and
`value_cache_{i}_out`. Attention reads the pools as they came in, and this step's rows from the rows: nothing in the
graph reads a pool after the scatter, and a runtime may bind an output to its input's address (what is read and what is
written are different slots) or to another buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from engine_build.network.paged_attention import DOMAIN, OPERATOR
from engine_build.targets.tensorrt.pool_tensors import add_cache_outputs, cache_output

_INT64 = onnx.TensorProto.INT64
_END = int(np.iinfo(np.int64).max)
"""Behind the last element, in a slice."""
_HIDDEN = -1e30
"""Score of what a row does not see; a sum of its exponents is 0. Every row sees itself."""


def lower_paged_attention(model: onnx.ModelProto, tokens_per_block: int) -> onnx.ModelProto:
    """Replace every `PagedAttention` of `model`; weights in external data are not touched.

    Args:
        model: a network of `engine_build.network`.
        tokens_per_block: positions in a block; the pools' dimension of that name becomes this number.
    """
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    graph = lowered.graph
    del graph.node[:]
    lowering = _Lowering(tokens_per_block, {value.name: value.type.tensor_type.elem_type for value in graph.input})
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type == OPERATOR:
            lowering.replace(node)
        else:
            lowering.nodes.append(node)
    graph.node.extend(lowering.nodes)
    graph.initializer.extend(lowering.constants.values())
    unused = [value for value in graph.input if value.name in lowering.bounds]
    for value in unused:
        graph.input.remove(value)
    for value in graph.input:
        if value.name in lowering.caches:
            value.type.tensor_type.shape.dim[2].dim_value = tokens_per_block
    add_cache_outputs(graph, lowering.caches)
    if not any(node.domain == DOMAIN for node in graph.node):
        kept = [opset for opset in lowered.opset_import if opset.domain != DOMAIN]
        del lowered.opset_import[:]
        lowered.opset_import.extend(kept)
    return lowered


class _Lowering:
    """Nodes and constants that come instead. Values are known by name, as in `GraphBuilder`."""

    def __init__(self, tokens_per_block: int, input_types: Mapping[str, int]) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.caches: set[str] = set()
        self.bounds: set[str] = set()
        """Inputs that bound workspaces of other targets; nothing here needs them."""
        self._tokens_per_block = tokens_per_block
        self._input_types = input_types
        self._has_step_values = False

    def replace(self, node: NodeProto) -> None:
        """Write what one `PagedAttention` becomes."""
        query, key, value, key_cache, value_cache, *step, max_context_len = node.input
        self.bounds.add(max_context_len)
        settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        heads, kv_heads, size = (settings[name] for name in ("num_heads", "num_kv_heads", "head_size"))
        if not self._has_step_values:
            self._step_values(key, step, kv_heads, settings["sliding_window"])
            self._has_step_values = True
        name = node.output[0]
        contexts = [
            self._context(f"{name}.{kind}", new, cache, kv_heads, size)
            for kind, new, cache in (("keys", key, key_cache), ("values", value, value_cache))
        ]
        queries = self._reshape(query, [1, -1, heads, size], f"{name}.queries_by_row")
        queries = self._node("Transpose", [queries], f"{name}.queries", perm=[0, 2, 1, 3])
        soft_cap = settings.get("soft_cap", 0.0)
        if soft_cap:
            groups = (kv_heads, heads // kv_heads, size)
            dtype = self._input_types[key_cache]
            attended = self._bounded(f"{name}.by_head", queries, contexts, groups, settings["scale"], soft_cap, dtype)
        else:
            attended = self._node(
                "Attention", [queries, *contexts, "step.mask"], f"{name}.by_head", scale=settings["scale"]
            )
        by_row = self._node("Transpose", [attended], f"{name}.by_row", perm=[0, 2, 1, 3])
        self._reshape(by_row, [-1, heads * size], name)

    def _bounded(
        self,
        name: str,
        queries: str,
        contexts: Sequence[str],
        groups: tuple[int, int, int],
        scale: float,
        soft_cap: float,
        dtype: int,
    ) -> str:
        """`[1, heads, T, size]`: attention whose scores are bounded before they are masked.

        Args:
            name: of the result.
            queries: `[1, heads, T, size]`.
            contexts: keys and values, `[1, kv_heads, C + T, size]`.
            groups: key heads, query heads for each of them, elements of a head.
            scale: factor on the scores.
            soft_cap: their bound.
            dtype: ONNX element type of all these.
        """
        kv_heads, group, size = groups
        grouped = self._reshape(queries, [kv_heads, group, -1, size], f"{name}.grouped")
        keys, values = (self._reshape(each, [kv_heads, 1, -1, size], f"{each}.one_of_group") for each in contexts)
        transposed = self._node("Transpose", [keys], f"{keys}.transposed", perm=[0, 1, 3, 2])
        products = self._node("MatMul", [grouped, transposed], f"{name}.products")
        value = self._node("Cast", [products], f"{name}.products_wide", to=onnx.TensorProto.FLOAT)
        value = self._node("Mul", [value, self._float(scale / soft_cap)], f"{name}.parts_of_bound")
        value = self._node("Tanh", [value], f"{name}.bounded_parts")
        value = self._node("Mul", [value, self._float(soft_cap)], f"{name}.scores")
        value = self._node("Where", ["step.mask", value, self._float(_HIDDEN)], f"{name}.scores_masked")
        weights = self._node("Softmax", [value], f"{name}.weights_wide", axis=-1)
        weights = self._node("Cast", [weights], f"{name}.weights", to=dtype)
        attended = self._node("MatMul", [weights, values], f"{name}.attended")
        return self._reshape(attended, [1, kv_heads * group, -1, size], name)

    def _context(self, name: str, new: str, cache: str, kv_heads: int, size: int) -> str:
        """`[1, kv_heads, C + T, size]`: the tables' blocks, then `new` `[T, kv_heads * size]`, which is scattered."""
        self.caches.add(cache)
        slots = self._reshape(cache, [-1, size], f"{name}.slots")
        rows_by_slot = self._reshape(new, [-1, size], f"{name}.rows_by_slot")
        updated = self._node("ScatterND", [slots, "step.slots", rows_by_slot], f"{name}.updated")
        self._reshape(updated, [-1, kv_heads, self._tokens_per_block, size], cache_output(cache))

        blocks = self._node("Gather", [cache, "step.block_indices"], f"{name}.blocks", axis=0)
        by_head = self._node("Transpose", [blocks], f"{name}.blocks_by_head", perm=[1, 0, 2, 3])
        past = self._reshape(by_head, [1, kv_heads, -1, size], f"{name}.past")
        rows = self._reshape(new, [1, -1, kv_heads, size], f"{name}.rows")
        rows_by_head = self._node("Transpose", [rows], f"{name}.rows_by_head", perm=[0, 2, 1, 3])
        return self._node("Concat", [past, rows_by_head], f"{name}.context", axis=2)

    def _step_values(self, key: str, step: Sequence[str], kv_heads: int, sliding_window: int) -> None:
        """`step.mask` bool `[T, C + T]`, `step.slots` int64 `[T * kv_heads, 1]`, `step.block_indices` int64 `[N]`."""
        past_lens, row_begins, block_indices, table_begins = (
            self._node("Cast", [name], f"step.{name}", to=_INT64) for name in step
        )
        size = self._tokens_per_block
        rows = self._indices(key, "step.rows")
        row_sequence = self._owner(rows, row_begins, "step.row_sequence")
        # position of a row: past_lens + (row - first row of its sequence)
        first_position = self._node("Sub", [past_lens, self._without_last(row_begins)], "step.first_position")
        row_position = self._sum_with_gathered(rows, first_position, row_sequence, "step.row_position")

        entries = self._indices(block_indices, "step.entries")
        entry_sequence = self._owner(entries, table_begins, "step.entry_sequence")
        negated = self._node("Neg", [self._without_last(table_begins)], "step.table_begins_negated")
        entry_in_table = self._sum_with_gathered(entries, negated, entry_sequence, "step.entry_in_table")
        block_size = self._integers("step.block_size", size)
        first_of_entry = self._node("Mul", [entry_in_table, block_size], "step.entry_first")
        columns = self._node(
            "Add",
            [self._column(first_of_entry), self._integers("step.offsets", list(range(size)), (1, size))],
            "step.column_positions_by_block",
        )
        column_position = self._reshape(columns, [1, -1], "step.column_position")
        spread = self._integers("step.no_offsets", [0] * size, (1, size))
        repeated = self._node("Add", [self._column(entry_sequence), spread], "step.column_sequence_by_block")
        column_sequence = self._reshape(repeated, [1, -1], "step.column_sequence")

        row_sequence_column = self._column(row_sequence)
        is_past = self._node(
            "Less", [column_position, self._past_len_of_columns(past_lens, entry_sequence, spread)], "step.is_past"
        )
        same_past = self._node("Equal", [row_sequence_column, column_sequence], "step.same_sequence")
        past_mask = self._node("And", [same_past, is_past], "step.past_mask")
        sequence_row = self._reshape(row_sequence, [1, -1], "step.row_sequence_row")
        rows_row = self._reshape(rows, [1, -1], "step.rows_row")
        same_row = self._node("Equal", [row_sequence_column, sequence_row], "step.same_sequence_of_rows")
        not_later = self._node("LessOrEqual", [rows_row, self._column(rows)], "step.not_later")
        rows_mask = self._node("And", [same_row, not_later], "step.rows_mask")
        unlimited = "step.mask_without_window" if sliding_window else "step.mask"
        mask = self._node("Concat", [past_mask, rows_mask], unlimited, axis=1)
        if sliding_window:
            row_position_row = self._reshape(row_position, [1, -1], "step.row_position_row")
            positions = self._node("Concat", [column_position, row_position_row], "step.positions", axis=1)
            window = self._integers("step.window", sliding_window)
            last_hidden = self._node("Sub", [self._column(row_position), window], "step.last_hidden")
            near = self._node("Greater", [positions, last_hidden], "step.in_window")
            self._node("And", [mask, near], "step.mask")

        # where a row goes: slot of head h = (block * kv_heads + h) * tokens_per_block + position in the block
        entry = self._node("Div", [row_position, block_size], "step.row_entry")
        in_tables = self._sum_with_gathered(
            entry, self._without_last(table_begins), row_sequence, "step.row_entry_in_tables"
        )
        block = self._node("Gather", [block_indices, in_tables], "step.row_block", axis=0)
        whole = self._node("Mul", [entry, block_size], "step.row_block_first")
        in_block = self._node("Sub", [row_position, whole], "step.row_offset")
        scaled = self._node("Mul", [block, self._integers("step.block_slots", size * kv_heads)], "step.row_block_slot")
        first_slot = self._node("Add", [scaled, in_block], "step.row_first_slot")
        heads = self._integers("step.head_slots", [size * head for head in range(kv_heads)], (1, kv_heads))
        by_head = self._node("Add", [self._column(first_slot), heads], "step.slots_by_head")
        self._reshape(by_head, [-1, 1], "step.slots")

    def _past_len_of_columns(self, past_lens: str, entry_sequence: str, spread: str) -> str:
        """`[1, C]`: how many positions are in the pool of the sequence that a column belongs to."""
        by_entry = self._node("Gather", [past_lens, entry_sequence], "step.entry_past_len", axis=0)
        by_block = self._node("Add", [self._column(by_entry), spread], "step.column_past_len_by_block")
        return self._reshape(by_block, [1, -1], "step.column_past_len")

    def _indices(self, value: str, name: str) -> str:
        """`0, 1, ...` as many as `value` is long."""
        shape = self._node("Shape", [value], f"{name}.shape", start=0, end=1)
        length = self._node("Squeeze", [shape], f"{name}.length")
        return self._node("Range", [self._integers("step.zero", 0), length, self._integers("step.one", 1)], name)

    def _owner(self, indices: str, begins: str, name: str) -> str:
        """Which of the ranges between `begins` each index is in: the number of ranges that end at it or before."""
        ends = self._node(
            "Slice",
            [begins, *(self._integers(f"step.{what}", [at]) for what, at in (("from", 1), ("to", _END), ("axis", 0)))],
            f"{name}.ends",
        )
        row = self._reshape(ends, [1, -1], f"{name}.ends_row")
        passed = self._node("GreaterOrEqual", [self._column(indices), row], f"{name}.passed")
        counted = self._node("Cast", [passed], f"{name}.counted", to=_INT64)
        return self._node("ReduceSum", [counted, self._integers("step.last_axis", [1])], name, keepdims=0)

    def _without_last(self, begins: str) -> str:
        name = f"{begins}.first"
        if any(node.output[0] == name for node in self.nodes):
            return name
        bounds = (("start", 0), ("stop", -1), ("axis", 0))
        return self._node("Slice", [begins, *(self._integers(f"step.{what}", [at]) for what, at in bounds)], name)

    def _sum_with_gathered(self, value: str, table: str, owner: str, name: str) -> str:
        """`value + table[owner]`."""
        gathered = self._node("Gather", [table, owner], f"{name}.base", axis=0)
        return self._node("Add", [value, gathered], name)

    def _column(self, value: str) -> str:
        name = f"{value}.column"
        if any(node.output[0] == name for node in self.nodes):
            return name
        return self._reshape(value, [-1, 1], name)

    def _reshape(self, value: str, shape: Sequence[int], name: str) -> str:
        constant = "shape." + ".".join(map(str, shape))
        return self._node("Reshape", [value, self._integers(constant, list(shape))], name)

    def _integers(self, name: str, values: int | list[int], shape: tuple[int, ...] | None = None) -> str:
        array = np.array(values, np.int64)
        self.constants[name] = numpy_helper.from_array(array if shape is None else array.reshape(shape), name)
        return name

    def _float(self, value: float) -> str:
        name = f"float.{value!r}"
        self.constants[name] = numpy_helper.from_array(np.array(value, np.float32), name)
        return name

    def _node(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name
