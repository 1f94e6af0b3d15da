"""What is put right, as torch reads it afterwards; and what is refused, with nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import damage
from support.cli import run
from support.paths import CHECKPOINTS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpttool.errors import CkptError, CorruptError, OverwriteError, ReadError, UsageError
from ckpttool.operations.repair import repair
from ckpttool.operations.verify import verify


def read_by_torch(folder: Path, scratch: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, scratch)
    return torch.load(scratch, weights_only=False)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)) and value:
        return {k: v for i, inner in enumerate(value) for k, v in flat(inner, f"{name}.{i}").items()}
    return {name: value}


def same(one: Any, other: Any) -> None:
    here, there = flat(one), flat(other)
    assert here.keys() == there.keys()
    for name, value in here.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, there[name]) and value.dtype == there[name].dtype, name
        else:
            assert repr(value) == repr(there[name]), name


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def copied(name: str, to: Path) -> Path:
    shutil.copytree(CHECKPOINTS / name / "ckpt", to)
    return to


# What is put right ----------------------------------------------------------------------------------------------------


def test_an_index_of_each_rank(tmp_path: Path) -> None:
    """What `use_collectives=False` has written, as one directory that torch opens as any other."""
    src = copied("dcp/nocollectives_w2", tmp_path / "src")
    made = repair(src, tmp_path / "out")
    assert made.done == ["one `.metadata` out of 2, an index for each rank"]
    assert files_of(tmp_path / "out") == {".metadata", "__0_0.distcp", "__1_0.distcp", "integrity.json"}
    assert verify(src, against=tmp_path / "out").exit_code == 0
    reference = torch.load(CHECKPOINTS / "dcp/nocollectives_w2" / "reference.pt", weights_only=False)
    same(read_by_torch(tmp_path / "out", tmp_path / "a.pt"), reference)


def test_directories_of_two_nodes(tmp_path: Path) -> None:
    """Each node has kept what its own ranks wrote, and the first one the index; some files lie on both."""
    whole = copied("dcp/fsdp2_w4", tmp_path / "whole")
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for i, node in enumerate(nodes):
        node.mkdir()
        for rank in (2 * i, 2 * i + 1):
            shutil.copy(whole / f"__{rank}_0.distcp", node)
    shutil.copy(whole / ".metadata", nodes[0])
    shutil.copy(whole / "__0_0.distcp", nodes[1])
    made = repair(nodes[0], tmp_path / "out", merge=[nodes[1]])
    assert made.done == ["merged 2 directories"] and made.records > 0 and made.unchecked_bytes == 0
    same(read_by_torch(tmp_path / "out", tmp_path / "a.pt"), read_by_torch(whole, tmp_path / "b.pt"))


def test_indexes_of_ranks_on_two_nodes(tmp_path: Path) -> None:
    whole = copied("dcp/nocollectives_w2", tmp_path / "whole")
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for i, node in enumerate(nodes):
        node.mkdir()
        for name in (f"__{i}_0.distcp", f"__{i}.metadata"):
            shutil.copy(whole / name, node)
    repair(nodes[1], tmp_path / "out", merge=[nodes[0]])
    assert verify(whole, against=tmp_path / "out").exit_code == 0
    with pytest.raises(CorruptError, match=r"__0\.metadata.* missing"):
        repair(nodes[1], tmp_path / "alone")
    assert not (tmp_path / "alone").exists()


@pytest.mark.parametrize("step", [7, 1 << 40], ids=["shorter", "longer"])
def test_a_lost_index(step: int, tmp_path: Path) -> None:
    """Made after that of another step, whose objects are of other lengths; torch reads the tensors of this one."""
    like = damage.save_dcp(tmp_path / "step-1000", damage.state(0))
    saved = {**damage.state(1), "step": step, "extra": {"loss": [0.5] * 3}}
    like = damage.save_dcp(tmp_path / "like", {**damage.state(0), "extra": {"loss": [0.25] * 3}})
    src = damage.save_dcp(tmp_path / "src", saved)
    (src / ".metadata").unlink()
    made = repair(src, tmp_path / "out", like=like)
    assert made.dropped == [] and "`.metadata` made after that of" in made.done[0] and made.unchecked_bytes == 0
    same(read_by_torch(tmp_path / "out", tmp_path / "a.pt"), saved)


def test_a_lost_index_of_four_ranks(tmp_path: Path) -> None:
    src, like = copied("dcp/fsdp2_w4", tmp_path / "src"), CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"
    (src / ".metadata").unlink()
    repair(src, tmp_path / "out", like=like)
    assert verify(tmp_path / "out", against=like).exit_code == 0
    same(read_by_torch(tmp_path / "out", tmp_path / "a.pt"), read_by_torch(like, tmp_path / "b.pt"))


def test_what_nothing_mentions(tmp_path: Path) -> None:
    src = copied("dcp/fsdp2_w4", tmp_path / "src")
    (src / "__9_0.distcp").write_bytes(b"stale")
    (src / "__1_5.distcp").write_bytes(b"")
    (src / ".metadata.tmp").write_bytes(b"\x80")
    (src / ".x.partial-42").mkdir()
    (src / ".x.partial-42" / "a").write_text("a")
    (src / "notes.txt").write_text("mine")
    before = files_of(src)
    made = repair(src, tmp_path / "out")
    assert set(made.dropped) == {"__9_0.distcp", ".metadata.tmp", ".x.partial-42"}
    own = {".metadata", "integrity.json", *(f"__{i}_0.distcp" for i in range(4))}
    # torch leaves a file of no bytes for a rank that has nothing to write.
    assert files_of(tmp_path / "out") == {*own, "notes.txt", "__1_5.distcp"}
    assert files_of(src) == before
    assert [f.message for f in verify(tmp_path / "out").findings if f.gravity != "note"] == []


def test_a_stale_shard(tmp_path: Path) -> None:
    src = copied("safetensors/indexed", tmp_path / "src")
    stale = src / "model-00009-of-00009.safetensors"
    shutil.copy(sorted(src.glob("*.safetensors"))[0], stale)
    assert repair(src, tmp_path / "out").dropped == [stale.name]
    assert verify(tmp_path / "out").findings == []


# What is refused ------------------------------------------------------------------------------------------------------


def refused(error: type[CkptError], match: str, src: Path, **flags: Any) -> None:
    dst = src.parent / "refused"
    before = files_of(src)
    with pytest.raises(error, match=match):
        repair(src, dst, **flags)
    assert not dst.exists() and not [n for n in os.listdir(src.parent) if ".partial-" in n] and files_of(src) == before


def test_nothing_to_repair(tmp_path: Path) -> None:
    """A whole checkpoint is not an error, and nothing is written."""
    src = copied("dcp/fsdp2_w4", tmp_path / "src")
    for dry_run in (True, False):
        result = repair(src, tmp_path / "out", dry_run=dry_run)
        assert (result.done, result.files, result.exit_code) == ([], [], 0) and result.records
        assert os.listdir(tmp_path) == ["src"]
    shown = run("repair", src, tmp_path / "out")
    assert (shown.exit_code, os.listdir(tmp_path)) == (0, ["src"]) and "nothing to repair" in shown.stdout
    with pytest.raises(UsageError, match="one file"):
        repair(CHECKPOINTS / "torch/full" / "ckpt.pt", tmp_path / "out")
    with pytest.raises(ReadError):
        repair(tmp_path / "nowhere", tmp_path / "out")


def test_other_damage_stays_damage(tmp_path: Path) -> None:
    """Something can be put right, and something cannot: nothing is written that is not whole."""
    src = copied("dcp/fsdp2_w4", tmp_path / "src")
    (src / ".metadata.tmp").write_bytes(b"\x80")
    file = src / "__2_0.distcp"
    damage.flip(file, max(damage.payload_of_dcp(file), key=len).start + 5)
    refused(CorruptError, "cannot be repaired: `__2_0.distcp`: tensor", src)


def test_two_saves_are_not_merged(tmp_path: Path) -> None:
    one = damage.save_dcp(tmp_path / "a" / "src", damage.state(0))
    other = damage.save_dcp(tmp_path / "b", damage.state(1))
    refused(CorruptError, r"are not the same", one, merge=[other])


@pytest.mark.parametrize("what", ["other shapes", "another item", "bytes more", "bytes less", "a bit", "no template"])
def test_an_index_that_does_not_fit(what: str, tmp_path: Path) -> None:
    """What another step's index says is proven, item by item."""
    saved, flags = damage.state(1), {"like": damage.save_dcp(tmp_path / "like", damage.state(0))}
    if what == "other shapes":
        saved["model"]["layers.0.weight"] = torch.ones(17, 33)
    if what == "another item":
        saved["model"]["more"] = torch.ones(3)
    src = damage.save_dcp(tmp_path / "in" / "src", saved)
    file = src / "__0_0.distcp"
    if what == "a bit":
        damage.flip(file, max(damage.payload_of_dcp(file), key=len).start + 9)
    if what == "bytes more":
        file.write_bytes(file.read_bytes() + b"x")
    if what == "bytes less":
        os.truncate(file, file.stat().st_size - 1)
    (src / ".metadata").unlink()
    error: type[CkptError] = CorruptError
    if what == "no template":
        flags, error = {}, ReadError
    refused(error, r"distcp|metadata", src, **flags)


def test_a_template_that_is_not_needed(tmp_path: Path) -> None:
    src = copied("dcp/nocollectives_w2", tmp_path / "src")
    refused(UsageError, "no index is lost", src, like=CHECKPOINTS / "dcp/fsdp2_w2" / "ckpt")


# As it is typed -------------------------------------------------------------------------------------------------------


# A dry run ------------------------------------------------------------------------------------------------------------


def everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Each file below a folder: its inode, when it was last written, what it holds."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in found}


def in_need(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A directory of each kind that can be repaired, and how it is."""
    if kind == "ranks":
        return copied("dcp/nocollectives_w2", folder / "src"), {}
    if kind == "safetensors":
        src = copied("hf/sharded_w2", folder / "src")
        (src / f"{min(src.glob('*.safetensors')).name}.tmp").write_bytes(b"x")
        return src, {}
    src, node = copied("dcp/fsdp2_w4", folder / "src"), folder / "node"
    node.mkdir()
    (src / "__3_0.distcp").rename(node / "__3_0.distcp")
    if kind == "lost":
        (src / ".metadata").unlink()
    else:
        shutil.copy(src / "__2_0.distcp", src / "__9_0.distcp")
        verify(CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt", write_manifest=src / "integrity.json")
    return src, {"merge": [node], **({"like": CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"} if kind == "lost" else {})}


@pytest.mark.parametrize("kind", ["ranks", "lost", "strays", "safetensors"])
def test_a_dry_run_says_what_the_run_then_does(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words and figures, and not a byte of a checkpoint anywhere."""
    src, options = in_need(kind, tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    before, calls = everything(tmp_path), []
    plan = repair(src, tmp_path / "out", dry_run=True, progress=lambda done, total: calls.append(done), **options)
    assert everything(tmp_path) == before and os.listdir(scratch) == []
    assert calls[-1] > 0
    done = repair(src, tmp_path / "out", **options)
    told = [{k: v for k, v in asdict(one).items() if k not in ("seconds", "dry_run")} for one in (plan, done)]
    assert told[0] == told[1]
    assert (
        (plan.dry_run, done.dry_run) == (True, False)
        and plan.done
        and plan.file_bytes
        and plan.checked_bytes + plan.unchecked_bytes
    )
    assert verify(tmp_path / "out").exit_code == 0


def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same words, which name nothing that is not there."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    src = copied("dcp/fsdp2_w2", tmp_path / "src")
    (src / "__7_0.distcp").write_bytes(b"stale")
    damage.flip(src / "__1_0.distcp", damage.payload_of_dcp(src / "__1_0.distcp")[0].start)
    whole = copied("dcp/fsdp2_w2", tmp_path / "whole")
    lost = copied("dcp/fsdp2_w2", tmp_path / "lost")
    (lost / ".metadata").unlink()
    refused: list[tuple[Path, dict[str, Any], type[CkptError]]] = [
        (src, {}, CorruptError),
        (whole, {"like": CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"}, UsageError),
        (lost, {}, ReadError),
        (lost, {"like": CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"}, CorruptError),
    ]  # fmt: skip
    for path, options, error in refused:
        said = []
        for dry_run in (True, False):
            with pytest.raises(error) as caught:
                repair(path, tmp_path / "out", dry_run=dry_run, **options)
            said.append((caught.value.message, caught.value.hint))
        assert said[0] == said[1]
        assert os.listdir(scratch) == [] and not (tmp_path / "out").exists()


def test_a_dry_run_says_what_is_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = copied("dcp/nocollectives_w2", tmp_path / "src")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    monkeypatch.setattr("ckpttool.storage.free_space.free_bytes", lambda path: 10)
    made = repair(src, tmp_path / "out", dry_run=True)
    assert made.notes[0] == f"`{tmp_path / 'out'}` exists: pass `--overwrite` to replace it"
    assert "but 10 B are free" in made.notes[1]
    assert made.exit_code == 6 and run("repair", src, tmp_path / "out", "-n").exit_code == 6


def test_the_command(tmp_path: Path) -> None:
    src, dst = copied("dcp/fsdp2_w4", tmp_path / "src"), tmp_path / "out"
    (src / ".metadata").rename(tmp_path / ".metadata")
    node = tmp_path / "node"
    node.mkdir()
    (src / "__3_0.distcp").rename(node / "__3_0.distcp")
    like = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"
    done = run("repair", src, dst)
    assert done.exit_code == 3 and "hint:" in done.stderr and "--like" in done.stderr
    done = run("repair", src, dst, "--merge", node, "--like", like, "--dry-run")
    assert done.exit_code == 0 and done.stdout.startswith(f"would write {dst}\n") and "merged 2" in done.stdout
    assert not dst.exists()
    done = run("repair", src, dst, "--merge", node, "--like", like, "--threads", "2")
    assert done.exit_code == 0 and "merged 2 directories" in done.stdout and "checksums over" in done.stdout
    assert run("repair", src, dst, "--merge", node, "--like", like).exit_code == OverwriteError.exit_code
    done = run("repair", src, dst, "--merge", node, "--like", like, "--overwrite", "--json")
    said = json.loads(done.stdout)
    assert said["schema"] == "ckpttool/repair/2" and len(said["done"]) == 2 and said["merged"] == [str(node)]
    assert run("repair", src, dst, "--merge", node, "--like", like, "--overwrite", "-q").stdout == ""
    assert run("verify", dst, "--against", like).exit_code == 0
