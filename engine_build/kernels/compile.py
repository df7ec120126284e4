"""Compiles kernels ahead of time, for any device generation, on any machine: no GPU, no driver, no torch.

```
Launch + AttentionShape ──Triton──► PTX ──ptx.py──► PTX with our parameters only ──ptxas──► machine code (cubin)
```
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from engine_build.kernels.plan import Launch
from engine_build.kernels.ptx import entry_name, without_hidden_parameters
from engine_build.kernels.shape import AttentionShape, KernelError

COMPUTE_CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
"""Device generations kernels are compiled for."""

_PTX_VERSION = 87
"""What drivers from CUDA 12.8 on take, and enough for all device generations here. Triton's own default may be newer
than the driver at hand."""
_FIRST_WITH_FP8 = (8, 9)
_ALIGNMENT = 16
"""Bytes that every pointer is a multiple of, so that loads can be as wide as hardware has them."""

_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "int8": "i8",
}
_POOLS = ("key_pool", "value_pool")
_ROWS = ("query", "key", "value", "output")
_WORKSPACE = ("split_weighted", "split_sums")
_SCALAR = "num_sequences"


class CompiledKernel(NamedTuple):
    """A kernel that `cuLaunchKernel` and TensorRT can launch."""

    entry: str
    parameters: tuple[str, ...]
    """Names in order: pointers to device memory, and `num_sequences`, an int32."""
    compute_capability: str
    ptx: str
    cubin: bytes
    num_warps: int
    """A block is `32 * num_warps` threads."""
    shared_bytes: int
    """Dynamic shared memory of a block."""
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread: registers that did not fit and are kept in memory, which a fast kernel has none of."""


def compile_kernel(shape: AttentionShape, launch: Launch, compute_capability: str) -> CompiledKernel:
    """Compile one kernel of a layer.

    Args:
        shape: the layer.
        launch: the kernel and its constants; the grid does not matter.
        compute_capability: one of `COMPUTE_CAPABILITIES`.

    Raises:
        KernelError: this shape or device generation is not possible, or Triton is not installed.
    """
    shape.check()
    _check(shape, compute_capability)
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise KernelError(
            "compiling kernels needs the package triton: pip install 'inflight-executor[kernels]'"
        ) from error
    from engine_build.kernels import paged_attention

    function = getattr(paged_attention, launch.kernel)
    names: list[str] = function.arg_names
    parameters = tuple(name for name in names if name not in launch.constants)
    signature = {name: "constexpr" if name in launch.constants else _parameter_type(name, shape) for name in names}
    source = ASTSource(
        function,
        signature,
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", _ALIGNMENT]] for name in parameters if name != _SCALAR},
    )
    number = int(compute_capability.replace(".", ""))
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    with triton.knobs.compilation.scope():
        # Line information holds this machine's paths.
        triton.knobs.compilation.disable_line_info = True
        compiled = triton.compile(
            source, target=GPUTarget("cuda", number, 32), options=options | {"ptx_version": _PTX_VERSION}
        )
    ptx = without_hidden_parameters(compiled.asm["ptx"], len(parameters))
    cubin, registers, spilled_bytes = _assemble(ptx, number)
    return CompiledKernel(
        entry_name(ptx),
        parameters,
        compute_capability,
        ptx,
        cubin,
        launch.num_warps,
        compiled.metadata.shared,
        registers,
        spilled_bytes,
    )


def _check(shape: AttentionShape, compute_capability: str) -> None:
    if compute_capability not in COMPUTE_CAPABILITIES:
        raise KernelError(
            f"compute capability {compute_capability!r} is not supported; kernels are compiled for "
            f"{', '.join(COMPUTE_CAPABILITIES)}"
        )
    generation = tuple(int(part) for part in compute_capability.split("."))
    if shape.kv_cache_dtype == "float8_e4m3fn" and generation < _FIRST_WITH_FP8:
        raise KernelError(
            f"kv_cache_dtype float8_e4m3fn needs compute capability 8.9 or newer, not {compute_capability}; "
            "int8 runs there"
        )


def _parameter_type(name: str, shape: AttentionShape) -> str:
    if name in _POOLS:
        return f"*{_TYPES[shape.kv_cache_dtype]}"
    if name in _ROWS:
        return f"*{_TYPES[shape.dtype]}"
    if name in _WORKSPACE:
        return "*fp32"
    return "i32" if name == _SCALAR else "*i32"


def _assemble(ptx: str, number: int) -> tuple[bytes, int, int]:
    """Machine code, registers of a thread and bytes it spills.

    Of the two assemblers that come with Triton the newer one, which knows all generations.
    """
    from triton import knobs

    tool: Any = knobs.nvidia.ptxas_blackwell
    # Hopper and later: the architecture's own instructions, which Triton's code uses, are in the variant named "a".
    architecture = f"sm_{number}a" if number >= 90 else f"sm_{number}"
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx, encoding="utf-8")
        done = subprocess.run(
            [tool.path, "-v", f"-arch={architecture}", source, "-o", target],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise KernelError(f"ptxas refused the code for {architecture}: {done.stderr.strip()}")
        registers = sum(int(count) for count in re.findall(r"Used (\d+) registers", done.stderr))
        spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", done.stderr))
        return target.read_bytes(), registers, spilled
