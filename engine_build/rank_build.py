"""Builds the network and the plan of every rank of an engine, several at a time where there are several."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import onnx

from engine_build.checkpoint.interface import Checkpoint
from engine_build.manifest import BuildConfig, TensorSpec
from engine_build.network import MODEL_FILE, NetworkOptions, write_network
from engine_build.parallel import Rank
from engine_build.targets.interface import CompileOptions, ProgressCallback, Target

TensorSpecs = dict[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class RankBuild:
    """What all ranks of one engine have in common."""

    checkpoint: Checkpoint
    build_config: BuildConfig
    target: Target
    directory: Path
    """Where the engine's files go."""
    options: CompileOptions

    @property
    def num_ranks(self) -> int:
        return self.build_config.tp_size * self.build_config.pp_size


def build_ranks(build: RankBuild, workers: int, report: ProgressCallback) -> tuple[TensorSpecs, TensorSpecs]:
    """Build every rank; `workers` of them at a time, each in a process of its own where there are several.

    Returns:
        Inputs and outputs of all ranks' networks by name.
    """
    ranks = range(build.num_ranks)
    inputs: TensorSpecs = {}
    outputs: TensorSpecs = {}
    if workers == 1 or len(ranks) == 1:
        for rank in ranks:
            specs = _build_rank(build, rank, report)
            inputs |= specs[0]
            outputs |= specs[1]
        return inputs, outputs
    # Spawned, not forked: the libraries that compile have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(ranks)), mp_context=context) as pool:
        report("building ranks", 0, len(ranks))
        results = pool.map(_build_rank_silently, [(build, rank) for rank in ranks])
        for done, specs in enumerate(results, start=1):
            report("building ranks", done, len(ranks))
            inputs |= specs[0]
            outputs |= specs[1]
    return inputs, outputs


def network_options(build_config: BuildConfig, target: Target) -> NetworkOptions:
    """Raises `NetworkError` for what no network can be written with."""
    return NetworkOptions(
        dtype=build_config.dtype,
        weight_dtype=build_config.weight_dtype,
        quantized_as=target.quantized_as,
        activation_dtype=target.activation_dtype(build_config.dtype),
    )


def _build_rank_silently(arguments: tuple[RankBuild, int]) -> tuple[TensorSpecs, TensorSpecs]:
    build, rank = arguments
    return _build_rank(build, rank, lambda _stage, _done, _total: None)


def _build_rank(build: RankBuild, rank: int, report: ProgressCallback) -> tuple[TensorSpecs, TensorSpecs]:
    """Write the network of one rank, compile it, and keep those files that the target needs."""
    config, wanted = build.build_config, build.target.plan_files(build.build_config)
    prefix = f"rank {rank}: " if build.num_ranks > 1 else ""

    def report_rank(stage: str, done: int, total: int) -> None:
        report(prefix + stage, done, total)

    with tempfile.TemporaryDirectory(prefix="rank-", dir=build.directory) as name:
        directory = Path(name)
        write_network(
            build.checkpoint,
            network_options(config, build.target),
            directory,
            lambda done, total: report_rank("writing weights", done, total),
            Rank.of(rank, config.tp_size, config.pp_size),
        )
        build.target.compile(directory, rank, config, build.checkpoint.config, build.options, report_rank)
        graph = onnx.load(directory / MODEL_FILE, load_external_data=False).graph
        for path in directory.iterdir():
            if path.name in wanted:
                path.rename(build.directory / path.name)
    return (
        {value.name: _tensor_spec(value) for value in graph.input},
        {value.name: _tensor_spec(value) for value in graph.output},
    )


def _tensor_spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return TensorSpec(dtype, tuple(size.dim_param or size.dim_value for size in tensor.shape.dim))
