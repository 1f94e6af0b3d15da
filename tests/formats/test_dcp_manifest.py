"""The manifest that a DCP directory carries: what it says, against zlib and hashlib, and what it finds."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli import run
from support.faults import save_dcp
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import CorruptError, UsageError
from ckpttool.operations.repair import repair
from ckpttool.operations.verify import verify
from ckpttool.producers.open import open_source
from ckpttool.storage.stage import StagingArea
from ckpttool.transfer.checksums import Pieces
from ckpttool.transfer.file_checksums import WholeFiles

SRC = CHECKPOINTS / "dcp/fsdp2_w4/ckpt"
NAME = "integrity.json"


def quantized(out: Path, **how: bool) -> None:
    """Objects before the tensors, with tensors in them."""
    state = {"w": torch.arange(5000.0), "q": torch.quantize_per_tensor(torch.randn(3000), 0.1, 0, torch.qint8)}
    torch.save({"model": state, "step": 3, "note": "x" * 5000}, out.parent / "state.pt")
    ckpttool.convert(out.parent / "state.pt", out, to="dcp", **how)


def repaired(out: Path, **how: bool) -> None:
    repair(CHECKPOINTS / "dcp/nocollectives_w2/ckpt", out, **how)


JOBS: dict[str, Callable[..., object]] = {
    "convert": lambda out, **how: ckpttool.convert(SRC, out, to="dcp", **how),
    "no tensors": lambda out, **how: ckpttool.convert(SRC, out, to="dcp", drop=["model", "optimizer"], **how),
    "objects": quantized,
    "reshard": lambda out, **how: ckpttool.reshard(SRC, out, to_world=3, **how),
    "titan": lambda out, **how: ckpttool.convert(CHECKPOINTS / "dcp/hsdp_w4/ckpt", out, producer="torchtitan", **how),
    "save": lambda out, **how: ckpttool.save(out, torch.nn.Linear(3, 2), **how),
    "repair": repaired,
}
BY_OTHERS = ("repair",)  # who copies the data files without reading them


@pytest.mark.parametrize("job", JOBS)
def test_what_it_says(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies there before the directory has its name, so that no kill can come between."""
    publish, there = StagingArea.publish, []

    def spied(stage: StagingArea, **options: bool) -> None:
        there.append((Path(stage.path) / NAME).exists())
        publish(stage, **options)

    monkeypatch.setattr(StagingArea, "publish", spied)
    JOBS[job](tmp_path / "out")
    assert there == [True]
    said = json.loads((tmp_path / "out" / NAME).read_text())
    files = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.name != NAME}
    data = {name for name in files if name.endswith(".distcp")}
    assert said["algorithm"] == "sha256"
    assert said["files"] == {".metadata": sha256(files[".metadata"]).hexdigest()}
    assert said["sizes"] == {name: len(files[name]) for name in data | {".metadata"}}
    known = {name: None if job in BY_OTHERS else f"{zlib.crc32(files[name]):08x}" for name in data}
    assert said["crc32"] == known
    report = verify(tmp_path / "out")
    assert report.manifest == str(tmp_path / "out" / NAME)
    assert report.whole and report.hashed_bytes and "manifest" not in str(report.findings)
    assert not any(NAME in str(warning) for warning in ckpttool.inspect(tmp_path / "out").warnings)
    JOBS[job](tmp_path / "without", manifest=False)
    assert NAME not in {p.name for p in (tmp_path / "without").iterdir()}


def test_below_the_directory_of_a_framework(tmp_path: Path) -> None:
    """Accelerate has one DCP directory for the model and one for the optimizer; `verify` compares both."""
    out = tmp_path / "out"
    ckpttool.convert(SRC, out, producer="accelerate", only=["model", "optimizer"])
    listed = sorted(out.rglob(NAME))
    assert len(listed) == 2 and verify(out).manifest == ", ".join(map(str, listed))
    changed = next(listed[0].parent.glob("*.distcp"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"\1")
    assert (listed[0].parent.name, changed.name) == tuple((verify(out).findings[0].file or "").split("/"))


def test_a_file_of_another_save(tmp_path: Path) -> None:
    """Same names, shapes and lengths, and every record has its own checksum: nothing but the manifest tells."""
    for n in (0.0, 1.0):
        torch.save({"model": {"w": torch.full((50, 40), n)}}, tmp_path / "a.pt")
        ckpttool.convert(tmp_path / "a.pt", tmp_path / f"{n}", to="dcp")
    shutil.copy(tmp_path / "1.0/__0_0.distcp", tmp_path / "0.0")
    report = verify(tmp_path / "0.0")
    assert [(f.gravity, f.kind, f.file) for f in report.findings] == [("damage", "hash", "__0_0.distcp")]
    assert "has CRC-32" in report.findings[0].message
    (tmp_path / "0.0" / NAME).unlink()
    assert verify(tmp_path / "0.0").whole


READERS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda path, out: ckpttool.convert(path, out, to="torch"),
    "convert, gathered": lambda path, out: ckpttool.convert(path, out, to="torch", dtype="*=float64"),
    "reshard": lambda path, out: ckpttool.reshard(path, out, to_world=3),
    "export": lambda path, out: ckpttool.export(path, out),
    "export, many files": lambda path, out: ckpttool.export(path, out, max_shard_size=4000),
    "load": lambda path, out: ckpttool.load(path, mixed_model()),
    "state_dict": lambda path, out: ckpttool.open(path).state_dict(),
    "state_dict of the model": lambda path, out: ckpttool.open(path)["model"].state_dict(),
}


def mixed_model() -> torch.nn.Module:
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(50, 40)))
    for i in range(20):
        model.register_parameter(f"small{i}", torch.nn.Parameter(torch.zeros(3)))
    return model


@pytest.mark.sweep(3)
@pytest.mark.parametrize("asked_for", [False, True])
@pytest.mark.parametrize("elements", [50 * 40, 1 << 20])
@pytest.mark.parametrize("reader", READERS)
def test_who_reads_a_file_of_another_save(reader: str, elements: int, asked_for: bool, tmp_path: Path) -> None:
    """Whoever reads all tensors of it compares the file, of small records and of large ones."""
    if elements > 50 * 40 and reader == "load":
        elements = 50 * 40
    for n in (0.0, 1.0):
        small = {f"small{i}": torch.full((3,), n) for i in range(20 if elements == 50 * 40 else 0)}
        model = {"w": torch.full((elements // 40, 40), n), **small}
        torch.save({"model": model, "step": 3}, tmp_path / f"{n}.pt")
        manifest = tmp_path / f"{n}" / NAME if asked_for else None
        ckpttool.convert(tmp_path / f"{n}.pt", tmp_path / f"{n}", to="dcp", to_world=2, manifest=manifest)
    READERS[reader](tmp_path / "0.0", tmp_path / "whole")
    shutil.copy(tmp_path / "1.0/__1_0.distcp", tmp_path / "0.0")
    listed = json.loads((tmp_path / "0.0" / NAME).read_text())["crc32"]["__1_0.distcp"]
    found = f"{zlib.crc32((tmp_path / '0.0/__1_0.distcp').read_bytes()):08x}"
    with pytest.raises(CorruptError, match=f"CRC-32 {found}, but {listed} in the manifest") as caught:
        READERS[reader](tmp_path / "0.0", tmp_path / "out")
    assert "ckpttool verify" in (caught.value.hint or "") and not (tmp_path / "out").exists()
    (tmp_path / "0.0" / NAME).unlink()
    READERS[reader](tmp_path / "0.0", tmp_path / "out")


def test_what_several_have_read_counts_once(tmp_path: Path) -> None:
    """Two ranks with the same half of a file have not read it: the other half is not read for its checksum."""
    torch.save({"model": {f"w{i}": torch.zeros(100) for i in range(4)}}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp")
    with closing(open_source(str(tmp_path / "out"))) as source:
        records = [source.resolve(tensor, tensor.chunks.at(0)).record for tensor in source.catalogue.tensors]
        ranks = [WholeFiles(source.catalogue) for _ in range(3)]
        for rank, part in zip(ranks, (records[::2], records[::2], records[1::2]), strict=True):
            read = Pieces()
            for record in part:
                assert record is not None and record.crc is not None
                read.add(record, record.offset, record.nbytes, record.crc)
            rank.note(read.records(), read)
        whole = ranks[0]
        whole.unpack(ranks[1].packed())
        assert whole.complete() == []
        whole.unpack(ranks[2].packed())
        assert whole.complete() == [0] and whole.complete() == []


USES: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda path, out: ckpttool.convert(path, out, to="torch"),
    "open": lambda path, out: ckpttool.open(path),
    "load": lambda path, out: ckpttool.load(path, torch.nn.Linear(3, 2)),
}


@pytest.mark.parametrize("use", USES)
def test_a_directory_that_torch_saved_into_again(use: str, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    ckpttool.save(path, torch.nn.Linear(3, 2))
    USES[use](path, tmp_path / "before.pt")
    dcp.save({"model": torch.nn.Linear(3, 2).state_dict(), "step": 7}, checkpoint_id=path)
    USES[use](path, tmp_path / "out.pt")
    (warning,) = ckpttool.inspect(path).warnings
    assert warning.kind == "stale-manifest" and NAME in warning.text
    report = verify(path)
    assert report.whole and report.manifest is None and [f.gravity for f in report.findings] == ["note"]


@pytest.mark.parametrize("use", USES)
def test_an_index_that_was_changed(use: str, tmp_path: Path) -> None:
    """A byte of the index that torch wrote for us: its mark and its size are those of the manifest."""
    path = tmp_path / "ckpt"
    ckpttool.save(path, torch.nn.Linear(3, 2))
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"weight", b"weighs"))
    with pytest.raises(CorruptError, match=r"`\.metadata` has SHA-256 .* in `integrity\.json`"):
        USES[use](path, tmp_path / "out.pt")
    # Of an index without our mark, the size is.
    shutil.rmtree(path)
    save_dcp(path, {"weight": torch.ones(3)})
    verify(path, write_manifest=path / NAME)
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"weight", b"weighs"))
    with pytest.raises(CorruptError, match=r"`\.metadata` has SHA-256 .* in `integrity\.json`"):
        USES[use](path, tmp_path / "out.pt")


@pytest.mark.parametrize("use", USES)
def test_a_manifest_that_is_damaged(use: str, tmp_path: Path) -> None:
    """It blocks nothing but what is about it."""
    path = tmp_path / "ckpt"
    ckpttool.save(path, torch.nn.Linear(3, 2))
    data = bytearray((path / NAME).read_bytes())
    data[3] ^= 0x80
    (path / NAME).write_bytes(data)
    USES[use](path, tmp_path / "out.pt")
    (warning,) = ckpttool.inspect(path).warnings
    assert warning.kind == "unreadable-manifest" and "nothing is compared" in warning.text
    report = verify(path)
    assert [(f.gravity, f.kind, f.file) for f in report.findings] == [("damage", "manifest", NAME)]
    with pytest.raises(CorruptError):
        verify(path, manifest=path / NAME)


def test_files_that_are_longer_cut_or_gone(tmp_path: Path) -> None:
    """Only the first needs the manifest; the others are told as without one, and once."""
    ckpttool.convert(SRC, tmp_path / "ckpt", to="dcp")
    for change, kind, text in (
        (lambda data: data + b"x", "structure", r"has \d+ bytes, but \d+ in the manifest"),
        (lambda data: data[:-200], None, "outside the file|truncated"),
        (None, "missing", "is missing"),
    ):
        path = Path(shutil.copytree(tmp_path / "ckpt", tmp_path / str(kind)))
        file = path / "__2_0.distcp"
        file.write_bytes(change(file.read_bytes())) if change is not None else file.unlink()
        with pytest.raises(CorruptError, match=text):
            ckpttool.convert(path, tmp_path / "out.pt")
        findings = [f for f in verify(path).findings if f.gravity == "damage"]
        assert [f.kind for f in findings if "the manifest" in f.message] == ["structure"] * (kind == "structure")
        assert findings and kind in (None, findings[0].kind)


def test_other_files_are_nobodys_business(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "torchs", {"w": torch.ones(3)})
    ckpttool.convert(path, tmp_path / "ckpt", to="dcp")
    (tmp_path / "ckpt/README.md").write_text("mine")
    assert [f.gravity for f in verify(tmp_path / "ckpt").findings] == ["note"]


def test_one_that_is_asked_for(tmp_path: Path) -> None:
    """In place of it, or besides."""
    ckpttool.convert(SRC, tmp_path / "a", to="dcp", manifest=tmp_path / "a" / NAME)
    document = json.loads((tmp_path / "a" / NAME).read_text())
    assert {*document["crc32"]} == {*document["files"]} > {".metadata"}
    ckpttool.convert(SRC, tmp_path / "b", to="dcp", manifest=tmp_path / "m.json")
    assert "crc32" in json.loads((tmp_path / "b" / NAME).read_text())
    assert verify(tmp_path / "a", manifest=tmp_path / "m.json").whole
    with pytest.raises(UsageError):
        ckpttool.convert(SRC, tmp_path / "c", to="dcp", manifest=tmp_path / "c")


def test_the_command_line(tmp_path: Path) -> None:
    ranks = CHECKPOINTS / "dcp/nocollectives_w2/ckpt"
    for name, words in {
        "a": ["convert", SRC, "OUT", "--to", "dcp", "--no-manifest"],
        "b": ["reshard", SRC, "OUT", "--to-world", "2", "--no-manifest"],
        "c": ["repair", ranks, "OUT", "--no-manifest"],
        "d": ["convert", SRC, "OUT", "--to", "dcp", "--no-manifest", "--manifest", tmp_path / "m.json"],
    }.items():
        assert run(*(str(tmp_path / name if word == "OUT" else word) for word in words)).exit_code == 0
        assert (tmp_path / name / NAME).exists() == (name == "d")
