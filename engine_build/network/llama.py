"""The Llama family over packed rows, as nodes of one graph.

```
input_ids ─ embedding ─┬─ norm ─ qkv ─ rope ─ PagedAttention ─ out ─ + ─┬─ norm ─ gate_up ─ silu·mul ─ down ─ + ─ ...
                       └─────────────────────────────────────────────┘  └─────────────────────────────────────┘
   ... last layer: only sampled rows go on behind PagedAttention ─ ... ─ norm ─ head ─ logits [S, vocab_size]
```

`T` rows of `B` sequences are packed without padding; `S` of them are sampled. Behind the last layer's attention a
row's way no longer crosses other rows, so only sampled rows go on from there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.network.graph import GraphBuilder
from engine_build.network.options import DTYPES, NetworkError, NetworkOptions
from engine_build.network.paged_attention import DOMAIN, OPERATOR
from engine_build.network.rope import RotaryEmbedding
from engine_build.network.weights import Matrix, WeightWriter

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


class _StepInputNames(NamedTuple):
    """What `PagedAttention` takes after its caches, in the operator's order."""

    past_lens: str
    subsequence_begins: str
    block_indices: str
    block_indices_begins: str
    max_context_len: str


def check_config(config: ModelConfig) -> None:
    """Raise `NetworkError` if a network of this configuration cannot be written."""
    if config.architecture not in SUPPORTED_ARCHITECTURES:
        raise NetworkError(
            f"architecture {config.architecture} is not supported; expected one of {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise NetworkError(
            f"{config.num_attention_heads} attention heads cannot share {config.num_key_value_heads} key/value heads "
            "evenly"
        )
    if config.head_size % 2:
        raise NetworkError(f"head_size {config.head_size} is odd; a rotary embedding turns pairs of elements")


class LlamaNetwork:
    """Writes the nodes and weights of one network into a graph."""

    def __init__(
        self, graph: GraphBuilder, config: ModelConfig, options: NetworkOptions, weights: WeightWriter
    ) -> None:
        self._graph = graph
        self._config = config
        self._stored_dtype = DTYPES[options.dtype]
        self._dtype = DTYPES[options.activation_dtype]
        self._weights = weights

    def write(self) -> None:
        """Declare inputs and output, and write everything between."""
        graph, config = self._graph, self._config
        input_ids = graph.input("input_ids", _INT64, ["T"])
        position_ids = graph.input("position_ids", _INT64, ["T"])
        step = _StepInputNames(
            graph.input("past_lens", _INT32, ["B"]),
            graph.input("subsequence_begins", _INT32, ["B + 1"]),
            graph.input("block_indices", _INT32, ["N"]),
            graph.input("block_indices_begins", _INT32, ["B + 1"]),
            graph.input("max_context_len", _INT32, []),
        )
        sampled_rows = graph.input("sampled_rows", _INT64, ["S"])

        vocabulary = (config.vocab_size, config.hidden_size)
        # OpenVINO gives a product with 8-bit weights in the type of its other side: an 8-bit head would round logits to
        # bfloat16, whose neighbours are 0.25 apart at 32, and make ties where there are none.
        embedding = self._weights.matrix(
            ["model.embed_tokens.weight"], vocabulary, "embedding.weight", keep_groups=not config.tie_word_embeddings
        )
        hidden = self._embed(embedding, input_ids)
        rope = RotaryEmbedding(graph, config, self._dtype, position_ids)
        for layer in range(config.num_hidden_layers):
            is_last = layer == config.num_hidden_layers - 1
            hidden = self._layer(layer, hidden, rope, step, sampled_rows if is_last else None)
        hidden = self._norm(hidden, "model.norm.weight", "final_norm")
        if config.tie_word_embeddings:
            head = embedding
        else:
            head = self._weights.matrix(["lm_head.weight"], vocabulary, "head.weight", keep_groups=False)
        graph.cast(self._linear(hidden, head, "head"), _FLOAT32, "logits")
        graph.output("logits", _FLOAT32, ["S", config.vocab_size])

    def _embed(self, embedding: Matrix, input_ids: str) -> str:
        graph = self._graph
        if embedding.scales is None:
            rows = graph.node("Gather", [embedding.values, input_ids], "embedding.rows")
            return self._to_activation_dtype(rows, "embedding")
        values = graph.node("Gather", [embedding.values, input_ids], "embedding.values_of_rows")
        scales = graph.node("Gather", [embedding.scales, input_ids], "embedding.scales_of_rows")
        return self._dequantize(values, scales, self._config.hidden_size, "embedding")

    def _layer(
        self, layer: int, hidden: str, rope: RotaryEmbedding, step: _StepInputNames, sampled_rows: str | None
    ) -> str:
        graph = self._graph
        source, name = f"model.layers.{layer}", f"layers.{layer}"
        normed = self._norm(hidden, f"{source}.input_layernorm.weight", f"{name}.attention.norm")
        attended = self._attention(layer, normed, rope, step)
        if sampled_rows is not None:
            attended = graph.node("Gather", [attended, sampled_rows], f"{name}.attention.sampled")
            hidden = graph.node("Gather", [hidden, sampled_rows], f"{name}.sampled")
        projected = self._projection(
            attended,
            [f"{source}.self_attn.o_proj"],
            (self._config.hidden_size, self._config.num_attention_heads * self._config.head_size),
            f"{name}.attention.out",
            has_bias=self._config.attention_bias,
        )
        hidden = graph.node("Add", [hidden, projected], f"{name}.attention.residual")
        normed = self._norm(hidden, f"{source}.post_attention_layernorm.weight", f"{name}.mlp.norm")
        return graph.node("Add", [hidden, self._mlp(source, name, normed)], f"{name}.mlp.residual")

    def _attention(self, layer: int, normed: str, rope: RotaryEmbedding, step: _StepInputNames) -> str:
        graph, config = self._graph, self._config
        source, name = f"model.layers.{layer}.self_attn", f"layers.{layer}.attention"
        query_size = config.num_attention_heads * config.head_size
        key_size = config.num_key_value_heads * config.head_size
        fused = self._projection(
            normed,
            [f"{source}.q_proj", f"{source}.k_proj", f"{source}.v_proj"],
            (query_size + 2 * key_size, config.hidden_size),
            f"{name}.qkv",
            has_bias=config.attention_bias,
        )
        query, key, value = graph.split(
            fused, [query_size, key_size, key_size], [f"{name}.{part}" for part in ("query", "key", "value")]
        )
        cache_shape: list[int | str] = ["num_blocks", config.num_key_value_heads, "tokens_per_block", config.head_size]
        caches = [graph.input(f"{kind}_cache_{layer}", self._stored_dtype, cache_shape) for kind in ("key", "value")]
        return graph.node(
            OPERATOR,
            [
                rope.rotate(query, config.num_attention_heads, f"{name}.query_rotated"),
                rope.rotate(key, config.num_key_value_heads, f"{name}.key_rotated"),
                value,
                *caches,
                *step,
            ],
            name,
            domain=DOMAIN,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
            sliding_window=config.sliding_window or 0,
        )

    def _mlp(self, source: str, name: str, normed: str) -> str:
        graph, hidden_size, size = self._graph, self._config.hidden_size, self._config.intermediate_size
        fused = self._projection(
            normed,
            [f"{source}.mlp.gate_proj", f"{source}.mlp.up_proj"],
            (2 * size, hidden_size),
            f"{name}.mlp.gate_up",
        )
        gate, up = graph.split(fused, [size, size], [f"{name}.mlp.gate", f"{name}.mlp.up"])
        sigmoid = graph.node("Sigmoid", [gate], f"{name}.mlp.sigmoid")
        activated = graph.node("Mul", [gate, sigmoid], f"{name}.mlp.silu")
        product = graph.node("Mul", [activated, up], f"{name}.mlp.product")
        return self._projection(product, [f"{source}.mlp.down_proj"], (hidden_size, size), f"{name}.mlp.down")

    def _norm(self, value: str, source_name: str, name: str) -> str:
        scale = self._weights.vector([source_name], self._config.hidden_size, f"{name}.weight")
        return self._graph.node(
            "RMSNormalization", [value, scale], name, axis=-1, epsilon=self._config.norm_epsilon, stash_type=1
        )

    def _projection(
        self, value: str, sources: list[str], shape: tuple[int, int], name: str, *, has_bias: bool = False
    ) -> str:
        """A linear layer made of one or more of the checkpoint's."""
        matrix = self._weights.matrix([f"{source}.weight" for source in sources], shape, f"{name}.weight")
        if not has_bias:
            return self._linear(value, matrix, name)
        product = self._linear(value, matrix, f"{name}.product")
        return self._graph.node(
            "Add",
            [product, self._weights.vector([f"{source}.bias" for source in sources], shape[0], f"{name}.bias")],
            name,
        )

    def _linear(self, value: str, matrix: Matrix, name: str) -> str:
        """`value @ matrix.T`. The matrix stays `[out, in]`, as engines want it; they fold the transposition."""
        graph = self._graph
        if matrix.scales is None:
            dense = self._to_activation_dtype(matrix.values, f"{name}.weight_dense")
        else:
            dense = self._dequantize(matrix.values, matrix.scales, matrix.shape[1], f"{name}.weight_dense")
        transposed = graph.node("Transpose", [dense], f"{name}.weight_transposed", perm=[1, 0])
        return graph.node("MatMul", [value, transposed], name)

    def _to_activation_dtype(self, value: str, name: str) -> str:
        return value if self._stored_dtype == self._dtype else self._graph.cast(value, self._dtype, name)

    def _dequantize(self, values: str, scales: str, columns: int, name: str) -> str:
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
