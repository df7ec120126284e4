"""Everything that needs a GPU, run on this one: tests, targets against the reference, kernels and whole engines timed.

Prints one table and writes a report. A row that could not be run says why; it is neither a pass nor a failure.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from bench_engine import CACHE, ROOT, demo_checkpoint
from rich.console import Console
from rich.table import Table

from engine_build.command_line import run
from engine_build.engine_dir import EngineDirectory
from executor import Executor, ExecutorConfig, ExtendedRuntimePerfKnobConfig, KvCacheConfig, Request
from executor.engines.device_options import DeviceOptions
from executor.engines.open import open_engine
from executor.text import Tokenizer

sys.path.insert(0, str(ROOT))

from tests.parity.greedy import greedy

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "Water boils at")
NUM_TOKENS = 32
LEAST_AGREEMENT = 0.9
"""Of greedy tokens up to the first difference, for engines that round otherwise than the reference."""
NUM_BLOCKS = 64
SANITIZED = "bfloat16 and split or int8 and bfloat16 or long"
"""Names of cases in `tests/gpu/test_kernels.py` that are run under NVIDIA's checkers, which are slow."""
BATCH_SIZE, DECODE_TOKENS = 64, 128
NO_GPU_EXIT_CODE = 3
PACKAGES = ("torch", "triton", "cuda-bindings", "tensorrt-cu13", "tensorrt-rtx-cu13", "numpy", "onnx")


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "FAILED"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    outcome: Outcome
    figure: str
    """What was measured, or why nothing was."""


@dataclass(frozen=True, slots=True)
class Machine:
    gpu: str
    compute_capability: str
    memory_gib: float
    driver: str
    python: str
    packages: dict[str, str]


def main(
    report: Annotated[Path, typer.Option(help="Where to write the report.")] = CACHE / "verify_gpu" / "report.md",
    skip_benchmarks: Annotated[bool, typer.Option(help="Tests and parity only.")] = False,
) -> None:
    """Verify this machine's GPU; exit code 0 if nothing failed, 1 if something did, 3 without a GPU."""
    console = Console()
    try:
        machine = describe_machine()
    except RuntimeError as error:
        console.print(f"verify_gpu: {error}; nothing was verified")
        raise typer.Exit(NO_GPU_EXIT_CODE) from error
    checks: list[tuple[str, Callable[[], list[Row]]]] = [("tests that need a GPU", gpu_tests)]
    checks += [(f"greedy tokens, target {target}", lambda target=target: [parity(target)]) for target in TARGETS]
    checks.append(("greedy tokens, target reference, CUDA graphs", lambda: [parity("reference", cuda_graphs=True)]))
    checks.append(("kernels under compute-sanitizer", sanitizers))
    if not skip_benchmarks:
        checks.append(("attention kernels", attention_benchmarks))
        checks += [(f"decode, target {target}", lambda target=target: [decode_speed(target)]) for target in TARGETS]
        recorded = "decode, target reference, CUDA graphs"
        checks.append((recorded, lambda: [decode_speed("reference", cuda_graphs=True)]))
    rows: list[Row] = []
    for what, check in checks:
        console.print(f"==> {what}")
        rows += run_check(what, check)
    show(console, machine, rows)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(as_markdown(machine, rows), encoding="utf-8")
    console.print(f"report: {report}")
    raise typer.Exit(1 if any(row.outcome is Outcome.FAILED for row in rows) else 0)


def run_check(what: str, check: Callable[[], list[Row]]) -> list[Row]:
    """A check's rows; one that cannot be made, or ends in an error, is a row as well."""
    try:
        return check()
    except NotRunError as error:
        return [Row(what, Outcome.NOT_RUN, str(error))]
    except Exception as error:  # noqa: BLE001 (whatever is wrong on somebody's machine belongs in the report)
        return [Row(what, Outcome.FAILED, f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])]


class NotRunError(Exception):
    """A check cannot be made here; says why."""


def describe_machine() -> Machine:
    """The GPU and what is installed; `NoGpuError`, a `RuntimeError`, where there is none."""
    from executor.engines.cuda.bindings import open_device

    device = open_device()
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    versions = {package: metadata.version(package) for package in PACKAGES if is_installed(package)}
    memory = device.memory().total / 2**30
    return Machine(name, device.compute_capability, memory, driver, platform.python_version(), versions)


def is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def gpu_tests() -> list[Row]:
    """`pytest -m gpu`, which compares kernels and engines with the definition."""
    need_cuda_torch()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
    outcome = Outcome.FAILED if done.returncode else Outcome.PASSED
    return [Row("tests that need a GPU", outcome, "; ".join([summary, *failed[:5]]))]


def sanitizers() -> list[Row]:
    """NVIDIA's checkers on one compiled case of each kernel: accesses outside of buffers, races in shared memory."""
    need_cuda_torch()
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise NotRunError("compute-sanitizer, of the CUDA toolkit, is not installed")
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_kernels.py", "-k", SANITIZED]
    rows: list[Row] = []
    for tool in ("memcheck", "racecheck"):
        # Without torch's own cache every tensor is an allocation, whose ends are watched.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [program, "--tool", tool, "--error-exitcode", "9", *tests]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        summary = [line for line in done.stdout.splitlines() if "SUMMARY" in line or " passed" in line]
        outcome = Outcome.FAILED if done.returncode else Outcome.PASSED
        rows.append(Row(f"kernels under {tool}", outcome, "; ".join(summary)[-300:] or f"exit {done.returncode}"))
    return rows


def attention_benchmarks() -> list[Row]:
    """The kernels against a copy, and against torch's flash attention."""
    need_cuda_torch()
    import bench_gpu_attention

    rows: list[Row] = []
    for measured in (bench_gpu_attention.generation(), bench_gpu_attention.prompt()):
        figure = (
            f"{measured.value:.2f} of {measured.reference:.2f} {measured.unit}: {measured.share:.0%}, "
            f"at least {measured.least_share:.0%} wanted"
        )
        outcome = Outcome.PASSED if measured.share >= measured.least_share else Outcome.FAILED
        rows.append(Row(measured.what, outcome, figure))
    return rows


def parity(target: str, *, cuda_graphs: bool | None = None) -> Row:
    """Greedy tokens of the demo model against the reference on the CPU in float32, up to the first difference."""
    built = available(target)
    expected = greedy_tokens(engine_dir("reference", TARGETS["reference"]), device="cpu")
    tokens = greedy_tokens(engine_dir(target, built), cuda_graphs=cuda_graphs)
    same = total = 0
    for ours, theirs in zip(tokens, expected, strict=True):
        length = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(theirs))
        same, total = same + length, total + len(theirs)
    least = 1.0 if built.dtype == "float32" else LEAST_AGREEMENT
    outcome = Outcome.PASSED if same >= least * total else Outcome.FAILED
    return Row(
        f"greedy tokens, target {_named(target, cuda_graphs)}",
        outcome,
        f"{same} of {total} before the first difference",
    )


def _named(target: str, cuda_graphs: bool | None) -> str:
    return f"{target}, CUDA graphs" if cuda_graphs else target


def greedy_tokens(directory: Path, device: str | None = None, cuda_graphs: bool | None = None) -> list[list[int]]:
    """Tokens that follow each of the prompts, all in flight together."""
    tokenizer_dir = EngineDirectory.open(directory).tokenizer_dir
    assert tokenizer_dir is not None  # the demo model has one
    tokenizer = Tokenizer(tokenizer_dir)
    engine = open_engine(
        directory, num_blocks=NUM_BLOCKS, device=device, options=DeviceOptions(cuda_graphs=cuda_graphs)
    )
    try:
        engine.warm_up()
        return greedy(engine, [tokenizer.encode(text) for text in PROMPTS], NUM_TOKENS)
    finally:
        engine.close()


def decode_speed(target: str, *, cuda_graphs: bool | None = None) -> Row:
    """Tokens a second of a full batch, and what the bandwidth of a copy would allow for the bytes of a step."""
    need_cuda_torch()
    import bench_gpu_attention

    directory = engine_dir(target, available(target))
    config = ExecutorConfig(
        max_batch_size=BATCH_SIZE,
        kv_cache_config=KvCacheConfig(max_tokens=BATCH_SIZE * 512),
        extended_runtime_perf_knob_config=ExtendedRuntimePerfKnobConfig(cuda_graph_mode=cuda_graphs),
    )
    with Executor(directory, config) as executor:
        weights = max(path.stat().st_size for path in directory.iterdir() if path.is_file())
        requests = [Request([index + 5] * 16, DECODE_TOKENS, end_id=-1) for index in range(BATCH_SIZE)]
        started = time.monotonic()
        for request_id in executor.enqueue_requests(requests):
            executor.await_responses(request_id)
        seconds = time.monotonic() - started
        block = executor.spec.kv_bytes_per_block / executor.spec.tokens_per_block
    step_bytes = weights + BATCH_SIZE * (16 + DECODE_TOKENS / 2) * block
    roofline = BATCH_SIZE * bench_gpu_attention.copy_bandwidth() / step_bytes
    speed = BATCH_SIZE * DECODE_TOKENS / seconds
    figure = f"{speed:,.0f} tokens/s; bandwidth allows {roofline:,.0f} ({speed / roofline:.1%})"
    return Row(f"decode, batch {BATCH_SIZE}, target {_named(target, cuda_graphs)}", Outcome.PASSED, figure)


@dataclass(frozen=True, slots=True)
class Built:
    """How a target is built and run."""

    target: str
    dtype: str
    module: str | None = None
    """The package it needs."""


TARGETS = {
    "reference": Built("reference", "float32"),
    "tensorrt": Built("tensorrt", "bfloat16", "tensorrt"),
    "tensorrt-rtx": Built("tensorrt-rtx", "bfloat16", "tensorrt_rtx"),
}


def available(name: str) -> Built:
    """How to build and run a target; raises `NotRunError` where it cannot be."""
    built = TARGETS[name]
    if built.module is not None and importlib.util.find_spec(built.module) is None:
        raise NotRunError(f"the package {built.module} is not installed")
    if built.target == "reference":
        need_cuda_torch()
    return built


def engine_dir(name: str, built: Built) -> Path:
    """The demo model's engine directory, built for this machine's GPU."""
    directory = CACHE / "engines" / f"verify-{name}"
    if not (directory / "config.json").exists():
        command = [Path(sys.executable).with_name("engine-build"), "--checkpoint_dir", demo_checkpoint()]
        command += ["--output_dir", directory, "--target", built.target, "--dtype", built.dtype]
        command += ["--max_batch_size", str(BATCH_SIZE), "--max_seq_len", "1024", "--max_num_tokens", "1024"]
        if built.target == "tensorrt-rtx":
            command += ["--compute_capability", describe_machine().compute_capability]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = " ".join(done.stderr.split())[-300:]
            if done.returncode == 2:  # what was asked for is not possible here
                raise NotRunError(f"engine-build refuses: {reason}")
            raise RuntimeError(f"engine-build failed: {reason}")
    return directory


def need_cuda_torch() -> None:
    import torch

    if not torch.cuda.is_available():
        raise NotRunError(f"torch {torch.__version__} cannot use the GPU")


def show(console: Console, machine: Machine, rows: list[Row]) -> None:
    table = Table(title=f"{machine.gpu}, compute capability {machine.compute_capability}, driver {machine.driver}")
    for column in ("what", "outcome", "figure"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.what, row.outcome, row.figure)
    console.print(table)


def as_markdown(machine: Machine, rows: list[Row]) -> str:
    """The report: for people, and behind it the same for programs."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    cells = [[text.replace("|", "\\|") for text in (row.what, row.outcome, row.figure)] for row in rows]
    lines = [
        f"# {machine.gpu}, {when}",
        "",
        f"Compute capability {machine.compute_capability}, {machine.memory_gib:.0f} GiB, driver {machine.driver}, "
        f"Python {machine.python}; {packages}.",
        "",
        "| what | outcome | figure |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in cells),
        "",
        "```json",
        json.dumps({"machine": asdict(machine), "rows": [asdict(row) for row in rows]}, indent=1),
        "```",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run(main, "scripts/verify_gpu")
