"""Kernels compiled for every device generation without a GPU: code that an assembler took, and what it needs."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from engine_build.kernels.compile import COMPUTE_CAPABILITIES, CompiledKernel, compile_kernel
from engine_build.kernels.plan import StepShape, plan_step, write_launch
from engine_build.kernels.ptx import entry_name, without_hidden_parameters
from engine_build.kernels.shape import AttentionShape, KernelError

MIXED = StepShape(num_rows=1000, num_sequences=64, max_context_len=4096)
SHARED_BYTES = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""KiB of shared memory that a block can have, by compute capability (CUDA C++ Programming Guide, table of limits)."""
EM_CUDA = 190
"""The machine type in the ELF header of device code."""


def shape(head_size: int = 64, dtype: str = "bfloat16", kv_cache_dtype: str = "bfloat16") -> AttentionShape:
    return AttentionShape(8, 2, head_size, 16, dtype, kv_cache_dtype, head_size**-0.5)


def compiled_kernels(layer: AttentionShape, compute_capability: str) -> dict[str, CompiledKernel]:
    """All kernels that a mixed step of one layer launches on a large device."""
    launches = plan_step(layer, MIXED, num_multiprocessors=132)
    return {launch.kernel: compile_kernel(layer, launch, compute_capability) for launch in launches}


def check(kernel: CompiledKernel) -> None:
    assert kernel.cubin[:4] == b"\x7fELF"
    assert int.from_bytes(kernel.cubin[18:20], "little") == EM_CUDA
    assert kernel.shared_bytes <= SHARED_BYTES[kernel.compute_capability] * 1024
    assert kernel.spilled_bytes <= 64


@pytest.mark.parametrize("compute_capability", COMPUTE_CAPABILITIES)
def test_every_kernel_of_a_step_compiles_for_every_generation(compute_capability: str) -> None:
    kernels = compiled_kernels(shape(), compute_capability)
    assert list(kernels) == ["write_kv", "attend_context", "attend_generation", "reduce_splits"]
    for name, kernel in kernels.items():
        check(kernel)
        number = compute_capability.replace(".", "")
        assert f".target sm_{number}" in kernel.ptx
        assert kernel.entry == name
        assert kernel.ptx.split(".entry")[1].split(")")[0].count(".param") == len(kernel.parameters)
        assert ".file" not in kernel.ptx  # a path of the machine it was built on


def test_code_for_hopper_uses_its_tensor_cores_and_copies_keys_ahead() -> None:
    kernels = compiled_kernels(shape(head_size=128), "9.0")
    assert "wgmma.mma_async" in kernels["attend_context"].ptx
    assert "mma.sync" in kernels["attend_generation"].ptx
    assert "cp.async.cg.shared.global" in kernels["attend_generation"].ptx


def test_parameters_come_as_inputs_then_scalars_then_outputs() -> None:
    launches = {launch.kernel: launch for launch in plan_step(shape(), MIXED, num_multiprocessors=132)}
    step = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
    pools = ("key_pool", "value_pool")
    expected = {
        "write_kv": ("key", "value", *step, "num_sequences", *pools),
        "attend_context": ("query", *step, *pools, "num_sequences", "output"),
        "attend_generation": ("query", *step, *pools, "output", "split_weighted", "split_sums"),
        "reduce_splits": ("split_weighted", "split_sums", "subsequence_begins", "output"),
    }
    assert {name: compile_kernel(shape(), launch, "9.0").parameters for name, launch in launches.items()} == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("head_size", "types", "compute_capability"),
    list(
        itertools.product(
            (64, 80, 96, 128, 256),
            (
                ("float32", "float32"),
                ("float16", "float16"),
                ("bfloat16", "bfloat16"),
                ("bfloat16", "int8"),
                ("float16", "int8"),
                ("bfloat16", "float8_e4m3fn"),
            ),
            COMPUTE_CAPABILITIES,
        )
    ),
)
def test_every_head_size_and_type_compiles_for_every_generation(
    head_size: int, types: tuple[str, str], compute_capability: str
) -> None:
    if types[1] == "float8_e4m3fn" and compute_capability in ("8.0", "8.6"):
        return  # refused: see below
    for kernel in compiled_kernels(shape(head_size, *types), compute_capability).values():
        check(kernel)


@pytest.mark.parametrize(
    ("layer", "compute_capability", "message"),
    [
        (shape(), "7.5", "'7.5' is not supported; kernels are compiled for 8.0, 8.6"),
        (shape(kv_cache_dtype="float8_e4m3fn"), "8.0", "needs compute capability 8.9 or newer, not 8.0; int8"),
        (shape(kv_cache_dtype="int4"), "9.0", "kv_cache_dtype is 'int4'"),
        (shape(dtype="int8"), "9.0", "dtype is 'int8'; attention kernels compute in float32, float16, bfloat16"),
        (shape(head_size=300), "9.0", "head_size is 300; it must be a multiple of 8 from 16 to 256"),
        (AttentionShape(5, 2, 64, 16, "float16", "float16", 1.0), "9.0", "5 query heads cannot share 2 key heads"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    layer: AttentionShape, compute_capability: str, message: str
) -> None:
    with pytest.raises(KernelError, match=message) as refused:
        compile_kernel(layer, write_launch(shape(), 1), compute_capability)
    assert "\n" not in str(refused.value)


PTX = """.version 8.7
.visible .entry work(
\t.param .u64 .ptr .global .align 1 work_param_0,
\t.param .u32 work_param_1,
\t.param .u64 .ptr .global .align 1 work_param_2
)
{
\tld.param.b64 %rd1, [work_param_0];
\tld.param.b32 %r1, [work_param_1];
\tret;
}
"""


def test_hidden_parameters_are_dropped_from_the_declaration_alone() -> None:
    stripped = without_hidden_parameters(PTX, 2)
    assert "work_param_2" not in stripped
    assert stripped.splitlines()[-5:] == PTX.splitlines()[-5:]
    assert entry_name(stripped) == "work"


def test_a_hidden_parameter_that_is_read_is_not_dropped() -> None:
    with pytest.raises(KernelError, match="entry work reads work_param_1, which only Triton's own launcher passes"):
        without_hidden_parameters(PTX, 1)
    with pytest.raises(KernelError, match="has 3 parameters; 4 are passed"):
        without_hidden_parameters(PTX, 4)


def test_triton_is_loaded_by_compiling_and_by_nothing_before() -> None:
    code = "import engine_build.kernels.compile, engine_build.kernels.plan, sys; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
