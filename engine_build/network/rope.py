"""Rotary position embedding: the frequencies, and the nodes that rotate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_build.checkpoint.model_config import ModelConfig, RopeScaling
from engine_build.network.graph import GraphBuilder
from engine_build.network.options import NetworkError


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """`[head_size / 2]` radians per position of each pair of elements, scaling applied.

    Source: the rotary embedding of RoFormer (arXiv 2104.09864) and its scaling in Llama 3.1.
    """
    exponents = np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        scaled = frequencies
    elif scaling.kind == "linear":
        scaled = frequencies / scaling.factor
    elif scaling.kind == "llama3":
        scaled = _llama3(frequencies, scaling)
    else:
        raise NetworkError(f"rope scaling {scaling.kind!r} is not supported; expected linear or llama3")
    return scaled.astype(np.float32)


def _llama3(frequencies: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended by how often they turn."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


class RotaryEmbedding:
    """The nodes that rotate query and key heads; angles are computed once for all layers.

    The rotation is spelled `x * cos + rotate_half(x) * sin` on `[T, heads, 1, head_size]`, with cos and sin
    `[T, 1, 1, head_size]`: the form in which OpenVINO recognises a rotary embedding and makes one operator of it.
    """

    def __init__(
        self, graph: GraphBuilder, config: ModelConfig, dtype: np.dtype[np.generic], position_ids: str
    ) -> None:
        self._graph = graph
        self._head_size = config.head_size
        float32 = np.dtype(np.float32)
        frequencies = inverse_frequencies(config)
        table = graph.weight("rope.frequencies", float32, [1, 1, 1, len(frequencies)], [frequencies])
        positions = graph.cast(
            graph.reshape(position_ids, [-1, 1, 1, 1], "rope.positions"), float32, "rope.positions_float"
        )
        half = graph.node("Mul", [positions, table], "rope.half_angles")
        angles = graph.node("Concat", [half, half], "rope.angles", axis=-1)
        self._cos = graph.cast(graph.node("Cos", [angles], "rope.cos_float"), dtype, "rope.cos")
        self._sin = graph.cast(graph.node("Sin", [angles], "rope.sin_float"), dtype, "rope.sin")
        self._axis = graph.integers("rope.axis", [3])
        self._zero = graph.integers("rope.zero", [0])
        self._middle = graph.integers("rope.middle", [self._head_size // 2])
        self._end = graph.integers("rope.end", [self._head_size])

    def rotate(self, value: str, num_heads: int, name: str) -> str:
        """Rotate `[T, num_heads * head_size]`."""
        graph = self._graph
        heads = graph.reshape(value, [-1, num_heads, 1, self._head_size], f"{name}.heads")
        first = graph.node("Slice", [heads, self._zero, self._middle, self._axis], f"{name}.first_half")
        second = graph.node("Slice", [heads, self._middle, self._end, self._axis], f"{name}.second_half")
        negated = graph.node("Neg", [second], f"{name}.negated")
        swapped = graph.node("Concat", [negated, first], f"{name}.swapped", axis=-1)
        straight = graph.node("Mul", [heads, self._cos], f"{name}.straight")
        crossed = graph.node("Mul", [swapped, self._sin], f"{name}.crossed")
        rotated = graph.node("Add", [straight, crossed], f"{name}.rotated")
        return graph.reshape(rotated, [-1, num_heads * self._head_size], name)
