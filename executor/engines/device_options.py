"""What an Executor's configuration asks of the device, and which engines can do it."""

from __future__ import annotations

from dataclasses import dataclass

from engine_build.engine_dir import EngineDirectory
from executor.api.config import ExecutorConfig
from executor.api.errors import UnsupportedFeatureError

_DEVICE_IDS = "parallel_config.device_ids"
_WEIGHTS = "gpu_weights_percent"
_GRAPHS = "extended_runtime_perf_knob_config.cuda_graph_mode"


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Whatever is at its default is left to the engine."""

    device_id: int | None = None
    """Which GPU."""
    weights_fraction: float = 1.0
    """Part of the weights that stay in the GPU's memory, in (0, 1]; the others are read from main memory in each
    step."""
    cuda_graphs: bool | None = None
    """Whether generation steps are recorded; `None`: with target tensorrt alone."""
    num_graph_sizes: int = 0
    """Batch sizes that are recorded; 0: all that are padded to."""


def device_options(config: ExecutorConfig) -> DeviceOptions:
    """The options of a validated configuration."""
    device_ids = None if config.parallel_config is None else config.parallel_config.device_ids
    knobs = config.extended_runtime_perf_knob_config
    return DeviceOptions(
        device_id=None if device_ids is None else device_ids[0],
        weights_fraction=config.gpu_weights_percent,
        cuda_graphs=knobs.cuda_graph_mode,
        num_graph_sizes=knobs.cuda_graph_cache_size,
    )


def check_device_options(options: DeviceOptions, directory: EngineDirectory, *, on_gpu: bool) -> None:
    """Check options against an engine before it is loaded.

    Args:
        options: what is wanted.
        directory: the engine's.
        on_gpu: whether it will run on a GPU.

    Raises:
        UnsupportedFeatureError: names the first field that the engine cannot honour.
    """
    target = directory.target
    if options.device_id is not None and not on_gpu:
        raise _unsupported(_DEVICE_IDS, f"[{options.device_id}]", f"target {target} runs on the CPU here")
    if options.weights_fraction != 1:
        settings = directory.build_config.tensorrt
        if settings is None:
            raise _unsupported(_WEIGHTS, options.weights_fraction, f"target {target} does not stream weights")
        if not settings.weight_streaming:
            raise _unsupported(
                _WEIGHTS, options.weights_fraction, f"{directory.path} was built without --weight_streaming"
            )
    if options.cuda_graphs and target != "tensorrt" and not (target == "reference" and on_gpu):
        raise _unsupported(
            _GRAPHS, True, f"target {target} records no CUDA graphs here; tensorrt does, and reference on a GPU"
        )


def _unsupported(field: str, value: object, why: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"{field} is {value}, which is not supported: {why}", field=field)
