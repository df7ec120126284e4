"""The `executor` command: serve an engine directory, generate from one, talk to one."""

from __future__ import annotations

import typer

from executor.cli.chat import chat
from executor.cli.dynamo_worker import dynamo_worker
from executor.cli.generate import generate
from executor.cli.kv import kv
from executor.cli.role import role
from executor.cli.serve import serve
from executor.cli.triton_repo import triton_repo
from executor.cli.triton_worker import triton_worker

app = typer.Typer(
    help="Runs engine directories that engine-build wrote.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(serve)
app.command()(generate)
app.command()(chat)
app.command()(kv)
app.command()(role)
app.command()(dynamo_worker)
app.command("triton-repo")(triton_repo)
app.command("triton-worker", hidden=True)(triton_worker)


def main() -> None:
    """Entry point of the `executor` console script."""
    app()
