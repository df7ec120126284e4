"""Opens an engine directory with the engine of its target. An engine's library is imported when it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine_build.engine_dir import EngineDirectory
from engine_build.memory import KvCacheMemory, kv_cache_memory, workspace_bytes
from engine_build.targets.interface import TargetError
from engine_build.targets.select import select_target
from engine_build.targets.tensorrt.base import rank_file
from engine_build.targets.tensorrt.plan_check import PACKAGES, check_manifest, check_plan_here
from executor.api.errors import InvalidRequestError, UnsupportedFeatureError
from executor.engines.device_options import DeviceOptions, check_device_options
from executor.engines.interface import Engine, EngineSpec
from executor.pool_size import PoolMemory, gpu_memory, main_memory

if TYPE_CHECKING:
    from executor.engines.cuda.bindings import BindingsDevice
    from executor.engines.tensorrt import TensorRtEngine

_DEFAULT_OPTIONS = DeviceOptions()


def engine_spec(engine_dir: EngineDirectory | Path, kv_cache_dtype: str | None = None) -> EngineSpec:
    """What the engine in a directory was built for; loads nothing.

    Args:
        engine_dir: what `engine-build` wrote, opened or not.
        kv_cache_dtype: what keys and values are kept in; `None` for the target's default.

    Raises:
        EngineDirectoryError: the directory is missing, damaged or of another format version.
        InvalidRequestError: the target cannot keep keys and values so.
    """
    directory = _opened(engine_dir)
    model, build = directory.model_config, directory.build_config
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
        kv_bytes_per_block=_kv_cache(directory, kv_cache_dtype).bytes_per_block,
        sliding_window=model.sliding_window,
    )


def open_engine(
    engine_dir: EngineDirectory | Path,
    *,
    num_blocks: int,
    kv_cache_dtype: str | None = None,
    num_threads: int | None = None,
    deterministic: bool = False,
    device: str | None = None,
    options: DeviceOptions = _DEFAULT_OPTIONS,
) -> Engine:
    """Load the plan and allocate the KV pool.

    Args:
        engine_dir: what `engine-build` wrote, opened or not.
        num_blocks: KV blocks that callers may use.
        kv_cache_dtype: what keys and values are kept in; `None` for the target's default.
        num_threads: CPU threads; `None` takes all cores. The reference engine takes them always.
        deterministic: a row's logits are bit-equal in every step in which each sequence has two rows or more.
        device: where an engine of target reference runs: `cpu`, `cuda` or, with `None`, on a GPU if torch can use one.
            The others run where they were built for.
        options: of the GPU.

    Raises:
        EngineDirectoryError: the directory is missing, damaged or of another format version; or a plan of TensorRT
            of another version, for another device or with another checksum.
        InvalidRequestError: the target cannot keep keys and values so.
        UnsupportedFeatureError: the target's library is not installed, it has no GPU here, no deterministic mode, or
            does not do what `options` ask for.
        OpenVinoError, PlanError, UnsupportedGraphError: the engine's library cannot run the plan here.
    """
    directory = _opened(engine_dir)
    spec = engine_spec(directory, kv_cache_dtype)
    kv_cache_dtype = _kv_cache(directory, kv_cache_dtype).dtype
    if device is None:
        device = _device_name(directory, options)
    check_device_options(options, directory, on_gpu=device != "cpu")
    if directory.target == "openvino":
        from executor.engines.openvino import OpenVinoEngine

        return OpenVinoEngine(
            directory.model_path,
            spec,
            num_blocks,
            kv_cache_dtype=kv_cache_dtype,
            precision=directory.build_config.dtype,
            num_threads=num_threads,
            deterministic=deterministic,
        )
    if directory.target in PACKAGES:
        return _open_tensorrt(directory, spec, num_blocks, kv_cache_dtype, deterministic, options)
    try:
        import torch

        from executor.engines.reference import ReferenceEngine
        from executor.engines.reference_cuda_graphs import CudaRecorder
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UnsupportedFeatureError(
            "target reference needs the package torch: pip install 'inflight-executor[reference]'"
        ) from error

    return ReferenceEngine(
        directory.model_path,
        spec,
        num_blocks,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
        deterministic=deterministic,
        recorder=CudaRecorder(torch.device(device)) if options.cuda_graphs else None,
        num_graph_sizes=options.num_graph_sizes,
    )


def pool_memory(engine_dir: EngineDirectory | Path, options: DeviceOptions = _DEFAULT_OPTIONS) -> PoolMemory:
    """Memory that is free now where `open_engine` will put the KV pool: in main memory, or on a GPU.

    Raises:
        EngineDirectoryError: the plan is of another version of TensorRT, for several GPUs, or without weights.
        UnsupportedFeatureError: the target needs a GPU, and there is none; or it does not do what `options` ask for.
    """
    directory = _opened(engine_dir)
    device = _device_name(directory, options)
    check_device_options(options, directory, on_gpu=device != "cpu")
    if device == "cpu":
        return main_memory()
    model, build = directory.model_config, directory.build_config
    workspace = workspace_bytes(model, build)
    if directory.target in PACKAGES:
        from executor.engines.tensorrt import buffer_bytes

        with _as_unsupported():
            check_manifest(directory)
        weights = int(directory.manifest.files[rank_file(0)].num_bytes * options.weights_fraction)
        return gpu_memory(_gpu(options).memory().free, weights + workspace + buffer_bytes(engine_spec(directory)))
    from executor.engines.reference import free_memory

    weights = sum(record.num_bytes for record in directory.manifest.files.values())
    return gpu_memory(free_memory(device), weights + workspace)


def _device_name(directory: EngineDirectory, options: DeviceOptions) -> str:
    """Where an engine runs, as torch calls it."""
    if directory.target in PACKAGES:
        return "cuda"
    if directory.target != "reference" or find_spec("torch") is None:
        return "cpu"
    from executor.engines.reference import default_device

    device = default_device()
    return device if device == "cpu" or options.device_id is None else f"{device}:{options.device_id}"


@contextmanager
def _as_unsupported() -> Iterator[None]:
    """What a target's library or device lacks is a feature that the Executor lacks."""
    try:
        yield
    except TargetError as error:
        raise UnsupportedFeatureError(str(error)) from error


def _open_tensorrt(
    directory: EngineDirectory,
    spec: EngineSpec,
    num_blocks: int,
    kv_cache_dtype: str,
    deterministic: bool,
    options: DeviceOptions,
) -> TensorRtEngine:
    """Everything the manifest and this machine can tell is checked before anything of CUDA is made."""
    if deterministic:
        raise UnsupportedFeatureError(
            f"deterministic mode is not supported by target {directory.target}; openvino and reference have it"
        )
    with _as_unsupported():
        check_plan_here(directory, options.device_id or 0)
    from executor.engines.tensorrt import TensorRtEngine
    from executor.engines.tensorrt_plan import load_plan

    gpu = _gpu(options)
    module = PACKAGES[directory.target].module
    plan = load_plan(directory.path / rank_file(0), module, gpu, weights_fraction=options.weights_fraction)
    return TensorRtEngine(
        plan,
        gpu,
        spec,
        num_blocks,
        kv_cache_dtype=kv_cache_dtype,
        cuda_graphs=options.cuda_graphs is not False,
        num_graph_sizes=options.num_graph_sizes,
    )


def _gpu(options: DeviceOptions) -> BindingsDevice:
    from executor.engines.cuda.bindings import open_device
    from executor.engines.cuda.device import NoGpuError

    try:
        return open_device(options.device_id or 0)
    except NoGpuError as error:
        raise UnsupportedFeatureError(str(error)) from error


def kv_cache_dtype(engine_dir: EngineDirectory | Path, wanted: str | None = None) -> str:
    """What the engine keeps keys and values in. Arguments and errors as for `engine_spec`."""
    return _kv_cache(_opened(engine_dir), wanted).dtype


def _opened(engine_dir: EngineDirectory | Path) -> EngineDirectory:
    return engine_dir if isinstance(engine_dir, EngineDirectory) else EngineDirectory.open(engine_dir)


def _kv_cache(directory: EngineDirectory, wanted: str | None) -> KvCacheMemory:
    """How keys and values are kept: as `wanted`, or as the target prefers for the plan's dtype."""
    build = directory.build_config
    choices = kv_cache_memory(directory.model_config, build, select_target(directory.target))
    for choice in choices:
        if wanted in (None, choice.dtype):
            return choice
    raise InvalidRequestError(
        f"kv_cache_dtype is {wanted!r}; a {build.dtype} plan for target {directory.target} "
        f"keeps keys and values as one of {', '.join(choice.dtype for choice in choices)}",
        field="kv_cache_config.kv_cache_dtype",
    )
