"""An instance without an engine in a network namespace of its own, told what to do over its standard input.

`python -m tests.faults.isolated_instance` waits for a line with the address to listen at, by when the namespace has
interfaces. Then each line is a command, each answer a line of JSON:

    offer TOKENS    {"state": hex}
    fetch STATE     {"seconds": ..., "is_whole": ..., "recomputed": {...}}
    free            {"free": blocks that can be had}
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from executor.transfer.bare_instance import BareInstance, bare_spec
from executor.transfer.context_state import ContextState
from executor.transfer.grpc_network import GrpcNetwork

SPEC = bare_spec(num_layers=8, num_kv_heads=8, head_size=64, tokens_per_block=32)
NUM_BLOCKS = 240
TIMEOUT = 2.0


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print there, too
    instance = BareInstance(GrpcNetwork(), SPEC, NUM_BLOCKS, timeout=TIMEOUT, listen=sys.stdin.readline().strip())
    print(json.dumps({"is_ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(instance, *line.split())), file=answers, flush=True)


def answer(instance: BareInstance, command: str, argument: str = "") -> dict[str, Any]:
    if command == "offer":
        return {"state": instance.offer(int(argument)).to_bytes().hex()}
    if command == "fetch":
        seconds, blocks = instance.fetch(ContextState.from_bytes(bytes.fromhex(argument)))
        return {"seconds": seconds, "is_whole": blocks is not None, "recomputed": instance.endpoint.stats.recomputed}
    if command == "free":
        return {"free": instance.kv.num_free_blocks}
    raise ValueError(f"{command!r} is no command")


if __name__ == "__main__":
    main()
