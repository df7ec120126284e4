"""The Executor's process of a Triton server, with an Executor that returns tokens at once.

fake_worker.py [--step-seconds S] triton-worker --socket-fd N
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from batch_manager.request import FinishReason
from executor.api.request import ContextPhaseParams, Request, RequestType
from executor.api.response import Response
from executor.cli.triton_worker import serve_model
from executor.serving.garbage import settle_garbage_collector
from executor.triton.backend.settings import ParameterError
from executor.triton.parameters import model_settings
from executor.triton.worker import Worker
from tests.serving.fake_executor import FakeExecutor, Listener


class WholeAnswers(FakeExecutor):
    """Tells a request that does not stream all of its tokens at its end, as the Executor does.

    A context-only request is one that ends with its first token, and with parameters for whoever goes on.
    """

    def enqueue_request(self, request: Request, *, listener: Listener) -> int:
        if request.type is RequestType.REQUEST_TYPE_CONTEXT_ONLY:
            request, listener = replace(request, max_tokens=1), _with_params(listener)
        tokens: list[int] = []

        def gather(responses: list[Response]) -> None:
            for response in responses:
                tokens.extend(response.result.output_token_ids[0])
                response.result.output_token_ids = [tokens]
                if response.is_final:
                    listener([response])

        return super().enqueue_request(request, listener=listener if request.streaming else gather)


def _with_params(listener: Listener) -> Listener:
    def add(responses: list[Response]) -> None:
        for response in responses:
            if response.result.finish_reasons == [FinishReason.LENGTH]:
                tokens = response.result.output_token_ids[0]
                response.result.context_phase_params = ContextPhaseParams(tokens, response.request_id)
        listener(responses)

    return add


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("command", choices=["triton-worker"])
    parser.add_argument("--socket-fd", type=int, required=True)
    arguments = parser.parse_args()
    listener = socket.socket(fileno=arguments.socket_fd)
    settings = json.load(sys.stdin)
    worker = Worker(listener, settings["server_process"])
    try:
        model = model_settings(settings["parameters"])
    except ParameterError as error:
        worker.fail(str(error))
        return 2
    executor = WholeAnswers(step_seconds=arguments.step_seconds)
    settle_garbage_collector()
    serve_model(worker, listener, executor, model, settings)
    executor.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
