"""nano-vllm's side of scripts/bench_scheduler: its scheduler alone, on the same load, without a model or a device.

Runs in a process of its own. Its package imports CUDA kernels, its scheduler does not: only the scheduler is imported.
Arguments: NUM_SEQUENCES NUM_STEPS. Prints one JSON line, or ends non-zero.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from statistics import median
from types import ModuleType, SimpleNamespace

BLOCK_SIZE = 256


def import_scheduler() -> tuple[type, type, type]:
    """Its `Scheduler`, `Sequence` and `SamplingParams`, without running the package's `__init__`."""
    spec = importlib.util.find_spec("nanovllm")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("nanovllm is not installed")
    package = ModuleType("nanovllm")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["nanovllm"] = package
    return (
        importlib.import_module("nanovllm.engine.scheduler").Scheduler,
        importlib.import_module("nanovllm.engine.sequence").Sequence,
        importlib.import_module("nanovllm.sampling_params").SamplingParams,
    )


def main() -> None:
    num_sequences, num_steps = map(int, sys.argv[1:])
    scheduler_class, sequence_class, sampling_class = import_scheduler()
    config = SimpleNamespace(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=8192,
        eos=2,
        num_kvcache_blocks=num_sequences * 8,
        kvcache_block_size=BLOCK_SIZE,
        hf_config=None,
    )
    scheduler = scheduler_class(config)
    sampling = sampling_class(max_tokens=num_steps + 500)
    for index in range(num_sequences):
        prompt = [(index * 7919 + position) % 32000 for position in range(16 + index % 33)]
        scheduler.add(sequence_class(prompt, sampling))
    times = []
    for step in range(num_steps):
        begin = time.perf_counter()
        sequences, is_prefill = scheduler.schedule()
        planned = time.perf_counter()
        tokens = [5 + step] * len(sequences)
        sampled = time.perf_counter()
        scheduler.postprocess(sequences, tokens)
        if not is_prefill and len(sequences) == num_sequences:
            times.append(planned - begin + time.perf_counter() - sampled)
    print(json.dumps({"us_per_seq_step": median(times) / num_sequences * 1e6}))


main()
