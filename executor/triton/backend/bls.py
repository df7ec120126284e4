"""The model `tensorrt_llm_bls`: preprocessing, the Executor and postprocessing as one model, by calling the others.

```
text ──► preprocessing ──► tensorrt_llm ──► postprocessing ──► text       one thread for each request in progress
```
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from executor.triton.backend.responses import send_final
from executor.triton.backend.rows import request_parameters
from executor.triton.backend.runtime import tidy_up
from executor.triton.backend.settings import ParameterError, Settings
from executor.triton.tensors import (
    LLM_TO_POSTPROCESSING,
    LLM_TO_TEXT,
    PREPROCESSING_TO_LLM,
    TEXT_TO_LLM,
    TEXT_TO_PREPROCESSING,
)

_PARAMETERS = frozenset(
    {"accumulate_tokens", "tensorrt_llm_model_name", "tensorrt_llm_draft_model_name", "multimodal_encoders_name"}
)
_REFUSED = {
    "image_input": "only text models are offered",
    "image_bytes_input": "only text models are offered",
    "image_url_input": "only text models are offered",
    "video_bytes_input": "only text models are offered",
    "use_draft_logits": "draft models are not offered yet",
}
_MAX_IN_PROGRESS = 256


class _CallError(Exception):
    """Another model answered with an error."""


class TritonPythonModel:
    """One instance of the model, for many requests at once."""

    def initialize(self, args: dict[str, str]) -> None:
        tidy_up()
        try:
            settings = Settings(args, _PARAMETERS)
            self._accumulates = settings.flag("accumulate_tokens", False)
            self._llm = settings.text("tensorrt_llm_model_name", "tensorrt_llm")
            for name in ("tensorrt_llm_draft_model_name", "multimodal_encoders_name"):
                if name in settings.parameters:
                    raise ParameterError(f"parameter {name} is set; draft models and encoders are not offered")
        except ParameterError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._is_decoupled = settings.is_decoupled
        self._threads = ThreadPoolExecutor(_MAX_IN_PROGRESS, thread_name_prefix="bls")

    def execute(self, requests: list[Any]) -> None:
        """Start all of them; each answers by itself."""
        for request in requests:
            self._threads.submit(self._answer, request, request.get_response_sender())

    def finalize(self) -> None:
        self._threads.shutdown()

    def _answer(self, request: Any, sender: Any) -> None:
        try:
            tensors = {tensor.name(): tensor for tensor in request.inputs()}
            _refuse(tensors)
            self._generate(request, sender, tensors)
        except _CallError as error:
            send_final(sender, pb_utils.InferenceResponse(error=error.args[0]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must end
            failure = pb_utils.TritonError(f"{self._llm}: {error}", pb_utils.TritonError.INTERNAL)
            send_final(sender, pb_utils.InferenceResponse(error=failure))

    def _generate(self, request: Any, sender: Any, tensors: Mapping[str, Any]) -> None:
        prepared = _call(
            "preprocessing", _renamed(tensors, TEXT_TO_PREPROCESSING), list(PREPROCESSING_TO_LLM), request.request_id()
        )
        inputs = _renamed(prepared, PREPROCESSING_TO_LLM) + _renamed(tensors, TEXT_TO_LLM)
        wanted = request.requested_output_names()
        outputs = [*LLM_TO_POSTPROCESSING, *(name for name in LLM_TO_TEXT if name in wanted)]
        call = pb_utils.InferenceRequest(
            model_name=self._llm,
            requested_output_names=outputs,
            inputs=inputs,
            request_id=request.request_id(),
            timeout=request.timeout(),
            parameters=request_parameters(request),
        )
        so_far: dict[tuple[int, int], list[int]] = {}
        answers = call.exec(decoupled=True) if self._is_decoupled else [call.exec()]
        for answer in answers:
            if answer.has_error():
                raise _CallError(answer.error())
            found = {tensor.name(): tensor for tensor in answer.output_tensors()}
            if not found:
                continue  # Triton closes a stream with an empty response
            if self._is_decoupled and sender.is_cancelled():
                return  # leaving cancels the call
            if self._accumulates and self._is_decoupled:
                _accumulate(found, so_far)
            text = _call("postprocessing", _renamed(found, LLM_TO_POSTPROCESSING), ["OUTPUT"], request.request_id())[
                "OUTPUT"
            ]
            results = [pb_utils.Tensor("text_output", text.as_numpy())]
            results += [found[name] for name in LLM_TO_TEXT if name in found and name in wanted]
            if not self._is_decoupled:
                send_final(sender, pb_utils.InferenceResponse(results))
                return
            sender.send(pb_utils.InferenceResponse(results))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _refuse(tensors: Mapping[str, Any]) -> None:
    drafts = tensors.get("num_draft_tokens")
    refused = dict(_REFUSED)
    if drafts is not None and drafts.as_numpy().any():
        refused["num_draft_tokens"] = "draft models are not offered yet"
    for name, why in refused.items():
        if name in tensors:
            raise _CallError(pb_utils.TritonError(f"{name} is not supported: {why}", pb_utils.TritonError.UNSUPPORTED))


def _accumulate(found: dict[str, Any], so_far: dict[tuple[int, int], list[int]]) -> None:
    """All tokens of the sequence so far instead of the new ones."""
    sequence = tuple(
        int(found[name].as_numpy().ravel()[0]) if name in found else 0 for name in ("batch_index", "sequence_index")
    )
    tokens = so_far.setdefault((sequence[0], sequence[1]), [])
    tokens += found["output_ids"].as_numpy().ravel().tolist()
    found["output_ids"] = pb_utils.Tensor("output_ids", np.array([[tokens]], np.int32))
    found["sequence_length"] = pb_utils.Tensor("sequence_length", np.array([[len(tokens)]], np.int32))
    found["prefix_ids"] = pb_utils.Tensor("prefix_ids", np.zeros((1, 1, 0), np.int32))


def _renamed(tensors: Mapping[str, Any], names: Mapping[str, str]) -> list[Any]:
    """Those that the next model takes, under its names."""
    return [pb_utils.Tensor(new, tensors[old].as_numpy()) for old, new in names.items() if old in tensors]


def _call(model: str, inputs: list[Any], outputs: list[str], request_id: str) -> dict[str, Any]:
    """The outputs of another model, by name."""
    answer = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=outputs, inputs=inputs, request_id=request_id
    ).exec()
    if answer.has_error():
        raise _CallError(answer.error())
    return {tensor.name(): tensor for tensor in answer.output_tensors()}
