"""The GGUF container: agreement with the package that writes it; a damaged file is never read as if it were whole."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_build.checkpoint import CheckpointError
from engine_build.checkpoint.gguf_file import GgufFile
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.engine_build.written_checkpoints import write_gguf

_TINY = tiny_config(num_hidden_layers=1, vocab_size=8, hidden_size=32, intermediate_size=32)
_FUZZED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", _TINY).read_bytes()


def _written(directory: Path, content: bytes) -> Path:
    path = directory / "damaged.gguf"
    path.write_bytes(content)
    return path


def test_tensors_and_metadata_are_those_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", _TINY)
    file, reader = GgufFile(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(file.rows(tensor.name).view(np.float32).ravel(), tensor.data.ravel())
    assert file.integer("llama.block_count") == 1
    assert file.strings("tokenizer.ggml.merges") == ["a b", "Ġ a"]
    assert file.numbers("tokenizer.ggml.token_type").tolist() == [3, 3, 3, 1, 1, 1, 1, 1]
    assert file.string("general.architecture") == "llama"


@_FUZZED
@given(data=st.data())
def test_a_file_cut_short_anywhere_is_refused(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(whole) - 33))  # the last tensor may end in up to 32 bytes of padding
    with pytest.raises(CheckpointError, match=r"truncated|cannot read"):
        GgufFile(_written(tmp_path, whole[:length]))


@_FUZZED
@given(data=st.data())
def test_changed_bytes_in_the_header_never_hang_or_crash(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """A length of 2**60 must not be believed: it would be looped over or allocated."""
    damaged = bytearray(whole)
    position = data.draw(st.integers(0, 2048))
    damaged[position : position + 8] = data.draw(st.binary(min_size=8, max_size=8))
    started = time.monotonic()
    with suppress(CheckpointError):  # other bytes may make another file that is whole
        GgufFile(_written(tmp_path, bytes(damaged)))
    assert time.monotonic() - started < 2


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a GGUF file: it does not begin with 'GGUF'"):
        GgufFile(_written(tmp_path, b"PK\x03\x04 and more"))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        GgufFile(_written(tmp_path, b""))


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_and_the_other_byte_order_are_refused(whole: bytes, tmp_path: Path, version: int) -> None:
    with pytest.raises(CheckpointError, match=f"GGUF version {version} or written for the other byte order"):
        GgufFile(_written(tmp_path, whole[:4] + struct.pack("<I", version) + whole[8:]))


def test_an_array_longer_than_the_file_is_refused_at_once(whole: bytes, tmp_path: Path) -> None:
    key = b"tokenizer.ggml.token_type"
    length_at = whole.index(key) + len(key) + 8  # behind the value type and the item type
    damaged = whole[:length_at] + struct.pack("<Q", 1 << 60) + whole[length_at + 8 :]
    with pytest.raises(CheckpointError, match=r"metadata tokenizer\.ggml\.token_type ends at byte"):
        GgufFile(_written(tmp_path, damaged))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda file: file.integer("general.architecture"), "is 'llama', it must be an integer"),
        (lambda file: file.string("llama.block_count"), "is 1, it must be a string"),
        (lambda file: file.strings("tokenizer.ggml.token_type"), "is an array of 8, it must be an array of strings"),
        (lambda file: file.integer("llama.absent"), "has no metadata llama.absent, which must be an integer"),
        (lambda file: file.boolean("llama.block_count", False), "it must be a boolean"),
        (lambda file: file.number("general.architecture"), "it must be a number"),
        (lambda file: file.numbers("tokenizer.ggml.tokens"), "it must be an array of numbers"),
    ],
)
def test_metadata_of_another_type_is_named(tmp_path: Path, ask: object, said: str) -> None:
    file = GgufFile(write_gguf(tmp_path / "m.gguf", _TINY))
    with pytest.raises(CheckpointError) as caught:
        ask(file)  # type: ignore[operator]
    assert said in str(caught.value)
