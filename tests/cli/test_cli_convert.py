"""Every option of `convert` reaches the library as what it means. What comes out is in the transcripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import FULL, run
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.analysis.result import FileSize

DEFAULTS = {
    "to": None, "producer": None, "only": (), "drop": (), "tensors": (), "exclude": (), "rename": (),
    "strip_wrappers": False, "strip_prefix": None, "dtype": (), "max_shard_size": None, "to_world": None,
    "tensor_class": None, "optim_keys": None, "optim_root": None, "shapes": None, "model_from": None,
    "optim_from": None, "overwrite": False, "dry_run": False, "threads": None, "max_memory": None, "check": False,
    "resume": False, "manifest": None,
    "private": False, "public": False, "tag": None, "commit_message": None, "token": None, "stage": None,
    "not_secret": (), "in_store": "auto", "like": None, "key_map": None,
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def convert(src: str, dst: str, **options: Any) -> ckpttool.Conversion:
        found.update(options, src=src, dst=dst)
        return ckpttool.Conversion(src, "torch", dst, "dcp")

    monkeypatch.setattr(ckpttool, "convert", convert)
    return found


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        ("--to dcp", "to", "dcp"),
        ("--producer accelerate:full", "producer", "accelerate:full"),
        ("--only model --only ema", "only", ("model", "ema")),
        ("--drop rng", "drop", ("rng",)),
        ("--tensors model.* --tensors re:x", "tensors", ("model.*", "re:x")),
        ("--exclude *.bias", "exclude", ("*.bias",)),
        ("--rename a=b --rename c=d", "rename", ("a=b", "c=d")),
        ("--strip-wrappers", "strip_wrappers", True),
        ("--strip-prefix model.", "strip_prefix", "model."),
        ("--dtype norm*=float32 --dtype bfloat16", "dtype", ("norm*=float32", "bfloat16")),
        ("--max-shard-size 5GB", "max_shard_size", "5GB"),
        ("--to-world 8", "to_world", 8),
        ("--tensor-class dtensor", "tensor_class", "dtensor"),
        ("--optim-keys id", "optim_keys", "id"),
        ("--optim-root optimizer", "optim_root", "optimizer"),
        ("--shapes model.safetensors", "shapes", "model.safetensors"),
        ("--model-from other", "model_from", "other"),
        ("--optim-from other", "optim_from", "other"),
        ("--overwrite", "overwrite", True),
        ("--dry-run", "dry_run", True),
        ("-n", "dry_run", True),
        ("--threads 3", "threads", 3),
        ("-j 3", "threads", 3),
        ("-j3", "threads", 3),
        ("--max-memory 512MiB", "max_memory", "512MiB"),
        ("--check", "check", True),
        ("--resume", "resume", True),
        ("--manifest sums.json", "manifest", "sums.json"),
        ("--no-manifest", "manifest", False),
    ],
)
def test_an_option(words: str, option: str, value: Any, asked: dict[str, Any]) -> None:
    result = run("convert", "a", "b", *words.split())
    assert result.exit_code == 0, result.stderr
    progress = asked.pop("progress")
    assert progress is not None
    assert asked.pop("shared") is False
    assert asked == {**DEFAULTS, option: value, "src": "a", "dst": "b"}


@pytest.mark.parametrize("flag", ["-q", "--quiet", "--json"])
def test_no_progress_when_nobody_wants_to_look(flag: str, asked: dict[str, Any]) -> None:
    assert run("convert", "a", "b", flag).exit_code == 0
    assert asked.get("progress") is None


def test_quiet_says_nothing_and_json_everything(tmp_path: Path) -> None:
    assert run("convert", FULL, str(tmp_path / "a.pt"), "-q").output == ""
    said = json.loads(run("convert", FULL, str(tmp_path / "b.pt"), "--json").stdout)
    assert (said["schema"], said["destination"], said["format"]) == (
        "ckpttool/convert/2",
        str(tmp_path / "b.pt"),
        "torch",
    )
    assert said["files"] == [{"path": "b.pt", "nbytes": (tmp_path / "b.pt").stat().st_size}]
    # The CLI changed nothing of what the library does.
    ours, theirs = (torch.load(p, weights_only=False) for p in (tmp_path / "b.pt", FULL))
    assert torch.equal(ours["model"]["embed.weight"], theirs["model"]["embed.weight"])


def test_the_pieces_of_a_producers_layout(tmp_path: Path) -> None:
    source, out = str(CHECKPOINTS / "run/trainer/ckpt"), str(tmp_path / "checkpoint-4")
    result = run("convert", source, out, "--producer", "trainer", "-n", "-q")
    assert result.stdout.split() == [
        "model.safetensors", "optimizer.pt", "scheduler.pt", "training_args.bin", "trainer_state.json", "rng_state.pth",
    ]  # fmt: skip
    assert not Path(out).exists()
    refused = run("convert", source, out, "--producer", "trainer", "--to", "dcp")
    assert (refused.exit_code, "cannot be used together" in refused.stderr) == (2, True)


def test_notes_are_warnings_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ckpttool.Conversion("a", "torch", "b", "dcp", notes=["`x` is \x1b odd"])
    monkeypatch.setattr(ckpttool, "convert", lambda *args, **options: made)
    assert run("convert", "a", "b").stderr == "warning: `x` is \\x1b odd\n"


def test_too_little_space_is_seen_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ckpttool.Conversion(
        "a", "torch", "b", "dcp", files=[FileSize("b", 10)], file_bytes=10**9, free_bytes=10**6, dry_run=True
    )
    monkeypatch.setattr(ckpttool, "convert", lambda *args, **options: made)
    result = run("convert", "a", "b", "-n", env={"FORCE_COLOR": "1"})
    assert "\x1b[1;31m1.00 GB needed, 1.00 MB free\x1b[0m" in result.stdout
