"""What is damaged, cut, lying or no checkpoint at all: one clear error with its exit code, no DST, SRC as it was."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from support.faults import (
    CORRUPT,
    FORMATS,
    READ,
    STORAGE,
    as_nobody,
    check_words,
    model,
    out_folder,
    refused,
    run,
    save,
    save_dcp,
    save_safetensors,
    save_torch,
)  # fmt: skip
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import ReadError

# Not a checkpoint -----------------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\x06\0\0\0\x1f\x15\xc4\x89\0\0\0\0IEND\xaeB`\x82"
HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>Entry not found</body></html>\n"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2\n"
)

OTHERS: dict[str, bytes] = {
    "a picture": PNG,
    "an error page": HTML,
    "a gzip": gzip.compress(b"weights" * 1000, mtime=0),
    "a pointer of git LFS": POINTER,
    "text": b"see the other directory\n",
    "JSON": b'{"error": "not found"}',
    "zeros": bytes(1 << 16),
    "ones": b"\xff" * (1 << 16),
    "one byte": b"\x80",
    "a magic and no more": b"PK\3\4",
    "an ELF program": b"\x7fELF" + bytes(60),
    "a pickle that was cut": pickle.dumps({"a": 1})[:-2],
    "a PDF": b"%PDF-1.4\n" + bytes(100),
    # ModelProto of onnx.proto: ir_version (field 1) 10, producer_name (field 2), graph (field 7).
    "an ONNX model": b"\x08\x0a\x12\x07pytorch\x1a\x032.9\x3a\x02\x12\0",
    # The footer of a LevelDB table ends with its magic number, 0xdb4775248b80fb57.
    "an index of TensorFlow": bytes(range(1, 41)) + (0xDB4775248B80FB57).to_bytes(8, "little"),
    "bytes of nothing known": bytes(range(200, 256)),
}


NAMED = {
    "a picture": "picture", "an error page": "web page", "a gzip": "gzip", "a pointer of git LFS": "git lfs pull",
    "zeros": "zeros", "JSON": "JSON", "a pickle that was cut": "pickle", "an ONNX model": "ONNX",
    "an index of TensorFlow": "TensorFlow", "text": "a text that begins `see the other directory`",
    "bytes of nothing known": "56 B that begin with c8 c9 ca",
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".safetensors", ".distcp", ""])
@pytest.mark.parametrize("what", OTHERS)
def test_another_kind_of_file(what: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(OTHERS[what])
    said = refused(path, [READ, CORRUPT], path)
    if suffix == ".pt" and what in NAMED:
        assert NAMED[what] in said


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model.bin", "__0_0.distcp"])
def test_an_empty_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.touch()
    assert "empty" in refused(path, [READ, CORRUPT], path)


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("readme.txt", "nothing here")
    refused(path, [READ, CORRUPT], path)


def test_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    refused(tmp_path / "run", READ, tmp_path / "run", "empty")


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "sub").mkdir(parents=True)
    (folder / "notes.txt").write_text("x")
    (folder / "log.csv").write_text("x")
    assert "..." not in refused(folder, READ, folder, "log.csv", "notes.txt", "sub").partition("\n")[0]


def test_a_directory_one_level_too_high(tmp_path: Path) -> None:
    """Checkpoints are inside, and no step and no word says which is the newest."""
    for name in ("best_loss", "best_acc"):
        save_dcp(tmp_path / "run" / name)
    refused(tmp_path / "run", READ, tmp_path / "run", "best_loss")


def test_a_dcp_directory_without_its_index(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "ckpt")
    (path / ".metadata").unlink()
    refused(path, [READ, CORRUPT], path, ".metadata")
    (path / ".metadata.tmp").write_bytes(b"\x80\x04")
    refused(path, [READ, CORRUPT], path, ".metadata")


def test_a_data_file_of_a_dcp_directory(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "ckpt") / "__0_0.distcp"
    refused(path, [READ, CORRUPT], path, "directory")


@pytest.mark.parametrize("name", [".metadata"])
def test_the_index_of_a_directory_named_itself(name: str, tmp_path: Path) -> None:
    """Either it is taken for the directory that it is in, or the error says to name that."""
    path = save_dcp(tmp_path / "ckpt") / name
    done = run("inspect", path)
    if done.code:
        check_words(done, READ, path, "directory")


# Nothing to read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["nowhere", "nowhere/model.pt", "model.safetensors", "no\nwhere", "x" * 300, "\u202ex"]
)
def test_no_such_path(name: str, tmp_path: Path) -> None:
    refused(tmp_path / name, READ)


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    refused(tmp_path / "model.pt" / "x", READ, "model.pt/x")


def test_links(tmp_path: Path) -> None:
    dangling, round_and_round = tmp_path / "model.pt", tmp_path / "loop"
    dangling.symlink_to("nowhere.pt")
    round_and_round.symlink_to("loop")
    refused(dangling, READ, dangling)
    refused(round_and_round, READ, round_and_round)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ""])
def test_a_pipe(suffix: str, tmp_path: Path) -> None:
    """Opening one would wait for ever."""
    path = tmp_path / f"model{suffix}"
    os.mkfifo(path)
    refused(path, READ, path)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_pipe_in_a_dcp_directory(name: str, tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "ckpt")
    (path / name).unlink()
    os.mkfifo(path / name)
    refused(path, [READ, CORRUPT], name, look=name == ".metadata")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_a_safetensors_directory(name: str, tmp_path: Path) -> None:
    path = shutil.copytree(CHECKPOINTS / "safetensors/indexed" / "ckpt", tmp_path / "ckpt")
    there = path / name if (path / name).exists() else sorted(path.glob("*.safetensors"))[0]
    there.unlink()
    os.mkfifo(there)
    refused(path, [READ, CORRUPT], there.name)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "/proc/self/mem"])
def test_a_device(device: str) -> None:
    if os.path.exists(device):
        with out_folder() as folder:
            # What the kernel lets itself be read for says so itself.
            check_words(run("inspect", device), [READ, CORRUPT, STORAGE], device)
            check_words(run("convert", device, folder / "x.pt"), [READ, CORRUPT, STORAGE], device)
            assert not os.listdir(folder)


def test_a_socket(tmp_path: Path) -> None:
    import socket

    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        refused(path, READ, path)


def test_an_empty_argument(tmp_path: Path) -> None:
    check_words(run("inspect", ""), [READ, 2])
    check_words(run("convert", "", tmp_path / "x.pt"), [READ, 2])
    check_words(run("convert", save_torch(tmp_path / "a.pt"), ""), [2], "`DST` is empty")
    check_words(run("convert", tmp_path / "a.pt", "", "--to", "torch"), [2])


def test_a_name_with_a_zero(tmp_path: Path) -> None:
    """No shell can say it, but a program can."""
    with pytest.raises(ReadError):
        ckpttool.open("a\0b")
    with pytest.raises(ReadError):
        ckpttool.inspect("a\0b")


# No permission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_no_permission_to_read(kind: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ckpt-"))
    try:
        folder.chmod(0o777)
        src = save(kind, folder)
        locked = src if src.is_file() else src / ".metadata"
        locked.chmod(0)
        for words in (("inspect", src), ("convert", src, folder / "dst.pt")):
            check_words(as_nobody(*words), READ, locked, "permission denied")
        if src.is_dir():
            locked.chmod(0o644)
            (src / "__0_0.distcp").chmod(0)
            check_words(as_nobody("convert", src, folder / "dst.pt"), READ, "__0_0.distcp", "permission denied")
            src.chmod(0)
            check_words(as_nobody("inspect", src), READ, src, "permission denied")
            src.chmod(0o755)
        assert sorted(p.name for p in folder.iterdir()) == [src.name]
    finally:
        shutil.rmtree(folder)


def test_a_file_that_may_not_be_read_is_no_damage() -> None:
    """One shard of DCP: `verify` said damaged three times, and `inspect` ended with 0 and other facts."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-"))
    try:
        folder.chmod(0o777)
        src = shutil.copytree(CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt", folder / "dcp")
        files = shutil.copytree(CHECKPOINTS / "run/accelerate_fsdp2_sharded_w2" / "ckpt", folder / "files")
        (src / "__1_0.distcp").chmod(0)  # has objects
        (files / "scheduler.bin").chmod(0)
        for words in (("inspect", src), ("verify", src)):
            check_words(as_nobody(*words), READ, "__1_0.distcp", "permission denied")
        for words in (("inspect", files), ("verify", files)):
            check_words(as_nobody(*words), READ, "scheduler.bin", "permission denied")
        (src / "__1_0.distcp").chmod(0o644)
        (src / "__0_0.distcp").chmod(0)  # has tensors only
        check_words(as_nobody("verify", src), READ, "__0_0.distcp", "permission denied")
    finally:
        shutil.rmtree(folder)


# Cut ------------------------------------------------------------------------------------------------------------------


def boundaries(path: Path) -> set[int]:
    """Where one thing ends and the next begins in the data file of a checkpoint."""
    data = path.read_bytes()
    found = {0, len(data)}
    if data[:4] == b"PK\3\4":
        for mark in (b"PK\3\4", b"PK\1\2", b"PK\7\x08", b"PK\6\6", b"PK\6\7", b"PK\5\6"):
            at = data.find(mark)
            while at >= 0:
                found |= {at, at + 30}
                at = data.find(mark, at + 1)
        return found
    if path.suffix == ".safetensors":
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        found |= {
            8,
            start,
            *(start + end for n, e in header.items() if n != "__metadata__" for end in e["data_offsets"]),
        }
        return found
    at = 0
    import pickletools

    stream = io.BytesIO(data)
    for _ in range(5):
        for _ in pickletools.genops(stream):
            pass
        found.add(stream.tell())
    at = stream.tell()
    while at < len(data):
        at += 8
        found.add(at)
        at += 1
    return found


def cut_points(path: Path, seed: int) -> list[int]:
    size = path.stat().st_size
    some = random.Random(seed)
    near = sorted({n + d for n in boundaries(path) for d in (-1, 0, 1)})
    near = some.sample(near, 120) if len(near) > 120 else near
    return sorted({n for n in (*near, *(some.randrange(size) for _ in range(50))) if 0 <= n < size})


@pytest.mark.parametrize("kind", ["torch", "legacy", "safetensors"])
def test_a_cut_file(kind: str, tmp_path: Path) -> None:
    src = save(kind, tmp_path)
    whole = src.read_bytes()
    for at in cut_points(src, 1):
        src.write_bytes(whole[:at])
        for ran in (run("inspect", src), run("convert", src, tmp_path / "dst", "--to", "torch")):
            # So short that nobody can say what it was.
            said = check_words(ran, CORRUPT if at > 200 else (READ, CORRUPT), src)
            assert "truncated" in said or "empty" in said or at <= 200, said
        assert os.listdir(tmp_path) == [src.name]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_cut_dcp_directory(name: str, tmp_path: Path) -> None:
    src = save_dcp(tmp_path / "ckpt", {**model(), "lr": 0.1, "betas": (0.9, 0.95)})
    file = src / name
    whole = file.read_bytes()
    if name == ".metadata":
        some = random.Random(2)
        points = sorted({0, 1, 2, 10, len(whole) - 1, *(some.randrange(len(whole)) for _ in range(50))})
    else:
        index = pickle.loads((src / ".metadata").read_bytes())
        ends = {i.offset + i.length for i in index.storage_data.values()}
        points = sorted(
            p for p in {e + d for e in ends for d in (-1, 0, 1)} | set(cut_points(file, 3)) if p < len(whole)
        )
    for at in points:
        file.write_bytes(whole[:at])
        ran = run("convert", src, tmp_path / "dst", "--to", "torch")
        said = check_words(ran, CORRUPT, name)
        assert "truncated" in said or name == ".metadata", said
        assert os.listdir(tmp_path) == ["ckpt"]
        assert run("inspect", src).code in (0, CORRUPT)


# Flipped bits ---------------------------------------------------------------------------------------------------------


def payload_bytes(kind: str, src: Path) -> tuple[Path, list[int]]:
    """The data file, and where in it the elements of the tensors are: found by looking for them."""
    file = src if src.is_file() else src / "__0_0.distcp"
    data, found = file.read_bytes(), []
    for tensor in model().values():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert data.count(raw) == 1
        at = data.index(raw)
        found += range(at, at + len(raw))
    return file, found


@pytest.mark.parametrize("flips", [8, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_flipped_bit(kind: str, to: str, flips: int, tmp_path: Path) -> None:
    """None is missed, wherever it lies in the payload, and nothing is left behind."""
    src = save(kind, tmp_path)
    file, positions = payload_bytes(kind, src)
    some = random.Random(4)
    whole = file.read_bytes()
    for at in some.sample(positions, flips):
        data = bytearray(whole)
        data[at] ^= 1 << some.randrange(8)
        file.write_bytes(data)
        said = check_words(run("convert", src, tmp_path / "dst", "--to", to), CORRUPT, file, "CRC")
        assert any(name in said for name in model()), f"does not name the tensor: {said}"
        assert os.listdir(tmp_path) == [src.name]
    file.write_bytes(whole)
    assert run("convert", src, tmp_path / "dst", "--to", to).code == 0


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_flipped_bit_under_a_selection_or_a_cast(kind: str, tmp_path: Path) -> None:
    src = save(kind, tmp_path)
    file, positions = payload_bytes(kind, src)
    data = bytearray(file.read_bytes())
    data[positions[100]] ^= 4
    file.write_bytes(data)
    for flags in (["--tensors", "embed*"], ["--dtype", "bfloat16"], ["--rename", "embed.weight=e"]):
        check_words(run("convert", src, tmp_path / "dst", "--to", "torch", *flags), CORRUPT, file, "CRC")
    # What is not taken is not looked at.
    assert run("convert", src, tmp_path / "dst", "--to", "torch", "--exclude", "embed*").code == 0


def test_what_was_not_checked_is_said(tmp_path: Path) -> None:
    """safetensors has no checksums: a flipped bit passes, and nobody claims otherwise."""
    src = save_safetensors(tmp_path / "a.safetensors")
    done = run("convert", src, tmp_path / "dst.pt")
    assert done.code == 0 and "no checksums in the source" in done.out
    shown = json.loads(run("convert", src, tmp_path / "dst2.pt", "--json").out)
    assert shown["checked_bytes"] == 0 and shown["unchecked_bytes"] == shown["payload_bytes"] > 0
