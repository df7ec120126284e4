"""vLLM's side of scripts/bench_scheduler: its scheduler alone, on the same load, without a model or a device.

Runs in a process of its own, since importing vLLM takes seconds. Arguments: NUM_SEQUENCES NUM_STEPS. Prints one JSON
line, or ends non-zero.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 32
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_scheduler(num_sequences: int) -> Scheduler:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(TINY_LLAMA))
        model = ModelConfig(model=directory, skip_tokenizer_init=True, dtype="float16", seed=0)
    num_blocks = num_sequences * 40 + 1000
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_sequences,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            is_encoder_decoder=False,
        ),
        device_config=DeviceConfig(device="cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, kv, StructuredOutputManager(config), block_size=BLOCK_SIZE)


def main() -> None:
    num_sequences, num_steps = map(int, sys.argv[1:])
    scheduler = make_scheduler(num_sequences)
    sampling = SamplingParams(max_tokens=num_steps + 500, stop_token_ids=[3, 4])
    for index in range(num_sequences):
        prompt = [(index * 7919 + position) % 32000 for position in range(16 + index % 33)]
        scheduler.add_request(Request(str(index), prompt, sampling, None))
    times = []
    for step in range(num_steps):
        begin = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=[[5 + step] for _ in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        sampled = time.perf_counter()
        scheduler.update_from_output(plan, output)
        if len(ids) == num_sequences and step > 3:
            times.append(planned - begin + time.perf_counter() - sampled)
    print(json.dumps({"version": vllm.__version__, "us_per_seq_step": median(times) / num_sequences * 1e6}))


main()
