"""What tests send to a Triton server, and what comes back."""

from __future__ import annotations

import json
import queue
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.triton.server import TRITON

sys.path.append(str(TRITON / "client"))


class Piece(NamedTuple):
    """One response of a stream."""

    request_id: str
    outputs: dict[str, Any]
    is_final: bool


class Streamed(NamedTuple):
    pieces: list[Piece]
    errors: list[str]

    def tokens(self, row: int = 0, sequence: int = 0) -> list[int]:
        """All that came for one row, in order."""
        return [
            token
            for piece in self.pieces
            if "output_ids" in piece.outputs
            and piece.outputs["batch_index"][0][0] == row
            and piece.outputs["sequence_index"][0][0] == sequence
            for token in piece.outputs["output_ids"][0][0][: piece.outputs["sequence_length"][0][0]].tolist()
        ]

    @property
    def num_final(self) -> int:
        return sum(piece.is_final for piece in self.pieces)


def tensor(name: str, values: Any) -> Any:
    """An input tensor."""
    from tritonclient.grpc import InferInput
    from tritonclient.utils import np_to_triton_dtype

    array = np.asarray(values)
    made = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def llm_inputs(prompts: Sequence[Sequence[int]], output_len: int, **more: Any) -> list[Any]:
    """Rows for `tensorrt_llm`; a shorter prompt is padded."""
    width = max(map(len, prompts))
    rows = len(prompts)
    padded = [[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts]
    inputs = {
        "input_ids": np.array(padded, np.int32),
        "input_lengths": np.array([[len(prompt)] for prompt in prompts], np.int32),
        "request_output_len": np.full((rows, 1), output_len, np.int32),
        **more,
    }
    return [tensor(name, values) for name, values in inputs.items()]


def rows_of(value: Any, dtype: Any, rows: int = 1) -> Any:
    return np.full((rows, 1), value, dtype)


def stream(target: str, model: str, *calls: dict[str, Any]) -> Streamed:
    """Send requests on one gRPC stream, and take everything that comes until the server has ended it."""
    from tritonclient.grpc import InferenceServerClient

    found: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with InferenceServerClient(target) as client:
        client.start_stream(callback=lambda result, error: found.put((result, error)))
        for call in calls:
            client.async_stream_infer(model, enable_empty_final_response=True, **call)
        client.stop_stream()
    streamed = Streamed([], [])
    while not found.empty():
        result, error = found.get()
        if error is not None:
            streamed.errors.append(str(error))
        else:
            streamed.pieces.append(piece(result))
    return streamed


def piece(result: Any) -> Piece:
    response = result.get_response()
    outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
    return Piece(response.id, outputs, response.parameters["triton_final_response"].bool_param)


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]


def post(url: str, body: Mapping[str, Any]) -> Answer:
    """POST JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return Answer(answer.status, json.loads(answer.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, json.loads(error.read()))


def post_stream(url: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of an HTTP stream."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
