"""Run as a program: registers our plugins with the genuine bindings of TensorRT 11 and tells what came of it, as JSON.

The bindings are NVIDIA's; the libraries under them are not installable everywhere, so three libraries with the same
names, whose functions return null, take their place. Nothing can be built or run with those. What can be seen is what
the bindings themselves decide: which functions and parameters there are, and how plugins must be described.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
_FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)


def load_bindings() -> Any:
    """The module `tensorrt`, over libraries that do nothing."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        source = directory / "null.c"
        source.write_text("\n".join(f"void *{function}(void) {{ return 0; }}" for function in _FUNCTIONS))
        for library in _LIBRARIES:
            path = directory / library
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-o", path, source, f"-Wl,-soname,{library}"], check=True, timeout=60
            )
            ctypes.CDLL(str(path))  # its name now satisfies the bindings' wish for it
    bindings = importlib.import_module("tensorrt_bindings")
    sys.modules["tensorrt"] = bindings
    sys.modules["tensorrt.plugin"] = importlib.import_module("tensorrt_bindings.plugin")
    return bindings


def parameters(function: Any) -> list[str]:
    """Parameter names from the first line of a bound function's documentation."""
    signature = re.match(r"\w+\((.*)\)", str(function.__doc__))
    assert signature is not None
    return re.findall(r"(?:^|, )(\w+):", signature[1])


def network_signatures(trt: Any) -> dict[str, list[str]]:
    """`add_*` of `INetworkDefinition` -> parameter names; functions with several signatures are left out."""
    functions = {name: getattr(trt.INetworkDefinition, name) for name in dir(trt.INetworkDefinition)}
    return {
        name: parameters(function)
        for name, function in functions.items()
        if name.startswith("add_") and "*args" not in str(function.__doc__).splitlines()[0]
    }


def public_names(trt: Any) -> dict[str, list[str]]:
    """Class -> its public names, for the classes that our builder uses."""
    classes = ("Builder", "IBuilderConfig", "BuilderFlag", "PreviewFeature", "ProfilingVerbosity", "ReduceOperation")
    classes = (*classes, "CollectiveOperation", "ElementWiseOperation", "UnaryOperation", "IDistCollectiveLayer")
    return {name: [member for member in dir(getattr(trt, name)) if not member.startswith("_")] for name in classes}


def main() -> None:
    trt = load_bindings()
    from engine_build.kernels.shape import AttentionShape
    from engine_build.targets.tensorrt.plugin_kernels import LayerKernels
    from engine_build.targets.tensorrt.plugins import PLUGINS, encode, load_plugins

    trtp = load_plugins("tensorrt")
    from tensorrt_bindings.plugin._lib import QDP_REGISTRY

    kernels = LayerKernels(AttentionShape(9, 3, 64, 32, "bfloat16", "bfloat16", 0.125), 4, "9.0")
    report: dict[str, Any] = {
        "version": trt.__version__,
        "network": network_signatures(trt),
        "names": public_names(trt),
        "plugins": {},
    }
    integers = {"past_lens", "subsequence_begins", "block_indices", "block_indices_begins"}
    for plugin in PLUGINS:
        registered = QDP_REGISTRY[f"inflight::{plugin.name}"]
        inputs = [
            trtp.TensorDesc(
                trtp.ShapeExprs(4 if "cache" in name else 2, _is_dummy=True),
                trt.int32 if name in integers else trt.float32 if "split" in name else trt.bfloat16,
            )
            for name in plugin.inputs
        ]
        outputs = registered.register_func(*inputs, encode(kernels))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        combination = registered.autotune_func(*inputs, encode(kernels), outputs)[0]
        entry, ptx, launch, scalars = registered.aot_impl_func(*inputs, encode(kernels), outputs, 0)
        report["plugins"][plugin.name] = {
            "inputs": registered.input_tensor_names,
            "num_outputs": registered.num_outputs,
            "aliased": [
                plugin.inputs[inputs.index(output.get_aliased())] if output.is_aliased else None for output in outputs
            ],
            "types": combination.io_types,
            "entry": entry,
            "ptx": ptx,
            "is_launch": isinstance(launch, trtp.KernelLaunchParams),
            "num_scalars": len(scalars),
        }
    print()  # TensorRT writes to the same stream
    print(json.dumps(report))


if __name__ == "__main__":
    main()
