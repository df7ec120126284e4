"""`engine-build inspect ENGINE_DIR`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from engine_build.cli.console import build_settings, format_bytes, messages, output
from engine_build.engine_dir import EngineDirectory
from engine_build.manifest import Manifest, TensorSpec


def inspect_command(engine_dir: Path, as_json: bool, verify: bool) -> None:
    """Run it. Raises what `one_line_errors` turns into an exit status."""
    if verify:
        with messages.status("comparing checksums"):
            engine = EngineDirectory.open(engine_dir, verify=True)
    else:
        engine = EngineDirectory.open(engine_dir)
    if as_json:
        output.print_json(engine.manifest.to_json())
        return
    for table in _tables(engine.manifest):
        output.print(table)
    if verify:
        output.print("checksums: all files are as they were written")


def _tables(manifest: Manifest) -> list[Table]:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.builder_versions.items())
    engine = {
        "format_version": manifest.format_version,
        "target": manifest.target,
        "built with": versions,
    }
    model = {name: value for name, value in dataclasses.asdict(manifest.pretrained_config).items() if value is not None}
    files = {
        name: f"{format_bytes(record.num_bytes)}, sha256 {record.sha256[:12]}"
        for name, record in manifest.files.items()
    }
    network = {
        name: _tensor(spec)
        for name, spec in {**manifest.inputs, **manifest.outputs}.items()
        if _layer(name) in (None, 0)  # the caches of other layers are like those of the first
    }
    return [
        _table("engine", engine),
        _table("build_config", build_settings(manifest.build_config)),
        _table("pretrained_config", model),
        _table("network", network),
        _table("files", files),
    ]


def _layer(name: str) -> int | None:
    """`key_cache_3` -> 3; `None` for a tensor that no layer has for itself."""
    kind, _, index = name.rpartition("_")
    return int(index) if kind in ("key_cache", "value_cache") else None


def _table(title: str, rows: Mapping[str, object]) -> Table:
    table = Table(title, "", title_justify="left")
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _tensor(spec: TensorSpec) -> str:
    return f"{spec.dtype} [{', '.join(map(str, spec.shape))}]"
