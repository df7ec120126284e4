"""TLS, mutual TLS, bearer tokens."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import httpx
import pytest

from executor.client import AsyncInferenceClient, ConnectionOptions, Delta
from executor.client.errors import CallError
from executor.serving.credentials import Credentials, CredentialsError, is_authorized, is_loopback
from tests.serving.certificates import needs_openssl, write_certificates
from tests.serving.harness import running_server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificates(tmp_path_factory.mktemp("certificates"))


async def says(target: str, options: ConnectionOptions | None = None) -> str:
    async with AsyncInferenceClient(target, options) as client:
        with client.generate("ok", max_tokens=2, timeout=5) as events:
            return "".join([event.text async for event in events if isinstance(event, Delta)])


@needs_openssl
async def test_a_tls_server_talks_to_clients_that_trust_it_and_to_nobody_in_plaintext(certificates: Path) -> None:
    credentials = Credentials.load(certificate=certificates / "own.pem", private_key=certificates / "own.key")
    authority = (certificates / "ca.pem").read_bytes()
    async with running_server(credentials=credentials) as server:
        assert await says(server.target, ConnectionOptions(root_certificates=authority)) == "ok"
        with pytest.raises(Exception, match=r".") as caught:
            await says(server.target)
        assert not isinstance(caught.value, AssertionError)


@needs_openssl
async def test_http_is_https_with_a_certificate(certificates: Path) -> None:
    credentials = Credentials.load(certificate=certificates / "own.pem", private_key=certificates / "own.key")
    async with running_server(credentials=credentials, http=True) as server:
        trusted = ssl.create_default_context(cafile=certificates / "ca.pem")
        async with httpx.AsyncClient(verify=trusted) as client:
            url = server.url.replace("http://", "https://")
            assert (await client.get(f"{url}/health")).json() == {"status": "serving"}
            with pytest.raises(httpx.TransportError):
                await client.get(f"{server.url}/health")


@needs_openssl
async def test_with_mutual_tls_a_client_must_show_a_certificate(certificates: Path) -> None:
    credentials = Credentials.load(
        certificate=certificates / "own.pem",
        private_key=certificates / "own.key",
        client_ca=certificates / "ca.pem",
    )
    authority, chain, key = ((certificates / name).read_bytes() for name in ("ca.pem", "own.pem", "own.key"))
    async with running_server(credentials=credentials) as server:
        known = ConnectionOptions(root_certificates=authority, certificate_chain=chain, private_key=key)
        assert await says(server.target, known) == "ok"
        with pytest.raises(Exception, match=r"."):
            await says(server.target, ConnectionOptions(root_certificates=authority))


async def test_calls_without_the_bearer_token_are_unauthenticated(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    async with running_server(credentials=Credentials.load(bearer_token_file=tmp_path / "token")) as server:
        assert await says(server.target, ConnectionOptions(bearer_token="s3cret")) == "ok"
        for options in (None, ConnectionOptions(bearer_token="guess")):
            with pytest.raises(CallError) as caught:
                await says(server.target, options)
            assert caught.value.status == grpc.StatusCode.UNAUTHENTICATED
        async with AsyncInferenceClient(server.target) as stranger:
            with pytest.raises(CallError):
                await stranger.server_info(timeout=5)


async def test_health_needs_no_token(tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    (tmp_path / "token").write_text("s3cret")
    async with running_server(credentials=Credentials.load(bearer_token_file=tmp_path / "token")) as server:
        response = await health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"certificate": "missing.pem", "private_key": "missing.key"}, "cannot read .*missing.pem"),
        ({"certificate": "empty"}, "go together"),
        ({"client_ca": "empty"}, "only asked for over TLS"),
        ({"certificate": "empty", "private_key": "empty"}, "are not a PEM certificate and its key$"),
        ({"bearer_token_file": "empty"}, "does not hold a bearer token"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(CredentialsError, match=message):
        Credentials.load(**{name: tmp_path / file for name, file in files.items()})


@pytest.mark.parametrize(
    ("host", "credentials", "expected"),
    [
        ("127.0.0.1", Credentials(), None),
        ("::1", Credentials(), None),
        ("localhost", Credentials(), None),
        ("0.0.0.0", Credentials(), "without TLS and without asking clients who they are"),
        ("10.1.2.3", Credentials(bearer_token="x"), "without TLS"),
        ("example.org", Credentials(Path("own.pem"), Path("own.key"), None, "x"), None),
    ],
)
def test_a_server_beyond_this_machine_is_warned_about(
    host: str, credentials: Credentials, expected: str | None
) -> None:
    warning = credentials.warning(host)
    assert (warning is None) == (expected is None)
    assert expected is None or (warning is not None and warning.endswith(expected))
    assert is_loopback(host) == (host in ("127.0.0.1", "::1", "localhost"))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer t0", "bearer t", b"\xff", "Basic t"])
def test_only_the_whole_token_authorizes(header: str | bytes | None) -> None:
    assert not is_authorized(header, "t")
    assert is_authorized("Bearer t", "t")


def test_secrets_are_not_shown() -> None:
    client = ConnectionOptions(private_key=b"k3y", bearer_token="s3cret")
    shown = repr(Credentials(bearer_token="s3cret")) + repr(client)
    assert "s3cret" not in shown
    assert "k3y" not in shown
