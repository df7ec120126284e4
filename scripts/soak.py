"""Many clients for many minutes against a server of its own, on loopback: every request ends, nothing is left behind.

    scripts/soak [--minutes N] [--streams N] [--disconnects N] [--engine_dir DIR] [--json]

`--streams` clients stream answers of random lengths, one request after the other. Meanwhile `--disconnects` clients
come one by one and leave at random moments: half of them cancel their call, the others close their connection. At the
end the server must be up, with no request live and as many KV blocks free as at the start; each request that stayed
must have ended exactly once, with as many tokens as it asked for. Ends with 1 where that does not hold. Without an
engine directory, a tiny random one is built for the run.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from one_line_parser import OneLineParser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from executor.api.errors import RequestError
from executor.client import AsyncInferenceClient, Delta, Finished
from executor.client.errors import CallError
from tests.serving.tiny_engine_dir import build_tiny_engine

_EXECUTOR = [sys.executable, "-c", "from executor.cli import main; main()"]
_WARM_UP_SECONDS = 5.0
_QUIET_SECONDS = 30.0
"""How long the server may take to let go of what clients left behind."""


@dataclass
class Report:
    """What happened. `faults` names what should not have."""

    seconds: float = 0.0
    streams: int = 0
    requests: int = 0
    tokens: int = 0
    disconnects: int = 0
    disconnected_live: int = 0
    """Of these, how many left before their request had ended."""
    rss_mib_warm: float = 0.0
    rss_mib_end: float = 0.0
    rss_growth_mib: float = 0.0
    free_blocks_start: int = 0
    free_blocks_end: int = 0
    faults: list[str] = field(default_factory=list)


@contextmanager
def server(engine_dir: Path, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and its address."""
    with log.open("w") as errors:
        command = [*_EXECUTOR, "serve", str(engine_dir), "--port", "0", "--log_level", "warning"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            match = re.fullmatch(r"listening on (\S+)\n", process.stdout.readline())
            if match is None:
                raise SystemExit(f"soak: the server did not start: {log.read_text()}")
            yield process, match[1]
        finally:
            process.kill()
            process.wait()


class Soak:
    """Runs clients against one server and writes down what they saw."""

    def __init__(self, target: str, process: subprocess.Popen[str], seed: int) -> None:
        self.report = Report()
        self._target = target
        self._process = process
        self._random = random.Random(seed)

    async def run(self, seconds: float, streams: int, disconnects: int) -> Report:
        report = self.report
        async with AsyncInferenceClient(self._target) as client:
            report.free_blocks_start = await self._free_blocks(client)
            started = time.monotonic()
            end = started + seconds
            async with asyncio.TaskGroup() as clients:
                for number in range(streams):
                    clients.create_task(self._stream_until(client, end, number))
                clients.create_task(self._churn(end, disconnects))
                clients.create_task(self._note_warm_memory(min(_WARM_UP_SECONDS, seconds / 2)))
            report.seconds = round(time.monotonic() - started, 1)
            report.streams = streams
            await self._wait_until_idle(client)
            report.free_blocks_end = await self._free_blocks(client)
            if report.free_blocks_end != report.free_blocks_start:
                report.faults.append(f"{report.free_blocks_end} blocks are free, {report.free_blocks_start} were")
        report.rss_mib_end = self._rss_mib()
        report.rss_growth_mib = round(report.rss_mib_end - report.rss_mib_warm, 1)
        if self._process.poll() is not None:
            report.faults.append(f"the server ended with {self._process.returncode}")
        return report

    async def _stream_until(self, client: AsyncInferenceClient, end: float, number: int) -> None:
        while time.monotonic() < end:
            length = self._random.randint(1, 60)
            prompt = f"client {number} " * self._random.randint(1, 8)
            await self._stream(client, prompt, length)

    async def _stream(self, client: AsyncInferenceClient, prompt: str, length: int) -> None:
        tokens, finals = 0, 0
        try:
            generation = client.generate(prompt, max_tokens=length, ignore_eos=True, timeout=120)
            async for event in generation:
                if isinstance(event, Delta):
                    tokens += len(event.token_ids)
                elif isinstance(event, Finished):
                    finals += 1
        except (RequestError, CallError) as error:
            self.report.faults.append(f"a request failed: {error!r}")
            return
        if finals != 1 or tokens != length:
            self.report.faults.append(f"a request had {finals} finals and {tokens} of {length} tokens")
        self.report.requests += 1
        self.report.tokens += tokens

    async def _churn(self, end: float, disconnects: int) -> None:
        """Clients that leave, spread over the time there is."""
        pause = (end - time.monotonic()) / max(1, disconnects)
        async with asyncio.TaskGroup() as leaving:
            for number in range(disconnects):
                leaving.create_task(self._leave(number))
                await asyncio.sleep(pause)

    async def _leave(self, number: int) -> None:
        client = AsyncInferenceClient(self._target)
        generation = client.generate(f"leaving {number}", max_tokens=200, ignore_eos=True, timeout=120)

        async def read() -> None:
            async for _ in generation:
                pass

        reading = asyncio.ensure_future(read())
        await asyncio.wait([reading], timeout=self._random.uniform(0, 1))
        self.report.disconnects += 1
        self.report.disconnected_live += not reading.done()
        if number % 2:
            generation.cancel()
        await client.close()  # without a cancel before it, the connection is lost in the middle of the stream
        await asyncio.gather(reading, return_exceptions=True)

    async def _note_warm_memory(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.report.rss_mib_warm = self._rss_mib()

    async def _wait_until_idle(self, client: AsyncInferenceClient) -> None:
        deadline = time.monotonic() + _QUIET_SECONDS
        while live := (await client.load(timeout=10)).num_unfinished_requests:
            if time.monotonic() > deadline:
                self.report.faults.append(f"{live} requests are live, and nobody waits for them")
                return
            await asyncio.sleep(0.05)

    async def _free_blocks(self, client: AsyncInferenceClient) -> int:
        """After a short request, so that there is an iteration to tell it."""
        async for _ in client.generate("quiet", max_tokens=1, timeout=60):
            pass
        latest = (await client.load(timeout=10)).latest_iteration
        return int(latest.free_num_blocks)

    def _rss_mib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match is not None
        return round(int(match[1]) / 1024, 1)


def main() -> int:
    parser = OneLineParser(prog="scripts/soak", description="Many clients for many minutes against a server.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64, help="clients that stay")
    parser.add_argument("--disconnects", type=int, default=1000, help="clients that leave")
    parser.add_argument("--engine_dir", type=Path, help="a tiny random engine by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        engine_dir = options.engine_dir or build_tiny_engine(Path(directory) / "engine")
        with server(engine_dir, Path(directory) / "log") as (process, target):
            soak = Soak(target, process, options.seed)
            report = asyncio.run(soak.run(60 * options.minutes, options.streams, options.disconnects))
        log = (Path(directory) / "log").read_text()
    if "Traceback" in log:
        report.faults.append("the server logged a traceback: " + log[log.index("Traceback") :][:2000])
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        for name, value in asdict(report).items():
            print(f"{name:20} {value}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
