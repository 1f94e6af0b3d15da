"""Sharded tensors in pickles, against what torch's own DTensor and ShardedTensor say of themselves."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_ranks import as_rank, chunked, cut, mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.values import Stub, stub_type
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.serialization import dtensor as sharded
from ckpttool.serialization import torch_pickle as torchpickle
from ckpttool.serialization.torch_pickle import TensorRef

Layout = tuple[tuple[int, ...], list[Any]]


def stubs(value: Any, path: Path) -> Any:
    """The tree of a file of torch, by our pickle machine."""
    torch.save(value, path)
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        return torchpickle.load(archive.read(name), "data.pkl")


def read(value: Any, path: Path) -> Any:
    return sharded.replace(stubs(value, path))


LAYOUTS: list[Layout] = [
    ((4,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((8,), [Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(1), Shard(0)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((3, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2, 2), [Replicate(), _StridedShard(1, split_factor=2), Shard(1)]),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("shape", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [(30, 6), (7, 5), (1, 9), (13, 2)], ids=str)
def test_pieces_are_where_torch_cut_them(tmp_path: Path, shape: Any, placements: list[Any], size: Any) -> None:
    whole = torch.arange(float(size[0] * size[1])).reshape(size)
    world = torch.Size(shape).numel()
    for rank in range(world):
        with as_rank(rank, world):
            made = cut(whole, mesh(*shape), *placements)
            found = read({"w": made}, tmp_path / "w.pt")["w"]
            local = made.to_local()
            assert (found.kind, found.rank, found.world, found.mesh) == ("DTensor", rank, world, tuple(shape))
            assert found.shape == size and found.ranks == tuple(range(world))
            if not local.numel():
                assert not found.boxes
            # Each element says where in the whole it was: what the pieces say must agree.
            for piece in found.boxes:
                there = whole[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))]
                here = local.as_strided(piece.ref.shape, piece.ref.strides, local.storage_offset())
                if len(found.boxes) > 1:
                    here = local.as_strided(piece.ref.shape, piece.ref.strides, piece.ref.offset)
                assert torch.equal(here, there), (rank, piece)
            assert sum(torch.Size(p.sizes).numel() for p in found.boxes) == local.numel()


def test_fsdp2_over_tensor_parallelism_that_is_uneven() -> None:
    # What FSDP2 does: it cuts what tensor parallelism left, from right to left, which is not what
    # `_StridedShard` says of 9 rows from left to right.
    rows = torch.arange(9)
    for fsdp, tp in itertools.product(range(4), range(2)):
        mine = rows.chunk(2)[tp].chunk(4)
        have = mine[fsdp] if fsdp < len(mine) else rows[:0]
        shard = _by_hand((9,), (4, 2), (fsdp, tp), ["_StridedShard", "Shard"], len(have), factors=[2, 1])
        assert [(p.offsets[0], p.sizes[0]) for p in shard.boxes] == (
            [(int(have[0]), len(have))] if len(have) else []
        )  # fmt: skip


def _by_hand(
    shape: Any, on: Any, coordinate: Any, names: list[str], local: int, factors: list[int], order: Any = None
) -> sharded.RankShard:
    def stub(name: str, **state: Any) -> Stub:
        made = stub_type("torch.distributed.tensor.placement_types", name).__new__(
            stub_type("torch.distributed.tensor.placement_types", name)
        )
        made.state = [state]
        return made

    storage = torchpickle.StorageRef("0", None, 4 * 64)
    ref = TensorRef(storage, DTYPES["float32"], 0, (local, *shape[1:]), (1,) * len(shape))
    placements = tuple(
        stub(n, dim=0, split_factor=f) if n == "_StridedShard" else stub(n, dim=0)
        for n, f in zip(names, factors, strict=True)
    )
    world = min(torch.Size(on).numel(), 64)
    layout = stub("_MeshLayout", shape=on, stride=_strides(on))
    known = {"_rank": 0, "_flatten_rank_map": tuple(range(world)), "_coordinate_on_dim": coordinate}
    at_mesh = stub("DeviceMesh", _layout=layout, _mesh_dim_names=None, **known)
    spec = stub("DTensorSpec", mesh=at_mesh, placements=placements, shard_order=order)
    kind = stub_type("torch.distributed.tensor", "DTensor")
    args = (kind, stub_type("torch", "float32"), shape)
    state = (None, {"_local_tensor": ref, "_spec": spec})
    call = stub_type("torch._tensor", "_rebuild_from_type_v2")(
        stub_type("torch._utils", "_rebuild_wrapper_subclass"), kind, args, state
    )
    found = sharded.replace([call])[0]
    assert isinstance(found, sharded.RankShard)
    return found


def _strides(shape: Any) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


@settings(max_examples=200)
@given(data=st.data())
def test_the_geometry_is_upstreams(data: st.DataObject) -> None:
    on = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), label="mesh"))
    rows = data.draw(st.integers(0, 40), label="rows")
    coordinate = tuple(data.draw(st.integers(0, n - 1)) for n in on)
    placements = [Shard(0)] * len(on)
    size, offset = _compute_local_shape_and_global_offset((rows,), on, list(coordinate), placements)
    shard = _by_hand((rows,), on, coordinate, ["Shard"] * len(on), size[0], [1] * len(on))
    assert [(p.sizes, p.offsets) for p in shard.boxes] == ([(size, offset)] if size[0] else [])


def test_a_shard_order_of_its_own() -> None:
    # Mesh dimension 1 cuts first: what torch 2.10 and later call `ShardOrderEntry(0, (1, 0))`.
    rows = torch.arange(10)
    have = rows.chunk(2)[1].chunk(2)[0]
    found = _by_hand((10,), (2, 2), (0, 1), ["Shard", "Shard"], len(have), [1, 1], order=((0, (1, 0)),))
    assert [p.offsets for p in found.boxes] == [(int(have[0]),)]


def test_a_submesh_knows_its_ranks(tmp_path: Path) -> None:
    for rank in range(4):
        with as_rank(rank, 4):
            whole = mesh(2, 2)
            for dim, ranks in (("a", [rank % 2, rank % 2 + 2]), ("b", [rank // 2 * 2, rank // 2 * 2 + 1])):
                found = read({"w": cut(torch.ones(6), whole[dim], Shard(0))}, tmp_path / "w.pt")["w"]
                assert list(found.within) == ranks == whole[dim].mesh.tolist()
                assert (found.rank, found.ranks, found.names) == (rank, (0, 1, 2, 3), (dim,))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_sharded_tensors(tmp_path: Path, world: int, rows: int) -> None:
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    for rank in range(world):
        with as_rank(rank, world):
            made = chunked(whole, rank, world)
            found = read([{"w": made}], tmp_path / "w.pt")[0]["w"]
            boxes = [(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)) for s in made.local_shards()]
        assert [(p.offsets, p.sizes) for p in found.boxes] == boxes
        assert (found.kind, found.rank, found.world, found.shape) == ("ShardedTensor", rank, world, (rows, 3))
        assert found.dtype.name == "float32"


def test_one_object_twice_is_one_shard_twice(tmp_path: Path) -> None:
    with as_rank(0, 2):
        made = cut(torch.ones(6), mesh(2), Shard(0))
        shards: list[sharded.RankShard] = []
        tree = sharded.replace(stubs({"a": made, "b": [made, (made, 1)]}, tmp_path / "w.pt"), shards)
    assert tree["a"] is tree["b"][0] is tree["b"][1][0]
    assert len(shards) == 1 and tree["b"][1][1] == 1


def test_a_parameter_is_found_as_well(tmp_path: Path) -> None:
    with as_rank(1, 2):
        made = torch.nn.Parameter(cut(torch.ones(6, 2), mesh(2), Shard(0)))
        assert isinstance(read({"w": made}, tmp_path / "w.pt")["w"], sharded.RankShard)


def test_partial_tensors_are_refused(tmp_path: Path) -> None:
    with as_rank(0, 2):
        made = DTensor.from_local(torch.ones(3), mesh(2), [Partial()])
        with pytest.raises(ReadError, match=r"tensor `a\.w`: a partial DTensor") as caught:
            read({"a": {"w": made}}, tmp_path / "w.pt")
    assert "Replicate" in str(caught.value.hint)


def test_a_local_tensor_that_does_not_fit(tmp_path: Path) -> None:
    with as_rank(0, 2):
        made = DTensor.from_local(torch.ones(5), mesh(2), [Shard(0)], shape=torch.Size((6,)), stride=(1,))
        with pytest.raises(CorruptError, match=r"the local tensor is \[5\].*leaves \[3\]"):
            read({"w": made}, tmp_path / "w.pt")


def test_numbers_without_measure_take_no_time() -> None:
    for shape, on, names, factors in (
        ((1 << 60,), (1 << 40,), ["Shard"], [1]),
        ((1 << 60,), (2,), ["_StridedShard"], [1 << 50]),
        ((1 << 60,), (2,), ["_StridedShard"], [1 << 20]),
    ):
        with pytest.raises(CkptError):
            _by_hand(shape, on, (0,), names, 3, factors)


@pytest.mark.parametrize("old", ["torch.distributed._tensor.api", "elsewhere.dtensor"])
def test_classes_that_moved(tmp_path: Path, old: str) -> None:
    with as_rank(1, 2):
        data = stubs({"w": cut(torch.ones(6), mesh(2), Shard(0))}, tmp_path / "w.pt")
    call = data["w"]
    call.args = (call.args[0], stub_type(old, "DTensor"), *call.args[2:])
    found = sharded.replace(data)["w"]
    assert [p.offsets for p in found.boxes] == [(3,)]


def _spoil_each(value: Any, seen: set[int]) -> Any:
    """Every place of a tree of stubs that holds a value, as a function that puts another there."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key in list(value):
            yield lambda new, key=key: value.__setitem__(key, new)
            yield from _spoil_each(value[key], seen)
    elif isinstance(value, list):
        for i in range(len(value)):
            yield lambda new, i=i: value.__setitem__(i, new)
            yield from _spoil_each(value[i], seen)
    elif isinstance(value, tuple):
        for item in value:
            yield from _spoil_each(item, seen)
    elif isinstance(value, Stub):
        for name in ("args", "state"):
            yield lambda new, name=name: setattr(value, name, (new,) if name == "args" else [new])
            yield from _spoil_each(getattr(value, name), seen)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["dtensor", "sharded"])
@pytest.mark.parametrize("junk", [None, -1, "text", (), (1, "x"), {}, [[]]], ids=repr)
def test_anything_else_is_one_of_our_errors(tmp_path: Path, kind: str, junk: Any) -> None:
    def fresh() -> Any:
        with as_rank(1, 2):
            made = cut(torch.ones(6, 2), mesh(2), Shard(0)) if kind == "dtensor" else chunked(torch.ones(6, 2), 1, 2)
            return stubs({"w": made}, tmp_path / "w.pt")

    count = sum(1 for _ in _spoil_each(fresh(), set()))
    assert count > 20
    for i in range(count):
        tree = fresh()
        next(itertools.islice(_spoil_each(tree, set()), i, None))(junk)
        try:
            sharded.replace(tree)
        except CkptError as error:
            assert "`w`" in error.message
