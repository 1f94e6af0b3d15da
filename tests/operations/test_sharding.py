"""What inspect says of sharding: placements as torch has them, shards of many ranks, the bytes of each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoints import Made, grid
from support.cli import run
from support.paths import CHECKPOINTS
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckpttool
from ckpttool.analysis.describe.sharding import Placements, balance, bytes_per_rank, overview, shards
from ckpttool.catalogue.entries import Catalogue, File


def ckpt(name: str) -> Path:
    return CHECKPOINTS / name / "ckpt"


def placed(catalogue: Catalogue) -> dict[str, str]:
    placements = Placements(catalogue)
    return {tensor.name: str(placements.of(tensor)) for tensor in catalogue.tensors}


@pytest.fixture
def of_four() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["rank/hsdp_w4", "rank/fsdp2_tp_w4", "rank/fsdp2_shard1_w4", "rank/fsdp2_w4"])
def test_placements_are_those_of_the_dtensors(name: str, of_four: None) -> None:
    file = next(path for path in sorted(ckpt(name).iterdir()) if "0" in path.name)
    model = torch.load(file, weights_only=False)["model"]
    catalogue = ckpttool.inspect(ckpt(name))
    placements, compared = Placements(catalogue), 0
    for tensor in catalogue.tensors:
        value = model.get(tensor.fqn) if tensor.part.kind == "model" else None
        if isinstance(value, DTensor):
            found = placements.of(tensor)
            assert found is not None
            assert (found.mesh, found.names) == (tuple(value.device_mesh.shape), value.device_mesh.mesh_dim_names or ())
            expected = [repr(p).replace("()", "").replace("dim=", "").replace("sf=", "") for p in value.placements]
            assert list(found.placements) == expected
            compared += 1
    assert compared >= 10


def test_placements_of_a_dcp_directory_are_those_of_its_boxes() -> None:
    found = placed(ckpttool.inspect(ckpt("dcp/grid_w4")))
    assert found["rows_columns"] == found["columns_rows"] == "Shard(0) x2, Shard(1) x2"
    assert placed(ckpttool.inspect(ckpt("dcp/hsdp_w4")))["model.tokens_seen"] == "Replicate x4"
    assert set(placed(ckpttool.inspect(ckpt("hf/llama"))).values()) == {"None"}


@pytest.mark.parametrize(
    ("shape", "cuts", "expected"),
    [((5, 7), (4, 1), "Shard(0) x3"), ((5, 7), (1, 7), "Shard(1) x7"), ((6, 8), (2, 4), "Shard(0) x2, Shard(1) x4"),
     ((), (), "Replicate x8")],
)  # fmt: skip
def test_placements_of_a_grid(tmp_path: Path, shape: tuple[int, ...], cuts: tuple[int, ...], expected: str) -> None:
    made = Made(tmp_path, 8)
    made.add("w", torch.ones(shape), grid(shape, cuts))
    assert placed(made.catalogue) == {"w": expected}


def test_empty_shards_count_and_what_is_no_grid_is_unknown(tmp_path: Path) -> None:
    made = Made(tmp_path, 4)
    made.add("b", torch.ones(1), [((0,), (1,)), ((1,), (0,)), ((1,), (0,)), ((1,), (0,))])
    made.add("w", torch.ones(4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 1)), ((2, 1), (2, 1))])
    assert placed(made.catalogue) == {"b": "Shard(0) x4", "w": "None"}
    assert overview(made.catalogue) == "Shard(0) x4: 1 tensor; otherwise: 1 tensor"


def test_the_overview_counts_the_tensors_of_the_model() -> None:
    assert (
        overview(ckpttool.inspect(ckpt("dcp/hsdp_w4"))) == "Shard(0) x2 of 4 ranks: 17 tensors; Replicate x4: 2 tensors"
    )
    said = "ddp Replicate x2, fsdp Shard(0) x2: 17 tensors; Replicate x4: 2 tensors"
    assert overview(ckpttool.inspect(ckpt("rank/hsdp_w4"))) == said
    assert overview(ckpttool.inspect(ckpt("rank/ddp_w2"))) == overview(ckpttool.inspect(ckpt("hf/llama"))) == ""


def test_shards_of_many_ranks_are_one_line(tmp_path: Path) -> None:
    made = Made(tmp_path, 256)
    tensor = made.add("w", torch.ones(1021, 2), grid((1021, 2), (256, 1)))
    full, last = shards(tensor, made.catalogue, folded=True)
    assert (full.ranks, full.count, full.sizes) == ("ranks 0-254", 255, (4, 2))
    assert (last.ranks, last.count, last.sizes) == ("rank 255", 1, (1, 2))
    each = shards(tensor, made.catalogue, folded=False)
    assert [(one.ranks, one.offsets) for one in each] == [(f"rank {rank}", (4 * rank, 0)) for rank in range(256)]


def test_bytes_of_each_rank() -> None:
    document = json.loads(run("inspect", str(ckpt("dcp/hsdp_w4")), "--json").stdout)
    sizes = [(ckpt("dcp/hsdp_w4") / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert document["bytes_per_rank"] == sizes
    assert balance(sizes) == "36.1 kB (rank 2) to 71.9 kB (rank 3)"
    assert balance([1000, 1040, 1030]) == "1.02 kB"
    assert bytes_per_rank(Catalogue("torch", [File("a", "a", 100)])) is None
    lines = run("inspect", str(ckpt("dcp/hsdp_w4"))).stdout.splitlines()
    assert "  per rank    36.1 kB (rank 2) to 71.9 kB (rank 3)" in lines


def test_tensors_in_json_have_placements() -> None:
    words = ("--json", "--tensors", "*0.qkv.weight")
    (tensor,) = json.loads(run("inspect", str(ckpt("rank/hsdp_w4")), *words).stdout)["tensors"]
    assert (tensor["placements"], tensor["mesh"]) == (["Replicate", "Shard(0)"], [2, 2])
    (tensor,) = json.loads(run("inspect", str(ckpt("hf/llama")), "--json", "--tensors", "*0*q_proj*").stdout)["tensors"]
    assert (tensor["placements"], tensor["mesh"]) == (None, None)
