"""A Dynamo cluster on this machine: a frontend and several `executor dynamo-worker` processes, always cleaned up.

Files in a temporary directory stand for etcd, ZeroMQ for NATS, so nothing else has to run.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

_READY_SECONDS = 180.0
_STOP_SECONDS = 20.0
_WORKER_READY = re.compile(r"^worker (\d+) is ready$", re.MULTILINE)


class ClusterError(RuntimeError):
    """A process of the cluster ended or did not get ready: names it, and where its log is."""


class Process:
    """A process with its log in a file."""

    def __init__(self, name: str, command: list[str], directory: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """As a crash would: nothing is told to anybody."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """Let it drain and end; killed when that takes too long. Returns its exit status."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def wait(self, seconds: float) -> int:
        """Its exit status, once it has ended by itself. Raises `subprocess.TimeoutExpired`."""
        return self._process.wait(seconds)

    def check(self) -> None:
        if not self.is_running:
            tail = "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise ClusterError(f"{self.name} ended with {self._process.returncode}; the end of its log:\n{tail}")


class Worker(Process):
    """An instance; `worker_id` is what Dynamo knows it by, once it is ready."""

    worker_id: int = 0


class DynamoCluster:
    """Use it in a `with` block, whose end ends every process."""

    def __init__(
        self, python: str, engine_dir: Path, directory: Path, model_name: str, environment: dict[str, str]
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            python: of an environment with the project and Dynamo in it (`scripts/setup_dynamo`).
            engine_dir: what every worker serves.
            directory: for logs and discovery; exists, and is empty.
            model_name: shown to clients.
            environment: of the processes, to which what they need to find each other is added.
        """
        self.url = f"http://127.0.0.1:{_free_port()}"
        self.workers: list[Worker] = []
        self._python = python
        self._engine_dir = engine_dir
        self._directory = directory
        self._model_name = model_name
        self._environment = environment | {
            "DYN_FILE_KV": str(directory / "discovery"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.5",
            "HF_HUB_OFFLINE": "1",
        }
        self._frontend: Process | None = None

    def start_frontend(self, *options: str) -> None:
        """OpenAI's HTTP at `url`, a KV-aware router, streams that move on when a worker dies."""
        port = self.url.rpartition(":")[2]
        command = [self._python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", port]
        command += ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        command += ["--router-mode", "kv", "--migration-limit", "3", *options]
        self._frontend = Process("frontend", command, self._directory, self._environment)

    def start_worker(self, *options: str, program: str = "from executor.cli import main; main()") -> Worker:
        """`program`: what its interpreter runs with the options as arguments."""
        command = [self._python, "-c", program, "dynamo-worker", str(self._engine_dir)]
        command += ["--model_name", self._model_name, "--discovery_backend", "file", "--event_plane", "zmq", *options]
        worker = Worker(f"worker-{len(self.workers)}", command, self._directory, self._environment)
        self.workers.append(worker)
        return worker

    def wait_until_ready(self) -> None:
        """Until the frontend knows the model and every worker has an id. Raises `ClusterError`."""
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            for process in self._processes:
                process.check()
            for worker in self.workers:
                if (match := _WORKER_READY.search(worker.log.read_text(errors="replace"))) is not None:
                    worker.worker_id = int(match[1])
            if all(worker.worker_id for worker in self.workers) and self._serves_model():
                break
            if time.monotonic() > deadline:
                raise ClusterError(f"the cluster was not ready within {_READY_SECONDS:g} s; logs: {self._directory}")
            time.sleep(0.2)
        time.sleep(1.0)  # the frontend's routers subscribe to workers one after the other, and say nothing about it

    def _serves_model(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return f'"{self._model_name}"' in answer.read().decode()
        except (urllib.error.URLError, OSError):
            return False

    @property
    def _processes(self) -> list[Process]:
        return [*self.workers, *([] if self._frontend is None else [self._frontend])]

    def worker(self, worker_id: int) -> Worker:
        """The one of this id."""
        return next(worker for worker in self.workers if worker.worker_id == worker_id)

    def __enter__(self) -> DynamoCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            if process.is_running:
                process.kill() if kind is not None else process.terminate()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
