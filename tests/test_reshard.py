"""`ckpttool reshard` in one process: read back by DCP itself, with the boxes that FSDP2 saves on the same mesh."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fakeranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from originals import HERE, original
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpttool import verbs
from ckpttool.boxes import Box
from ckpttool.errors import CkptError, LossError, ReadError, UsageError

W4 = HERE / "dcp_fsdp2_w4" / "ckpt"
TP = HERE / "dcp_fsdp2_tp_w4" / "ckpt"
TP_RULES = ("*.up.*=tp:0", "*.down.weight=tp:1")


def loaded(path: Path) -> dict[str, Any]:
    """The whole state as DCP gives it without a process group, one dict by full names."""
    state: dict[str, Any] = {}
    _load_state_dict(state, dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return dict(flat(state))


def flat(value: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from flat(below, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(v, (Mapping, torch.Tensor)) for v in value):
        for i, below in enumerate(value):
            yield from flat(below, (*path, str(i)))
    else:
        yield ".".join(path), value


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found[name], value)]
            assert torch.equal(*raw), name
        else:
            assert repr(found[name]) == repr(value), name


def boxes_in(path: Path) -> dict[str, set[Box]]:
    """What the index says, read by DCP. Pieces without elements, which FSDP2 saves for ranks without, do not count."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: {(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if 0 not in c.sizes}
        for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("dcp_fsdp2_w2", {"to_world": 2}),
        ("dcp_fsdp2_w4", {"to_world": 4}),
        ("dcp_hsdp_w4", {"to_mesh": "replicate=2,shard=2"}),
        ("dcp_fsdp2_tp_w4", {"to_mesh": "shard=2,tp=2", "placements": TP_RULES}),
    ],
)
@pytest.mark.parametrize("way", ["again", "through one rank"])
def test_the_boxes_are_those_that_torch_saves(tmp_path: Path, name: str, flags: dict[str, Any], way: str) -> None:
    source = HERE / name / "ckpt"
    if way == "through one rank":
        verbs.reshard(source, tmp_path / "one", to_world=1)
        source = tmp_path / "one"
    verbs.reshard(source, tmp_path / "out", **flags)
    found, expected = boxes_in(tmp_path / "out"), boxes_in(HERE / name / "ckpt")
    if way == "through one rank":
        # Stored as a second tensor, without an optimizer's state and in one piece, it could be a buffer.
        del found["model.lm_head.weight"], expected["model.lm_head.weight"]
    assert found == expected
    assert sum(len(boxes) > 1 for boxes in found.values()) > 10


MESHES = {
    **{f"w{n}": {"to_world": n} for n in (1, 2, 3, 4, 8)},
    "hsdp 2x2": {"to_mesh": "replicate=2,shard=2"},
    "hsdp 4x2": {"to_mesh": "replicate=4,shard=2"},
    "tp 2x2": {"to_mesh": "shard=2,tp=2", "placements": TP_RULES},
    "tp 2x4": {"to_mesh": "shard=2,tp=4", "placements": ("*.up.weight=tp:1",)},
    "ddp": {"to_mesh": "replicate=4"},
}


@pytest.mark.parametrize("onto", MESHES)
@pytest.mark.parametrize("source", MESHES)
def test_from_anything_onto_anything(tmp_path: Path, source: str, onto: str) -> None:
    verbs.reshard(TP, tmp_path / "src", **MESHES[source])
    verbs.reshard(tmp_path / "src", tmp_path / "dst", **MESHES[onto])
    assert_same(loaded(tmp_path / "dst"), loaded(TP))


def test_there_and_back_again(tmp_path: Path) -> None:
    before = W4
    for world in (8, 3, 4):
        made = verbs.reshard(before, tmp_path / str(world), to_world=world, check=True)
        assert (made.world, made.mesh, made.engine) == (world, f"shard={world}", "bytes")
        before = tmp_path / str(world)
    assert_same(loaded(before), loaded(W4))
    assert boxes_in(before) == boxes_in(W4)
    assert_same(dict(flat(original("dcp_fsdp2_w4"))), dict(flat(original("dcp_fsdp2_w4"))))
