"""`executor kv`: who holds which KV cache block of a running server.

```
 blocks   owner        since iteration  call                        count
 0 to 7   request 12                 5  allocate, found in the cache    8
 9, 11    tree                                                          2
```
Blocks that one owner took by one call are one line; a shared block is in several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from executor.cli import options
from executor.cli.opening import one_line_errors
from executor.client import ConnectionOptions, InferenceClient
from protos.inflight.v1 import control_pb2 as pb

_TIMEOUT_SECONDS = 10.0


def kv(
    address: options.ServerAddress,
    as_json: Annotated[bool, typer.Option("--json", help="The whole account as one JSON object.")] = False,
    bearer_token_file: options.SentTokenFile = None,
    tls_root_certificates: options.TlsRootCertificates = None,
) -> None:
    """Show who holds which KV cache block of a server, what its lower tiers hold and what is pinned."""
    with one_line_errors():
        connection = ConnectionOptions.from_files(tls_root_certificates, bearer_token_file)
        with InferenceClient(address, connection) as client:
            ledger = client.kv_ledger(timeout=_TIMEOUT_SECONDS)
    if as_json:
        typer.echo(
            MessageToJson(
                ledger, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
            )
        )
        return
    console = Console()
    console.print(holders_table(ledger))
    console.print(summary(ledger))


def holders_table(ledger: pb.KvLedgerResponse) -> Table:
    """A line for each owner and call, with all blocks it took."""
    table = Table("blocks", "owner", "kind", "iteration", "call", box=None, header_style="bold")
    table.add_column("count", justify="right")

    def taken(entry: pb.KvLedgerEntry) -> tuple[int, int, int, str]:
        return entry.owner_kind, entry.owner_id, entry.iteration, entry.call

    for _, group in itertools.groupby(sorted(ledger.entries, key=taken), taken):
        entries = list(group)
        first = entries[0]
        table.add_row(
            ranges(sorted(entry.block_id for entry in entries)),
            first.owner,
            pb.KvOwnerKind.Name(first.owner_kind).removeprefix("KV_OWNER_KIND_").lower(),
            str(first.iteration) if first.HasField("iteration") else "",
            first.call,
            str(len(entries)),
        )
    if ledger.lost_block_ids:
        lost = sorted(ledger.lost_block_ids)
        table.add_row(ranges(lost), "nobody", "lost", "", "", str(len(lost)))
    return table


def summary(ledger: pb.KvLedgerResponse) -> str:
    """Counts of each tier, copies, pins and leaks, a line each."""
    counts, transfers = ledger.counts, ledger.transfers
    lines = [f"pool: {counts.free} free, {counts.used} used, {counts.cached} cached, {counts.leased} leased"]
    for name, tier in (("host", ledger.host), ("disk", ledger.disk)):
        if tier.max_num_blocks:
            lines.append(f"{name}: {tier.used_num_blocks} of {tier.max_num_blocks} blocks used")
    if ledger.host.max_num_blocks or ledger.disk.max_num_blocks:
        why = ", ".join(f"{failures.kind} {failures.count}" for failures in transfers.failed_by_kind)
        failed = f"{transfers.failed} failed" + (f" ({why})" if why else "")
        lines.append(f"copies: {transfers.offloaded} offloaded, {transfers.onboarded} onboarded, {failed}")
    num_pinned = len({block_id for pin in ledger.pins for block_id in pin.block_ids})
    lines.append(f"pins: {len(ledger.pins)}, {num_pinned} of at most {ledger.max_pinned_blocks} blocks")
    for pin in ledger.pins:
        until = f"for {pin.seconds_left:.0f} s" if pin.HasField("seconds_left") else "until unpinned"
        lines.append(f"  pin {pin.pin_id}: {pin.num_tokens} tokens, blocks {ranges(sorted(pin.block_ids))}, {until}")
    if ledger.quarantined_blocks:
        lines.append(f"leaked: {ledger.quarantined_blocks} blocks, quarantined")
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of them shortened: `0 to 7, 9, 11`."""
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in _runs(numbers))


def _runs(numbers: Sequence[int]) -> Iterable[list[int]]:
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        yield [number for _, number in group]
