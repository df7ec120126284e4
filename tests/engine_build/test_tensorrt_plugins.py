"""The target `tensorrt`, as far as it goes without its libraries: plugins, their code, the network around them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import tensorrt_rtx

from engine_build.builder import resolve_build_config
from engine_build.kernels.shape import AttentionShape
from engine_build.manifest import BuildConfig, TensorRtConfig
from engine_build.network import MODEL_FILE, NetworkOptions, write_network
from engine_build.parallel import Rank
from engine_build.targets.interface import TargetError, TensorRtOptions
from engine_build.targets.select import select_target
from engine_build.targets.tensorrt.collective_layers import COLLECTIVE_OPERATORS
from engine_build.targets.tensorrt.emitter import NetworkEmitter
from engine_build.targets.tensorrt.operators import OPERATORS
from engine_build.targets.tensorrt.plugin_attention import plugin_operators
from engine_build.targets.tensorrt.plugin_kernels import LayerKernels
from engine_build.targets.tensorrt.plugins import PLUGINS, encode
from engine_build.targets.tensorrt.pool_tensors import add_cache_outputs, cache_inputs, set_cache_type
from engine_build.targets.tensorrt.profiles import profile_ranges
from engine_build.targets.tensorrt.weight_file import ConstantReader
from tests.engine_build import genuine_tensorrt
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config

_REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def genuine() -> dict[str, Any]:
    """What the bindings of TensorRT 11.4 say to our plugins."""
    done = subprocess.run(
        [sys.executable, "-m", genuine_tensorrt.__name__],
        cwd=_REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_the_genuine_decorators_accept_every_plugin(genuine: dict[str, Any]) -> None:
    assert genuine["version"].startswith("11.4.")
    plugins = genuine["plugins"]
    assert list(plugins) == ["write_kv", "attend_context", "attend_generation", "reduce_splits"]
    assert plugins["write_kv"]["aliased"] == ["key_cache", "value_cache"]
    assert plugins["reduce_splits"]["aliased"] == ["output_of_context"]
    for plugin in plugins.values():
        assert plugin["is_launch"]
        assert len(plugin["types"]) == len(plugin["inputs"]) + plugin["num_outputs"]


def test_a_kernel_takes_what_tensorrt_passes(genuine: dict[str, Any]) -> None:
    """Inputs, scalars, outputs: as many parameters as the code declares, each of its size."""
    for plugin in genuine["plugins"].values():
        declared = plugin["ptx"].partition(".entry ")[2].partition(")")[0].partition("(")[2].split(",")
        wide = [".u64" in parameter for parameter in declared]
        expected = [True] * len(plugin["inputs"]) + [False] * plugin["num_scalars"] + [True] * plugin["num_outputs"]
        assert wide == expected, plugin["entry"]


def test_the_code_with_added_parameters_is_assembled(genuine: dict[str, Any], tmp_path: Path) -> None:
    from triton import knobs

    for name, plugin in genuine["plugins"].items():
        source = tmp_path / f"{name}.ptx"
        source.write_text(plugin["ptx"])
        command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", source, "-o", tmp_path / f"{name}.cubin"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def test_grids_cover_every_row_and_sequence() -> None:
    kernels = LayerKernels(AttentionShape(8, 2, 64, 32, "float16", "float16", 0.125), 4, "8.9")
    rows, sequences = 37, 3
    shapes = {"subsequence_begins": (sequences + 1,)}
    inputs = {
        name: SimpleNamespace(shape_expr=shapes.get(name, (rows, 0))) for plugin in PLUGINS for name in plugin.inputs
    }
    grids = {plugin.name: plugin.grid(inputs, kernels) for plugin in PLUGINS}
    tile = kernels.rows_of_context_tile
    assert tile == 128 // 4
    assert grids == {
        "write_kv": (rows, 1, 1),
        "attend_context": (rows // tile + sequences, 2, 1),
        "attend_generation": (sequences, 2, 4),
        "reduce_splits": (sequences, 2, 1),
    }


def test_both_packages_have_the_network_calls_that_we_use(genuine: dict[str, Any]) -> None:
    """By name and parameters: what is built with one is then known to be asked of the other in the same words."""
    ours = genuine_tensorrt.network_signatures(tensorrt_rtx)
    different = {name for name, names in genuine["network"].items() if name in ours and ours[name] != names}
    assert different == set()
    assert set(genuine["network"]) - set(ours) == {"add_plugin_v2", "add_plugin_v3"}
    names = genuine["names"]
    assert {"STRIP_PLAN", "WEIGHT_STREAMING"} <= set(names["BuilderFlag"])
    assert "ALIASED_PLUGIN_IO_10_03" in names["PreviewFeature"]
    assert {"create_timing_cache", "set_timing_cache", "get_timing_cache", "progress_monitor"} <= set(
        names["IBuilderConfig"]
    )


class _PluginLayer:
    """What `add_plugin` gives: identities of the tensors whose shapes its outputs have."""

    def __init__(self, network: Any, outputs: list[Any]) -> None:
        self.name = ""
        self._outputs = [network.add_identity(output).get_output(0) for output in outputs]

    def get_output(self, index: int) -> Any:
        return self._outputs[index]


class _NetworkWithPlugins:
    """A genuine `INetworkDefinition`, which checks types and shapes, that takes plugins besides and records them."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.plugins: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def add_plugin(self, call: tuple[str, tuple[Any, ...], str], aot: bool) -> _PluginLayer:
        assert aot
        name, inputs, kernels = call
        plugin = next(plugin for plugin in PLUGINS if plugin.name == name)
        assert len(inputs) == len(plugin.inputs)
        self.plugins.append((name, kernels))
        like = {"write_kv": [6, 7], "attend_context": [0], "attend_generation": [0, 0], "reduce_splits": [3]}[name]
        return _PluginLayer(self._network, [inputs[index] for index in like])


def _plugin_module() -> Any:
    """Stands for `tensorrt.plugin`: an operator's call says what it was called with."""

    def operator(name: str) -> Any:
        return lambda *inputs, kernels: (name, inputs, kernels)

    return SimpleNamespace(
        op=SimpleNamespace(inflight=SimpleNamespace(**{plugin.name: operator(plugin.name) for plugin in PLUGINS}))
    )


@pytest.mark.parametrize(
    ("tp_size", "kv_cache_dtype"),
    [(1, "bfloat16"), (2, "bfloat16"), (4, "bfloat16"), (1, "int8"), (1, "float8_e4m3fn")],
)
def test_a_ranks_network_is_put_together_with_plugins_and_collectives(
    tp_size: int, kv_cache_dtype: str, tmp_path: Path
) -> None:
    config = tiny_config(num_attention_heads=8, num_key_value_heads=4, hidden_size=128, intermediate_size=128)
    rank = Rank(tp_size=tp_size, tp_rank=tp_size - 1)
    write_network(TinyCheckpoint(config), NetworkOptions("bfloat16", activation_dtype="bfloat16"), tmp_path, rank=rank)
    model = onnx.load(tmp_path / MODEL_FILE, load_external_data=False)
    shape = AttentionShape(8 // tp_size, 4 // tp_size, 16, 32, "bfloat16", kv_cache_dtype, 0.25)
    set_cache_type(model.graph, cache_inputs(model), shape)
    add_cache_outputs(model.graph, cache_inputs(model))
    settings = TensorRtConfig(("9.0",), kv_cache_dtype, False, False, "none")
    build_config = BuildConfig(8, 64, 63, 64, 32, "bfloat16", "as_stored", tp_size, 1, settings)
    logger = tensorrt_rtx.Logger(tensorrt_rtx.Logger.ERROR)
    builder = tensorrt_rtx.Builder(logger)
    network = _NetworkWithPlugins(builder.create_network(0))
    constants = ConstantReader(model, tmp_path)
    operators = OPERATORS | COLLECTIVE_OPERATORS | plugin_operators(_plugin_module(), build_config)
    NetworkEmitter(tensorrt_rtx, network, constants, operators).emit(model.graph)

    assert [name for name, _ in network.plugins] == [plugin.name for plugin in PLUGINS] * config.num_hidden_layers
    assert {kernels for _, kernels in network.plugins} == {encode(LayerKernels(shape, 2, "9.0"))}
    outputs = {network.get_output(index).name: network.get_output(index) for index in range(network.num_outputs)}
    assert set(outputs) == {f"{kind}_cache_{layer}_out" for kind in ("key", "value") for layer in range(2)} | {"logits"}
    assert tuple(outputs["logits"].shape) == (-1, config.vocab_size)
    pool = (-1, 4 // tp_size, 32, 16) if kv_cache_dtype == "bfloat16" else (-1, 4 // tp_size, 32 * (16 + 4))
    assert tuple(outputs["key_cache_0_out"].shape) == pool
    kinds = [network.get_layer(index).type for index in range(network.num_layers)]
    collectives = 0 if tp_size == 1 else 2 * config.num_hidden_layers + 1
    assert kinds.count(tensorrt_rtx.LayerType.DIST_COLLECTIVE) == collectives


def test_plugins_take_steps_and_pools_that_native_layers_do_not() -> None:
    model = tiny_config(max_position_embeddings=8192)
    large = {"max_num_tokens": 8192, "max_batch_size": 64}
    build_config = resolve_build_config(
        model,
        select_target("tensorrt"),
        tensorrt=TensorRtOptions(("9.0",)),
        **large,  # type: ignore[arg-type]
    )
    ranges = profile_ranges(build_config, model, is_attention_native=False)
    assert [sizes["T"].largest for sizes in ranges] == [64, 8192]
    assert ranges[0]["num_blocks"].largest == (2**31 - 1) // (2 * 32 * 16)
    with pytest.raises(TargetError, match=r"more than the 2\^31 - 1 elements of a tensor"):
        resolve_build_config(model, select_target("tensorrt-rtx"), **large)  # type: ignore[arg-type]


def test_without_a_gpu_a_build_says_so_before_anything_is_done() -> None:
    with pytest.raises(TargetError, match=r"no NVIDIA GPU can be used here \(cudaError\w+\): a driver of CUDA 13"):
        resolve_build_config(tiny_config(), select_target("tensorrt"))


def test_the_package_that_is_missing_is_named_with_what_installs_it() -> None:
    with pytest.raises(TargetError, match=r"tensorrt-cu13, which is not installed: pip install .*\[tensorrt\]"):
        select_target("tensorrt").versions()


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        (
            TensorRtOptions(("12.1",)),
            {},
            r"'12\.1' is not supported; target tensorrt builds for 8\.0, 8\.6, 8\.9, 9\.0",
        ),
        (TensorRtOptions(("8.0", "9.0")), {}, "builds for one compute capability, that of the GPU it builds on"),
        (TensorRtOptions(("9.0",), "int3"), {}, "kv_cache_dtype is 'int3'; attention kernels keep keys and values as"),
        (TensorRtOptions(("8.0",), "float8_e4m3fn"), {}, r"'float8_e4m3fn' needs compute capability 8\.9 .* not 8\.0"),
        (TensorRtOptions(("9.0",)), {"dtype": "float32"}, "target tensorrt computes in bfloat16, float16"),
    ],
)
def test_what_it_cannot_build_is_refused(options: TensorRtOptions, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        resolve_build_config(tiny_config(), select_target("tensorrt"), tensorrt=options, **settings)
