"""Matrix products with dense or quantized weights, as nodes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from engine_build.network.graph import GraphBuilder
from engine_build.network.weights import Matrix

_SMALLEST_ROW = 2.0**-14
"""What the largest element of a row of zeros counts as, lest it be divided by zero: smallest normal float16."""


class Linear:
    """Writes products `value @ matrix.T`, and what turns stored numbers into the activations' type."""

    def __init__(
        self, graph: GraphBuilder, stored_dtype: np.dtype[np.generic], activation_dtype: np.dtype[np.generic]
    ) -> None:
        self._graph = graph
        self._stored_dtype = stored_dtype
        self._dtype = activation_dtype

    def product(self, value: str, matrix: Matrix, name: str) -> str:
        """`value @ matrix.T`. The matrix stays `[out, in]`, as engines want it; they fold the transposition."""
        if matrix.format is None:
            return self._transposed_product(value, self._dense(matrix, f"{name}.weight_dense"), name)
        weights = self._graph.node(
            "DequantizeLinear",
            [matrix.values, str(matrix.scales)],
            f"{name}.weight_dense",
            axis=1 if matrix.block_size else 0,
            block_size=matrix.block_size,
        )
        if not matrix.format.quantizes_activations:
            return self._transposed_product(value, weights, name)
        # (x / m) @ W.T * m = x @ W.T for a factor m of each row: the quantization itself takes one constant factor,
        # which is all that TensorRT accepts, and still every row fills the format's range.
        largest = self._largest_of_rows(value, f"{name}.row")
        scaled = self._graph.node("Div", [value, largest], f"{name}.scaled")
        rounded = self._rounded(scaled, matrix, f"{name}.rounded")
        product = self._transposed_product(rounded, weights, f"{name}.scaled_product")
        return self._graph.node("Mul", [product, largest], name)

    def to_activation_dtype(self, value: str, name: str) -> str:
        """Of weights stored in the network's dtype."""
        return value if self._stored_dtype == self._dtype else self._graph.cast(value, self._dtype, name)

    def unpack_groups(self, values: str, scales: str, columns: int, name: str) -> str:
        """`[rows, groups, 32]` times `[rows, groups, 1]`, as `[rows, columns]` of activations."""
        graph = self._graph
        scaled = graph.node(
            "Mul",
            [
                graph.cast(values, self._dtype, f"{name}.values"),
                graph.cast(scales, self._dtype, f"{name}.scales"),
            ],
            f"{name}.scaled",
        )
        return graph.reshape(scaled, [-1, columns], name)

    def _dense(self, matrix: Matrix, name: str) -> str:
        if matrix.scales is None:
            return self.to_activation_dtype(matrix.values, name)
        return self.unpack_groups(matrix.values, matrix.scales, matrix.shape[1], name)

    def _transposed_product(self, value: str, dense: str, name: str) -> str:
        transposed = self._graph.node("Transpose", [dense], f"{name}.weight_transposed", perm=[1, 0])
        return self._graph.node("MatMul", [value, transposed], name)

    def _largest_of_rows(self, value: str, name: str) -> str:
        """`[T, 1]`, the largest magnitude in each row."""
        graph = self._graph
        magnitudes = graph.node("Abs", [value], f"{name}.magnitudes")
        largest = graph.node(
            "ReduceMax", [magnitudes, graph.integers("linear.last_axis", [-1])], f"{name}.largest", keepdims=1
        )
        smallest = graph.scalar("linear.smallest_row", _SMALLEST_ROW, self._dtype)
        return graph.node("Max", [largest, smallest], f"{name}.divisor")

    def _rounded(self, scaled: str, matrix: Matrix, name: str) -> str:
        """To the matrix' format and back: elements in [-1, 1] as multiples of `1 / largest`."""
        graph, format_ = self._graph, matrix.format
        assert format_ is not None  # the caller has seen that there is one
        factor = graph.scalar(f"linear.{format_.name}_factor", 1.0 / format_.largest, self._dtype)
        quantized = graph.node(
            "QuantizeLinear", [scaled, factor], f"{name}.values", output_dtype=TensorProto.FLOAT8E4M3FN
        )
        return graph.node("DequantizeLinear", [quantized, factor], name)
