"""The library's face for reading, against what was saved."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same import assert_same
from support import warm_python
from support.checkpoints import bits
from support.damage import flip, flipped_copy
from support.paths import CHECKPOINTS, ROOT
from support.upstream_samples import NAMES, original, path_of

import ckpttool
from ckpttool.catalogue.entries import Path as Key
from ckpttool.catalogue.entries import Tensor
from ckpttool.errors import CkptError, CorruptError, ReadError, UsageError
from ckpttool.formats.detect import detect
from ckpttool.storage.files import Pool
from ckpttool.storage.stores import locate
from ckpttool.text import size


def leaves(tree: Any, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """What lies below dicts and lists, by key path."""
    if isinstance(tree, dict) or (
        isinstance(tree, list) and any(isinstance(v, (dict, list, torch.Tensor)) for v in tree)
    ):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def plain(value: Any) -> bool:
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return False
    return not (value.is_nested or value.is_quantized or value.is_meta)


def by_text(path: Key) -> tuple[str, ...]:
    # DCP has turned the integers of a path into strings.
    return tuple(map(str, path))


@pytest.mark.parametrize("name", NAMES)
def test_samples_hold_what_was_saved(name: str) -> None:
    try:
        detect(locate(path_of(name)))
    except ReadError:
        pytest.skip(f"no format reads {name}")
    with ckpttool.open(path_of(name)) as ckpt:
        mine = {by_text(p): p for p in ckpt.catalogue.entries}
        compared = 0
        for path, value in leaves(original(name)):
            if not plain(value) or by_text(path) not in mine:
                continue
            found = ckpt[mine[by_text(path)]]
            assert (found.shape, str(found.dtype)) == (tuple(value.shape), str(value.dtype).removeprefix("torch."))
            assert np.array_equal(bits(found.torch()), bits(value)), path
            compared += 1
        assert compared > 0 or not any(plain(value) for _, value in leaves(original(name)))
        if name == "dcp/unflattened_w2":
            with pytest.raises(ckpttool.CkptError, match="only the shards of rank 1 are stored"):
                ckpt.objects()
            return
        assert len(list(ckpt.tensors())) + len(ckpt.objects()) == len(ckpt.catalogue.entries)


FULL = str(CHECKPOINTS / "torch/full" / "ckpt.pt")
DTYPES = str(CHECKPOINTS / "torch/dtypes" / "ckpt.pt")
SHARDED = str(CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt")


def test_names_paths_and_values() -> None:
    saved = original("torch/full")
    with ckpttool.open(FULL) as ckpt:
        assert ckpt.format == "torch"
        assert ckpt.world_size == 1
        assert ckpt["step"] == saved["step"]
        assert ckpt["optim.param_groups.0.lr"] == saved["optim"]["param_groups"][0]["lr"]
        assert ckpt[("optim", "state", 0, "exp_avg")].torch().equal(saved["optim"]["state"][0]["exp_avg"])
        assert "step" in ckpt and "nothing" not in ckpt
        assert len(ckpt) == len(list(ckpt)) == len(set(ckpt))
        assert ckpt.objects()["step"] == saved["step"]
        for wrong in ("nothing", ("optim", "state", "0", "exp_avg"), ""):
            with pytest.raises(KeyError):
                ckpt[wrong]


def test_a_world_of_ranks() -> None:
    with ckpttool.open(SHARDED) as ckpt:
        assert (ckpt.format, ckpt.world_size) == ("dcp", 4)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads of payloads."""
    found: list[int] = []
    read_into, read = Pool.read_into, Pool.read

    def counted_into(pool: Pool, path: str, offset: int, buffer: memoryview) -> None:
        found.append(len(buffer))
        read_into(pool, path, offset, buffer)

    def counted(pool: Pool, path: str, offset: int, nbytes: int) -> bytes:
        found.append(nbytes)
        return read(pool, path, offset, nbytes)

    monkeypatch.setattr(Pool, "read_into", counted_into)
    monkeypatch.setattr(Pool, "read", counted)
    return found


def test_slices_read_only_their_bytes(tmp_path: Path, read: list[int]) -> None:
    values = torch.arange(40_000.0).reshape(400, 100)
    torch.save({"w": values, "s": torch.tensor(3.0)}, tmp_path / "c.pt")
    with ckpttool.open(str(tmp_path / "c.pt")) as ckpt:
        read.clear()
        tensor = ckpt["w"]
        part = tensor[4:8]
        assert part.shape == (4, 100) and len(part) == 4
        assert repr(part) == "<w: float32 [4, 100]>"
        assert read == []
        assert torch.equal(part.torch(), values[4:8])
        assert sum(read) == 1600
        read.clear()
        assert torch.equal(tensor[-1].torch(), values[-1])
        assert sum(read) == 400
        read.clear()
        assert tensor[7, 3].numpy() == 703.0
        assert sum(read) == 4
        read.clear()
        assert tensor[5:5].torch().shape == (0, 100)
        assert ckpt["s"][...].torch() == 3.0
        assert sum(read) == 4


def test_a_slice_of_a_sharded_tensor_reads_the_ranks_that_hold_it(read: list[int]) -> None:
    with ckpttool.open(SHARDED) as ckpt:
        name = max((t for t in ckpt.tensors() if t.name.startswith("model.")), key=lambda t: t.shape[:1]).name
        saved = original("dcp/fsdp2_w4")["model"][name.removeprefix("model.")]
        ckpt[name].torch()
        read.clear()
        assert np.array_equal(bits(ckpt[name][:2].torch()), bits(saved[:2]))
        few = sum(read)
        read.clear()
        assert np.array_equal(bits(ckpt[name].torch()), bits(saved))
        assert few < sum(read)


keys = st.one_of(st.integers(-4, 3), st.slices(4).filter(lambda s: s.step is None or s.step > 0))


@settings(max_examples=100)
@given(st.lists(keys, max_size=3), st.integers(-1, 3), st.slices(4).filter(lambda s: s.step is None or s.step > 0))
def test_indexing_is_numpys(tmp_path: Path, index: list[Any], ellipsis: int, again: slice) -> None:
    values = np.arange(64).reshape(4, 4, 4)
    path = tmp_path / "c.pt"
    if not path.exists():
        torch.save({"w": torch.from_numpy(values)}, path)
    if ellipsis >= 0:
        index.insert(min(ellipsis, len(index)), ...)
    key = tuple(index) if len(index) != 1 else index[0]
    with ckpttool.open(str(path)) as ckpt:
        found = ckpt["w"][key]
        expected = values[key]
        assert found.shape == expected.shape
        assert np.array_equal(found.numpy(), expected)
        assert np.array_equal(found.torch().numpy(), expected)
        if expected.ndim:
            assert np.array_equal(found[again].numpy(), expected[again])
            assert np.array_equal(found[..., again].numpy(), expected[..., again])


def test_indexes_that_are_none() -> None:
    with ckpttool.open(FULL) as ckpt:
        tensor = ckpt["model.embed.weight"]
        for wrong in (10_000, -10_000, (0, 0, 0), slice(None, None, -1)):
            with pytest.raises(IndexError):
                tensor[wrong]
        with pytest.raises(IndexError):
            tensor[1:3][2]


def test_dtypes_that_numpy_lacks_are_torchs() -> None:
    saved = original("torch/dtypes")
    with ckpttool.open(DTYPES) as ckpt:
        for name, value in saved.items():
            short = str(value.dtype).removeprefix("torch.")
            found = ckpt[name].torch()
            assert found.dtype == value.dtype
            assert np.array_equal(bits(found), bits(value))
            try:
                expected = value.numpy()
            except TypeError:
                with pytest.raises(UsageError, match=re.escape(f"`{name}`: numpy has no {short}")) as caught:
                    ckpt[name].numpy()
                assert caught.value.hint == "use `.torch()`"
                continue
            assert ckpt[name].numpy().dtype == expected.dtype
            assert ckpt[name].numpy().tobytes() == expected.tobytes()


def test_what_is_read_belongs_to_the_reader() -> None:
    with ckpttool.open(FULL) as ckpt:
        first = ckpt["model.embed.weight"].torch()
        first.fill_(7)
        ckpt["model.embed.weight"].numpy()[...] = 9
        assert not ckpt["model.embed.weight"].torch().equal(first)
    assert first.eq(7).all()


@pytest.mark.parametrize("name", ["torch/quantized", "torch/storages", "torch/sparse"])
def test_odd_tensors_are_read_or_refused_by_name(name: str) -> None:
    with ckpttool.open(path_of(name)) as ckpt:
        for entry in ckpt.catalogue.entries.values():
            if isinstance(entry, Tensor):
                try:
                    assert ckpt[entry.path].torch().shape == entry.shape
                except CkptError as error:
                    assert entry.name in str(error)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path, words in (
        (tmp_path / "none", "no such file"),
        (tmp_path / "notes.txt", "unrecognised format"),
        (tmp_path, "contains no checkpoint of a known format"),
    ):
        with pytest.raises(ReadError, match=words):
            ckpttool.open(str(path))


@pytest.mark.parametrize(
    ("sample", "name"), [("dcp/hsdp_w4/ckpt", "model.embed.weight"), ("torch/full/ckpt.pt", "model.embed.weight")]
)
@pytest.mark.parametrize("read", ["torch", "numpy", "bits"])
def test_a_flipped_bit_is_not_read(tmp_path: Path, sample: str, name: str, read: str) -> None:
    whole = CHECKPOINTS / sample
    copy = flipped_copy(whole, name, tmp_path)
    with ckpttool.open(whole) as good, ckpttool.open(copy) as bad:
        assert isinstance(good[name], ckpttool.LazyTensor) and good[name].shape == bad[name].shape
        with pytest.raises(CorruptError, match=rf"`.*{copy.name}.*`: tensor `{name}`: bytes .* have CRC") as caught:
            getattr(bad[name], read)()
        assert caught.value.exit_code == 4
        differ = np.flatnonzero(bad[name].bits(check=False) != good[name].bits())
        assert len(differ) == 1  # that is what the default keeps from the caller
        # A slice is read alone, and its storage only on demand.
        assert getattr(bad[name][:1], read)() is not None
        with pytest.raises(CorruptError, match=name):
            getattr(bad[name][:1] if differ[0] < good[name].shape[1] else bad[name][-1:], read)(check=True)
        assert getattr(good[name][:1], read)(check=True) is not None


def test_flipped_bit_in_a_storage_that_tensors_share(tmp_path: Path, read: list[int]) -> None:
    """It is read whole for its checksum where it is small, and where a quarter of it was read."""
    for name, elements in (("small", 300), ("large", 1 << 20)):
        path = tmp_path / f"{name}.pt"
        flat = torch.arange(elements, dtype=torch.float32)
        torch.save({"first": flat[:10], "second": flat[10:20], "rest": flat[20:]}, path)
        with ckpttool.open(path) as whole:
            assert all(torch.equal(whole[n].torch(), torch.load(path)[n]) for n in ("second", "rest", "first"))
        flip(path, path.read_bytes().index(flat[10:20].numpy().tobytes()) + 5)
    with ckpttool.open(tmp_path / "small.pt") as small:
        for tensor in ("second", "first", "second"):
            with pytest.raises(CorruptError, match=f"tensor `{tensor}`: bytes .* have CRC"):
                small[tensor].torch()
        assert torch.equal(small["first"].torch(check=False), torch.arange(10.0))
    with ckpttool.open(tmp_path / "large.pt") as large:
        read.clear()
        assert torch.equal(large["first"].torch(), torch.arange(10.0)) and sum(read) < 1000
        with pytest.raises(CorruptError, match="have CRC"):
            large["second"].torch(check=True)
        with pytest.raises(CorruptError, match=r"tensor `rest`: bytes .* have CRC"):
            large.state_dict()
    local = CHECKPOINTS / "rank/fsdp1_local_w2"
    with ckpttool.open(local / "ckpt", shapes=str(local / "reference.pt")) as ranks:
        read.clear()
        ranks.state_dict()
        # Each storage once more than the tensors in it, however many these are.
        assert sum(read) < 3 * sum(tensor.nbytes for tensor in ranks.tensors())


def test_numpy_and_torch_take_a_tensor_for_an_array(tmp_path: Path) -> None:
    values = torch.arange(12.0).reshape(3, 4)
    torch.save({"w": values, "half": values.bfloat16(), "s": torch.tensor(2.0)}, tmp_path / "c.pt")
    with ckpttool.open(tmp_path / "c.pt") as ckpt:
        assert np.array_equal(np.asarray(ckpt["w"]), values.numpy())
        assert np.asarray(ckpt["w"][1:], dtype="float64").dtype == np.float64
        assert np.asarray(ckpt["s"]).shape == ()
        assert torch.as_tensor(ckpt["w"][2]).equal(values[2])
        assert torch.as_tensor(ckpt["half"]).equal(values.bfloat16())
        for half in (ckpt["half"], ckpt["half"][0]):
            with pytest.raises(UsageError, match=r"`half`: numpy has no bfloat16\nhint: use `\.torch\(\)`"):
                np.asarray(half)
        half = ckpt["half"]
        assert (half.ndim, half.numel, half.nbytes, half[1].nbytes) == (2, 12, 24, 8)
        assert half.dtype == "bfloat16" and half.dtype in {"bfloat16"} and repr(half.dtype) == "bfloat16"
        assert half.dtype != "float32" and half.dtype != ckpt["w"].dtype


def test_a_subtree_is_a_mapping_of_what_lies_below() -> None:
    saved = original("torch/full")["model"]
    with ckpttool.open(FULL) as ckpt:
        model = ckpt["model"]
        assert sorted(model) == sorted(saved) == sorted(ckpt[("model",)])
        assert sorted(model._ipython_key_completions_()) == sorted(saved)
        state = model.state_dict()
        assert all(np.array_equal(bits(state[name]), bits(value)) for name, value in saved.items())
        assert model["embed"]["weight"].name == "model.embed.weight"
        assert "model.embed.weight" in ckpt._ipython_key_completions_()
        assert "<td>embed.weight</td><td>float32</td>" in model._repr_html_()
        assert len(ckpt._repr_html_()) < 10_000
        with pytest.raises(KeyError, match=r"embed\.weight"):
            model["embed.weigth"]


def test_a_frame_has_a_row_for_each_tensor() -> None:
    saved = original("torch/full")["model"]
    with ckpttool.open(FULL) as ckpt:
        rows = ckpt["model"].frame()
        assert [row["name"] for row in rows] == list(ckpt["model"].state_dict())
        for row in rows:
            value = saved[row["name"]]
            assert (row["shape"], row["numel"], row["nbytes"]) == (list(value.shape), value.numel(), value.nbytes)
            assert (f"torch.{row['dtype']}", row["part"]) == (str(value.dtype), "model")
        assert len(ckpt.frame()) == len(ckpt.catalogue.tensors) and ckpt.frame()[0]["name"].startswith("model.")


def test_a_tensor_in_a_notebook_shows_its_shards() -> None:
    with ckpttool.open(CHECKPOINTS / "dcp/fsdp2_w4/ckpt") as ckpt:
        page = next(ckpt.tensors("model.layers.0.qkv.weight"))._repr_html_()
    assert "model.layers.0.qkv.weight: float32 [" in page and page.count("<tr>") == 5
    assert "<td>__0_0.distcp</td><td>[0, 0]</td>" in page


def _sum(tensor: ckpttool.LazyTensor) -> float:
    return float(tensor.torch().double().sum())


def test_other_processes_get_checkpoints_and_tensors() -> None:
    with ckpttool.open(SHARDED) as ckpt, multiprocessing.get_context("spawn").Pool(1) as pool:
        tensors = [t for t in ckpt.tensors() if t.name.startswith("model.")]
        slices = [t[1:] for t in tensors if t.ndim]
        assert pool.map(_sum, tensors + slices) == [_sum(t) for t in tensors + slices]
        assert list(pickle.loads(pickle.dumps(ckpt))) == list(ckpt)


def test_closed_is_closed() -> None:
    with ckpttool.open(FULL) as ckpt:
        tensor = ckpt["model.embed.weight"]
    ckpt.close()
    for read in (tensor.torch, tensor[:0].torch, tensor.numpy, lambda: ckpt["step"], ckpt["model"].state_dict):
        with pytest.raises(UsageError, match="is closed"):
            read()
    assert tensor.shape and list(ckpt)


def test_the_public_names_are_listed() -> None:
    code = """
import builtins, pydoc, ckpttool
from ckpttool import *
assert open is builtins.open and convert is ckpttool.convert
names = dir(ckpttool)
assert {*ckpttool.__all__, "open"} == {*names} and not [name for name in names if name.startswith("_MODULES")]
assert all(getattr(ckpttool, name).__doc__ for name in names)
text = pydoc.plain(pydoc.render_doc(ckpttool))
assert all(f"{name}(" in text for name in ("convert", "load", "class Checkpoint"))
"""
    subprocess.run([*warm_python.python(), "-c", code], check=True, timeout=300)
    # Without torch, all but what needs it.
    code = """
import pydoc, ckpttool
ckpttool.find_spec = lambda name: None
assert "verify(" in pydoc.plain(pydoc.render_doc(ckpttool)) and "load" not in dir(ckpttool)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    listed = set(re.findall(r"^::: ckpttool\.(\w+)$", page, re.MULTILINE))
    errors = {name for name in dir(ckpttool) if name.endswith("Error")}  # listed by their module
    assert listed >= {*dir(ckpttool)} - {*errors, "__version__"}


def test_results_are_short(tmp_path: Path) -> None:
    names = [f"layers.{i}.<b>weight</b>" for i in range(600)]
    torch.save({"model": {name: torch.zeros(2) for name in names}}, tmp_path / "a.pt")
    found = ckpttool.inspect(tmp_path / "a.pt")
    assert repr(found) == f"<Catalogue: torch, 600 tensors, 0 objects, {size(found.nbytes())} in 1 file>"
    assert repr(found.tensors) == "<600 tensors>" and found.tensors[5].name == f"model.{names[5]}"
    assert repr(found.tensors[-1]) == f"<Tensor model.{names[-1]}: float32 [2], 1 chunk>" and len(found.tensors) == 600
    torch.save({"model": {name: torch.ones(2) for name in names[1:]}}, tmp_path / "b.pt")
    results = [
        ckpttool.diff(tmp_path / "a.pt", tmp_path / "b.pt"),
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "c", to="dcp"),
        ckpttool.verify(tmp_path / "a.pt"),
        ckpttool.show(tmp_path / "a.pt", f"model.{names[0]}"),
        ckpttool.load(tmp_path / "a.pt", None),
    ]
    assert all(len(repr(result)) < 300 + len(str(tmp_path)) * 3 and "\n" not in repr(result) for result in results)
    assert repr(results[0]).startswith(f"<Diff: {tmp_path}/a.pt and {tmp_path}/b.pt differ: 599 of 599 tensors")
    assert repr(results[1]) == f"<Conversion: wrote {tmp_path}/c: 600 tensors, 0 objects, 4.80 kB of values>"
    for result in (found, results[0]):
        page = result._repr_html_()
        assert len(page) < 10_000 and "and 580 more" in page and "<b>" not in page and "&lt;b&gt;" in page


def test_tensors_by_name() -> None:
    with ckpttool.open(FULL) as ckpt:
        every = [tensor.name for tensor in ckpt.tensors()]
        norms = [name for name in every if name.endswith("norm.weight") and name.startswith("model.")]
        assert norms and [tensor.name for tensor in ckpt.tensors("model.*norm.weight")] == norms
        assert [tensor.name for tensor in ckpt["model"].tensors("*norm.weight")] == norms
        assert [tensor.name for tensor in ckpt.tensors("re:model.embed.*", "nothing")] == ["model.embed.weight"]


RAISING = [
    "open",
    "inspect",
    "show",
    "diff",
    "verify",
    "convert",
    "reshard",
    "export",
    "repair",
    "load",
    "load_into",
    "save",
]
METHODS = [ckpttool.LazyTensor.bits, ckpttool.LazyTensor.numpy, ckpttool.LazyTensor.torch, ckpttool.Subtree.state_dict]


@pytest.mark.parametrize(
    "public", [*(getattr(ckpttool, name) for name in RAISING), *METHODS], ids=lambda one: one.__name__
)
def test_docstrings_name_the_errors(public: Callable[..., Any]) -> None:
    """In a section that the API page makes a table of; each is an error of `ckpttool.errors`."""
    section = inspect.cleandoc(public.__doc__ or "").partition("\nRaises:\n")[2]
    names = re.findall(r"^    (\w+): \S", section, re.MULTILINE)
    assert names and all(issubclass(getattr(ckpttool.errors, name), ckpttool.CkptError) for name in names)
    assert "Raises" not in (public.__doc__ or "").partition("Raises:")[0]


def test_docstrings_of_load_name_every_argument() -> None:
    section = inspect.cleandoc(ckpttool.load.__doc__ or "").partition("\nArgs:\n")[2].partition("\nRaises:")[0]
    assert re.findall(r"^    (\w+): ", section, re.MULTILINE) == list(inspect.signature(ckpttool.load).parameters)


def test_the_state_dict_of_an_optimizer_is_nested(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "full.pt")
    fresh = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    with ckpttool.open(tmp_path / "full.pt") as ckpt:
        fresh.load_state_dict(ckpt["optim"].state_dict())
        assert list(ckpt["optim"]["state"].state_dict()) == [0, 1, 2, 3]
        assert ckpt["model"].state_dict().keys() == model.state_dict().keys()
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_the_garbage_collector_runs_again_after_opening(tmp_path: Path) -> None:
    with ckpttool.open(CHECKPOINTS / "dcp/hsdp_w4/ckpt"):
        assert gc.isenabled()
    (tmp_path / "x.pt").write_bytes(b"no checkpoint")
    with pytest.raises(CkptError):
        ckpttool.open(tmp_path / "x.pt")
    assert gc.isenabled()


def test_what_is_asked_of_a_checkpoint_and_of_its_tensors() -> None:
    """All of it was to be had by other functions only, or `False` in silence."""
    with ckpttool.open(CHECKPOINTS / "dcp/fsdp2_w4/ckpt") as ckpt:
        weight = ckpt["model.layers.0.qkv.weight"]
        assert (ckpt.step, ckpt.epoch, ckpt.metadata) == (3, 1, {})
        assert weight.placements == ("Shard(0)",) and ckpt["model.embed.weight"][3:].placements == ("Shard(0)",)
        assert [(one["offsets"], one["sizes"], one["file"], one["rank"]) for one in weight.chunks[:1]] == [
            ((0, 0), (6, 7), "__0_0.distcp", 0)
        ]
        assert len(weight.chunks) == 4
        assert weight.dtype == torch.float32 and torch.float32 == weight.dtype and weight.dtype != torch.float64
        assert weight[2, 3].item() == float(weight.torch()[2, 3]) and ckpt["model.tokens_seen"].item() == 30
        with pytest.raises(ValueError, match="has 7 elements"):
            weight[2].item()
        assert repr(ckpt["model"]).startswith(f"<{CHECKPOINTS / 'dcp/fsdp2_w4/ckpt'}, `model`: dcp, 19 tensors")
        for name in ("model.nrm", "model.norm.weigth"):
            with pytest.raises(KeyError, match=r"did you mean .*norm"):
                ckpt[name]
        with pytest.raises(KeyError, match="nrm; did you mean norm"):
            ckpt["model"]["nrm"]
    with ckpttool.open(CHECKPOINTS / "safetensors/single/ckpt.safetensors") as ckpt:
        assert ckpt.metadata["step"] == "3"
    assert ckpttool.ReadError is ReadError and ckpttool.UsageError is UsageError
