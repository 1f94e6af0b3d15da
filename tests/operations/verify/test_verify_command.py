"""`ckpttool verify` as it is typed: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import damage
from support.cli import run
from support.paths import CHECKPOINTS

DCP = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"


def test_what_is_whole() -> None:
    done = run("verify", DCP, "--values", "--threads", "1")
    assert done.exit_code == 0 and f"{DCP} is whole" in done.stdout
    assert "checksums over" in done.stdout and "values" in done.stdout
    assert run("verify", DCP, "-q").stdout == ""


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "step-5"
    damage.save_dcp(path)
    file = path / "__0_0.distcp"
    damage.flip(file, max(damage.payload_of_dcp(file), key=len).start + 9)
    (path / "__3_0.distcp").write_bytes(b"abc")
    return path


def test_damage(damaged: Path) -> None:
    done = run("verify", damaged)
    assert done.exit_code == 4 and "is damaged: 1 finding" in done.stdout and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines.index("damaged") < lines.index("suspect")
    assert "! `__0_0.distcp`: tensor `model.embed.weight`: bytes" in done.stdout
    quiet = run("verify", damaged, "--quiet")
    assert [line.partition(":")[0] for line in quiet.stdout.splitlines()] == ["damage", "suspect"]
    assert quiet.exit_code == 4


def test_json(damaged: Path) -> None:
    done = run("verify", damaged, "--json", "--manifest", damaged.parent / "m.json")
    assert done.exit_code == 3 and json.loads(done.stdout)["error"]["kind"] == "cannot read"
    done = run("verify", damaged, "--json")
    said: dict[str, Any] = json.loads(done.stdout)
    assert (
        done.exit_code == said["exit_code"] == 4
        and said["schema"] == "ckpttool/verify/2"
        and said["verdict"] == "damaged"
    )
    first = said["findings"][0]
    assert (first["gravity"], first["kind"], first["file"]) == ("damage", "checksum", "__0_0.distcp")
    assert first["nbytes"] == 61 * 33 * 4 and first["tensor"] == "model.embed.weight"


def test_many_findings_are_cut(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((4,), float("nan")) for i in range(30)}
    path = damage.save_torch(tmp_path / "a.pt", state)
    short, long = run("verify", path, "--values"), run("verify", path, "--values", "-v")
    assert short.exit_code == long.exit_code == 1
    assert "  10 more, shown by -v" in short.stdout and "has NaN in 30 tensors" in short.stdout
    assert long.stdout.count("are NaN") == 30


def test_manifest_and_against(tmp_path: Path) -> None:
    listed, out = tmp_path / "m.json", tmp_path / "out.pt"
    assert run("convert", DCP, out, "--manifest", listed).exit_code == 0
    done = run("verify", out, "--manifest", listed, "--against", DCP)
    assert done.exit_code == 0 and f"against   {DCP}" in done.stdout and "hashed" in done.stdout
    other = CHECKPOINTS / "dcp/hsdp_w4" / "ckpt"
    done = run("verify", out, "--against", other)
    assert done.exit_code == 1 and "whole, but differs" in done.stdout
    again = tmp_path / "again.json"
    assert run("verify", out, "--write-manifest", again).exit_code == 0
    assert json.loads(again.read_text())["tensors"] == json.loads(listed.read_text())["tensors"]
    assert run("verify", out, "--write-manifest", again).exit_code == 6
    done = run("reshard", DCP, tmp_path / "on-2", "--to-world", "2", "--manifest", tmp_path / "on-2" / "integrity.json")
    assert done.exit_code == 0 and run("verify", tmp_path / "on-2").exit_code == 0


def test_flat_parameters_with_their_shapes() -> None:
    path = CHECKPOINTS / "rank/fsdp1_local_w2" / "ckpt"
    assert "--shapes" in run("verify", path).stdout
    shapes = CHECKPOINTS / "rank/fsdp1_local_w2" / "reference.pt"
    done = run("verify", path, "--shapes", shapes)
    assert done.exit_code == 0 and "suspect" not in done.stdout
