"""Context on one model and generation on another, behind a third, on a real Triton server with the tiny engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_manager.request import FinishReason
from executor import Executor, Request
from executor.api.request import OutputConfig
from tests.triton.client import Streamed, llm_inputs, post, post_stream, rows_of, stream
from tests.triton.conftest import write_fake_repository
from tests.triton.server import TritonServer, running, wait_for

MODEL = "disaggregated_serving_bls"
PROMPT = [index % 90 for index in range(60)]


@pytest.fixture(scope="module")
def server(
    triton_files: None,  # noqa: ARG001 - the fixture is what is needed
    tiny_engine: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TritonServer]:
    """All seven models, decoupled."""
    pytest.importorskip("nixl_cu12")
    directory = tmp_path_factory.mktemp("disaggregated")
    repository = directory / "repository"
    options = ["triton-repo", tiny_engine, "--output", repository, "--disaggregated"]
    options += ["--parameter", "stats_check_period_ms=20", "--parameter", "num_threads=1"]
    command = Path(sys.executable).with_name("executor")
    subprocess.run([str(part) for part in (command, *options)], check=True, capture_output=True)
    with running(repository, directory / "log") as started:
        yield started


@pytest.fixture(scope="module")
def expected(tiny_engine: Path) -> Iterator[Any]:
    """What one instance answers."""
    with Executor(tiny_engine) as executor:

        def tokens(prompt: list[int], count: int) -> list[int]:
            request = Request(prompt, count, output_config=OutputConfig(exclude_input_from_output=True))
            return executor.await_responses(executor.enqueue_request(request))[-1].result.output_token_ids[0]

        yield tokens


def generate(server: TritonServer, prompts: list[list[int]], count: int, **more: Any) -> Streamed:
    return stream(server.target, MODEL, {"inputs": llm_inputs(prompts, count, **more)})


def transfers(server: TritonServer, model: str, member: str) -> float:
    return server.gauge("nv_trt_llm_disaggregated_serving_metrics", "disaggregated_serving_type", member, model)


def test_a_stream_gives_the_tokens_of_one_instance_each_once(server: TritonServer, expected: Any) -> None:
    asked = {"streaming": rows_of(True, bool), "return_log_probs": rows_of(True, bool)}
    streamed = generate(server, [PROMPT], 12, return_context_logits=rows_of(True, bool), **asked)
    assert streamed.errors == []
    assert streamed.tokens() == expected(PROMPT, 12)
    assert streamed.num_final == 1
    first, *_, last = streamed.pieces
    assert first.outputs["sequence_length"] == [[1]]
    assert first.outputs["finish_reason"] == [[FinishReason.NOT_FINISHED]]
    assert last.outputs["finish_reason"] == [[FinishReason.LENGTH]]
    assert sum(piece.outputs["output_log_probs"].size for piece in streamed.pieces) == 12
    lengths = [piece.outputs["context_logits"].shape[1] for piece in streamed.pieces]
    assert lengths == [*[0] * (len(lengths) - 1), len(PROMPT)]
    seen: list[int] = []
    for piece in streamed.pieces:
        prefix = piece.outputs["prefix_ids"].ravel().tolist()
        assert prefix == seen[len(seen) - len(prefix) :]
        assert prefix or not seen
        seen += piece.outputs["output_ids"].ravel().tolist()


def test_without_streaming_there_is_one_response_that_starts_with_the_prompt(
    server: TritonServer, expected: Any
) -> None:
    streamed = generate(server, [PROMPT], 12, return_context_logits=rows_of(True, bool))
    assert [piece.is_final for piece in streamed.pieces] == [True]
    assert streamed.tokens() == PROMPT + expected(PROMPT, 12)
    assert streamed.pieces[0].outputs["context_logits"].shape == (1, len(PROMPT), 258)


@pytest.mark.parametrize("streams", [True, False])
def test_each_row_goes_its_own_way(server: TritonServer, expected: Any, streams: bool) -> None:
    prompts = [PROMPT, [1, 2, 3], [9] * 20]
    asked = {"streaming": rows_of(streams, bool, 3), "exclude_input_in_output": rows_of(True, bool, 3)}
    streamed = generate(server, prompts, 8, **asked)
    assert streamed.errors == []
    assert [streamed.tokens(row) for row in range(3)] == [expected(prompt, 8) for prompt in prompts]
    assert streamed.num_final == 1
    assert streamed.pieces[-1].is_final


def test_an_answer_of_one_token_needs_no_second_instance(server: TritonServer, expected: Any) -> None:
    streamed = generate(server, [PROMPT], 1, streaming=rows_of(True, bool))
    assert streamed.tokens() == expected(PROMPT, 1)
    assert streamed.pieces[-1].outputs["finish_reason"] == [[FinishReason.LENGTH]]
    assert streamed.num_final == 1


def test_what_went_from_one_instance_to_the_other_is_counted(server: TritonServer) -> None:
    before = transfers(server, "generation", "request_count"), transfers(server, "context", "request_count")
    milliseconds = transfers(server, "generation", "kv_cache_transfer_ms")
    generate(server, [[7] * 50, [8] * 50], 4)
    wait_for(lambda: transfers(server, "generation", "request_count") == before[0] + 2)
    wait_for(lambda: transfers(server, "context", "request_count") == before[1] + 2)
    assert transfers(server, "generation", "kv_cache_transfer_ms") > milliseconds


def test_clients_may_hand_the_context_on_themselves(server: TritonServer, expected: Any) -> None:
    """With upstream's names: the request parameter `request_type`, the tensor `context_phase_params`."""
    inputs = llm_inputs([PROMPT], 6)
    context = stream(server.target, "context", {"inputs": inputs, "parameters": {"request_type": "context_only"}})
    assert context.errors == []
    params = context.pieces[0].outputs["context_phase_params"]
    assert params.dtype == np.uint8
    go_on = {
        "inputs": llm_inputs([PROMPT], 6, context_phase_params=params),
        "parameters": {"request_type": "generation_only"},
    }
    assert stream(server.target, "generation", go_on).tokens() == PROMPT + expected(PROMPT, 6)


def test_what_is_wrong_is_refused_by_name(server: TritonServer) -> None:
    def error(model: str, parameters: dict[str, Any], **tensors: Any) -> str:
        call = {"inputs": llm_inputs([PROMPT], 6, **tensors), "parameters": parameters}
        [message] = stream(server.target, model, call).errors
        return message

    assert "context_phase_params" in error("generation", {"request_type": "generation_only"})
    damaged = np.array([[1, 2, 3]], np.uint8)
    assert "hand on" in error("generation", {"request_type": "generation_only"}, context_phase_params=damaged)
    assert "role is generation" in error("generation", {"request_type": "context_only"})
    assert "request_type" in error("context", {"request_type": "context"})
    assert "temperature" in error(MODEL, {}, temperature=rows_of(-1.0, np.float32))
    assert "return_generation_logits" in error(MODEL, {}, return_generation_logits=rows_of(True, bool))
    assert "num_return_sequences" in error(MODEL, {}, num_return_sequences=rows_of(2, np.int32))


@pytest.fixture(scope="module")
def slow_server(triton_files: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:  # noqa: ARG001
    """On Executors that make a token every 10 ms."""
    directory = tmp_path_factory.mktemp("slow")
    repository = write_fake_repository(directory, "--step-seconds", "0.01", disaggregated=True)
    with running(repository, directory / "log") as started:
        yield started


def endless(streams: bool, request_id: str = "") -> dict[str, Any]:
    return {"inputs": llm_inputs([[1, 2]], 5000, streaming=rows_of(streams, bool)), "request_id": request_id}


def active(server: TritonServer, model: str) -> float:
    try:
        return server.gauge("nv_trt_llm_request_metrics", "request_type", "active", model)
    except KeyError:
        return 0.0  # gauges appear with the first iteration


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_is_stopped_by_its_id(slow_server: TritonServer, streams: bool) -> None:
    stop = {"inputs": llm_inputs([[0]], 0, stop=rows_of(True, bool)), "request_id": "to stop"}
    streamed = stream(slow_server.target, MODEL, endless(streams, "to stop"), stop)
    assert streamed.errors == []
    assert 0 < len(streamed.tokens()) < 500
    assert streamed.num_final == 2
    reasons = [piece.outputs["finish_reason"][0][0] for piece in streamed.pieces if "finish_reason" in piece.outputs]
    assert reasons[-1] == FinishReason.CANCELLED


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_request(slow_server: TritonServer, streams: bool) -> None:
    from tritonclient.grpc import InferenceServerClient

    with InferenceServerClient(slow_server.target) as client:
        client.start_stream(callback=lambda result, error: None)  # noqa: ARG005 - the client's names
        client.async_stream_infer(MODEL, **endless(streams))
        wait_for(lambda: active(slow_server, "generation") == 1)
        client.stop_stream(cancel_requests=True)
    wait_for(lambda: active(slow_server, "generation") == 0)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_pieces_of_a_text_joined_are_the_whole_text(server: TritonServer, model: str) -> None:
    body = {"text_input": "naïve 你好 😀🏽", "max_tokens": 30, "exclude_input_in_output": True}
    whole = post(f"{server.url}/v2/models/{model}/generate", body)
    assert whole.status == 200, whole
    events = post_stream(f"{server.url}/v2/models/{model}/generate_stream", {**body, "stream": True})
    assert len(events) >= 2
    assert "".join(event["text_output"] for event in events) == whole.body["text_output"]


@pytest.mark.usefixtures("triton_files")
def test_a_model_that_is_not_decoupled_answers_rows_in_one_response(tmp_path: Path) -> None:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    repository = write_fake_repository(tmp_path, disaggregated=True, decoupled=False)
    with running(repository, tmp_path / "log") as server, InferenceServerClient(server.target) as client:
        answer = client.infer(MODEL, llm_inputs([[1, 2], [9]], 4))
        assert answer.as_numpy("output_ids").tolist() == [[[1, 2, 1, 2]], [[9, 9, 9, 9]]]
        assert answer.as_numpy("batch_index").tolist() == [[0], [1]]
        with pytest.raises(InferenceServerException, match="lora_task_id"):
            client.infer(MODEL, llm_inputs([[1, 2], [9]], 4, lora_task_id=rows_of(1, np.uint64, 2)))
