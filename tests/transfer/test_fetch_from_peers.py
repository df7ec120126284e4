"""Prompts that a peer has cached are fetched from it instead of computed, where that is cheaper."""

from __future__ import annotations

import pytest

from executor.api.errors import InvalidRequestError
from executor.transfer.link_meter import CostMeter
from executor.transfer.local_network import CallFault, Faults, LocalNetwork
from tests.executor.driving import request, run_one
from tests.transfer.instances import OpenInstance, wait_until_free

PROMPT = [index % 90 for index in range(80)]


def received_tokens(executor) -> int:  # type: ignore[no-untyped-def]
    return executor.get_transfer_stats().num_received_tokens


def test_what_a_peer_has_cached_is_not_computed_again(open_instance: OpenInstance) -> None:
    first = open_instance()
    expected = run_one(first, request(PROMPT, 8)).output_token_ids
    second = open_instance(peers=["local:9", first.transfer_address])
    result = run_one(second, request(PROMPT, 8))
    assert result.output_token_ids == expected
    assert result.usage.reused_tokens == 76
    assert received_tokens(second) == 76
    for executor in (first, second):
        wait_until_free(executor)


def test_a_longer_prompt_goes_on_from_what_was_fetched(open_instance: OpenInstance) -> None:
    first = open_instance()
    run_one(first, request(PROMPT, 8))
    second = open_instance(peers=[first.transfer_address])
    longer = request([*PROMPT, *range(50)], 8)
    result = run_one(second, longer)
    assert received_tokens(second) == 80
    assert result.output_token_ids == run_one(first, longer).output_token_ids


def test_what_is_cached_here_is_not_asked_for(open_instance: OpenInstance) -> None:
    first = open_instance()
    run_one(first, request(PROMPT, 8))
    second = open_instance(peers=[first.transfer_address])
    run_one(second, request(PROMPT[:41], 8))
    run_one(second, request(PROMPT, 8))
    assert received_tokens(second) == 76
    wait_until_free(first)


def test_another_salt_finds_nothing(open_instance: OpenInstance) -> None:
    first = open_instance()
    run_one(first, request(PROMPT, 8, cache_salt_id=1))
    second = open_instance(peers=[first.transfer_address])
    run_one(second, request(PROMPT, 8, cache_salt_id=2))
    assert received_tokens(second) == 0


class DeafPeers(Faults):
    def on_call(self, address: str, method: str) -> CallFault:  # noqa: ARG002
        return CallFault(is_lost=True)


def test_peers_that_do_not_answer_hold_nobody_up_for_long(open_instance: OpenInstance) -> None:
    network = LocalNetwork(DeafPeers())
    first = open_instance(network=network)
    expected = run_one(first, request(PROMPT, 8)).output_token_ids
    second = open_instance(network=network, peers=[first.transfer_address])
    assert run_one(second, request(PROMPT, 8)).output_token_ids == expected
    assert received_tokens(second) == 0


def test_a_slow_link_is_not_used_once_it_is_known() -> None:
    meter = CostMeter()
    assert meter.is_fetching_cheaper("peer", 1000, 10)
    meter.note_transfer("peer", 1000, 1.0)
    meter.note_context(10, 0.1)
    assert not meter.is_fetching_cheaper("peer", 1000, 10)
    assert meter.is_fetching_cheaper("peer", 10, 10)
    assert meter.is_fetching_cheaper("another", 1000, 10)


@pytest.mark.parametrize("address", ["x", ":1", "host:", "host:http", "host:65536"])
def test_a_peer_that_is_no_address_is_refused_when_the_instance_opens(
    open_instance: OpenInstance, address: str
) -> None:
    with pytest.raises(InvalidRequestError, match=r"cache_transceiver_config\.peers has .*; it must be HOST:PORT"):
        open_instance(peers=["local:9", address])
