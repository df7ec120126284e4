"""OpenVINO GenAI's side of scripts/bench: runs the mix whenever a line comes in, prints one JSON line a run.

Runs in an environment of its own; arguments: MODEL.gguf COUNT MAX_BATCH_SIZE MAX_NUM_TOKENS PRECISION.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai
from bench_workload import mixed_requests

RUNNING = openvino_genai.GenerationStatus.RUNNING


def main() -> None:
    model, count, max_batch_size, max_num_tokens, precision = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = int(max_num_tokens)
    scheduler.max_num_seqs = int(max_batch_size)
    scheduler.cache_size = 2
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    workload = mixed_requests(int(count))
    print(json.dumps({"ready": openvino_genai.__version__}), flush=True)
    for number, _ in enumerate(sys.stdin):
        started = time.perf_counter()
        handles = []
        running = []
        waiting = list(zip(workload.prompts, workload.output_lengths, strict=True))[::-1]
        while waiting or pipeline.has_non_finished_requests():
            # With dynamic split fuse the pipeline does not keep to max_num_seqs, so what it is given is bounded.
            running = [handle for handle in running if handle.get_status() == RUNNING]
            while waiting and len(running) < int(max_batch_size):
                prompt, length = waiting.pop()
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens = config.min_new_tokens = length
                config.ignore_eos = True
                config.do_sample = False
                ids = openvino.Tensor(np.array([prompt], np.int64))
                running.append(pipeline.add_request(number * len(workload.prompts) + len(handles), ids, config))
                handles.append(running[-1])
            pipeline.step()
        seconds = time.perf_counter() - started
        tokens = sum(len(handle.read_all()[0].generated_ids) for handle in handles)
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
