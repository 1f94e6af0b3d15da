"""torch.save files, read and written: every sample against torch.load, and what we write against what torch writes."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lost
import numpy as np
import pytest
import torch
from same import assert_same
from support.paths import CHECKPOINTS, samples_of
from support.simulated_ranks import cut, mesh
from support.simulated_ranks import save as save_ranks
from support.upstream_samples import reference
from torch import nn
from torch.distributed.tensor import Shard
from torch.export.pt2_archive._package import package_pt2
from torch.package import PackageExporter

import ckpttool
from ckpttool.catalogue import entries as catalogues
from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue import parts
from ckpttool.catalogue import validation as faults
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Chunks, Object, Tensor
from ckpttool.catalogue.protocols import SinkOptions
from ckpttool.catalogue.values import Link, Stub, stub_name
from ckpttool.errors import CkptError, CorruptError, LossError, ReadError
from ckpttool.formats.detect import detect
from ckpttool.formats.torchsave import FORMAT
from ckpttool.storage.stores import locate

# What FSDP1 saved as a whole has an `OrderedDict` where its reference has a dict: see test_convert.
NAMES = [name for name in samples_of("torch") if name != "torch/fsdp1_full_w2"]

pytestmark = pytest.mark.filterwarnings("ignore")


def sample(name: str) -> Path:
    return next((CHECKPOINTS / name).glob("ckpt.*"))


def save(state: Any, path: Path, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


def read(path: Path) -> Catalogue:
    source = FORMAT.open(locate(str(path)))
    source.close()
    faults.validate(source.catalogue)
    return source.catalogue


# Payloads, moved without any of our own code --------------------------------------------------------------------------


def elements(data: bytes, tensor: Tensor) -> bytes:
    """The row-major elements of a tensor, by numpy."""
    ((_, sizes, extent),) = tensor.chunks
    found = np.frombuffer(data[extent.offset : extent.offset + extent.nbytes], np.uint8)
    assert len(found) == extent.nbytes
    n = tensor.dtype.itemsize
    if extent.strides is not None:
        found = np.lib.stride_tricks.as_strided(found, (*sizes, n), (*(s * n for s in extent.strides), 1))
    found = np.ascontiguousarray(found).reshape(-1)
    for step in extent.codec:
        if step == "swap":
            found = found.reshape(-1, tensor.dtype.word)[:, ::-1].reshape(-1)
            continue
        kind = {"complex64": np.complex64, "complex128": np.complex128, "float64": np.float64, "float32": np.float32}
        typed = np.ascontiguousarray(found).view(kind[tensor.dtype.name])
        found = (typed.conj() if step == "conj" else -typed).view(np.uint8)
    return found.tobytes()


def lay_out(source: Catalogue) -> Catalogue:
    """The same entries, each tensor one whole chunk, ties noted."""
    laid = Catalogue("torch", containers=dict(source.containers))
    ties = find_aliases(source.tensors)
    for entry in source.entries.values():
        if isinstance(entry, Tensor):
            chunks = Chunks.placed([(((0,) * len(entry.shape), entry.shape), 0)])
            laid.add(replace(entry, chunks=chunks, origin=entry, alias=ties.get(entry.path)))
        else:
            laid.add(entry)
    return laid


def write(laid: Catalogue, data: bytes, path: Path) -> Catalogue:
    """Create, fill, finish; what the sink says it holds."""
    assert FORMAT.create is not None and FORMAT.losses is not None
    assert FORMAT.losses(laid, str(path)) == []
    sink = FORMAT.create(locate(str(path)), laid, SinkOptions())
    crcs: dict[tuple[int, int], int] = {}
    with open(path, "r+b") as stream:
        for tensor in sink.catalogue.tensors:
            if tensor.numel and tensor.alias is None:
                assert tensor.origin is not None
                payload = elements(data, tensor.origin)
                ((_, _, extent),) = tensor.chunks
                assert len(payload) == extent.nbytes == tensor.nbytes and extent.record is not None
                assert extent.record.crc is None and extent.record[:3] == extent[:3]
                stream.seek(extent.offset)
                stream.write(payload)
                crcs[extent.record.file, extent.record.offset] = zlib.crc32(payload)
    sink.finish(crcs)
    return sink.catalogue


def convert(src: Path, dst: Path) -> Catalogue:
    return write(lay_out(read(src)), src.read_bytes(), dst)


# Every sample, read and written back ----------------------------------------------------------------------------------


def expected_of(name: str) -> Any:
    """What our copy of a sample is to load as: the view that we promise where it is not the file's own objects."""
    state = reference(name)
    if name == "torch/ddp":
        return torch.load(sample(name))
    if name in ("torch/module", "torch/legacy_module"):
        return OrderedDict(state)
    if name == "torch/script":
        return OrderedDict(state)
    if name == "torch/pt2":
        return {**state, "constants": {"scratch": torch.ones(3)}}
    if name == "torch/layouts":
        state["requires_grad"].requires_grad_(False)
    if name == "torch/wrappers":
        items = state["list"]
        state["list"] = OrderedDict({str(i): items[i] for i in range(len(items))})
        state["uninitialized"] = nn.UninitializedBuffer
    return state


@pytest.mark.parametrize("name", NAMES)
def test_samples_survive(name: str, tmp_path: Path) -> None:
    assert FORMAT.recognise(locate(str(sample(name))))
    out = tmp_path / "out.pt"
    made = convert(sample(name), out)
    lost.package()
    back = torch.load(out, weights_only=False)
    assert_same(lost.shown(back) if name == "torch/unknown_classes" else back, expected_of(name))
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    again = read(out)
    assert [(e.path, type(e)) for e in again.entries.values()] == [(e.path, type(e)) for e in made.entries.values()]
    assert again.containers == made.containers
    for ours, theirs in zip(made.tensors, again.tensors, strict=True):
        ((_, _, one),), ((_, _, two),) = ours.chunks, theirs.chunks
        assert (ours.dtype, ours.shape, ours.embedded) == (theirs.dtype, theirs.shape, theirs.embedded)
        assert one.nbytes == two.nbytes and (not one.nbytes or one.offset == two.offset)
    if not (CHECKPOINTS / name / "reference.pt").is_file() and name not in OVERLAPPING:
        assert ties(back) == ties(expected_of(name))
    assert again.warnings == [w for w in read(sample(name)).warnings if w in again.warnings]


# Storages that are shared in part are written apart; `ties` cannot tell those from ties.
OVERLAPPING = ("torch/layouts", "torch/storages")


def tensors_in(value: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield at, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from tensors_in(child, f"{at}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            yield from tensors_in(child, f"{at}[{i}]")


def ties(value: Any) -> set[frozenset[str]]:
    groups: dict[Any, set[str]] = {}
    for name, tensor in tensors_in(value):
        if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested and tensor.numel():
            groups.setdefault((tensor.data_ptr(), tensor.shape), set()).add(name)
    return {frozenset(g) for g in groups.values() if len(g) > 1}


@pytest.mark.parametrize("name", ["torch/full", "torch/model", "torch/dtypes", "torch/buffer", "torch/ddp"])
def test_what_we_write_is_what_torch_writes(name: str, tmp_path: Path) -> None:
    """The same records in the same order at the same alignment, with the same flags and the same bytes, for the state
    as torch loads it from our file."""
    convert(sample(name), tmp_path / "ours.pt")
    stream = io.BytesIO()
    torch.save(torch.load(tmp_path / "ours.pt", weights_only=False), stream)
    (tmp_path / "theirs.pt").write_bytes(stream.getvalue())
    ours, theirs = records(tmp_path / "ours.pt"), records(tmp_path / "theirs.pt")
    own = ("archive/data.pkl", "archive/.data/serialization_id")
    assert [r for r in ours if r[0] not in own] == [r for r in theirs if r[0] not in own]
    assert [r[:3] for r in ours if r[0] == own[1]] == [r[:3] for r in theirs if r[0] == own[1]]


def records(path: Path) -> list[Any]:
    data = path.read_bytes()
    found = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            head = info.header_offset
            name_len, extra_len = struct.unpack_from("<HH", data, head + 26)
            start = head + 30 + name_len + extra_len
            local = data[head + 4 : head + 26]
            descriptor = data[start + info.file_size :][: 16 if info.file_size else 0]
            found.append((info.filename, info.file_size, start % 64, info.CRC, local, info.flag_bits, descriptor))
    return found


def test_deterministic(tmp_path: Path) -> None:
    convert(sample("torch/full"), tmp_path / "a.pt")
    convert(sample("torch/full"), tmp_path / "b.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


# What a catalogue says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("torch/full", {"layout": "zip", "torch": "2.7 or later", "protocol": 2, "writer": "torch.save"}),
        ("torch/proto5", {"layout": "zip", "protocol": 5}),
        ("torch/old20", {"layout": "zip", "torch": "1.6 to 2.0"}),
        ("torch/legacy", {"layout": "legacy", "torch": "before 1.6"}),
        ("torch/tar", {"layout": "tar"}),
        ("torch/script", {"layout": "TorchScript", "writer": "torch.jit"}),
        ("torch/pt2", {"layout": "pt2", "writer": "torch.export"}),
        ("torch/module", {"layout": "zip nn.Module"}),
    ],
)
def test_facts(name: str, facts: dict[str, Any]) -> None:
    found = read(sample(name))
    assert facts.items() <= found.facts.items()
    assert found.format == "torch" and found.world_size == 1 and found.files[0].rank is None
    assert found.files[0].size == sample(name).stat().st_size


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch/nocrc", "18 of 18 storages have no checksum"),
        ("torch/skip_data", "no checksum"),
        ("torch/bigendian", "big-endian"),
        ("torch/legacy", "no checksums"),
        ("torch/layouts", "2 storages are larger than the tensors that use them, by 1001 bytes"),
        ("torch/layouts", "overlap in 3 storages"),
        ("torch/module", "`lost_package.models.TinyNet` as a whole object"),
        ("torch/module", "non-persistent buffers are not read: `scratch`"),
        ("torch/module", "1 storage of 12 bytes not used by any tensor: `data/1`"),
        ("torch/meta", "2 tensors are on the meta device"),
        ("torch/wrappers", "1 tensors of class `lost_package.models.Scaled` are taken as plain tensors"),
        ("torch/wrappers", "`parameter_with_attributes (sequence_parallel, names_of)`"),
        ("torch/script", "its code is not read"),
        ("torch/pt2", "its graph is not read"),
        ("torch/pt2", "not part of the state are dropped: `data/sample_inputs/model.pt`"),
    ],
)
def test_warnings(name: str, words: str) -> None:
    found = [str(warning) for warning in read(sample(name)).warnings]
    assert any(words in w for w in found), found


@pytest.mark.parametrize("name", ["torch/full", "torch/model", "torch/dtypes", "torch/buffer", "torch/proto4"])
def test_ordinary_files_have_no_warnings(name: str) -> None:
    assert read(sample(name)).warnings == []


def test_paths_keep_their_types(tmp_path: Path) -> None:
    state = {
        "optim": {"state": {0: {"exp_avg": torch.ones(2)}, (1, "x"): {}}},
        "dotted.name": torch.ones(1),
        "l": [{"k": 1}],
    }
    found = read(save(state, tmp_path / "a.pt"))
    assert set(found.entries) == {
        ("optim", "state", 0, "exp_avg"), ("optim", "state", (1, "x")), ("dotted.name",), ("l", 0, "k")
    }  # fmt: skip
    assert found.containers == {("l",): catalogues.Container("list")}


def test_a_bare_tensor(tmp_path: Path) -> None:
    save(torch.arange(3), tmp_path / "a.pt")
    assert list(read(tmp_path / "a.pt").entries) == [()]
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert torch.equal(torch.load(tmp_path / "b.pt"), torch.arange(3))


@pytest.mark.parametrize("state", [[torch.ones(1), {"a": torch.zeros(2)}], (torch.ones(1), 2), {}, [], 7, None, "text"])
def test_roots_of_every_kind(state: Any, tmp_path: Path) -> None:
    convert(save(state, tmp_path / "a.pt"), tmp_path / "b.pt")
    assert_same(torch.load(tmp_path / "b.pt"), state)


def test_storages_are_links() -> None:
    found = read(sample("torch/storages"))
    entry = found.entries[("untyped",)]
    assert isinstance(entry, Object) and isinstance(entry.value, Link) and entry.value.storage
    tensor = found.tensor(entry.value.path)
    assert tensor.embedded and (tensor.dtype.name, tensor.shape) == ("uint8", (16,))
    typed = found.entries[("typed",)]
    assert isinstance(typed, Object) and found.tensor(typed.value.path).dtype.name == "int16"


def test_meta_tensors_are_never_zeros() -> None:
    entry = read(sample("torch/meta")).entries[("meta",)]
    assert isinstance(entry, Object) and isinstance(entry.value, Stub)
    assert stub_name(entry.value) == "torch._utils._rebuild_meta_tensor_no_storage"


def test_tensors_inside_objects_are_embedded(tmp_path: Path) -> None:
    inner = torch.arange(4.0)
    state = {"pair": (inner, "x"), "same": inner, "args": Namespace(t=inner, n=1)}
    found = read(save(state, tmp_path / "a.pt"))
    assert {p for p in found.entries if found.entries[p] in list(found.tensors)} == {
        ("pair", 0), ("same",), ("args", "state", "t")
    }  # fmt: skip
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)
    assert back["pair"][0].data_ptr() == back["same"].data_ptr() == back["args"].t.data_ptr()
    assert torch.equal(back["same"], inner)


def test_what_is_one_object_stays_one(tmp_path: Path) -> None:
    inner = torch.arange(4.0)
    convert(save({"pair": (inner, [inner])}, tmp_path / "a.pt"), tmp_path / "b.pt")
    one, (two,) = torch.load(tmp_path / "b.pt")["pair"]
    assert one is two


# Whole modules --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ModuleList([nn.Linear(4, 3)]))
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.fc[0].weight
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.zeros(1))})
        self.register_parameter("absent", None)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.ones(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: {"model": m, "epoch": 3, "ema": [m]}], ids=["bare", "in a dict"]
)
def test_modules_become_state_dicts(wrap: Any, zipped: bool, tmp_path: Path) -> None:
    module = Net()
    save(wrap(module), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    state = OrderedDict({k: v.clone() for k, v in module.state_dict().items()})
    back = torch.load(tmp_path / "b.pt")
    assert_same(back, wrap(state))
    first = back if isinstance(back, OrderedDict) else back["model"]
    assert list(first) == list(state) and first["tied.weight"].data_ptr() == first["fc.0.weight"].data_ptr()
    assert any("`passing`" in str(w) for w in read(tmp_path / "a.pt").warnings)


def test_a_module_inside_itself(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    module._modules["again"] = module
    with pytest.raises(CorruptError, match="nested"):
        read(save(module, tmp_path / "a.pt"))


# TorchScript and torch.export -----------------------------------------------------------------------------------------


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.rows = [torch.ones(2), torch.zeros(3)]
        self.names = {"a": torch.arange(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_script_names_are_those_of_its_state_dict(tmp_path: Path) -> None:
    script = torch.jit.script(Scripted())
    torch.jit.save(script, tmp_path / "a.pt")
    names = set(script.state_dict())
    assert {t.name for t in read(tmp_path / "a.pt").tensors} == names | {"rows.0", "rows.1", "names.a"}
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt")
    assert all(torch.equal(back[k], v) for k, v in script.state_dict().items())


def test_constants_of_a_script(tmp_path: Path) -> None:
    frozen = torch.jit.freeze(torch.jit.script(Scripted()).eval())
    torch.jit.save(frozen, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    found = sorted(torch.load(tmp_path / "b.pt")["constants"].values(), key=lambda t: t.dim())
    assert {tuple(t.shape) for t in found} >= {(4, 3), (4,)}
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        raw = {archive.read(n) for n in archive.namelist() if "/constants/" in n}
    assert {bytes(t.clone().untyped_storage()) for t in found} == raw


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.fc.weight
        whole = torch.arange(24.0)
        self.register_buffer("part", whole[4:16].view(3, 4).t())
        self.register_buffer("whole", whole)
        self.register_buffer("brain", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.empty(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + self.tied(x) + self.part.sum() + self.whole.sum()


def test_exported_programs(tmp_path: Path) -> None:
    program = torch.export.export(Exported(), (torch.ones(2, 3),))
    torch.export.save(program, tmp_path / "a.pt2")
    expected = torch.export.load(tmp_path / "a.pt2").state_dict
    convert(tmp_path / "a.pt2", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt")
    assert set(back) == set(expected)
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in expected.items())
    assert back["tied.weight"].data_ptr() == back["fc.weight"].data_ptr()


def test_what_was_compiled_is_named(tmp_path: Path) -> None:
    """The weights of a package of AOTInductor are in its code, of which nothing is read."""
    (tmp_path / "m.so").write_bytes(b"\x7fELF" + bytes(60))
    compiled = {"model": [str(tmp_path / "m.so")]}
    package_pt2(tmp_path / "compiled.pt2", aoti_files=compiled)
    with pytest.raises(ReadError, match="AOTInductor"):
        read(tmp_path / "compiled.pt2")
    program = torch.export.export(Exported(), (torch.ones(2, 3),))
    package_pt2(tmp_path / "both.pt2", exported_programs={"model": program}, aoti_files=compiled)
    both = read(tmp_path / "both.pt2")
    assert {tensor.name for tensor in both.tensors} == {*Exported().state_dict()}
    assert any("m.so" in one.text for one in both.warnings)


def test_a_package_of_torch_package_is_named(tmp_path: Path) -> None:
    with PackageExporter(tmp_path / "a.pt") as package:
        package.save_pickle("model", "model.pkl", {"w": torch.ones(3)})
    with pytest.raises(ReadError, match=r"torch\.package"):
        detect(locate(str(tmp_path / "a.pt")))


def repacked(src: Path, dst: Path, change: Any) -> Path:
    with zipfile.ZipFile(src) as old, zipfile.ZipFile(dst, "w") as new:
        for name in old.namelist():
            data = change(name.partition("/")[2], old.read(name))
            if data is not None:
                new.writestr(name, data)
    return dst


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"sizes": [{"as_int": 13}', b'"sizes": [{"as_int": 99}', "needs"),
        (b'"sizes": [{"as_int": 13}', b'"sizes": [{"as_str": 13}', "not integers"),
        (b'"path_name": "weight_0"', b'"path_name": "weight_9"', "weight_9"),
        (b'"dtype": 7', b'"dtype": 77', "unknown dtype 77"),
        (b'{"config"', b'{"konfig"', "not a table"),
        (b'{"config"', b'["config"', "is not JSON"),
    ],
)
def test_exports_that_contradict_themselves(old: bytes, new: bytes, words: str, tmp_path: Path) -> None:
    path = repacked(sample("torch/pt2"), tmp_path / "a.pt2", lambda _, data: data.replace(old, new))
    with pytest.raises(CorruptError, match=words):
        read(path)


def test_weights_that_are_archives_themselves(tmp_path: Path) -> None:
    """`use_pickle`, and the one archive for all weights that torch up to 2.8 wrote."""
    weight, stream = torch.arange(91.0).view(13, 7), io.BytesIO()
    torch.save(weight, stream)

    def pickled(name: str, data: bytes) -> bytes | None:
        if name.endswith("weight_0"):
            return stream.getvalue()
        return (
            data.replace(b'"use_pickle": false', b'"use_pickle": true', 1)
            if name.endswith("weights_config.json")
            else data
        )

    repacked(sample("torch/pt2"), tmp_path / "a.pt2", pickled)
    convert(tmp_path / "a.pt2", tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["first.weight"], weight)

    whole = io.BytesIO()
    torch.save({"first.weight": weight, "tied": weight}, whole)

    def legacy(name: str, data: bytes) -> bytes | None:
        if name.endswith("weights_config.json"):
            return None
        return data

    repacked(sample("torch/pt2"), tmp_path / "b.pt2", legacy)
    with zipfile.ZipFile(tmp_path / "b.pt2", "a") as archive:
        archive.writestr("ckpt/data/weights/model.pt", whole.getvalue())
    convert(tmp_path / "b.pt2", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt")
    assert torch.equal(back["first.weight"], weight) and back["tied"].data_ptr() == back["first.weight"].data_ptr()


def test_classes_made_with_keywords_are_named() -> None:
    entry = read(sample("torch/unknown_classes")).entries[("lost", "with_arguments")]
    assert isinstance(entry, Object) and stub_name(entry.value) == "lost_package.models.WithArguments"


# Sharded tensors in one file ------------------------------------------------------------------------------------------


def test_one_ranks_part_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save_ranks(tmp_path, 1, lambda rank: {"w": cut(whole, mesh(1), Shard(0)), "p": torch.ones(2)}, "a.pt")
    found = read(tmp_path / "a.pt")
    assert any("one rank's part of a sharded checkpoint" in str(w) and "`w`" in str(w) for w in found.warnings)
    assert isinstance(found.entries[("w",)], Object)
    assert any(t.embedded and t.shape == (6,) for t in found.tensors)
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)
    assert torch.equal(back["w"]._local_tensor, torch.arange(6.0))


# What must not happen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch/full", "torch/legacy", "torch/tar", "torch/script", "torch/pt2"])
def test_cut_files(name: str, tmp_path: Path) -> None:
    data = sample(name).read_bytes()
    path = tmp_path / "cut.pt"
    last = len(data) - 1 if name != "torch/tar" else data.rindex(b"\x80\x02")  # a tar ends in zeros that nobody needs
    for n in [*range(0, last, max(1, len(data) // 60)), last]:
        path.write_bytes(data[:n])
        with pytest.raises(CkptError) as caught:
            read(path)
        assert str(path) in caught.value.message
        FORMAT.recognise(locate(str(path)))


@pytest.mark.parametrize("name", ["torch/full", "torch/legacy", "torch/script"])
def test_truncated_files_are_still_recognised(name: str, tmp_path: Path) -> None:
    data = sample(name).read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    assert FORMAT.recognise(locate(str(tmp_path / "cut")))


def test_other_files_are_not_ours(tmp_path: Path) -> None:
    others = {
        "empty": b"", "text": b"{}", "pickle": b"\x80\x02N.", "safetensors": struct.pack("<Q", 2) + b"{}",
        "zeros": bytes(600),
    }  # fmt: skip
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
        assert not FORMAT.recognise(locate(str(tmp_path / name)))
    np.savez(tmp_path / "numpy.npz", a=np.ones(2))
    assert not FORMAT.recognise(locate(str(tmp_path / "numpy.npz")))
    assert not FORMAT.recognise(locate(str(tmp_path))) and not FORMAT.recognise(locate(str(tmp_path / "absent")))
    with pytest.raises(ReadError):
        FORMAT.open(locate(str(tmp_path / "absent")))


def test_a_storage_that_is_missing_names_its_tensor(tmp_path: Path) -> None:
    save({"layers": {"w": torch.ones(3)}}, tmp_path / "a.pt")
    repacked(tmp_path / "a.pt", tmp_path / "b.pt", lambda name, data: None if name == "data/0" else data)
    with pytest.raises(CorruptError, match=r"data/0.*layers\.w"):
        read(tmp_path / "b.pt")


def test_containers_that_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nesting, "MAX_REPEATED", 10_000)
    state: Any = {"x": 1}
    for _ in range(40):
        state = {"a": state, "b": state}
    with pytest.raises(CorruptError, match="shared"):
        read(save(state, tmp_path / "a.pt"))


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_containers_in_themselves(kind: str, tmp_path: Path) -> None:
    state: Any = {"w": torch.ones(1)} if kind == "dict" else [torch.ones(1)]
    state.update(me=state) if kind == "dict" else state.append(state)
    with pytest.raises(CorruptError, match="deep"):
        read(save(state, tmp_path / "a.pt"))


def test_an_object_without_its_tensor_is_refused(tmp_path: Path) -> None:
    save({"pair": (torch.ones(2), 1)}, tmp_path / "a.pt")
    laid = lay_out(read(tmp_path / "a.pt"))
    del laid.entries["pair", 0]
    assert FORMAT.create is not None
    with pytest.raises(LossError, match=r"pair\.0"):
        FORMAT.create(locate(str(tmp_path / "b.pt")), laid, SinkOptions())
    assert not (tmp_path / "b.pt").exists()


def test_losses_are_what_pickle_has_no_words_for() -> None:
    laid = Catalogue("torch")
    laid.add(Object(("fine",), {"a": [1, (2.5, None)], "link": Link(("x",))}))
    laid.add(Object(("odd",), [object()]))
    assert FORMAT.losses is not None
    (loss,) = FORMAT.losses(laid, "out.pt")
    assert loss.name == "odd" and "cannot be pickled" in loss.why


@pytest.mark.long
def test_a_hundred_thousand_tensors(tmp_path: Path) -> None:
    laid = Catalogue("torch")
    for i in range(100_000):
        laid.add(Tensor((f"layers.{i}", "weight"), DTYPES["uint8"], (), Chunks.placed([(((), ()), 0)])))
    assert FORMAT.create is not None
    sink = FORMAT.create(locate(str(tmp_path / "a.pt")), laid, SinkOptions())
    sink.finish({(0, t.chunks.offset[0]): 0xD202EF8D for t in sink.catalogue.tensors})
    assert len(read(tmp_path / "a.pt").entries) == 100_000
    with zipfile.ZipFile(tmp_path / "a.pt") as archive, warnings.catch_warnings():
        assert archive.testzip() is None


def test_version_that_torch_does_not_read(tmp_path: Path) -> None:
    data = io.BytesIO()
    torch.save({"w": torch.ones(3)}, data)
    for number, version in enumerate(
        (b"3\n", b"1", b"2", b"10\n", b"0\n", b"11\n", b"9999\n", b"", b"x", b"-1", b" 3")
    ):
        path = tmp_path / f"{number}.pt"
        with zipfile.ZipFile(data) as old, zipfile.ZipFile(path, "w") as new:
            for info in old.infolist():
                content = version if info.filename.endswith("/version") else old.read(info)
                new.writestr(zipfile.ZipInfo(info.filename), content)
        try:
            torch.load(path, weights_only=True)
        except RuntimeError:
            with pytest.raises(ReadError, match=r"an archive of version .*, which torch does not read"):
                read(path)
        else:
            assert [tensor.name for tensor in read(path).tensors] == ["w"]


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_a_scheduler_that_was_saved_as_an_object(to: str, tmp_path: Path) -> None:
    """It holds its optimizer, whose state has the parameters themselves as keys."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    torch.save({"model": model.state_dict(), "scheduler": scheduler}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "there", to=to)
    ckpttool.convert(tmp_path / "there", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=False)["scheduler"]
    assert back.T_max == 5 and back.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    [params] = [group["params"] for group in back.optimizer.param_groups]
    assert len(params) == len(back.optimizer.state) == 2
    for parameter, expected in zip(params, model.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        state = back.optimizer.state[parameter]
        assert all(torch.equal(state[name], value) for name, value in optimizer.state[expected].items())


# Tensors that no state dict has ---------------------------------------------------------------------------------------


def test_tensors_in_attributes_of_a_module_are_kept(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LSTM(3, 2))
    module.loose = torch.arange(5.0)
    module.others = [nn.Linear(1, 2), {"k": torch.ones(2)}]
    module[0].owner = [module, torch.full((4,), 7.0)]  # leads back to where it is
    module[0].method = module.forward  # `getattr(module, "forward")`
    convert(save({"m": module}, tmp_path / "a.pt"), tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)["m"]
    assert_same({k: v for k, v in back.items() if k in module.state_dict()}, {**module.state_dict()})
    assert back.keys() - module.state_dict().keys() == {"loose", "others", "0.owner"}
    assert_same(back["loose"], module.loose)
    assert_same(back["others"], [OrderedDict(module.others[0].state_dict()), module.others[1]])
    assert_same(back["0.owner"][1], module[0].owner[1])
    warning = "are kept beside those that it has; `--exclude` leaves them out: `loose`, `others`, `0.owner`"
    assert warning in " ".join(map(str, read(tmp_path / "a.pt").warnings))


def test_an_attribute_that_a_parameter_hides_is_an_error(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    vars(module)["weight"] = torch.ones(9)
    with pytest.raises(CorruptError, match="a parameter and an attribute `weight`"):
        read(save(module, tmp_path / "a.pt"))


def test_a_quantized_module_keeps_its_weights(tmp_path: Path) -> None:
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 5)), {nn.Linear}, dtype=torch.qint8)
    convert(save(module, tmp_path / "a.pt"), tmp_path / "b.pt")
    packed = torch.load(tmp_path / "b.pt", weights_only=False)["0._packed_params._packed_params"]
    assert_same(torch.ops.quantized.linear_unpack(packed), (module[0].weight(), module[0].bias().detach()))


def test_tensors_in_attributes_of_tensors_are_kept(tmp_path: Path) -> None:
    parameter, tensor = nn.Parameter(torch.ones(3)), torch.zeros(2)
    parameter.scale, tensor.parts = torch.full((2,), 3.0), [torch.arange(4)]
    convert(save({"p": parameter, "t": tensor}, tmp_path / "a.pt"), tmp_path / "b.pt")
    back = torch.load(tmp_path / "b.pt", weights_only=False)
    assert_same([back["p"].data, back["p"].scale], [parameter.data, parameter.scale])
    assert_same([back["t"], *back["t"].parts], [tensor, *tensor.parts])


def test_bytes_that_are_a_saved_file_are_named(tmp_path: Path) -> None:
    zipped, pickled = io.BytesIO(), pickle.dumps({"weights": list(range(40))})
    torch.save({"w": torch.ones(2)}, zipped)
    found = read(save({"a": zipped.getvalue(), "b": {"c": pickled}, "d": b"x" * 99}, tmp_path / "a.pt"))
    expected = (
        "2 values hold bytes that are a file of torch or a pickle; they are kept, and not looked into: `a`, `b.c`"
    )
    assert [str(warning) for warning in found.warnings] == [expected]


def test_an_object_that_was_pickled_whole_is_a_model_if_it_has_modules(tmp_path: Path) -> None:
    def kinds(**attributes: Any) -> set[str]:
        catalogue = read(save(SimpleNamespace(**attributes), tmp_path / "a.pt"))
        parts.assign(catalogue)
        return {entry.part.kind for entry in catalogue.entries.values()}

    assert kinds(observations=torch.ones(5, 3), edge_index=torch.zeros(2, 2)) == {"other"}
    assert kinds(layer={"weight": torch.ones(2, 2), "bias": torch.ones(2)}) == {"model"}


def test_an_object_made_from_itself_is_refused(tmp_path: Path) -> None:
    # As `Params4bit` of bitsandbytes has the module that it is the weight of.
    module = nn.Linear(2, 2)
    module.weight.owner, module.weight.scale = module, torch.ones(1)
    save(module, tmp_path / "a.pt")
    for to in ("torch", "dcp"):
        with pytest.raises(LossError, match="is one of its own constructor arguments"):
            ckpttool.convert(str(tmp_path / "a.pt"), str(tmp_path / "b"), to=to)
        assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
