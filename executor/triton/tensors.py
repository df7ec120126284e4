"""The tensors of the models in a repository: names, types, shapes and optionality of TensorRT-LLM's Triton backend.

Where upstream renamed a tensor in the course of time, both names are there.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorSpec(NamedTuple):
    """One input or output."""

    name: str
    data_type: str
    """Without `TYPE_`."""
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    is_scalar: bool = False
    """Whether the model sees one number a row instead of a vector of one."""
    ragged: bool = False
    """Whether rows of a batch may differ in shape."""


def _optional(data_type: str, *names: str) -> list[TensorSpec]:
    return [TensorSpec(name, data_type, optional=True, is_scalar=True) for name in names]


def _vectors(data_type: str, dims: tuple[int, ...], *names: str) -> list[TensorSpec]:
    return [TensorSpec(name, data_type, dims, optional=True, ragged=True) for name in names]


LLM_INPUTS = [
    *_vectors("INT32", (-1,), "input_ids"),
    *_vectors("FP16", (-1, -1), "encoder_input_features"),
    *_optional("INT32", "encoder_output_lengths"),
    TensorSpec("input_lengths", "INT32", is_scalar=True),
    TensorSpec("request_output_len", "INT32", is_scalar=True),
    *_optional("INT32", "num_return_sequences"),
    *_vectors("INT32", (-1,), "draft_input_ids", "decoder_input_ids"),
    *_optional("INT32", "decoder_input_lengths"),
    *_vectors("FP32", (-1, -1), "draft_logits"),
    *_optional("FP32", "draft_acceptance_threshold"),
    *_optional("INT32", "end_id", "pad_id"),
    *_vectors("INT32", (2, -1), "stop_words_list", "bad_words_list"),
    *_vectors("FP32", (-1,), "embedding_bias"),
    *_optional("INT32", "beam_width"),
    *_optional("FP32", "temperature"),
    *_optional("INT32", "runtime_top_k"),
    *_optional("FP32", "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay"),
    *_optional("INT32", "runtime_top_p_reset_ids"),
    *_optional("FP32", "len_penalty"),
    *_optional("BOOL", "early_stopping"),
    *_optional("FP32", "repetition_penalty"),
    *_optional("INT32", "min_length", "min_tokens"),
    *_optional("FP32", "beam_search_diversity_rate", "presence_penalty", "frequency_penalty"),
    *_optional("UINT64", "random_seed", "seed"),
    *_optional("BOOL", "return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics"),
    *_optional("BOOL", "return_kv_cache_reuse_stats", "return_num_input_tokens", "return_num_output_tokens"),
    *_optional("BOOL", "exclude_input_in_output", "stop", "streaming"),
    *_vectors("FP16", (-1, -1), "prompt_embedding_table"),
    *_vectors("UINT64", (-1,), "prompt_table_extra_ids"),
    *_optional("INT32", "prompt_vocab_size"),
    *_vectors("BOOL", (-1, -1), "cross_attention_mask"),
    TensorSpec("mrope_rotary_cos_sin", "FP32", (-1,), optional=True),
    TensorSpec("mrope_position_deltas", "INT64", optional=True),
    *_optional("UINT64", "lora_task_id"),
    *_vectors("FP16", (-1, -1), "lora_weights"),
    *_vectors("INT32", (-1, 3), "lora_config"),
    *_vectors("UINT8", (-1,), "context_phase_params"),
    *_vectors("BOOL", (1,), "skip_cross_attn_blocks"),
    *_vectors("INT32", (-1,), "retention_token_range_starts", "retention_token_range_ends"),
    *_vectors("INT32", (-1,), "retention_token_range_priorities", "retention_token_range_durations_ms"),
    *_vectors("INT32", (1,), "retention_decode_priority", "retention_decode_duration_ms"),
    *_vectors("STRING", (1,), "guided_decoding_guide_type", "guided_decoding_guide"),
    *_vectors("INT32", (1,), "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
]

_RESULT_OUTPUTS = [
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    TensorSpec("context_logits", "FP32", (-1, -1)),
    TensorSpec("generation_logits", "FP32", (-1, -1, -1)),
    TensorSpec("batch_index", "INT32"),
    TensorSpec("sequence_index", "INT32"),
    TensorSpec("finish_reason", "INT32"),  # not upstream's
    TensorSpec("kv_cache_alloc_new_blocks", "INT32"),
    TensorSpec("kv_cache_reused_blocks", "INT32"),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32"),
    TensorSpec("arrival_time_ns", "INT64"),
    TensorSpec("first_scheduled_time_ns", "INT64"),
    TensorSpec("first_token_time_ns", "INT64"),
    TensorSpec("last_token_time_ns", "INT64"),
    TensorSpec("acceptance_rate", "FP32"),
    TensorSpec("total_accepted_draft_tokens", "INT32"),
    TensorSpec("total_draft_tokens", "INT32"),
    TensorSpec("num_input_tokens", "INT32"),
    TensorSpec("num_output_tokens", "INT32"),
]

LLM_OUTPUTS = [
    TensorSpec("output_ids", "INT32", (-1, -1)),
    TensorSpec("sequence_length", "INT32", (-1,)),
    *_RESULT_OUTPUTS,
    TensorSpec("context_phase_params", "UINT8", (-1,)),
    TensorSpec("prefix_ids", "INT32", (-1, -1)),  # not upstream's: for detokenizing streams
]

PREPROCESSING_INPUTS = [
    TensorSpec("QUERY", "STRING"),
    TensorSpec("DECODER_QUERY", "STRING", optional=True),
    TensorSpec("REQUEST_OUTPUT_LEN", "INT32"),
    TensorSpec("BAD_WORDS_DICT", "STRING", (-1,), optional=True),
    TensorSpec("STOP_WORDS_DICT", "STRING", (-1,), optional=True),
    TensorSpec("EMBEDDING_BIAS_WORDS", "STRING", (-1,), optional=True),
    TensorSpec("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,), optional=True),
    TensorSpec("END_ID", "INT32", optional=True),
    TensorSpec("PAD_ID", "INT32", optional=True),
    TensorSpec("PROMPT_TABLE_EXTRA_ID", "UINT64", optional=True),
]
PREPROCESSING_OUTPUTS = [
    TensorSpec("INPUT_ID", "INT32", (-1,)),
    TensorSpec("REQUEST_INPUT_LEN", "INT32"),
    TensorSpec("BAD_WORDS_IDS", "INT32", (2, -1)),
    TensorSpec("STOP_WORDS_IDS", "INT32", (2, -1)),
    TensorSpec("EMBEDDING_BIAS", "FP32", (-1,)),
    TensorSpec("REQUEST_OUTPUT_LEN", "INT32"),
    TensorSpec("OUT_END_ID", "INT32"),
    TensorSpec("OUT_PAD_ID", "INT32"),
]
POSTPROCESSING_INPUTS = [
    TensorSpec("TOKENS_BATCH", "INT32", (-1, -1)),
    TensorSpec("SEQUENCE_LENGTH", "INT32", (-1,)),
    TensorSpec("PREFIX_IDS", "INT32", (-1, -1), optional=True),
    TensorSpec("FINISH_REASON", "INT32", optional=True),
]
POSTPROCESSING_OUTPUTS = [TensorSpec("OUTPUT", "STRING", (-1,))]

DISAGGREGATED_INPUTS = [
    tensor._replace(is_scalar=False) for tensor in LLM_INPUTS if tensor.name != "context_phase_params"
]
"""Those of a client, to be handed on with the shapes that it sent."""
DISAGGREGATED_OUTPUTS = [tensor for tensor in LLM_OUTPUTS if tensor.name != "context_phase_params"]

TEXT_INPUTS = [
    TensorSpec("text_input", "STRING"),
    TensorSpec("decoder_text_input", "STRING", optional=True),
    TensorSpec("max_tokens", "INT32"),
    TensorSpec("num_return_sequences", "INT32", optional=True),
    TensorSpec("bad_words", "STRING", (-1,), optional=True),
    TensorSpec("stop_words", "STRING", (-1,), optional=True),
    TensorSpec("exclude_input_in_output", "BOOL", optional=True),
    TensorSpec("end_id", "INT32", optional=True),
    TensorSpec("pad_id", "INT32", optional=True),
    TensorSpec("top_k", "INT32", optional=True),
    TensorSpec("top_p", "FP32", optional=True),
    TensorSpec("temperature", "FP32", optional=True),
    TensorSpec("length_penalty", "FP32", optional=True),
    TensorSpec("repetition_penalty", "FP32", optional=True),
    TensorSpec("min_length", "INT32", optional=True),
    TensorSpec("min_tokens", "INT32", optional=True),
    TensorSpec("presence_penalty", "FP32", optional=True),
    TensorSpec("frequency_penalty", "FP32", optional=True),
    TensorSpec("random_seed", "UINT64", optional=True),
    TensorSpec("seed", "UINT64", optional=True),
    TensorSpec("return_log_probs", "BOOL", optional=True),
    TensorSpec("return_context_logits", "BOOL", optional=True),
    TensorSpec("return_generation_logits", "BOOL", optional=True),
    TensorSpec("return_perf_metrics", "BOOL", optional=True),
    TensorSpec("return_num_input_tokens", "BOOL", optional=True),
    TensorSpec("return_num_output_tokens", "BOOL", optional=True),
    TensorSpec("beam_width", "INT32", optional=True),
    TensorSpec("stream", "BOOL", optional=True),
    TensorSpec("prompt_embedding_table", "FP16", (-1, -1), optional=True),
    TensorSpec("prompt_table_extra_id", "UINT64", optional=True),
    TensorSpec("prompt_vocab_size", "INT32", optional=True),
    TensorSpec("embedding_bias_words", "STRING", (-1,), optional=True),
    TensorSpec("embedding_bias_weights", "FP32", (-1,), optional=True),
    TensorSpec("lora_task_id", "UINT64", optional=True),
    TensorSpec("lora_weights", "FP16", (-1, -1), optional=True),
    TensorSpec("lora_config", "INT32", (-1, 3), optional=True),
    TensorSpec("guided_decoding_guide_type", "STRING", optional=True),
    TensorSpec("guided_decoding_guide", "STRING", optional=True),
]
TEXT_OUTPUTS = [TensorSpec("text_output", "STRING", (-1,)), *_RESULT_OUTPUTS]

BLS_INPUTS = [
    *TEXT_INPUTS,
    TensorSpec("image_input", "FP16", (-1, 3, -1, -1), optional=True),
    TensorSpec("image_bytes_input", "UINT8", (-1, -1, -1, -1), optional=True),
    TensorSpec("image_url_input", "STRING", optional=True),
    TensorSpec("video_bytes_input", "UINT8", (-1, -1, -1, -1), optional=True),
    TensorSpec("num_draft_tokens", "INT32", optional=True),
    TensorSpec("use_draft_logits", "BOOL", optional=True),
]

# -- how the models are connected -------------------------------------------------------------------------------------

TEXT_TO_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
PREPROCESSING_TO_LLM = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
_RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty", "stream": "streaming"}
TEXT_TO_LLM = {
    tensor.name: _RENAMED.get(tensor.name, tensor.name)
    for tensor in TEXT_INPUTS
    if tensor.name not in TEXT_TO_PREPROCESSING
}
LLM_TO_POSTPROCESSING = {
    "output_ids": "TOKENS_BATCH",
    "sequence_length": "SEQUENCE_LENGTH",
    "prefix_ids": "PREFIX_IDS",
    "finish_reason": "FINISH_REASON",
}
LLM_TO_TEXT = [tensor.name for tensor in _RESULT_OUTPUTS]
