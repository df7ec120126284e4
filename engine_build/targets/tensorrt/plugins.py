"""`PagedAttention` as four plugins of TensorRT, one kernel each, whose code is in the plan.

```
key, value ──► write_kv ──► key_cache', value_cache'       the pools, aliased: the same memory, this step's rows in it
                               │
query ─────────────────────────┼──► attend_context ──► output       sequences of many rows
                               └──► attend_generation ──► workspace     sequences of few rows, their contexts in parts
                                         └──► reduce_splits ──► output  (aliased: beside the rows of attend_context)
```

The pools go through TensorRT as tensors, an input and an output of the plan each, not as addresses: the order of
writing and reading is then in the graph, and `get_aliased_input_tensor` lets a runtime see that nothing is copied.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from engine_build.kernels.compile import CompiledKernel
from engine_build.kernels.shape import AttentionShape
from engine_build.targets.tensorrt.plugin_kernels import LayerKernels

NAMESPACE = "inflight"
STEP = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins")
"""Inputs that tell where a step's rows belong."""

_THREADS_OF_A_WARP = 32

Descriptions = dict[str, Any]
"""Input name -> `TensorDesc`."""


class _Plugin(NamedTuple):
    """What one plugin takes, gives and launches."""

    name: str
    inputs: tuple[str, ...]
    outputs: Callable[[Any, Descriptions, LayerKernels], tuple[Any, ...]]
    """The module `plugin`, the inputs and the layer's kernels -> output descriptions."""
    num_outputs: int
    kernel: Callable[[LayerKernels], CompiledKernel]
    grid: Callable[[Descriptions, LayerKernels], tuple[Any, ...]]
    passes_num_sequences: bool


def _num_rows(inputs: Descriptions, name: str) -> Any:
    return inputs[name].shape_expr[0]


def _num_sequences(inputs: Descriptions) -> Any:
    return inputs["subsequence_begins"].shape_expr[0] - 1


def _workspace(trtp: Any, inputs: Descriptions, kernels: LayerKernels) -> tuple[Any, ...]:
    trt_float32 = importlib.import_module(trtp.__name__.rpartition(".")[0]).float32
    return tuple(
        trtp.from_shape_expr((_num_sequences(inputs), *kernels.workspace[name]), trt_float32)
        for name in ("split_weighted", "split_sums")
    )


PLUGINS = (
    _Plugin(
        "write_kv",
        ("key", "value", *STEP, "key_cache", "value_cache"),
        lambda _trtp, inputs, _kernels: (inputs["key_cache"].aliased(), inputs["value_cache"].aliased()),
        2,
        LayerKernels.write,
        lambda inputs, _kernels: (_num_rows(inputs, "key"), 1, 1),
        True,
    ),
    _Plugin(
        "attend_context",
        ("query", *STEP, "key_cache", "value_cache"),
        lambda _trtp, inputs, _kernels: (inputs["query"].like(),),
        1,
        LayerKernels.context,
        lambda inputs, kernels: (
            _num_rows(inputs, "query") // kernels.rows_of_context_tile + _num_sequences(inputs),
            kernels.shape.num_kv_heads,
            1,
        ),
        True,
    ),
    _Plugin(
        "attend_generation",
        ("query", *STEP, "key_cache", "value_cache", "output_of_context"),
        _workspace,
        2,
        LayerKernels.generation,
        lambda inputs, kernels: (_num_sequences(inputs), kernels.shape.num_kv_heads, kernels.num_splits),
        False,
    ),
    _Plugin(
        "reduce_splits",
        ("split_weighted", "split_sums", "subsequence_begins", "output_of_context"),
        lambda _trtp, inputs, _kernels: (inputs["output_of_context"].aliased(),),
        1,
        LayerKernels.reduce,
        lambda inputs, kernels: (_num_sequences(inputs), kernels.shape.num_kv_heads, 1),
        False,
    ),
)
"""In the order they run."""


def encode(kernels: LayerKernels) -> str:
    """The only attribute of every plugin: what its kernel is compiled for. The plan keeps the kernel, not this."""
    return json.dumps(dataclasses.asdict(kernels), sort_keys=True)


def load_plugins(module_name: str) -> Any:
    """The submodule `plugin` of TensorRT, our plugins registered in it."""
    trtp = importlib.import_module(f"{module_name}.plugin")
    if not hasattr(trtp.op, NAMESPACE):
        for plugin in PLUGINS:
            _register(trtp, plugin)
    return trtp


def _register(trtp: Any, plugin: _Plugin) -> None:
    """Hand TensorRT three functions: what the plugin gives, in which types it works, and its code."""
    identity = f"{NAMESPACE}::{plugin.name}"

    def described(arguments: Sequence[Any]) -> tuple[Descriptions, LayerKernels]:
        return dict(zip(plugin.inputs, arguments, strict=False)), _decode(arguments[len(plugin.inputs)])

    def describe(*arguments: Any) -> Any:
        outputs = plugin.outputs(trtp, *described(arguments))
        return outputs if plugin.num_outputs > 1 else outputs[0]

    def autotune(*arguments: Any) -> Any:
        tensors = [*arguments[: len(plugin.inputs)], *arguments[-1]]
        types = ",".join(_TYPE_NAMES[tensor.dtype.name] for tensor in tensors)
        return [trtp.AutoTuneCombination(types, ",".join(["LINEAR"] * len(tensors)))]

    def implement(*arguments: Any) -> Any:
        inputs, kernels = described(arguments)
        kernel = plugin.kernel(kernels)
        launch = trtp.KernelLaunchParams()
        launch.grid_x, launch.grid_y, launch.grid_z = plugin.grid(inputs, kernels)
        launch.block_x = _THREADS_OF_A_WARP * kernel.num_warps
        launch.shared_mem = kernel.shared_bytes
        scalars = trtp.SymIntExprs(int(plugin.passes_num_sequences))
        if plugin.passes_num_sequences:
            scalars[0] = trtp.SymInt32(_num_sequences(inputs))
        return kernel.entry, kernel.ptx, launch, scalars

    desc = trtp.TensorDesc
    given = tuple[(desc,) * plugin.num_outputs] if plugin.num_outputs > 1 else desc  # type: ignore[misc]
    outputs = ("outputs", tuple[(desc,) * plugin.num_outputs])  # type: ignore[misc]
    code = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymExprs]
    # TensorRT learns a plugin's inputs and attributes from the signatures of these functions.
    _sign(describe, plugin, desc, [], given)
    _sign(autotune, plugin, desc, [outputs], list[trtp.AutoTuneCombination])
    _sign(implement, plugin, desc, [outputs, ("tactic", int)], code)
    trtp.register(identity, lazy_register=True)(describe)
    trtp.autotune(identity)(autotune)
    trtp.aot_impl(identity)(implement)


_TYPE_NAMES = {"FLOAT": "FP32", "HALF": "FP16", "BF16": "BF16", "INT32": "INT32", "FP8": "FP8", "INT8": "INT8"}
"""`DataType` -> what autotuning calls it."""


def _sign(function: Any, plugin: _Plugin, desc: Any, more: Sequence[tuple[str, Any]], returns: Any) -> None:
    parameters = [*((name, desc) for name in plugin.inputs), ("kernels", str), *more]
    function.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
            for name, annotation in parameters
        ],
        return_annotation=returns,
    )


def _decode(encoded: str) -> LayerKernels:
    fields = json.loads(encoded)
    return LayerKernels(AttentionShape(**fields["shape"]), fields["num_splits"], fields["compute_capability"])
