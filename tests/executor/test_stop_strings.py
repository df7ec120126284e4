"""Stop strings, wherever token boundaries fall."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.text import StopStrings, TextStream, Tokenizer
from tests.executor.text_fixtures import byte_level_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer(write_tokenizer(directory, byte_level_tokenizer()))


@pytest.fixture(scope="module")
def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    table = {tokenizer.token_bytes(token_id): token_id for token_id in range(3, tokenizer.vocab_size)}
    return {byte: table[bytes([byte])] for byte in range(256)}


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, plainly: text before the stop string that is completed first, and that stop string."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


# Few letters, so that stop strings overlap with the text, each other and themselves.
letters = st.text(alphabet="abé\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé\n", min_size=1, max_size=5), max_size=4)


@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_a_stream_ends_at_the_stop_string_completed_first(
    tokenizer: Tokenizer, byte_tokens: dict[int, int], text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    stream = TextStream(tokenizer, stops, include)
    ids = [byte_tokens[byte] for byte in text.encode()]
    before, stop = first_stop(text, stops)
    shown = ""
    stopped = None
    for begin, end in pairwise([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]):
        delta = stream.push(ids[begin:end])
        shown += delta.text
        stopped = delta.stopped
    last = stream.finish()
    assert (stopped or last.stopped) == stop
    assert shown + last.text == before + (stop if include and stop else "")


@given(text=letters, stops=stop_lists)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(
    tokenizer: Tokenizer, byte_tokens: dict[int, int], text: str, stops: list[str]
) -> None:
    before, stop = first_stop(text, stops)
    if stop is not None:
        text = before[:-1]
        if first_stop(text, stops)[1] is not None:
            return
    shown = TextStream(tokenizer, stops, False).push([byte_tokens[byte] for byte in text.encode()]).text
    held = max((n for stop in stops for n in range(len(stop)) if n <= len(text) and text.endswith(stop[:n])), default=0)
    assert shown == text[: len(text) - held]


def tokenizations(tokenizer: Tokenizer, data: bytes) -> list[list[int]]:
    """Every way to write these bytes as tokens."""
    by_bytes: dict[bytes, list[int]] = {}
    for token_id in range(3, tokenizer.vocab_size):
        by_bytes.setdefault(tokenizer.token_bytes(token_id), []).append(token_id)
    ways: list[list[list[int]]] = [[[]]]
    for end in range(1, len(data) + 1):
        ways.append(
            [
                [*way, token_id]
                for begin in range(end)
                for token_id in by_bytes.get(data[begin:end], ())
                for way in ways[begin]
            ]
        )
    return ways[-1]


@pytest.mark.parametrize("stop", ["END", "### ", "stop", "🌍", "\n\n", " the "])
@pytest.mark.parametrize("include", [False, True])
def test_every_tokenisation_of_a_stop_string_stops(tokenizer: Tokenizer, stop: str, include: bool) -> None:
    ways = tokenizations(tokenizer, f"a{stop}b".encode())
    assert len(ways) > 1
    for way in ways:
        stream = TextStream(tokenizer, [stop], include)
        deltas = [stream.push([token_id]) for token_id in way]
        assert "".join(delta.text for delta in deltas) == "a" + (stop if include else "")
        assert deltas[-1].stopped == stop


def test_of_two_stop_strings_that_end_together_the_one_named_first_counts(
    tokenizer: Tokenizer, byte_tokens: dict[int, int]
) -> None:
    ids = [byte_tokens[byte] for byte in b"xab"]
    assert TextStream(tokenizer, ["b", "ab"], False).push(ids) == ("xa", "b")
    assert TextStream(tokenizer, ["ab", "b"], False).push(ids) == ("x", "ab")


def test_after_a_stop_string_there_is_no_more_text(tokenizer: Tokenizer, byte_tokens: dict[int, int]) -> None:
    stream = TextStream(tokenizer, ["b"], False)
    assert stream.push([byte_tokens[byte] for byte in b"abc"]) == ("a", "b")
    assert stream.push([byte_tokens[ord("d")]]) == ("", "b")
    assert stream.finish() == ("", "b")


def test_an_output_that_ends_gives_what_was_held_back(tokenizer: Tokenizer, byte_tokens: dict[int, int]) -> None:
    stream = TextStream(tokenizer, ["STOP"], False)
    assert stream.push([byte_tokens[byte] for byte in b"go ST"]) == ("go ", None)
    assert stream.finish() == ("ST", None)


def test_long_repetitive_stop_strings_take_linear_time_and_space() -> None:
    stops = StopStrings(["a" * 1000 + chr(ord("b") + index) for index in range(16)])
    state, match = stops.scan("a" * 100_000, 0)
    assert match is None
    assert stops.num_held(state) == 1000
    assert stops.scan("c", state)[1] == (1, "a" * 1000 + "c")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])
