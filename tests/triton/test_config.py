"""Reading, writing and converting `config.pbtxt`, without a server."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from executor.cli import app
from executor.triton.config_pbtxt import ConfigSyntaxError, Word, read_config, write_config
from executor.triton.convert import convert
from tests.serving.tiny_engine_dir import build_tiny_engine

OLD = """
# a repository as fill_template.py left it
name: "tensorrt_llm"
backend: "tensorrtllm"
max_batch_size: 128
model_transaction_policy { decoupled: True }
dynamic_batching {
    preferred_batch_size: [ 128 ]
    max_queue_delay_microseconds: 100
    default_queue_policy: { max_queue_size: 7 }
}
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
  { name: "my_input" data_type: TYPE_FP32 dims: [ 1 ] }
]
output [ { name: "output_ids", data_type: TYPE_INT32, dims: [ -1, -1 ] } ]
instance_group [ { count: 1 kind : KIND_CPU } ]
parameters: { key: "gpt_model_path" value: { string_value: "/old/engine" } }
parameters: { key: "batch_scheduler_policy" value: { string_value: "max_utilization" } }
parameters: { key: "kv_cache_free_gpu_mem_fraction" value: { string_value: "0.4" } }
parameters: { key: "decoding_mode" value: { string_value: "${decoding_mode}" } }
parameters: { key: "lora_cache_host_memory_bytes" value: { string_value: "1024" } }
parameters: { key: "kv_cache_onboard_blocks" value: { string_value: "" } }
parameters: { key: "my_parameter" value: { string_value: "1" } }
model_warmup [ { name: "warm" } ]
"""


def test_a_configuration_is_read_as_protobufs_text_format() -> None:
    config = read_config(OLD)
    assert config["max_batch_size"] == 128
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["input"][0]["dims"] == [-1]
    assert config["instance_group"] == [{"count": 1, "kind": Word("KIND_CPU")}]
    assert config["parameters"]["gpt_model_path"] == {"string_value": "/old/engine"}


@pytest.mark.parametrize("text", ["name: ", "a { b: 1", "a: [1", "{ }", 'a: "open', "a: 1 }"])
def test_what_is_no_configuration_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(ConfigSyntaxError, match="line 1"):
        read_config(text)


_names = st.text(string.ascii_lowercase, min_size=1, max_size=6).map("field_".__add__)
_scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**31), 2**31),
    st.text(),
    st.sampled_from([Word("TYPE_INT32"), Word("KIND_CPU")]),
)
_messages = st.recursive(
    st.dictionaries(_names, _scalars, max_size=4),
    lambda inner: st.dictionaries(_names, st.one_of(_scalars, inner), max_size=4),
    max_leaves=12,
)


@given(_messages)
def test_what_is_written_is_read_as_it_was(message: dict[str, Any]) -> None:
    assert read_config(write_config(message)) == message


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=5), st.lists(st.integers(-1, 9), max_size=4))
def test_maps_and_lists_are_read_as_they_were(parameters: dict[str, str], dims: list[int]) -> None:
    message = {
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
        "input": [{"name": "x", "dims": dims}],
    }
    expected = message if parameters else {"input": message["input"]}
    assert read_config(write_config(message)) == expected


def test_a_conversion_tells_everything_that_it_carries_over_and_everything_that_it_does_not() -> None:
    conversion = convert(OLD)
    assert conversion.max_batch_size == 128
    assert conversion.decoupled is True
    assert conversion.parameters == {
        "batch_scheduler_policy": "max_utilization",
        "kv_cache_free_gpu_mem_fraction": "0.4",
        "max_queue_size": "7",
    }
    assert conversion.dynamic_batching == {"default_queue_policy": {"max_queue_size": 7}}
    left = "\n".join(conversion.left)
    for name in (
        "gpt_model_path",
        "lora_cache_host_memory_bytes",
        "my_parameter",
        "my_input",
        "preferred_batch_size",
        "max_queue_delay_microseconds",
        "model_warmup",
    ):
        assert name in left
    assert "decoding_mode" not in left


def test_template_variables_that_were_never_filled_in_are_told() -> None:
    conversion = convert(
        "max_batch_size: ${triton_max_batch_size}\nmodel_transaction_policy { decoupled: ${decoupled_mode} }\n"
        "dynamic_batching { default_queue_policy: { max_queue_size: ${max_queue_size} } }\ninput [ ]"
    )
    assert conversion.max_batch_size is None
    assert conversion.decoupled is None
    assert conversion.dynamic_batching == {}
    assert len(conversion.left) == 3


def test_the_command_writes_five_models_and_says_what_it_left(tmp_path: Path) -> None:
    engine = build_tiny_engine(tmp_path / "engine")
    old = tmp_path / "config.pbtxt"
    old.write_text(OLD)
    repository = tmp_path / "repository"
    done = CliRunner().invoke(app, ["triton-repo", str(engine), "--output", str(repository), "--from", str(old)])
    assert done.exit_code == 0, done.output
    assert "not carried over: parameter my_parameter is unknown" in done.output
    names = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    assert names == {"tensorrt_llm", "preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls"}
    written = read_config((repository / "tensorrt_llm" / "config.pbtxt").read_text())
    assert written["max_batch_size"] == 128
    assert written["parameters"]["batch_scheduler_policy"] == {"string_value": "max_utilization"}
    assert written["parameters"]["gpt_model_path"] == {"string_value": str(engine)}


@pytest.mark.parametrize("wrong", ["lora=1", "max_beam_width=2", "nothing"])
def test_a_wrong_parameter_is_one_line_and_exit_code_2(tmp_path: Path, wrong: str) -> None:
    engine = build_tiny_engine(tmp_path / "engine")
    command = ["triton-repo", str(engine), "--output", str(tmp_path / "repository"), "--parameter", wrong]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert wrong.partition("=")[0] in done.output
    assert not (tmp_path / "repository").exists()
