"""`config.json` and `generation_config.json` of a Hugging Face directory -> `ModelConfig`.

Both spellings in use are read: `rope_theta` with `rope_scaling`, and the one `rope_parameters` of transformers 5.
"""

from __future__ import annotations

from pathlib import Path

from engine_build.checkpoint.interface import CheckpointError
from engine_build.checkpoint.json_file import JsonObject
from engine_build.checkpoint.model_config import ModelConfig, RopeScaling

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def read_model_config(directory: Path, dtype: str) -> ModelConfig:
    """Read the configuration.

    Args:
        directory: holds `config.json`, and `generation_config.json` where there is one.
        dtype: what the weights are stored in; the configuration's own word is not needed.

    Raises:
        CheckpointError: a file is missing or malformed, the architecture unknown, or a feature unsupported.
    """
    config = JsonObject.read(directory / "config.json")
    architecture = _architecture(config)
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size")
    num_attention_heads = config.integer("num_attention_heads")
    if num_attention_heads <= 0:
        raise CheckpointError(f"{config.source}: num_attention_heads is {num_attention_heads}, it must be positive")
    generation = directory / "generation_config.json"
    tokens = JsonObject.read(generation) if generation.exists() else config
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_hidden_layers=config.integer("num_hidden_layers"),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=config.integer("num_key_value_heads", num_attention_heads),
        head_size=config.integer("head_dim", hidden_size // num_attention_heads),
        norm_epsilon=config.number("rms_norm_eps"),
        rope_theta=_rope_theta(config),
        rope_scaling=_rope_scaling(config),
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        sliding_window=config.optional_integer("sliding_window"),
        attention_bias=config.boolean("attention_bias", False),
        dtype=dtype,
        bos_token_id=tokens.optional_integer("bos_token_id"),
        eos_token_ids=tokens.integers("eos_token_id") or config.integers("eos_token_id"),
        pad_token_id=tokens.optional_integer("pad_token_id"),
    )


def _architecture(config: JsonObject) -> str:
    named = config.fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        shown = f"architectures {named}" if named is not None else "no 'architectures'"
        raise CheckpointError(f"{config.source} names {shown}; supported are {', '.join(ARCHITECTURES)}")
    return str(named[0])


def _refuse_unsupported(config: JsonObject) -> None:
    if config.string("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{config.source}: hidden_act {config.string('hidden_act')!r}, only 'silu' is supported")
    if config.boolean("mlp_bias", False):
        raise CheckpointError(f"{config.source}: mlp_bias is true, only false is supported")
    if "quantization_config" in config:
        method = config.object("quantization_config").string("quant_method", "unnamed")
        raise CheckpointError(
            f"{config.source}: weights quantized by {method!r} are not supported; "
            "give the float checkpoint and --weight_dtype, or a GGUF file"
        )


def _rope_theta(config: JsonObject) -> float:
    parameters = config.object("rope_parameters")
    return parameters.number("rope_theta", config.number("rope_theta", 10_000.0))


def _rope_scaling(config: JsonObject) -> RopeScaling | None:
    rope = config.object("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        scaling = RopeScaling(kind="linear", factor=rope.number("factor"))
    elif kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
    else:
        raise CheckpointError(
            f"{rope.source}: rotary scaling {kind!r} is not supported; supported are 'default', 'linear' and 'llama3'"
        )
    if scaling.factor <= 0 or scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"{rope.source}: factor {scaling.factor} must be positive and high_freq_factor "
            f"{scaling.high_freq_factor} above low_freq_factor {scaling.low_freq_factor}"
        )
    return scaling
