"""The public names: those of `tensorrt_llm.bindings.executor`, in its order, with its defaults."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from datetime import timedelta
from enum import Enum
from typing import Any

import numpy as np
import pytest

import executor as trtllm
from executor.api.support import Support, check_supported, support_rows

REQUIRED = object()


def unset(names: str) -> dict[str, None]:
    """Fields that are `None` unless they are given."""
    return dict.fromkeys(names.split())


FIELDS: dict[str, dict[str, Any]] = {
    "SamplingConfig": {
        "beam_width": 1,
        **unset(
            "top_k top_p top_p_min top_p_reset_ids top_p_decay seed temperature min_tokens beam_search_diversity_rate "
            "repetition_penalty presence_penalty frequency_penalty prompt_ignore_length length_penalty early_stopping "
            "no_repeat_ngram_size num_return_sequences min_p beam_width_array"
        ),
    },
    "OutputConfig": {
        "return_log_probs": False,
        "return_context_logits": False,
        "return_generation_logits": False,
        "exclude_input_from_output": False,
        "return_encoder_output": False,
        "return_perf_metrics": False,
        "additional_model_outputs": None,
    },
    "AdditionalModelOutput": {"name": REQUIRED, "gather_context": False},
    "ExternalDraftTokensConfig": {
        "tokens": REQUIRED,
        "logits": None,
        "acceptance_threshold": None,
        "fast_logits": None,
    },
    "PromptTuningConfig": {"embedding_table": REQUIRED, "input_token_extra_ids": None},
    "LoraConfig": {"task_id": REQUIRED, "weights": None, "config": None},
    "MultimodalInput": {
        "multimodal_hashes": REQUIRED,
        "multimodal_positions": REQUIRED,
        "multimodal_lengths": REQUIRED,
    },
    "MropeConfig": {"mrope_rotary_cos_sin": REQUIRED, "mrope_position_deltas": REQUIRED},
    "LookaheadDecodingConfig": {"max_window_size": 4, "max_ngram_size": 3, "max_verification_set_size": 4},
    "KvCacheRetentionConfig": {
        "token_range_retention_configs": (),
        "decode_retention_priority": 35,
        "decode_duration_ms": None,
        "transfer_mode": trtllm.KvCacheTransferMode.DRAM,
        "directory": None,
    },
    "ContextPhaseParams": {
        "first_gen_tokens": REQUIRED,
        "req_id": REQUIRED,
        "opaque_state": None,
        "draft_tokens": None,
    },
    "EagleConfig": {
        "eagle_choices": None,
        "greedy_sampling": True,
        "posterior_threshold": None,
        "use_dynamic_tree": False,
        "dynamic_tree_max_topK": None,
    },
    "GuidedDecodingParams": {"guide_type": REQUIRED, "guide": None},
    "Request": {
        "input_token_ids": REQUIRED,
        "max_tokens": REQUIRED,
        "streaming": False,
        "sampling_config": trtllm.SamplingConfig(),
        "output_config": trtllm.OutputConfig(),
        **unset(
            "end_id pad_id position_ids bad_words stop_words embedding_bias external_draft_tokens_config "
            "prompt_tuning_config multimodal_input multimodal_embedding mrope_config lora_config lookahead_config "
            "kv_cache_retention_config logits_post_processor_name logits_post_processor encoder_input_token_ids "
            "client_id"
        ),
        "return_all_generated_tokens": False,
        "priority": 0.5,
        "type": trtllm.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION,
        "context_phase_params": None,
        "encoder_input_features": None,
        "encoder_output_length": None,
        "cross_attention_mask": None,
        "num_return_sequences": 1,
        **unset(
            "eagle_config skip_cross_attn_blocks guided_decoding_params language_adapter_uid allotted_time_ms "
            "cache_salt_id disagg_request_id"
        ),
    },
    "DynamicBatchConfig": {
        "enable_batch_size_tuning": False,
        "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 128,
    },
    "SchedulerConfig": {
        "capacity_scheduler_policy": trtllm.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        "context_chunking_policy": None,
        "dynamic_batch_config": None,
    },
    "RuntimeDefaults": {"max_attention_window": None, "sink_token_length": None},
    "KvCacheConfig": {
        "enable_block_reuse": True,
        "max_tokens": None,
        "max_attention_window": None,
        "sink_token_length": None,
        "free_gpu_memory_fraction": None,
        "host_cache_size": None,
        "onboard_blocks": True,
        "cross_kv_cache_fraction": None,
        "secondary_offload_min_priority": None,
        "event_buffer_max_size": 0,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
        "use_uvm": False,
        "attention_dp_events_gather_period_ms": 5,
    },
    "OrchestratorConfig": {
        "is_orchestrator": True,
        "worker_executable_path": "",
        "orch_leader_comm": None,
        "spawn_processes": True,
    },
    "ParallelConfig": {
        "communication_type": trtllm.CommunicationType.MPI,
        "communication_mode": trtllm.CommunicationMode.LEADER,
        "device_ids": None,
        "participant_ids": None,
        "orchestrator_config": None,
        "num_nodes": None,
    },
    "PeftCacheConfig": {
        "num_host_module_layer": 0,
        "num_device_module_layer": 0,
        "optimal_adapter_size": 8,
        "max_adapter_size": 64,
        "num_put_workers": 1,
        "num_ensure_workers": 1,
        "num_copy_streams": 1,
        "max_pages_per_block_host": 24,
        "max_pages_per_block_device": 8,
        "device_cache_percent": None,
        "host_cache_size": None,
        "lora_prefetch_dir": None,
    },
    "DecodingConfig": unset("decoding_mode lookahead_decoding_config medusa_choices eagle_config"),
    "DebugConfig": {
        "debug_input_tensors": False,
        "debug_output_tensors": False,
        "debug_tensor_names": None,
        "debug_tensors_max_iterations": 0,
    },
    "LogitsPostProcessorConfig": {"processor_map": None, "processor_batched": None, "replicate": True},
    "ExtendedRuntimePerfKnobConfig": {
        "multi_block_mode": True,
        "enable_context_fmha_fp32_acc": False,
        "cuda_graph_mode": None,
        "cuda_graph_cache_size": 0,
    },
    "SpeculativeDecodingConfig": {"fast_logits": False},
    "CacheTransceiverConfig": {"backend": None, "max_tokens_in_buffer": None},
    "ExecutorConfig": {
        "max_beam_width": 1,
        "scheduler_config": trtllm.SchedulerConfig(),
        "kv_cache_config": trtllm.KvCacheConfig(),
        "enable_chunked_context": True,
        "normalize_log_probs": True,
        "iter_stats_max_iterations": 1000,
        "request_stats_max_iterations": 0,
        "batching_type": trtllm.BatchingType.INFLIGHT,
        "max_batch_size": None,
        "max_num_tokens": None,
        "parallel_config": None,
        "peft_cache_config": trtllm.PeftCacheConfig(),
        "logits_post_processor_config": None,
        "decoding_config": None,
        "use_gpu_direct_storage": False,
        "gpu_weights_percent": 1.0,
        "max_queue_size": None,
        "extended_runtime_perf_knob_config": trtllm.ExtendedRuntimePerfKnobConfig(),
        "debug_config": None,
        "recv_poll_period_ms": 0,
        "max_seq_idle_microseconds": 180_000_000,
        "spec_dec_config": None,
        "guided_decoding_config": None,
        "additional_model_outputs": None,
        "cache_transceiver_config": None,
        "gather_generation_logits": False,
        "mm_embedding_offloading": False,
        "enable_trt_overlap": False,
        "fail_fast_on_attention_window_too_large": False,
    },
}
"""Upstream's constructor arguments, in order. Differences: `enable_chunked_context` is on here, CUDA graphs
are recorded where nothing is said of them, and what upstream's
constructors require may be left out of `LookaheadDecodingConfig`, `DynamicBatchConfig` and `KvCacheRetentionConfig`."""

ATTRIBUTES = {
    "Result": (
        "is_final output_token_ids cum_log_probs log_probs context_logits generation_logits spec_dec_fast_logits_info "
        "encoder_output finish_reasons sequence_index is_sequence_final decoding_iter avg_decoded_tokens_per_iter "
        "context_phase_params request_perf_metrics additional_outputs"
    ),
    "Response": "request_id client_id has_error error_msg result clear_context_logits clear_generation_logits",
    "TimingMetrics": (
        "arrival_time first_scheduled_time first_token_time last_token_time kv_cache_transfer_start "
        "kv_cache_transfer_end kv_cache_size"
    ),
    "KvCacheMetrics": (
        "num_total_allocated_blocks num_new_allocated_blocks num_reused_blocks num_missed_blocks kv_cache_hit_rate"
    ),
    "SpeculativeDecodingMetrics": "acceptance_rate total_accepted_draft_tokens total_draft_tokens",
    "RequestPerfMetrics": "timing_metrics kv_cache_metrics speculative_decoding first_iter last_iter iter",
    "SpeculativeDecodingFastLogitsInfo": "draft_request_id draft_participant_id",
    "AdditionalOutput": "name output",
    "KvCacheStats": (
        "max_num_blocks free_num_blocks used_num_blocks tokens_per_block alloc_total_blocks alloc_new_blocks "
        "reused_blocks missed_blocks cache_hit_rate"
    ),
    "StaticBatchingStats": (
        "num_scheduled_requests num_context_requests num_ctx_tokens num_gen_tokens empty_gen_slots"
    ),
    "InflightBatchingStats": (
        "num_scheduled_requests num_context_requests num_gen_requests num_paused_requests num_ctx_tokens "
        "micro_batch_id avg_num_decoded_tokens_per_iter"
    ),
    "SpecDecodingStats": (
        "num_draft_tokens num_accepted_tokens num_requests_with_draft_tokens acceptance_length iter_latency_ms "
        "draft_overhead"
    ),
    "IterationStats": (
        "timestamp iter iter_latency_ms new_active_requests_queue_latency_ms num_new_active_requests "
        "num_active_requests num_queued_requests num_completed_requests max_num_active_requests gpu_mem_usage "
        "cpu_mem_usage pinned_mem_usage kv_cache_stats cross_kv_cache_stats static_batching_stats "
        "inflight_batching_stats specdec_stats to_json_str"
    ),
    "DebugTensorsPerIteration": "iter debug_tensors",
    "DisServingRequestStats": "kv_cache_transfer_ms kv_cache_size",
    "RequestStats": (
        "id stage context_prefill_position num_generated_tokens avg_num_decoded_tokens_per_iter scheduled paused "
        "dis_serving_stats alloc_total_blocks_per_request alloc_new_blocks_per_request reused_blocks_per_request "
        "missed_blocks_per_request kv_cache_hit_rate_per_request to_json_str"
    ),
    "RequestStatsPerIteration": "iter request_stats to_json_str",
    "Executor": (
        "shutdown __enter__ __exit__ enqueue_request enqueue_requests await_responses get_num_responses_ready "
        "cancel_request get_latest_iteration_stats get_latest_request_stats get_latest_debug_tensors "
        "can_enqueue_requests get_kv_cache_event_manager"
    ),
    "DecodingMode": (
        "Auto TopK TopP TopKTopP BeamSearch Medusa Lookahead ExplicitDraftTokens Eagle isAuto isTopK isTopP "
        "isTopKorTopP isTopKandTopP isBeamSearch isMedusa isLookahead isExplicitDraftTokens isEagle "
        "useVariableBeamWidthSearch name"
    ),
    "LookaheadDecodingConfig": (
        "calculate_speculative_resource calculate_speculative_resource_tuple get_default_lookahead_decoding_window "
        "get_default_lookahead_decoding_ngram get_default_lookahead_decoding_verification_set"
    ),
    "KvCacheRetentionConfig": "TokenRangeRetentionConfig",
    "KvCacheConfig": "fill_empty_fields_from_runtime_defaults",
    "GuidedDecodingParams": "GuideType",
    "GuidedDecodingConfig": "GuidedDecodingBackend backend encoded_vocab tokenizer_str stop_token_ids",
    "Request": "request_type BATCHED_POST_PROCESSOR_NAME",
    "ExecutorConfig": "logits_post_processor_map logits_post_processor_batched",
    "SamplingConfig": "random_seed min_length",
}
MEMBERS = {
    "ModelType": ["DECODER_ONLY", "ENCODER_ONLY", "ENCODER_DECODER"],
    "BatchingType": ["STATIC", "INFLIGHT"],
    "CapacitySchedulerPolicy": ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"],
    "ContextChunkingPolicy": ["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"],
    "CommunicationType": ["MPI"],
    "CommunicationMode": ["LEADER", "ORCHESTRATOR"],
    "RequestType": [f"REQUEST_TYPE_{kind}" for kind in ("CONTEXT_AND_GENERATION", "CONTEXT_ONLY", "GENERATION_ONLY")],
    "FinishReason": ["NOT_FINISHED", "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED"],
    "KvCacheTransferMode": ["DRAM", "GDS", "POSIX_DEBUG_FALLBACK"],
    "CacheTransceiverBackendType": ["DEFAULT", "MPI", "UCX", "NIXL"],
    "RequestStage": [
        "QUEUED",
        "ENCODER_IN_PROGRESS",
        "CONTEXT_IN_PROGRESS",
        "GENERATION_IN_PROGRESS",
        "GENERATION_COMPLETE",
    ],
}
EVENT_NAMES = (
    "KVCacheCreatedData UniqueToken KVCacheStoredBlockData KVCacheStoredData KVCacheRemovedData KVCacheEventDiffInt "
    "KVCacheUpdatedData KVCacheEvent KVCacheEventManager"
)


def default_of(parameter: inspect.Parameter, cls: Any) -> Any:
    if parameter.default is inspect.Parameter.empty:
        return REQUIRED
    factories = {each.name: each.default_factory for each in dataclasses.fields(cls)}
    factory = factories.get(parameter.name, dataclasses.MISSING)
    return parameter.default if factory is dataclasses.MISSING else factory()  # type: ignore[misc]


@pytest.mark.parametrize("name", FIELDS)
def test_a_constructor_takes_upstreams_arguments_in_upstreams_order_with_its_defaults(name: str) -> None:
    cls = getattr(trtllm, name)
    parameters = inspect.signature(cls).parameters
    additions = {row.name for row in support_rows(cls) if row.support is Support.ADDITION}
    ours = {
        key: default_of(parameter, cls)
        for key, parameter in parameters.items()
        if key not in additions and key != "runtime_defaults"
    }
    assert list(ours) == list(FIELDS[name])
    assert ours == FIELDS[name]
    positional = [key for key, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
    assert not additions & set(positional), "what upstream does not have may not shift its positions"


def test_what_comes_after_upstreams_keyword_only_mark_is_keyword_only_here() -> None:
    for cls, last in (
        (trtllm.SamplingConfig, "beam_width"),
        (trtllm.Request, "max_tokens"),
        (trtllm.KvCacheConfig, "event_buffer_max_size"),
    ):
        kinds = [parameter.kind for parameter in inspect.signature(cls).parameters.values()]
        position = list(inspect.signature(cls).parameters).index(last)
        assert kinds[: position + 1] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * (position + 1)
        assert set(kinds[position + 1 :]) == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_class_has_upstreams_attributes(name: str) -> None:
    cls = getattr(trtllm, name)
    for attribute in ATTRIBUTES[name].split():
        assert hasattr(cls, attribute), f"{name}.{attribute}"


@pytest.mark.parametrize("name", MEMBERS)
def test_an_enumeration_has_upstreams_members(name: str) -> None:
    cls = getattr(trtllm, name)
    assert list(cls.__members__) == MEMBERS[name]


def test_event_types_are_in_a_submodule_of_their_own() -> None:
    for name in EVENT_NAMES.split():
        assert hasattr(trtllm.kv_cache, name)


def test_the_version_is_the_packages() -> None:
    assert trtllm.__version__.count(".") == 2


def test_everything_public_is_listed_and_there() -> None:
    assert len(set(trtllm.__all__)) == len(trtllm.__all__)
    for name in (*FIELDS, *ATTRIBUTES, *MEMBERS):
        assert name in trtllm.__all__
    for name in trtllm.__all__:
        assert hasattr(trtllm, name)


# -- what is refused


def _set_values(cls: Any) -> dict[str, Any]:
    """A value other than the default for each refused field."""
    values: dict[str, Any] = {}
    for each in dataclasses.fields(cls):
        if each.metadata.get("support") is Support.REFUSED:
            default = each.default
            if isinstance(default, bool):
                values[each.name] = not default
            elif isinstance(default, Enum):
                values[each.name] = next(member for member in type(default) if member is not default)
            elif isinstance(default, int | float):
                values[each.name] = default + 1
            else:
                values[each.name] = np.ones(3)
    return values


@pytest.mark.parametrize("name", FIELDS)
def test_each_refused_field_is_refused_by_name_and_reason_and_its_default_is_not(name: str) -> None:
    cls = getattr(trtllm, name)
    required = {key: "x" for key, default in FIELDS[name].items() if default is REQUIRED}
    if name == "GuidedDecodingParams":
        required = {"guide_type": trtllm.GuidedDecodingParams.GuideType.JSON}
    check_supported(cls(**required), "it")
    rows = {row.name: row for row in support_rows(cls)}
    for field, value in _set_values(cls).items():
        with pytest.raises(trtllm.UnsupportedFeatureError) as caught:
            check_supported(cls(**required | {field: value}), "it")
        assert caught.value.field == f"it.{field}"
        assert caught.value.message == f"it.{field} is not supported: {rows[field].reason}"
        assert rows[field].reason


def test_refused_members_of_enumerations_are_refused_by_name() -> None:
    transceiver = trtllm.CacheTransceiverConfig(backend=trtllm.CacheTransceiverBackendType.MPI)
    with pytest.raises(trtllm.UnsupportedFeatureError, match=r"cache_transceiver_config\.backend MPI is not"):
        trtllm.ExecutorConfig(cache_transceiver_config=transceiver).validate()
    assert {row.name: row.support for row in support_rows(trtllm.ModelType)} == {
        "DECODER_ONLY": Support.SUPPORTED,
        "ENCODER_ONLY": Support.REFUSED,
        "ENCODER_DECODER": Support.REFUSED,
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (trtllm.ExecutorConfig(max_beam_width=2), "max_beam_width is 2"),
        (trtllm.ExecutorConfig(decoding_config=trtllm.DecodingConfig(trtllm.DecodingMode.Medusa())), "is Medusa"),
        (trtllm.ExecutorConfig(peft_cache_config=trtllm.PeftCacheConfig(10)), "num_host_module_layer"),
        (trtllm.ExecutorConfig(iter_stats_max_iterations=-1), "iter_stats_max_iterations is -1"),
        (trtllm.ExecutorConfig(debug_config=trtllm.DebugConfig(debug_tensors_max_iterations=-1)), "is -1"),
        (trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(event_buffer_max_size=-1)), "is -1"),
        (trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(host_cache_size=-1)), "host_cache_size"),
    ],
)
def test_configurations_that_cannot_be_are_refused(config: trtllm.ExecutorConfig, message: str) -> None:
    with pytest.raises(trtllm.RequestError, match=message):
        config.validate()


def test_a_field_that_nobody_knows_is_an_error_and_not_ignored() -> None:
    with pytest.raises(TypeError, match="backend"):
        trtllm.ExecutorConfig(backend="pytorch")  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="backend"):
        trtllm.ExecutorConfig().backend = "pytorch"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [b"engine", "encoder"])
def test_upstreams_other_constructors_are_refused_by_name(path: Any) -> None:
    second: Any = "{}" if isinstance(path, bytes) else "decoder"
    with pytest.raises(trtllm.UnsupportedFeatureError, match=r"engine_buffer|encoder_model_path"):
        trtllm.Executor(path, second)


# -- behaviour of the types themselves


def test_old_names_work_and_say_what_to_write() -> None:
    with pytest.warns(DeprecationWarning, match=r"random_seed is an old name; write seed"):
        config = trtllm.SamplingConfig(random_seed=7)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="write min_tokens"):
        config.min_length = 3  # type: ignore[attr-defined]
    assert (config.seed, config.min_tokens) == (7, 3)
    with pytest.warns(DeprecationWarning, match="write seed"):
        config.random_seed = 8  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="write seed"):
        assert config.random_seed == 8  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="write seed"):
        assert trtllm.SamplingConfig(seed=1, random_seed=2).seed == 1  # type: ignore[call-arg]
    request = trtllm.Request([1], 2)
    assert request.request_type is request.type is trtllm.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION


def test_decoding_modes_know_what_they_are() -> None:
    modes = ["Auto", "TopK", "TopP", "TopKTopP", "BeamSearch", "Medusa", "Lookahead", "ExplicitDraftTokens", "Eagle"]
    for name in modes:
        mode = getattr(trtllm.DecodingMode, name)()
        assert mode.name == name
        assert mode == getattr(trtllm.DecodingMode, name)()
        assert hash(mode) == hash(getattr(trtllm.DecodingMode, name)())
        assert repr(mode) == f"DecodingMode.{name}()"
        for other in modes:
            if other != "TopKTopP":
                expected = name == other or (name == "TopKTopP" and other in ("TopK", "TopP"))
                assert getattr(mode, f"is{other}")() is expected
        assert mode.isTopKandTopP() is (name == "TopKTopP")
        assert mode.isTopKorTopP() is ("Top" in name)
        assert not mode.useVariableBeamWidthSearch()


def test_a_configuration_for_a_mode_sets_the_mode() -> None:
    config = trtllm.DecodingConfig()
    assert config.decoding_mode is None
    config.lookahead_decoding_config = trtllm.LookaheadDecodingConfig(3, 5, 7)
    assert config.decoding_mode is not None
    assert config.decoding_mode.isLookahead()
    assert trtllm.DecodingConfig(medusa_choices=[[0]]).decoding_mode == trtllm.DecodingMode.Medusa()
    assert trtllm.DecodingConfig(eagle_config=trtllm.EagleConfig()).decoding_mode == trtllm.DecodingMode.Eagle()


def test_lookahead_sizes_are_counted_as_upstream_counts_them() -> None:
    assert trtllm.LookaheadDecodingConfig(3, 5, 7).calculate_speculative_resource() == (40, 5, 39, 4)
    assert trtllm.LookaheadDecodingConfig.calculate_speculative_resource_tuple(1, 1, 0) == (1, 1, 0, 0)
    defaults = trtllm.LookaheadDecodingConfig()
    assert defaults.max_window_size == trtllm.LookaheadDecodingConfig.get_default_lookahead_decoding_window()
    assert defaults.max_ngram_size == trtllm.LookaheadDecodingConfig.get_default_lookahead_decoding_ngram()
    assert (
        defaults.max_verification_set_size
        == trtllm.LookaheadDecodingConfig.get_default_lookahead_decoding_verification_set()
    )


def test_runtime_defaults_fill_what_is_not_set() -> None:
    defaults = trtllm.RuntimeDefaults(max_attention_window=[1, 2], sink_token_length=4)
    filled = trtllm.KvCacheConfig(runtime_defaults=defaults)
    assert (filled.max_attention_window, filled.sink_token_length) == ([1, 2], 4)
    kept = trtllm.KvCacheConfig(max_attention_window=[9], sink_token_length=1)
    kept.fill_empty_fields_from_runtime_defaults(defaults)
    assert (kept.max_attention_window, kept.sink_token_length) == ([9], 1)


def test_transceiver_backends_are_found_by_name() -> None:
    kind = trtllm.CacheTransceiverBackendType
    assert [kind.from_string(name) for name in ("DEFAULT", "mpi", "UCX", "nixl")] == list(kind)
    with pytest.raises(ValueError, match="'tcp' is no backend; known are DEFAULT, MPI, UCX, NIXL"):
        kind.from_string("tcp")


def test_retention_configurations_are_checked_and_compared() -> None:
    token_range = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig
    config = trtllm.KvCacheRetentionConfig(
        [token_range(0, 2, 30, timedelta(seconds=30))], 80, None, trtllm.KvCacheTransferMode.GDS, "dir"
    )
    assert config.token_range_retention_configs[0].duration_ms == timedelta(seconds=30)
    assert (config.transfer_mode, config.directory) == (trtllm.KvCacheTransferMode.GDS, "dir")
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="overlap"):
        trtllm.KvCacheRetentionConfig([token_range(0, 64, 10), token_range(32, 128, 50)], 50)
    with pytest.raises(trtllm.UnsupportedFeatureError, match=r"retention_config\.transfer_mode"):
        trtllm.Request([1], 1, kv_cache_retention_config=config).validate()


def test_a_guide_is_needed_where_there_is_none() -> None:
    kind = trtllm.GuidedDecodingParams.GuideType
    assert trtllm.GuidedDecodingParams(kind.JSON).guide is None
    with pytest.raises(trtllm.InvalidRequestError, match="JSON_SCHEMA needs one"):
        trtllm.GuidedDecodingParams(kind.JSON_SCHEMA)


def test_responses_can_be_made_as_upstreams_are() -> None:
    failed = trtllm.Response(0, "error", 7)
    assert (failed.request_id, failed.client_id, failed.has_error(), failed.error_msg) == (0, 7, True, "error")
    assert trtllm.Response(0, error_msg="error").error_msg == "error"
    with pytest.raises(trtllm.InvalidRequestError, match="error"):
        _ = failed.result
    result = trtllm.Result()
    result.is_final = True
    result.output_token_ids = [[1, 2, 3]]
    response = trtllm.Response(1, result)
    assert not response.has_error()
    assert response.result.output_token_ids == [[1, 2, 3]]
    with pytest.raises(ValueError, match="has a result"):
        _ = response.error_msg
    for arguments in ((1,), (1, result, None)):
        with pytest.raises(ValueError, match="exactly one"):
            trtllm.Response(*arguments, error=None if len(arguments) == 1 else trtllm.QueueFullError("full"))


@pytest.mark.parametrize(
    "value",
    [
        *(getattr(trtllm, name)() for name in FIELDS if REQUIRED not in FIELDS[name].values()),
        trtllm.SamplingConfig(1, top_k=10, top_p=0.1, num_return_sequences=3),
        trtllm.Request([1, 2], 5, client_id=123, sampling_config=trtllm.SamplingConfig(top_k=10), stop_words=[[3]]),
        trtllm.ExternalDraftTokensConfig([1, 2]),
        trtllm.GuidedDecodingParams(trtllm.GuidedDecodingParams.GuideType.REGEX, "a+"),
        trtllm.GuidedDecodingConfig(stop_token_ids=[0], encoded_vocab=["eos", "a"]),
        trtllm.DecodingMode.BeamSearch(),
        trtllm.ContextPhaseParams([1], 2, b"state", [3]),
        trtllm.RequestPerfMetrics(first_iter=1, last_iter=2),
        trtllm.Result(True, [[1, 2]], [-1.0], [[-1.0]], finish_reasons=[trtllm.FinishReason.LENGTH]),
        trtllm.IterationStats(iter=3, kv_cache_stats=trtllm.KvCacheStats(1)),
        trtllm.RequestStats(1, trtllm.RequestStage.CONTEXT_IN_PROGRESS),
        trtllm.kv_cache.KVCacheEvent(1, trtllm.kv_cache.KVCacheRemovedData([2]), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_can_be_pickled(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value


def test_responses_and_errors_can_be_pickled() -> None:
    result = trtllm.Result(True, [[1]], context_logits=np.ones((2, 3), np.float32))
    copy = pickle.loads(pickle.dumps(trtllm.Response(3, result, 4)))
    assert (copy.request_id, copy.client_id, copy.result.output_token_ids) == (3, 4, [[1]])
    np.testing.assert_array_equal(copy.result.context_logits, np.ones((2, 3)))
    failed = pickle.loads(pickle.dumps(trtllm.Response(3, error=trtllm.EngineStepError("lost", field="x"))))
    assert isinstance(failed.error, trtllm.EngineStepError)
    assert (failed.error.message, failed.error.field) == ("lost", "x")
