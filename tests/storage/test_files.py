"""Ranged reads, paths that stay inside, and destinations that are absent or complete."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from ckpttool.errors import CkptError, CorruptError, ReadError, StorageError
from ckpttool.storage import files, free_space
from ckpttool.storage.files import Pool, inside
from ckpttool.storage.stores import local_path


@contextmanager
def staged(dst: str, *, overwrite: bool, is_file: bool) -> Iterator[str]:
    with local_path(dst).stage(overwrite=overwrite, is_file=is_file) as stage:
        yield stage.path


# Reading and writing --------------------------------------------------------------------------------------------------


def test_ranges_are_read_and_written_exactly(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    reading, writing = Pool(), Pool(writing=True)
    assert reading.read(str(path), 2, 3) == b"234"
    assert reading.read(str(path), 10, 0) == b""
    buffer = bytearray(4)
    reading.read_into(str(path), 6, memoryview(buffer))
    assert buffer == b"6789"
    writing.write(str(path), 8, b"abc")
    assert path.read_bytes() == b"01234567abc"
    reading.close()
    writing.close()


def test_a_read_that_the_system_cuts_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(100)))
    pread, preadv, pwrite = os.pread, os.preadv, os.pwrite
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 7), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:7]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data[:7]), offset))
    pool, buffer = Pool(writing=True), bytearray(90)
    assert pool.read(str(path), 5, 90) == bytes(range(5, 95))
    pool.read_into(str(path), 5, memoryview(buffer))
    assert buffer == bytes(range(5, 95))
    pool.write(str(path), 0, bytes(50))
    assert path.read_bytes() == bytes(50) + bytes(range(50, 100))


def test_a_file_that_ends_too_early_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"01234")
    for read in (
        lambda: Pool().read(str(path), 3, 4),
        lambda: Pool().read_into(str(path), 3, memoryview(bytearray(4))),
    ):
        with pytest.raises(CorruptError, match="ends at byte 5, but bytes up to 7 are needed") as caught:
            read()
        assert caught.value.facts == {"file": str(path), "found": 5, "expected": 7}


def test_many_files_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (256, 4096))
    paths = [tmp_path / str(i) for i in range(300)]
    for i, path in enumerate(paths):
        path.write_bytes(i.to_bytes(4, "little"))
    before, pool = len(os.listdir("/dev/fd")), Pool()
    for _ in range(2):
        for i, path in enumerate(paths):
            assert pool.read(str(path), 0, 4) == i.to_bytes(4, "little")
            assert len(os.listdir("/dev/fd")) <= before + 70
    pool.close()
    assert len(os.listdir("/dev/fd")) == before


def test_a_descriptor_in_use_is_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (256, 4096))
    paths = [tmp_path / str(i) for i in range(200)]
    for path in paths:
        path.write_bytes(b"x" * 1000)
    pool, wrong = Pool(), []

    def read(first: int) -> None:
        try:
            for i in range(400):
                assert pool.read(str(paths[(first + i * 7) % 200]), 10, 100) == b"x" * 100
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(i * 31,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_descriptor_in_use_is_closed_when_it_is_not(tmp_path: Path) -> None:
    """Another thread may close the pool; the number of the descriptor would be that of the next file."""
    path = tmp_path / "a"
    path.write_bytes(b"read")
    pool = Pool()
    with pool.use(str(path)) as descriptor:
        pool.close()
        assert os.pread(descriptor, 4, 0) == b"read"
    with pytest.raises(OSError, match=r"[Bb]ad file descriptor"):
        os.fstat(descriptor)


def test_what_the_system_refuses_is_told_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReadError, match="cannot read: no such file"):
        Pool().read(str(tmp_path / "none"), 0, 1)
    with pytest.raises(StorageError, match="cannot write: no such file"):
        Pool(writing=True).write(str(tmp_path / "none"), 0, b"x")
    path = tmp_path / "f"
    path.write_bytes(b"x")

    def refuse(number: int) -> None:
        def pwrite(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pwrite", pwrite)

    for number in (errno.ENOSPC, errno.EDQUOT):
        refuse(number)
        with pytest.raises(StorageError, match=r"no space|quota") as caught:
            Pool(writing=True).write(str(path), 0, b"x")
        assert caught.value.hint == "free some space, or write somewhere else"
        assert caught.value.exit_code == 7
    refuse(errno.EIO)
    with pytest.raises(StorageError, match="cannot write: input/output error"):
        Pool(writing=True).write(str(path), 0, b"x")


def test_only_regular_files_have_a_size(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"123")
    os.mkfifo(tmp_path / "fifo")
    os.symlink(tmp_path / "f", tmp_path / "link")
    assert local_path(str(tmp_path / "f")).size() == local_path(str(tmp_path / "link")).size() == 3
    for odd in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(ReadError, match="not a regular file"):
            local_path(str(odd)).size()
    with pytest.raises(ReadError, match="no such file"):
        local_path(str(tmp_path / "none")).size()


# Paths ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.bin", "sub/a.bin", "./a.bin", "..a", "a..b", "a b", "ä", "C", "sub//a.bin"])
def test_names_inside(tmp_path: Path, name: str) -> None:
    found = inside(str(tmp_path), name)
    assert os.path.realpath(found).startswith(str(tmp_path.resolve()) + "/")


@pytest.mark.parametrize(
    "name",
    [
        "", "/etc/passwd", "..", "../a", "a/../../b", "a/..", "sub/../a", "..\\a", "a\\..\\b", "\\a", "\\\\host\\share",
        "C:a", "C:\\a", "a\0b", "\0",
    ],
)  # fmt: skip
def test_names_that_would_leave(tmp_path: Path, name: str) -> None:
    with pytest.raises(CorruptError, match="outside the checkpoint"):
        inside(str(tmp_path), name)


def test_links_may_not_leave_but_the_hubs_cache_may(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    root.mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "ckpt-other").mkdir()
    (root / "real").write_bytes(b"x")
    os.symlink("real", root / "near")
    os.symlink(tmp_path / "secret", root / "far")
    os.symlink(tmp_path / "ckpt-other", root / "sibling")
    assert inside(str(root), "near")
    for name in ("far", "sibling", "sibling/x"):
        with pytest.raises(CorruptError, match="a link that leaves the checkpoint"):
            inside(str(root), name)
    os.symlink(root, tmp_path / "way")
    assert inside(str(tmp_path / "way"), "real")

    hub = tmp_path / "models--org--name"
    (hub / "blobs").mkdir(parents=True)
    (hub / "blobs" / "1f").write_bytes(b"x")
    snapshot = hub / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    os.symlink("../../blobs/1f", snapshot / "model.safetensors")
    os.symlink(tmp_path / "secret", snapshot / "far")
    assert inside(str(snapshot), "model.safetensors")
    (snapshot / "unet").mkdir()
    os.symlink("../../../blobs/1f", snapshot / "unet" / "model.safetensors")
    assert inside(str(snapshot / "unet"), "model.safetensors")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_bytes(b"x")
    os.symlink("../../refs/main", snapshot / "ref")
    os.symlink(tmp_path / "secret", hub / "blobs" / "2f")
    os.symlink("../../blobs/2f", snapshot / "through")
    for name in ("far", "ref", "through"):
        with pytest.raises(CorruptError, match="a link that leaves the checkpoint"):
            inside(str(snapshot), name)


@pytest.mark.parametrize("folder", ["snapshots/ck", "home/snapshots/ck", "models/snapshots/ck", "models--a--b/ck"])
def test_a_folder_of_snapshots_is_not_the_hubs_cache(folder: str, tmp_path: Path) -> None:
    root = tmp_path / folder
    root.mkdir(parents=True)
    for place in (tmp_path, root.parent, root.parent.parent):
        (place / "blobs").mkdir(exist_ok=True)
        (place / "blobs" / "secret").write_bytes(b"x")
        (place / "secret").write_bytes(b"x")
        for name in ("blobs/secret", "secret"):
            os.symlink(place / name, root / "link")
            with pytest.raises(CorruptError, match="a link that leaves the checkpoint"):
                inside(str(root), "link")
            (root / "link").unlink()


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]

    def made() -> files.Fingerprint:
        for path in paths:
            path.write_bytes(b"1234")
            os.utime(path, ns=(1, 1))
        return files.fingerprint(map(str, paths))

    files.check_unchanged(made())

    def longer() -> None:
        paths[1].write_bytes(b"12345")
        os.utime(paths[1], ns=(1, 1))

    def replaced() -> None:
        other = tmp_path / "other"
        other.write_bytes(b"5678")
        os.utime(other, ns=(1, 1))
        os.replace(other, paths[1])

    for change in (longer, replaced, paths[1].unlink, lambda: os.utime(paths[1], ns=(1, 2))):
        before = made()
        change()
        with pytest.raises(ReadError, match="b` changed while it was being read"):
            files.check_unchanged(before)


# Staging --------------------------------------------------------------------------------------------------------------


def fill(path: str, *, is_file: bool, content: str = "new") -> None:
    if is_file:
        Path(path).write_text(content)
    else:
        Path(path, "sub").mkdir(parents=True)
        Path(path, "sub", "f").write_text(content)


def content(path: Path) -> str:
    return path.read_text() if path.is_file() else (path / "sub" / "f").read_text()


both = pytest.mark.parametrize("is_file", [True, False])


@both
def test_a_destination_appears_when_the_block_ends(tmp_path: Path, is_file: bool) -> None:
    dst = tmp_path / "deep" / "out"
    with staged(str(dst), overwrite=False, is_file=is_file) as partial:
        fill(partial, is_file=is_file)
        assert not dst.exists()
        (place,) = dst.parent.glob(".out.partial-*")
        assert Path(partial).resolve().is_relative_to(place.resolve()) and place.stat().st_mode & 0o777 == 0o700
    assert content(dst) == "new"
    assert os.listdir(dst.parent) == ["out"]


@both
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_destination_stays_absent_when_the_block_fails(
    tmp_path: Path, is_file: bool, error: type[BaseException]
) -> None:
    with pytest.raises(error), staged(str(tmp_path / "out"), overwrite=False, is_file=is_file) as partial:
        fill(partial, is_file=is_file)
        raise error
    assert os.listdir(tmp_path) == []


def test_overwriting_changes_a_file_into_a_directory(tmp_path: Path) -> None:
    dst = tmp_path / "out"
    dst.write_text("old")
    with staged(str(dst), overwrite=True, is_file=False) as partial:
        fill(partial, is_file=False)
    assert content(dst) == "new"
    assert os.listdir(tmp_path) == ["out"]


@both
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_the_old_one_comes_back_when_the_last_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool, error: BaseException
) -> None:
    dst = tmp_path / "out"
    fill(str(dst), is_file=is_file, content="old")
    rename = os.rename

    def failing(src: str, to: str, **folders: int) -> None:
        if src.startswith("new/"):
            raise error
        rename(src, to, **folders)

    monkeypatch.setattr(os, "rename", failing)
    with (
        pytest.raises(StorageError if isinstance(error, OSError) else KeyboardInterrupt),
        staged(str(dst), overwrite=True, is_file=is_file) as partial,
    ):
        fill(partial, is_file=is_file)
    assert content(dst) == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_to_a_directory_stays_and_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "disk" / "real"
    fill(str(real), is_file=False, content="old")
    os.symlink(real, tmp_path / "out")
    with staged(str(tmp_path / "out"), overwrite=True, is_file=False) as partial:
        fill(partial, is_file=False)
        assert Path(partial).resolve().is_relative_to(real.parent.resolve())
    assert (tmp_path / "out").is_symlink()
    assert content(real) == "new"
    assert os.listdir(real.parent) == ["real"]


def test_a_link_to_a_file_is_replaced_and_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    os.symlink(tmp_path / "real", tmp_path / "out")
    with staged(str(tmp_path / "out"), overwrite=True, is_file=True) as partial:
        fill(partial, is_file=True)
    assert (tmp_path / "real").read_text() == "old"
    assert (tmp_path / "out").read_text() == "new"
    assert not (tmp_path / "out").is_symlink()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_new_files_are_new(tmp_path: Path) -> None:
    local_path(str(tmp_path / "f")).create(10)
    assert (tmp_path / "f").read_bytes() == bytes(10)
    for again in (lambda: local_path(str(tmp_path / "f")).create(1), lambda: local_path(str(tmp_path / "f")).put(b"")):
        with pytest.raises(StorageError, match="file exists"):
            again()
    with pytest.raises(CkptError):
        local_path(str(tmp_path / "f" / "g")).create(1)


@pytest.mark.parametrize("offset", [0, 1, 4095, files.WRITE - 1, files.WRITE, 3 * files.WRITE + 8])
@pytest.mark.parametrize("nbytes", [1, 4096, files.WRITE, files.WRITE + 1, 3 * files.WRITE + 5])
def test_a_long_write_is_cut_at_fixed_places_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, nbytes: int
) -> None:
    calls: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def noted(fd: int, data: bytes, at: int) -> int:
        calls.append((at, len(data)))
        # The system may write less than it was given.
        return pwrite(fd, data[: max(1, len(data) - 3)], at)

    monkeypatch.setattr(os, "pwrite", noted)
    path, data = tmp_path / "f", random.Random(nbytes).randbytes(nbytes)
    path.touch()
    with closing(files.Pool(writing=True)) as pool:
        pool.write(str(path), offset, memoryview(data))
    assert path.read_bytes() == bytes(offset) + data
    assert all(at // files.WRITE == (at + size - 1) // files.WRITE for at, size in calls)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 1 << 40])
def test_memory_lies_in_its_page_as_bytes_do_in_the_file(offset: int) -> None:
    memory = files.pages(10_000)
    room = files.aligned(memory, offset, 10_000)
    room[:] = bytes(range(250)) * 40
    assert len(room) == 10_000
    assert np.frombuffer(room, np.uint8).ctypes.data % files.PAGE == offset % files.PAGE


def test_free_space_is_asked_of_the_nearest_folder(tmp_path: Path) -> None:
    assert free_space.free_bytes(str(tmp_path / "not" / "yet")) > 0


def test_everything_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda a, b, **where: (done.append("rename"), rename(a, b, **where))[1])
    with staged(str(tmp_path / "out"), overwrite=False, is_file=False) as partial:
        fill(partial, is_file=False)
        made = os.path.realpath(partial)
    before = done[: done.index("rename")]
    assert {p.removeprefix(made) for p in before if not p.endswith("/journal")} == {"", "/sub", "/sub/f"}
    assert done[-1] == str(tmp_path)
