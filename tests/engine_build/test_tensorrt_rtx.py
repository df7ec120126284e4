"""Plans of TensorRT for RTX, really built, on a machine without a GPU."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import onnx
import pytest

from engine_build.builder import build_engine, resolve_build_config
from engine_build.checkpoint import open_checkpoint
from engine_build.checkpoint.interface import Checkpoint
from engine_build.engine_dir import EngineDirectory, EngineDirectoryError
from engine_build.targets.interface import CompileOptions, TargetError, TensorRtOptions
from engine_build.targets.select import select_target
from engine_build.targets.tensorrt.native_attention import lower_paged_attention
from tests.engine_build.lowered_network import with_soft_cap
from tests.engine_build.random_checkpoint import ONE_BILLION, RandomCheckpoint
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config

_TINY = tiny_config(hidden_size=128, head_size=64, intermediate_size=256, num_hidden_layers=1)
"""Rows that make whole groups of 4-bit numbers."""
_WIDER = tiny_config(hidden_size=512, head_size=64, intermediate_size=1024, num_hidden_layers=1)
"""Weights that are most of a plan."""


def _build(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    dtype: str = "float16",
    weight_dtype: str = "as_stored",
    capabilities: tuple[str, ...] = (),
    streams: bool = False,
    tp_size: int = 1,
) -> EngineDirectory:
    target = select_target("tensorrt-rtx")
    build_config = resolve_build_config(
        checkpoint.config,
        target,
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=256,
        dtype=dtype,
        weight_dtype=weight_dtype,
        tp_size=tp_size,
        tensorrt=TensorRtOptions(capabilities, weight_streaming=streams),
    )
    return build_engine(checkpoint, build_config, target, directory)


def _plan(engine: EngineDirectory, rank: int = 0) -> bytes:
    return (engine.path / f"rank{rank}.engine").read_bytes()


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        ("float16", "as_stored"),
        ("bfloat16", "as_stored"),
        ("float16", "int8"),
        ("bfloat16", "int4"),
        ("bfloat16", "fp8"),
    ],
)
def test_a_plan_is_built_for_two_generations_of_cards(dtype: str, weight_dtype: str, tmp_path: Path) -> None:
    engine = _build(TinyCheckpoint(_TINY), tmp_path / "engine", dtype=dtype, weight_dtype=weight_dtype)
    assert set(engine.manifest.files) == {"rank0.engine"}
    assert engine.build_config.tensorrt is not None
    assert engine.build_config.tensorrt.compute_capabilities == ("8.9", "12.0")
    assert _plan(engine).count(b"sm89") > 0
    assert _plan(engine).count(b"sm120") > 0
    assert engine.manifest.builder_versions["tensorrt_rtx"].startswith("1.7.")
    EngineDirectory.open(engine.path, verify=True)


def test_a_plan_is_built_from_attention_whose_scores_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower(model: onnx.ModelProto, tokens_per_block: int) -> onnx.ModelProto:
        return lower_paged_attention(with_soft_cap(model, 30.0), tokens_per_block)

    monkeypatch.setattr("engine_build.targets.tensorrt.rtx.lower_paged_attention", lower)
    engine = _build(TinyCheckpoint(_TINY), tmp_path / "engine", capabilities=("8.9",))
    assert _plan(engine).count(b"sm89") > 0


def test_a_plan_for_one_generation_is_for_that_alone_and_is_refused_when_cut_short(tmp_path: Path) -> None:
    engine = _build(TinyCheckpoint(_TINY), tmp_path / "engine", capabilities=("8.6",), streams=True)
    assert _plan(engine).count(b"sm86") > 0
    assert _plan(engine).count(b"sm89") == 0
    path = engine.path / "rank0.engine"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EngineDirectoryError, match=r"rank0\.engine has \d+ bytes, \d+ were written"):
        EngineDirectory.open(engine.path)


def test_quantized_weights_make_a_smaller_plan(tmp_path: Path) -> None:
    sizes = [
        len(_plan(_build(TinyCheckpoint(_WIDER), tmp_path / name, weight_dtype=name, capabilities=("8.9",))))
        for name in ("as_stored", "int8", "int4")
    ]
    weights = 3 * _WIDER.hidden_size * _WIDER.intermediate_size
    assert sizes[0] - sizes[1] > 0.7 * weights
    assert sizes[1] - sizes[2] > 0.3 * weights


def test_each_rank_gets_a_plan_of_its_share(tmp_path: Path) -> None:
    engine = _build(TinyCheckpoint(_TINY), tmp_path / "engine", capabilities=("8.9",), tp_size=2)
    assert set(engine.manifest.files) == {"rank0.engine", "rank1.engine"}
    assert _plan(engine, 0) != _plan(engine, 1)
    assert engine.manifest.inputs["key_cache_0"].shape[1] == 1  # of two heads
    assert engine.manifest.outputs["key_cache_0_out"] == engine.manifest.inputs["key_cache_0"]
    assert "max_context_len" not in engine.manifest.inputs


def test_progress_is_reported_while_the_plan_is_built(tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    target = select_target("tensorrt-rtx")
    checkpoint = TinyCheckpoint(_TINY)
    build_config = resolve_build_config(checkpoint.config, target, max_seq_len=64, max_num_tokens=16)
    build_engine(checkpoint, build_config, target, tmp_path / "engine", lambda *progress: stages.append(progress))
    compiling = [stage for stage in stages if stage[0].startswith("compiling: ")]
    assert compiling
    assert all(0 <= done <= total for _, done, total in compiling)


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        (TensorRtOptions(("9.0",)), {}, r"'9\.0' is not supported; .* 7\.5, 8\.0, .*; for 9\.0 .* target tensorrt"),
        (TensorRtOptions(("8.0",)), {"weight_dtype": "fp8"}, r"'fp8' needs compute capability 8\.9 or newer, not 8\.0"),
        (TensorRtOptions(("7.5",)), {"dtype": "bfloat16"}, r"'bfloat16' needs compute capability 8\.0 .* float16 runs"),
        (TensorRtOptions(profiling_verbosity="chatty"), {}, "'chatty' is unknown; expected one of none, layer_names"),
        (TensorRtOptions(strip_plan=True), {}, "strip_plan with target tensorrt-rtx needs a GPU on the machine"),
        (TensorRtOptions(kv_cache_dtype="int8"), {}, "target tensorrt-rtx keeps keys and values in the plan's dtype"),
        (None, {"dtype": "float8"}, "target tensorrt-rtx computes in bfloat16, float16"),
        (None, {"max_num_tokens": 1 << 20}, r"more than the 2\^31 - 1 elements of a tensor"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is(
    options: TensorRtOptions | None, settings: dict[str, str | int], said: str
) -> None:
    with pytest.raises(TargetError, match=said):
        resolve_build_config(_TINY, select_target("tensorrt-rtx"), tensorrt=options, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("target_name", ["openvino", "reference", "tensorrt-rtx"])
def test_a_timing_cache_is_refused_where_nothing_is_timed_before_anything_is_written(
    target_name: str, tmp_path: Path
) -> None:
    target, checkpoint = select_target(target_name), TinyCheckpoint(_TINY)
    build_config = resolve_build_config(checkpoint.config, target)
    steps: list[str] = []
    with pytest.raises(TargetError, match="times no kernels at build: leave out the timing caches"):
        build_engine(
            checkpoint,
            build_config,
            target,
            tmp_path / "engine",
            lambda step, *_: steps.append(step),
            options=CompileOptions(output_timing_cache=tmp_path / "cache"),
        )
    assert steps == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_the_demo_models_plan_is_built(demo_model_path: Path, tmp_path: Path) -> None:
    """For the last two generations of cards; what takes most of this file's time."""
    engine = _build(open_checkpoint(demo_model_path), tmp_path / "engine", dtype="bfloat16")
    assert _plan(engine).count(b"sm120") > 0
    assert len(_plan(engine)) > 2 * 134_000_000
    assert engine.tokenizer_dir is not None


@pytest.mark.long
@pytest.mark.model
@pytest.mark.parametrize("weight_dtype", ["int8", "int4", "fp8"])
def test_the_demo_models_quantized_plans_are_built(
    weight_dtype: str, demo_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    engine = _build(open_checkpoint(demo_model_path), tmp_path / "engine", weight_dtype=weight_dtype)
    with capsys.disabled():
        print(f"\nSmolLM2 135M, {weight_dtype}: {_figures(engine, started)}")
    assert _plan(engine).count(b"sm120") > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        ("bfloat16", "as_stored"),
        ("float16", "as_stored"),
        ("float16", "int8"),
        ("float16", "int4"),
        ("bfloat16", "fp8"),
    ],
)
def test_a_plan_of_a_billion_parameters_is_built(
    dtype: str, weight_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    engine = _build(RandomCheckpoint(ONE_BILLION), tmp_path / "engine", dtype=dtype, weight_dtype=weight_dtype)
    with capsys.disabled():
        print(f"\n1.1 billion parameters, {dtype}, {weight_dtype}: {_figures(engine, started)}")
    assert _plan(engine).count(b"sm120") > 0


def _figures(engine: EngineDirectory, started: float) -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = (engine.path / "rank0.engine").stat().st_size
    return f"{time.monotonic() - started:.0f} s, plan {size / 1e6:.0f} MB, peak so far {peak / 1e9:.1f} GB"
