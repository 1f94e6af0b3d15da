"""Rank files that we write, as torch loads them in the process of each rank, against what torch itself makes of the
whole tensors. The process group is torch's fake one; real FSDP1 is in `tests/upstream`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.simulated_ranks import as_rank
from support.upstream_samples import opened, original, path_of, reference
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Rows

from ckpttool import convert
from ckpttool.errors import LossError, UsageError
from ckpttool.formats import FORMATS
from ckpttool.storage.stores import locate

WORLDS = (2, 3, 8)
SAMPLES = ("rank/fsdp1_w2", "torch/fsdp1_full_w2", "dcp/fsdp2_w2")
[ROW] = [row for row in FORMATS if row.target == "fsdp1"]


def load(folder: Path, rank: int, **options: Any) -> Any:
    return torch.load(folder / f"rank{rank}.pt", **{"weights_only": False, **options})


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list) and any(isinstance(value, (dict, torch.Tensor)) for value in tree):
        for i, value in enumerate(tree):
            yield from leaves(value, (*path, i))
    else:
        yield path, tree


def written(sample: str, tmp_path: Path, world: int, **options: Any) -> Path:
    convert(path_of(sample), tmp_path / "out", to="fsdp1", to_world=world, check=True, **options)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(f"rank{r}.pt" for r in range(world))
    return tmp_path / "out"


def is_cut(path: tuple[Any, ...], whole: torch.Tensor, world: int) -> bool:
    """Parameters and moments; the samples' buffers are `tokens_seen` and `frozen`."""
    return world > 1 and path[-1] not in ("tokens_seen", "frozen", "step", "torch")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_sharded_tensors_are_those_that_fsdp1_makes(sample: str, world: int, tmp_path: Path) -> None:
    folder, whole = written(sample, tmp_path, world), dict(leaves(reference(sample)))
    for rank in range(world):
        with as_rank(rank, world):
            found = dict(leaves(load(folder, rank)))
            assert found.keys() == whole.keys()
            for path, expected in whole.items():
                if isinstance(expected, torch.Tensor) and is_cut(path, expected, world):
                    group = dist.group.WORLD
                    assert group is not None
                    # Fewer devices on a node than ranks: torch then leaves the number of the device out, as for CPUs.
                    theirs = _create_chunk_sharded_tensor(expected, rank, world, 1, group, torch.device("cpu"))
                    same_sharded_tensor(found[path], theirs)
                elif isinstance(expected, torch.Tensor):
                    assert type(found[path]) is torch.Tensor
                    assert torch.equal(found[path], expected)


def same_sharded_tensor(ours: Any, theirs: ShardedTensor) -> None:
    assert type(ours) is ShardedTensor
    assert (ours.size(), ours.dtype, ours.requires_grad) == (theirs.size(), theirs.dtype, theirs.requires_grad)
    assert ours.metadata() == theirs.metadata()
    assert type(ours.sharding_spec()) is type(theirs.sharding_spec())
    assert vars(ours.sharding_spec()) == vars(theirs.sharding_spec())
    assert ours.__getstate__()[2:] == theirs.__getstate__()[2:]
    assert len(ours.local_shards()) == len(theirs.local_shards())
    for mine, expected in zip(ours.local_shards(), theirs.local_shards(), strict=True):
        assert mine.metadata == expected.metadata
        assert torch.equal(mine.tensor, expected.tensor)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", [None, "fsdp"])
def test_dtensors_are_those_that_torch_distributes(name: str | None, world: int, tmp_path: Path) -> None:
    sample = "rank/fsdp1_w2"
    folder = written(sample, tmp_path, world, tensor_class="dtensor" if name is None else f"dtensor:cpu:{name}")
    whole = dict(leaves(reference(sample)))
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=None if name is None else (name,))
            found = dict(leaves(load(folder, rank, weights_only=True)))
            for path, expected in whole.items():
                if isinstance(expected, torch.Tensor) and is_cut(path, expected, world):
                    ours, theirs = found[path], distribute_tensor(expected, mesh, [Rows(0)], src_data_rank=None)
                    assert type(ours) is DTensor
                    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
                    assert (ours.device_mesh, ours.placements) == (mesh, theirs.placements)
                    assert ours._spec == theirs._spec
                    assert torch.equal(ours.to_local(), theirs.to_local())
                    assert ours.to_local().shape == theirs.to_local().shape


def test_a_world_of_one_has_plain_tensors_as_fsdp1_saves_them(tmp_path: Path) -> None:
    found = dict(leaves(load(written("rank/fsdp1_w2", tmp_path, 1), 0, weights_only=True)))
    for path, expected in leaves(reference("rank/fsdp1_w2")):
        if isinstance(expected, torch.Tensor):
            assert type(found[path]) is torch.Tensor
            assert torch.equal(found[path], expected)


def test_tied_tensors_share_a_storage_in_every_file(tmp_path: Path) -> None:
    folder = written("torch/full", tmp_path, 3)
    for rank in range(3):
        with as_rank(rank, 3):
            model = load(folder, rank)["model"]
            head, embed = (model[f"{name}.weight"].local_shards()[0].tensor for name in ("lm_head", "embed"))
            assert head.data_ptr() == embed.data_ptr()
            assert torch.equal(head, original("torch/full")["model"]["embed.weight"].chunk(3)[rank])


def test_objects_and_the_tensors_in_them_are_in_every_file(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.arange(10.0)}, "optim": {"state": {}, "param_groups": []}, "empty": {},
        "pair": (torch.arange(3), {"a": 1.5}), "history": [{"loss": 0.5, "at": torch.tensor(7)}],
    }  # fmt: skip
    torch.save(state, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=4, check=True)
    for rank in range(4):
        with as_rank(rank, 4):
            found = load(tmp_path / "out", rank)
        assert list(found) == list(state)
        assert (found["optim"], found["empty"]) == (state["optim"], {})
        assert torch.equal(found["pair"][0], torch.arange(3))
        assert (found["pair"][1], found["history"][0]["loss"]) == ({"a": 1.5}, 0.5)
        assert torch.equal(found["history"][0]["at"], torch.tensor(7))


def test_every_checksum_is_right(tmp_path: Path) -> None:
    for path in written("dcp/fsdp2_w2", tmp_path, 3).iterdir():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            assert len(archive.namelist()) > 60


def rng_of(ranks: int) -> dict[str, Any]:
    values = {f"rank{r}": {"torch": torch.full((5,), r), "python": (3, (r, r), None)} for r in range(ranks)}
    return {"model": {"w": torch.arange(10.0)}, "step": 4, "rng": values}


def test_the_value_of_a_rank_is_in_its_file_only(tmp_path: Path) -> None:
    torch.save(rng_of(3), tmp_path / "in.pt")
    made = convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=3, check=True)
    assert made.notes == []
    for rank in range(3):
        with as_rank(rank, 3):
            found = load(tmp_path / "out", rank)["rng"]
        assert found.keys() == {"torch", "python"}
        assert torch.equal(found["torch"], torch.full((5,), rank))
        assert found["python"] == (3, (rank, rank), None)


def test_ranks_that_saved_no_value_get_none_and_are_named(tmp_path: Path) -> None:
    torch.save(rng_of(2), tmp_path / "in.pt")
    made = convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=4)
    assert made.notes == ["the files of ranks 2-3 have no `rng`, as these saved none"]
    with as_rank(3, 4):
        assert "rng" not in load(tmp_path / "out", 3)


def test_values_of_ranks_without_a_file_are_not_lost_in_silence(tmp_path: Path) -> None:
    torch.save(rng_of(3), tmp_path / "in.pt")
    with pytest.raises(LossError) as failed:
        convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=2)
    assert "`rng.rank2.torch`, `rng.rank2.python`" in failed.value.message
    assert "it belongs to rank 2, and 2 ranks have no file for it" in failed.value.message
    assert "`--drop rng` leaves `rng` out" in failed.value.message
    convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=2, drop=["rng"])


def test_a_module_called_rank0_is_no_rank(tmp_path: Path) -> None:
    torch.save({"model": {"rank0": {"w": torch.arange(4.0)}, "rank1": {"w": torch.ones(4)}}}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=2, check=True)
    with as_rank(1, 2):
        model = load(tmp_path / "out", 1)["model"]
    assert torch.equal(model["rank0"]["w"].local_shards()[0].tensor, torch.tensor([2.0, 3.0]))


def test_two_values_for_one_place(tmp_path: Path) -> None:
    state = rng_of(2)
    state["rng"]["torch"] = torch.zeros(2)
    torch.save(state, tmp_path / "in.pt")
    with pytest.raises(LossError, match=r"`rng\.torch` cannot be stored as|cannot be stored as `rng\.torch`"):
        convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=2)
    assert not (tmp_path / "out").exists()


def test_the_plan_has_the_sizes_and_the_notes(tmp_path: Path) -> None:
    torch.save(rng_of(2), tmp_path / "in.pt")
    plan = convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=3, dry_run=True)
    made = convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", to_world=3)
    assert (plan.files, plan.notes, plan.payload_bytes) == (made.files, made.notes, made.payload_bytes)
    assert [(p.name, p.stat().st_size) for p in sorted((tmp_path / "out").iterdir())] == made.files


@pytest.mark.parametrize("name", ["tensor", "dtensor:", "dtensor:cpu:fsdp:more", "sharded_tensor:cpu"])
def test_a_class_that_is_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no tensor class"):
        convert(path_of("torch/full"), tmp_path / "out", to="fsdp1", tensor_class=name)


def test_the_world_is_that_of_the_source(tmp_path: Path) -> None:
    made = convert(path_of("dcp/fsdp2_w4"), tmp_path / "out", to="fsdp1")
    assert [name for name, _ in made.files] == [f"rank{r}.pt" for r in range(4)]


def test_what_is_written_reads_as_what_was_read(tmp_path: Path) -> None:
    folder = written("dcp/fsdp2_w2", tmp_path, 3)
    source = ROW.open(locate(str(folder)))
    with opened("dcp/fsdp2_w2") as before:
        theirs = {t.path: (t.dtype, t.shape) for t in before.catalogue.tensors}
    assert {t.path: (t.dtype, t.shape) for t in source.catalogue.tensors} == theirs
    assert source.catalogue.world_size == 3
    source.close()


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys, ckpttool; ckpttool.convert(*sys.argv[1:], to='fsdp1', to_world=3, tensor_class='dtensor')\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, path_of("torch/full"), str(tmp_path / "out")], check=True, timeout=300)
