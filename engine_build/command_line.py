"""Commands whose usage errors are one line, and whose options are described under the headings of their concerns."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

_EXIT_CODE = 2
# Typer exports the class below this one only, and whose it is (click's, or a copy) depends on Typer's version.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


class _OneLineErrors:
    """Mixed into a command: its `main` ends with exit code 2 after one line on standard error."""

    error_prefix: ClassVar[str] = "error"

    def main(self, *args: Any, **kwargs: Any) -> Any:
        main: Callable[..., Any] = super().main  # type: ignore[misc]
        if not kwargs.pop("standalone_mode", True):
            return main(*args, standalone_mode=False, **kwargs)
        try:
            code = main(*args, standalone_mode=False, **kwargs)
        except _UsageError as error:
            print(f"{self.error_prefix}: {usage_error_line(error)}", file=sys.stderr)
            sys.exit(_EXIT_CODE)
        except typer.Abort:
            print(f"{self.error_prefix}: aborted", file=sys.stderr)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


class OneLineGroup(_OneLineErrors, TyperGroup):
    """A command with subcommands; `cls` of a `typer.Typer`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if not args and self.no_args_is_help:
            typer.echo(ctx.get_help(), err=True)
            ctx.exit(_EXIT_CODE)
        return super().parse_args(ctx, args)


class OneLineCommand(_OneLineErrors, TyperCommand):
    """A command without subcommands; `cls` of `typer.Typer.command`.

    Its options are listed by `rich_help_panel` in plain text: Typer's own panels cut long names off at 80 columns.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Options" if parameter.param_type_name == "option" else "Arguments"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)


def run(function: Callable[..., None], name: str) -> None:
    """`typer.run`, with usage errors of one line. `name` is what people type to start it."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=OneLineCommand)(function)
    app(prog_name=name)


def usage_error_line(error: typer.BadParameter) -> str:
    """`Invalid value for '--port': ... (see executor serve --help)`."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    return message if error.ctx is None else f"{message} (see {error.ctx.command_path} --help)"


def os_error_line(error: OSError) -> str:
    """`trace.jsonl: No such file or directory`, without an errno."""
    message = error.strerror or str(error)
    return message if error.filename is None else f"{error.filename}: {message}"


def require_folder_of(path: Path | None) -> None:
    """Refuse a file that cannot be written before the run whose result it is to hold.

    Raises:
        NotADirectoryError: its folder is none.
        IsADirectoryError: it is a folder itself.
    """
    if path is not None and not path.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "no such folder to write into", str(path.parent))
    if path is not None and path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file to write", str(path))
