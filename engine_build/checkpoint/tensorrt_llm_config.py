"""`config.json` of a TensorRT-LLM checkpoint -> `ModelConfig`, and how its ranks share the model."""

from __future__ import annotations

from dataclasses import dataclass

from engine_build.checkpoint.interface import CheckpointError
from engine_build.checkpoint.json_file import JsonObject
from engine_build.checkpoint.model_config import ModelConfig, RopeScaling

ARCHITECTURES = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "MistralForCausalLM",
}
"""As TensorRT-LLM has spelled them -> Hugging Face's class."""

FP8_ALGORITHM = "FP8"
_REORDERED = "its integers are stored in the order that kernels of one GPU generation read, and nothing says of which"


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks share the weights."""

    tp_size: int
    pp_size: int
    embedding_axis: int | None
    """Along which the embedding is divided; `None` where every rank has it whole."""

    @classmethod
    def read(cls, config: JsonObject) -> Layout:
        mapping = config.object("mapping")
        tp_size, pp_size = mapping.integer("tp_size", 1), mapping.integer("pp_size", 1)
        if tp_size < 1 or pp_size < 1 or mapping.integer("world_size", tp_size * pp_size) != tp_size * pp_size:
            raise CheckpointError(
                f"{mapping.source}: world_size {mapping.integer('world_size', 1)} is not tp_size {tp_size} x "
                f"pp_size {pp_size}"
            )
        divided = config.boolean("use_parallel_embedding", False) and tp_size > 1
        return cls(tp_size, pp_size, config.integer("embedding_sharding_dim", 0) if divided else None)

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    def stage_of(self, layer: int, num_layers: int) -> tuple[int, int]:
        """The stage that has a layer, and its number there; earlier stages have one more where it does not come out."""
        base, more = divmod(num_layers, self.pp_size)
        for stage in range(self.pp_size):
            size = base + (stage < more)
            if layer < size:
                return stage, layer
            layer -= size
        raise ValueError(f"layer {layer} is beyond the model's {num_layers}")


def read_config(config: JsonObject, dtype: str, tie_word_embeddings: bool, attention_bias: bool) -> ModelConfig:
    """The model's configuration.

    Args:
        config: the file.
        dtype: what the weights are stored in.
        tie_word_embeddings: whether there is no head of its own.
        attention_bias: whether there are biases at q, k and v.

    Raises:
        CheckpointError: a field is missing or malformed, or a feature unsupported.
    """
    architecture = config.string("architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{config.source}: architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(config)
    heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    if heads <= 0:
        raise CheckpointError(f"{config.source}: num_attention_heads is {heads}, it must be positive")
    return ModelConfig(
        architecture=ARCHITECTURES[architecture],
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_hidden_layers=config.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=config.integer("num_key_value_heads", heads),
        head_size=config.integer("head_size", hidden_size // heads),
        norm_epsilon=config.number("norm_epsilon", 1e-5),
        rope_theta=config.number("rotary_base", 10_000.0),
        rope_scaling=_rope_scaling(config),
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=tie_word_embeddings,
        attention_bias=attention_bias,
        dtype=dtype,
    )


def quantization(config: JsonObject) -> str | None:
    """How weights are quantized, as TensorRT-LLM names it. The KV cache's type is chosen at build or run time."""
    section = config.object("quantization")
    return section.string("quant_algo") if "quant_algo" in section else None


def _refuse_unsupported(config: JsonObject) -> None:
    expected = {"hidden_act": ("silu", "swiglu"), "position_embedding_type": ("rope_gpt_neox",)}
    for name, supported in expected.items():
        value = config.string(name, supported[0])
        if value not in supported:
            raise CheckpointError(
                f"{config.source}: {name} {value!r} is not supported; supported is {' or '.join(supported)}"
            )
    algorithm = quantization(config)
    if algorithm not in (None, FP8_ALGORITHM):
        why = f": {_REORDERED}" if algorithm in ("W8A16", "W4A16") else ""
        raise CheckpointError(
            f"{config.source}: quant_algo {algorithm!r} is not read{why}; give the float checkpoint and --weight_dtype"
        )
    for flag in ("mlp_bias", "residual_mlp"):
        if config.boolean(flag, False):
            raise CheckpointError(f"{config.source}: {flag} is true, only false is supported")


def _rope_scaling(config: JsonObject) -> RopeScaling | None:
    scaling = config.object("rotary_scaling")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind in ("default", "none"):
        return None
    if kind == "linear":
        return RopeScaling("linear", scaling.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            scaling.number("factor", 8.0),
            scaling.number("low_freq_factor", 1.0),
            scaling.number("high_freq_factor", 4.0),
            scaling.integer("original_max_position_embeddings", 8192),
        )
    raise CheckpointError(f"{scaling.source}: rotary scaling {kind!r} is not supported; supported: linear, llama3")
