"""The engine directory that the benchmarks run: SmolLM2-135M-Instruct for the CPU, built on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engine_build.engine_dir import EngineDirectory, EngineDirectoryError

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"


def demo_checkpoint() -> Path:
    """The demo model's GGUF file, fetched if it is not there."""
    command = [sys.executable, ROOT / "scripts" / "fetch_model"]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(out.stdout.strip().splitlines()[-1])


def demo_engine(dtype: str = "bfloat16") -> Path:
    """An engine directory for target `openvino`, built if there is none that this release reads."""
    engine_dir = CACHE / "engines" / f"bench-{dtype}"
    try:
        EngineDirectory.open(engine_dir)
    except EngineDirectoryError:  # there is none yet, or one of another format version
        build = Path(sys.executable).with_name("engine-build")
        command = [build, "--checkpoint_dir", demo_checkpoint(), "--output_dir", engine_dir, "--target", "openvino"]
        subprocess.run([*command, "--dtype", dtype], check=True, stdout=sys.stderr)
    return engine_dir
