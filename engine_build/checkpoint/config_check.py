"""What every configuration must satisfy, whichever format it was read from."""

from __future__ import annotations

import math

from engine_build.checkpoint.interface import CheckpointError
from engine_build.checkpoint.model_config import ModelConfig


def check_config(config: ModelConfig, source: str) -> None:
    """Refuse sizes that describe no transformer.

    Raises:
        CheckpointError: names the field and its value.
    """
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_size": config.head_size,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.norm_epsilon,
        "rope_theta": config.rope_theta,
    }
    if config.sliding_window is not None:
        sizes["sliding_window"] = config.sliding_window
    if config.rope_scaling is not None:
        sizes["rope scaling factor"] = config.rope_scaling.factor
    for name, value in sizes.items():
        if not 0 < value < math.inf:
            raise CheckpointError(f"{source}: {name} is {value}, it must be positive and finite")
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.head_size % 2:
        raise CheckpointError(f"{source}: head_size {config.head_size} is odd; rotary position embedding needs pairs")
    named = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    named |= {f"eos_token_ids[{index}]": id_ for index, id_ in enumerate(config.eos_token_ids)}
    for name, id_ in named.items():
        if id_ is not None and not 0 <= id_ < config.vocab_size:
            raise CheckpointError(f"{source}: {name} is {id_}, outside the vocabulary of {config.vocab_size}")
