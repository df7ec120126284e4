"""What tensors mean, how they travel, and how streams become text: without a server."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor import RequestError, RequestType
from executor.triton import tensors
from executor.triton.backend.text import TextCodec
from executor.triton.backend.wire import FrameWriter, WireError, array, receive
from executor.triton.priority import PriorityLevels
from executor.triton.requests import RowReader, with_tensor_name, word_list
from tests.serving.byte_tokenizer import write_byte_tokenizer

READER = RowReader(258, decoupled=True, exclude_input_in_output=False, priorities=PriorityLevels(3, 2))


def row(**more: Any) -> dict[str, Any]:
    return {"input_ids": np.array([1, 2, 3], np.int32), "input_lengths": 3, "request_output_len": 4, **more}


def read(**more: Any) -> Any:
    return READER.request(row(**more), 0, {}).request


def test_every_input_of_the_model_is_known() -> None:
    """None of them is told to be unknown, whether it is offered or not."""
    examples = {"STRING": ["json"], "BOOL": True, "FP32": 1.0, "FP16": 1.0}
    for tensor in tensors.LLM_INPUTS:
        message = ""
        try:
            read(**{tensor.name: examples.get(tensor.data_type, 1)})
        except RequestError as error:
            message = error.message
        assert "is unknown" not in message


def test_an_unknown_tensor_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="temprature is unknown"):
        read(temprature=0.5)


def test_without_top_k_and_top_p_the_likeliest_token_is_taken_whatever_the_temperature() -> None:
    assert read(temperature=1.0).sampling_config.is_greedy
    assert read(temperature=1.0, runtime_top_k=0, runtime_top_p=0.0).sampling_config.is_greedy
    assert not read(temperature=1.0, runtime_top_p=0.9).sampling_config.is_greedy
    assert not read(temperature=1.0, runtime_top_k=40).sampling_config.is_greedy


def test_both_spellings_of_a_tensor_mean_the_same_and_may_not_differ() -> None:
    assert read(random_seed=7).sampling_config.seed == read(seed=7).sampling_config.seed == 7
    assert read(min_length=2, min_tokens=2).sampling_config.min_tokens == 2
    with pytest.raises(RequestError, match="min_tokens"):
        read(min_length=2, min_tokens=3)


def test_only_so_many_tokens_of_a_padded_prompt_count_as_its_length_says() -> None:
    request = READER.request(row(input_lengths=2), 0, {}).request
    assert request.input_token_ids == [1, 2]


def test_a_bias_over_the_tokenizers_vocabulary_is_padded_to_the_models() -> None:
    bias = read(embedding_bias=np.array([0.0, 1.0], np.float32)).embedding_bias
    assert bias.shape == (258,)
    assert bias[1] == 1
    with pytest.raises(RequestError, match="embedding_bias has 300 values"):
        read(embedding_bias=np.ones(300, np.float32))


def test_request_parameters_are_known_or_refused() -> None:
    request = READER.request(row(), 2500, {"priority_level": 1, "Streaming": True, "request_type": "context_only"})
    assert request.request.priority == 1.0
    assert request.request.allotted_time_seconds == 0.003
    assert request.request.type is RequestType.REQUEST_TYPE_CONTEXT_ONLY
    with pytest.raises(RequestError, match="request parameter foo is unknown"):
        READER.request(row(), 0, {"foo": "bar"})


@pytest.mark.parametrize(
    "words",
    [np.array([1, 2]), np.array([[1, 2], [3, -1]]), np.array([[1, 2], [2, 1]]), np.zeros((3, 2))],
)
def test_a_word_list_that_is_none_is_refused(words: Any) -> None:
    with pytest.raises(RequestError, match="stop_words_list"):
        word_list("stop_words_list", words)


@given(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=4), max_size=5), st.integers(0, 3))
def test_word_lists_are_read_as_preprocessing_writes_them(words: list[list[int]], padding: int) -> None:
    ids = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).astype(int).tolist()
    width = max(len(ids), len(ends)) + padding
    written = np.array([ids + [0] * (width - len(ids)), ends + [-1] * (width - len(ends))], np.int32).reshape(2, width)
    assert (word_list("stop_words_list", written) or []) == words


def test_errors_are_told_with_the_tensors_name() -> None:
    with pytest.raises(RequestError) as caught:
        read(request_output_len=0).validate()
    assert with_tensor_name(caught.value).startswith("request_output_len: ")


# -- frames -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.booleans()), max_size=3),
            st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=3),
        ),
        max_size=4,
    )
)
def test_frames_arrive_as_they_were_sent(messages: list[tuple[dict[str, Any], list[list[int]]]]) -> None:
    near, far = socket.socketpair()
    data = b""
    for header, arrays in messages:
        writer = FrameWriter()
        references = [writer.put(np.array(values, np.int32)) for values in arrays]
        data += writer.frame({"header": header, "arrays": references})
    sender = threading.Thread(target=lambda: (far.sendall(data), far.close()))
    sender.start()
    found = [
        (header["header"], [array(reference, body).tolist() for reference in header["arrays"]])
        for header, body in receive(near)
    ]
    sender.join()
    near.close()
    assert found == messages


def test_a_connection_that_ends_within_a_frame_is_an_error() -> None:
    near, far = socket.socketpair()
    far.sendall(FrameWriter().frame({"a": 1})[:-1])
    far.close()
    with pytest.raises(WireError):
        list(receive(near))
    near.close()


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(str(write_byte_tokenizer(tmp_path_factory.mktemp("codec") / "tokenizer")))


@given(data=st.data(), text=st.text(max_size=12), cut=st.integers(0, 4))
def test_pieces_decoded_one_by_one_make_the_whole_text(codec: TextCodec, data: Any, text: str, cut: int) -> None:
    """Cut anywhere, ended anywhere, with as much of a prefix as the model sends along."""
    ids = codec.encode(text, add_special_tokens=False)
    ids = ids[: len(ids) - cut] if cut < len(ids) else ids
    pieces = []
    at = 0
    while at < len(ids):
        size = data.draw(st.integers(1, len(ids) - at))
        prefix, new = ids[max(0, at - 8) : at], ids[at : at + size]
        at += size
        pieces.append(codec.decode(prefix, new, is_final=at == len(ids), skip_special_tokens=True))
    assert "".join(pieces) == codec.decode([], ids, is_final=True, skip_special_tokens=True)


def test_a_directory_without_a_tokenizer_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer_dir"):
        TextCodec(str(tmp_path))
