"""Archives of files: what lies in a tar or a zip is read where it lies, and what cannot be is named.

The archives are written by `tarfile` and `zipfile`, their files by torch, and read by torch once they are unpacked.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import struct
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import bits
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool import formats
from ckpttool.errors import CkptError, CorruptError, ReadError, StorageError
from ckpttool.storage import archives, free_space
from ckpttool.storage.stores import Location, local_path

AGENT = ("policy.pth", "policy.optimizer.pth", "pytorch_variables.pth", "data", "system_info.txt")


def write_agent(folder: Path) -> None:
    """Write the files that Stable-Baselines3 puts into an archive."""
    policy = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.Adam(policy.parameters())
    policy(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    folder.mkdir()
    torch.save(policy.state_dict(), folder / "policy.pth")
    torch.save(optimizer.state_dict(), folder / "policy.optimizer.pth")
    torch.save({"log_ent_coef": torch.ones(1)}, folder / "pytorch_variables.pth")
    (folder / "data").write_text(json.dumps({"gamma": 0.99, "num_timesteps": 100}))
    (folder / "system_info.txt").write_text("- OS: Linux")


def pack(folder: Path, path: Path, method: int = zipfile.ZIP_STORED) -> Path:
    """Pack a folder as Stable-Baselines3 (`.zip`) or NeMo (any other name) does."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", method) as archive:
            for file in sorted(folder.rglob("*")):
                archive.write(file, file.relative_to(folder))
    else:
        with tarfile.open(path, "w:") as archive:
            archive.add(folder, ".")
    return path


def of(tensor: torch.Tensor) -> tuple[str, bytes]:
    """Return what tells a tensor from another one: its dtype and shape, and its bits."""
    return f"{tensor.dtype} {list(tensor.shape)}", bits(tensor).tobytes()


def tensors(path: Path) -> Counter[tuple[str, bytes]]:
    """Return the tensors of a checkpoint."""
    with ckpttool.open(path) as checkpoint:
        return Counter(of(tensor.torch()) for tensor in checkpoint.tensors())


def members(path: Path) -> dict[str, Any]:
    """Return the files in an archive, in their order, as Python's libraries and torch read them."""
    if path.read_bytes()[:2] == b"PK":
        with zipfile.ZipFile(path) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    else:
        with tarfile.open(path) as tar:
            files = {one.name: stream.read() for one in tar if (stream := tar.extractfile(one)) is not None}
    return {name: value(name, data) for name, data in files.items()}


def value(name: str, data: bytes) -> Any:
    """Return what a file of Stable-Baselines3 holds, with tensors as what tells them from others."""

    def plain(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: plain(inner) for key, inner in one.items()}
        return [*map(plain, one)] if isinstance(one, list) else of(one) if isinstance(one, torch.Tensor) else one

    if name.endswith(".pth"):
        return plain(torch.load(io.BytesIO(data)))
    return json.loads(data) if data[:1] == b"{" else data


def saved(folder: Path) -> Counter[tuple[str, bytes]]:
    """Return the tensors in files of torch, as torch reads them."""

    def inside(value: Any) -> list[torch.Tensor]:
        if isinstance(value, dict | list):
            return [one for inner in (value.values() if isinstance(value, dict) else value) for one in inside(inner)]
        return [value] if isinstance(value, torch.Tensor) else []

    return Counter(of(one) for file in folder.rglob("*.pth") for one in inside(torch.load(file)))


@pytest.mark.parametrize("name", ["agent.zip", "agent.nemo", "agent"])
def test_an_archive_is_read_as_its_files(name: str, tmp_path: Path) -> None:
    write_agent(tmp_path / "files")
    path = pack(tmp_path / "files", tmp_path / name)
    assert tensors(path) == saved(tmp_path / "files")
    parts = {entry.part.kind: entry.part.root for entry in ckpttool.inspect(path).tensors}
    assert parts == {"model": ("policy",), "optimizer": ("policy.optimizer",), "other": ()}
    assert ckpttool.diff(path, tmp_path / "files").same
    assert ckpttool.verify(path).whole
    for dst in ("dcp", "one.pt"):
        ckpttool.convert(path, tmp_path / dst, to="dcp" if dst == "dcp" else "torch", check=True)
        assert ckpttool.diff(tmp_path / dst, path).same
    ckpttool.convert(path, tmp_path / "model.safetensors", only=["model"])
    ckpttool.convert(path, f"{tmp_path}/same/", producer="same")
    assert sorted(file.name for file in (tmp_path / "same").iterdir()) == sorted(AGENT)
    assert saved(tmp_path / "same") == saved(tmp_path / "files")


@pytest.mark.parametrize("name", ["agent.zip", "agent.nemo"])
def test_an_archive_is_written_like_another(name: str, tmp_path: Path) -> None:
    """From itself, and from what it was converted to with other values and elements in it."""
    write_agent(tmp_path / "files")
    path = pack(tmp_path / "files", tmp_path / name)
    ckpttool.convert(path, tmp_path / "same", producer="same", check=True)
    assert members(tmp_path / "same") == members(path)
    ckpttool.convert(path, tmp_path / "one.pt", to="torch")
    state = torch.load(tmp_path / "one.pt")
    state["data"]["num_timesteps"] = 200
    state["policy"]["0.weight"] += 1
    state["policy"]["1.bias"] = state["policy"]["1.bias"].bfloat16()
    torch.save(state, tmp_path / "two.pt")
    ckpttool.convert(tmp_path / "two.pt", tmp_path / "new", producer=str(path), check=True)
    new, old = members(tmp_path / "new"), members(path)
    assert [*new] == [*old]
    assert {name.rpartition("/")[2] for name in new if new[name] != old[name]} == {"policy.pth", "data"}
    policy, data = (next(new[name] for name in new if name.endswith(end)) for end in ("policy.pth", "data"))
    assert policy == {key: of(tensor) for key, tensor in state["policy"].items()}
    assert data == {"gamma": 0.99, "num_timesteps": 200}
    state["policy"]["more"] = torch.ones(1)
    state["critic"] = {"w": torch.ones(1)}
    torch.save(state, tmp_path / "two.pt")
    with pytest.raises(CkptError, match=r"critic\.w.*the layout has no file for it|no second one"):
        ckpttool.convert(tmp_path / "two.pt", tmp_path / "more", producer=str(path))
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("sample", ["dcp/fsdp2_w4/ckpt", "safetensors/indexed/ckpt", "rank/fsdp1_w2/ckpt"])
def test_an_archive_of_one_checkpoint_is_written_like_another(sample: str, tmp_path: Path) -> None:
    path = pack(CHECKPOINTS / sample, tmp_path / "a.tar")
    ckpttool.convert(path, tmp_path / "b.tar", producer="same", check=True)
    assert {*members(tmp_path / "b.tar")} >= {*members(path)}
    assert ckpttool.diff(tmp_path / "b.tar", path).same and ckpttool.verify(tmp_path / "b.tar").whole


def test_an_archive_of_which_one_file_is_left_is_compared(tmp_path: Path) -> None:
    """What is left was looked for below no name, as in a folder with a single file."""
    write_agent(tmp_path / "files")
    for name in ("pytorch_variables.pth", "data"):
        (tmp_path / "files" / name).unlink()
    path = pack(tmp_path / "files", tmp_path / "a.tar")
    ckpttool.convert(path, tmp_path / "b.tar", producer="same", drop=["optimizer"], check=True)
    assert members(tmp_path / "b.tar")["./policy.pth"] == members(path)["./policy.pth"]
    assert "./policy.optimizer.pth" not in members(tmp_path / "b.tar")


def test_an_archive_with_a_remnant_of_a_save_in_a_directory(tmp_path: Path) -> None:
    """Its warning, with what it is about, could not be put with those of the others: a bug was reported."""
    write_agent(tmp_path / "files")
    (tmp_path / "files" / "policy.pth.tmp").write_bytes(b"PK")
    (step := tmp_path / "step").mkdir()
    pack(tmp_path / "files", step / "agent.tar")
    torch.save({"obs": torch.arange(5)}, step / "buffer.pt")
    (warning,) = ckpttool.inspect(step).warnings
    assert "policy.pth.tmp" in warning.text
    assert tensors(step) == saved(tmp_path / "files") + Counter([of(torch.arange(5))])


def test_a_zip_archive_with_a_comment_empty_folders_and_large_members(tmp_path: Path) -> None:
    """It was an archive "not of torch.save", to be unpacked; one of torch.save with a comment still is none."""
    write_agent(tmp_path / "files")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.comment = b"a comment " * 1000
        archive.writestr("empty/", b"")
        for file in sorted((tmp_path / "files").iterdir()):
            with archive.open(f"agent/{file.name}", "w", force_zip64=True) as stream:
                stream.write(file.read_bytes())
    assert tensors(tmp_path / "a.zip") == saved(tmp_path / "files")
    ckpttool.convert(tmp_path / "a.zip", tmp_path / "b.zip", producer="same", check=True)
    assert members(tmp_path / "b.zip") == members(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "files" / "policy.pth", "a") as archive:
        archive.comment = b"a comment"
    with pytest.raises(CorruptError, match="bytes after the end record"):
        ckpttool.inspect(tmp_path / "files" / "policy.pth")


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
@pytest.mark.parametrize("sample", ["", "dcp/fsdp2_w4/ckpt"])
def test_what_is_not_read_of_an_archive_is_packed_again(name: str, sample: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    shutil.copytree(CHECKPOINTS / sample, folder) if sample else write_agent(folder)
    for left in (".metadata.tmp", "policy.pth.tmp/data", "__9_0.distcp")[:: 2 if sample else 1]:
        (folder / left).parent.mkdir(exist_ok=True)
        (folder / left).write_bytes(b"PK begun")
    if not sample:
        (folder / "__9_0.distcp").unlink()
    path = pack(folder, tmp_path / name)
    ckpttool.convert(path, tmp_path / f"new-{name}", producer="same", check=True)
    new, old = members(tmp_path / f"new-{name}"), members(path)
    assert new.keys() >= old.keys()
    assert [new[one] for one in old if old[one] == b"PK begun"] == [b"PK begun"] * 2


def test_an_archive_takes_twice_its_size_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself and beside other files: an error before anything is copied, and what a dry run says."""
    write_agent(tmp_path / "files")
    (tmp_path / "files" / "data").write_text(json.dumps({"more": "x" * 50_000}))
    (tmp_path / "files" / "notes.md").write_text("y" * 50_000)
    (tmp_path / "step").mkdir()
    path = pack(tmp_path / "files", tmp_path / "step" / "agent.zip")
    torch.save({"obs": torch.arange(5)}, tmp_path / "step" / "buffer.pt")
    for source, to in ((path, tmp_path / "new.zip"), (tmp_path / "step", tmp_path / "new")):
        needed = ckpttool.convert(source, to, producer="same", dry_run=True).file_bytes
        assert 1.9 * path.stat().st_size < needed < 2.2 * path.stat().st_size
        for free, fits in ((needed - 1, False), (needed, True)):
            monkeypatch.setattr(free_space, "free_bytes", lambda _, free=free: free)
            if fits:
                ckpttool.convert(source, to, producer="same")
                continue
            with monkeypatch.context() as patch, pytest.raises(StorageError, match="kB are free"):
                patch.setattr(archives, "pack", lambda *_: pytest.fail("it was packed"))
                ckpttool.convert(source, to, producer="same")
            assert not to.exists()


def test_an_archive_that_does_not_fit_on_the_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_agent(tmp_path / "files")
    path = pack(tmp_path / "files", tmp_path / "agent.zip")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(StorageError, match="no space left"):
        ckpttool.convert(path, tmp_path / "same.zip", producer="same")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["agent.zip", "files"]


def test_any_checkpoint_may_lie_in_an_archive(tmp_path: Path) -> None:
    for sample in ("dcp/fsdp2_w4/ckpt", "rank/fsdp1_w2/ckpt", "safetensors/indexed/ckpt", "deepspeed/zero3_w3/saved"):
        for suffix in (".zip", ".tar"):
            path = pack(CHECKPOINTS / sample, tmp_path / f"{sample.replace('/', '-')}{suffix}")
            difference = ckpttool.diff(path, CHECKPOINTS / sample)
            assert difference.same, difference.message


def test_the_manifest_in_an_archive_is_compared(tmp_path: Path) -> None:
    ckpttool.convert(CHECKPOINTS / "dcp/fsdp2_w4/ckpt", tmp_path / "dcp", to="dcp")
    assert ckpttool.verify(pack(tmp_path / "dcp", tmp_path / "a.tar")).whole
    (tmp_path / "dcp/__0_0.distcp").unlink()
    with pytest.raises(CkptError, match=r"__0_0\.distcp"):
        ckpttool.convert(pack(tmp_path / "dcp", tmp_path / "b.tar"), tmp_path / "out.pt")
    data = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(data.replace(b'"sha256"', b'"sha255"'))
    assert ckpttool.verify(tmp_path / "a.tar").exit_code != 0


@pytest.mark.parametrize("name", AGENT)
def test_the_checksums_of_a_zip_archive_are_compared(name: str, tmp_path: Path) -> None:
    write_agent(tmp_path / "agent")
    path = pack(tmp_path / "agent", tmp_path / "agent.zip")
    data = bytearray(path.read_bytes())
    with closing(archives.ArchiveStore(local_path(str(path)))) as store:
        assert ckpttool.verify(path).whole
        members = {member.name: member for member in archives.members(local_path(str(path)))}
        assert store.crcs() == {info.filename: info.CRC for info in zipfile.ZipFile(path).infolist()}
    member = members[name]
    for at in range(member.nbytes - 1, 0, -member.nbytes // 3 or -1):
        data[member.offset + at] ^= 1
        path.write_bytes(data)
        data[member.offset + at] ^= 1
        report = ckpttool.verify(path)
        assert report.exit_code != 0 and name in str(report.findings), at
        if name.endswith(".pth"):
            with pytest.raises(CkptError, match=re.escape(name)):
                ckpttool.convert(path, tmp_path / f"{at}.pt")


def test_a_file_in_two_archives_is_named_with_its_archive(tmp_path: Path) -> None:
    """Once, and not again where another finding says it; of an earlier step of a run as a remark."""
    write_agent(tmp_path / "agent")
    (tmp_path / "two").mkdir()
    (tmp_path / "run").mkdir()
    for name in ("a.zip", "b.zip"):
        data = pack(tmp_path / "agent", tmp_path / "two" / name).read_bytes()
        (tmp_path / "two" / name).write_bytes(data.replace(b"- OS: Linux", b"- OS: linux"))
    found = [one.message for one in ckpttool.verify(tmp_path / "two").findings if one.gravity == "damage"]
    assert len(found) == 2 and all(f"{n}.zip/system_info.txt" in text for n, text in zip("ab", found, strict=True))
    for step in (1, 2):
        torch.save({"model": {"w": torch.ones(8)}, "step": step}, (tmp_path / "run" / f"step_{step}.pt"))
    path = pack(tmp_path / "run", tmp_path / "run.zip")
    data = path.read_bytes()
    first, last = (one.offset + one.nbytes // 2 for one in archives.members(local_path(str(path))))
    for at, gravity in ((first, "note"), (last, "damage")):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert gravity in {one.gravity for one in ckpttool.verify(path).findings if "step_" in one.message}


def test_archives_in_a_directory(tmp_path: Path) -> None:
    """A run of them, and one beside other files."""
    write_agent(tmp_path / "files")
    (run := tmp_path / "run").mkdir()
    for step in (900, 1000):
        pack(tmp_path / "files", run / f"rl_model_{step}_steps.zip")
    facts = ckpttool.inspect(run).facts
    assert (facts["step"], [one["name"] for one in facts["run"] if one["taken"]]) == (1000, ["rl_model_1000_steps.zip"])
    assert [one["step"] for one in facts["run"]] == [900, 1000]
    (step := tmp_path / "step").mkdir()
    pack(tmp_path / "files", step / "agent.zip")
    torch.save({"obs": torch.arange(5)}, step / "buffer.pt")
    whole = saved(tmp_path / "files") + Counter([of(torch.arange(5))])
    assert tensors(step) == whole
    ckpttool.convert(step, tmp_path / "dcp", to="dcp")
    assert tensors(tmp_path / "dcp") == whole
    for name, source in (("same", step), ("back", tmp_path / "dcp")):
        ckpttool.convert(source, tmp_path / name, producer=str(step), check=True)
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == ["agent.zip", "buffer.pt"]
        assert members(tmp_path / name / "agent.zip") == members(step / "agent.zip")
    (steps := tmp_path / "steps").mkdir()
    for number in (1, 2):
        torch.save({"model": {"w": torch.ones(8)}, "step": number}, steps / f"step_{number}.pt")
    with pytest.raises(CkptError, match=r"does not write `.*run.tar`, an archive of a run"):
        ckpttool.convert(pack(steps, tmp_path / "run.tar"), tmp_path / "one", producer="same")
    assert not (tmp_path / "one").exists()


def with_a_link(archive: tarfile.TarFile) -> None:
    link = tarfile.TarInfo("latest.pt")
    link.type, link.linkname = tarfile.SYMTYPE, "model.pt"
    archive.addfile(link)


def with_a_name_outside(archive: tarfile.TarFile) -> None:
    archive.addfile(tarfile.TarInfo("../outside.pt"))


def with_one_twice(archive: tarfile.TarFile) -> None:
    archive.addfile(tarfile.TarInfo("model.pt"))


def with_a_folder_of_that_name(archive: tarfile.TarFile) -> None:
    archive.addfile(tarfile.TarInfo("model.pt/data"))


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (with_a_link, "`{}/latest.pt`: a link, a device or a sparse file in an archive"),
        (with_a_name_outside, "`{}`: the index names the file `../outside.pt`, which is outside the checkpoint"),
        (with_one_twice, "`{}/model.pt`: in the archive twice"),
        (with_a_folder_of_that_name, "`{}/model.pt`: a file and a folder in the archive"),
    ],
)
def test_what_is_no_file_of_its_own_is_named(add: Callable[[tarfile.TarFile], None], said: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "model.pt", "model.pt")
        add(archive)
    with pytest.raises(CkptError) as caught:
        ckpttool.convert(path, tmp_path / "out.pt")
    assert said.format(path) in caught.value.message
    assert not (tmp_path / "out.pt").exists()


def test_what_is_compressed_or_encrypted_is_named(tmp_path: Path) -> None:
    write_agent(tmp_path / "files")
    path = pack(tmp_path / "files", tmp_path / "a.zip", zipfile.ZIP_DEFLATED)
    with pytest.raises(ReadError, match="compressed in an archive") as caught:
        ckpttool.inspect(path)
    assert caught.value.hint == "unpack the archive, and name the directory that it is unpacked to"
    data = bytearray(pack(tmp_path / "files", tmp_path / "b.zip").read_bytes())
    for at in (place for place in range(len(data)) if data[place : place + 4] == b"PK\1\2"):
        data[at + 8] |= 1
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(ReadError, match="encrypted in an archive"):
        ckpttool.inspect(tmp_path / "b.zip")


@pytest.mark.parametrize("name", ["agent.zip", "agent.nemo"])
def test_an_archive_that_was_cut(name: str, tmp_path: Path) -> None:
    write_agent(tmp_path / "files")
    data = pack(tmp_path / "files", tmp_path / name).read_bytes()
    whole = saved(tmp_path / "files")
    for part in range(1, 20):
        (tmp_path / name).write_bytes(data[: len(data) * part // 20])
        try:
            found = tensors(tmp_path / name)
        except CkptError:
            continue
        assert found == whole, part  # of a tar, the zeros at its end may be missing


def test_a_tar_of_which_headers_are_lost(tmp_path: Path) -> None:
    """`tarfile` ends its list there without an error: where a copy ended, a header was damaged, or archives joined."""
    write_agent(tmp_path / "files")
    path = tmp_path / "agent.nemo"
    data = pack(tmp_path / "files", path).read_bytes()
    with tarfile.open(path) as archive:
        starts = [member.offset for member in archive.getmembers()[1:]]
    for at in starts:
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for changed in (data[:at], data[: at + 100], damaged, data[:at] + bytes(512) + data[at + 512 :]):
            path.write_bytes(changed)
            with pytest.raises(CorruptError, match=r"without an empty block|are in no file"):
                ckpttool.inspect(path)
    path.write_bytes(data + data)
    with pytest.raises(CorruptError, match="are in no file"):
        ckpttool.inspect(path)
    path.write_bytes(data.rstrip(b"\0") + bytes(2048))  # fewer zeros than `tarfile` writes
    assert tensors(path) == saved(tmp_path / "files")


def without(row: int) -> Callable[[Path], None]:
    """Return what removes a row from the directory of a zip archive, and leaves its file where it lies."""

    def remove(path: Path) -> None:
        with zipfile.ZipFile(path, "a") as archive:
            del archive.filelist[row]
            archive.comment = b""

    return remove


def with_its_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2") + 6] = 99
    path.write_bytes(data)


def with_its_size(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\1\2") + 24] ^= 1
    path.write_bytes(data)


def with_its_count(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\5\6") + 10] -= 1
    path.write_bytes(data)


def with_something_between(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.fp.seek(archive.start_dir)  # type: ignore[union-attr] # it is open
        archive.fp.write(b"weights" * 9)  # type: ignore[union-attr]
        archive.start_dir += 63
        archive.writestr("last", b"")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without(0), "bytes from byte 0 on are in no file"),
        (without(2), "are in no file"),
        (without(-1), "are in no file"),
        (with_something_between, "63 bytes from byte .* are in no file"),
        (with_its_version, "zip file version"),
        (with_its_size, "a member of .* bytes says"),
        (with_its_count, "no record of 5 files ends it"),
    ],
)
def test_a_zip_whose_directory_is_not_of_all(change: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    write_agent(tmp_path / "files")
    path = pack(tmp_path / "files", tmp_path / "agent.zip")
    change(path)
    with pytest.raises(CorruptError, match=said):
        ckpttool.inspect(path)


def test_two_zips_in_one_file(tmp_path: Path) -> None:
    """Readers of zip archives list the second; and bytes after the end are of nothing."""
    write_agent(tmp_path / "files")
    data = pack(tmp_path / "files", tmp_path / "agent.zip").read_bytes()
    for other in (data, b"more"):
        (tmp_path / "agent.zip").write_bytes(data + other)
        with pytest.raises(CkptError, match="zip archive"):
            ckpttool.inspect(tmp_path / "agent.zip")


class Unseekable(io.BytesIO):
    """A pipe, into which `zipfile` writes what it learns of a file behind it."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise OSError


def test_a_zip_with_descriptors(tmp_path: Path) -> None:
    write_agent(tmp_path / "files")
    stream = Unseekable()
    with zipfile.ZipFile(stream, "w") as archive:
        for file in sorted((tmp_path / "files").iterdir()):
            archive.write(file, file.name)
    (tmp_path / "agent.zip").write_bytes(stream.getvalue())
    assert tensors(tmp_path / "agent.zip") == saved(tmp_path / "files")


def test_headers_that_disagree(tmp_path: Path) -> None:
    """A zip whose directory and whose local header have other names, and one whose directory leads elsewhere."""
    write_agent(tmp_path / "files")
    data = pack(tmp_path / "files", tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(data.replace(b"policy.pth", b"Policy.pth", 1))
    with pytest.raises(CorruptError, match="cannot be listed"):
        ckpttool.inspect(tmp_path / "a.zip")
    at = data.rindex(b"PK\1\2") + 42
    (tmp_path / "a.zip").write_bytes(data[:at] + struct.pack("<L", 10) + data[at + 4 :])
    with pytest.raises(CorruptError, match="cannot be listed"):
        ckpttool.inspect(tmp_path / "a.zip")


def test_an_archive_that_claims_much(tmp_path: Path) -> None:
    """A header of 4 GiB in a file with a hole, more files than a run writes, and an archive in an archive."""
    header = tarfile.TarInfo("long")
    header.type, header.size = tarfile.XHDTYPE, 4 << 30
    path = tmp_path / "a.tar"
    path.write_bytes(header.tobuf())
    with open(path, "r+b") as stream:
        stream.truncate(5 << 30)
    sizes, read = list[int](), Location.read
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CorruptError, match="a header of 4294967296 bytes"):
        patch.setattr(Location, "read", lambda self, at=0, nbytes=None: sizes.append(nbytes) or read(self, at, nbytes))
        ckpttool.inspect(path)
    assert max(sizes) <= 64 << 20
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(20):
            archive.writestr(f"{number}/" + "a/" * 1000 + "b", b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archives, "_MOST_FILES", 5_000)
        with pytest.raises(ReadError, match="an archive of more than 5,000 folders"):
            ckpttool.inspect(tmp_path / "many.zip")
    torch.save({"w": torch.ones(2)}, inner := io.BytesIO())
    for _ in range(2):
        with zipfile.ZipFile(outer := io.BytesIO(), "w") as archive:
            archive.writestr("inner.zip" if outer is not inner else "model.pt", inner.getvalue())
        inner = outer
    (tmp_path / "nested.zip").write_bytes(inner.getvalue())
    with pytest.raises(CkptError, match=r"nested.zip/inner.zip`: a zip archive"):
        ckpttool.inspect(tmp_path / "nested.zip")


def test_an_archive_that_is_written_again(tmp_path: Path) -> None:
    write_agent(tmp_path / "files")
    path = pack(tmp_path / "files", tmp_path / "a.zip")
    root = formats.archives.inside(local_path(str(path)))
    with closing(root.store), open(path, "r+b") as stream:
        assert (root / "data").read(0, 8) == b'{"gamma"'
        stream.write(b"\0")
        stream.flush()
        with pytest.raises(ReadError, match="changed while it was being read"):
            (root / "data").read(0, 8)


def test_a_tar_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is one that torch wrote before 1.0 is seen in its first member: a tar may have thousands."""
    folder = tmp_path / "step"
    folder.mkdir()
    for number in range(8):
        torch.save({f"layer.{number}.weight": torch.ones(2)}, folder / f"part_{number}.pt")
    packed, listed, members = pack(folder, tmp_path / "step.tar"), [], archives.members

    def counted(archive: Location) -> Any:
        for member in members(archive):
            listed.append(member.name)
            yield member

    monkeypatch.setattr(archives, "members", counted)
    assert len(ckpttool.inspect(packed).tensors) == 8
    assert len(listed) == 8 + 1
