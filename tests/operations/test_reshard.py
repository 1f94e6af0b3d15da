"""`ckpttool reshard` in one process: read back by DCP itself, with the boxes that FSDP2 saves on the same mesh."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import simulated_ranks
from support.paths import CHECKPOINTS
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpttool
from ckpttool.catalogue.boxes import Box
from ckpttool.errors import CkptError, LossError, ReadError, UsageError

W4 = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"
TP = CHECKPOINTS / "dcp/fsdp2_tp_w4" / "ckpt"
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
        ("dcp/fsdp2_w2", {"to_world": 2}),
        ("dcp/fsdp2_w4", {"to_world": 4}),
        ("dcp/hsdp_w4", {"to_mesh": "replicate=2,shard=2"}),
        ("dcp/fsdp2_tp_w4", {"to_mesh": "shard=2,tp=2", "placements": TP_RULES}),
    ],
)
@pytest.mark.parametrize("way", ["again", "through one rank"])
def test_the_boxes_are_those_that_torch_saves(tmp_path: Path, name: str, flags: dict[str, Any], way: str) -> None:
    source = CHECKPOINTS / name / "ckpt"
    if way == "through one rank":
        ckpttool.reshard(source, tmp_path / "one", to_world=1)
        source = tmp_path / "one"
    ckpttool.reshard(source, tmp_path / "out", **flags)
    found, expected = boxes_in(tmp_path / "out"), boxes_in(CHECKPOINTS / name / "ckpt")
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


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint in the layout of each mesh."""
    folder = tmp_path_factory.mktemp("sources")
    for number, flags in enumerate(MESHES.values()):
        ckpttool.reshard(TP, folder / str(number), **flags)
    return {name: folder / str(number) for number, name in enumerate(MESHES)}


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return loaded(TP)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("source", "onto"),
    [
        # Each mesh is thrice the source and thrice the target in `make test`.
        pytest.param(source, onto, marks=[pytest.mark.long] * ((j - i) % len(MESHES) not in (0, 1, 4)))
        for i, source in enumerate(MESHES)
        for j, onto in enumerate(MESHES)
    ],
)
def test_from_anything_onto_anything(
    tmp_path: Path, sources: dict[str, Path], whole: dict[str, Any], source: str, onto: str
) -> None:
    ckpttool.reshard(sources[source], tmp_path / "dst", **MESHES[onto])
    assert_same(loaded(tmp_path / "dst"), whole)
    assert boxes_in(tmp_path / "dst") == boxes_in(sources[onto])


def test_there_and_back_again(tmp_path: Path) -> None:
    before = W4
    for world in (8, 3, 4):
        made = ckpttool.reshard(before, tmp_path / str(world), to_world=world, check=True)
        assert (made.world_size, made.mesh, made.engine) == (world, f"shard={world}", "bytes")
        before = tmp_path / str(world)
    assert_same(loaded(before), loaded(W4))
    assert boxes_in(before) == boxes_in(W4)


def test_like_another_checkpoint(tmp_path: Path) -> None:
    """Trained otherwise, but of the same model: the boxes and the files of each tensor."""
    ckpttool.reshard(CHECKPOINTS / "dcp/fsdp2_w2" / "ckpt", tmp_path / "like", like=W4)
    assert boxes_in(tmp_path / "like") == boxes_in(W4)
    # FSDP2 also saves pieces without elements.
    assert places_in(tmp_path / "like").items() < places_in(W4).items()
    assert_same(loaded(tmp_path / "like"), loaded(CHECKPOINTS / "dcp/fsdp2_w2" / "ckpt"))


def places_in(path: Path) -> dict[tuple[str, Any], str]:
    stored = dcp.FileSystemReader(path).read_metadata().storage_data
    return {(i.fqn, i.offset): info.relative_path for i, info in stored.items() if i.offset is not None}


def test_a_file_becomes_dcp_and_rank_files_stay(tmp_path: Path) -> None:
    assert ckpttool.reshard(CHECKPOINTS / "torch/full" / "ckpt.pt", tmp_path / "full", to_world=2).format == "dcp"
    assert (
        ckpttool.reshard(CHECKPOINTS / "rank/fsdp1_w2" / "ckpt", tmp_path / "ranks", to_world=3).format == "rankfiles"
    )
    assert sorted(p.name for p in (tmp_path / "ranks").iterdir()) == ["rank0.pt", "rank1.pt", "rank2.pt"]


def test_rules_in_a_file(tmp_path: Path) -> None:
    rules = tmp_path / "tp.rules"
    rules.write_text("# column-parallel\n*.up.*=tp:0\n\n*.down.weight=tp:1  # row-parallel\n")
    ckpttool.reshard(TP, tmp_path / "out", to_mesh="shard=2,tp=2", placements=f"@{rules}")
    assert boxes_in(tmp_path / "out") == boxes_in(TP)
    rules.write_text("\n*.up.*\n")
    with pytest.raises(UsageError, match=r'tp.rules` line 2: `placements="\*.up.\*"` is not of the form'):
        ckpttool.reshard(TP, tmp_path / "other", to_mesh="shard=2,tp=2", placements=f"@{rules}")


def random_states(path: Path) -> dict[str, Any]:
    return {name: value for name, value in loaded(path).items() if name.startswith("rng.")}


def rngs(world: int) -> dict[str, Any]:
    return {f"rank{rank}": {"torch": torch.full((5,), rank, dtype=torch.uint8), "seed": rank} for rank in range(world)}


@pytest.fixture
def with_rng(tmp_path: Path) -> Path:
    """A DCP directory that says what each of three ranks drew, and two replicas read."""
    loaders = {f"dp_rank_{rank}": {"position": rank} for rank in range(2)}
    state = {"model": {"w": torch.arange(12.0).reshape(6, 2)}, "rng": rngs(3), "dataloader": loaders}
    dcp.save(state, checkpoint_id=tmp_path / "src", no_dist=True)
    return tmp_path / "src"


def told(world: int) -> dict[str, Any]:
    return {f"rng.{name}": value for name, value in flat(rngs(world))}


def test_random_states_are_kept_under_their_ranks(tmp_path: Path, with_rng: Path) -> None:
    more = ckpttool.reshard(with_rng, tmp_path / "5", to_world=5)
    assert_same(random_states(tmp_path / "5"), told(3))
    assert more.policies == [
        "rng: kept under ranks 0-2 (`--rng keep`); ranks 3-4 of the new world have none",
        "dataloader: kept under ranks 0-1 (`--dataloader keep`); ranks 2-4 of the new world have none",
    ]
    fewer = ckpttool.reshard(with_rng, tmp_path / "2", to_mesh="shard=1,tp=2")
    assert_same(random_states(tmp_path / "2"), told(3))
    assert fewer.policies[0].endswith("; rank 2 is not in the new world")
    assert fewer.policies[1].endswith("; rank 1 is not in the new world")  # one replica of two ranks


def test_all_ranks_get_the_random_state_of_rank_0(tmp_path: Path, with_rng: Path) -> None:
    made = ckpttool.reshard(with_rng, tmp_path / "out", to_world=5, rng="rank0", check=True)
    first = rngs(1)["rank0"]
    expected = {f"rng.rank{r}.{key}": value for r in range(5) for key, value in first.items()}
    assert_same(random_states(tmp_path / "out"), expected)
    assert {name for name in made.dropped if name.startswith("rng")} == {
        f"rng.rank{rank}.{key}" for rank in (1, 2) for key in first
    }


def test_random_states_are_left_out(tmp_path: Path, with_rng: Path) -> None:
    made = ckpttool.reshard(with_rng, tmp_path / "out", to_world=5, rng="drop", dataloader="drop")
    assert loaded(tmp_path / "out").keys() == {"model.w"}
    assert [said.partition(":")[0] for said in made.policies] == ["rng", "dataloader"]


def test_rank_files_have_the_values_of_their_ranks(tmp_path: Path, with_rng: Path) -> None:
    with pytest.raises(LossError, match="`rng` has values of rank 2, and a world of 2 has no file"):
        ckpttool.reshard(with_rng, tmp_path / "kept", to_world=2, to="fsdp1", dataloader="drop")
    flags: dict[str, Any] = {"to": "fsdp1", "dataloader": "drop"}
    ckpttool.reshard(with_rng, tmp_path / "first", to_world=5, rng="rank0", **flags)
    ckpttool.reshard(with_rng, tmp_path / "four", to_world=4, **flags)
    for rank in range(5):
        with simulated_ranks.as_rank(rank, 5):
            state = torch.load(tmp_path / "first" / f"rank{rank}.pt", weights_only=False)
        assert_same(dict(flat(state["rng"])), dict(flat(rngs(1)["rank0"])))
    for rank in range(4):
        with simulated_ranks.as_rank(rank, 4):
            state = torch.load(tmp_path / "four" / f"rank{rank}.pt", weights_only=False)
        assert_same(dict(flat(state.get("rng", {}))), dict(flat(rngs(3).get(f"rank{rank}", {}))) or {"": {}})


def test_nothing_is_left_of_what_fails(tmp_path: Path) -> None:
    before = sorted(p.name for p in tmp_path.iterdir())
    for flags in ({"to_world": 2, "placements": "*.nothing=shard:0"}, {"to_mesh": "shard=2", "rng": "x"}, {}):
        with pytest.raises(UsageError):
            ckpttool.reshard(W4, tmp_path / "out", **flags)
    with pytest.raises(ReadError):
        ckpttool.reshard(tmp_path / "none", tmp_path / "out", to_world=2)
    with pytest.raises(CkptError):
        ckpttool.reshard(W4, W4 / "inside", to_world=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("flags", [{"to_world": 3}, {"to_mesh": "shard=2,tp=2", "placements": TP_RULES}])
def test_only_the_model_has_the_boxes_that_it_has_beside_the_rest(tmp_path: Path, flags: dict[str, Any]) -> None:
    """Though nothing is left that says which tensors are parameters: the source is one file."""
    full = CHECKPOINTS / "torch/full" / "ckpt.pt"
    ckpttool.reshard(full, tmp_path / "all", to="dcp", **flags)
    made = ckpttool.reshard(full, tmp_path / "only", to="dcp", only="model", check=True, **flags)
    whole = {name: cut for name, cut in boxes_in(tmp_path / "all").items() if name.startswith("model.")}
    assert boxes_in(tmp_path / "only") == {name.removeprefix("model."): cut for name, cut in whole.items()}
    kept = {n.removeprefix("model."): v for n, v in loaded(tmp_path / "all").items() if n.startswith("model.")}
    assert_same(loaded(tmp_path / "only"), kept)
    assert made.dropped and not made.policies
    for other in ("only", "all"):
        ckpttool.reshard(full, tmp_path / f"like {other}", like=tmp_path / other, only="model")
        assert boxes_in(tmp_path / f"like {other}") == boxes_in(tmp_path / "only")


def test_a_part_that_is_left_out(tmp_path: Path) -> None:
    made = ckpttool.reshard(W4, tmp_path / "out", to_world=2, drop=["optim", "scheduler"])
    expected = {n: v for n, v in loaded(W4).items() if not n.startswith(("optim.", "scheduler."))}
    assert_same(loaded(tmp_path / "out"), expected)
    assert all(name.startswith(("optim.", "scheduler.")) for name in made.dropped)
    ckpttool.reshard(W4, tmp_path / "ranks", to_world=2, to="fsdp1", only="model", drop="scheduler")
    with pytest.raises(UsageError, match="there is no part `optimiser`"):
        ckpttool.reshard(W4, tmp_path / "none", to_world=2, drop="optimiser")
    with pytest.raises(UsageError, match="nothing is left to write"):
        ckpttool.reshard(tmp_path / "out", tmp_path / "none", to_world=2, only="model", drop="model")
    assert not (tmp_path / "none").exists()


def test_what_is_left_out_may_be_damaged(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(12.0).reshape(4, 3)}, "optim": {"state": {0: {"exp_avg": torch.ones(4, 3)}}}}
    torch.save(state, tmp_path / "whole.pt")
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    index = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    index.storage_data = {
        at: replace(info, offset=1 << 30) if at.fqn.endswith("exp_avg") else info
        for at, info in index.storage_data.items()
    }
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(index))
    for flags in ({}, {"only": "optim"}, {"drop": "model"}):
        with pytest.raises(CkptError, match="exp_avg"):
            ckpttool.reshard(tmp_path / "saved", tmp_path / "out", to_world=2, **flags)
    ckpttool.reshard(tmp_path / "saved", tmp_path / "out", to_world=2, only="model")
    assert_same(loaded(tmp_path / "out"), {"w": state["model"]["w"]})


@pytest.mark.parametrize("names", [("embed.weight", "z.weight"), ("embed.weight", "a.weight")])
@pytest.mark.parametrize("is_one_storage", [True, False])
def test_a_second_name_of_a_parameter_is_sharded_as_it_is(
    tmp_path: Path, names: tuple[str, str], is_one_storage: bool
) -> None:
    """The optimizer has state of the first name only; a buffer of zeros is not a name of a bias of zeros."""
    first, second = names
    weight, bias = torch.arange(102.0).reshape(17, 6), torch.zeros(17)
    model = {first: weight, second: weight if is_one_storage else weight.clone(), "bias": bias}
    moments = {name: {"exp_avg": model[name] + 1} for name in (first, "bias")}
    groups = [{"params": [first, "bias"], "lr": 0.1}]
    model |= {"mean": torch.zeros(17), "other": weight + 2}
    torch.save(
        {"model": dict(sorted(model.items())), "optim": {"state": moments, "param_groups": groups}}, tmp_path / "pt"
    )
    ckpttool.reshard(tmp_path / "pt", tmp_path / "dst", to_world=3)
    stored = dcp.FileSystemReader(tmp_path / "dst").read_metadata().state_dict_metadata
    sizes = {name: [chunk.sizes for chunk in stored[f"model.{name}"].chunks] for name in model}
    cut = {name: [piece.shape for piece in model[name].chunk(3)] for name in (first, second, "bias")}
    assert sizes == {**{name: [model[name].shape] for name in model}, **cut}


def test_a_mesh_says_what_it_does_not_cut(tmp_path: Path) -> None:
    """`dp=2,tp=2` was printed as `shard=2,tp=2`, and cut nothing over `tp` without a word."""
    made = ckpttool.reshard(TP, tmp_path / "a", to_mesh="dp=2, tp=2", dry_run=True)
    assert [note.partition(":")[0] for note in made.notes if "`tp`" in note] == ["no tensor is sharded over `tp`"]
    assert any(note.startswith("`dp` is `shard`") for note in made.notes)
    ruled = ckpttool.reshard(TP, tmp_path / "a", to_mesh="shard=2,tp=2", placements=TP_RULES, dry_run=True)
    one = ckpttool.reshard(TP, tmp_path / "a", to_mesh="shard=2,tp=1", dry_run=True)
    assert not any("`tp`" in note or "`dp`" in note for note in (*ruled.notes, *one.notes))
