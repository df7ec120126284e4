"""From an open checkpoint to an engine directory."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from engine_build import __version__
from engine_build.checkpoint.interface import Checkpoint
from engine_build.checkpoint.model_config import ModelConfig
from engine_build.engine_dir import MANIFEST_FILE, TOKENIZER_DIR, EngineDirectory, record_files
from engine_build.engine_writer import engine_writer
from engine_build.manifest import FORMAT_VERSION, BuildConfig, Manifest
from engine_build.network.options import WEIGHT_DTYPES
from engine_build.parallel import check_parallel
from engine_build.rank_build import RankBuild, build_ranks, network_options
from engine_build.targets.interface import CompileOptions, ProgressCallback, Target, TargetError, TensorRtOptions

DEFAULT_MAX_BATCH_SIZE = 64
DEFAULT_MAX_NUM_TOKENS = 256
"""Rows of one step; on two CPU cores throughput is flat from 192 on, and a longer step delays every other request."""


class BuildError(Exception):
    """What was asked for contradicts itself or the model: names the settings and their values."""


def resolve_build_config(
    model: ModelConfig,
    target: Target,
    *,
    max_batch_size: int | None = None,
    max_num_tokens: int | None = None,
    max_input_len: int | None = None,
    max_seq_len: int | None = None,
    tokens_per_block: int | None = None,
    dtype: str | None = None,
    weight_dtype: str = "as_stored",
    tp_size: int = 1,
    pp_size: int = 1,
    tensorrt: TensorRtOptions | None = None,
) -> BuildConfig:
    """Fill in what was left open and check it against the model and the target.

    Raises:
        BuildError: a limit is not positive, beyond the model, or contradicts another.
        TargetError: the target cannot do it.
        NetworkError: an unknown dtype.
        ParallelError: the model cannot be divided so.
    """
    tokens = DEFAULT_MAX_NUM_TOKENS if max_num_tokens is None else max_num_tokens
    length = model.max_position_embeddings if max_seq_len is None else max_seq_len
    chosen_dtype = target.dtypes[0] if dtype is None else dtype
    config = BuildConfig(
        max_batch_size=min(DEFAULT_MAX_BATCH_SIZE, tokens) if max_batch_size is None else max_batch_size,
        max_num_tokens=tokens,
        max_input_len=length - 1 if max_input_len is None else max_input_len,
        max_seq_len=length,
        tokens_per_block=target.default_tokens_per_block if tokens_per_block is None else tokens_per_block,
        dtype=chosen_dtype,
        weight_dtype=weight_dtype,
        tp_size=tp_size,
        pp_size=pp_size,
        tensorrt=target.tensorrt_config(tensorrt, chosen_dtype),
    )
    _check_limits(config, model)
    target.check(config, model)
    check_parallel(model, tp_size, pp_size)
    if weight_dtype in WEIGHT_DTYPES and weight_dtype not in target.weight_dtypes:
        raise BuildError(
            f"weight_dtype {weight_dtype!r} is not supported; target {target.name} keeps matrices as "
            f"{', '.join(target.weight_dtypes)}"
        )
    network_options(config, target)
    return config


def build_engine(
    checkpoint: Checkpoint,
    build_config: BuildConfig,
    target: Target,
    output_dir: Path,
    progress: ProgressCallback | None = None,
    *,
    options: CompileOptions | None = None,
    workers: int = 1,
) -> EngineDirectory:
    """Write an engine directory, whole or not at all. An engine that is there already is replaced.

    Args:
        checkpoint: what to build from.
        build_config: what for; `resolve_build_config` makes one.
        target: the kind of plan.
        output_dir: where the engine goes.
        progress: called with progress.
        options: how it is compiled.
        workers: processes that build ranks at the same time.

    Raises:
        CheckpointError, NetworkError: the checkpoint cannot be read or is not what its configuration says.
        TargetError: the network does not compile, or the target has no use for `options`.
        EngineDirectoryError: `output_dir` holds something else or cannot be written.
    """
    report = progress or _ignore_progress
    options = options or CompileOptions()
    if (options.input_timing_cache or options.output_timing_cache) and not target.times_kernels:
        raise TargetError(f"target {target.name} times no kernels at build: leave out the timing caches")
    versions = target.versions()
    with engine_writer(output_dir) as writer:
        directory = writer.directory
        _write_tokenizer(checkpoint, directory)
        inputs, outputs = build_ranks(RankBuild(checkpoint, build_config, target, directory, options), workers, report)
        report("writing checksums", 0, 1)
        libraries = {name: metadata.version(name) for name in ("onnx", "numpy")}
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            builder_versions={"inflight-executor": __version__, **libraries, **versions},
            target=target.name,
            pretrained_config=checkpoint.config,
            build_config=build_config,
            inputs=inputs,
            outputs=outputs,
            files=record_files(directory),
        )
        (directory / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        writer.publish()
        report("writing checksums", 1, 1)
    return EngineDirectory(output_dir, manifest)


def _ignore_progress(_stage: str, _done: int, _total: int) -> None:
    """For a caller that does not look."""


def _check_limits(config: BuildConfig, model: ModelConfig) -> None:
    limits = {
        "max_num_tokens": config.max_num_tokens,
        "max_batch_size": config.max_batch_size,
        "max_seq_len": config.max_seq_len,
        "max_input_len": config.max_input_len,
        "tokens_per_block": config.tokens_per_block,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
    }
    for name, value in limits.items():
        if value < 1:
            raise BuildError(f"{name} is {value}, it must be at least 1")
    if config.max_seq_len > model.max_position_embeddings:
        raise BuildError(
            f"max_seq_len {config.max_seq_len} is beyond the model's {model.max_position_embeddings} positions"
        )
    if config.max_input_len >= config.max_seq_len:
        raise BuildError(
            f"max_input_len {config.max_input_len} leaves no room for a generated token within "
            f"max_seq_len {config.max_seq_len}"
        )
    if config.max_batch_size > config.max_num_tokens:
        raise BuildError(
            f"max_batch_size {config.max_batch_size} is above max_num_tokens {config.max_num_tokens}: "
            "each sequence of a step takes at least one of its tokens"
        )


def _write_tokenizer(checkpoint: Checkpoint, directory: Path) -> None:
    files = checkpoint.tokenizer_files().files
    if files:
        (directory / TOKENIZER_DIR).mkdir()
    for name, content in files.items():
        (directory / TOKENIZER_DIR / name).write_bytes(content)
