"""`PagedAttention` as standard ONNX operators: for targets that take no operator of ours.

```
rows       | a a a | b | c c |         every row has a sequence and a position in it
columns    | block a0 | block a1 | block b0 | block c0 | ...      tokens_per_block columns for each entry of the tables
mask         row sees column  <=>  same sequence, and column's position <= row's, and within the window
```

New keys and values are scattered into the pool, all blocks that the step's tables name are gathered from it, and every
row attends to all of these columns under a mask that leaves it its own. Sequences need not be padded to one length, and
the mask and every index are computed once for all layers. What it costs: scores with the columns of other sequences,
which are masked.

The pools come out of the graph as `key_cache_{i}_out` and `value_cache_{i}_out`. The graph itself is pure: whoever runs
it may bind an output to its input's address, or to another buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from engine_build.network.paged_attention import DOMAIN, OPERATOR

_INT64 = onnx.TensorProto.INT64
_END = int(np.iinfo(np.int64).max)
"""Behind the last element, in a slice."""


def cache_output(name: str) -> str:
    """The output that holds the pool `name` after the step."""
    return f"{name}_out"


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
    lowering = _Lowering(tokens_per_block)
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
    for value in list(graph.input):
        if value.name in lowering.caches:
            value.type.tensor_type.shape.dim[2].dim_value = tokens_per_block
            output = graph.output.add()
            output.CopyFrom(value)
            output.name = cache_output(value.name)
    if not any(node.domain == DOMAIN for node in graph.node):
        kept = [opset for opset in lowered.opset_import if opset.domain != DOMAIN]
        del lowered.opset_import[:]
        lowered.opset_import.extend(kept)
    return lowered


class _Lowering:
    """Nodes and constants that come instead. Values are known by name, as in `GraphBuilder`."""

    def __init__(self, tokens_per_block: int) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.caches: set[str] = set()
        self.bounds: set[str] = set()
        """Inputs that bound workspaces of other targets; nothing here needs them."""
        self._tokens_per_block = tokens_per_block
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
            self._updated_context(f"{name}.{kind}", new, cache, kv_heads, size)
            for kind, new, cache in (("keys", key, key_cache), ("values", value, value_cache))
        ]
        queries = self._reshape(query, [1, -1, heads, size], f"{name}.queries_by_row")
        queries = self._node("Transpose", [queries], f"{name}.queries", perm=[0, 2, 1, 3])
        attended = self._node(
            "Attention", [queries, *contexts, "step.mask"], f"{name}.by_head", scale=settings["scale"]
        )
        by_row = self._node("Transpose", [attended], f"{name}.by_row", perm=[0, 2, 1, 3])
        self._reshape(by_row, [-1, heads * size], name)

    def _updated_context(self, name: str, new: str, cache: str, kv_heads: int, size: int) -> str:
        """Scatter `new` `[T, kv_heads * size]` into the pool; give the tables' blocks as `[1, kv_heads, C, size]`."""
        self.caches.add(cache)
        slots = self._reshape(cache, [-1, size], f"{name}.slots")
        rows = self._reshape(new, [-1, size], f"{name}.rows")
        updated = self._node("ScatterND", [slots, "step.slots", rows], f"{name}.updated")
        pool = self._reshape(updated, [-1, kv_heads, self._tokens_per_block, size], cache_output(cache))
        blocks = self._node("Gather", [pool, "step.block_indices"], f"{name}.blocks", axis=0)
        by_head = self._node("Transpose", [blocks], f"{name}.blocks_by_head", perm=[1, 0, 2, 3])
        return self._reshape(by_head, [1, kv_heads, -1, size], f"{name}.context")

    def _step_values(self, key: str, step: Sequence[str], kv_heads: int, sliding_window: int) -> None:
        """`step.mask` bool `[T, C]`, `step.slots` int64 `[T * kv_heads, 1]`, `step.block_indices` int64 `[N]`."""
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

        row_position_column = self._column(row_position)
        same = self._node("Equal", [self._column(row_sequence), column_sequence], "step.same_sequence")
        causal = self._node("LessOrEqual", [column_position, row_position_column], "step.not_later")
        mask = self._node("And", [same, causal], "step.mask" if not sliding_window else "step.mask_without_window")
        if sliding_window:
            window = self._integers("step.window", sliding_window)
            last_hidden = self._node("Sub", [row_position_column, window], "step.last_hidden")
            near = self._node("Greater", [column_position, last_hidden], "step.in_window")
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

    def _node(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name
