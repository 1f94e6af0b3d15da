"""Which rank holds which box, against what FSDP2, DCP and torch.chunk make of the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoints
from support.checkpoints import grid, within
from support.paths import CHECKPOINTS
from support.upstream_samples import original
from test_layout import by_name, flattened, started, tied

from ckpttool.catalogue import parts
from ckpttool.catalogue.boxes import Box, tiling_fault
from ckpttool.catalogue.entries import Catalogue, Chunks, Extent
from ckpttool.errors import UsageError
from ckpttool.layout import rechunk as chunking
from ckpttool.layout.mesh import Mesh, mesh_boxes, parse_mesh
from ckpttool.layout.rechunk import Rules
from ckpttool.transfer import plan


def boxes_of(catalogue: Catalogue) -> dict[str, list[tuple[int, Box]]]:
    return {t.name: [(c.extent.file, (c.offsets, c.sizes)) for c in t.chunks] for t in catalogue.tensors}


def test_whole_is_one_chunk_on_rank_0() -> None:
    laid = chunking.whole(started({"w": torch.zeros(4, 2), "s": torch.tensor(1.0)}, {"w": grid((4, 2), (2, 1))}))
    assert boxes_of(laid) == {"w": [(0, ((0, 0), (4, 2)))], "s": [(0, ((), ()))]}


def test_as_stored_is_the_sources_chunks_without_the_empty_ones() -> None:
    cuts: dict[str, Sequence[Box]] = {
        "w": [((0, 0), (3, 2)), ((3, 0), (2, 2)), ((5, 0), (0, 2))],
        "e": [((0,), (0,)), ((0,), (0,))],
        "b": [((0,), (2,)), ((2,), (2,))],
    }
    state = {"w": torch.zeros(5, 2), "e": torch.zeros(0), "b": torch.zeros(4)}
    laid = chunking.as_stored(started(state, cuts), [3, None, 7])
    assert boxes_of(laid) == {
        "w": [(3, ((0, 0), (3, 2))), (0, ((3, 0), (2, 2)))],
        "e": [(3, ((0,), (0,)))],
        "b": [(3, ((0,), (2,))), (0, ((2,), (2,)))],
    }


def test_tied_tensors_lie_together() -> None:
    laid = chunking.over_world(started(tied()), 2)
    found = boxes_of(laid)
    assert found["embed"] == found["head"] == found["again"] != []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_over_world_is_torch_chunk_for_parameters(ranks: int) -> None:
    model = {f"w{rows}": torch.arange(rows * 2.0).reshape(rows, 2) for rows in (1, 2, 5, 8)}
    laid = chunking.over_world(started(dict(model)), ranks)
    for name, tensor in model.items():
        expected = list(tensor.chunk(ranks))
        found = boxes_of(laid)[name]
        assert [rank for rank, _ in found] == list(range(len(expected)))
        assert all(torch.equal(tensor[within(b)], e) for (_, b), e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["dcp/fsdp2_w2", "dcp/fsdp2_w4"])
def test_over_world_is_what_fsdp2_saved(name: str) -> None:
    world = int(name[-1])
    saved = dcp.FileSystemReader(CHECKPOINTS / name / "ckpt").read_metadata().state_dict_metadata
    found = boxes_of(chunking.over_world(started(original(name)), world))
    compared = 0
    # The tied head was stored twice: only its bytes say that it is a parameter, and they are not read here.
    del saved["model.lm_head.weight"]
    for key, stored in saved.items():
        if isinstance(stored, dcp.metadata.TensorStorageMetadata):
            expected = [(tuple(c.offsets), tuple(c.sizes)) for c in stored.chunks if 0 not in c.sizes]
            assert [box for _, box in found[key]] == expected or not expected, key
            compared += len(expected) > 1
    assert compared > 10


def sharded(state: dict[Any, Any], cuts: dict[str, Sequence[Box]] | None = None) -> set[str]:
    laid = chunking.over_world(started(state, cuts), 2)
    return {t.name for t in laid.tensors if len(t.chunks) > 1}


def test_what_the_optimizer_names_is_sharded_and_buffers_are_not() -> None:
    state = by_name()
    state["model"]["buffer"] = torch.zeros(4, 2)
    state["model"]["mask"] = torch.zeros(4, dtype=torch.bool)
    names = {"layers.0.w", "layers.1.w"}
    expected = {f"model.{n}" for n in names} | {f"optim.state.{n}.exp_avg" for n in names}
    assert sharded(state) == expected
    flat = flattened()
    flat["model"]["buffer"] = torch.zeros(4, 2)
    assert sharded(flat) == expected


def test_state_by_number_tells_parameters_by_shape() -> None:
    adam = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4, 2)}}, "param_groups": [{"params": [0]}]}
    state = {"model": {"w": torch.zeros(4, 2), "b": torch.zeros(6)}, "optim": adam}
    assert sharded(state) == {"model.w", "optim.state.0.exp_avg"}


def test_what_the_source_shards_stays_sharded() -> None:
    state = {"model": {"w": torch.zeros(4, 2), "ids": torch.zeros(4, dtype=torch.int64)}, "optim": by_name()["optim"]}
    assert "model.ids" in sharded(state, {"model.ids": [((0,), (3,)), ((3,), (1,))]})


def test_a_model_alone_is_sharded_by_its_floats() -> None:
    state = {"w": torch.zeros(4), "ids": torch.zeros(4, dtype=torch.int64), "s": torch.tensor(1.0), "e": torch.zeros(0)}
    assert sharded(state) == {"w"}


def everywhere(state: dict[str, Any], cuts: dict[str, Sequence[Box]] | None = None) -> set[str]:
    laid = chunking.over_world(started(state, cuts), 2, everywhere=True)
    assert [file.rank for file in laid.files] == [0, 1]
    copies = {t.name for t in laid.tensors if len(t.chunks) == 2 and t.chunks.sizes[0] == t.shape}
    assert all([*t.chunks.file] == [0, 1] for t in laid.tensors if t.name in copies)
    return {t.name for t in laid.tensors} - copies


def test_fsdp1_cuts_parameters_that_are_not_trained_and_has_the_rest_everywhere() -> None:
    state = by_name()
    state["model"] |= {"head.weight": torch.zeros(6, 2), "gate": torch.zeros(1), "buffer": torch.zeros(4, 2)}
    state["model"]["ids.weight"] = torch.zeros(4, dtype=torch.int64)
    trained = {f"model.layers.{i}.w" for i in (0, 1)} | {f"optim.state.layers.{i}.w.exp_avg" for i in (0, 1)}
    assert everywhere(state) == trained | {"model.head.weight"}


def test_fsdp1_keeps_whole_what_was_whole_among_shards() -> None:
    state = {"w": torch.zeros(4), "gate": torch.zeros(1), "positions": torch.zeros(8)}
    assert everywhere(state, {"w": [((0,), (2,)), ((2,), (2,))]}) == {"w", "gate"}
    assert everywhere(state) == {"w", "gate", "positions"}


def test_whole_tensors_are_spread_over_the_ranks() -> None:
    state = {f"b{i}": torch.zeros(8, dtype=torch.int64) for i in range(8)}
    found = boxes_of(chunking.over_world(started(state), 4))
    assert sorted(rank for chunks in found.values() for rank, _ in chunks) == sorted([0, 1, 2, 3] * 2)


# A mesh ---------------------------------------------------------------------------------------------------------------

SHARD2_TP2 = parse_mesh("shard=2,tp=2")


def rows_of(catalogue: Catalogue) -> dict[str, list[Box]]:
    return {name: sorted(box for _, box in chunks) for name, chunks in boxes_of(catalogue).items()}


COLUMNS = [((0, 0), (2, 1)), ((0, 1), (2, 1)), ((2, 0), (2, 1)), ((2, 1), (2, 1))]
ROWS = [((i, 0), (1, 2)) for i in range(4)]


@pytest.mark.parametrize("state", [by_name, flattened])
@pytest.mark.parametrize("pattern", ["model.layers.0.*", "layers.0.w"])
def test_the_optimizer_follows_the_parameter_by_name(state: Any, pattern: str) -> None:
    laid = chunking.over_mesh(started(state()), SHARD2_TP2, Rules(placements=((pattern, "tp:1"),)))
    found = rows_of(laid)
    assert found["model.layers.0.w"] == COLUMNS
    assert found["optim.state.layers.0.w.exp_avg"] == COLUMNS
    # FSDP2 alone cuts the other one, in two; the ranks of `tp` hold the same.
    assert found["model.layers.1.w"] == found["optim.state.layers.1.w.exp_avg"] == [((0, 0), (2, 2)), ((2, 0), (2, 2))]


def test_by_number_the_optimizer_follows_a_parameter_of_its_shape() -> None:
    adam = {"state": {0: {"exp_avg": torch.zeros(4, 2)}, 1: {"exp_avg": torch.zeros(6)}}, "param_groups": []}
    state = {"model": {"w": torch.zeros(4, 2), "b": torch.zeros(6)}, "optim": adam}
    rules = Rules(placements=(("w", "tp:0"),))
    found = rows_of(chunking.over_mesh(started(state), SHARD2_TP2, rules))
    assert found["optim.state.0.exp_avg"] == found["model.w"] == ROWS
    assert found["optim.state.1.exp_avg"] == [((0,), (3,)), ((3,), (3,))]


def test_two_placements_of_one_shape_are_told_where_parameters_have_numbers() -> None:
    adam = {"state": {i: {"exp_avg": torch.zeros(4, 2)} for i in (0, 1)}, "param_groups": []}
    state = {"model": {"w": torch.zeros(4, 2), "v": torch.zeros(4, 2)}, "optim": adam}
    laid = chunking.over_mesh(started(state), SHARD2_TP2, Rules(placements=(("w", "tp:0"),)))
    assert "names its parameters by number" in "".join(map(str, laid.warnings))


def test_weights_that_are_replicated_are_told_where_nothing_says_what_they_are() -> None:
    state = by_name()
    state["model"] |= {"base.weight": torch.zeros(4, 2), "norm.weight": torch.zeros(4), "buffer": torch.zeros(4, 2)}
    laid = chunking.over_world(started(state), 2)
    assert [str(w) for w in laid.warnings] == [
        "1 weight (32 B) without optimizer state is replicated, not sharded: `model.base.weight`; "
        "`reshard --shard PATTERN` shards frozen parameters"
    ]
    mesh = parse_mesh("shard=2")
    for rules in (Rules(shard=("base.weight",)), Rules(replicate=("base.weight",))):
        assert chunking.over_mesh(started(state), mesh, rules).warnings == []
    del state["optim"]
    assert chunking.over_world(started(state), 2).warnings == []


def test_the_first_rule_counts_and_a_dimension_may_be_chosen_for_both() -> None:
    rules = Rules(placements=(("layers.0.w", "tp:0,shard:1"), ("layers.*", "tp:1")))
    found = rows_of(chunking.over_mesh(started(by_name()), SHARD2_TP2, rules))
    assert found["model.layers.0.w"] == COLUMNS
    assert found["model.layers.1.w"] == COLUMNS
    only = Rules(placements=(("*.w", "shard:1"),))
    found = rows_of(chunking.over_mesh(started(by_name()), parse_mesh("shard=2"), only))
    assert found["model.layers.0.w"] == [((0, 0), (4, 1)), ((0, 1), (4, 1))]


def test_what_is_said_of_a_tied_name_holds_for_the_values() -> None:
    found = rows_of(chunking.over_mesh(started(tied()), SHARD2_TP2, Rules(placements=(("again", "tp:1"),))))
    assert found["embed"] == found["head"] == found["again"] == COLUMNS


def test_shard_and_replicate_overrule_the_guess_and_the_optimizer_follows() -> None:
    state = by_name()
    state["model"]["buffer"] = torch.zeros(4, 2)
    rules = Rules(shard=("buffer",), replicate=("model.layers.1.*",))
    laid = chunking.over_mesh(started(state), parse_mesh("shard=2"), rules)
    cut = {t.name for t in laid.tensors if len(t.chunks) > 1}
    assert cut == {"model.layers.0.w", "optim.state.layers.0.w.exp_avg", "model.buffer"}


def test_each_box_is_on_the_rank_of_its_replicas_that_has_least() -> None:
    state = {f"w{i}": torch.zeros(4, 2) for i in range(4)}
    laid = chunking.over_mesh(started(state), parse_mesh("replicate=2,shard=2"))
    load = dict.fromkeys(range(4), 0)
    for tensor in laid.tensors:
        for rank, (offsets, sizes) in boxes_of(laid)[tensor.name]:
            load[rank] += sizes[0]
            assert rank % 2 == offsets[0] // 2
    assert set(load.values()) == {4}


def test_like_is_another_checkpoint_and_says_what_it_lacks() -> None:
    cuts: dict[str, Sequence[Box]] = {"w": [((0, 0), (3, 2)), ((3, 0), (1, 2))]}
    reference = checkpoints.state({"w": torch.zeros(4, 2), "v": torch.zeros(2)}, cuts)
    parts.assign(reference)
    laid = chunking.like(started({"w": torch.zeros(4, 2)}), reference, "other")
    assert boxes_of(laid)["w"] == [(0, ((0, 0), (3, 2))), (1, ((3, 0), (1, 2)))]
    with pytest.raises(UsageError, match='`like="other"` has no tensor `u`'):
        chunking.like(started({"u": torch.zeros(4, 2)}), reference, "other")
    with pytest.raises(UsageError, match=r"tensor `v` is \[2\] there, but \[3\] here"):
        chunking.like(started({"v": torch.zeros(3)}), reference, "other")


# Any boxes onto any mesh, without a disk ------------------------------------------------------------------------------

NAMES = st.sampled_from([("shard",), ("replicate", "shard"), ("shard", "tp"), ("replicate", "shard", "tp"), ("tp",)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], dict[str, list[int]], Mesh, Rules]:
    """Shapes, how often the source cuts each dimension, a mesh, and rules for `tp`."""
    names = draw(NAMES)
    mesh = Mesh(names, tuple(draw(st.integers(1, 4)) for _ in names))
    shapes = {
        f"w{i}": draw(st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple))
        for i in range(draw(st.integers(1, 4)))
    }
    cuts = {name: [draw(st.integers(1, 4)) for _ in shape] for name, shape in shapes.items() if 0 not in shape}
    placements = tuple(
        (name, f"tp:{draw(st.integers(0, len(shape) - 1))}")
        for name, shape in shapes.items()
        if shape and "tp" in names and draw(st.booleans())
    )
    return shapes, cuts, mesh, Rules(placements=placements)


@settings(max_examples=150)
@given(cases(), st.integers(1, 5))
def test_any_boxes_onto_any_mesh(
    case: tuple[dict[str, tuple[int, ...]], dict[str, list[int]], Mesh, Rules], processes: int
) -> None:
    shapes, cuts, mesh, rules = case
    values = {name: np.arange(int(np.prod(shape))).reshape(shape) for name, shape in shapes.items()}
    source = started(
        {name: torch.zeros(shape) for name, shape in shapes.items()},
        {name: grid(shapes[name], cut) for name, cut in cuts.items()},
    )
    laid = chunking.over_mesh(source, mesh, rules)
    placed = dict(rules.placements)
    for tensor in laid.tensors:
        assert tiling_fault(tensor.shape, tensor.chunks.offsets, tensor.chunks.sizes) is None
        assert all(0 <= rank < mesh.world for rank in tensor.chunks.file)
        if tensor.numel and (len(tensor.chunks) > 1 or tensor.name in placed):
            where = ({"shard": 0} if "shard" in mesh.names else {}) | (
                {"tp": int(placed[tensor.name][3:])} if tensor.name in placed else {}
            )
            held = dict(mesh_boxes(tensor.shape, mesh, where))
            assert {(c.offsets, c.sizes) for c in tensor.chunks} == set(held)
            assert all(c.extent.file in held[c.offsets, c.sizes] for c in tensor.chunks)
    created(laid)
    jobs = list(plan.plan(laid))
    assert [(j.chunk.extent.file, j.chunk.extent.offset) for j in jobs] == sorted(
        (j.chunk.extent.file, j.chunk.extent.offset) for j in jobs
    )
    filled = {name: np.full(shape, -1) for name, shape in shapes.items()}
    for job in jobs:
        for piece in job.pieces:
            inside = np.zeros(job.tensor.shape, bool)
            inside[within((piece.chunk.offsets, piece.chunk.sizes))] = True
            assert inside[within(piece.box)].all()
            assert (filled[job.tensor.name][within(piece.box)] == -1).all()
            filled[job.tensor.name][within(piece.box)] = values[job.tensor.name][within(piece.box)]
    assert all((filled[name] == values[name]).all() for name in shapes)
    # What several processes do is all of it, each job once, in its order.
    shares = [job for k in range(processes) for job in plan.plan(laid, (k, processes))]
    assert [(j.tensor.name, j.chunk) for j in shares] == [(j.tensor.name, j.chunk) for j in jobs]


def created(laid: Catalogue) -> None:
    """Give each chunk a place in the file of its rank, as a sink does."""
    ends: dict[int, int] = {}
    for tensor in laid.tensors:
        chunks = Chunks()
        for chunk in tensor.chunks:
            rank, nbytes = chunk.extent.file, int(np.prod(chunk.sizes)) * tensor.dtype.itemsize
            chunks.add(chunk.offsets, chunk.sizes, Extent(rank, ends.get(rank, 0), nbytes))
            ends[rank] = ends.get(rank, 0) + nbytes
        tensor.chunks = chunks


def test_shares_are_whole_files_where_they_come_out_even() -> None:
    laid = chunking.over_world(started({"w": torch.zeros(64, 8), "v": torch.zeros(64, 8)}), 8)
    created(laid)
    for processes in (1, 2, 4, 8):
        files = [{job.chunk.extent.file for job in plan.plan(laid, (k, processes))} for k in range(processes)]
        assert [len(there) for there in files] == [8 // processes] * processes
        assert len(set().union(*files)) == 8
