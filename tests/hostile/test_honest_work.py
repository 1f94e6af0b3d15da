"""The largest files that people really have use a fifth of the limit of work at most, of which a lie uses all.

Each is made by torch, as its kind is written. Small ones have a share of it by their bytes, as large ones have; what is
allowed to any file, however small, does not count there.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.hang import no_hang
from support.paths import CHECKPOINTS, ROOT, all_samples
from support.simulated_ranks import as_rank, chunked, cut, mesh, save
from torch.distributed.tensor import Replicate, Shard

import ckpttool
from ckpttool.catalogue import work_limit
from ckpttool.errors import CkptError

sys.path.append(str(ROOT / "samples" / "bench"))

import metadata as index_of_bench  # type: ignore[import-not-found]

MARGIN = 5


class Used(work_limit.WorkLimit):
    """A limit that remembers how much of all was used at the worst time."""

    __slots__ = ("least", "share")
    made: list[Used] = []  # noqa: RUF012

    def __init__(self, nbytes: int = 0) -> None:
        self.share = self.least = 0.0
        super().__init__(nbytes)
        Used.made.append(self)

    def charge(self, count: int) -> None:
        most = work_limit.LEAST + work_limit.PER_BYTE * self.nbytes
        self.share = max(self.share, (most - self.left + count) / most)
        super().charge(count)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Opens a checkpoint, and returns the share of the limit that it used; prints it."""
    monkeypatch.setattr(work_limit, "WorkLimit", Used)

    def open_it(path: Path, what: str = "", *, least: int | None = None) -> float:
        Used.made.clear()
        if least is not None:
            monkeypatch.setattr(work_limit, "LEAST", least)
        ckpttool.open(path).close()
        share = max((made.share for made in Used.made), default=0.0)
        nbytes = max((made.nbytes for made in Used.made), default=0)
        print(f"{100 * share:6.2f} % of the limit of {nbytes:11,} bytes: {what or path.name}")
        return share

    return open_it


# What torch writes ----------------------------------------------------------------------------------------------------


def _training(folder: Path, count: int) -> Path:
    """`torch.save` of a model and its optimizer, with the state of each parameter under its number."""
    one = torch.zeros(1)
    names = [f"layers.{n // 9}.w{n % 9}.weight" for n in range(count)]
    state = {n: {"step": one.clone(), "exp_avg": one.clone(), "exp_avg_sq": one.clone()} for n in range(count)}
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "params": list(range(count))}
    model = OrderedDict((name, one.clone()) for name in names)
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}}, folder / "train.pt")
    return folder / "train.pt"


def _plain(folder: Path, count: int) -> Path:
    torch.save({f"layers.{n // 9}.w{n % 9}.weight": torch.zeros(1) for n in range(count)}, folder / "plain.pt")
    return folder / "plain.pt"


def _groups(folder: Path, count: int) -> Path:
    """An optimizer with a parameter group for each parameter."""
    one = torch.zeros(1)
    state = {n: {"step": one.clone(), "exp_avg": one.clone()} for n in range(count)}
    groups = [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "params": [n]} for n in range(count)]
    torch.save({"state": state, "param_groups": groups}, folder / "groups.pt")
    return folder / "groups.pt"


def _parameters(folder: Path, count: int) -> Path:
    """Parameters with attributes of their own, as tensor parallelism leaves them."""
    state: dict[str, Any] = {}
    for n in range(count):
        state[f"w{n}"] = parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = 0, 1
    torch.save(state, folder / "parameters.pt")
    return folder / "parameters.pt"


def _dtensors(folder: Path, ranks: int, tensors: int, world: int, how: str = "one mesh") -> Path:
    """The first rank files of a set: a job of `world` ranks."""

    def state(rank: int) -> dict[str, Any]:
        on = mesh(world // 8, 8) if how != "one mesh" else mesh(world)
        rows = torch.zeros(world, 1)
        made: dict[str, Any] = {}
        for n in range(tensors):
            if how == "a mesh of each":  # as FSDP2 and tensor parallelism make one for each parameter
                on = mesh(world // 8, 8)
            elif how == "a part of a mesh":
                on = mesh(world // 8, 8)["a"]
            placements = [Shard(0), Replicate()] if on.ndim == 2 else [Shard(0)]
            made[f"w{n}"] = cut(rows, on, *placements)
        return made

    folder = folder / "set"
    folder.mkdir()
    for rank in range(ranks):
        with as_rank(rank, world):
            torch.save({"model": state(rank), "step": 3}, folder / f"model_world_size_{world}_rank_{rank}.pt")
    return folder


def _sharded(folder: Path, ranks: int, tensors: int, world: int) -> Path:
    rows = torch.zeros(world, 1)
    return save(folder / "set", ranks, lambda rank: {f"w{n}": chunked(rows, rank, ranks) for n in range(tensors)})


def _experts(folder: Path, count: int) -> Path:
    made = {f"layers.{n // 256}.experts.{n % 256}.w{i}": torch.zeros(1) for n in range(count) for i in range(3)}
    made |= {f"{name}_scale": torch.zeros(1) for name in made}
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def _index(folder: Path, chunks: int, world: int, spelling: str) -> Path:
    index_of_bench.make(folder / "ckpt", chunks, world, index_of_bench.SPELLINGS[spelling])
    return folder / "ckpt"


def _run_directory(folder: Path, steps: int) -> Path:
    (folder / "run").mkdir()
    save_file({"w": torch.zeros(2)}, folder / "run" / "model.safetensors", {"format": "pt"})
    log = [{"epoch": n / 100, "grad_norm": 1.5, "learning_rate": 1e-4, "loss": 2.5, "step": n} for n in range(steps)]
    (folder / "run" / "trainer_state.json").write_text(json.dumps({"log_history": log, "global_step": steps}))
    return folder / "run"


def _tokenizer(folder: Path, words: int) -> Path:
    """A module that is pickled whole, with the vocabulary and the merges of its tokenizer."""
    module = torch.nn.Linear(2, 2)
    vocabulary = {f"token{n}": n for n in range(words)}
    merges = {(f"to{n}", f"ken{n}"): n for n in range(words)}
    module.tokenizer = {"encoder": vocabulary, "decoder": {n: t for t, n in vocabulary.items()}, "bpe_ranks": merges}
    torch.save(module, folder / "module.pt")
    return folder / "module.pt"


def _loader(folder: Path, samples: int) -> Path:
    """The order of a data loader's samples, and what it has counted, in lists."""
    torch.save(
        {"w": torch.zeros(1), "loader": {"order": list(range(samples)), "seen": [[n] for n in range(samples)]}},
        folder / "loader.pt",
    )
    return folder / "loader.pt"


SMALL: dict[str, Callable[[Path], Path]] = {
    "training state": lambda folder: _training(folder, 2_000),
    "tensors": lambda folder: _plain(folder, 4_000),
    "parameter groups": lambda folder: _groups(folder, 2_000),
    "parameters with attributes": lambda folder: _parameters(folder, 2_000),
    "DTensors, 4 files of 64 ranks": lambda folder: _dtensors(folder, 4, 40, 64),
    "DTensors, 2 files of 1,024 ranks": lambda folder: _dtensors(folder, 2, 40, 1024),
    "DTensors, a mesh of each": lambda folder: _dtensors(folder, 1, 100, 1024, "a mesh of each"),
    "DTensors, a part of a mesh": lambda folder: _dtensors(folder, 1, 100, 1024, "a part of a mesh"),
    "ShardedTensors": lambda folder: _sharded(folder, 4, 100, 4),
    "experts": lambda folder: _experts(folder, 1_000),
    "run directory": lambda folder: _run_directory(folder, 5_000),
    "tokenizer": lambda folder: _tokenizer(folder, 10_000),
    "data loader": lambda folder: _loader(folder, 50_000),
    **{f"index, {name}": partial(_index, chunks=6_000, world=64, spelling=name) for name in index_of_bench.SPELLINGS},
}
LARGE: dict[str, Callable[[Path], Path]] = {
    "training state": lambda folder: _training(folder, 25_000),
    "parameter groups": lambda folder: _groups(folder, 100_000),
    "parameters with attributes": lambda folder: _parameters(folder, 50_000),
    "DTensors of 64 ranks": lambda folder: _dtensors(folder, 64, 300, 64),
    "DTensors of 8 ranks": lambda folder: _dtensors(folder, 8, 3_000, 8),
    "DTensors, 4 files of 1,024 ranks": lambda folder: _dtensors(folder, 4, 3_000, 1024),
    "DTensors, a mesh of each": lambda folder: _dtensors(folder, 1, 3_000, 1024, "a mesh of each"),
    "DTensors, a part of a mesh": lambda folder: _dtensors(folder, 1, 3_000, 1024, "a part of a mesh"),
    "ShardedTensors of 8 ranks": lambda folder: _sharded(folder, 8, 3_000, 8),
    "ShardedTensors of 64 ranks": lambda folder: _sharded(folder, 64, 300, 64),
    "experts": lambda folder: _experts(folder, 18_000),
    "run directory": lambda folder: _run_directory(folder, 500_000),
    "tokenizer": lambda folder: _tokenizer(folder, 250_000),
    "data loader": lambda folder: _loader(folder, 2_000_000),
    **{
        f"index, {name}": partial(_index, chunks=768_000, world=256, spelling=name) for name in index_of_bench.SPELLINGS
    },
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", SMALL)
def test_a_small_file_has_enough_by_its_bytes(kind: str, tmp_path: Path, used: Callable[..., float]) -> None:
    assert used(SMALL[kind](tmp_path), kind, least=1 << 17) * MARGIN <= 1


@pytest.mark.long
@pytest.mark.parametrize("kind", LARGE)
def test_the_largest_have_enough(kind: str, tmp_path: Path, used: Callable[..., float]) -> None:
    assert used(LARGE[kind](tmp_path), kind) * MARGIN <= 1


def test_many_ties_of_one_tensor_do_not_hang(tmp_path: Path) -> None:
    path, ties = tmp_path / "m.safetensors", 100_000
    save_file({"w": torch.zeros((1,) * 64)}, path, {f"tied{n}": "w" for n in range(ties)})
    with no_hang(), ckpttool.open(path) as checkpoint:
        assert len(checkpoint) == ties + 1


def test_all_samples_have_enough(used: Callable[..., float]) -> None:
    shares = []
    for name in all_samples():
        for path in (CHECKPOINTS / name).glob("ckpt*"):
            with suppress(CkptError):
                shares.append((used(path, name), name))
    assert len(shares) > 30
    assert max(shares)[0] * MARGIN <= 1, max(shares)
