"""The OpenVINO engine against itself: every way of feeding the same tokens, and what it refuses.

`tests/parity` holds it to the reference engine and to transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine_build.builder import build_engine, resolve_build_config
from engine_build.network import MODEL_FILE, NetworkOptions, write_network
from engine_build.targets.select import select_target
from executor.api.errors import InvalidRequestError
from executor.engines.interface import EngineSpec, InvalidStepError, StepInputs
from executor.engines.open import engine_spec, open_engine
from executor.engines.openvino import OpenVinoEngine, OpenVinoError
from executor.engines.openvino_compile import KV_CACHE_DTYPES, compile_network
from tests.engine_build.tiny_checkpoint import TinyCheckpoint, tiny_config
from tests.executor.hand_fed import Piece, pack

NUM_BLOCKS = 24
BYTES_PER_ROW = {"float32": 64, "float16": 32, "bfloat16": 32, "uint8": 16 + 8}
PRECISIONS = [(precision, kv) for precision, choices in KV_CACHE_DTYPES.items() for kv in choices]
WEIGHTS = ("as_stored", "int8")
NUM_THREADS = 2
"""With one thread, OpenVINO has fewer ways to share out a step, and these tests less to find."""
LENGTH = 70
TOKENS = np.random.default_rng(1).integers(0, 128, LENGTH).tolist()
OTHER_TOKENS = np.random.default_rng(2).integers(0, 128, LENGTH).tolist()

OpenEngine = Callable[..., OpenVinoEngine]


def spec_for(kv_cache_dtype: str) -> EngineSpec:
    return EngineSpec(
        vocab_size=128,
        num_layers=2,
        num_kv_heads=2,
        head_size=16,
        tokens_per_block=32,
        max_batch_size=16,
        max_num_tokens=256,
        max_input_len=128,
        max_seq_len=128,
        kv_bytes_per_block=2 * 2 * 2 * 32 * BYTES_PER_ROW[kv_cache_dtype],
    )


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weight dtype -> a network of the same weights."""
    paths = {}
    for weight_dtype in WEIGHTS:
        directory = tmp_path_factory.mktemp(weight_dtype)
        write_network(TinyCheckpoint(), NetworkOptions(weight_dtype=weight_dtype), directory)
        paths[weight_dtype] = directory / MODEL_FILE
    return paths


@pytest.fixture(scope="module")
def engine_of(model_paths: dict[str, Path]) -> OpenEngine:
    """Engines of the module by their settings; each is opened once."""
    opened: dict[tuple[str, str, str, bool], OpenVinoEngine] = {}

    def engine(
        precision: str = "float32",
        kv_cache_dtype: str = "float32",
        weight_dtype: str = "as_stored",
        deterministic: bool = False,
    ) -> OpenVinoEngine:
        key = (precision, kv_cache_dtype, weight_dtype, deterministic)
        if key not in opened:
            opened[key] = OpenVinoEngine(
                model_paths[weight_dtype],
                spec_for(kv_cache_dtype),
                NUM_BLOCKS,
                kv_cache_dtype=kv_cache_dtype,
                precision=precision,
                num_threads=NUM_THREADS,
                deterministic=deterministic,
            )
        return opened[key]

    return engine


def feed(
    engine: OpenVinoEngine, pieces: Sequence[Piece], sampled_rows: Sequence[int] | None = None
) -> NDArray[np.float32]:
    return engine.execute(pack(pieces, 32, sampled_rows)).copy()


def whole(engine: OpenVinoEngine) -> NDArray[np.float32]:
    """Logits of every position of the sequence, alone, in one step."""
    return feed(engine, [Piece(TOKENS, 0, LENGTH, [0, 1, 2])])


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Pieces that cover the sequence, each of two rows or more; a piece may begin with rows fed before."""
    pieces, end = [], 0
    while end < LENGTH:
        begin = max(0, end - draw(st.integers(0, 3)))
        end = min(LENGTH, draw(st.one_of(st.integers(end + 1, end + 3), st.integers(end + 1, LENGTH))))
        if end - begin < 2:
            begin, end = (begin - 1, end) if begin else (begin, end + 1)
        pieces.append((begin, end))
    return pieces


@pytest.mark.parametrize("weight_dtype", WEIGHTS)
@pytest.mark.parametrize(("precision", "kv_cache_dtype"), PRECISIONS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_in_deterministic_mode_cuts_company_blocks_and_replays_do_not_change_a_bit(
    data: st.DataObject, precision: str, kv_cache_dtype: str, weight_dtype: str, engine_of: OpenEngine
) -> None:
    engine = engine_of(precision, kv_cache_dtype, weight_dtype, deterministic=True)
    expected = whole(engine)
    blocks = data.draw(st.permutations(range(NUM_BLOCKS)))
    table, other_table = blocks[:3], blocks[3:6]
    for begin, end in data.draw(cuts()):
        mine = Piece(TOKENS, begin, end, table)
        other = Piece(OTHER_TOKENS, 0, data.draw(st.integers(2, LENGTH)), other_table)
        order = data.draw(st.sampled_from([[mine], [mine, other], [other, mine]]))
        first = 0 if order[0] is mine else other.end
        some = data.draw(st.lists(st.integers(begin, end - 1), min_size=1, max_size=4))
        logits = feed(engine, order, [first + position - begin for position in some])
        np.testing.assert_array_equal(logits, expected[some])


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES["float32"])
def test_blocks_hold_the_same_bytes_however_the_sequence_was_cut(kv_cache_dtype: str, engine_of: OpenEngine) -> None:
    """With keys quantized by channel, a block's bytes would depend on the order in which its tokens came."""
    engine = engine_of("float32", kv_cache_dtype)
    whole(engine)
    for begin, end in ((0, 5), (5, 40), (38, 41), (41, LENGTH)):
        feed(engine, [Piece(TOKENS, begin, end, [9, 8, 7])])
    for first, second in ((0, 9), (1, 8)):
        np.testing.assert_array_equal(engine.read_block(first), engine.read_block(second))


@pytest.mark.parametrize(("precision", "kv_cache_dtype"), PRECISIONS)
def test_a_row_decoded_alone_is_the_row_decoded_in_company(
    precision: str, kv_cache_dtype: str, engine_of: OpenEngine
) -> None:
    """One-row steps are padded to two: a single row is attended to by all threads together, in another order."""
    engine = engine_of(precision, kv_cache_dtype)
    feed(engine, [Piece(TOKENS, 0, 50, [0, 1]), Piece(OTHER_TOKENS, 0, 33, [2, 3])])
    row = Piece(TOKENS, 50, 51, [0, 1])
    alone = feed(engine, [row])
    together = feed(engine, [Piece(OTHER_TOKENS, 33, 34, [2, 3]), row], [1])
    np.testing.assert_array_equal(alone, together)


def test_logits_have_one_row_for_each_sampled_row_whatever_they_were_padded_to(engine_of: OpenEngine) -> None:
    engine = engine_of()
    expected = whole(engine)
    for count in (0, 1, 3, 17, LENGTH):
        rows = list(range(LENGTH - count, LENGTH))
        logits = feed(engine, [Piece(TOKENS, 0, LENGTH, [0, 1, 2])], rows)
        assert logits.shape == (count, 128)
        np.testing.assert_allclose(logits, expected[rows], atol=1e-5)


def test_warming_up_leaves_every_block_alone(engine_of: OpenEngine) -> None:
    engine = engine_of()
    generator = np.random.default_rng(0)
    for block in range(NUM_BLOCKS):
        engine.write_block(block, generator.integers(0, 256, engine.spec.kv_bytes_per_block, dtype=np.uint8))
    before = [engine.read_block(block) for block in range(NUM_BLOCKS)]
    engine.warm_up()
    for block, data in enumerate(before):
        np.testing.assert_array_equal(engine.read_block(block), data)


@pytest.mark.parametrize(("precision", "kv_cache_dtype"), PRECISIONS)
def test_a_sequence_goes_on_from_blocks_that_were_moved(
    precision: str, kv_cache_dtype: str, engine_of: OpenEngine, model_paths: dict[str, Path]
) -> None:
    engine = engine_of(precision, kv_cache_dtype)
    expected = whole(engine)[60:]
    engine.copy_blocks(np.array([0, 1]), np.array([11, 10]))
    np.testing.assert_array_equal(feed(engine, [Piece(TOKENS, 60, LENGTH, [11, 10, 12])])[:4], expected[:4])

    elsewhere = OpenVinoEngine(
        model_paths["as_stored"],
        engine.spec,
        4,
        kv_cache_dtype=kv_cache_dtype,
        precision=precision,
        num_threads=1,
    )
    for source, target in ((0, 3), (1, 0), (2, 2)):
        elsewhere.write_block(target, engine.read_block(source))
    np.testing.assert_array_equal(feed(elsewhere, [Piece(TOKENS, 60, LENGTH, [3, 0, 2])]), expected)
    elsewhere.close()


def test_blocks_can_trade_places_in_one_copy(engine_of: OpenEngine) -> None:
    engine = engine_of()
    whole(engine)
    first, second = engine.read_block(0), engine.read_block(1)
    engine.copy_blocks(np.array([0, 1]), np.array([1, 0]))
    np.testing.assert_array_equal(engine.read_block(0), second)
    np.testing.assert_array_equal(engine.read_block(1), first)


def test_a_refused_step_writes_nothing(engine_of: OpenEngine) -> None:
    engine = engine_of()
    whole(engine)
    before = [engine.read_block(block) for block in range(NUM_BLOCKS)]
    good = pack([Piece(OTHER_TOKENS, 0, 40, [0, 1])], 32)
    scratch = np.array([0, NUM_BLOCKS], np.int32)
    for bad in (good._replace(block_indices=scratch), good._replace(input_ids=good.input_ids + 127)):
        with pytest.raises(InvalidStepError):
            engine.execute(bad)
    for block, data in enumerate(before):
        np.testing.assert_array_equal(engine.read_block(block), data)


def test_block_ids_and_block_data_are_checked(engine_of: OpenEngine) -> None:
    engine = engine_of()
    size = engine.spec.kv_bytes_per_block
    for call in (
        lambda: engine.read_block(NUM_BLOCKS),
        lambda: engine.write_block(-1, np.zeros(size, np.uint8)),
        lambda: engine.copy_blocks(np.array([0]), np.array([NUM_BLOCKS])),
        lambda: engine.copy_blocks(np.array([-1]), np.array([0])),
    ):
        with pytest.raises(InvalidStepError, match="block_ids"):
            call()
    with pytest.raises(InvalidStepError, match=rf"float32\[{size}\]; it must be uint8\[{size}\]"):
        engine.write_block(0, np.zeros(size, np.float32))
    with pytest.raises(InvalidStepError, match=rf"uint8\[{size - 1}\]"):
        engine.write_block(0, np.zeros(size - 1, np.uint8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "float16"}, "precision is 'float16'; .* float32, bfloat16"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype is 'bfloat16'; .* float32 .* float32, float16, uint8"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"spec": spec_for("float16")}, "kv_bytes_per_block is 8192, .* float32 take 16384"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    arguments: dict[str, object], message: str, model_paths: dict[str, Path]
) -> None:
    defaults: dict[str, object] = {
        "model_path": model_paths["as_stored"],
        "spec": spec_for("float32"),
        "num_blocks": 4,
        "precision": "float32",
        "kv_cache_dtype": "float32",
    }
    with pytest.raises(ValueError, match=message):
        OpenVinoEngine(**(defaults | arguments))  # type: ignore[arg-type]


def test_a_network_of_other_sizes_than_the_spec_is_refused(tmp_path: Path) -> None:
    write_network(TinyCheckpoint(tiny_config(num_hidden_layers=1)), NetworkOptions(), tmp_path)
    with pytest.raises(ValueError, match=r"not those of 2 layers: missing \['key_cache_1', 'value_cache_1'\]"):
        OpenVinoEngine(tmp_path / MODEL_FILE, spec_for("float32"), 4, precision="float32", kv_cache_dtype="float32")
    write_network(TinyCheckpoint(tiny_config(num_key_value_heads=1)), NetworkOptions(), tmp_path)
    with pytest.raises(ValueError, match="key_cache_0 has blocks of 32 tokens and 1 heads; the spec says 32 and 2"):
        OpenVinoEngine(tmp_path / MODEL_FILE, spec_for("float32"), 4, precision="float32", kv_cache_dtype="float32")


def test_a_file_that_is_no_network_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / MODEL_FILE
    path.write_bytes(b"not a network")
    with pytest.raises(OpenVinoError, match=r"cannot compile .*model\.onnx"):
        compile_network(path, precision="float32", kv_cache_dtype="float32", num_threads=1)


def test_an_engine_directory_opens_with_its_own_dtypes(tmp_path: Path) -> None:
    checkpoint, target = TinyCheckpoint(), select_target("openvino")
    build_config = resolve_build_config(
        checkpoint.config, target, max_batch_size=4, max_num_tokens=64, max_seq_len=128, dtype="bfloat16"
    )
    directory = tmp_path / "engine"
    build_engine(checkpoint, build_config, target, directory, lambda *_: None)
    for kv_cache_dtype, bytes_per_row in ((None, 32), ("bfloat16", 32), ("uint8", 24)):
        spec = engine_spec(directory, kv_cache_dtype)
        assert spec.kv_bytes_per_block == 2 * 2 * 2 * 32 * bytes_per_row
        engine = open_engine(directory, num_blocks=4, kv_cache_dtype=kv_cache_dtype, num_threads=1, deterministic=True)
        assert isinstance(engine, OpenVinoEngine)
        assert engine.spec == spec
        step: StepInputs = pack([Piece(TOKENS, 0, 40, [2, 1])], 32, [39])
        assert engine.execute(step).shape == (1, 128)
        engine.close()
    with pytest.raises(InvalidRequestError, match=r"kv_cache_dtype is 'float32'; .* one of bfloat16, uint8"):
        open_engine(directory, num_blocks=4, kv_cache_dtype="float32")
