"""What scripts for `tensorrt_llm.bindings.executor` do, with nothing but the import line changed."""

from __future__ import annotations

import datetime
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import executor as trtllm


def wait_for_all(executor: trtllm.Executor, request_ids: list[int]) -> dict[int, list[int]]:
    """Tokens of each request, collected with `await_responses` of any request."""
    output_tokens: dict[int, list[int]] = {request_id: [] for request_id in request_ids}
    num_finished = 0
    while num_finished < len(request_ids):
        for response in executor.await_responses(datetime.timedelta(seconds=60)):
            assert not response.has_error(), response.error_msg
            result = response.result
            num_finished += result.is_final
            for beam_tokens in result.output_token_ids:
                output_tokens[response.request_id].extend(beam_tokens)
    return output_tokens


def test_basic(tiny_engine_dir: Path) -> None:
    executor = trtllm.Executor(tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1))
    if executor.can_enqueue_requests():
        request = trtllm.Request(input_token_ids=[1, 2, 3, 4], max_tokens=10)
        request_id = executor.enqueue_request(request)
        responses = executor.await_responses(request_id)
        output_tokens = responses[0].result.output_token_ids
    assert output_tokens[0][:4] == [1, 2, 3, 4]
    assert len(output_tokens[0]) == 14
    executor.shutdown()


@pytest.mark.parametrize("exclude_input", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_advanced(tiny_engine_dir: Path, streaming: bool, exclude_input: bool) -> None:
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8]]
    with trtllm.Executor(str(tiny_engine_dir), trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1)) as executor:
        output_config = trtllm.OutputConfig()
        output_config.exclude_input_from_output = exclude_input
        sampling_config = trtllm.SamplingConfig(1)
        request_ids = [
            executor.enqueue_request(
                trtllm.Request(
                    input_token_ids=tokens,
                    max_tokens=10,
                    streaming=streaming,
                    sampling_config=sampling_config,
                    output_config=output_config,
                )
            )
            for tokens in prompts
        ]
        output_tokens = wait_for_all(executor, request_ids)
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        has_input = not streaming and not exclude_input
        assert len(output_tokens[request_id]) == 10 + (len(prompt) if has_input else 0)


def test_orchestrator_mode_is_refused_by_name(tiny_engine_dir: Path) -> None:
    executor_config = trtllm.ExecutorConfig(1)
    orchestrator_config = trtllm.OrchestratorConfig(True, str(Path(trtllm.__file__).parent / "bin" / "executorWorker"))
    executor_config.parallel_config = trtllm.ParallelConfig(
        trtllm.CommunicationType.MPI, trtllm.CommunicationMode.ORCHESTRATOR, None, None, orchestrator_config
    )
    with pytest.raises(trtllm.UnsupportedFeatureError, match="communication_mode ORCHESTRATOR is not supported"):
        trtllm.Executor(tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, executor_config)


def test_beams_are_refused_by_name(tiny_engine_dir: Path) -> None:
    with pytest.raises(trtllm.InvalidRequestError, match="max_beam_width is 2; beam search is not offered"):
        trtllm.Executor(tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(2))


def test_a_script_may_end_without_a_shutdown(tiny_engine_dir: Path) -> None:
    """As the examples do: the process must neither hang nor fail at its end, with a request still running."""
    script = f"""
import executor as trtllm
executor = trtllm.Executor({str(tiny_engine_dir)!r}, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1))
first = executor.enqueue_request(trtllm.Request([1, 2, 3], max_tokens=3))
executor.enqueue_request(trtllm.Request([4, 5, 6], max_tokens=200))
print(len(executor.await_responses(first)[0].result.output_token_ids[0]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")


@pytest.mark.parametrize("dump_tensors", [False, True])
def test_debug_tensors(tiny_engine_dir: Path, tmp_path: Path, dump_tensors: bool) -> None:
    max_tokens = 2
    debug_config = trtllm.DebugConfig(
        debug_tensor_names=["sequence_length"], debug_tensors_max_iterations=0 if dump_tensors else max_tokens
    )
    assert debug_config.dump_dir == "/tmp/tllm_debug", "where scripts look"
    debug_config.dump_dir = str(tmp_path)
    with trtllm.Executor(
        tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1, debug_config=debug_config)
    ) as executor:
        request = trtllm.Request(input_token_ids=[1, 2, 3, 4], max_tokens=max_tokens)
        executor.await_responses(executor.enqueue_request(request))
        found = {}
        if dump_tensors:
            for iteration_dir in (tmp_path / "PP_1" / "TP_1").iterdir():
                for file in iteration_dir.iterdir():
                    found[iteration_dir.name, file.name] = np.load(file).tolist()
            expected = {
                ("iteration_0", "sequence_length.npy"): [4],
                ("iteration_1", "sequence_length.npy"): [5],
            }
        else:
            for debug_iteration in executor.get_latest_debug_tensors():
                for name, tensor in debug_iteration.debug_tensors.items():
                    found[debug_iteration.iter, name] = tensor.tolist()
            expected = {(0, "sequence_length"): [4], (1, "sequence_length"): [5]}
    assert found == expected


def only_token(token_id: int) -> Callable[..., None]:
    """A post-processor in the manner of the example: a mask made on the CPU, added on the logits' stream."""

    def logits_post_processor(_req_id: int, logits: torch.Tensor, ids: list[list[int]], stream_ptr: Any) -> None:
        assert isinstance(ids[0], list)
        mask = torch.full_like(logits, fill_value=float("-inf"), device="cpu")
        mask[:, :, [token_id]] = 0
        with torch.cuda.stream(torch.cuda.ExternalStream(stream_ptr)):
            mask = mask.to(logits.device, non_blocking=True)
            logits += mask

    return logits_post_processor


@pytest.mark.parametrize("batched", [False, True])
def test_logits_processors_of_older_scripts(tiny_engine_dir: Path, batched: bool) -> None:
    def batched_processor(
        req_ids: list[int], logits_batch: list[torch.Tensor], ids_batch: list[list[list[int]]], stream_ptr: Any
    ) -> None:
        masks = []
        for logits, _ in zip(logits_batch, ids_batch, strict=True):
            mask = torch.full_like(logits, fill_value=float("-inf"), device="cpu")
            mask[:, :, [42]] = 0
            masks.append(mask)
        assert len(req_ids) == len(masks)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream_ptr)):
            for logits, mask in zip(logits_batch, masks, strict=True):
                logits += mask.to(logits.device, non_blocking=True)

    executor_config = trtllm.ExecutorConfig(1)
    if batched:
        executor_config.logits_post_processor_batched = batched_processor
    else:
        executor_config.logits_post_processor_map = {"my_logits_pp": only_token(42)}
    with trtllm.Executor(tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, executor_config) as executor:
        request_ids = []
        for _ in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                request = trtllm.Request(
                    input_token_ids=[5, 6, 7],
                    max_new_tokens=25,  # type: ignore[call-arg]
                    end_id=2,
                    sampling_config=trtllm.SamplingConfig(1),
                )
            assert [str(each.message) for each in caught] == ["Request.max_new_tokens is an old name; write max_tokens"]
            request.logits_post_processor_name = request.BATCHED_POST_PROCESSOR_NAME if batched else "my_logits_pp"
            request_ids.append(executor.enqueue_request(request))
        for tokens in wait_for_all(executor, request_ids).values():
            assert tokens == [5, 6, 7] + [42] * 25
    with pytest.raises((TypeError, RuntimeError)):
        torch.cuda.ExternalStream(0)  # torch itself is as it was


def test_logits_processors_of_newer_scripts(tiny_engine_dir: Path) -> None:
    def processor(_id: int, logits: torch.Tensor, _ids: Any, stream_ptr: Any, client_id: int | None) -> None:
        assert client_id == 123
        with torch.cuda.stream(torch.cuda.ExternalStream(stream_ptr)):
            logits[:] = float("-inf")
            logits[..., 42] = 0

    config = trtllm.ExecutorConfig(1, kv_cache_config=trtllm.KvCacheConfig(free_gpu_memory_fraction=0.1))
    config.logits_post_processor_config = trtllm.LogitsPostProcessorConfig({"my_logits_pp": processor}, processor)
    with trtllm.Executor(tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, config) as executor:
        named = trtllm.Request([1, 2, 3, 4], max_tokens=5, client_id=123, logits_post_processor_name="my_logits_pp")
        own = trtllm.Request([1, 2, 3, 4], max_tokens=5, client_id=123, logits_post_processor=processor)
        for tokens in wait_for_all(executor, executor.enqueue_requests([named, own])).values():
            assert tokens[-5:] == [42] * 5


def test_an_embedding_bias_as_a_tensor(tiny_engine_dir: Path) -> None:
    bias = torch.zeros(128)
    bias[10] = torch.finfo(torch.float32).max
    with trtllm.Executor(tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1)) as executor:
        request = trtllm.Request([1, 2, 3, 4], max_tokens=5, embedding_bias=bias)
        tokens = wait_for_all(executor, [executor.enqueue_request(request)])
    assert next(iter(tokens.values()))[-5:] == [10] * 5


def test_prompts_as_numpy_arrays_give_python_integers(tiny_engine_dir: Path) -> None:
    with trtllm.Executor(tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1)) as executor:
        request = trtllm.Request(np.array([1, 2, 3], np.int32), max_tokens=2)
        (tokens,) = wait_for_all(executor, [executor.enqueue_request(request)]).values()
    assert all(type(token) is int for token in tokens)


def test_perf_metrics_while_streaming(tiny_engine_dir: Path) -> None:
    with trtllm.Executor(tiny_engine_dir, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(1)) as executor:
        output_config = trtllm.OutputConfig(return_perf_metrics=True)
        request = trtllm.Request([1, 2, 3, 4], max_tokens=5, streaming=True, output_config=output_config)
        request_id = executor.enqueue_request(request)
        seen = 0
        done = False
        while not done:
            for response in executor.await_responses(request_id, datetime.timedelta(milliseconds=50)):
                result = response.result
                done = result.is_final
                metrics = result.request_perf_metrics
                assert metrics is not None
                timing = metrics.timing_metrics
                assert timing.arrival_time < timing.first_scheduled_time < timing.first_token_time
                assert (timing.last_token_time == datetime.timedelta(0)) != done
                assert metrics.first_iter == 0
                assert metrics.iter == seen
                assert metrics.last_iter == (4 if done else None)
                kv = metrics.kv_cache_metrics
                assert (kv.num_total_allocated_blocks, kv.num_new_allocated_blocks) == (1, 1)
                assert (kv.num_reused_blocks, kv.num_missed_blocks, kv.kv_cache_hit_rate) == (0, 1, 0.0)
                seen += 1
                assert result.decoding_iter == seen
    assert seen == 5
