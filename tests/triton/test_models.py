"""The models on a real Triton server, as their clients see them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from batch_manager.request import FinishReason
from executor import Executor, Request
from executor.api.request import OutputConfig
from tests.serving.byte_tokenizer import END_ID
from tests.triton.client import Streamed, llm_inputs, post, post_stream, rows_of, stream, tensor
from tests.triton.server import TritonServer

PROMPT = [72, 101, 108, 108, 111]


def call(*args: Any, request_id: str = "", outputs: list[str] | None = None, **more: Any) -> dict[str, Any]:
    from tritonclient.grpc import InferRequestedOutput

    wanted = None if outputs is None else [InferRequestedOutput(name) for name in outputs]
    return {"inputs": llm_inputs(*args, **more), "request_id": request_id, "outputs": wanted}


def generate(server: TritonServer, *args: Any, **more: Any) -> Streamed:
    return stream(server.target, "tensorrt_llm", call(*args, **more))


@pytest.fixture(scope="module")
def expected(tiny_engine: Any) -> Any:
    """What the Executor answers without Triton."""
    with Executor(tiny_engine) as executor:

        def tokens(prompt: list[int], count: int) -> list[int]:
            request = Request(prompt, count, output_config=OutputConfig(exclude_input_from_output=True))
            return executor.await_responses(executor.enqueue_request(request))[-1].result.output_token_ids[0]

        yield tokens


def test_a_stream_gives_each_token_once_and_one_final_response(server: TritonServer, expected: Any) -> None:
    streamed = generate(server, [PROMPT], 12, streaming=rows_of(True, bool))
    assert streamed.errors == []
    assert streamed.tokens() == expected(PROMPT, 12)
    assert len(streamed.pieces) >= 2
    assert streamed.num_final == 1
    assert streamed.pieces[-1].outputs["finish_reason"] == [[FinishReason.LENGTH]]


def test_without_streaming_there_is_one_response_that_starts_with_the_prompt(
    server: TritonServer, expected: Any
) -> None:
    streamed = generate(server, [PROMPT], 12)
    assert [piece.is_final for piece in streamed.pieces] == [True]
    assert streamed.tokens() == PROMPT + expected(PROMPT, 12)
    excluded = generate(server, [PROMPT], 12, exclude_input_in_output=rows_of(True, bool))
    assert excluded.tokens() == expected(PROMPT, 12)


def test_each_row_of_a_batch_is_a_request_and_the_final_flag_comes_once(server: TritonServer, expected: Any) -> None:
    prompts = [PROMPT, [1, 2, 3], [9] * 20]
    streamed = generate(server, prompts, 8, streaming=rows_of(True, bool, 3))
    assert streamed.errors == []
    assert [streamed.tokens(row) for row in range(3)] == [expected(prompt, 8) for prompt in prompts]
    assert streamed.num_final == 1
    assert streamed.pieces[-1].is_final


def test_several_return_sequences_are_told_apart(server: TritonServer) -> None:
    sampling = {"runtime_top_k": rows_of(50, np.int32), "temperature": rows_of(1.5, np.float32)}
    streamed = generate(
        server,
        [PROMPT],
        6,
        num_return_sequences=rows_of(3, np.int32),
        streaming=rows_of(True, bool),
        random_seed=rows_of(1, np.uint64),
        **sampling,
    )
    sequences = [streamed.tokens(sequence=index) for index in range(3)]
    assert [len(tokens) for tokens in sequences] == [6, 6, 6]
    assert len({tuple(tokens) for tokens in sequences}) > 1
    assert streamed.num_final == 1


def test_outputs_come_when_a_request_asks_for_them_with_upstreams_shapes(server: TritonServer) -> None:
    flags = ("return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics")
    lengths = ("return_num_input_tokens", "return_num_output_tokens")
    asked = {name: rows_of(True, bool) for name in (*flags, *lengths)}
    outputs = generate(server, [PROMPT], 4, **asked).pieces[0].outputs
    shapes = {name: values.shape for name, values in outputs.items()}
    assert shapes["cum_log_probs"] == (1, 1)
    assert shapes["output_log_probs"] == (1, 1, 4)
    assert shapes["context_logits"] == (1, len(PROMPT), 258)
    assert shapes["generation_logits"] == (1, 1, 4, 258)
    assert outputs["generation_logits"].dtype == np.float32
    assert outputs["cum_log_probs"][0, 0] == pytest.approx(outputs["output_log_probs"].sum(), rel=1e-5)
    assert outputs["num_input_tokens"] == [[len(PROMPT)]]
    assert outputs["num_output_tokens"] == [[4]]
    times = [outputs[f"{name}_time_ns"][0, 0] for name in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 0
    assert outputs["kv_cache_alloc_total_blocks"].dtype == np.int32
    plain = generate(server, [PROMPT], 4).pieces[0].outputs
    assert not {"cum_log_probs", "context_logits", "arrival_time_ns"} & plain.keys()


def test_a_stream_has_context_logits_once_and_none_of_them_before(server: TritonServer) -> None:
    """`end_to_end_grpc_client.py -S --return-context-logits` reads their shape in every response."""
    asked = {"streaming": rows_of(True, bool), "return_context_logits": rows_of(True, bool)}
    shapes = [piece.outputs["context_logits"].shape for piece in generate(server, [PROMPT], 3, **asked).pieces]
    assert shapes[-1] == (1, len(PROMPT), 258)
    assert set(shapes[:-1]) == {(1, 0, 258)}


def test_only_outputs_that_are_requested_are_sent(server: TritonServer) -> None:
    streamed = generate(server, [PROMPT], 3, outputs=["output_ids", "sequence_length"])
    assert streamed.pieces[0].outputs.keys() == {"output_ids", "sequence_length"}


def test_two_overlapping_requests_share_iterations(server: TritonServer) -> None:
    def iteration() -> float:
        time.sleep(0.3)
        return server.gauge("nv_trt_llm_general_metrics", "general_type", "iteration_counter")

    def one(first: int) -> float:
        started = time.perf_counter()
        assert len(generate(server, [[first, 2, 3]], 200).tokens()) == 203
        return time.perf_counter() - started

    one(1)
    before = iteration()
    alone = one(2)
    between = iteration()
    started = time.perf_counter()
    with ThreadPoolExecutor() as threads:
        list(threads.map(one, (3, 4)))
    both = time.perf_counter() - started
    after = iteration()
    assert between - before == pytest.approx(200, abs=5)
    assert after - between < 1.5 * (between - before)
    assert both < 1.8 * alone  # the bound of 1.5 is measured by scripts/bench_triton, on a quiet machine


def test_a_request_is_stopped_by_its_id(server: TritonServer) -> None:
    stop = {
        "inputs": llm_inputs([[0]], 0, stop=rows_of(True, bool)),
        "request_id": "to stop",
        "parameters": {"Streaming": True},
    }
    streamed = stream(
        server.target, "tensorrt_llm", call([PROMPT], 240, streaming=rows_of(True, bool), request_id="to stop"), stop
    )
    assert streamed.errors == []
    assert len(streamed.tokens()) < 240
    assert streamed.num_final == 2
    reasons = [piece.outputs["finish_reason"][0][0] for piece in streamed.pieces if "finish_reason" in piece.outputs]
    assert reasons[-1] == FinishReason.CANCELLED


def test_a_stop_without_an_id_is_an_error_and_of_an_unknown_id_is_none(server: TritonServer) -> None:
    stop = {"inputs": llm_inputs([[0]], 0, stop=rows_of(True, bool))}
    without = stream(server.target, "tensorrt_llm", stop)
    assert "has no id" in without.errors[0]
    unknown = stream(server.target, "tensorrt_llm", {**stop, "request_id": "ended long ago"})
    assert unknown.errors == []
    assert unknown.num_final == 1


def test_tritons_timeout_field_ends_a_request_with_what_it_has(server: TritonServer) -> None:
    streamed = stream(server.target, "tensorrt_llm", {**call([PROMPT], 240), "timeout": 10_000})
    assert streamed.errors == []
    assert streamed.pieces[-1].outputs["finish_reason"] == [[FinishReason.TIMED_OUT]]
    assert len(streamed.tokens()) < len(PROMPT) + 240


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"request_output_len": 0}, "request_output_len"),
        ({"input_ids": [300]}, "input_ids"),
        ({"temperature": -1.0}, "temperature"),
        ({"beam_width": 2}, "beam_width"),
        ({"lora_task_id": 1}, "lora_task_id"),
        ({"len_penalty": 0.5}, "len_penalty"),
        ({"mrope_position_deltas": 1}, "mrope_position_deltas"),
        ({"guided_decoding_guide_type": "yaml"}, "guided_decoding_guide_type"),
        ({"lookahead_window_size": 4}, "lookahead_window_size"),
        ({"retention_token_range_starts": [0]}, "retention_token_range_ends"),
        ({"tempratur": 1.0}, "tempratur"),
        ({"priority_level": 3}, "priority_level"),
        ({"input_lengths": 7}, "input_lengths"),
    ],
)
def test_what_is_wrong_or_not_offered_is_refused_by_name(
    server: TritonServer, tensors: dict[str, Any], name: str
) -> None:
    good = {"input_ids": [72], "input_lengths": 1, "request_output_len": 2}
    answer = post(f"{server.url}/v2/models/tensorrt_llm/generate", {**good, **tensors})
    assert name in answer.body["error"]
    assert answer.status == 400
    again = post(f"{server.url}/v2/models/tensorrt_llm/generate", good)
    assert again.status == 200, again


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("text", ["Hello", "naïve 你好 😀🏽", 'a\tb\n"quoted" \\ '])
def test_the_pieces_of_a_stream_joined_are_the_whole_text(server: TritonServer, model: str, text: str) -> None:
    body = {"text_input": text, "max_tokens": 40, "exclude_input_in_output": True}
    whole = post(f"{server.url}/v2/models/{model}/generate", body)
    assert whole.status == 200, whole
    events = post_stream(f"{server.url}/v2/models/{model}/generate_stream", {**body, "stream": True})
    assert len(events) >= 2
    assert "".join(event["text_output"] for event in events) == whole.body["text_output"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_starts_with_the_prompt_unless_it_is_excluded(server: TritonServer, model: str) -> None:
    body = {"text_input": "naïve 😀", "max_tokens": 3}
    answer = post(f"{server.url}/v2/models/{model}/generate", body)
    assert answer.body["text_output"].startswith("naïve 😀")


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models_refuse_by_name(server: TritonServer, model: str) -> None:
    body = {"text_input": "Hello", "max_tokens": 3}
    for name, value in (("decoder_text_input", "no"), ("lora_task_id", 1), ("beam_width", 3)):
        answer = post(f"{server.url}/v2/models/{model}/generate", {**body, name: value})
        assert name in answer.body["error"]
    assert (
        "image_url_input"
        in post(f"{server.url}/v2/models/tensorrt_llm_bls/generate", {**body, "image_url_input": "x"}).body["error"]
    )


def test_stop_words_bad_words_and_bias_reach_the_executor(server: TritonServer) -> None:
    url = f"{server.url}/v2/models/ensemble/generate"
    body = {"text_input": "Hello", "max_tokens": 8, "exclude_input_in_output": True}
    steered = {**body, "embedding_bias_words": ["x", "y"], "embedding_bias_weights": [90.0, 80.0]}
    assert post(url, steered).body["text_output"] == "x" * 8
    assert post(url, {**steered, "bad_words": ["xx"]}).body["text_output"] == "xyxyxyxy"
    stopped = post(url, {**steered, "bad_words": ["xx"], "stop_words": ["yxy", "never"]}).body
    assert stopped["text_output"] == "xyxy"
    assert stopped["finish_reason"] == FinishReason.STOP_WORDS


def test_the_tokenizers_end_token_ends_a_text(server: TritonServer) -> None:
    body = {"text_input": "Hello", "max_tokens": 8, "exclude_input_in_output": True}
    body |= {"embedding_bias_words": ["<|end|>"], "embedding_bias_weights": [99.0]}
    answer = post(f"{server.url}/v2/models/ensemble/generate", body)
    assert answer.body["text_output"] == ""
    assert answer.body["finish_reason"] == FinishReason.END_ID
    assert END_ID == 256
    other = post(f"{server.url}/v2/models/ensemble/generate", {**body, "end_id": 0})
    assert other.body["finish_reason"] == FinishReason.LENGTH


def test_a_grammar_is_followed(server: TritonServer) -> None:
    pytest.importorskip("llguidance")
    body = {"text_input": "Hello", "max_tokens": 12, "exclude_input_in_output": True}
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]{3}-[0-9]{2}"}
    text = post(f"{server.url}/v2/models/ensemble/generate", {**body, **guide}).body["text_output"]
    assert text[3] == "-"
    assert text.replace("-", "").isdigit()


def test_drafts_lookahead_and_retention_are_taken(server: TritonServer, expected: Any) -> None:
    wanted = PROMPT + expected(PROMPT, 10)
    drafts = np.array([wanted[5:8]], np.int32)
    assert generate(server, [PROMPT], 10, draft_input_ids=drafts).tokens() == wanted
    sizes = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    assert generate(server, [PROMPT], 10, **{name: rows_of(3, np.int32) for name in sizes}).tokens() == wanted
    kept = {
        "retention_token_range_starts": np.array([[0, 3]], np.int32),
        "retention_token_range_ends": np.array([[3, -1]], np.int32),
        "retention_token_range_priorities": np.array([[90, 20]], np.int32),
        "retention_token_range_durations_ms": np.array([[-1, 1000]], np.int32),
        "retention_decode_priority": rows_of(10, np.int32),
    }
    assert generate(server, [PROMPT], 10, **kept).tokens() == wanted


async def test_the_asynchronous_client_streams(server: TritonServer) -> None:
    from tritonclient.grpc.aio import InferenceServerClient

    async def requests() -> Any:
        for prompt in ("first", "second"):
            inputs = [
                tensor("text_input", np.array([[prompt]], object)),
                tensor("max_tokens", rows_of(6, np.int32)),
                tensor("stream", rows_of(True, bool)),
            ]
            yield {"model_name": "ensemble", "inputs": inputs, "request_id": prompt}

    texts = {"first": "", "second": ""}
    pieces = dict.fromkeys(texts, 0)
    async with InferenceServerClient(server.target) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            output = result.as_numpy("text_output")
            if output is not None:
                texts[result.get_response().id] += output[0].decode()
                pieces[result.get_response().id] += 1
    assert pieces == {"first": 6, "second": 6}
    assert all(texts.values())


def test_what_upstreams_clients_send_is_answered(server: TritonServer, expected: Any) -> None:
    """`inflight_batcher_llm_client.py` sends every one of these with each request."""
    always = {
        "beam_width": rows_of(1, np.int32),
        "temperature": rows_of(1.0, np.float32),
        "streaming": rows_of(True, bool),
        "end_id": rows_of(50256, np.int32),
        "pad_id": rows_of(50256, np.int32),
        "return_log_probs": rows_of(False, bool),
        "runtime_top_k": rows_of(1, np.int32),
        "runtime_top_p": rows_of(0.0, np.float32),
    }
    assert generate(server, [PROMPT], 16, **always).tokens() == expected(PROMPT, 16)


def test_upstreams_metric_families_have_upstreams_labels(server: TritonServer) -> None:
    generate(server, [PROMPT], 4)
    time.sleep(0.3)
    names = server.metrics().keys()
    families = {
        "nv_trt_llm_request_metrics": ("request_type", ["active", "max", "scheduled", "context", "waiting"]),
        "nv_trt_llm_runtime_memory_metrics": ("memory_type", ["cpu", "gpu", "pinned"]),
        "nv_trt_llm_kv_cache_block_metrics": (
            "kv_cache_block_type",
            ["max", "free", "used", "tokens_per", "reused", "fraction"],
        ),
        "nv_trt_llm_inflight_batcher_metrics": (
            "inflight_batcher_specific_metric",
            ["total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"],
        ),
        "nv_trt_llm_general_metrics": ("general_type", ["timestamp", "iteration_counter"]),
        "nv_trt_llm_disaggregated_serving_metrics": (
            "disaggregated_serving_type",
            ["kv_cache_transfer_ms", "request_count"],
        ),
    }
    for family, (label, members) in families.items():
        for member in members:
            labels = sorted([f'{label}="{member}"', 'model="tensorrt_llm"', 'version="1"'])
            assert f"{family}{{{','.join(labels)}}}" in names
    for family, member in (("nv_llm_input_token_len", "input"), ("nv_llm_output_token_len", "output")):
        labels = f'model="tensorrt_llm",response_metric_type="total_{member}_tokens",version="1"'
        assert f"{family}_count{{{labels}}}" in names
        assert f'{family}_bucket{{{labels},le="100"}}' in names
    free = server.gauge("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "free")
    assert free == server.gauge("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max")
    assert server.gauge("nv_trt_llm_request_metrics", "request_type", "active") == 0
    assert server.gauge("nv_trt_llm_request_metrics", "request_type", "scheduled") == 0
