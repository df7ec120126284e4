"""Debug tensors: what each step was given and what it gave."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from executor import DebugConfig, InvalidRequestError
from executor.debug_tensors import TENSOR_NAMES
from tests.executor.driving import OpenExecutor, request, run, run_one


def test_one_named_tensor_is_kept_for_the_latest_iterations(open_executor: OpenExecutor) -> None:
    config = DebugConfig(debug_tensor_names=["sequence_length"], debug_tensors_max_iterations=2)
    executor = open_executor(debug_config=config)
    run_one(executor, request([1, 2, 3, 4], 5))
    kept = executor.get_latest_debug_tensors()
    assert [each.iter for each in kept] == [3, 4]
    assert [each.debug_tensors["sequence_length"].tolist() for each in kept] == [[7], [8]]
    assert [each.debug_tensors.keys() for each in kept] == [{"sequence_length"}] * 2
    assert executor.get_latest_debug_tensors() == []


def test_all_tensors_fit_together(open_executor: OpenExecutor) -> None:
    config = DebugConfig(True, True, debug_tensors_max_iterations=1000)
    executor = open_executor(debug_config=config, max_num_tokens=16)
    prompts = [[3, 4, 5], list(range(10, 35)), [7]]
    run(executor, *(request(prompt, 6) for prompt in prompts))
    phases = set()
    for each in executor.get_latest_debug_tensors():
        tensors = each.debug_tensors
        assert list(tensors) == list(TENSOR_NAMES)
        lengths = np.diff(tensors["subsequence_begins"])
        assert len(tensors["input_ids"]) == len(tensors["position_ids"]) == lengths.sum()
        np.testing.assert_array_equal(tensors["sequence_length"], tensors["past_lens"] + lengths)
        np.testing.assert_array_equal(tensors["host_past_key_value_lengths"], tensors["past_lens"])
        np.testing.assert_array_equal(tensors["last_token_ids"], np.cumsum(lengths))
        np.testing.assert_array_equal(tensors["context_lengths"], tensors["host_context_lengths"])
        assert set(tensors["context_lengths"].tolist()) <= {3, 25, 1}
        assert tensors["logits"].shape == (len(tensors["sampled_rows"]), 128)
        tables = tensors["kv_cache_block_offsets"]
        assert tables.shape[:3:2] == (1, 2)
        np.testing.assert_array_equal(tables[0, :, 0], tables[0, :, 1])
        np.testing.assert_array_equal(tables[0, :, 0][tables[0, :, 0] >= 0], tensors["block_indices"])
        types = tensors["host_request_types"]
        assert (np.diff(types) >= 0).all(), "contexts come first"
        phases |= set(types.tolist())
        np.testing.assert_array_equal(
            types, tensors["past_lens"] + lengths > tensors["context_lengths"], err_msg=str(each.iter)
        )
    assert phases == {0, 1}


def test_without_a_bound_each_iteration_is_written_to_files(open_executor: OpenExecutor, tmp_path: Path) -> None:
    config = DebugConfig(debug_tensor_names=["sequence_length", "logits"], dump_dir=str(tmp_path))
    executor = open_executor(debug_config=config)
    run_one(executor, request([1, 2, 3, 4], 2))
    executor.shutdown()
    rank_dir = tmp_path / "PP_1" / "TP_1"
    assert sorted(each.name for each in rank_dir.iterdir()) == ["iteration_0", "iteration_1"]
    lengths = [np.load(rank_dir / f"iteration_{index}" / "sequence_length.npy").tolist() for index in (0, 1)]
    assert lengths == [[4], [5]]
    assert np.load(rank_dir / "iteration_1" / "logits.npy").shape == (1, 128)
    assert executor.get_latest_debug_tensors() == []


def test_files_that_cannot_be_written_fail_no_request(
    open_executor: OpenExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = DebugConfig(debug_tensor_names=["sequence_length"], dump_dir=str(tmp_path / "dumps"))
    executor = open_executor(debug_config=config)
    run_one(executor, request([1, 2], 2))
    shutil.rmtree(tmp_path / "dumps")
    (tmp_path / "dumps").write_text("in the way")
    assert len(run_one(executor, request([1, 2], 5)).output_token_ids[0]) == 5
    assert caplog.text.count("debug tensors are not written any more") == 1


def test_a_tensor_that_there_is_not_is_refused_by_name(open_executor: OpenExecutor) -> None:
    with pytest.raises(InvalidRequestError, match="'nothing'; there are input_ids"):
        open_executor(debug_config=DebugConfig(debug_tensor_names=["nothing"]))


def test_without_a_debug_configuration_there_are_none(open_executor: OpenExecutor) -> None:
    executor = open_executor()
    run_one(executor, request([3]))
    assert executor.get_latest_debug_tensors() == []
