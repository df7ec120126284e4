"""The `executor` command: serve an engine directory, generate from one, talk to one."""

from __future__ import annotations

import typer

from engine_build.command_line import OneLineCommand, OneLineGroup
from executor.cli.chat import chat
from executor.cli.dynamo_worker import dynamo_worker
from executor.cli.generate import generate
from executor.cli.kv import kv
from executor.cli.role import role
from executor.cli.serve import serve
from executor.cli.triton_repo import triton_repo
from executor.cli.triton_worker import triton_worker

app = typer.Typer(
    cls=OneLineGroup,
    help="Runs engine directories that engine-build wrote.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(cls=OneLineCommand)(serve)
app.command(cls=OneLineCommand)(generate)
app.command(cls=OneLineCommand)(chat)
app.command(cls=OneLineCommand)(kv)
app.command(cls=OneLineCommand)(role)
app.command(cls=OneLineCommand)(dynamo_worker)
app.command("triton-repo", cls=OneLineCommand)(triton_repo)
app.command("triton-worker", hidden=True, cls=OneLineCommand)(triton_worker)


def main() -> None:
    """Entry point of the `executor` console script."""
    app()
