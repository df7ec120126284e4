"""`engine-build` as a person runs it: a process, its exit status, and what it prints."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from engine_build.engine_dir import EngineDirectory
from tests.engine_build.engines import build_tiny_engine, tiny_gguf
from tests.engine_build.tiny_checkpoint import tiny_config
from tests.engine_build.written_checkpoints import SMALL, write_gguf, write_hugging_face

_REPOSITORY = Path(__file__).parent.parent.parent


def _run(*arguments: object, in_child: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine_build", *map(str, arguments)],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=in_child,
    )


def _small_files_only() -> None:
    """In the child: no file may grow beyond 64 KiB, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def _refusal(*arguments: object) -> str:
    """What the command says when it refuses: one line, on stderr, with status 2."""
    done = _run(*arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("engine-build: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a good checkpoint of each kind: `tiny.gguf` and `hugging_face`."""
    directory = tmp_path_factory.mktemp("checkpoints")
    tiny_gguf(directory)
    write_hugging_face(directory / "hugging_face", tiny_config())
    return directory


@pytest.mark.parametrize(
    ("name", "target"), [("tiny.gguf", "openvino"), ("hugging_face", "openvino"), ("tiny.gguf", "reference")]
)
def test_a_build_writes_an_engine_and_says_with_what_settings(
    checkpoints: Path, tmp_path: Path, name: str, target: str
) -> None:
    output_dir = tmp_path / "engine"
    done = _run("--checkpoint_dir", checkpoints / name, "--output_dir", output_dir, "--target", target)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {output_dir}")
    assert "max_seq_len           1024" in done.stderr
    assert ("token ids only" in done.stderr) is (name == "hugging_face")
    engine = EngineDirectory.open(output_dir, target=target, verify=True)
    assert engine.build_config.max_seq_len == 1024


def test_every_setting_reaches_the_manifest(checkpoints: Path, tmp_path: Path) -> None:
    settings = {
        "max_batch_size": 3,
        "max_num_tokens": 40,
        "max_input_len": 50,
        "max_seq_len": 60,
        "tokens_per_block": 16,
        "dtype": "float16",
        "weight_dtype": "int8",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    where = ("--checkpoint_dir", checkpoints / "tiny.gguf", "--output_dir", tmp_path / "engine")
    done = _run(*where, "--target", "reference", *flags, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["build_config"] == settings | {"tp_size": 1, "pp_size": 1, "tensorrt": None}


def test_a_dry_run_prints_memory_and_writes_nothing(checkpoints: Path, tmp_path: Path) -> None:
    where = ("--checkpoint_dir", checkpoints / "tiny.gguf", "--output_dir", tmp_path / "engine", "--dry_run")
    table = _run(*where)
    assert table.returncode == 0, table.stderr
    for word in ("weights", "workspace", "KV as bfloat16, a token", "a block of 32"):
        assert word in table.stdout
    report = json.loads(_run(*where, "--json").stdout)
    assert report["memory"]["kv_cache"][0]["bytes_per_token"] == 1 * 2 * 2 * 16 * 2
    assert report["build_config"]["max_seq_len"] == 1024
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_replaced_is_announced(checkpoints: Path, tmp_path: Path) -> None:
    build_tiny_engine(tiny_gguf(tmp_path), tmp_path / "engine")
    where = ("--checkpoint_dir", checkpoints / "tiny.gguf", "--output_dir", tmp_path / "engine")
    done = _run(*where, "--target", "reference")
    assert done.returncode == 0, done.stderr
    assert f"replacing the engine in {tmp_path / 'engine'}" in done.stderr
    assert EngineDirectory.open(tmp_path / "engine").build_config.max_seq_len == 1024


def test_inspect_prints_what_is_in_an_engine(tmp_path: Path) -> None:
    engine = build_tiny_engine(tiny_gguf(tmp_path), tmp_path / "engine")
    table = _run("inspect", engine.path, "--verify")
    assert table.returncode == 0, table.stderr
    for word in ("reference", "max_seq_len", "LlamaForCausalLM", "key_cache_0", "tokenizer/tokenizer.json"):
        assert word in table.stdout
    assert "[num_blocks, 2, tokens_per_block, 16]" in table.stdout
    assert "checksums: all files are as they were written" in table.stdout
    assert _run("inspect", engine.path, "--json").stdout == engine.manifest.to_json()


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    said = _refusal("--checkpoint_dir", tmp_path / "nowhere", "--output_dir", tmp_path / "engine")
    assert "nowhere does not exist: give a Hugging Face model directory or a GGUF file" in said


def test_truncated_safetensors_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(checkpoints / "hugging_face", tmp_path / "damaged"))
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "is truncated" in _refusal("--checkpoint_dir", damaged, "--output_dir", tmp_path / "engine")


def test_a_truncated_gguf_file_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes((checkpoints / "tiny.gguf").read_bytes()[:-1000])
    assert "is truncated" in _refusal("--checkpoint_dir", damaged, "--output_dir", tmp_path / "engine")


def test_an_unknown_architecture_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoints / "hugging_face", tmp_path / "other"))
    (other / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    said = _refusal("--checkpoint_dir", other, "--output_dir", tmp_path / "engine")
    assert "MambaForCausalLM" in said
    assert "supported are LlamaForCausalLM, MistralForCausalLM" in said


def test_an_unsupported_gguf_type_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", SMALL, GgmlType.Q5_1)
    said = _refusal("--checkpoint_dir", tmp_path / "m.gguf", "--output_dir", tmp_path / "engine")
    assert "token_embd.weight is of type Q5_1; supported for a matrix are F32" in said


def test_a_refused_build_writes_nothing(checkpoints: Path, tmp_path: Path) -> None:
    where = ("--checkpoint_dir", checkpoints / "tiny.gguf", "--output_dir", tmp_path / "engine")
    assert "max_seq_len 4096 is beyond the model's 1024 positions" in _refusal(*where, "--max_seq_len", 4096)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_no_engine_is_not_replaced(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    said = _refusal("--checkpoint_dir", checkpoints / "tiny.gguf", "--output_dir", tmp_path)
    assert "holds something that is not an engine: give another, or empty it" in said
    assert (tmp_path / "thesis.tex").exists()


def test_an_engine_of_another_format_version_is_refused(tmp_path: Path) -> None:
    engine = build_tiny_engine(tiny_gguf(tmp_path), tmp_path / "engine")
    manifest = engine.path / "config.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 3'))
    assert "has format version 3, this release reads version 2" in _refusal("inspect", engine.path)


def test_a_disk_that_is_full_ends_the_build_in_one_line_and_nothing_is_left(checkpoints: Path, tmp_path: Path) -> None:
    where = ("--checkpoint_dir", checkpoints / "tiny.gguf", "--output_dir", tmp_path / "engine")
    done = _run(*where, in_child=_small_files_only)
    assert done.returncode == 1, done
    assert "File too large" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("engine-build: error: ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_needed_is_said(tmp_path: Path) -> None:
    assert "--checkpoint_dir is needed" in _refusal()
    assert "--output_dir is needed" in _refusal("--checkpoint_dir", tmp_path)
    assert "target 'abacus' is unknown" in _refusal("--checkpoint_dir", tmp_path, "--dry_run", "--target", "abacus")


def test_an_option_of_builds_is_refused_before_inspect(tmp_path: Path) -> None:
    said = _refusal("--max_seq_len", 64, "inspect", tmp_path)
    assert "--max_seq_len is for builds, it does not go with inspect" in said
    assert "--json is for builds" in _refusal("--json", "inspect", tmp_path)


def test_an_unknown_option_is_refused() -> None:
    done = _run("--max_beam_width", 4)
    assert done.returncode == 2
    assert "No such option: --max_beam_width" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_are_built_at_the_same_time_and_named_as_tensorrt_llm_does(checkpoints: Path, tmp_path: Path) -> None:
    where = ("--checkpoint_dir", checkpoints / "tiny.gguf", "--output_dir", tmp_path / "engine")
    how = ("--target", "tensorrt-rtx", "--compute_capability", "8.9", "--tp_size", 2, "--workers", 2)
    done = _run(*where, *how, "--max_seq_len", 64, "--profiling_verbosity", "detailed")
    assert done.returncode == 0, done.stderr
    assert "compute_capabilities  8.9" in done.stderr
    engine = EngineDirectory.open(tmp_path / "engine", target="tensorrt-rtx", verify=True)
    assert {"rank0.engine", "rank1.engine"} <= set(engine.manifest.files)
    shown = _run("inspect", engine.path).stdout
    for word in ("tensorrt_rtx 1.7", "compute_capabilities", "8.9", "detailed", "rank1.engine", "key_cache_0_out"):
        assert word in shown


def test_a_dry_run_for_a_card_estimates_the_build_as_well(checkpoints: Path) -> None:
    where = ("--checkpoint_dir", checkpoints / "tiny.gguf", "--dry_run", "--target", "tensorrt-rtx")
    assert "building a rank (estimate): " in _run(*where).stdout
    report = json.loads(_run(*where, "--json").stdout)
    assert report["build_cost"]["memory"] > 0
    assert report["build_config"]["tensorrt"]["compute_capabilities"] == ["8.9", "12.0"]


def test_options_of_other_targets_are_refused(checkpoints: Path) -> None:
    where = ("--checkpoint_dir", checkpoints / "tiny.gguf", "--dry_run")
    assert "are for the targets tensorrt and tensorrt-rtx, not for openvino" in _refusal(*where, "--strip_plan")
    assert "tp_size 2 x pp_size 1 is not supported; target openvino" in _refusal(*where, "--tp_size", 2)
    assert "target openvino keeps matrices as as_stored, int8" in _refusal(*where, "--weight_dtype", "int4")
    assert "no NVIDIA GPU can be used here" in _refusal(*where, "--target", "tensorrt")


@pytest.mark.parametrize(
    "arguments", [("--tp_size", "two"), ("--targt", "openvino"), ("inspect",), ("inspct",), ("inspect", "a", "b")]
)
def test_a_usage_error_is_one_line_that_leads_to_the_help(arguments: tuple[str, ...]) -> None:
    assert " --help)" in _refusal(*arguments)
