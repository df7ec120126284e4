"""Servers that are killed, clients that leave, executor processes that die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.triton.client import Streamed, llm_inputs, rows_of, stream
from tests.triton.conftest import write_fake_repository
from tests.triton.server import TritonServer, is_alive, running, wait_for

SHARED_MEMORY = Path("/dev/shm")


def endless(first: int, num_tokens: int = 5000) -> list[Any]:
    return llm_inputs([[first, 2, 3]], num_tokens, streaming=rows_of(True, bool))


def active(server: TritonServer) -> float:
    return server.gauge("nv_trt_llm_request_metrics", "request_type", "active")


class Busy:
    """Streams that go on until their server ends; counts what they got."""

    def __init__(self, server: TritonServer, count: int, num_tokens: int = 5000) -> None:
        from tritonclient.grpc import InferenceServerClient

        self.errors: list[str] = []
        self.num_responses = 0
        self._lock = threading.Lock()
        self._clients = [InferenceServerClient(server.target) for _ in range(count)]
        for index, client in enumerate(self._clients):
            client.start_stream(callback=self._take)
            client.async_stream_infer("tensorrt_llm", endless(index + 1, num_tokens))
        wait_for(lambda: self.num_responses > 10 * count)

    def _take(self, result: Any, error: Any) -> None:  # noqa: ARG002 - the client's names
        with self._lock:
            if error is None:
                self.num_responses += 1
            else:
                self.errors.append(str(error))

    def close(self) -> None:
        for client in self._clients:
            client.stop_stream(cancel_requests=True)
            client.close()


@pytest.mark.usefixtures("triton_files")
def test_64_streams_at_once_each_get_all_their_tokens(tmp_path: Path) -> None:
    """Once a stream broke off one token short: the server crashed as it sent the last response, asked at that moment
    whether the request was cancelled. So the period is short, and how streams and server end is looked at."""
    repository = write_fake_repository(tmp_path, cancellation_check_period_ms=1)
    with running(repository, tmp_path / "log") as server, ThreadPoolExecutor(64) as threads:

        def one(index: int) -> Streamed:
            call = {"inputs": llm_inputs([[index, index + 1]], 60, streaming=rows_of(True, bool))}
            return stream(server.target, "tensorrt_llm", call)

        for _ in range(3):
            answers = list(threads.map(one, range(64)))
            assert [answer.errors for answer in answers] == [[]] * 64
            assert [answer.tokens() for answer in answers] == [[index, index + 1] * 30 for index in range(64)]
            assert [answer.num_final for answer in answers] == [1] * 64
        assert server.stop() == 0


def test_a_thousand_clients_that_leave_leave_nothing_behind(fake_repository: Path, tmp_path: Path) -> None:
    from tritonclient.grpc import InferenceServerClient

    with running(fake_repository, tmp_path / "log") as server:
        [worker] = server.executor_processes()
        regions = server.regions()

        def note(event: threading.Event, result: Any, error: Any) -> None:  # noqa: ARG001 - the client's names
            event.set()

        def leave(times: int) -> None:
            with InferenceServerClient(server.target) as client:
                for index in range(times):
                    started = threading.Event()
                    client.start_stream(callback=partial(note, started))
                    client.async_stream_infer("tensorrt_llm", endless(index % 250))
                    if index % 2:
                        assert started.wait(20)
                    client.stop_stream(cancel_requests=True)

        with ThreadPoolExecutor(10) as threads:
            list(threads.map(leave, [100] * 10))
        wait_for(lambda: active(server) == 0)
        assert server.executor_processes() == [worker]
        assert server.regions() == regions
        streamed = stream(server.target, "tensorrt_llm", {"inputs": llm_inputs([[1, 2]], 4)})
        assert len(streamed.tokens()) == 4
        assert "Traceback" not in server.log


def test_a_server_that_is_told_to_stop_while_busy_finishes_what_is_in_progress(
    fake_repository: Path, tmp_path: Path
) -> None:
    with running(fake_repository, tmp_path / "log") as server:
        busy = Busy(server, 8, num_tokens=150)
        [worker] = server.executor_processes()
        regions = server.regions()
        server.process.terminate()
        wait_for(lambda: busy.num_responses == 8 * 150)
        assert busy.errors == []
        busy.close()
        assert server.process.wait(timeout=60) == 0
        wait_for(lambda: not is_alive(worker))
        assert not any((SHARED_MEMORY / region).exists() for region in regions)


def test_a_server_that_is_killed_while_busy_leaves_nothing_and_starts_again(
    fake_repository: Path, tmp_path: Path
) -> None:
    with running(fake_repository, tmp_path / "log") as server:
        busy = Busy(server, 8)
        [worker] = server.executor_processes()
        regions = server.regions()
        assert regions
        assert all((SHARED_MEMORY / region).exists() for region in regions)
        server.stop(signal.SIGKILL)
        wait_for(lambda: not is_alive(worker))
        wait_for(lambda: not any((SHARED_MEMORY / region).exists() for region in regions))
        busy.close()
    with running(fake_repository, tmp_path / "log") as again:
        assert stream(again.target, "tensorrt_llm", {"inputs": llm_inputs([[7]], 3)}).tokens() == [7, 7, 7]
        assert again.executor_processes() != [worker]
        regions = again.regions()
    assert not any((SHARED_MEMORY / region).exists() for region in regions)


def test_open_requests_fail_when_the_executor_process_dies_and_it_is_started_again(
    fake_repository: Path, tmp_path: Path
) -> None:
    with running(fake_repository, tmp_path / "log") as server:
        busy = Busy(server, 4)
        [worker] = server.executor_processes()
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: len(busy.errors) == 4)
        assert all("executor process ended" in error for error in busy.errors)
        busy.close()

        def answers() -> bool:
            streamed = stream(server.target, "tensorrt_llm", {"inputs": llm_inputs([[7]], 3)})
            return not streamed.errors and streamed.tokens() == [7, 7, 7]

        wait_for(answers)
        assert worker not in server.executor_processes()


@pytest.mark.usefixtures("triton_files")
def test_instances_share_one_executor_process(tmp_path: Path) -> None:
    repository = write_fake_repository(tmp_path, "--step-seconds", "0.002", instance_count=2)
    with running(repository, tmp_path / "log") as server:
        assert len(server.executor_processes()) == 1
        with ThreadPoolExecutor(8) as threads:
            calls = [{"inputs": llm_inputs([[index]], 20)} for index in range(8)]
            answers = list(threads.map(lambda call: stream(server.target, "tensorrt_llm", call).tokens(), calls))
    assert answers == [[index] * 20 for index in range(8)]


@pytest.fixture(scope="module")
def plain_server(triton_files: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:  # noqa: ARG001
    """A model that is not decoupled, on an Executor that makes a token every 10 ms."""
    directory = tmp_path_factory.mktemp("not-decoupled")
    repository = write_fake_repository(directory, "--step-seconds", "0.01", decoupled=False)
    with running(repository, directory / "log") as server:
        yield server


class TestNotDecoupled:
    """A model that is not decoupled answers each request once, over plain gRPC calls and HTTP."""

    def infer(self, plain_server: TritonServer, inputs: list[Any], **more: Any) -> Any:
        from tritonclient.grpc import InferenceServerClient

        with InferenceServerClient(plain_server.target) as client:
            return client.infer("tensorrt_llm", inputs, **more)

    def test_rows_come_back_as_rows_of_one_response(self, plain_server: TritonServer) -> None:
        answer = self.infer(plain_server, llm_inputs([[1, 2], [9]], 4))
        assert answer.as_numpy("output_ids").tolist() == [[[1, 2, 1, 2]], [[9, 9, 9, 9]]]
        assert answer.as_numpy("sequence_length").tolist() == [[4], [4]]
        assert answer.as_numpy("batch_index").tolist() == [[0], [1]]

    def test_errors_have_the_code_that_says_what_kind_they_are(self, plain_server: TritonServer) -> None:
        from tritonclient.utils import InferenceServerException

        def code(**tensors: Any) -> str:
            with pytest.raises(InferenceServerException) as caught:
                self.infer(plain_server, llm_inputs([[1, 2]], 4, **tensors))
            return str(caught.value.status())

        assert code(temperature=rows_of(-1.0, np.float32)) == "StatusCode.INVALID_ARGUMENT"
        assert code(lora_task_id=rows_of(1, np.uint64)) == "StatusCode.UNIMPLEMENTED"
        assert code(streaming=rows_of(True, bool)) == "StatusCode.INVALID_ARGUMENT"

    def test_a_call_that_is_cancelled_is_cancelled_in_the_executor(self, plain_server: TritonServer) -> None:
        from tritonclient.grpc import InferenceServerClient

        with InferenceServerClient(plain_server.target) as client:
            done: list[Any] = []
            call = client.async_infer(
                "tensorrt_llm", llm_inputs([[1]], 5000), callback=lambda result, error: done.append((result, error))
            )
            wait_for(lambda: active(plain_server) == 1)
            call.cancel()
            wait_for(lambda: active(plain_server) == 0)
            assert "CANCELLED" in str(done[0][1].status())

    def test_a_request_is_stopped_by_its_id(self, plain_server: TritonServer) -> None:
        from tritonclient.grpc import InferenceServerClient

        answers: list[Any] = []

        def take(result: Any, error: Any) -> None:
            answers.append(error or result)

        with InferenceServerClient(plain_server.target) as client:
            client.async_infer("tensorrt_llm", llm_inputs([[1]], 5000), callback=take, request_id="a")
            wait_for(lambda: active(plain_server) == 1)
            stop = llm_inputs([[0]], 0, stop=rows_of(True, bool))
            client.async_infer("tensorrt_llm", stop, callback=take, request_id="a", parameters={"Streaming": False})
            wait_for(lambda: len(answers) == 2)
        lengths = [answer.as_numpy("sequence_length") for answer in answers]
        assert sum(length is None for length in lengths) == 1
