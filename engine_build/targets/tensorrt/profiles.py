"""Optimization profiles: the range of every input's sizes, and the sizes that kernels are chosen for.

```
profile      rows T                                 chosen when
generation   1 .. max_batch_size                    a step has that few rows: every sequence generates
mixed        1 .. max_num_tokens                    a step has prompt tokens in it
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine_build.checkpoint.model_config import ModelConfig
from engine_build.manifest import BuildConfig
from engine_build.targets.interface import TargetError

MAX_ELEMENTS = (1 << 31) - 1
"""Of one tensor in TensorRT."""
_TYPICAL_SHARE = 4
"""Kernels are chosen for contexts of a quarter of the longest."""


class SizeRange(NamedTuple):
    """What a dimension may be, and what it typically is."""

    smallest: int
    typical: int
    largest: int


def profile_ranges(
    build_config: BuildConfig, model: ModelConfig, *, is_attention_native: bool
) -> list[dict[str, SizeRange]]:
    """For each profile, the range of every dimension by its name in the network.

    Args:
        build_config: what the plan is for.
        model: the whole model.
        is_attention_native: whether attention is TensorRT's own layers. Then every row has a mask over all columns of
            the step, and TensorRT reserves memory for the largest pool in each layer: the pool ends at the blocks of a
            full batch at full length, and one for padding. Plugins have no mask and write into pools of any size.

    Raises:
        TargetError: a tensor would have more elements than TensorRT can count.
    """
    batch = build_config.max_batch_size
    entries = batch * -(-build_config.max_seq_len // build_config.tokens_per_block)
    block_elements = model.num_key_value_heads * build_config.tokens_per_block * model.head_size
    most_blocks = MAX_ELEMENTS // block_elements
    if is_attention_native:
        _check_native(build_config, entries, most_blocks)
        most_blocks = entries + 1
    typical_entries = max(1, entries // _TYPICAL_SHARE)
    shared = {
        "B": SizeRange(1, max(1, batch // 2), batch),
        "B + 1": SizeRange(2, max(1, batch // 2) + 1, batch + 1),
        "N": SizeRange(1, typical_entries, entries),
        "num_blocks": SizeRange(1, min(entries, most_blocks), most_blocks),
    }
    row_budgets = sorted({batch, build_config.max_num_tokens})
    return [shared | {"T": SizeRange(1, rows, rows), "S": SizeRange(1, min(batch, rows), rows)} for rows in row_budgets]


def _check_native(build_config: BuildConfig, entries: int, most_blocks: int) -> None:
    """Raises `TargetError` when the mask or a pool would have more elements than TensorRT can count."""
    limits = f"max_batch_size {build_config.max_batch_size} x max_seq_len {build_config.max_seq_len}"
    if build_config.max_num_tokens * entries * build_config.tokens_per_block > MAX_ELEMENTS:
        raise TargetError(
            f"max_num_tokens {build_config.max_num_tokens} x {limits} is more than the 2^31 - 1 elements of a tensor: "
            "lower one of them"
        )
    if entries + 1 > most_blocks:
        raise TargetError(
            f"the {entries} KV blocks of {limits} make a pool of more than the 2^31 - 1 elements of a tensor: "
            "lower one of them"
        )


def add_profiles(
    builder: Any, config: Any, shapes: Mapping[str, Sequence[int | str]], ranges: Sequence[Mapping[str, SizeRange]]
) -> None:
    """Add a profile for each of `ranges` to an `IBuilderConfig`.

    Args:
        builder: an `IBuilder`.
        config: its `IBuilderConfig`.
        shapes: input name -> shape; a string is the name of a dimension in `ranges`.
        ranges: what `profile_ranges` gave.

    Raises:
        TargetError: TensorRT refuses a profile.
    """
    for sizes in ranges:
        profile = builder.create_optimization_profile()
        for name, shape in shapes.items():
            if any(isinstance(size, str) for size in shape):
                profile.set_shape(name, *(_at(shape, sizes, which) for which in range(3)))
        if config.add_optimization_profile(profile) < 0:
            raise TargetError(f"TensorRT refuses the optimization profile {dict(sizes)}; its log says why")


def _at(shape: Sequence[int | str], sizes: Mapping[str, SizeRange], which: int) -> tuple[int, ...]:
    return tuple(sizes[size][which] if isinstance(size, str) else size for size in shape)
