"""The model `postprocessing`: token ids to text.

A stream's pieces joined are the text of all its tokens: each response brings the tokens just before it along, so that
spaces and characters that span tokens come out right though no state is kept here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from executor.triton.backend.rows import RowError, tensors_by_name
from executor.triton.backend.runtime import tidy_up
from executor.triton.backend.settings import ParameterError, Settings
from executor.triton.backend.text import TextCodec

_PARAMETERS = frozenset({"tokenizer_dir", "skip_special_tokens"})


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        tidy_up()
        try:
            settings = Settings(args, _PARAMETERS)
            self._codec = TextCodec(settings.text("tokenizer_dir"))
            self._skip_special_tokens = settings.flag("skip_special_tokens", True)
        except ParameterError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            tensors, num_rows = tensors_by_name(request, True)
        except RowError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        texts = [text.encode() for row in range(num_rows) for text in self._texts(tensors, row)]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(texts, np.object_))])

    def _texts(self, tensors: dict[str, Any], row: int) -> list[str]:
        """Of one row: a text for each beam."""
        prefixes = tensors.get("PREFIX_IDS")
        reasons = tensors.get("FINISH_REASON")
        return [
            self._codec.decode(
                () if prefixes is None else prefixes[row][beam].tolist(),
                ids[: tensors["SEQUENCE_LENGTH"][row][beam]].tolist(),
                is_final=reasons is None or bool(reasons[row][0]),
                skip_special_tokens=self._skip_special_tokens,
            )
            for beam, ids in enumerate(tensors["TOKENS_BATCH"][row])
        ]
