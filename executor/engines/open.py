"""Opens an engine directory with the engine of its target. An engine's library is imported when it is opened."""

from __future__ import annotations

from engine_build.engine_dir import EngineDirectory
from engine_build.memory import kv_cache_memory
from engine_build.targets.select import select_target
from executor.api.errors import InvalidRequestError
from executor.engines.interface import Engine, EngineSpec


def kv_cache_dtype(directory: EngineDirectory, wanted: str | None) -> str:
    """The dtype that keys and values are kept in: `wanted`, or the target's default for the plan's dtype.

    Raises:
        InvalidRequestError: the target cannot keep them in `wanted`.
    """
    target = select_target(directory.target)
    names = [type_.name for type_ in target.kv_cache_types(directory.build_config.dtype)]
    if wanted is None:
        return names[0]
    if wanted not in names:
        raise InvalidRequestError(
            f"kv_cache_dtype is {wanted!r}; a {directory.build_config.dtype} plan for target {directory.target} "
            f"keeps keys and values as one of {', '.join(names)}",
            field="kv_cache_config.kv_cache_dtype",
        )
    return wanted


def engine_spec(directory: EngineDirectory, kv_dtype: str) -> EngineSpec:
    """What the engine in `directory` was built for, with keys and values kept as `kv_dtype`; loads nothing."""
    model, build = directory.model_config, directory.build_config
    kv = next(
        memory for memory in kv_cache_memory(model, build, select_target(directory.target)) if memory.dtype == kv_dtype
    )
    return EngineSpec(
        vocab_size=model.vocab_size,
        num_layers=model.num_hidden_layers,
        num_kv_heads=model.num_key_value_heads,
        head_size=model.head_size,
        tokens_per_block=build.tokens_per_block,
        max_batch_size=build.max_batch_size,
        max_num_tokens=build.max_num_tokens,
        max_input_len=build.max_input_len,
        max_seq_len=build.max_seq_len,
        kv_bytes_per_block=kv.bytes_per_block,
    )


def open_engine(
    directory: EngineDirectory, spec: EngineSpec, *, num_blocks: int, kv_dtype: str, num_threads: int | None = None
) -> Engine:
    """Load the plan and allocate a pool of `num_blocks` blocks.

    Args:
        directory: the engine directory.
        spec: `engine_spec` of it.
        num_blocks: KV blocks.
        kv_dtype: what the pool holds; see `kv_cache_dtype`.
        num_threads: CPU threads; `None` takes all cores.
    """
    if directory.target == "openvino":
        from executor.engines.openvino import OpenVinoEngine

        return OpenVinoEngine(
            directory.model_path,
            spec,
            num_blocks,
            kv_cache_dtype=kv_dtype,
            precision=directory.build_config.dtype,
            num_threads=num_threads,
        )
    from executor.engines.reference import ReferenceEngine

    return ReferenceEngine(directory.model_path, spec, num_blocks, kv_cache_dtype=kv_dtype)
