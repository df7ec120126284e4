"""Which weights a model of the Llama family has, and what a checkpoint's own list must look like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine_build.checkpoint.interface import CheckpointError
from engine_build.checkpoint.model_config import ModelConfig

Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Hugging Face name -> shape of every weight the network needs. Linear weights are `[out, in]`."""
    return dict(_weights(config))


def _weights(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    query = config.num_attention_heads * config.head_size
    key_value = config.num_key_value_heads * config.head_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        projections = {
            "q_proj": (query, hidden),
            "k_proj": (key_value, hidden),
            "v_proj": (key_value, hidden),
            "o_proj": (hidden, query),
        }
        for name, shape in projections.items():
            yield f"{prefix}.self_attn.{name}.weight", shape
            if config.attention_bias:
                yield f"{prefix}.self_attn.{name}.bias", (shape[0],)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (config.intermediate_size, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (config.intermediate_size, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, config.intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def check_weights(config: ModelConfig, found: Mapping[str, Shape], source: str) -> None:
    """Compare the weights a checkpoint has with those its configuration calls for.

    A weight that the network has no place for is an error too: leaving it out would give another model's answers.

    Raises:
        CheckpointError: a weight is missing, has another shape, or is not part of the architecture.
    """
    if config.num_hidden_layers > len(found):  # before so many are listed
        raise CheckpointError(f"{source}: num_hidden_layers is {config.num_hidden_layers}, with {len(found)} weights")
    expected = weight_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"{source}: {_listed('missing weight', missing)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{source}: weight {name} has shape {list(found[name])}, its configuration calls for {list(shape)}"
            )
    unknown = sorted(name for name in found if name not in expected)
    if unknown:
        raise CheckpointError(f"{source}: {_listed(f'{config.architecture} has no weight', unknown)}")


def _listed(what: str, names: list[str]) -> str:
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{what} {names[0]}{rest}"
