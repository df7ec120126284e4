"""A real Triton server on free ports, started and stopped by tests."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRITON = ROOT / ".cache" / "triton"
READY_SECONDS = 90.0


class ServerFailed(Exception):
    """The server ended before it was ready; holds its log."""


class TritonServer:
    """One server process."""

    def __init__(self, repository: Path, log_path: Path, *options: str) -> None:
        self.http, self.grpc, self.metrics_port = free_ports(3)
        self.repository = repository
        self._log_path = log_path
        command = [TRITON / "run", "--model-repository", repository, "--http-port", self.http, "--grpc-port", self.grpc]
        command += ["--metrics-port", self.metrics_port, "--metrics-interval-ms", 100, *options]
        with log_path.open("ab") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)

    @property
    def target(self) -> str:
        """For gRPC clients."""
        return f"127.0.0.1:{self.grpc}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_until_ready(self, path: str = "/v2/health/ready") -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.answers(path):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise ServerFailed(self.log)
            time.sleep(0.05)

    def answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels, as they are spelled."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def gauge(self, family: str, label: str, member: str, model: str = "tensorrt_llm") -> float:
        """A TensorRT-LLM metric of a model."""
        labels = sorted([f'{label}="{member}"', f'model="{model}"', 'version="1"'])
        return self.metrics()[f"{family}{{{','.join(labels)}}}"]

    def executor_processes(self) -> list[int]:
        """Executor processes that the models of this server have started."""
        return [pid for pid, parent in worker_processes().items() if self.is_ancestor(parent)]

    def is_ancestor(self, pid: int) -> bool:
        while pid > 1:
            if pid == self.process.pid:
                return True
            pid = parent_of(pid)
        return False

    def regions(self) -> set[str]:
        """Shared memory regions that the server's models are known to use."""
        prefix = f"{self.process.pid}-"
        return {
            path.stem.removeprefix(prefix)
            for folder in Path(tempfile.gettempdir()).glob("inflight-triton-*")
            for path in folder.glob(f"{prefix}*.shm")
        }

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def running(repository: Path, log_path: Path, *options: str, ready: str = "/v2/health/ready") -> Iterator[TritonServer]:
    """A server that is ready, and ends with the block."""
    server = TritonServer(repository, log_path, *options)
    try:
        server.wait_until_ready(ready)
        yield server
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                server.process.kill()
                raise


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def worker_processes() -> dict[int, int]:
    """Parent by process id, of all executor processes of Triton servers."""
    found = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                arguments = (directory / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if b"triton-worker" in arguments and b"--socket-fd" in arguments:
                found[int(directory.name)] = parent_of(int(directory.name))
    return found


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: object, seconds: float = 20.0) -> None:
    """Wait until a function of nothing is true."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)


def fake_executor_command(directory: Path, *options: str) -> Path:
    """An `executor` command that runs an Executor without an engine."""
    command = directory / "executor"
    worker = ROOT / "tests" / "triton" / "fake_worker.py"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {worker} {" ".join(options)} "$@"\n')
    command.chmod(0o755)
    return command
