"""Which rank holds which box, against what FSDP2, DCP and torch.chunk make of the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import made
import pytest
import torch
import torch.distributed.checkpoint as dcp
from originals import HERE, original
from test_layout import by_name, flattened, started, tied

from ckpttool import chunking
from ckpttool.boxes import Box
from ckpttool.catalogue import Catalogue


def boxes_of(catalogue: Catalogue) -> dict[str, list[tuple[int, Box]]]:
    return {t.name: [(c.extent.file, (c.offsets, c.sizes)) for c in t.chunks] for t in catalogue.tensors}


def test_whole_is_one_chunk_on_rank_0() -> None:
    laid = chunking.whole(started({"w": torch.zeros(4, 2), "s": torch.tensor(1.0)}, {"w": made.grid((4, 2), (2, 1))}))
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
        assert all(torch.equal(tensor[made.within(b)], e) for (_, b), e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["dcp_fsdp2_w2", "dcp_fsdp2_w4"])
def test_over_world_is_what_fsdp2_saved(name: str) -> None:
    world = int(name[-1])
    saved = dcp.FileSystemReader(HERE / name / "ckpt").read_metadata().state_dict_metadata
    found = boxes_of(chunking.over_world(started(original(name)), world))
    compared = 0
    # The tied head was stored twice, so that here nothing says any more that it is a parameter.
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
