"""A server process that exchanges contexts with others, and a client of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from executor import ContextPhaseParams, RequestType
from executor.client import Delta, Finished, InferenceClient
from tests.serving.server_process import serving

CONTEXT_ONLY, GENERATION_ONLY = RequestType.REQUEST_TYPE_CONTEXT_ONLY, RequestType.REQUEST_TYPE_GENERATION_ONLY
PROMPT = [index % 90 for index in range(100)]


class Server:
    """A server process and a client of it."""

    def __init__(
        self,
        stack: ExitStack,
        engine_dir: Path,
        role: str,
        timeout_ms: int = 3000,
        listen: str = "127.0.0.1:0",
        more_options: Sequence[str] = (),
    ) -> None:
        options = ["--role", role, "--kv_transfer_timeout_ms", str(timeout_ms), "--transfer_listen", listen]
        options += ["--deterministic", "--num_threads", "1", "--disable_block_reuse", *more_options]
        self.process, self.target = stack.enter_context(serving(engine_dir, *options))
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.fullmatch(r"transfers on (127\.0\.0\.1:\d+)\n", line)
        assert match is not None, line
        self.transfers = match[1]
        self.client = stack.enter_context(InferenceClient(self.target))

    def context(self, **fields: object) -> tuple[list[int], ContextPhaseParams]:
        tokens, finished = self.answer(request_type=CONTEXT_ONLY, **fields)
        assert finished.context_phase_params is not None
        return tokens, finished.context_phase_params

    def generation(self, params: ContextPhaseParams, **fields: object) -> tuple[list[int], Finished]:
        return self.answer(request_type=GENERATION_ONLY, context_phase_params=params, **fields)

    def answer(self, **fields: object) -> tuple[list[int], Finished]:
        wanted: dict[str, object] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "timeout": 60} | fields
        events = list(self.client.generate(**wanted))  # type: ignore[arg-type]
        tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        assert isinstance(events[-1], Finished)
        return tokens, events[-1]

    def held_blocks(self) -> int:
        """By requests and leases; what is only cached is held by nobody."""
        counts = self.client.kv_ledger(timeout=10).counts
        return counts.used + counts.leased
