"""Generated tokens per second on the 64-request mix, ours and OpenVINO GenAI's, in alternating runs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer
from bench_engine import CACHE, ROOT, demo_checkpoint, demo_engine
from bench_workload import Workload, mixed_requests
from rich.console import Console
from rich.table import Table

from engine_build.command_line import run
from executor import Executor, ExecutorConfig, KvCacheConfig, OutputConfig, Request

PEER_VERSION = "2026.4.1"
console = Console(stderr=True)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="24 requests, two runs each: under 50 s.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line of output is one JSON object.")] = False,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, for both sides.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Runs of each side.")] = 5,
    max_batch_size: int = 32,
    max_num_tokens: int = 256,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Run OpenVINO GenAI beside it.")] = True,
) -> None:
    """Measure both sides in turns, so that a busy minute of the machine hits both."""
    if quick:
        repeats = 2
    count = 24 if quick else 64
    workload = mixed_requests(count)
    engine_dir = demo_engine(dtype)
    precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    rival = None
    if peer:
        rival = _start_peer(_float16_gguf(demo_checkpoint()), count, max_batch_size, max_num_tokens, precision)

    config = ExecutorConfig(
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        kv_cache_config=KvCacheConfig(enable_block_reuse=False),
    )
    ours: list[float] = []
    theirs: list[float] = []
    with Executor(engine_dir, config) as executor:
        for run in range(repeats):
            ours.append(_run(executor, workload))
            if rival is not None:
                theirs.append(_run_peer(rival))
            other = f", OpenVINO GenAI {theirs[-1]:.0f} tok/s" if theirs else ""
            console.print(f"run {run + 1}/{repeats}: ours {ours[-1]:.0f} tok/s{other}")
        iterations = executor.get_latest_iteration_stats()
    if rival is not None:
        rival.stdin.close()  # type: ignore[union-attr]
        rival.wait()

    result = {
        "requests": count,
        "prompt_tokens": workload.num_prompt_tokens,
        "generated_tokens": workload.num_output_tokens,
        "dtype": dtype,
        "tokens_per_s": statistics.median(ours),
        "openvino_genai_tokens_per_s": statistics.median(theirs) if theirs else None,
        "ratio_vs_openvino_genai": statistics.median(ours) / statistics.median(theirs) if theirs else None,
        "engine_share_of_iteration": _engine_share(iterations),
        "runs": ours,
        "openvino_genai_runs": theirs,
    }
    _print(result)
    if as_json:
        print(json.dumps(result))


def _run(executor: Executor, workload: Workload) -> float:
    started = time.perf_counter()
    ids = [
        executor.enqueue_request(Request(prompt, length, output_config=OutputConfig(exclude_input_from_output=True)))
        for prompt, length in zip(workload.prompts, workload.output_lengths, strict=True)
    ]
    tokens = 0
    for responses in executor.await_responses(ids):
        tokens += sum(len(response.result.output_token_ids[0]) for response in responses)
    seconds = time.perf_counter() - started
    if tokens != workload.num_output_tokens:
        raise SystemExit(f"bench: {tokens} tokens came back, {workload.num_output_tokens} were asked for")
    return tokens / seconds


def _engine_share(iterations: list) -> float:
    total = sum(stats.iter_latency_ms for stats in iterations)
    return sum(stats.engine_latency_ms for stats in iterations) / total if total else 0.0


def _float16_gguf(checkpoint: Path) -> Path:
    """The same weights in a type that the peer reads without quantizing: what our plan computes with, in 16 bit."""
    target = CACHE / "bench" / "SmolLM2-135M-Instruct.F16.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(checkpoint)
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float16 if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target


def _start_peer(
    model: Path, count: int, max_batch_size: int, max_num_tokens: int, precision: str
) -> subprocess.Popen[str]:
    environment = CACHE / "venv-openvino-genai"
    python = environment / "bin" / "python"
    if not (environment / ".installed").exists():
        console.print(f"installing openvino-genai {PEER_VERSION} into {environment.relative_to(ROOT)} (once)")
        venv.create(environment, with_pip=True, clear=True)
        packages = [f"openvino-genai=={PEER_VERSION}", f"openvino=={PEER_VERSION}", "numpy"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr)
        (environment / ".installed").touch()
    command = [
        python,
        ROOT / "scripts" / "bench_peer_openvino_genai.py",
        model,
        str(count),
        str(max_batch_size),
        str(max_num_tokens),
        precision,
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT / "scripts")
    _answer(process)
    return process


def _run_peer(process: subprocess.Popen[str]) -> float:
    process.stdin.write("\n")  # type: ignore[union-attr]
    process.stdin.flush()  # type: ignore[union-attr]
    answer = _answer(process)
    return answer["tokens"] / answer["seconds"]


def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
    for line in process.stdout:  # type: ignore[union-attr]
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"bench: the peer ended with exit code {process.wait()}")


def _print(result: dict) -> None:
    table = Table("what", "generated tok/s (median)", "runs", title=f"{result['requests']} requests, {result['dtype']}")
    table.add_row("this executor", f"{result['tokens_per_s']:.0f}", " ".join(f"{run:.0f}" for run in result["runs"]))
    if result["ratio_vs_openvino_genai"]:
        runs = " ".join(f"{run:.0f}" for run in result["openvino_genai_runs"])
        table.add_row(f"OpenVINO GenAI {PEER_VERSION}", f"{result['openvino_genai_tokens_per_s']:.0f}", runs)
        console.print(table)
        console.print(f"ratio {result['ratio_vs_openvino_genai']:.2f}")
    else:
        console.print(table)
    console.print(f"the engine took {result['engine_share_of_iteration']:.1%} of the iterations' time")


if __name__ == "__main__":
    run(main, "scripts/bench")
