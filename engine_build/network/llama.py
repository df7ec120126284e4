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
from engine_build.network.collectives import Collectives
from engine_build.network.graph import GraphBuilder
from engine_build.network.linear import Linear
from engine_build.network.options import DTYPES, NetworkError, NetworkOptions
from engine_build.network.paged_attention import DOMAIN, OPERATOR
from engine_build.network.rope import RotaryEmbedding
from engine_build.network.weights import Matrix, WeightWriter
from engine_build.parallel import Rank

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

HIDDEN_STATES_INPUT = "hidden_states_input"
HIDDEN_STATES_OUTPUT = "hidden_states_output"
"""What passes between the stages of a pipeline; TensorRT-LLM's names."""

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
        self, graph: GraphBuilder, config: ModelConfig, options: NetworkOptions, weights: WeightWriter, rank: Rank
    ) -> None:
        """
        Args:
            graph: where nodes go.
            config: the model as `rank` sees it.
            options: how numbers are represented.
            weights: reads the checkpoint as `rank` sees it.
            rank: the device this network is for.
        """
        self._graph = graph
        self._config = config
        self._stored_dtype = DTYPES[options.dtype]
        self._dtype = DTYPES[options.activation_dtype]
        self._weights = weights
        self._rank = rank
        self._linear = Linear(graph, self._stored_dtype, self._dtype)
        self._collectives = Collectives(graph, rank)

    def write(self) -> None:
        """Declare inputs and output, and write everything between."""
        graph, config = self._graph, self._config
        if self._rank.is_first_stage:
            input_ids = graph.input("input_ids", _INT64, ["T"])
        else:
            hidden = graph.input(HIDDEN_STATES_INPUT, self._dtype, ["T", config.hidden_size])
        position_ids = graph.input("position_ids", _INT64, ["T"])
        step = _StepInputNames(
            graph.input("past_lens", _INT32, ["B"]),
            graph.input("subsequence_begins", _INT32, ["B + 1"]),
            graph.input("block_indices", _INT32, ["N"]),
            graph.input("block_indices_begins", _INT32, ["B + 1"]),
            graph.input("max_context_len", _INT32, []),
        )
        embedding = None
        if self._rank.is_first_stage:
            embedding = self._vocabulary_matrix("model.embed_tokens.weight", "embedding.weight")
            hidden = self._embed(embedding, input_ids)
        rope = RotaryEmbedding(graph, config, self._dtype, position_ids)
        sampled_rows = graph.input("sampled_rows", _INT64, ["S"]) if self._rank.is_last_stage else None
        last = config.num_hidden_layers - 1
        for layer in range(config.num_hidden_layers):
            hidden = self._layer(layer, hidden, rope, step, sampled_rows if layer == last else None)
        if not self._rank.is_last_stage:
            graph.node("Identity", [hidden], HIDDEN_STATES_OUTPUT)
            graph.output(HIDDEN_STATES_OUTPUT, self._dtype, ["T", config.hidden_size])
            return
        hidden = self._norm(hidden, "model.norm.weight", "final_norm")
        share = config.vocab_size // self._rank.tp_size
        logits = self._collectives.gather(self._head(hidden, embedding), share, "head.gathered")
        graph.cast(logits, _FLOAT32, "logits")
        graph.output("logits", _FLOAT32, ["S", config.vocab_size])

    def _vocabulary_matrix(self, source: str, name: str) -> Matrix:
        # OpenVINO gives a product with 8-bit weights in the type of its other side: an 8-bit head would round logits to
        # bfloat16, whose neighbours are 0.25 apart at 32, and make ties where there are none.
        shape = (self._config.vocab_size, self._config.hidden_size)
        is_head = source == "lm_head.weight" or self._config.tie_word_embeddings
        return self._weights.matrix([source], shape, name, keep_groups=not is_head, is_vocabulary=True)

    def _head(self, hidden: str, embedding: Matrix | None) -> str:
        """Products with this rank's share of the vocabulary: all of it on one device."""
        if not self._config.tie_word_embeddings:
            matrix = self._weights.matrix(
                ["lm_head.weight"],
                (self._config.vocab_size // self._rank.tp_size, self._config.hidden_size),
                "head.weight",
                keep_groups=False,
                is_vocabulary=True,
            )
        elif embedding is not None:
            matrix = embedding
        else:
            matrix = self._vocabulary_matrix("model.embed_tokens.weight", "head.weight")
        is_share = self._config.tie_word_embeddings and self._rank.tp_size > 1
        return self._linear.product(hidden, self._share_of_rows(matrix) if is_share else matrix, "head")

    def _embed(self, embedding: Matrix, input_ids: str) -> str:
        graph = self._graph
        if embedding.scales is None:
            rows = graph.node("Gather", [embedding.values, input_ids], "embedding.rows")
            return self._linear.to_activation_dtype(rows, "embedding")
        values = graph.node("Gather", [embedding.values, input_ids], "embedding.values_of_rows")
        scales = graph.node("Gather", [embedding.scales, input_ids], "embedding.scales_of_rows")
        return self._linear.unpack_groups(values, scales, self._config.hidden_size, "embedding")

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
            is_partial_sum=True,
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
        return self._projection(
            product, [f"{source}.mlp.down_proj"], (hidden_size, size), f"{name}.mlp.down", is_partial_sum=True
        )

    def _norm(self, value: str, source_name: str, name: str) -> str:
        scale = self._weights.vector([source_name], self._config.hidden_size, f"{name}.weight")
        return self._graph.node(
            "RMSNormalization", [value, scale], name, axis=-1, epsilon=self._config.norm_epsilon, stash_type=1
        )

    def _projection(
        self,
        value: str,
        sources: list[str],
        shape: tuple[int, int],
        name: str,
        *,
        has_bias: bool = False,
        is_partial_sum: bool = False,
    ) -> str:
        """A linear layer made of one or more of the checkpoint's; a partial sum is added up over the devices."""
        matrix = self._weights.matrix([f"{source}.weight" for source in sources], shape, f"{name}.weight")
        reduces = is_partial_sum and self._rank.tp_size > 1
        product = self._linear.product(value, matrix, f"{name}.product" if has_bias or reduces else name)
        if reduces:
            product = self._collectives.add_up(product, f"{name}.sum" if has_bias else name)
        if not has_bias:
            return product
        bias = self._weights.vector([f"{source}.bias" for source in sources], shape[0], f"{name}.bias")
        return self._graph.node("Add", [product, bias], name)

    def _share_of_rows(self, matrix: Matrix) -> Matrix:
        """This rank's part of a matrix that it holds whole, for the product that is shared."""
        rows = matrix.shape[0] // self._rank.tp_size
        first = self._rank.tp_rank * rows
        bounds = [
            self._graph.integers(f"{matrix.name}.share.{what}", [at])
            for what, at in (("start", first), ("end", first + rows), ("axis", 0))
        ]
        values = self._graph.node("Slice", [matrix.values, *bounds], f"{matrix.name}.share")
        return Matrix(f"{matrix.name}.share", (rows, matrix.shape[1]), values, None)
