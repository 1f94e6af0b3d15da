"""Moving bytes between real files: every way of cutting, every codec, every cast, and every way of going wrong."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints
from support.checkpoints import Made, bits, grid, laid_down, stored, within
from test_read import WHOLE

import ckpttool
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Catalogue, Chunk, Chunks, Extent, Record, Tensor
from ckpttool.catalogue.protocols import PlacedSource
from ckpttool.errors import CorruptError, StorageError
from ckpttool.layout import rechunk as chunking
from ckpttool.layout import select as layout
from ckpttool.layout.dtype_rules import cast
from ckpttool.storage.files import Pool
from ckpttool.transfer import execute as transfer
from ckpttool.transfer import read as gather
from ckpttool.transfer.execute import Tally, Transferred, budget
from ckpttool.transfer.journal import CopiedRange
from ckpttool.transfer.plan import ChunkCopy, plan


@pytest.fixture(params=["ordinary", "small"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With buffers and tasks as they are, and with such that every tensor here is cut into many."""
    if request.param == "small":
        small(monkeypatch)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "TASK", 300)
    monkeypatch.setattr(transfer, "BUFFER", 64)
    monkeypatch.setattr(transfer, "SHORT_RUN", 24)
    monkeypatch.setattr(gather, "TILE", 128)


def relaid(source: Made, cuts: Mapping[str, Sequence[Box]], ranks: int = 2) -> Catalogue:
    laid = chunking.whole(layout.start(source.catalogue))
    for tensor in laid.tensors:
        if tensor.name in cuts:
            tensor.chunks = Chunks.placed((box, i % ranks) for i, box in enumerate(cuts[tensor.name]))
    return laid


def moved(source: Made, laid: Catalogue, folder: Path, *, crc: bool = False, **options: Any) -> Transferred:
    laid_down(folder, laid, crc=crc)
    return run(source, laid, **options)


def run(source: Made, laid: Catalogue, **options: Any) -> Transferred:
    total = sum(t.nbytes for t in laid.tensors if t.alias is None)
    found = transfer.transfer(plan(laid), source, laid, total=total, **options)
    assert found.moved == total
    return found


def payload(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


# What arrives ---------------------------------------------------------------------------------------------------------

CUTS = list(itertools.product([(1, 1, 1), (3, 1, 1), (1, 4, 1), (1, 1, 5), (2, 2, 2)], repeat=2))


@pytest.mark.parametrize(("first", "second"), CUTS)
@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.usefixtures("sizes")
def test_any_cut_into_any_other(tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], crc: bool) -> None:
    values = checkpoints.random((9, 8, 10), torch.int16)
    source = Made(tmp_path / "from", files=2)
    source.add("w", values, grid(values.shape, first), crc=crc)
    laid = relaid(source, {"w": grid(values.shape, second)})
    done = moved(source, laid, tmp_path / "to", crc=crc)
    assert np.array_equal(stored(laid, laid.tensor(("w",))), bits(values))
    assert (done.checked, done.unchecked) == ((values.nbytes, 0) if crc else (0, values.nbytes))
    for (file, offset), found in done.crcs.items():
        (record,) = [c.extent.record for t in laid.tensors for c in t.chunks if c.extent[:2] == (file, offset)]
        assert record is not None
        data = Path(laid.files[file].location).read_bytes()[offset : offset + record.nbytes]
        assert found == zlib.crc32(data)
    assert len(done.crcs) == (len(laid.tensor(("w",)).chunks) if crc else 0)
    for path in (tmp_path / "to").iterdir():
        # Nothing is written beside the chunks.
        assert path.read_bytes()[:3] == b"\xff\xff\xff"


@settings(max_examples=60)
@given(st.data())
def test_any_shape_cut_anyhow(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            small(patch)
        folder = tmp_path_factory.mktemp("any")
        shape = data.draw(st.lists(st.integers(1, 12), max_size=4).map(tuple))
        name = data.draw(st.sampled_from(["uint8", "int16", "float32", "complex128"]))
        cuts = [grid(shape, [data.draw(st.integers(1, n)) for n in shape]) for _ in range(2)]
        values = checkpoints.random(shape, WHOLE[name])
        source = Made(folder / "from", files=3)
        codec = data.draw(st.sampled_from([(), ("swap",)]))
        source.add("w", values, cuts[0], crc=data.draw(st.booleans()), codec=codec)
        laid = relaid(source, {"w": cuts[1]}, ranks=3)
        moved(source, laid, folder / "to", crc=True, threads=data.draw(st.integers(1, 4)))
        assert np.array_equal(stored(laid, laid.tensor(("w",))), bits(values))
        assert run(source, laid, compare=True).crcs.keys() == {
            c.extent.record[:2] for t in laid.tensors for c in t.chunks
        }


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.usefixtures("sizes")
def test_every_dtype(tmp_path: Path, name: str) -> None:
    values = checkpoints.random((6, 7), WHOLE[name])
    source = Made(tmp_path / "from")
    source.add("plain", values, grid((6, 7), (2, 1)))
    source.add("swapped", values, grid((6, 7), (1, 3)), codec=("swap",))
    source.add("scalar", values[3, 3])
    source.add("none", values[:0])
    for tensor in (values.t(), values[::2, 1::3], values[:, 2]):
        source.add_view(f"view {tuple(tensor.shape)}", tensor)
    if WHOLE[name].is_complex:
        source.add("conj", checkpoints.random((6, 7), WHOLE[name]), codec=("conj",))
    laid = relaid(source, {"plain": grid((6, 7), (1, 2)), "swapped": grid((6, 7), (3, 1))})
    moved(source, laid, tmp_path / "to")
    found = {t.name: stored(laid, t) for t in laid.tensors}
    expected = {
        "plain": values, "swapped": values, "scalar": values[3, 3], "none": values[:0],
        "view (7, 6)": values.t(), "view (3, 2)": values[::2, 1::3], "view (6,)": values[:, 2],
    }  # fmt: skip
    assert all(np.array_equal(found[key], bits(value)) for key, value in expected.items())


def test_many_short_runs_are_read_in_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read_into = Pool.read_into
    monkeypatch.setattr(Pool, "read_into", lambda *args: (reads.append(1), read_into(*args))[1])
    source = Made(tmp_path / "from")
    source.add("w", checkpoints.random((5000, 4)), grid((5000, 4), (1, 2)))
    moved(source, relaid(source, {"w": grid((5000, 4), (2, 1))}), tmp_path / "to")
    assert len(reads) < 20


@pytest.mark.usefixtures("sizes")
def test_views_as_torch_carries_them_out(tmp_path: Path) -> None:
    values = checkpoints.random((12, 10), torch.complex64)
    views = {"conj": values.t().conj(), "imag": values.conj().imag, "both": values[::3].conj().imag[:, 1::2]}
    source = Made(tmp_path / "from")
    for name, view in views.items():
        source.add_view(name, view, crc=True)
    laid = relaid(source, {"conj": grid((10, 12), (1, 3)), "imag": grid((12, 10), (4, 2))})
    moved(source, laid, tmp_path / "to", crc=True)
    for name, view in views.items():
        assert np.array_equal(stored(laid, laid.tensor((name,))), bits(view)), name


def test_tied_tensors_are_moved_once(tmp_path: Path) -> None:
    source = Made(tmp_path / "from")
    first = source.add("a", torch.arange(10.0))
    source.catalogue.add(replace(first, path=("b",)))
    laid = chunking.whole(layout.start(source.catalogue))
    assert moved(source, laid, tmp_path / "to").moved == 40


# Casts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [("float32", "bfloat16"), ("float64", "float16"), ("bfloat16", "float32"), ("float16", "float8_e5m2")],
)
def test_cast_tiles_arrive_in_place(tmp_path: Path, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = checkpoints.random((5000,), WHOLE[old])
    expected = values.to(WHOLE[new])
    monkeypatch.setattr(gather, "TILE", 5000)
    monkeypatch.setattr(transfer, "BUFFER", 1000)
    source = Made(tmp_path / "from")
    source.add("w", values, grid(values.shape, (3,)), crc=True)
    laid = cast(chunking.whole(layout.start(source.catalogue)), lambda tensor: dtype(new))
    done = moved(source, laid, tmp_path / "to", crc=True)
    found = stored(laid, laid.tensor(("w",)))
    # Which NaN torch makes of a NaN depends on the processor and on the place.
    assert ((found == bits(expected)) | expected.double().isnan().numpy()).all()
    assert done.checked == values.nbytes
    run(source, laid, compare=True)


# Checksums and comparing ----------------------------------------------------------------------------------------------


def flip(path: str | Path, offset: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 0x10]))


def swapped(values: torch.Tensor, source: Made) -> Tensor:
    return source.add("w", values, codec=("swap",), crc=True)


WAYS = {
    "streamed": (lambda values, source: source.add("w", values, crc=True), {}),
    "streamed in chunks": (lambda values, source: source.add("w", values, grid(values.shape, (3, 1)), crc=True), {}),
    "gathered": (lambda values, source: source.add("w", values, grid(values.shape, (1, 5)), crc=True), {}),
    "swapped": (swapped, {}),
    "a view": (lambda values, source: source.add_view("w", values.t(), crc=True), {}),
    "cast": (lambda values, source: source.add("w", values, crc=True), {"cast": "bfloat16"}),
}


@pytest.mark.parametrize("at", [0, 3001, 6399])
@pytest.mark.parametrize(("add", "how"), WAYS.values(), ids=WAYS)
def test_one_flipped_bit_is_found_by_the_writers_checksum(tmp_path: Path, add: Any, how: Any, at: int) -> None:
    source = Made(tmp_path / "from")
    add(checkpoints.random((40, 40)), source)
    laid = chunking.whole(layout.start(source.catalogue))
    if "cast" in how:
        laid = cast(laid, lambda tensor: dtype(how["cast"]))
    moved(source, laid, tmp_path / "right")
    flip(source.catalogue.files[0].location, 3 + at)
    laid.files.clear()
    with pytest.raises(CorruptError, match=r"0\.bin`: .*bytes \d+\.\.\d+ have CRC") as caught:
        moved(source, laid, tmp_path / "wrong")
    assert "take another copy" in str(caught.value.hint)


def test_a_flipped_bit_beside_a_view_is_found_too(tmp_path: Path) -> None:
    source = Made(tmp_path / "from")
    source.add_view("w", checkpoints.random((40, 40))[:, :20], crc=True)
    flip(source.catalogue.files[0].location, 3 + 4 * 30)
    with pytest.raises(CorruptError, match="have CRC"):
        moved(source, chunking.whole(layout.start(source.catalogue)), tmp_path / "to")


def test_a_storage_of_which_little_is_wanted_is_not_read_for_its_checksum(tmp_path: Path) -> None:
    source = Made(tmp_path / "from")
    source.add_view("w", torch.zeros(3_000_000)[5:25], crc=True)
    done = moved(source, chunking.whole(layout.start(source.catalogue)), tmp_path / "to")
    assert (done.checked, done.unchecked) == (0, 80)


@pytest.mark.parametrize(("add", "how"), WAYS.values(), ids=WAYS)
@pytest.mark.usefixtures("sizes")
def test_comparing_finds_one_flipped_bit(tmp_path: Path, add: Any, how: Any) -> None:
    source = Made(tmp_path / "from")
    add(checkpoints.random((40, 40)), source)
    laid = chunking.whole(layout.start(source.catalogue))
    if "cast" in how:
        laid = cast(laid, lambda tensor: dtype(how["cast"]))
    moved(source, laid, tmp_path / "to")
    run(source, laid, compare=True)
    file = laid.files[0]
    before = Path(file.location).read_bytes()
    for at in (3, file.size // 2, file.size - 1):
        flip(file.location, at)
        with pytest.raises(CorruptError, match="tensor `w` was not written as it was read"):
            run(source, laid, compare=True)
        flip(file.location, at)
    assert Path(file.location).read_bytes() == before


def test_comparing_writes_nothing(tmp_path: Path) -> None:
    source = Made(tmp_path / "from")
    source.add("w", torch.ones(100))
    laid = laid_down(tmp_path / "to", chunking.whole(layout.start(source.catalogue)))
    before = payload(tmp_path / "to")
    with pytest.raises(CorruptError):
        run(source, laid, compare=True)
    assert payload(tmp_path / "to") == before


# Threads and memory ---------------------------------------------------------------------------------------------------


def many(folder: Path) -> Made:
    source = Made(folder, files=3)
    for i in range(20):
        values = checkpoints.random((i + 1, 50), torch.int32, seed=i)
        source.add(f"w{i}", values, grid(values.shape, (2, 1 + i % 3)), crc=i % 2 == 0, codec=("swap",) * (i % 4 == 3))
    return source


@pytest.mark.usefixtures("sizes")
def test_the_output_does_not_depend_on_threads_or_memory(tmp_path: Path) -> None:
    source = many(tmp_path / "from")
    cuts = {t.name: grid(t.shape, (1 + i % 3, 2)) for i, t in enumerate(source.catalogue.tensors)}
    outputs = []
    for n, (threads, memory) in enumerate([(1, None), (2, None), (8, None), (8, 1), (3, 1 << 16), (None, 1 << 30)]):
        folder = tmp_path / str(n)
        done = moved(source, relaid(source, cuts), folder, crc=True, threads=threads, memory=memory)
        outputs.append((payload(folder), sorted(done.crcs.items()), done.checked, done.unchecked))
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("memory", [1, 1 << 20, 10 << 20, 64 << 20, 1 << 30])
@pytest.mark.parametrize("threads", [1, 2, 8, 64])
def test_buffers_stay_within_the_budget(threads: int, memory: int) -> None:
    count, tile = budget(threads, memory)
    assert 1 <= count <= threads
    assert transfer.BUFFER <= tile <= gather.TILE
    assert count == 1 or count * 4 * tile <= memory


def test_progress_counts_up_to_the_total_from_the_calling_thread(tmp_path: Path) -> None:
    source = many(tmp_path / "from")
    seen: list[tuple[int, int, int]] = []
    moved(
        source, chunking.whole(layout.start(source.catalogue)), tmp_path / "to",
        progress=lambda done, total: seen.append((done, total, threading.get_ident())),
    )  # fmt: skip
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {total for _, total, _ in seen} == {seen[-1][0]}
    assert {thread for _, _, thread in seen} == {threading.get_ident()}


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.mark.usefixtures("no_thread_stays")
@pytest.mark.parametrize("one_task", [False, True])
def test_an_interrupt_stops_all_threads_and_nothing_is_written_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_task: bool
) -> None:
    small(monkeypatch)
    source = many(tmp_path / "from")
    if one_task:
        monkeypatch.setattr(transfer, "TASK", 1 << 20)
        source = Made(tmp_path / "large")
        source.add("w", torch.zeros(200 * 64, dtype=torch.uint8))
    writes: list[float] = []
    write = Pool.write

    def slow(pool: Pool, path: str, offset: int, data: bytes | memoryview) -> None:
        time.sleep(0.02)
        writes.append(time.monotonic())
        write(pool, path, offset, data)

    monkeypatch.setattr(Pool, "write", slow)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    laid = relaid(source, {})
    with pytest.raises(KeyboardInterrupt):
        moved(source, laid, tmp_path / "to", threads=4, progress=interrupt)
    over, after = time.monotonic(), payload(tmp_path / "to")
    time.sleep(0.2)
    assert writes and max(writes) < over
    assert payload(tmp_path / "to") == after
    assert len(writes) < 100


@pytest.mark.usefixtures("no_thread_stays")
def test_an_error_in_one_thread_is_raised_once_and_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    source = many(tmp_path / "from")
    count = itertools.count()
    write = Pool.write

    def full(pool: Pool, path: str, offset: int, data: bytes | memoryview) -> None:
        time.sleep(0.005)
        if next(count) >= 10:
            raise StorageError("no space left")
        write(pool, path, offset, data)

    monkeypatch.setattr(Pool, "write", full)
    with pytest.raises(StorageError, match=r"^no space left$"):
        moved(source, relaid(source, {}), tmp_path / "to", threads=4)
    assert next(count) < 20
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("no_thread_stays")
def test_an_error_of_the_plan_is_raised_too(tmp_path: Path) -> None:
    source = Made(tmp_path / "from")
    tensor = source.add("w", torch.zeros(9), grid((9,), (3,)))
    tensor.chunks = Chunks.of(tensor.chunks[:2])
    laid = laid_down(tmp_path / "to", chunking.whole(layout.start(source.catalogue)))
    with pytest.raises(CorruptError, match="tensor `w`"):
        run(source, laid)


def test_a_source_that_is_cut_short(tmp_path: Path) -> None:
    source = many(tmp_path / "from")
    with open(source.catalogue.files[1].location, "r+b") as stream:
        stream.truncate(source.catalogue.files[1].size - 1)
    with pytest.raises(CorruptError, match=r"1\.bin` ends at byte \d+, but bytes up to \d+ are needed"):
        moved(source, chunking.whole(layout.start(source.catalogue)), tmp_path / "to")


def test_boxes_of_the_test_are_those_of_torch() -> None:
    values = torch.arange(24).reshape(4, 6)
    assert [values[within(b)].tolist() for b in grid((4, 6), (2, 1))] == [c.tolist() for c in values.chunk(2)]


def test_a_write_that_fails_on_its_way_to_the_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of it once, to whoever syncs first; here that is the thread that syncs while others copy."""
    read_into, fsync, calls = Pool.read_into, os.fsync, []

    def slowly(pool: Pool, path: str, offset: int, buffer: memoryview) -> None:
        time.sleep(0.05)
        read_into(pool, path, offset, buffer)

    def failing(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    monkeypatch.setattr("ckpttool.transfer.execute.FLUSH", 1)
    monkeypatch.setattr(Pool, "read_into", slowly)
    monkeypatch.setattr(os, "fsync", failing)
    torch.save({str(i): torch.ones(1000) for i in range(8)}, tmp_path / "a.pt")
    with pytest.raises(StorageError, match="input/output error"):
        ckpttool.convert(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), threads=1)
    assert calls
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_record_that_is_written_at_once_leaves_its_checksum_alone() -> None:
    """Of chunks that are put together of the pieces of several ranks there may be a quarter of a million."""
    tally = Tally(PlacedSource(Catalogue("dcp"), lambda: None))
    tensor = Tensor(("x",), dtype("float32"), (2,), Chunks())
    tracemalloc.start()
    try:
        for at in range(0, 64 * 10_000, 64):
            extent = Extent(0, at, 8, record=Record(0, at, 8))
            entry = CopiedRange(0, at, 8, wrote=[(at, 4, zlib.crc32(bytes(4))), (at + 4, 4, zlib.crc32(bytes(4)))])
            tally.add(entry, ChunkCopy(tensor, tensor, Chunk((0,), (2,), extent), ()))
        assert tracemalloc.get_traced_memory()[0] < 20 * 10_000
    finally:
        tracemalloc.stop()
    crcs = tally.result(80_000).crcs
    assert len(crcs) == 10_000 and crcs[0, 64 * 9999] == zlib.crc32(bytes(8))
