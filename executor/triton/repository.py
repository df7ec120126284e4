"""A model repository for Triton: five models with TensorRT-LLM's names, on one engine directory.

```
REPO/ tensorrt_llm/      config.pbtxt   1/model.py ──► executor/triton/backend/llm.py, copied beside it
      preprocessing/     ...
      postprocessing/
      ensemble/          config.pbtxt   1/            the three above, one after the other
      tensorrt_llm_bls/  config.pbtxt   1/model.py    the same by calls
```
Disaggregated, `context`, `generation` and `disaggregated_serving_bls`, which calls both, take the place of
`tensorrt_llm`.

The models carry what they run, so that a repository can be copied; Triton's interpreter needs numpy below 2 and
`tokenizers`. The Executor runs in the environment of the `executor` command that the repository names.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor.triton import tensors
from executor.triton.config_pbtxt import Word, write_config
from executor.triton.tensors import TensorSpec

BACKEND_NAME = "inflight"

_PACKAGE = Path(__file__).resolve().parent.parent
_CARRIED = ("triton/tensors.py", "text/token_bytes.py", "text/incremental_decoder.py")
"""What runs in Triton's interpreter beside `triton/backend/`."""
_MODEL = '''"""The model `{name}`. Written by `executor triton-repo`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from executor.triton.backend.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class RepositoryOptions:
    """What a repository is like."""

    engine_dir: Path
    tokenizer_dir: Path | None
    """`None`: an engine of token ids only, served by `tensorrt_llm` alone."""
    executor_command: Path
    """The `executor` command of the environment that runs the engine."""
    decoupled: bool = True
    max_batch_size: int = 64
    """Rows of one Triton request."""
    dynamic_batching: Mapping[str, Any] = field(default_factory=dict)
    instance_count: int = 1
    text_instance_count: int = 1
    """Of preprocessing and postprocessing."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of `tensorrt_llm`, beside those above."""
    is_custom_backend: bool = False
    """Whether `tensorrt_llm` names the backend `inflight`, installed by `install_backend`, instead of `python`."""
    is_disaggregated: bool = False
    """Whether context and generation are instances of their own."""

    @property
    def llm_name(self) -> str:
        """The model that takes token ids of clients and of the text models."""
        return "disaggregated_serving_bls" if self.is_disaggregated else "tensorrt_llm"


def write_repository(repository: Path, options: RepositoryOptions) -> None:
    """Write all models into a folder; models of these names that are there are replaced.

    Raises:
        OSError: it cannot be written.
    """
    _write_llm(repository, options)
    if options.tokenizer_dir is None:
        return
    tokenizer = {"tokenizer_dir": str(options.tokenizer_dir)}
    _write_model(
        repository,
        _config(
            "preprocessing",
            options,
            tensors.PREPROCESSING_INPUTS,
            tensors.PREPROCESSING_OUTPUTS,
            {**tokenizer, "add_special_tokens": "true"},
            count=options.text_instance_count,
        ),
        "preprocessing",
    )
    _write_model(
        repository,
        _config(
            "postprocessing",
            options,
            tensors.POSTPROCESSING_INPUTS,
            tensors.POSTPROCESSING_OUTPUTS,
            {**tokenizer, "skip_special_tokens": "true"},
            count=options.text_instance_count,
        ),
        "postprocessing",
    )
    _write_model(repository, _ensemble_config(options), None)
    bls = _config(
        "tensorrt_llm_bls",
        options,
        tensors.BLS_INPUTS,
        tensors.TEXT_OUTPUTS,
        {"accumulate_tokens": "false", "tensorrt_llm_model_name": options.llm_name},
    )
    _write_model(repository, {**bls, "model_transaction_policy": {"decoupled": options.decoupled}}, "bls")


def install_backend(backend_directory: Path) -> None:
    """Put the backend `inflight` into a folder that is then given to tritonserver as `--backend-directory`.

    Raises:
        OSError: it cannot be written.
    """
    _write_code(backend_directory / BACKEND_NAME, BACKEND_NAME, "llm")


def _write_llm(repository: Path, options: RepositoryOptions) -> None:
    module = None if options.is_custom_backend else "llm"
    if not options.is_disaggregated:
        _write_model(repository, _llm_config(options, "tensorrt_llm", {}), module)
        return
    for role in ("context", "generation"):
        _write_model(repository, _llm_config(options, role, {"instance_role": role}), module)
    bls = _config(
        options.llm_name,
        options,
        tensors.DISAGGREGATED_INPUTS,
        tensors.DISAGGREGATED_OUTPUTS,
        {"context_model_name": "context", "generation_model_name": "generation"},
    )
    _write_model(repository, {**bls, "model_transaction_policy": {"decoupled": options.decoupled}}, "disaggregated")


def _llm_config(options: RepositoryOptions, name: str, more: Mapping[str, str]) -> dict[str, Any]:
    parameters = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(options.engine_dir),
        "executor_worker_path": str(options.executor_command),
        **options.parameters,
        **more,
    }
    config = _config(
        name,
        options,
        tensors.LLM_INPUTS,
        tensors.LLM_OUTPUTS,
        parameters,
        backend=BACKEND_NAME if options.is_custom_backend else "python",
        count=options.instance_count,
    )
    return {
        **config,
        "model_transaction_policy": {"decoupled": options.decoupled},
        "dynamic_batching": dict(options.dynamic_batching),
    }


def _ensemble_config(options: RepositoryOptions) -> dict[str, Any]:
    """Tensors between the steps are named after the inputs they become."""
    inner = {name: f"_{name}" for name in tensors.PREPROCESSING_TO_LLM}
    between = {name: f"_{name}" for name in tensors.LLM_TO_POSTPROCESSING if name not in tensors.LLM_TO_TEXT}
    told = {name: name for name in tensors.LLM_TO_TEXT}
    llm_outputs = {**between, **told}
    steps = [
        {
            "model_name": "preprocessing",
            "model_version": -1,
            "input_map": {model: outer for outer, model in tensors.TEXT_TO_PREPROCESSING.items()},
            "output_map": inner,
        },
        {
            "model_name": options.llm_name,
            "model_version": -1,
            "input_map": {
                **{model: inner[name] for name, model in tensors.PREPROCESSING_TO_LLM.items()},
                **{model: outer for outer, model in tensors.TEXT_TO_LLM.items()},
            },
            "output_map": llm_outputs,
        },
        {
            "model_name": "postprocessing",
            "model_version": -1,
            "input_map": {model: llm_outputs[name] for name, model in tensors.LLM_TO_POSTPROCESSING.items()},
            "output_map": {"OUTPUT": "text_output"},
        },
    ]
    return {
        "name": "ensemble",
        "platform": "ensemble",
        "max_batch_size": options.max_batch_size,
        "input": [_tensor(tensor) for tensor in tensors.TEXT_INPUTS],
        "output": [_tensor(tensor) for tensor in tensors.TEXT_OUTPUTS],
        "ensemble_scheduling": {"step": steps},
    }


def _config(
    name: str,
    options: RepositoryOptions,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    parameters: Mapping[str, str],
    *,
    backend: str = "python",
    count: int = 1,
) -> dict[str, Any]:
    return {
        "name": name,
        "backend": backend,
        "max_batch_size": options.max_batch_size,
        "input": [_tensor(tensor) for tensor in inputs],
        "output": [_tensor(tensor) for tensor in outputs],
        "instance_group": [{"count": count, "kind": Word("KIND_CPU")}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    message: dict[str, Any] = {
        "name": tensor.name,
        "data_type": Word(f"TYPE_{tensor.data_type}"),
        "dims": list(tensor.dims),
    }
    if tensor.is_scalar:
        message["reshape"] = {"shape": []}
    if tensor.optional:
        message["optional"] = True
    if tensor.ragged:
        message["allow_ragged_batch"] = True
    return message


def _write_model(repository: Path, config: Mapping[str, Any], module: str | None) -> None:
    name = config["name"]
    model = repository / name
    shutil.rmtree(model, ignore_errors=True)
    version = model / "1"
    version.mkdir(parents=True)
    (model / "config.pbtxt").write_text(write_config(config), encoding="utf-8")
    if module is not None:
        _write_code(version, name, module)


def _write_code(folder: Path, name: str, module: str) -> None:
    """`model.py` and a package `executor` with what it imports."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "executor"
    for source in (*(_PACKAGE / path for path in _CARRIED), *(_PACKAGE / "triton" / "backend").glob("*.py")):
        target = package / source.relative_to(_PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    (package / "__init__.py").touch()
    (folder / "model.py").write_text(_MODEL.format(name=name, module=module), encoding="utf-8")
