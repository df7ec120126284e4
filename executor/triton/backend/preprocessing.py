"""The model `preprocessing`: text to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from executor.triton.backend.rows import RowError, decoded, tensors_by_name
from executor.triton.backend.runtime import tidy_up
from executor.triton.backend.settings import ParameterError, Settings
from executor.triton.backend.text import TextCodec

_PARAMETERS = frozenset({"tokenizer_dir", "add_special_tokens", "gpt_model_path"})
_REFUSED = {
    "DECODER_QUERY": "decoder_text_input is not supported: only decoder-only text models are offered",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id is not supported: prompt tuning is not offered",
}


class TritonPythonModel:
    """One instance of the model; its requests are answered one after the other."""

    def initialize(self, args: dict[str, str]) -> None:
        tidy_up()
        try:
            settings = Settings(args, _PARAMETERS)
            self._codec = TextCodec(settings.text("tokenizer_dir"))
            self._add_special_tokens = settings.flag("add_special_tokens", True)
        except ParameterError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            tensors, num_rows = tensors_by_name(request, True)
            for name, why in _REFUSED.items():
                if name in tensors:
                    raise RowError(why)
            outputs = self._outputs(tensors, num_rows)
        except RowError as error:
            code = (
                pb_utils.TritonError.UNSUPPORTED if "not supported" in str(error) else pb_utils.TritonError.INVALID_ARG
            )
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, values) for name, values in outputs.items() if name in wanted]
        )

    def _outputs(self, tensors: dict[str, Any], num_rows: int) -> dict[str, Any]:
        prompts = [
            self._codec.encode(decoded("text_input", row.ravel()[0]), add_special_tokens=self._add_special_tokens)
            for row in tensors["QUERY"]
        ]
        return {
            "INPUT_ID": _padded(prompts, max(0, self._codec.pad_id)),
            "REQUEST_INPUT_LEN": np.array([[len(prompt)] for prompt in prompts], np.int32),
            "REQUEST_OUTPUT_LEN": tensors["REQUEST_OUTPUT_LEN"],
            "BAD_WORDS_IDS": self._word_lists(tensors, "BAD_WORDS_DICT", num_rows),
            "STOP_WORDS_IDS": self._word_lists(tensors, "STOP_WORDS_DICT", num_rows),
            "EMBEDDING_BIAS": self._embedding_bias(tensors, num_rows),
            "OUT_END_ID": tensors.get("END_ID", np.full((num_rows, 1), self._codec.end_id, np.int32)),
            "OUT_PAD_ID": tensors.get("PAD_ID", np.full((num_rows, 1), self._codec.pad_id, np.int32)),
        }

    def _word_lists(self, tensors: dict[str, Any], name: str, num_rows: int) -> Any:
        """`[rows, 2, n]`: token ids of the words one after the other, above the end of each; empty words are none."""
        lists: list[list[list[int]]] = [[] for _ in range(num_rows)]
        for row, words in enumerate(tensors.get(name, ())):
            texts = [decoded(name, word) for word in words.ravel()]
            lists[row] = [self._codec.encode(text, add_special_tokens=False) for text in texts if text]
        ids = [[token_id for word in words for token_id in word] for words in lists]
        ends = [np.cumsum([len(word) for word in words]).astype(int).tolist() for words in lists]
        width = max(1, *map(len, ids), *map(len, ends))
        return np.stack([_padded(ids, 0, width), _padded(ends, -1, width)], axis=1)

    def _embedding_bias(self, tensors: dict[str, Any], num_rows: int) -> Any:
        """`[rows, vocab]`: each word's weight at each of its tokens; `[rows, 1]` of zeros where there are no words."""
        words, weights = tensors.get("EMBEDDING_BIAS_WORDS"), tensors.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None and weights is None:
            return np.zeros((num_rows, 1), np.float32)
        if words is None or weights is None or words.shape != weights.shape:
            raise RowError("embedding_bias_words and embedding_bias_weights go together, one weight for each word")
        bias = np.zeros((num_rows, self._codec.vocab_size), np.float32)
        for row in range(num_rows):
            for word, weight in zip(words[row].ravel(), weights[row].ravel(), strict=True):
                ids = self._codec.encode(decoded("embedding_bias_words", word), add_special_tokens=False)
                bias[row, list(set(ids))] += weight
        return bias


def _padded(rows: Sequence[Sequence[int]], padding: int, width: int | None = None) -> Any:
    """As int32 `[rows, width]`; as wide as the longest row, at least 1, where nothing is said."""
    matrix = np.full((len(rows), width or max(1, *map(len, rows), 1)), padding, np.int32)
    for index, row in enumerate(rows):
        matrix[index, : len(row)] = row
    return matrix
