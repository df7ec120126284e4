"""The network: one ONNX graph over packed rows, read by every target. See README.md."""

from __future__ import annotations

from pathlib import Path

from engine_build.checkpoint.interface import Checkpoint
from engine_build.network.graph import DATA_FILE, MODEL_FILE, GraphBuilder
from engine_build.network.llama import LlamaNetwork, check_config
from engine_build.network.options import NetworkError, NetworkOptions
from engine_build.network.paged_attention import DOMAIN, DOMAIN_VERSION, PagedAttention, paged_attention
from engine_build.network.weights import ProgressCallback, WeightWriter
from engine_build.parallel import Rank, RankCheckpoint

__all__ = [
    "DATA_FILE",
    "DOMAIN",
    "MODEL_FILE",
    "NetworkError",
    "NetworkOptions",
    "PagedAttention",
    "paged_attention",
    "write_network",
]


def write_network(
    checkpoint: Checkpoint,
    options: NetworkOptions,
    directory: Path,
    progress: ProgressCallback | None = None,
    rank: Rank | None = None,
) -> None:
    """Write `model.onnx` and `model.data` into an existing directory.

    Weights pass through memory one (fused) matrix at a time. `progress(done, total)` is called with the number of
    the checkpoint's tensors that have been read. `rank` is the device the network is for, the only one by default.

    Raises:
        ParallelError: the model cannot be divided so.
        NetworkError: the configuration or an option is not supported, or a weight does not fit its new type.
        CheckpointError: a tensor cannot be read.
    """
    rank = rank or Rank()
    share = RankCheckpoint(checkpoint, rank)
    config = share.config
    check_config(config)
    with GraphBuilder(directory, {DOMAIN: DOMAIN_VERSION}) as graph:
        weights = WeightWriter(graph, share, options, progress)
        LlamaNetwork(graph, config, options, weights, rank).write()
        graph.save(config.architecture, f"{config.architecture} over packed rows, {options.dtype}")
