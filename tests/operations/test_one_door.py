"""From a catalogue to an array there is one door: what is damaged, or changed meanwhile, is an error and never a value.

The true values are those that torch loads from the undamaged files.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.operations.open import LazyTensor
from ckpttool.producers.open import open_source
from ckpttool.storage.files import Pool

STATE = {f"layers.{i}": torch.arange(4096.0) + 10_000 * i for i in range(4)}
OTHER = {name: tensor + 0.5 for name, tensor in STATE.items()}

WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "torch": lambda state, path: torch.save(state, path),
    "safetensors": lambda state, path: safetensors.torch.save_file(state, path),
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
}


def data_of(path: Path) -> Path:
    return path / "__0_0.distcp" if path.is_dir() else path


def rewrite(path: Path, other: Path) -> None:
    """Write other bytes of the same length over a file, and put its modification time back, as `rsync --inplace -t`."""
    status, data = path.stat(), other.read_bytes()
    assert len(data) == status.st_size
    with path.open("r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def saved(tmp_path: Path, format: str) -> tuple[Path, Path]:
    paths = tmp_path / f"{format}.a", tmp_path / f"{format}.b"
    for state, path in zip((STATE, OTHER), paths, strict=True):
        WRITERS[format](state, path)
    return paths


@pytest.fixture
def rank_files(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / "rank/fsdp1_w2/ckpt", tmp_path / "ranks"))


def values(path: Path) -> dict[str, Any]:
    """Each tensor's value, or the error of the library where there is none."""
    found: dict[str, Any] = {}
    with ckpttool.open(path) as ckpt:
        for tensor in ckpt.catalogue.tensors:
            try:
                found[tensor.name] = ckpt[tensor.name].torch().clone()
            except CkptError as error:
                found[tensor.name] = error
    return found


def test_a_missing_rank_is_no_memory_of_others(rank_files: Path) -> None:
    true = values(rank_files)
    assert true and not any(isinstance(value, CkptError) for value in true.values())
    files = sorted(file for file in rank_files.iterdir() if "1" in file.name)
    files[-1].unlink()
    with ckpttool.open(rank_files) as ckpt:
        assert ckpt.faults and ckpt.warnings and "fault" in repr(ckpt)
        for whole in (ckpt.state_dict, ckpt.objects):
            with pytest.raises(CorruptError):
                whole()
    for name, value in values(rank_files).items():
        assert isinstance(value, CorruptError) or value.equal(true[name]), name


@pytest.mark.parametrize("sample", ["rank/fsdp2_w2", "rank/verl_fsdp1_w2", "rank/fsdp1_full_optim_w2"])
def test_names_that_only_a_damaged_file_of_a_rank_has(sample: str, tmp_path: Path) -> None:
    """Who looks for the names of a model would find none, and take it for empty."""
    path = Path(shutil.copytree(CHECKPOINTS / sample / "ckpt", tmp_path / "ckpt"))
    with ckpttool.open(path) as ckpt:
        before = set(ckpt)
    for file in (file for file in sorted(path.iterdir()) if "rank" in file.name and "0.pt" in file.name):
        whole = file.read_bytes()
        file.write_bytes(whole[:-100])
        with ckpttool.open(path) as ckpt:
            lost = sorted(before - {tensor.name for tensor in ckpt.catalogue.tensors})
            asked: list[Callable[[], object]] = [
                lambda: list(ckpt),
                lambda: len(ckpt),
                lambda: list(ckpt.tensors("model.*")),
                ckpt.objects,
                ckpt.frame,
                ckpt.state_dict,
                *(partial(ckpt.__getitem__, name) for name in lost),
            ]
            for ask in asked:
                with pytest.raises(CorruptError):
                    ask().torch()  # type: ignore[attr-defined] # there is none
        file.write_bytes(whole)


@pytest.mark.parametrize("sample", ["rank/dtensor_torch212_w2", "rank/fsdp2_w2", "torch/storages"])
def test_a_flipped_bit_in_a_storage_that_is_larger_than_its_tensor(sample: str, tmp_path: Path) -> None:
    """Shards of the last rank are padded, and tensors lie in the storage of another."""
    path = Path(shutil.copytree(CHECKPOINTS / sample, tmp_path / "sample"))
    true, noticed = values(next(path.glob("ckpt*"))), set()
    for file in (file for file in path.rglob("*.pt") if file.name != "reference.pt"):
        data = file.read_bytes()
        with zipfile.ZipFile(file) as archive:
            records = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size]
        for part in (0.0, 0.5, 1.0):
            flipped = bytearray(data)
            for info in records:
                start = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
                flipped[start + int(part * (info.file_size - 1))] ^= 16
            file.write_bytes(flipped)
            found = values(next(path.glob("ckpt*")))
            noticed |= {name for name, value in found.items() if isinstance(value, CorruptError)}
            for name, value in found.items():
                assert isinstance(value, CorruptError) or value.equal(true[name]), (file.name, part, name)
        file.write_bytes(data)
    assert len(noticed) > len(true) / 2


def test_a_flipped_bit_in_a_storage_of_all_tensors(tmp_path: Path) -> None:
    """One of many is not worth reading all of it; all of them are."""
    flat, path = torch.arange(1 << 20, dtype=torch.float32), tmp_path / "flat.pt"
    torch.save({f"w{i}": flat[i << 10 : (i + 1) << 10] for i in range(1 << 10)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(flat[5 << 10 : (5 << 10) + 64].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with ckpttool.open(path) as ckpt:
        assert ckpt["w6"].torch().equal(flat[6 << 10 : 7 << 10])
        with pytest.raises(CorruptError, match="have CRC"):
            ckpt["w6"].torch(check=True)
        with pytest.raises(CorruptError, match="have CRC"):
            ckpt.state_dict()


def test_a_hole_in_an_index(tmp_path: Path) -> None:
    """DCP's index without one of the chunks of a tensor, with torch's own classes."""
    path = Path(shutil.copytree(CHECKPOINTS / "dcp/fsdp2_w4/ckpt", tmp_path / "ckpt"))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    name = next(n for n, entry in metadata.state_dict_metadata.items() if len(getattr(entry, "chunks", ())) > 2)
    lost = metadata.state_dict_metadata[name].chunks.pop(1)
    keys = [key for key in metadata.storage_data if key.fqn == name and key.offset == lost.offsets]
    del metadata.storage_data[keys[0]]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with ckpttool.open(path) as ckpt:
        tensor = ckpt[name]
        inside = tuple(slice(o, o + s) for o, s in zip(lost.offsets, lost.sizes, strict=True))
        for part in (tensor, tensor[inside]):
            with pytest.raises(CorruptError, match=r"is not covered exactly"):
                part.torch()
        with pytest.raises(CorruptError, match=r"is not covered exactly"):
            ckpt.state_dict()


@pytest.mark.parametrize("format", WRITERS)
def test_what_changes_after_it_was_opened(tmp_path: Path, format: str) -> None:
    path, other = saved(tmp_path, format)
    with ckpttool.open(path) as ckpt:
        tensors = {name: ckpt[name] for name in STATE}
        assert tensors["layers.0"].torch().equal(STATE["layers.0"])
        rewrite(data_of(path), data_of(other))
        for tensor in tensors.values():
            with pytest.raises(ReadError, match="changed while it was being read"):
                tensor.torch()
            with pytest.raises(ReadError, match="changed while it was being read"):
                tensor[:10].torch(check=False)
        with pytest.raises(ReadError, match="changed while it was being read"):
            ckpt.state_dict()


@pytest.mark.parametrize("format", WRITERS)
def test_a_file_in_place_of_another(tmp_path: Path, format: str) -> None:
    """A file that is not open yet is another one when it is."""
    path, other = saved(tmp_path, format)
    with ckpttool.open(path) as ckpt:
        shutil.copystat(data_of(path), data_of(other))
        os.replace(data_of(other), data_of(path))
        assert isinstance(ckpt["layers.1"], LazyTensor)
        if format == "dcp":
            with pytest.raises(ReadError, match="changed while it was being read"):
                ckpt["layers.1"].torch()


@pytest.mark.parametrize("format", WRITERS)
def test_links_and_permissions_are_no_change(tmp_path: Path, format: str) -> None:
    path, other = saved(tmp_path, format)
    with ckpttool.open(path) as ckpt:
        assert ckpt["layers.0"].torch().equal(STATE["layers.0"])
        os.link(data_of(path), tmp_path / "link")
        data_of(path).chmod(0o640)
        assert ckpt["layers.1"].torch().equal(STATE["layers.1"])
        rewrite(data_of(path), data_of(other))  # which is told all the same
        with pytest.raises(ReadError, match="changed while it was being read"):
            ckpt["layers.2"].torch()


READERS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda path, out: ckpttool.load(path, torch.nn.ParameterDict(), strict=False),
    "convert": lambda path, out: ckpttool.convert(path, out, to="torch"),
    "stats": lambda path, out: ckpttool.stats(path, cache=False),
    "diff": lambda path, out: ckpttool.diff(path, path),
    "show": lambda path, out: ckpttool.show(path, "layers.3"),
    "verify": lambda path, out: ckpttool.verify(path),
    "state_dict": lambda path, out: ckpttool.open(path).state_dict(),
}


@pytest.mark.parametrize("name", READERS)
def test_what_changes_between_the_index_and_the_data(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reader of values, with a source whose file is rewritten as soon as it is open."""
    path, other = saved(tmp_path, "dcp")

    def opened(*args: Any, **options: Any) -> Any:
        source = open_source(*args, **options)
        if other.exists():
            rewrite(data_of(path), data_of(other))
            shutil.rmtree(other)
        return source

    for module in ("producers.open", "operations.open", "operations.show", "operations.write", "training.load"):
        monkeypatch.setattr(f"ckpttool.{module}.open_source", opened)
    if name == "load":
        module = torch.nn.Module()
        for key, value in STATE.items():
            module.register_buffer(key.replace(".", "_"), torch.zeros_like(value))
        state = {key.replace(".", "_"): value for key, value in STATE.items()}
        shutil.rmtree(path)
        WRITERS["dcp"](state, path)
        shutil.rmtree(other)
        WRITERS["dcp"]({key.replace(".", "_"): value for key, value in OTHER.items()}, other)
        with pytest.raises(ReadError, match="changed while it was being read"):
            ckpttool.load(path, module)
        return
    with pytest.raises(ReadError, match="changed while it was being read"):
        READERS[name](path, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_part_that_cannot_be_opened_is_not_left_out(tmp_path: Path) -> None:
    path = Path(shutil.copytree(CHECKPOINTS / "run/trainer/ckpt/checkpoint-4", tmp_path / "checkpoint-4"))
    with ckpttool.open(path) as ckpt:
        names = list(ckpt)
        part = next(name for name in names if name.startswith("rng."))
    (path / "rng_state.pth").write_bytes(b"\x80\x02garbage")
    with ckpttool.open(path) as ckpt:
        assert "rng_state.pth" in "".join(ckpt.warnings) and len(ckpt.faults) == 1
        asked: list[Callable[[], object]] = [
            lambda: ckpt[part],
            lambda: ckpt["rng"],
            lambda: list(ckpt),
            lambda: len(ckpt),
            lambda: list(ckpt.tensors()),
            ckpt.objects,
            ckpt.frame,
            ckpt.state_dict,
        ]
        for ask in asked:
            with pytest.raises(CkptError, match=r"rng_state\.pth"):
                ask()
        model = ckpt["model"].state_dict()
        assert model and all(isinstance(value, torch.Tensor) for value in model.values())
        with pytest.raises(KeyError):
            ckpt["nothing"]


def test_a_gate_reads_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    safetensors.torch.save_file({"w": torch.ones(4096)}, path)
    safetensors.torch.save_file({"w": torch.full((4096,), float("nan"))}, other)
    assert not ckpttool.stats(path).cached and ckpttool.stats(path).cached
    assert not ckpttool.stats(path, fail_on="nan > 0").cached
    rewrite(path, other)
    again = ckpttool.stats(path)
    assert not again.cached and again.tensors[0].statistics.nans == 4096
    assert ckpttool.stats(path, fail_on="nan > 0").failed == ["w"]


MOMENTS = 16


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("name", ["convert", "state_dict", "diff"])
def test_what_changes_at_any_read(tmp_path: Path, name: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is rewritten before the first read of it, before the second, and so on: what comes of it is an error, or
    all of one of the two."""
    path, other = saved(tmp_path, format)
    first, second = (data_of(one).read_bytes() for one in (path, other))
    read_into, reads, rewritten = Pool.read_into, 0, 0

    def read(self: Pool, location: str, offset: int, buffer: memoryview) -> None:
        nonlocal reads
        if str(location).endswith(data_of(path).name):
            if reads == moment:
                rewrite(data_of(path), data_of(other))
            reads += 1
        read_into(self, location, offset, buffer)

    monkeypatch.setattr(Pool, "read_into", read)
    for moment in range(MOMENTS):
        data_of(path).write_bytes(first)
        reads, out = 0, tmp_path / f"{moment}.pt"
        try:
            result = READERS[name](path, out)
        except ReadError as error:
            assert "changed while it was being read" in error.message and not out.exists()
            rewritten += 1
            continue
        assert name != "diff" or result.same  # type: ignore[attr-defined]
        found = torch.load(out) if name == "convert" else result
        if name != "diff":
            assert any(
                all(found[key].equal(tensor) for key, tensor in state.items())  # type: ignore[index]
                for state in (STATE, OTHER)
            )
    assert rewritten and data_of(other).read_bytes() == second
