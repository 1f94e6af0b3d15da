"""Meshes and placements, against torch's own arithmetic of DTensors."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ckpttool.catalogue.boxes import tiling_fault
from ckpttool.errors import UsageError
from ckpttool.layout.mesh import Mesh, mesh_boxes, parse_mesh, parse_placements


def of_torch(mesh: Mesh, placed: dict[str, int]) -> list[Placement]:
    """The placements that FSDP2 gives a parameter: `_StridedShard` where tensor parallelism cuts the same dimension."""
    made: list[Placement] = []
    for name in mesh.names:
        if name not in placed:
            made.append(Replicate())
        elif name == "shard" and placed.get("tp") == placed["shard"]:
            made.append(_StridedShard(placed["shard"], split_factor=mesh.sizes[mesh.names.index("tp")]))
        else:
            made.append(Shard(placed[name]))
    return made


@given(
    shape=st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3)),
    names=st.sampled_from([("shard",), ("replicate", "shard"), ("shard", "tp"), ("replicate", "shard", "tp")]),
    data=st.data(),
)
def test_every_rank_has_the_box_that_torch_gives_it(
    shape: tuple[int, ...], sizes: tuple[int, ...], names: tuple[str, ...], data: st.DataObject
) -> None:
    mesh = Mesh(names, sizes[: len(names)])
    dims = st.integers(0, len(shape) - 1)
    placed = {name: data.draw(dims) for name in names if name != "replicate"}
    if placed.get("tp") == placed["shard"] and shape[placed["tp"]] % prod(mesh.sizes[-2:]):
        return  # torch itself does not agree with FSDP2 about strided shards that do not divide
    held = {rank: box for box, ranks in mesh_boxes(shape, mesh, placed) for rank in ranks}
    for rank, coordinate in enumerate(product(*map(range, mesh.sizes))):
        local, offset = _compute_local_shape_and_global_offset(
            shape, mesh.sizes, lambda dim, at=coordinate: at[dim], of_torch(mesh, placed)
        )
        expected = None if 0 in local else (tuple(offset), tuple(local))
        assert held.get(rank) == expected


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3)),
    data=st.data(),
)
def test_boxes_tile_the_tensor(shape: tuple[int, ...], sizes: tuple[int, int, int], data: st.DataObject) -> None:
    dims = st.integers(0, len(shape) - 1)
    mesh = Mesh(("replicate", "shard", "tp"), sizes)
    held = list(mesh_boxes(shape, mesh, {"shard": data.draw(dims), "tp": data.draw(dims)}))
    assert tiling_fault(shape, [box[0] for box, _ in held], [box[1] for box, _ in held]) is None
    assert all(len(ranks) == sizes[0] for _, ranks in held)


def test_parse() -> None:
    mesh = parse_mesh("ddp=2, fsdp=4,tp=2")
    assert mesh == Mesh(("replicate", "shard", "tp"), (2, 4, 2))
    assert (mesh.world, str(mesh)) == (16, "replicate=2,shard=4,tp=2")
    assert parse_placements("tp:1,dp:0", mesh) == {"tp": 1, "shard": 0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pp=2", "no mesh dimension `pp`"),
        ("shard", "is not a dimension and its size"),
        ("shard=0", "is not a dimension and its size"),
        ("shard=-1", "is not a dimension and its size"),
        ("shard=2,dp=2", "`shard` is given twice"),
        ("shard=1048576,tp=2", "at most"),
        ("", "is not a dimension and its size"),
        ("2x2", "is not a dimension and its size"),
    ],
)
def test_meshes_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["pp:0", "tp", "tp:x", "replicate:0", "tp:0,tp:1"])
def test_placements_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="placements"):
        parse_placements(text, parse_mesh("replicate=2,shard=2,tp=2"))
