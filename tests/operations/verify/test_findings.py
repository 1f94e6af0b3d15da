"""Each way in which a checkpoint is not whole is a finding, with its file, tensor and place; all of them are found."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch
from support import damage
from support.cli import run
from support.paths import CHECKPOINTS
from support.wrapped_store import WrappedStore

import ckpttool
from ckpttool import convert
from ckpttool.catalogue.findings import Finding
from ckpttool.errors import CkptError, LossError, OverwriteError, ReadError, StorageError
from ckpttool.operations.verify import verify
from ckpttool.operations.verify.report import Report

EVERY = sorted(str(path.relative_to(CHECKPOINTS)) for path in CHECKPOINTS.glob("*/*/ckpt*"))
LOST = "dcp/unflattened_w2/ckpt"  # its optimizer is one object, with the shards of one rank
FLAT = ("rank/fsdp1_flat", "rank/fsdp1_local", "rank/fsdp1_dinov2", "run/dinov2")


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    return damage.save_dcp(tmp_path / "ckpt")


def worst(report: Report) -> Finding:
    assert report.findings, "nothing was found"
    return report.findings[0]


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(finding.gravity, finding.kind) for finding in report.findings]


def only(report: Report, gravity: str, kind: str) -> Finding:
    found = [f for f in report.findings if (f.gravity, f.kind) == (gravity, kind)]
    assert len(found) == 1, [f.message for f in report.findings]
    return found[0]


# No false alarm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [EVERY[i::4] for i in range(4)], ids=range(4))
def test_nothing_is_wrong_with_the_samples(names: list[str]) -> None:
    """What the upstream libraries write, in every version and layout that there is a sample of."""
    for name in names:
        report = verify(CHECKPOINTS / name)
        alarms = [f.message for f in report.findings if f.gravity not in ("note",)]
        if name.startswith(FLAT):
            assert len(alarms) == 1 and "LOCAL_STATE_DICT" in alarms[0]
        elif name == LOST:
            assert len(alarms) == 1 and "only the shards of rank 1 are stored" in alarms[0]
        else:
            assert alarms == [], name
        assert report.exit_code == (4 if name == LOST else 3 if name.startswith(FLAT) else 0)
        assert report.read_bytes == report.checked_bytes + report.unchecked_bytes > 0, name


@pytest.mark.parametrize(("name", "checks"), [("dcp/fsdp2_w4/ckpt", True), ("hf/llama/ckpt", False)])
def test_how_much_could_be_checked(name: str, checks: bool) -> None:
    """Every payload is read once; DCP has a checksum of each, safetensors of none."""
    report = verify(CHECKPOINTS / name)
    assert (report.checked_bytes > 0, report.unchecked_bytes > 0) == (checks, not checks)
    if not checks:
        from safetensors import safe_open

        with safe_open(CHECKPOINTS / name / "model.safetensors", "pt") as file:
            assert report.unchecked_bytes == sum(file.get_tensor(k).nbytes for k in file.keys())  # noqa: SIM118


# Structure ------------------------------------------------------------------------------------------------------------


def test_a_missing_file(dcp: Path) -> None:
    (dcp / "__0_0.distcp").rename(dcp.parent / "gone")
    report = verify(dcp)
    finding = only(report, "damage", "missing")
    assert finding.file == "__0_0.distcp" and report.exit_code == 4
    metadata = pickle.loads((dcp / ".metadata").read_bytes())
    stored = {at.fqn for at, where in metadata.storage_data.items() if where.relative_path == "__0_0.distcp"}
    assert set(finding.names) == stored and {finding} == {f for f in report.findings if f.fails}
    assert not any(f.kind == "remark" and "unreadable" in f.message for f in report.findings)


def test_holes_that_a_missing_file_has_left_are_one_finding(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(CHECKPOINTS / "deepspeed/zero3_w3/saved", run)
    next(run.rglob("*rank_1_*optim_states.pt")).unlink()
    missing, holes = (f for f in verify(run).findings if f.fails)
    with ckpttool.open(CHECKPOINTS / "deepspeed/zero3_w3/saved") as whole:
        parted = {t.name for t in whole.catalogue.tensors if len(t.chunks) > 1}
    assert (missing.kind, holes.kind) == ("missing", "coverage")
    assert set(holes.names) <= parted and "model.embed.weight" in holes.names


def test_a_torn_tail(dcp: Path) -> None:
    """All that lay behind the cut is one finding, which names it."""
    file = dcp / "__0_0.distcp"
    metadata = pickle.loads((dcp / ".metadata").read_bytes())
    whole, where = file.stat().st_size, damage.place_of(metadata, "model.embed.weight")
    size = where.offset + where.length // 2
    os.truncate(file, size)
    behind = {i.fqn for i, info in metadata.storage_data.items() if info.offset >= where.offset}
    report = verify(dcp)
    finding = only(report, "damage", "truncated")
    assert (finding.file, finding.offset, finding.nbytes) == (file.name, size, whole - size)
    assert f"truncated: {size:,} of {whole:,} bytes" in finding.message
    assert set(finding.names) == behind and report.counts["damage"] == 1 and report.exit_code == 4


def test_a_truncated_file_of_several(tmp_path: Path) -> None:
    """Tensors and objects are counted, nothing is told twice, and the other files are still read."""
    copy = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / "dcp/hsdp_w4/ckpt", copy)
    os.truncate(copy / "__1_0.distcp", 10000)
    report = verify(copy)
    (finding,) = report.findings
    assert finding.message == "`__1_0.distcp`: truncated: 10,000 of 71,182 bytes (34 tensors and 5 objects)"
    assert len(finding.names) == 39 and "optim.param_groups.1.amsgrad" in finding.names and report.records


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_torn_tail_of_one_file(kind: str, tmp_path: Path) -> None:
    path = getattr(damage, f"save_{kind}")(tmp_path / ("a.pt" if kind == "torch" else "a.safetensors"))
    os.truncate(path, path.stat().st_size - 700)
    report = verify(path)
    assert report.exit_code == 4 and worst(report).file == path.name and not report.format


def test_a_hole_in_the_index(dcp: Path) -> None:
    """A chunk that no rank has written: torch leaves what was in memory there."""

    def cut(metadata: object) -> None:
        kept = metadata.state_dict_metadata["model.embed.weight"].chunks[0]  # type: ignore[attr-defined]
        kept.sizes = torch.Size([60, 33])

    damage.change_index(dcp, cut)
    finding = only(verify(dcp), "damage", "coverage")
    assert finding.tensor == "model.embed.weight" and "not covered exactly" in finding.message


def test_a_range_outside_and_an_overlap(dcp: Path) -> None:
    def move(metadata: object) -> None:
        place = damage.place_of(metadata, "model.steps")
        place.offset += 10_000_000
        other = damage.place_of(metadata, "model.layers.0.bias")
        object.__setattr__(other, "offset", other.offset - 64)

    damage.change_index(dcp, move)
    report = verify(dcp)
    assert only(report, "damage", "range").tensor == "model.steps"
    assert only(report, "damage", "overlap").file == "__0_0.distcp"
    assert [f.gravity for f in report.findings if f.gravity == "suspect"]  # what nothing mentions any more


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_header_that_contradicts_the_index(what: str, tmp_path: Path) -> None:
    """The item of a tensor that the index says is another: equal length, other header."""
    one, two = torch.zeros(16, 8), torch.zeros(16, 8).int() if what == "dtype" else torch.zeros(8, 16)
    here = damage.save_dcp(tmp_path / "here", {"w": one, "z": torch.ones(3)})
    there = damage.save_dcp(tmp_path / "there", {"w": two, "z": torch.ones(3)})
    shutil.copy(there / "__0_0.distcp", here / "__0_0.distcp")
    report = verify(here)
    finding = worst(report)
    assert (finding.gravity, finding.tensor, finding.file) == ("damage", "w", "__0_0.distcp")
    assert str(list(two.shape)) in finding.message and report.exit_code == 4


def test_files_of_another_save(tmp_path: Path) -> None:
    """A shard of safetensors in the place of another."""
    path = tmp_path / "hf"
    shutil.copytree(CHECKPOINTS / "safetensors/indexed" / "ckpt", path)
    shards = sorted(path.glob("*.safetensors"))
    shutil.copy(shards[0], shards[1])
    report = verify(path)
    assert report.exit_code == 4 and shards[1].name in worst(report).message


def test_every_shard_is_looked_at(tmp_path: Path) -> None:
    """Also when the first of them makes it impossible to open the rest."""
    path = tmp_path / "hf"
    shutil.copytree(CHECKPOINTS / "safetensors/indexed" / "ckpt", path)
    shards = sorted(path.glob("*.safetensors"))
    for shard in shards:
        os.truncate(shard, shard.stat().st_size - 1)
    report = verify(path)
    assert {f.file for f in report.findings if f.gravity == "damage"} >= {shard.name for shard in shards}


def test_a_rank_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(CHECKPOINTS / "rank/fsdp2_w4" / "ckpt", path)
    sorted(path.iterdir())[2].unlink()
    report = verify(path)
    assert report.exit_code == 4 and any("2" in f.message and f.kind == "missing" for f in report.findings)


def test_an_index_of_a_rank_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / "dcp/nocollectives_w2" / "ckpt", path)
    (path / "__0.metadata").unlink()
    report = verify(path)
    assert report.exit_code == 4 and "__0.metadata" in {f.file for f in report.findings}


def test_several_at_once(dcp: Path) -> None:
    """Not the first alone, and the gravest first."""
    file = dcp / "__0_0.distcp"
    metadata = pickle.loads((dcp / ".metadata").read_bytes())
    names = ["model.embed.weight", "model.layers.0.weight", "optim.state.layers.0.weight.exp_avg"]
    for name in names:
        place = damage.place_of(metadata, name)
        damage.flip(file, place.offset + place.length // 2)
    (dcp / ".metadata.tmp").write_bytes(b"")
    (dcp / "__7_0.distcp").write_bytes(b"old")
    report = verify(dcp)
    assert {f.tensor for f in report.findings if f.kind == "checksum"} == set(names)
    assert kinds(report) == [("damage", "checksum")] * 3 + [("suspect", "remains"), ("suspect", "stale")]
    assert all(f.nbytes and f.hint for f in report.findings[:3])


# Strays ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "kind", "says"),
    [
        (".metadata.tmp", b"\x80", "remains", "save that stopped"),
        ("__9_0.distcp", b"abc", "stale", "left by a larger one"),
        ("__0_3.distcp", b"abc", "stale", "another save"),
        (".model.pt.partial-4242", b"abc", "remains", "save that stopped"),
    ],
)
def test_what_does_not_belong_there(name: str, data: bytes, kind: str, says: str, dcp: Path) -> None:
    (dcp / name).write_bytes(data)
    report = verify(dcp)
    finding = only(report, "suspect", kind)
    assert finding.file == name and says in finding.message and report.exit_code == 0 and report.whole


def test_our_own_remains_beside_it(dcp: Path) -> None:
    left = dcp.parent / ".ckpt.partial-4242"
    left.mkdir()
    finding = only(verify(dcp), "suspect", "remains")
    assert str(left) in finding.message


def test_a_stale_shard(tmp_path: Path) -> None:
    path = tmp_path / "hf"
    shutil.copytree(CHECKPOINTS / "safetensors/indexed" / "ckpt", path)
    shutil.copy(sorted(path.glob("*.safetensors"))[0], path / "model-00009-of-00009.safetensors")
    assert only(verify(path), "suspect", "stale").file == "model-00009-of-00009.safetensors"


def test_bytes_that_nothing_mentions(dcp: Path) -> None:
    size = (dcp / "__0_0.distcp").stat().st_size
    with (dcp / "__0_0.distcp").open("ab") as stream:
        stream.write(bytes(100))
    finding = only(verify(dcp), "suspect", "gap")
    assert (finding.offset, finding.nbytes) == (size, 100)


def test_a_save_that_did_not_end(dcp: Path) -> None:
    (dcp / ".metadata").rename(dcp / ".metadata.tmp")
    report = verify(dcp)
    assert kinds(report) == [("damage", "unopened"), ("suspect", "remains")] and report.exit_code == 4


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path / "nowhere", tmp_path / "notes.txt", tmp_path):
        with pytest.raises(ReadError):
            verify(path)


# Values ---------------------------------------------------------------------------------------------------------------


def numbers() -> Iterator[tuple[str, torch.Tensor]]:
    wide = torch.tensor([0.0, -0.0, 1.0, -2.5, float("nan"), float("inf"), -float("inf"), float("nan"), 1e-40, 3e-310])
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128):
        yield str(dtype).removeprefix("torch."), wide.double().to(dtype)
    bits = torch.arange(256, dtype=torch.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
        yield name, bits.view(getattr(torch, name))
    for name, word in (("float16", torch.uint16), ("bfloat16", torch.uint16)):
        yield f"every {name}", torch.arange(1 << 16, dtype=torch.int32).to(word).view(getattr(torch, name))


@pytest.mark.parametrize(("name", "tensor"), list(numbers()), ids=[name for name, _ in numbers()])
def test_what_elements_are(name: str, tensor: torch.Tensor) -> None:
    """As torch counts them, for every spelling of small dtypes."""
    import numpy as np

    from ckpttool.catalogue.dtypes import dtype
    from ckpttool.transfer.numbers import kinds_of
    from ckpttool.transfer.read import unsigned

    kind = dtype(str(tensor.dtype))
    bits = np.frombuffer(tensor.view(torch.uint8).numpy().tobytes(), unsigned(kind))
    found = kinds_of(bits, kind)
    plain = tensor if tensor.is_complex() else tensor.double()
    assert found.nans == int(plain.isnan().sum())
    if found.nans:
        assert found.first_nan == int(plain.isnan().nonzero()[0])
    if not tensor.is_complex():
        assert (found.infs, found.zeros) == (int(plain.isinf().sum()), int((plain == 0).sum()))
        if not name.startswith("float8_e8m0"):
            tiny = torch.finfo(tensor.dtype).smallest_normal
            assert found.subnormals == int(((plain != 0) & (plain.abs() < tiny)).sum())


def test_values_are_looked_at_when_asked(tmp_path: Path) -> None:
    weight = torch.randn(300, 40)
    weight[7, 3] = weight[200, 1] = float("nan")
    saved = {"w": weight, "inf": torch.tensor([1.0, float("inf")]), "zero": torch.zeros(5), "ok": torch.ones(5)}
    saved["tiny"] = torch.tensor([1e-40, 1.0])
    for path in (damage.save_dcp(tmp_path / "dcp", saved), damage.save_torch(tmp_path / "a.pt", saved)):
        assert verify(path).findings == []
        report = verify(path, check_values=True)
        assert kinds(report) == [
            ("nan", "nan"), ("suspect", "inf"), ("note", "denormal"), ("note", "zeros"),
        ] and report.exit_code == 1 and report.whole  # fmt: skip
        assert "2 of 12,000 elements are NaN, the first at [7, 3]" in worst(report).message
        assert report.numel == sum(t.numel() for t in saved.values())


# Manifests ------------------------------------------------------------------------------------------------------------


def test_a_manifest_is_not_written_over(dcp: Path, tmp_path: Path) -> None:
    listed = tmp_path / "manifest.json"
    listed.write_text("mine")
    with pytest.raises(OverwriteError):
        verify(dcp, write_manifest=listed)
    assert listed.read_text() == "mine"


def test_none_is_written_of_what_is_damaged(dcp: Path, tmp_path: Path) -> None:
    damage.flip(dcp / "__0_0.distcp", damage.payload_of_dcp(dcp / "__0_0.distcp")[-1].start)
    report = verify(dcp, write_manifest=tmp_path / "manifest.json")
    assert report.exit_code == 4 and report.wrote is None and not (tmp_path / "manifest.json").exists()


def test_torch_is_not_needed(dcp: Path, tmp_path: Path) -> None:
    code = """
import sys
from ckpttool.operations.verify import verify
report = verify(sys.argv[1], check_values=True, write_manifest=sys.argv[2], against=sys.argv[1])
print(report.whole, report.numel > 0, report.hashed_bytes > 0, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(dcp), str(tmp_path / "m.json")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True True True False\n"


class _Store(WrappedStore):
    """Does not bring data files to this machine."""

    def __init__(self, root: Path, error: CkptError) -> None:
        super().__init__(root)
        self._error = error

    def fetch(self, name: str) -> None:
        if name.endswith(".distcp"):
            raise self._error


@pytest.mark.parametrize("error", [StorageError("the cache is full"), ReadError("the cache is another's")])
def test_a_file_that_does_not_arrive_is_not_damaged(dcp: Path, error: CkptError) -> None:
    with pytest.raises(type(error), match="the cache is"):
        verify(_Store(dcp, error).locate())


def test_a_run_is_told_by_the_checkpoint_that_is_taken(tmp_path: Path) -> None:
    """The others are not looked at, and a verdict on the run would say that they were."""
    for step in ("step-500", "step-1000"):
        shutil.copytree(CHECKPOINTS / "dcp" / "hsdp_w4" / "ckpt", tmp_path / "run8" / step)
    (tmp_path / "run8" / "step-500" / "__0_0.distcp").write_bytes(b"")
    report = verify(tmp_path / "run8")
    assert report.message == f"{tmp_path}/run8/step-1000 is whole"
    assert any(finding.message.startswith("using `step-1000`, the newest") for finding in report.findings)
    notes = ckpttool.diff(tmp_path / "run8", tmp_path / "run8" / "step-1000").notes
    assert any("using `step-1000`, the newest complete of the 2 checkpoints in the run" in note for note in notes)


def test_the_safetensors_library_is_asked_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = verify(CHECKPOINTS / "safetensors/indexed/ckpt")
    assert report.whole and report.library == f"safetensors {safetensors.__version__}"
    assert verify(CHECKPOINTS / "dcp/fsdp2_w4/ckpt").library is None
    # It is said of the files that it was asked to open.
    mixed = Path(shutil.copytree(CHECKPOINTS / "safetensors/indexed/ckpt", tmp_path / "mixed"))
    torch.save({"shadow": torch.ones(2)}, mixed / "ema.pt")
    count = len([*mixed.glob("*.safetensors")])
    assert f"opens {count} of {count} safetensors files" in run("verify", str(mixed)).stdout
    shutil.rmtree(mixed)

    def safe_open(path: str, framework: str) -> None:
        raise safetensors.SafetensorError("no such dtype")

    source, copy = CHECKPOINTS / "safetensors/single/ckpt.safetensors", tmp_path / "copy"
    convert(source, copy, to="safetensors")
    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    (finding,) = verify(source).findings
    assert (finding.kind, finding.gravity) == ("refused", "damage") and "no such dtype" in finding.message
    # What it cannot open is not left where it was written, and what was there stays.
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(LossError, match="cannot open what was written: no such dtype"):
        convert(source, copy, to="safetensors", overwrite=True)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before and len([*tmp_path.iterdir()]) == 1
