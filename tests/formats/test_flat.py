"""FSDP1's flat parameters, rebuilt from what real runs saved, against what torch gathered in the same runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from made import within

from ckpttool import boxes, files
from ckpttool.catalogue import Extent
from ckpttool.containers import sharded, torchzip
from ckpttool.containers.torchpickle import TensorRef
from ckpttool.contract import OpenOptions
from ckpttool.formats.rankfiles import flat, flatoptim
from ckpttool.formats.rankfiles.flatpieces import Parameter, Rebuilt

HERE = Path(__file__).resolve().parent
SAMPLES = HERE.parents[1] / "samples"
sys.path.insert(0, str(SAMPLES))

from same import assert_same  # noqa: E402

ORIG = ["orig", "orig_one_unit", "orig_groups", "orig_names", "orig_frozen", "orig_dtypes", "orig_ignored",
        "orig_momentum"]  # fmt: skip
FLAT = ["flat", "flat_one_unit", "flat_untied", "flat_groups", "flat_names", "flat_dtypes", "flat_ignored",
        "flat_momentum"]  # fmt: skip
MESH = ["orig_mesh", "flat_mesh", "flat_mesh_nested"]
WORLDS = [2, 3, 4]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of all cases for a number of ranks."""
    done: dict[int, Path] = {}

    def run(world: int) -> Path:
        if world not in done:
            folder = tmp_path_factory.mktemp(f"flat{world}")
            command = [sys.executable, str(HERE / "flat_ranks.py"), str(folder), str(world)]
            told = subprocess.run(command, capture_output=True, text=True, timeout=900)
            assert told.returncode == 0, told.stderr[-4000:]
            done[world] = folder
        return done[world]

    return run


class Opened:
    """The files of all ranks: their trees, and where the tensors in them are."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._pool = files.Pool()
        self._archives = [self._archive(path) for path in paths]
        self.trees = [sharded.replace(torchzip.load_tree(archive)) for archive in self._archives]

    def _archive(self, path: Path) -> torchzip.Archive:
        read = lambda offset, nbytes: self._pool.read(str(path), offset, nbytes)  # noqa: E731
        return torchzip.open_archive(read, 0, path.stat().st_size, name=path.name)

    def place(self, rank: int, ref: TensorRef) -> Extent:
        return self._archives[rank].extent(ref)._replace(file=rank)

    def part(self, key: str) -> list[Any]:
        return [tree[key] for tree in self.trees]

    def read(self, extent: Extent, like: torch.Tensor) -> torch.Tensor:
        data = self._pool.read(str(self.paths[extent.file]), extent.offset, extent.nbytes)
        return torch.frombuffer(bytearray(data), dtype=like.dtype)

    def filled(self, value: Any) -> Any:
        """A tree with the elements in place of where they are."""
        if isinstance(value, Rebuilt):
            return self._tensor(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.filled, value))
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        return value

    def _tensor(self, value: Rebuilt) -> torch.Tensor:
        made = torch.zeros(value.shape, dtype=getattr(torch, value.dtype.name))
        assert boxes.tiling_fault(value.shape, value.chunks.offsets, value.chunks.sizes) is None
        for chunk in value.chunks:
            assert chunk.extent.plain and chunk.extent.nbytes == prod(chunk.sizes) * made.element_size()
            made[within((chunk.offsets, chunk.sizes))] = self.read(chunk.extent, made).reshape(chunk.sizes)
        for _, extent in value.copies:
            assert torch.equal(self.read(extent, made).reshape(value.shape), made)
        return made


def opened(folder: Path) -> Opened:
    return Opened(sorted(folder.glob("rank*.pt")))


def reference(folder: Path) -> dict[str, Any]:
    whole = torch.load(folder / "reference.pt", weights_only=False)
    return {"model": dict(whole["model"]), "optim": whole["optim"]}


def shapes_of(whole: Mapping[str, Any]) -> OpenOptions:
    return OpenOptions({name: tuple(tensor.shape) for name, tensor in whole["model"].items()})


def rebuilt(folder: Path, options: OpenOptions | None = None) -> tuple[Opened, flat.Model]:
    ranks = opened(folder)
    return ranks, flat.model(ranks.part("model"), ranks.place, options or shapes_of(reference(folder)))


def clean(tree: Any) -> Any:
    """Tensors without what torch hung on them; they are compared by value."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: clean(value) for key, value in tree.items()}
    return [clean(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", ORIG + FLAT)
def test_parameters_are_those_that_torch_gathered(ran: Callable[[int], Path], case: str, world: int) -> None:
    folder = ran(world) / case
    whole = reference(folder)
    ranks, model = rebuilt(folder)
    assert flat.is_flat(ranks.part("model"))
    found = ranks.filled(model.tensors)
    ignored = {"layers.0.gate", "norm.bias"} if case.endswith("ignored") else set()
    assert set(model.whole) == {"seen", "rates"} | ignored
    assert_same(found, clean({k: v for k, v in whole["model"].items() if k not in model.whole}))
    assert (model.tensors["head.weight"].chunks.offset == model.tensors["embed.weight"].chunks.offset) == (
        case != "flat_untied"
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", ORIG + FLAT)
def test_optimizers_are_those_that_torch_gathered(ran: Callable[[int], Path], case: str, world: int) -> None:
    folder = ran(world) / case
    ranks, model = rebuilt(folder)
    assert flatoptim.is_raw(ranks.part("optim"))
    found = ranks.filled(flatoptim.optimizer(ranks.part("optim"), ranks.place, model.counted))
    assert_same(found, clean(reference(folder)["optim"]))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", MESH)
def test_raw_optimizer_beside_a_model_by_name(ran: Callable[[int], Path], case: str, world: int) -> None:
    """What verl saves: which modules are units is in no file."""
    folder = ran(world) / case
    ranks, whole = opened(folder), reference(folder)
    assert not flat.is_flat(ranks.part("model"))
    found = ranks.filled(flatoptim.optimizer(ranks.part("optim"), ranks.place, named_of(ranks)))
    assert_same(found, clean(whole["optim"]))


@pytest.mark.parametrize("case", ["orig_hybrid", "flat_hybrid"])
@pytest.mark.parametrize("replica", [(0, 1), (2, 3)])
def test_each_replica_is_enough(ran: Callable[[int], Path], case: str, replica: tuple[int, int]) -> None:
    folder = ran(4) / case
    ranks, whole = opened(folder), reference(folder)
    found = flatoptim.optimizer(ranks.part("optim"), ranks.place, named_of(ranks), replica)
    assert_same(ranks.filled(found), clean(whole["optim"]))
    files_used = {chunk.extent.file for state in found["state"].values() for chunk in state["exp_avg"].chunks}
    assert files_used == set(replica)


def named_of(ranks: Opened) -> list[Parameter]:
    named = flatoptim.named(ranks.part("model"), ranks.place)
    # Copies were saved of the shared parameter; it is the bytes that tell.
    assert [p.name for p in named if p.again] == ["head.weight"]
    assert [p.name for p in named if not p.certain] == ["rates"]
    return named


@pytest.mark.parametrize("name", ["rank_fsdp1_local_w2", "rank_fsdp1_flat_w2", "rank_fsdp1_local_w3",
                                  "rank_fsdp1_flat_w3", "rank_fsdp1_local_w4", "rank_fsdp1_flat_w4"])  # fmt: skip
def test_samples(name: str) -> None:
    whole = torch.load(SAMPLES / "checkpoints" / name / "reference.pt", weights_only=False)
    ranks = Opened(sorted((SAMPLES / "checkpoints" / name / "ckpt").glob("*rank*")))
    model = flat.model(ranks.part("model"), ranks.place, shapes_of(whole))
    assert_same(ranks.filled(model.tensors), clean({k: v for k, v in whole["model"].items() if k not in model.whole}))
    if "optim" in whole:
        found = ranks.filled(flatoptim.optimizer(ranks.part("optim"), ranks.place, model.counted))
        assert_same(found, clean(whole["optim"]))


@pytest.mark.parametrize("name", ["rank_verl_fsdp1_w1", "rank_verl_fsdp1_w2", "rank_verl_fsdp1_orig_w2"])
def test_samples_of_verl(name: str) -> None:
    folder = SAMPLES / "checkpoints" / name
    whole = torch.load(folder / "reference.pt", weights_only=False)
    model, optim = (Opened(sorted((folder / "ckpt").glob(f"{part}_world*"))) for part in ("model", "optim"))
    counted = flatoptim.named(model.trees, model.place)
    assert_same(optim.filled(flatoptim.optimizer(optim.trees, optim.place, counted)), clean(whole["optim"]))
