"""What every store does alike, and what becomes of a checkpoint in a store that fails, is slow, reads short or lies.

A new store gets these tests by a row in `STORES`, and one that can be written to by another where they are published.
"""

from __future__ import annotations

import errno
import os
import pickle
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from support.hub_client import use
from support.hub_server import Hub
from support.paths import CHECKPOINTS
from support.wrapped_store import WrappedStore

import ckpttool
from ckpttool.errors import CkptError, CorruptError, ReadError, StorageError
from ckpttool.formats import archives
from ckpttool.operations import repair
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import DirectoryEntry, Location, Outgoing, Stat, destination, local_path, locate

FILES = {
    "config.json": b"{}",
    "empty.bin": b"",
    "large.bin": bytes(range(256)) * 1024,
    "step-10/rank0.pt": b"zero",
    "step-10/rank1.pt": b"one",
    "step-10/\u00fcn\u00efcode/deep.txt": b"deep",
}


def local(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    return locate(str(directory))


def wrapped(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    return WrappedStore(directory).locate()


def planned(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    root = locate(str(directory))
    return Location("out", repair._Planned("out", {name: root / name for name in root.below()}))


def on_the_hub(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    server = Hub(tmp_path / "hub")
    use(server, monkeypatch, tmp_path)
    server.make("org/name", directory)
    return locate("hf://org/name")


def in_the_cache(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    server = Hub(tmp_path / "hub")
    use(server, monkeypatch, tmp_path)
    server.make("org/name", directory)
    HfApi(endpoint=server.url).snapshot_download("org/name", cache_dir=constants.HF_HUB_CACHE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return locate("hf://org/name")


def in_a_bucket(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    obstore = pytest.importorskip("obstore")
    from ckpttool.remote.cloud.address import BucketAddress
    from ckpttool.remote.cloud.store import CloudStore

    bucket = obstore.store.MemoryStore()
    for path in directory.rglob("*"):
        if path.is_file():
            obstore.put(bucket, f"run/{path.relative_to(directory).as_posix()}", path)
    return CloudStore(BucketAddress("s3", "bucket"), bucket).locate("s3://bucket/run")


def in_a_file_system(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.put(str(directory), f"/{tmp_path.name}", recursive=True)
    return locate(f"memory://{tmp_path.name}")


def in_a_bucket_of_the_hub(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    server = Hub(tmp_path / "hub")
    use(server, monkeypatch, tmp_path)
    server.make_bucket("org/name", directory)
    return locate("hf://buckets/org/name")


def in_an_archive(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Location:
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        archive.add(directory, ".")
    return archives.inside(local_path(str(tmp_path / "run.tar")))


Make = Callable[[Path, pytest.MonkeyPatch, Path], Location]
REMOTE = (on_the_hub, in_the_cache, in_a_bucket_of_the_hub, in_a_bucket, in_a_file_system, in_an_archive)
STORES: list[Make] = [local, wrapped, planned, *REMOTE]


@pytest.fixture(params=STORES, ids=lambda make: make.__name__)
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    for name, data in FILES.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    location = request.param(tmp_path / "run", monkeypatch, tmp_path)
    yield location
    location.store.close()


def seen(names: list[str]) -> list[str]:
    """Without the file that the Hub adds to every repository."""
    return [name for name in names if name != ".gitattributes"]


def test_names(root: Location) -> None:
    assert seen(root.names()) == ["config.json", "empty.bin", "large.bin", "step-10"]
    assert [entry for entry in root.entries() if entry.is_dir] == [DirectoryEntry("step-10", is_dir=True)]
    assert seen(root.below()) == sorted(FILES)
    assert {name: size for name, size in root.sizes().items() if name in FILES} == {
        name: len(data) for name, data in FILES.items() if "/" not in name
    } or root.store.root.startswith("hf://")  # files of the cache are links
    step = root / "step-10"
    assert step.names() == ["rank0.pt", "rank1.pt", "\u00fcn\u00efcode"]
    assert (step.name, step.parent, (step / "rank0.pt").relative_to(root)) == ("step-10", root, "step-10/rank0.pt")
    assert (step / "rank0.pt").suffix == ".pt"
    assert step.is_below(root) and not root.is_below(step)


def test_questions(root: Location) -> None:
    file, folder, absent = root / "config.json", root / "step-10", root / "absent" / "x"
    assert [one.exists() for one in (root, file, folder, absent)] == [True, True, True, False]
    assert [one.is_dir() for one in (root, file, folder, absent)] == [True, False, True, False]
    assert [one.is_file() for one in (root, file, folder, absent)] == [False, True, False, False]
    assert (file.size(), file.kind(), folder.kind()) == (2, "file", "dir")
    assert (root / "empty.bin").size() == 0


def test_patterns(root: Location) -> None:
    pattern = root / "step-*" / "rank*.pt"
    assert pattern.is_pattern() and not (root / "config.json").is_pattern()
    assert pattern.matches() == [root / "step-10" / "rank0.pt", root / "step-10" / "rank1.pt"]
    assert [one.read() for one in pattern.matches()] == [b"zero", b"one"]
    assert (root / "none*").matches() == []


def test_ranges(root: Location) -> None:
    file, data = root / "large.bin", FILES["large.bin"]
    for offset, nbytes in ((0, 0), (0, 1), (5, 300), (65530, 20), (len(data) - 3, 3), (0, len(data))):
        assert file.read(offset, nbytes) == data[offset : offset + nbytes]
        assert Pool().read(file, offset, nbytes) == data[offset : offset + nbytes]
    assert file.head(10) == data[:10] and file.head(1 << 20) == data
    assert (root / "empty.bin").head(10) == (root / "empty.bin").read() == b""
    buffer = bytearray(8)
    assert file.read_into(len(data), memoryview(buffer)) == 0
    for read in (lambda: file.read(len(data) - 3, 4), lambda: Pool(whole=True).read(file, len(data) + 5, 1)):
        with pytest.raises(CorruptError, match="ends at byte") as raised:
            read()
        assert str(file) in raised.value.message


def test_whole_files(root: Location) -> None:
    file, data = root / "large.bin", FILES["large.bin"]
    assert file.read(7, 9) == data[7:16]
    file.fetch()
    assert file.read() == file.read(0, len(data)) == data
    with file.open() as stream:
        assert stream.read(3) == data[:3]
        assert stream.seek(1000) == 1000 and stream.read(5) == data[1000:1005]
        assert stream.seek(-2, os.SEEK_END) == len(data) - 2 and stream.read() == data[-2:]


def test_threads(root: Location) -> None:
    file, data = root / "large.bin", FILES["large.bin"]
    pool = Pool()
    with ThreadPoolExecutor(8) as threads:
        parts = threads.map(lambda at: pool.read(file, at, 4096), range(0, len(data), 4096))
    assert b"".join(parts) == data
    pool.close()


def test_what_is_not_there(root: Location) -> None:
    absent = root / "absent.bin"
    for read in (absent.size, absent.read, absent.names, absent.kind, absent.fetch, lambda: absent.read(0, 1)):
        if read == absent.fetch and not root.store.has_digests:
            continue
        with pytest.raises(ReadError) as raised:
            read()
        assert "absent.bin`" in raised.value.message and str(root) in raised.value.message
    with pytest.raises(ReadError, match="not a regular file"):
        (root / "step-10").size()
    with pytest.raises(ReadError):
        (root / "config.json").names()


def new_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    return str(tmp_path / "above" / "new")


def new_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    use(Hub(tmp_path / "hub"), monkeypatch, tmp_path)
    return "hf://me/new/below"


def contents(address: str) -> dict[str, bytes]:
    """What a reader sees there."""
    try:
        root = locate(address)
        return {name: (root / name).read() for name in root.below()} if root.exists() else {}
    except CkptError:
        return {}


@pytest.mark.parametrize("where", [new_directory, new_repository], ids=lambda where: where.__name__)
def test_files_are_published_together(
    where: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    address = where(monkeypatch, tmp_path)
    seen_before: list[dict[str, bytes]] = []

    def outgoing(name: str, data: bytes) -> Outgoing:
        def write(path: str) -> None:
            seen_before.append(contents(address))
            local_path(path).put(data)

        return Outgoing(name, len(data), write)

    def no_room(path: str) -> None:
        raise StorageError("no space left")

    files = [outgoing(name, data) for name, data in FILES.items() if data]
    with pytest.raises(StorageError, match="no space left"):
        destination(address).publish([*files, Outgoing("last", 3, no_room)])
    assert contents(address) == {}
    destination(address).publish(files)
    assert contents(address) == {name: data for name, data in FILES.items() if data}
    assert len(seen_before) == 2 * len(files) and not any(seen_before)


def test_a_file_is_created_and_written_in_ranges(tmp_path: Path) -> None:
    file = local_path(str(tmp_path)) / "below" / "new.bin"
    with file.parent.parent.stage(overwrite=True, is_file=False) as stage:
        staged, pool = local_path(stage.path) / "below" / "new.bin", Pool(writing=True)
        staged.create(1 << 30)
        assert staged.size() == 1 << 30 and os.stat(staged).st_blocks * 512 < 1 << 20
        pool.write(staged, (1 << 30) - 3, b"end")
        pool.write(staged, 5, b"five")
        with pytest.raises(StorageError, match="file exists"):
            staged.create(1)
        pool.close()
        assert not file.exists()
    assert file.read(5, 4) == b"five" and file.read((1 << 30) - 4, 4) == b"\0end"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a\0b", "C:\\x", "hf://org/x"])
def test_names_that_lead_out(root: Location, name: str) -> None:
    with pytest.raises(CorruptError):
        root.inside(name)
    assert root.inside("step-10/rank0.pt").read() == b"zero"


def test_a_link_that_loops_does_not_hide_its_neighbours(tmp_path: Path) -> None:
    """`DirEntry.is_dir` raises for it, as for a link into a directory of another user."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    assert [(e.name, e.is_dir) for e in locate(str(tmp_path)).entries()] == [("loop", False), ("model.pt", False)]


def test_no_path_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ckpttool verify "$UNSET"`."""
    torch.save({"w": torch.ones(2)}, tmp_path / "rank0.pt")
    monkeypatch.chdir(tmp_path)
    for look in (ckpttool.inspect, ckpttool.verify, lambda path: ckpttool.convert(path, "out.pt")):
        with pytest.raises(ReadError, match="``: cannot read: no such file or directory"):
            look("")
    assert os.listdir(tmp_path) == ["rank0.pt"]


def test_another_process_gets_the_text_of_a_location(root: Location) -> None:
    """Of an error on another rank: looking up the store there could take a request, and raise something else."""
    error = pickle.loads(pickle.dumps(ReadError("gone", file=root / "model.safetensors")))
    assert error.facts["file"] == str(root / "model.safetensors") and type(error.facts["file"]) is str


def test_nobody_opens_a_remote_file_past_its_store(root: Location) -> None:
    if not root.store.is_local:
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            Path(root / "config.json").read_bytes()


# Stores that fail ----------------------------------------------------------------------------------------------

SAMPLES = ["dcp/fsdp2_w4", "safetensors/indexed", "torch/full", "rank/fsdp2_w2", "run/accelerate_fsdp2_sharded_w2"]


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest) -> Path:
    folder = CHECKPOINTS / request.param
    return next(iter(sorted(folder.glob("ckpt*"))), folder)


def within(store: WrappedStore, sample: Path) -> Location:
    """The sample in a store over the directory that it is in."""
    return store.locate() / sample.name


class ShortReads(WrappedStore):
    """Returns at most 4099 bytes at a time."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        return super().read_into(name, offset, buffer[:4099])


class Slow(WrappedStore):
    """Takes its time."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        time.sleep(0.0005)
        return super().read_into(name, offset, buffer)


@pytest.mark.parametrize("store", [WrappedStore, ShortReads, Slow])
def test_a_checkpoint_is_the_same(sample: Path, store: type[WrappedStore], tmp_path: Path) -> None:
    ckpttool.convert(str(sample), tmp_path / "one.pt", check=True)
    ckpttool.convert(within(store(sample.parent), sample), tmp_path / "two.pt", check=True)
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


class Failing(WrappedStore):
    """Fails at one of the reads."""

    def __init__(self, directory: Path, left: int) -> None:
        super().__init__(directory)
        self.left = left

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_into(name, offset, buffer)


def test_a_read_that_fails_is_said_or_does_not_matter(sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    counting = Failing(sample.parent, 0)
    ckpttool.convert(within(counting, sample), out, threads=1)
    whole, total = out.read_bytes(), -counting.left
    said = 0
    for left in (1, 2, total // 3, total // 2, total - 2):
        out.unlink(missing_ok=True)
        try:
            ckpttool.convert(within(Failing(sample.parent, left), sample), out, threads=1)
        except CkptError as error:
            assert "input/output error" in error.message.lower() or "test://store" in str(error.facts)
            assert os.listdir(tmp_path) == []
            said += 1
        else:
            # A reader may do without a small file beside the checkpoint.
            assert out.read_bytes() == whole
    assert said >= 2


class Truncated(WrappedStore):
    """Says that files are as long as they were, and has half of the bytes."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        end = self.stat(name).size // 2
        return super().read_into(name, offset, buffer[: max(0, end - offset)])


class Zeros(WrappedStore):
    """Has holes in place of the bytes."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        n = super().read_into(name, offset, buffer)
        buffer[:n] = bytes(n)
        return n


class Longer(WrappedStore):
    """Says that files are longer than they are."""

    def stat(self, name: str) -> Stat:
        found = super().stat(name)
        return found._replace(size=found.size + 1000) if found.kind == "file" else found


@pytest.mark.parametrize("store", [Truncated, Zeros, Longer])
def test_a_store_that_lies_is_found_out(sample: Path, store: type[WrappedStore], tmp_path: Path) -> None:
    with pytest.raises(CkptError):
        ckpttool.convert(within(store(sample.parent), sample), tmp_path / "out.pt", check=True)
    assert os.listdir(tmp_path) == []


class Flipped(WrappedStore):
    """Has one bit wrong in the middle of each large file."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        n = super().read_into(name, offset, buffer)
        at = self.stat(name).size // 2 - offset
        if 0 <= at < n and name.endswith((".distcp", ".pt", ".bin")):
            buffer[at] ^= 1
        return n


def test_verify_finds_a_bit_that_a_store_has_wrong(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(10_000.0)}, tmp_path / "x.pt")
    assert ckpttool.verify(WrappedStore(tmp_path).locate() / "x.pt").whole
    assert not ckpttool.verify(Flipped(tmp_path).locate() / "x.pt").whole
