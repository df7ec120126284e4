"""Calls between instances over mutual TLS: between real servers, each a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from executor import Executor, ExecutorConfig, InvalidRequestError
from executor.api.kv_cache_config import CacheTransceiverConfig
from tests.serving.certificates import needs_openssl, write_certificates
from tests.serving.tiny_engine_dir import build_tiny_engine
from tests.transfer.server import Server

pytest.importorskip("nixl_cu12")
pytestmark = needs_openssl


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_engine(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def strangers_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificates(tmp_path_factory.mktemp("strangers"))


def tls(directory: Path) -> list[str]:
    names = {"certificate": "own.pem", "private_key": "own.key", "ca": "ca.pem"}
    return [part for option, name in names.items() for part in (f"--transfer_tls_{option}", str(directory / name))]


@pytest.fixture(scope="module")
def context(engine_dir: Path, certificates: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack, engine_dir, "both", more_options=tls(certificates))


def test_instances_that_know_each_other_exchange_contexts(
    engine_dir: Path, context: Server, certificates: Path
) -> None:
    with ExitStack() as stack:
        generation = Server(stack, engine_dir, "generation", more_options=tls(certificates))
        expected, _ = context.answer()
        _, params = context.context()
        tokens, finished = generation.generation(params)
        assert tokens == expected
        assert finished.usage.reused_tokens > 0


@pytest.mark.parametrize("stranger", ["without a certificate", "with one of another authority"])
def test_strangers_are_not_answered_and_compute_contexts_themselves(
    engine_dir: Path, context: Server, strangers_certificates: Path, stranger: str
) -> None:
    options = [] if stranger == "without a certificate" else tls(strangers_certificates)
    with ExitStack() as stack:
        generation = Server(stack, engine_dir, "generation", more_options=options)
        expected, _ = context.answer()
        _, params = context.context()
        tokens, finished = generation.generation(params)
        assert tokens == expected
        assert finished.usage.reused_tokens == 0
        generation.process.terminate()
        _, log = generation.process.communicate(timeout=60)
        assert f"computes its context itself: Open at {context.transfers} failed: UNAVAILABLE" in log


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tls_ca", None, "tls_ca is not set; tls_certificate, tls_private_key, tls_ca go together"),
        ("tls_ca", "missing.pem", "missing.pem, which cannot be read: No such file"),
        ("tls_ca", "own.key", "own.key, which holds no PEM certificates"),
        ("tls_private_key", "encrypted.key", "tls_private_key is encrypted; it must be a key without a passphrase"),
        ("tls_private_key", "ca.key", "tls_certificate and tls_private_key are no PEM certificate and its key"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_the_engine_is_loaded(
    engine_dir: Path,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: str | None,
    message: str,
) -> None:
    files = {"tls_certificate": "own.pem", "tls_private_key": "own.key", "tls_ca": "ca.pem"} | {field: value}
    paths = {name: None if file is None else str(certificates / file) for name, file in files.items()}
    monkeypatch.setattr("executor.assembly.open_engine", lambda *_, **__: pytest.fail("the engine is loaded"))
    with pytest.raises(InvalidRequestError, match=message):
        Executor(engine_dir, ExecutorConfig(cache_transceiver_config=CacheTransceiverConfig(**paths)))
