"""Samples of torch.distributed.checkpoint directories: every kind of item."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dcp import DCP, load, save, spelled
from sample import sample
from tensors import DTYPES, raw
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training import detached


def line_mesh() -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(tree: dict[str, Any]) -> dict[str, Any]:
    """The same dict with every DTensor gathered."""
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in tree.items()}


@sample(
    "dcp/shard1_w2",
    what="`DTensor`s sharded on other dimensions than the first",
    trap="chunks that are column blocks: their rows lie apart in the whole; uneven and empty; a replicated `DTensor`",
    writer=DCP,
    load=load,
    world=2,
)
def dcp_shard1(folder: Path) -> Any:
    """`distribute_tensor` alone, no model."""
    mesh = line_mesh()
    values = torch.arange(2 * 3 * 5, dtype=torch.float32)
    state = {
        "columns": distribute_tensor(values.reshape(5, 6), mesh, [Shard(1)]),
        "uneven_columns": distribute_tensor(values.reshape(6, 5), mesh, [Shard(1)]),
        "one_column": distribute_tensor(values.reshape(30, 1), mesh, [Shard(1)]),
        "last_of_three": distribute_tensor(values.reshape(2, 3, 5), mesh, [Shard(2)]),
        "middle_of_three": distribute_tensor(values.reshape(2, 3, 5).bfloat16(), mesh, [Shard(1)]),
        "rows": distribute_tensor(values.reshape(3, 10), mesh, [Shard(0)]),
        "replicated": distribute_tensor(values, mesh, [Replicate()]),
        "scalar": distribute_tensor(torch.tensor(2.5), mesh, [Replicate()]),
        "empty": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)]),
        "empty_columns": distribute_tensor(torch.empty(4, 0), mesh, [Shard(1)]),
    }
    save(state, folder)
    return detached(whole(state))


@sample(
    "dcp/grid_w4",
    what="`DTensor`s on a mesh of 2 by 2, sharded on two dimensions",
    trap="chunks that are blocks of a matrix; the same dimension sharded twice; uneven in both directions",
    writer=DCP,
    load=load,
    world=4,
)
def dcp_grid(folder: Path) -> Any:
    """Every pair of placements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    values = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    placements = {
        "rows_columns": [Shard(0), Shard(1)],
        "columns_rows": [Shard(1), Shard(0)],
        "rows_rows": [Shard(0), Shard(0)],
        "rows_replicated": [Shard(0), Replicate()],
        "replicated_columns": [Replicate(), Shard(1)],
        "replicated": [Replicate(), Replicate()],
    }
    state = {name: distribute_tensor(values, mesh, placement) for name, placement in placements.items()}
    save(state, folder)
    return dict.fromkeys(placements, values)


@sample(
    "dcp/dtypes",
    what="one tensor of every dtype",
    trap="`TensorProperties` names the dtype, the item itself again; items at odd offsets",
    writer=f"{DCP}, `no_dist=True`",
    load=load,
)
def dcp_dtypes(folder: Path) -> Any:
    """As `torch/dtypes`, without the `bits` dtypes, which DCP cannot save."""
    names = [name for name in DTYPES if not name.startswith("bits")]
    state = {name: raw(getattr(torch, name), 6, first=index) for index, name in enumerate(names)}
    state["bool"] = torch.tensor([True, False, False, True, True, False])
    save(state, folder, no_dist=True)
    return state


@sample(
    "dcp/strided_w2",
    what="tensors that are not row-major, plain and `DTensor`",
    trap="items keep their strides: column-major, channels last, conjugated; `.t()` of a `DTensor` is sharded on dim 1",
    writer=DCP,
    load=load,
    world=2,
)
def dcp_strided(folder: Path) -> Any:
    """Whoever reads the bytes of an item as row-major reads them wrong."""
    mesh = line_mesh()
    matrix = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    wide = torch.arange(12).to(torch.complex64).reshape(3, 4) * (1 + 2j)
    state = {
        "transposed": matrix.t(),
        "transposed_copy": matrix.t().clone(),
        "channels_last": image.clone(memory_format=torch.channels_last),
        "permuted": image.permute(3, 1, 0, 2).clone(),
        "conjugated": wide.conj(),
        "conjugated_columns": wide.t().conj(),
        "negated": torch._neg_view(matrix.clone()),
        "slice": matrix[1:4, 2:5],
        "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 6),
        "sharded": distribute_tensor(matrix, mesh, [Shard(0)]),
        "sharded_transposed": distribute_tensor(matrix, mesh, [Shard(0)]).t(),
        "sharded_columns_transposed": distribute_tensor(matrix, mesh, [Shard(1)]).t(),
        "sharded_channels_last": distribute_tensor(image, mesh, [Shard(0)]).permute(0, 2, 3, 1),
    }
    save(state, folder)
    return detached(whole(state))


@sample(
    "dcp/tuples",
    what="tensors inside tuples, sets of values and objects",
    trap="tuples and objects are opaque: their tensors are not in the catalogue; lists with tensors are taken apart",
    writer=f"{DCP}, `no_dist=True`",
    load=load,
)
def dcp_tuples(folder: Path) -> Any:
    """What the planner walks into and what it does not."""
    state = {
        "tuple": (torch.arange(3.0), 1, {"x": torch.ones(2)}),
        "tuple_of_numbers": (1, 2),
        "empty_tuple": (),
        "list": [torch.arange(3), 2, [torch.zeros(1), "x"], None],
        "list_of_numbers": [1, 2.5],
        "list_of_lists": [[1], [2, 3]],
        "list_of_dicts": [{"a": torch.ones(1)}, {"a": 2, "b": [1]}],
        "list_of_tuples": [(torch.ones(1), 2)],
        "namespace": argparse.Namespace(tensor=torch.arange(4)),
        "ordered": OrderedDict(b=torch.ones(1), a=1),
        "set": {1, 2},
        "bytes": b"\x00\xff",
        "key.with.dots": {"a.b": torch.ones(2), "a": {"c": 1}},
        "": 1,
        "empty_list": [],
        "none": None,
    }
    save(state, folder, no_dist=True)
    return spelled(state)
