"""`executor role`: which requests a running server takes, and to change it."""

from __future__ import annotations

from typing import Annotated

import typer

from executor.api.role import InstanceRole
from executor.cli import options
from executor.cli.opening import one_line_errors
from executor.client import ConnectionOptions, InferenceClient
from protos.inflight.v1 import control_pb2 as pb

_TIMEOUT_SECONDS = 10.0


def role(
    address: options.ServerAddress,
    new_role: Annotated[
        InstanceRole | None, typer.Argument(metavar="[ROLE]", help="context, generation or both.", show_default=False)
    ] = None,
    bearer_token_file: options.SentTokenFile = None,
    tls_root_certificates: options.TlsRootCertificates = None,
) -> None:
    """Say which requests a server takes; with ROLE, let it take others from now on: those it has taken go on."""
    with one_line_errors():
        connection = ConnectionOptions.from_files(tls_root_certificates, bearer_token_file)
        with InferenceClient(address, connection) as client:
            if new_role is not None:
                client.change_role(new_role, timeout=_TIMEOUT_SECONDS)
            info = client.server_info(timeout=_TIMEOUT_SECONDS)
    name = pb.InstanceRole.Name(info.role).removeprefix("INSTANCE_ROLE_").lower()
    typer.echo(f"{name}, transfers on {info.transfer_address}" if info.transfer_address else name)
