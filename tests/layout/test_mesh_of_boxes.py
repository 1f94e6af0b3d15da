"""Which mesh and placements give the boxes of a layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.catalogue import boxes
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent, Part, Tensor
from ckpttool.layout import rechunk as chunking
from ckpttool.layout.mesh import CheckpointSharding, Mesh, bytes_per_rank, find_sharding, mesh_boxes, parse_mesh
from ckpttool.layout.rechunk import Rules

MODEL = Part("model", ("model",))


def catalogue(*shapes: boxes.Ints) -> Catalogue:
    made = Catalogue("torch")
    for i, shape in enumerate(shapes):
        chunks = Chunks.single(shape, Extent(0, 0, 0))
        made.add(Tensor(("model", f"w{i}"), dtype("float32"), shape, chunks, part=MODEL))
    return made


def boxes_of(tensor: Tensor, found: CheckpointSharding) -> set[boxes.Box]:
    placed = found.placements.get(tensor.path, {})
    return {box for box, _ in mesh_boxes(tensor.shape, found.mesh, placed)}


sizes = st.integers(1, 9)
shapes = st.lists(st.lists(sizes, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(shapes, st.sampled_from(["shard=3", "shard=2,tp=2", "replicate=2,shard=2", "replicate=2,shard=2,tp=3", "tp=4"]),
       st.integers(0, 2))  # fmt: skip
def test_the_boxes_of_any_mesh_are_found_again(shapes: list[boxes.Ints], text: str, dim: int) -> None:
    mesh = parse_mesh(text)
    rules = [f"w{i}" for i, shape in enumerate(shapes) if dim < len(shape)] if "tp" in text else []
    laid = chunking.over_mesh(catalogue(*shapes), mesh, Rules(tuple((name, f"tp:{dim}") for name in rules)))
    found = find_sharding(laid, mesh, mesh.world)
    assert isinstance(found, CheckpointSharding)
    for tensor in laid.tensors:
        assert boxes_of(tensor, found) == set(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True))
    # Without the mesh, one that has the same boxes will do.
    other = find_sharding(laid, None, mesh.world)
    assert isinstance(other, CheckpointSharding) and other.mesh.world == mesh.world
    for tensor in laid.tensors:
        assert boxes_of(tensor, other) == set(zip(tensor.chunks.offsets, tensor.chunks.sizes, strict=True))


def test_the_mesh_is_found() -> None:
    for text, rules in (("shard=4", ()), ("replicate=2,shard=2", ()), ("shard=2,tp=2", (("w0", "tp:1"),))):
        mesh = parse_mesh(text)
        found = find_sharding(chunking.over_mesh(catalogue((8, 4), (8, 4)), mesh, Rules(rules)), None, 4)
        assert isinstance(found, CheckpointSharding) and found.mesh == mesh


def test_boxes_of_no_mesh() -> None:
    laid = catalogue((6, 5))
    laid.tensor(("model", "w0")).chunks = Chunks.placed([(((0, 0), (4, 5)), 0), (((4, 0), (2, 5)), 1)])
    assert find_sharding(laid, None, 2) == "no mesh of 2 ranks has the chunks of that layout"
    said = find_sharding(laid, parse_mesh("shard=2"), 2)
    assert said == "FSDP2 does not shard tensor `model.w0` as planned"


def test_columns_are_cut_evenly_by_fsdp() -> None:
    def columns(width: int) -> Catalogue:
        laid = catalogue((2, width))
        half = -(-width // 2)
        cut = [(((0, 0), (2, half)), 0), (((0, half), (2, width - half)), 1)]
        laid.tensor(("model", "w0")).chunks = Chunks.placed(cut)
        return laid

    found = find_sharding(columns(4), None, 2)
    assert isinstance(found, CheckpointSharding) and found.placements == {("model", "w0"): {"shard": 1}}
    found = find_sharding(columns(5), None, 2)
    assert isinstance(found, CheckpointSharding) and found.mesh == Mesh(("shard", "tp"), (1, 2))


@pytest.mark.parametrize("text", ["shard=2,replicate=2", "tp=2,shard=2"])
def test_the_order_of_a_mesh(text: str) -> None:
    said = find_sharding(catalogue((8, 4)), parse_mesh(text), 4)
    assert said == f"FSDP2 takes the dimensions of a mesh in the order replicate, shard, tp, and this is `{text}`"


def test_what_a_rank_holds() -> None:
    mesh = parse_mesh("replicate=2,shard=4")
    laid = chunking.over_mesh(catalogue((9, 10), (100,)), mesh, Rules(replicate=("w1",)))
    found = find_sharding(laid, mesh, 8)
    assert isinstance(found, CheckpointSharding)
    assert bytes_per_rank(laid, found) == (3 * 10 * 4 + 400, 400)
