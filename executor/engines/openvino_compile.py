"""Compiles the network with OpenVINO's CPU plugin, with every setting that changes a result given explicitly."""

from __future__ import annotations

from pathlib import Path

import openvino

from engine_build.targets.openvino import PRECISIONS, read_network

KV_CACHE_PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "uint8": "u8"}
"""`kv_cache_dtype` -> OpenVINO's name for it."""

KV_CACHE_DTYPES = {"float32": ("float32", "float16", "uint8"), "bfloat16": ("bfloat16", "uint8")}
"""Precision -> what keys and values can be kept in; the first is the default."""

_ACTIVATION_GROUP_SIZES = {"float32": 0, "bfloat16": 32}
"""Precision -> how many activations share a scale where they are rounded to 8 bits to meet 8-bit weights; 0 for never.
Rounding makes such products up to half faster on CPUs without AMX; it is not what float32 was asked for."""


class OpenVinoError(ValueError):
    """OpenVINO cannot run a plan here: says what it was asked for and what it answered."""


def compile_network(
    model_path: Path, *, precision: str, kv_cache_dtype: str, num_threads: int | None
) -> openvino.CompiledModel:
    """Read and compile; takes about a second for a model of 135 million parameters.

    Args:
        model_path: `model.onnx`, its data file beside it.
        precision: `float32` or `bfloat16`.
        kv_cache_dtype: one of `KV_CACHE_DTYPES[precision]`.
        num_threads: CPU threads, `None` for one on each core.

    Raises:
        ValueError: an argument is none of these.
        OpenVinoError: the file cannot be read or compiled, or this CPU has no such precision.
    """
    _check_arguments(precision, kv_cache_dtype, num_threads)
    settings: dict[str, str | int] = {
        # One stream over all threads: two streams of half the threads take twice as long for a step.
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": PRECISIONS[precision],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": _ACTIVATION_GROUP_SIZES[precision],
        # Without it the plugin keeps 8 bits, in float32 too.
        "KV_CACHE_PRECISION": KV_CACHE_PRECISIONS[kv_cache_dtype],
    }
    if kv_cache_dtype == "uint8":
        # By channel, a block is quantized anew whenever a token is appended, so that what it holds depends on how the
        # sequence was cut into steps. By token, a row written twice is the same row.
        settings["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
    if num_threads is not None:
        settings["INFERENCE_NUM_THREADS"] = num_threads
    core = openvino.Core()
    try:
        compiled = core.compile_model(read_network(core, model_path), "CPU", settings)
    except RuntimeError as error:  # what every failure inside OpenVINO is raised as
        raise OpenVinoError(f"OpenVINO cannot compile {model_path}: {error}") from error
    _check_precision(compiled, precision)
    return compiled


def _check_arguments(precision: str, kv_cache_dtype: str, num_threads: int | None) -> None:
    if precision not in KV_CACHE_DTYPES:
        raise ValueError(f"precision is {precision!r}; OpenVINO engines compute in {', '.join(KV_CACHE_DTYPES)}")
    if kv_cache_dtype not in KV_CACHE_DTYPES[precision]:
        raise ValueError(
            f"kv_cache_dtype is {kv_cache_dtype!r}; an OpenVINO engine that computes in {precision} keeps keys and "
            f"values in {', '.join(KV_CACHE_DTYPES[precision])}"
        )
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; it must be at least 1, or None for one on each core")


def _check_precision(compiled: openvino.CompiledModel, precision: str) -> None:
    """The hint is only a hint: a CPU without the precision silently computes in another."""
    actual = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if actual != PRECISIONS[precision]:
        raise OpenVinoError(
            f"the plan computes in {precision}, but OpenVINO on this CPU would compute in {actual}: "
            "build it with --dtype float32"
        )
