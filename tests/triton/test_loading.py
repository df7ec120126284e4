"""Loading models: what their parameters may say, and both ways to be a backend."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor.triton.config_pbtxt import read_config
from executor.triton.repository import RepositoryOptions, install_backend, write_repository
from tests.triton.client import llm_inputs, post, stream
from tests.triton.conftest import write_fake_repository
from tests.triton.server import TRITON, TritonServer, fake_executor_command, running


@pytest.fixture(scope="module")
def server(triton_files: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:  # noqa: ARG001
    """Nothing is loaded but what tests load."""
    directory = tmp_path_factory.mktemp("loading")
    repository = write_fake_repository(directory)
    options = ("--model-control-mode=explicit", "--disable-auto-complete-config")
    with running(repository, directory / "log", *options, ready="/v2/health/live") as started:
        yield started


def load_error(server: TritonServer, **parameters: str) -> str:
    """Load `tensorrt_llm` with parameters changed; returns the error, or an empty text."""
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    config = read_config((server.repository / "tensorrt_llm" / "config.pbtxt").read_text())
    config["parameters"] |= {name: {"string_value": value} for name, value in parameters.items()}
    with InferenceServerClient(server.target) as client:
        try:
            client.load_model("tensorrt_llm", config=json.dumps(config))
        except InferenceServerException as error:
            return error.message()
        client.unload_model("tensorrt_llm")
        return ""


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [("lora_prefetch_dirs", "/x", "unknown"), ("executor_worker_path", "/nowhere/executor", "cannot be run")],
)
def test_a_parameter_that_is_wrong_fails_the_load_with_a_line_that_names_it(
    server: TritonServer, name: str, value: str, right: str
) -> None:
    error = load_error(server, **{name: value})
    assert name in error
    assert right in error


def test_unset_parameters_and_unfilled_templates_are_defaults(server: TritonServer) -> None:
    assert load_error(server, max_tokens_in_paged_kv_cache="", decoding_mode="${decoding_mode}") == ""


@pytest.mark.usefixtures("triton_files")
def test_it_runs_as_a_custom_backend(tmp_path: Path) -> None:
    repository, backends = tmp_path / "repository", tmp_path / "backends"
    write_repository(
        repository,
        RepositoryOptions(
            engine_dir=tmp_path,
            tokenizer_dir=None,
            executor_command=fake_executor_command(tmp_path),
            is_custom_backend=True,
        ),
    )
    backends.mkdir()
    (backends / "python").symlink_to(TRITON / "server" / "pytriton" / "tritonserver" / "backends" / "python")
    install_backend(backends)
    assert not list((repository / "tensorrt_llm" / "1").iterdir())
    with running(repository, tmp_path / "log", f"--backend-directory={backends}") as server:
        config = post_config(server)
        assert config["backend"] == "inflight"
        assert stream(server.target, "tensorrt_llm", {"inputs": llm_inputs([[5]], 3)}).tokens() == [5, 5, 5]


def post_config(server: TritonServer) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/v2/models/tensorrt_llm/config") as answer:
        config: dict[str, Any] = json.loads(answer.read())
    return config


def test_priority_levels_of_the_model_are_understood(server: TritonServer) -> None:
    from tritonclient.grpc import InferenceServerClient

    config = read_config((server.repository / "tensorrt_llm" / "config.pbtxt").read_text())
    config["dynamic_batching"] = {"priority_levels": 3, "default_priority_level": 2}
    with InferenceServerClient(server.target) as client:
        client.load_model("tensorrt_llm", config=json.dumps(config))
        body = {"input_ids": [72], "input_lengths": 1, "request_output_len": 2}
        url = f"{server.url}/v2/models/tensorrt_llm/generate"
        assert post(url, {**body, "priority_level": 3}).status == 200
        assert "0 to 3" in post(url, {**body, "priority_level": 4}).body["error"]
        client.unload_model("tensorrt_llm")
