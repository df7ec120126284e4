"""From the `config.pbtxt` of TensorRT-LLM's Triton model `tensorrt_llm` to what a repository of ours is like.

Nothing gets lost silently: every parameter and setting that is not carried over is told, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from executor.triton import tensors
from executor.triton.backend.settings import ParameterError, string_parameters
from executor.triton.config_pbtxt import ConfigSyntaxError, read_config
from executor.triton.parameters import read_parameter

_SET_ANEW: Mapping[str, str] = {
    "gpt_model_path": "the engine directory given is used",
    "executor_worker_path": "the executor command of this environment is used",
    "tokenizer_dir": "the engine directory's tokenizer is used",
    "gpt_model_type": "requests are batched in flight",
}
_KNOWN_FIELDS = frozenset(
    {"name", "backend", "max_batch_size", "model_transaction_policy", "dynamic_batching", "input", "output"}
    | {"instance_group", "parameters", "platform"}
)


@dataclass
class Conversion:
    """What came of a configuration."""

    max_batch_size: int | None = None
    decoupled: bool | None = None
    instance_count: int | None = None
    dynamic_batching: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    carried: list[str] = field(default_factory=list)
    """A line for each setting that was taken over."""
    left: list[str] = field(default_factory=list)
    """A line for each that was not, and why."""


def convert(text: str) -> Conversion:
    """Read an old configuration.

    Raises:
        ConfigSyntaxError: it is not one.
    """
    config = read_config(text)
    result = Conversion()
    if "parameters" not in config and "input" not in config:
        raise ConfigSyntaxError("no model configuration: it has neither inputs nor parameters")
    _convert_settings(config, result)
    _convert_parameters(config, result)
    _compare_tensors("input", config.get("input", []), tensors.LLM_INPUTS, result)
    _compare_tensors("output", config.get("output", []), tensors.LLM_OUTPUTS, result)
    for name in config:
        if name not in _KNOWN_FIELDS:
            result.left.append(f"{name}: the repository has no such setting; add it to its config.pbtxt if you need it")
    return result


def _convert_settings(config: Mapping[str, Any], result: Conversion) -> None:
    size = config.get("max_batch_size")
    if isinstance(size, int):
        result.max_batch_size = size
        result.carried.append(f"max_batch_size = {size}")
    decoupled = config.get("model_transaction_policy", {}).get("decoupled")
    if isinstance(decoupled, bool):
        result.decoupled = decoupled
        result.carried.append(f"decoupled = {decoupled}")
    for name, value in (("max_batch_size", size), ("decoupled", decoupled)):
        if isinstance(value, str):
            result.left.append(f"{name} = {value}: a template's variable that was never filled in")
    groups = config.get("instance_group", [])
    if len(groups) == 1 and isinstance(groups[0].get("count", 1), int):
        result.instance_count = groups[0].get("count", 1)
    elif groups:
        result.left.append("instance_group: one group of CPU instances is written; all share one executor")
    _convert_dynamic_batching(config.get("dynamic_batching", {}), result)


def _convert_dynamic_batching(batching: Mapping[str, Any], result: Conversion) -> None:
    for name, value in batching.items():
        if name == "preferred_batch_size":
            result.left.append(f"dynamic_batching.{name} = {value}: requests join the running batch one by one")
        elif _has_variable(value):
            result.left.append(f"dynamic_batching.{name}: a template's variable in it was never filled in")
        elif name == "max_queue_delay_microseconds" and value:
            result.left.append(f"dynamic_batching.{name} = {value}: waiting for others would only delay a request")
        elif name != "max_queue_delay_microseconds":
            result.dynamic_batching[name] = value
            result.carried.append(f"dynamic_batching.{name}")
            if name == "default_queue_policy" and value.get("max_queue_size"):
                result.parameters["max_queue_size"] = str(value["max_queue_size"])
                result.carried.append(f"max_queue_size = {value['max_queue_size']}, for the executor's queue as well")


def _convert_parameters(config: Mapping[str, Any], result: Conversion) -> None:
    entries = {name: entry for name, entry in config.get("parameters", {}).items() if isinstance(entry, Mapping)}
    for name, value in string_parameters({"parameters": entries}).items():
        if name in _SET_ANEW:
            result.left.append(f"parameter {name} = {value}: {_SET_ANEW[name]}")
            continue
        try:
            read_parameter(name, value)
        except ParameterError as error:
            result.left.append(str(error))
        else:
            result.parameters[name] = value
            result.carried.append(f"parameter {name} = {value}")


def _compare_tensors(kind: str, found: list[Any], known: list[tensors.TensorSpec], result: Conversion) -> None:
    by_name = {tensor.name: tensor for tensor in known}
    for tensor in found:
        name, data_type = tensor.get("name", ""), str(tensor.get("data_type", "")).removeprefix("TYPE_")
        if name not in by_name:
            result.left.append(f"{kind} {name}: the model has no such {kind}")
        elif data_type != by_name[name].data_type and not _has_variable(data_type):
            result.left.append(f"{kind} {name} of type {data_type}: it is {by_name[name].data_type} here")


def _has_variable(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_variable, value.values()))
    if isinstance(value, list):
        return any(map(_has_variable, value))
    return isinstance(value, str) and "${" in value
