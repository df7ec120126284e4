"""Parameters of the model `tensorrt_llm`, without a server."""

from __future__ import annotations

import pytest

from executor import BatchingType, CapacitySchedulerPolicy, RequestError
from executor.triton.backend.settings import ParameterError, string_parameters
from executor.triton.parameters import PARAMETERS, model_settings, read_parameter
from executor.triton.priority import PriorityLevels


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("lora_prefetch_dirs", "/x", "unknown"),
        ("enable_chunked_context", "maybe", "true or false"),
        ("kv_cache_free_gpu_mem_fraction", "1.5", "[0, 1]"),
        ("max_tokens_in_paged_kv_cache", "many", "whole number"),
        ("batch_scheduler_policy", "static_batch", "max_utilization, guaranteed_no_evict"),
        ("max_beam_width", "4", "beam search is not offered"),
        ("medusa_choices", "{0}", "draft"),
        ("lora_prefetch_dir", "/adapters", "LoRA"),
        ("lookahead_window_size", "4", "go together"),
        ("encoder_model_path", "/x", "decoder-only"),
        ("num_nodes", "2", "one device"),
        ("gpu_device_ids", "0,1", "it must be one number"),
    ],
)
def test_a_parameter_that_is_unknown_unreadable_or_not_offered_is_an_error_that_names_it(
    name: str, value: str, right: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        model_settings({"gpt_model_path": "/engine", name: value})
    assert name in str(caught.value)
    assert right in str(caught.value)


def test_parameters_set_what_they_are_named_after() -> None:
    settings = model_settings(
        {
            "gpt_model_path": "/engine",
            "batch_scheduler_policy": "max_utilization",
            "kv_cache_free_gpu_mem_fraction": "0.5",
            "max_tokens_in_paged_kv_cache": "2560",
            "enable_kv_cache_reuse": "False",
            "enable_chunked_context": "false",
            "exclude_input_in_output": "true",
            "stats_check_period_ms": "50",
            "max_beam_width": "1",
            "gpu_device_ids": "0",
        }
    )
    config = settings.executor_config
    assert config.scheduler_config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.5
    assert config.kv_cache_config.max_tokens == 2560
    assert not config.kv_cache_config.enable_block_reuse
    assert not config.enable_chunked_context
    assert settings.exclude_input_in_output
    assert settings.stats_period_seconds == 0.05


def test_parameters_of_the_gpu_are_handed_on_and_the_first_gpu_is_the_default() -> None:
    texts = {"gpu_device_ids": "2", "gpu_weights_percent": "0.5", "cuda_graph_mode": "true"}
    config = model_settings({"gpt_model_path": "/engine", "cuda_graph_cache_size": "4"} | texts).executor_config
    config.validate()
    assert config.parallel_config is not None
    assert config.parallel_config.device_ids == [2]
    assert config.gpu_weights_percent == 0.5
    knobs = config.extended_runtime_perf_knob_config
    assert (knobs.cuda_graph_mode, knobs.cuda_graph_cache_size) == (True, 4)
    template = {"gpu_device_ids": "0", "gpu_weights_percent": "1.0", "cuda_graph_mode": "false"}
    assert model_settings({"gpt_model_path": "/engine"} | template).executor_config.parallel_config is None


def test_v1_is_static_batching() -> None:
    config = model_settings({"gpt_model_path": "/engine", "gpt_model_type": "V1"}).executor_config
    assert config.batching_type is BatchingType.STATIC
    assert config.scheduler_config.capacity_scheduler_policy is CapacitySchedulerPolicy.STATIC_BATCH


def test_the_engine_directory_is_required() -> None:
    with pytest.raises(ParameterError, match="gpt_model_path"):
        model_settings({})


def test_empty_parameters_and_unfilled_templates_count_as_not_set() -> None:
    texts = {"a": "", "b": "${b}", "c": "x", "d": "0"}
    config = {"parameters": {name: {"string_value": value} for name, value in texts.items()}}
    assert string_parameters(config) == {"c": "x", "d": "0"}


def test_every_value_that_is_allowed_can_be_read() -> None:
    for name, parameter in PARAMETERS.items():
        for value in parameter.allowed or ():
            assert read_parameter(name, str(value)) == value


def test_the_soonest_level_is_the_highest_priority_and_0_is_the_default_level() -> None:
    levels = PriorityLevels(5, 3)
    assert [levels.priority("priority_level", level) for level in range(6)] == [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert PriorityLevels().priority("priority_level", 0) == 0.5
    assert PriorityLevels(1, 1).priority("priority_level", 1) == 1.0
    for wrong in (6, -1, 0.5, "high"):
        with pytest.raises(RequestError, match="priority_level"):
            levels.priority("priority_level", wrong)
