"""The engine directory: what `engine-build` writes and an Executor opens.

```
ENGINE_DIR/
├── config.json                  manifest (`engine_build.manifest.Manifest`)
├── model.onnx                   the network                    (targets openvino and reference)
├── model.data                   its weights                    (targets openvino and reference)
├── rank0.engine, rank1.engine   the plan of each device        (targets tensorrt and tensorrt-rtx)
└── tokenizer/                   absent when the checkpoint has none: token ids only
    ├── tokenizer.json
    ├── tokenizer_config.json
    └── chat_template.jinja      absent when the checkpoint has none
```
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from engine_build.checkpoint.config_check import check_config
from engine_build.checkpoint.interface import CheckpointError
from engine_build.checkpoint.model_config import ModelConfig
from engine_build.dataclass_json import DecodeError, decode
from engine_build.manifest import FORMAT_VERSION, BuildConfig, FileRecord, Manifest
from engine_build.network.graph import DATA_FILE as DATA_FILE
from engine_build.network.graph import MODEL_FILE as MODEL_FILE
from engine_build.targets import TARGET_NAMES
from engine_build.targets.select import select_target

MANIFEST_FILE = "config.json"
TOKENIZER_DIR = "tokenizer"

_HASHED_AT_ONCE = 1 << 22
"""Bytes."""


class EngineDirectoryError(Exception):
    """An engine directory cannot be used or written: names it, what is wrong, and what would be right."""


@dataclass(frozen=True, slots=True)
class EngineDirectory:
    """An engine directory whose manifest has been read and whose files are there."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path | str, *, target: str | None = None, verify: bool = False) -> EngineDirectory:
        """Read the manifest and check the directory against it.

        Args:
            path: the engine directory.
            target: the only target that will do, where the caller can run no other.
            verify: also compare every file's checksum, which reads them all.

        Raises:
            EngineDirectoryError: no engine directory, another format version or target, a file that is missing, of
                another size or (with `verify`) of other content.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        if target is not None and manifest.target != target:
            raise EngineDirectoryError(
                f"{path} was built for target {manifest.target!r}, {target!r} is needed: "
                f"build it again with --target {target}"
            )
        for name, record in manifest.files.items():
            _check_file(path, name, record, verify)
        return cls(path, manifest)

    @property
    def target(self) -> str:
        return self.manifest.target

    @property
    def model_config(self) -> ModelConfig:
        return self.manifest.pretrained_config

    @property
    def build_config(self) -> BuildConfig:
        return self.manifest.build_config

    @property
    def model_path(self) -> Path:
        """The ONNX file; it refers to the weights beside it."""
        return self.path / MODEL_FILE

    @property
    def tokenizer_dir(self) -> Path | None:
        """Where the tokenizer files are, `None` for an engine that takes token ids only."""
        has_tokenizer = any(name.startswith(f"{TOKENIZER_DIR}/") for name in self.manifest.files)
        return self.path / TOKENIZER_DIR if has_tokenizer else None


def record_files(directory: Path) -> dict[str, FileRecord]:
    """Size and checksum of every file below `directory` but the manifest, by relative path, sorted."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST_FILE)
    return {path.relative_to(directory).as_posix(): FileRecord(path.stat().st_size, _sha256(path)) for path in paths}


def is_engine_directory(path: Path) -> bool:
    """Whether there is a manifest of any format version, however damaged the rest."""
    try:
        content = json.loads((path / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"format_version", "build_config"} <= content.keys()


def _read_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise EngineDirectoryError(f"engine directory {path} does not exist: write one with engine-build")
    manifest_path = path / MANIFEST_FILE
    try:
        content = json.loads(manifest_path.read_bytes())
    except OSError as error:
        raise EngineDirectoryError(
            f"{path} is not an engine directory: cannot read {MANIFEST_FILE} ({error.strerror}); "
            "write one with engine-build"
        ) from error
    except (ValueError, RecursionError) as error:
        raise EngineDirectoryError(f"{manifest_path} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or "format_version" not in content:
        raise EngineDirectoryError(
            f"{path} is not an engine directory: its {MANIFEST_FILE} has no format_version "
            "(a checkpoint? give it to engine-build)"
        )
    version = content["format_version"]
    if version != FORMAT_VERSION:
        raise EngineDirectoryError(
            f"{path} has format version {version!r}, this release reads version {FORMAT_VERSION}: "
            "build it again with engine-build"
        )
    try:
        manifest = decode(Manifest, content)
    except DecodeError as error:
        raise EngineDirectoryError(f"{manifest_path}: {error}") from error
    if manifest.target not in TARGET_NAMES:
        raise EngineDirectoryError(
            f"{path} was built for target {manifest.target!r}, this release knows {', '.join(TARGET_NAMES)}"
        )
    _check_sizes(manifest, manifest_path)
    for name in select_target(manifest.target).plan_files(manifest.build_config):
        if name not in manifest.files:
            raise EngineDirectoryError(f"{manifest_path}: files lacks {name}")
    return manifest


def _check_sizes(manifest: Manifest, manifest_path: Path) -> None:
    """Refuse sizes that no builder wrote, before anything is divided or allocated by them."""
    try:
        check_config(manifest.pretrained_config, f"{manifest_path}: pretrained_config")
    except CheckpointError as error:
        raise EngineDirectoryError(str(error)) from error
    limits = {name: value for name, value in asdict(manifest.build_config).items() if isinstance(value, int)}
    for name, value in limits.items():
        if value < 1:
            raise EngineDirectoryError(f"{manifest_path}: build_config.{name} is {value}, it must be at least 1")


def _check_file(directory: Path, name: str, record: FileRecord, verify: bool) -> None:
    parts = PurePosixPath(name).parts
    if PurePosixPath(name).is_absolute() or ".." in parts:
        raise EngineDirectoryError(f"{directory / MANIFEST_FILE}: file {name!r} lies outside the engine directory")
    path = directory.joinpath(*parts)
    if not path.is_file():
        raise EngineDirectoryError(f"{directory} lacks {name}: build it again with engine-build")
    num_bytes = path.stat().st_size
    if num_bytes != record.num_bytes:
        raise EngineDirectoryError(
            f"{path} has {num_bytes} bytes, {record.num_bytes} were written: build it again with engine-build"
        )
    if verify and _sha256(path) != record.sha256:
        raise EngineDirectoryError(
            f"{path} is not what was written (its checksum differs): build it again with engine-build"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASHED_AT_ONCE):
            digest.update(chunk)
    return digest.hexdigest()
