"""DCP directories, read and written: every sample against what was saved, and what we write against torch's reader."""

from __future__ import annotations

import gc
import io
import json
import pickle
import shutil
import sys
import threading
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from same import assert_same
from support import checkpoints as by_hand
from support.paths import CHECKPOINTS, samples_of
from support.upstream_readers import dcp_whole, spelled
from support.upstream_samples import original
from support.wrapped_state import Codes
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import ckpttool
from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue import typed_json
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Chunks, Object, Tensor
from ckpttool.catalogue.entries import Path as Key
from ckpttool.catalogue.protocols import SinkOptions, Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CorruptError, LossError, ReadError
from ckpttool.formats.dcp import FORMAT
from ckpttool.formats.dcp import index as dcpindex
from ckpttool.formats.dcp import reader as opening
from ckpttool.formats.dcp.items import Items
from ckpttool.serialization.dcp import decompress as dcpscratch
from ckpttool.serialization.dcp.metadata import StoredTensor
from ckpttool.storage.stores import locate

NAMES = samples_of("dcp")
pytestmark = pytest.mark.filterwarnings("ignore")


def sample(name: str) -> Path:
    return CHECKPOINTS / name / "ckpt"


def opened(path: Path) -> Source:
    source = FORMAT.open(locate(str(path)))
    validate(source.catalogue)
    return source


# Payloads, read without any of our own code but `resolve` -------------------------------------------------------------


def elements(source: Source, tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements of a tensor, as opaque units in its shape."""
    size = tensor.dtype.itemsize
    made = np.empty(tensor.shape, f"V{size}")
    for chunk in tensor.chunks:
        extent = source.resolve(tensor, chunk)
        assert not extent.item
        with open(source.catalogue.files[extent.file].location, "rb") as stream:
            stream.seek(extent.offset)
            data = np.frombuffer(stream.read(extent.nbytes), np.uint8)
        assert len(data) == extent.nbytes
        if extent.record is not None and extent.record.crc is not None and extent.record[1:3] == extent[1:3]:
            assert zlib.crc32(data.tobytes()) == extent.record.crc
        if extent.strides is not None:
            data = np.lib.stride_tricks.as_strided(data, (*chunk.sizes, size), (*(s * size for s in extent.strides), 1))
        data = np.ascontiguousarray(data).reshape(-1)
        for step in extent.codec:
            typed = data.view(getattr(np, tensor.dtype.name))
            data = {"conj": np.conj, "neg": np.negative}[step](typed).view(np.uint8)
        made[(..., *by_hand.within((chunk.offsets, chunk.sizes)))] = data.view(f"V{size}").reshape(chunk.sizes)
    return made


def as_torch(source: Source, tensor: Tensor) -> torch.Tensor:
    raw = elements(source, tensor).tobytes()
    kind = getattr(torch, tensor.dtype.name)
    if not raw:
        return torch.empty(tensor.shape, dtype=kind)
    return torch.frombuffer(bytearray(raw), dtype=kind).reshape(tensor.shape)


def tree_of(source: Source) -> Any:
    """The whole state: tensors as torch's, objects as they are."""
    return nesting.unflatten(source.catalogue, lambda e: as_torch(source, e) if isinstance(e, Tensor) else e.value)


def assert_alike(found: Any, expected: Any, at: str = "$") -> None:
    """Same tree, but that dicts compare without order of class and objects of classes are stubs here."""
    if isinstance(expected, Mapping):
        assert isinstance(found, Mapping) and set(found) == set(expected), (at, set(found) ^ set(expected))
        for key in expected:
            assert_alike(found[key], expected[key], f"{at}[{key!r}]")
    elif isinstance(expected, (list, tuple)) and type(found) is type(expected):
        assert len(found) == len(expected), at
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{at}[{i}]")
    elif isinstance(expected, (torch.Tensor, str, int, float, bytes, bool, type(None))):
        if isinstance(expected, torch.Tensor) and expected.is_quantized:
            return
        if isinstance(expected, torch.Tensor) and not isinstance(found, torch.Tensor):
            return  # inside an object: compared as an embedded tensor
        if isinstance(expected, torch.Tensor):
            expected = expected.detach()
            assert found.dtype == expected.dtype and found.shape == expected.shape, at
            assert (by_hand.bits(found) == by_hand.bits(expected)).all(), at
        else:
            assert_same(found, expected, at=at)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_read_as_it_was_saved(name: str) -> None:
    source = FORMAT.open(locate(str(sample(name))))
    if name == "dcp/unflattened_w2":
        # One rank's shards of the optimizer in one opaque object: not what was saved, and an error.
        with pytest.raises(CorruptError, match="only the shards of rank 1 are stored"):
            validate(source.catalogue)
        source.catalogue.faults.clear()
    validate(source.catalogue)
    found, expected = tree_of(source), original(name)
    if name == "dcp/unflattened_w2":
        found = {key: value for key, value in found.items() if key != "optim"}
    assert_alike(found, expected)
    assert {file.name for file in source.catalogue.own_files} == {f.name for f in sample(name).glob("*.distcp")}
    assert all(file.rank is not None for file in source.catalogue.own_files)
    source.close()


def test_a_tensor_of_other_tensors_is_not_damage(tmp_path: Path) -> None:
    moment = Codes(torch.arange(64, dtype=torch.uint8).reshape(8, 8), torch.ones(2))
    state = {"model": {"w": torch.ones(8, 8)}, "optim": {"state": {"w": {"exp_avg": moment}}}}
    torch_dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    (finding,) = ckpttool.verify(tmp_path / "run").findings
    assert finding.gravity == "suspect"
    assert "is a piece of a tensor of class `support.wrapped_state.Codes`" in finding.message
    with pytest.raises(ReadError, match="is a piece of a tensor of class"):
        ckpttool.convert(tmp_path / "run", tmp_path / "all.pt")
    ckpttool.convert(tmp_path / "run", tmp_path / "model.pt", drop="optim")
    assert_same(torch.load(tmp_path / "model.pt"), {"model": {"w": torch.ones(8, 8)}})
    file = tmp_path / "run" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(bytes(range(64)), bytes(range(1, 65))))
    assert ckpttool.verify(tmp_path / "run").verdict == "damaged"


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("dcp/meta_torch20_w2", {"torch": "2.0 to 2.2"}),
        ("dcp/meta_torch23_w2", {"torch": "2.3"}),
        ("dcp/meta_torch24_w2", {"torch": "2.4 to 2.6"}),
        ("dcp/meta_torch27_w2", {"torch": "2.7 to 2.8"}),
        ("dcp/fsdp2_w2", {"torch": "2.9 to 2.14", "layout": "one file per rank"}),
        ("dcp/meta_torch215_w2", {"torch": "2.15 or later"}),
        ("dcp/foreign_storage_info_w2", {"writer": "olmo_core"}),
        ("dcp/threads_w2", {"layout": "up to 3 files per rank"}),
        ("dcp/file_per_item_w2", {"layout": "a file for each item"}),
        ("dcp/zstd_w2", {"layout": "one file per rank, stream.zstd/1"}),
        ("dcp/safetensors_w2", {"layout": "one file per rank, tensors as safetensors"}),
        ("dcp/nocollectives_w2", {"layout": "an index for each rank"}),
    ],
)
def test_the_writer_is_told(name: str, facts: dict[str, str]) -> None:
    source = opened(sample(name))
    assert {key: source.catalogue.facts.get(key) for key in facts} == facts
    assert source.catalogue.world_size == (4 if name.endswith("w4") else 2)
    source.close()


def test_the_index_file_stands_for_its_directory(tmp_path: Path) -> None:
    shutil.copytree(sample("dcp/fsdp2_w2"), tmp_path / "ckpt")
    renamed = tmp_path / "ckpt" / "index of step 3"
    (tmp_path / "ckpt" / ".metadata").rename(renamed)
    assert FORMAT.recognise(locate(str(renamed)))
    assert_alike(tree_of(opened(renamed)), original("dcp/fsdp2_w2"))


def test_what_is_no_dcp_is_not_recognised(tmp_path: Path) -> None:
    torch.save({"Metadata": "state_dict_metadata"}, tmp_path / "a.pt")
    (tmp_path / "b").write_bytes(pickle.dumps({"Metadata": 1}))
    for path in (tmp_path, tmp_path / "a.pt", tmp_path / "b", tmp_path / "nothing"):
        assert not FORMAT.recognise(locate(str(path)))


def test_integer_ids_of_an_optimizer_are_integers() -> None:
    source = opened(sample("dcp/int_keys"))
    keys = {path[2] for path in source.catalogue.entries if path[:2] == ("optim", "state")}
    assert keys and all(type(key) is int for key in keys)
    source.close()


def test_names_without_a_plan_stay_whole() -> None:
    source = opened(sample("dcp/foreign_storage_info_w2"))
    assert all(len(path) == 1 for path in source.catalogue.entries)
    source.close()


def test_resolving_on_many_threads(tmp_path: Path) -> None:
    for name in ("dcp/zstd_w2", "dcp/fsdp2_w4"):
        source = opened(sample(name))
        expected = original(name)
        failures: list[BaseException] = []

        def work(source: Source = source, expected: Any = expected, failures: list[BaseException] = failures) -> None:
            try:
                assert_alike(tree_of(source), expected)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        source.close()
        assert not failures, failures[0]


def test_decoded_items_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of two kilobytes: most items are decoded again when they are asked for again."""
    monkeypatch.setattr(dcpscratch, "_SEGMENT", 2048)
    monkeypatch.setattr(dcpscratch, "_SEGMENTS", 1)
    source = opened(sample("dcp/zstd_w2"))
    files = len(source.catalogue.files)
    for _ in range(3):
        assert_alike(tree_of(source), original("dcp/zstd_w2"))
    assert len(source.catalogue.files) == files
    source.close()


def test_zstd_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    source = FORMAT.open(locate(str(sample("dcp/zstd_w2"))))
    tensor = source.catalogue.tensors[0]
    with pytest.raises(ReadError, match="zstd") as caught:
        source.resolve(tensor, tensor.chunks[0])
    assert caught.value.hint == "pip install ckpttool[zstd]"
    assert [w for w in source.catalogue.warnings if w.kind == "unreadable"]
    source.close()


def test_very_many_objects_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_EAGER", 3)
    for name in ("dcp/fsdp2_w2", "dcp/int_keys"):
        source = opened(sample(name))
        assert any(not o.is_read for o in source.catalogue.objects)
        assert_alike(tree_of(source), original(name))
        source.close()


# Ranks that did not talk to each other --------------------------------------------------------------------------------


def save_apart(folder: Path, states: list[dict[str, Any]]) -> Path:
    """What `use_collectives=False` leaves: torch's own writer once per rank, its files under the names of the rank."""
    for rank, state in enumerate(states):
        torch_dcp.save(state, checkpoint_id=folder / f"rank{rank}", no_dist=True)
        source = folder / f"rank{rank}"
        metadata = pickle.loads((source / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = f"__{rank}_0.distcp"
        (source / "__0_0.distcp").rename(folder / f"__{rank}_0.distcp")
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
        shutil.rmtree(source)
    return folder


def test_what_differs_by_rank_is_kept_by_rank(tmp_path: Path) -> None:
    states = [
        {"w": torch.arange(4.0), "step": 3, "rng": {"torch": torch.full((8,), r), "seed": 40 + r}, f"only{r}": r}
        for r in range(3)
    ]
    source = opened(save_apart(tmp_path, states))
    found = tree_of(source)
    assert_alike(
        found,
        {
            "w": torch.arange(4.0), "step": 3,
            "rng": {
                "torch": {f"rank_{r}": torch.full((8,), r) for r in range(3)},
                "seed": {f"rank_{r}": 40 + r for r in range(3)},
            },
            "only0": 0, "only1": 1, "only2": 2,
        },
    )  # fmt: skip
    said = "\n".join(map(str, source.catalogue.warnings))
    assert "2 entries differ from rank to rank" in said and "rng.seed" in said and "2 entries are stored by sev" in said
    source.close()


def test_ranks_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"__1\.metadata.*`w` is float32 \[5\] on rank 1"):
        opened(save_apart(tmp_path / "a", [{"w": torch.zeros(4)}, {"w": torch.zeros(5)}]))
    with pytest.raises(CorruptError, match="bytes on one rank"):
        opened(save_apart(tmp_path / "b", [{"w": torch.zeros(4)}, {"w": 3}]))


def test_a_rank_whose_index_is_missing(tmp_path: Path) -> None:
    shutil.copytree(sample("dcp/nocollectives_w2"), tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__1.metadata").unlink()
    with pytest.raises(CorruptError, match="not covered exactly"):
        opened(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__0.metadata").rename(tmp_path / "ckpt" / "__1.metadata")
    source = FORMAT.open(locate(str(tmp_path / "ckpt")))
    assert any("no index of rank 0" in str(w) for w in source.catalogue.warnings)


# Indexes as others write them -----------------------------------------------------------------------------------------


def with_empty_twin(metadata: Metadata, hint: int | None, last: bool) -> None:
    """An empty chunk that begins where the first one does, as old writers placed the empty shards."""
    name, value = first_sharded(metadata)
    chunk = value.chunks[0]
    twin = ChunkStorageMetadata(chunk.offsets, torch.Size([0, *chunk.sizes[1:]]))
    value.chunks.insert(len(value.chunks) if last else 0, twin)
    info = metadata.storage_data.pop(MetadataIndex(name, chunk.offsets))
    metadata.storage_data[MetadataIndex(name, chunk.offsets, hint)] = info


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("hint", [None, 0, 2, -1, 99])
def test_an_empty_chunk_at_the_same_place(hint: int | None, last: bool, tmp_path: Path) -> None:
    path = change(tmp_path / "ckpt", "dcp/fsdp2_w2", lambda m: with_empty_twin(m, hint, last))
    source = opened(path)
    assert_alike(tree_of(source), original("dcp/fsdp2_w2"))
    source.close()


def test_a_plan_in_any_order(tmp_path: Path) -> None:
    """Several ranks' plans are joined: what only one of them has comes late."""

    def backwards(metadata: Metadata) -> None:
        metadata.planner_data = dict(reversed(metadata.planner_data.items()))

    source = opened(change(tmp_path / "ckpt", "dcp/fsdp2_w2", backwards))
    found = tree_of(source)
    assert_alike(found, original("dcp/fsdp2_w2"))
    keys = [path for path in source.catalogue.entries if path[:2] == ("optim", "param_groups")]
    assert [path[2] for path in keys] == sorted(path[2] for path in keys)
    source.close()


def test_items_that_nothing_asks_for(tmp_path: Path) -> None:
    def forget(metadata: Metadata) -> None:
        del metadata.state_dict_metadata["step"]
        name, value = first_sharded(metadata)
        info = metadata.storage_data[MetadataIndex(name, value.chunks[0].offsets)]
        metadata.storage_data[MetadataIndex(name, [99, 99])] = info

    source = opened(change(tmp_path / "ckpt", "dcp/fsdp2_w2", forget))
    assert any("2 items that belong to no tensor" in str(w) and "`step`" in str(w) for w in source.catalogue.warnings)
    source.close()


# Damage ---------------------------------------------------------------------------------------------------------------


def change(folder: Path, name: str, edit: Any) -> Path:
    """A copy of a sample whose index was changed with torch's own classes."""
    shutil.copytree(sample(name), folder)
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    edit(metadata)
    index.write_bytes(pickle.dumps(metadata))
    return folder


def first_sharded(metadata: Metadata) -> tuple[str, Any]:
    return next(
        (k, v) for k, v in metadata.state_dict_metadata.items() if len(getattr(v, "chunks", ())) > 1 and v.size[0] > 4
    )  # fmt: skip


def test_a_missing_file_is_a_warning_and_then_an_error(tmp_path: Path) -> None:
    shutil.copytree(sample("dcp/fsdp2_w2"), tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__1_0.distcp").unlink()
    source = FORMAT.open(locate(str(tmp_path / "ckpt")))
    assert "file `__1_0.distcp` is missing" in map(str, source.catalogue.warnings)
    with pytest.raises(CorruptError, match=r"`__1_0.distcp` is missing, and with it a part of tensor `model\."):
        validate(source.catalogue)
    lost = [o for o in source.catalogue.objects if not o.is_read]
    assert lost
    with pytest.raises(CorruptError, match=r"`__1_0.distcp` is missing"):
        _ = lost[0].value


def test_an_item_of_another_save(tmp_path: Path) -> None:
    """The same index over data of another dtype: every range is inside, and yet nothing fits."""
    torch_dcp.save({"w": torch.zeros(6), "v": 3}, checkpoint_id=tmp_path / "a", no_dist=True)
    torch_dcp.save({"w": torch.zeros(3, dtype=torch.float64), "v": 3}, checkpoint_id=tmp_path / "b", no_dist=True)
    shutil.copy(tmp_path / "b" / "__0_0.distcp", tmp_path / "a" / "__0_0.distcp")
    source = FORMAT.open(locate(str(tmp_path / "a")))
    tensor = source.catalogue.tensor(("w",))
    with pytest.raises(CorruptError, match=r"`w`.*float64 \[3\], but the metadata says float32 \[6\]|not a complete"):
        source.resolve(tensor, tensor.chunks[0])


def test_an_incomplete_save(tmp_path: Path) -> None:
    shutil.copytree(sample("dcp/fsdp2_w2"), tmp_path / "ckpt")
    folder = tmp_path / "ckpt"
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    assert FORMAT.recognise(locate(str(folder)))
    with pytest.raises(ReadError, match=r"without `\.metadata`") as caught:
        FORMAT.open(locate(str(folder)))
    assert caught.value.hint is not None and "written last" in caught.value.hint
    with pytest.raises(ReadError, match="a single data file") as caught:
        FORMAT.open(locate(str(folder / "__0_0.distcp")))
    assert caught.value.hint == f"name the directory: `{folder}`"


def test_what_lies_beside_is_said(tmp_path: Path) -> None:
    shutil.copytree(sample("dcp/fsdp2_w2"), tmp_path / "ckpt")
    for name, data in {"__7_0.distcp": b"x" * 9, "__8_0.distcp": b"", ".metadata.tmp": b"x", "meta.pt": b"x"}.items():
        (tmp_path / "ckpt" / name).write_bytes(data)
    said = [*map(str, FORMAT.open(locate(str(tmp_path / "ckpt"))).catalogue.warnings)]
    assert any("1 data files of 9 bytes are not mentioned" in w and "`__7_0.distcp`" in w for w in said)
    assert any("`.metadata.tmp`" in w for w in said)
    assert any("files that the index does not mention: `meta.pt`" in w for w in said)
    assert not any("`__8_0.distcp`" in w for w in said)  # as torch leaves one for a rank that had nothing to write


def test_tensors_without_elements(tmp_path: Path) -> None:
    """As torch saves them: some are views of what has elements."""
    state = {"a": torch.empty(0), "b": torch.empty(0, 3), "c": torch.ones(4, 5)[:, :0], "d": torch.ones(3)}
    torch_dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    source = opened(tmp_path / "ckpt")
    assert {t.name: t.shape for t in source.catalogue.tensors} == {n: tuple(v.shape) for n, v in state.items()}
    metadata = pickle.loads((tmp_path / "ckpt" / ".metadata").read_bytes())
    said = metadata.state_dict_metadata["d"]
    said.size = said.chunks[0].sizes = torch.Size([0])
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CorruptError, match=r"`d` holds float32 \[3\], but the metadata says a tensor without"
    ) as caught:
        opened(tmp_path / "ckpt")
    assert caught.value.facts["concerns"] == ["d"]


# SAFETENSORS ----------------------------------------------------------------------------------------------------------


def test_ties_are_not_seen_where_a_blob_is_shared() -> None:
    """Every item has the offset of its blob and tensors of one shape have one length: that makes no tie."""
    source = opened(sample("dcp/safetensors_w2"))
    assert not find_aliases(source.catalogue.tensors)
    assert not any(c.extent.item for t in source.catalogue.tensors for c in t.chunks)
    source.close()


def test_a_tensor_in_a_blob_that_is_said_to_be_empty(tmp_path: Path) -> None:
    def empty(metadata: Metadata) -> None:
        said = next(e for e in metadata.state_dict_metadata.values() if hasattr(e, "size") and len(e.size) == 2)
        said.size = torch.Size([0, 2**40])
        for chunk in said.chunks:
            chunk.offsets, chunk.sizes = torch.Size([0, 0]), torch.Size([0, 2**40])

    with pytest.raises(CorruptError, match="but the index says a tensor without elements"):
        opened(change(tmp_path / "ckpt", "dcp/safetensors_w2", empty))


def test_two_chunks_under_one_name_in_a_blob(tmp_path: Path) -> None:
    def edit(metadata: Metadata) -> None:
        for name, value in metadata.state_dict_metadata.items():
            if len(getattr(value, "chunks", ())) > 1 and value.chunks[-1].sizes[0]:
                one, two = (metadata.storage_data[MetadataIndex(name, c.offsets)] for c in value.chunks[:2])
                two.relative_path, two.offset = one.relative_path, one.offset
                return

    path = change(tmp_path / "ckpt", "dcp/safetensors_w2", edit)
    with pytest.raises(CorruptError, match="two of its chunks have the same name"):
        FORMAT.open(locate(str(path)))


# Writing --------------------------------------------------------------------------------------------------------------


def lay_out(source: Catalogue, ranks: int = 1) -> Catalogue:
    """The same entries, each tensor in row slabs on `ranks` ranks, ties noted."""
    laid = Catalogue("dcp", containers=dict(source.containers))
    ties = find_aliases(source.tensors)
    for entry in source.entries.values():
        if not isinstance(entry, Tensor):
            laid.add(entry)
            continue
        cuts = by_hand.grid(entry.shape, [ranks, *[1] * (len(entry.shape) - 1)]) if entry.shape and entry.numel else [
            ((0,) * len(entry.shape), entry.shape)
        ]  # fmt: skip
        first = ties.get(entry.path)
        placed = Chunks.placed((box, rank) for rank, box in enumerate(cuts))
        laid.add(replace(entry, chunks=placed, origin=entry, alias=first))
    return laid


def write(laid: Catalogue, values: Mapping[Key, np.ndarray[Any, Any]], path: Path) -> Catalogue:
    """Create, fill from the elements of each tensor, finish; what the sink says it holds."""
    assert FORMAT.create is not None and FORMAT.losses is not None
    assert FORMAT.losses(laid, str(path)) == []
    path.mkdir()
    sink = FORMAT.create(locate(str(path)), laid, SinkOptions())
    validate(sink.catalogue)
    crcs: dict[tuple[int, int], int] = {}
    for tensor in sink.catalogue.tensors:
        if tensor.alias is not None:
            assert tensor.chunks is sink.catalogue.tensor(tensor.alias).chunks or tensor.embedded
            continue
        for offsets, sizes, extent in tensor.chunks:
            data = values[tensor.path][(..., *by_hand.within((offsets, sizes)))].tobytes()
            assert len(data) == extent.nbytes == prod(sizes) * tensor.dtype.itemsize
            if not data:
                continue
            assert extent.record is not None and extent.record == (*extent[:3], None)
            with open(sink.catalogue.files[extent.file].location, "r+b") as stream:
                stream.seek(extent.offset)
                stream.write(data)
            key = (extent.record.file, extent.record.offset)
            assert key not in crcs
            crcs[key] = zlib.crc32(data)
    assert not (path / ".metadata").exists()
    sink.finish(crcs)
    for file in sink.catalogue.files:
        assert Path(file.location).stat().st_size == file.size
    return sink.catalogue


def convert(source: Source, path: Path, ranks: int = 1) -> Catalogue:
    values = {t.path: elements(source, t) for t in source.catalogue.tensors}
    return write(lay_out(source.catalogue, ranks), values, path)


def state_in(tmp_path: Path, state: Any) -> Source:
    """A catalogue of a torch state, by way of the torch.save reader."""
    from ckpttool.formats.torchsave import FORMAT as TORCH

    torch.save(state, tmp_path / "state.pt")
    return TORCH.open(locate(str(tmp_path / "state.pt")))


def full_state() -> dict[str, Any]:
    weight = torch.randn(9, 4)
    return {
        "model": {
            "w": weight, "tied": weight, "b": torch.arange(5, dtype=torch.bfloat16), "n": torch.tensor(7),
            "none": torch.empty(0, 3), "c": torch.randn(3, 3, dtype=torch.complex64).t(),
        },
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(9, 4)}, 7: {"step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 7]}, {"lr": 0.2, "params": []}],
        },
        "rng": {"pair": (torch.arange(8, dtype=torch.uint8), [1, torch.ones(2)]), "big": 2**70},
        "empty": {}, "list": [], "none": None, "text": "héllo", "ordered": OrderedDict(a=1, b=torch.zeros(2)),
        "args": Namespace(lr=0.5, w=torch.full((2,), 4)), True: "a bool key", None: "no key",
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_state_is_written_as_torch_reads_it(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = full_state()
    source = state_in(tmp_path, state)
    sink = convert(source, tmp_path / "out", ranks)
    expected = spelled(state)
    expected["model"]["c"] = expected["model"]["c"].contiguous()
    assert_same(dcp_whole(tmp_path / "out"), expected)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "again.pt")
    assert_same(torch.load(tmp_path / "again.pt", weights_only=False), expected)
    assert sorted(f.name for f in sink.files) == [f"__{r}_0.distcp" for r in range(ranks)]

    # A loop that asks for its own state gets it, shape for shape.
    mine = {"model": {k: torch.zeros_like(v).contiguous() for k, v in state["model"].items()}}
    torch_dcp.load(mine, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(mine["model"], expected["model"])


def described(source: Source) -> dict[Key, Any]:
    """Everything that makes two checkpoints equal, and the order of the entries."""
    made: dict[Key, Any] = {}
    for path, entry in source.catalogue.entries.items():
        if isinstance(entry, Tensor):
            made[path] = (entry.dtype, entry.shape, elements(source, entry).tobytes(), entry.embedded)
        else:
            made[path] = json.dumps(typed_json.encode(entry.value))
    return made


@pytest.mark.parametrize("ranks", [1, 3])
def test_our_reader_restores_what_dcp_cannot_spell(ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = state_in(tmp_path, full_state())
    convert(source, tmp_path / "out", ranks)
    back = opened(tmp_path / "out")
    assert list(described(back)) == list(described(source))
    assert described(back) == described(source)
    assert [type(k) for path in back.catalogue.entries for k in path] == [
        type(k) for path in source.catalogue.entries for k in path
    ]
    assert back.catalogue.containers == source.catalogue.containers
    assert find_aliases(back.catalogue.tensors) == find_aliases(source.catalogue.tensors) != {}
    assert back.catalogue.facts["writer"].startswith("ckpttool ")
    assert back.catalogue.warnings == []


def test_items_are_whole_archives(tmp_path: Path) -> None:
    """Each item, cut out, passes `unzip -t`, CRCs and all, and loads by itself with `weights_only`."""
    torch.manual_seed(0)
    convert(state_in(tmp_path, full_state()), tmp_path / "out", 2)
    metadata = torch_dcp.FileSystemReader(tmp_path / "out").read_metadata()
    ends: dict[str, int] = {}
    places = sorted({(i.relative_path, i.offset, i.length) for i in metadata.storage_data.values()})
    for name, offset, length in places:
        assert ends.get(name, 0) == offset
        ends[name] = offset + length
        data = (tmp_path / "out" / name).read_bytes()[offset : offset + length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None and archive.namelist()[0] == "archive/data.pkl"
    for name, end in ends.items():
        assert (tmp_path / "out" / name).stat().st_size == end
    tensors = [k for k in metadata.storage_data if k.offset is not None]
    for key in tensors:
        info = metadata.storage_data[key]
        data = (tmp_path / "out" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        assert isinstance(torch.load(io.BytesIO(data), weights_only=True), torch.Tensor)


def test_ties_share_one_item(tmp_path: Path) -> None:
    torch.manual_seed(0)
    convert(state_in(tmp_path, full_state()), tmp_path / "out", 3)
    storage = torch_dcp.FileSystemReader(tmp_path / "out").read_metadata().storage_data
    chunks = torch_dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    for index, info in storage.items():
        if index.offset is not None:
            assert chunks[index.fqn].chunks[index.index].offsets == index.offset
        if index.fqn == "model.tied":
            assert storage[MetadataIndex("model.w", index.offset)] == info


def test_an_object_keeps_its_own_copy_of_a_tied_tensor(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    state = {"pair": (shared, shared), "w": shared, "again": shared, "other": (shared,)}
    convert(state_in(tmp_path, state), tmp_path / "out")
    found = dcp_whole(tmp_path / "out")
    assert_same(found, state)
    assert found["pair"][0].data_ptr() == found["pair"][1].data_ptr()


def test_names_that_are_spelt_alike(tmp_path: Path) -> None:
    assert FORMAT.create is not None and FORMAT.losses is not None
    for state in ({"a": {"b.c": 1}, "a.b": {"c": 2}}, {"x": {0: 1, "0": 2}}):
        laid = lay_out(by_hand.state(state))
        assert len(FORMAT.losses(laid, "out")) == 1
        with pytest.raises(LossError, match="have the same name in DCP"):
            FORMAT.create(locate(str(tmp_path / "out")), laid, SinkOptions())


def test_what_dcp_cannot_hold(tmp_path: Path) -> None:
    assert FORMAT.losses is not None
    laid = Catalogue("x")
    laid.add(Tensor(("q",), DTYPES["quint8"], (4,), Chunks.placed([(((0,), (4,)), 0)])))
    laid.add(Object((), 3))
    assert len(FORMAT.losses(laid, "out")) == 2


def test_a_list_with_gaps_moves_up(tmp_path: Path) -> None:
    laid = lay_out(by_hand.state({"l": [{"a": 1}, {"a": 2}, {"a": 3}]}))
    del laid.entries["l", 1, "a"]
    write(laid, {}, tmp_path / "out")
    assert dcp_whole(tmp_path / "out") == {"l": [{"a": 1}, {"a": 3}]}


def test_empty_pieces_are_left_out(tmp_path: Path) -> None:
    """DCP tells items by where they begin: an empty chunk may begin where another one does."""
    laid = Catalogue("x")
    boxes = [(((0, 0), (2, 3)), 1), (((0, 0), (0, 3)), 0), (((2, 0), (0, 3)), 2)]
    laid.add(Tensor(("w",), DTYPES["float32"], (2, 3), Chunks.placed(boxes)))
    value = torch.randn(2, 3)
    write(laid, {("w",): by_hand.bits(value)}, tmp_path / "out")
    assert_same(dcp_whole(tmp_path / "out"), {"w": value})


def test_what_was_read_ahead_in_a_scratch_file_is_read_again(tmp_path: Path) -> None:
    """Scratch files are filled anew under their number."""
    torch_dcp.save({f"t{i}": torch.randn(16, 16) for i in range(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    index = dcpindex.read_index(locate(str(tmp_path / "a")))
    index.files[0].scratch = True
    stored = [entry for entry in index.entries.values() if isinstance(entry, StoredTensor)]
    stored.sort(key=lambda entry: entry.starts[0])
    items = Items(index.files)
    for entry in stored[:2]:
        items.tensor(entry.item(0), entry.dtype, entry.shape, "t")
    path, last = Path(index.files[0].location), stored[2]
    data = bytearray(path.read_bytes())
    data[data.index(b"FloatStorage", last.starts[0])] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        items.tensor(last.item(0), last.dtype, last.shape, "t")


def test_quantised_tensors_travel_as_objects(tmp_path: Path) -> None:
    whole = torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 5, torch.quint8)
    torch_dcp.save({"q": whole, "w": torch.ones(2)}, checkpoint_id=tmp_path / "a", no_dist=True)
    source = opened(tmp_path / "a")
    assert isinstance(source.catalogue.entries["q",], Object)
    convert(source, tmp_path / "b")
    found = torch_dcp.FileSystemReader(tmp_path / "b").read_metadata().storage_data[MetadataIndex("q")]
    data = (tmp_path / "b" / found.relative_path).read_bytes()[found.offset : found.offset + found.length]
    again = torch.load(io.BytesIO(data))
    assert torch.equal(again.int_repr(), whole.int_repr()) and again.q_scale() == 0.1 and again.q_zero_point() == 5


def test_nothing_of_this_machine_is_in_the_index(tmp_path: Path) -> None:
    convert(state_in(tmp_path, {"w": torch.ones(2)}), tmp_path / "out")
    assert str(tmp_path).encode() not in (tmp_path / "out" / ".metadata").read_bytes()
    meta = torch_dcp.FileSystemReader(tmp_path / "out").read_metadata()
    assert meta.version == filesystem.CURRENT_DCP_VERSION and meta.storage_meta.checkpoint_id is None


def test_the_index_is_let_go(tmp_path: Path) -> None:
    """It is as large as the catalogue; of objects that are read late nothing but their place is kept, either."""
    state = {f"w{i}": torch.full((4,), float(i)) for i in range(100)} | {f"n{i}": i for i in range(opening._EAGER + 9)}
    torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(one, StoredTensor) for one in gc.get_objects())
        source = opening.open(locate(str(tmp_path)))
        left = sum(isinstance(one, StoredTensor) for one in gc.get_objects())
    finally:
        gc.enable()
    try:
        assert left == before
        values = {entry.name: entry.value for entry in source.catalogue.objects}
        assert values == {name: value for name, value in state.items() if isinstance(value, int)}
        assert {name for name, _ in source.items()} == values.keys()
    finally:
        source.close()
