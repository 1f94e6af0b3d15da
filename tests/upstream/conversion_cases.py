"""What is converted and then loaded on several ranks: a table, and the routes it takes through ckpttool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.upstream_readers import path_of, reference_of

from ckpttool import convert, reshard

Step = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """`Case("dcp/fsdp2_w4, 3 ranks", "dcp/fsdp2_w4", (("dcp", {"to_world": 3}),))`.

    `reader` says what it is loaded into, see `read_on_ranks.py`; `sizes` are those of the model, where they are not the
    usual ones; `worlds`, on how many ranks. `long` is left to `make test-all`.
    """

    name: str
    sample: str
    route: tuple[Step, ...]
    reader: str = "training"
    worlds: tuple[int, ...] = (2, 4)
    sizes: dict[str, int] = field(default_factory=dict)
    long: bool = False

    def long_on(self, world: int) -> bool:
        """Whether it is left to `make test-all`, as is all that is not loaded on 2 ranks."""
        return self.long or world != 2


SAME: Step = ("dcp", {})
TORCH: Step = ("torch", {})
SAFETENSORS: Step = ("safetensors", {})


def over(ranks: int) -> Step:
    """DCP for another number of ranks."""
    return ("dcp", {"to_world": ranks})


ROUTES: dict[str, tuple[Step, ...]] = {
    "dcp": (SAME,),
    "dcp over 3": (over(3),),
    "torch, dcp": (TORCH, SAME),
    "torch, dcp over 2": (TORCH, over(2)),
    "safetensors, dcp over 4": (SAFETENSORS, over(4)),
    "safetensors, torch, dcp over 3": (SAFETENSORS, TORCH, over(3)),
}
WORLDS: dict[str, tuple[Step, ...]] = {f"dcp over {n}": (over(n),) for n in (1, 2, 4, 8)}
# One sample takes all routes. Of those that come by turns another sample takes one, for `make test`.
ALL_ROUTES = "dcp/fsdp2_w4"
BY_TURNS = ("dcp over 3", "torch, dcp", "safetensors, torch, dcp over 3")
TP_SIZES = {"width": 8, "hidden": 30}
TRAINED: dict[str, tuple[str, dict[str, int]]] = {
    "dcp/fsdp2_w2": ("training", {}),
    "dcp/fsdp2_w4": ("training", {}),
    "dcp/hsdp_w4": ("training", {}),
    "dcp/fsdp2_tp_w4": ("training", TP_SIZES),
    "dcp/fsdp1_w2": ("late", {}),
    "dcp/single": ("training", {}),
    "dcp/flat_optim_w2": ("flat", {"layers": 1}),
    "dcp/int_keys": ("ids", {}),
    "torch/full": ("ids", {}),
}


def _cases() -> Iterator[Case]:
    for turn, (sample, (reader, sizes)) in enumerate(TRAINED.items()):
        for name, route in {**ROUTES, **WORLDS}.items():
            long = sample != ALL_ROUTES and name != BY_TURNS[turn % 3]
            yield Case(f"{sample}: {name}", sample, route, reader, sizes=sizes, long=long)
    for name in ("dcp", "dcp over 3", "safetensors, torch, dcp over 3"):
        yield Case(f"dcp/hsdp_w4 into HSDP: {name}", "dcp/hsdp_w4", ROUTES[name], "hsdp", (4,))
        yield Case(f"dcp/fsdp2_tp_w4 into TP: {name}", "dcp/fsdp2_tp_w4", ROUTES[name], "tp", (4,), TP_SIZES)
    for turn, sample in enumerate((
        "safetensors/single", "safetensors/indexed", "hf/sharded_w2", "hf/consolidated_w2", "hf/llama", "hf/gpt2",
        "dcp/dtypes", "dcp/shard1_w2", "dcp/grid_w4", "dcp/zstd_w2", "dcp/safetensors_w2", "torch/dtypes",
        "torch/legacy",
    )):  # fmt: skip
        for number, name in enumerate(("dcp", "dcp over 3")):
            yield Case(f"{sample}: {name}", sample, ROUTES[name], "tensors", long=number != turn % 2)
    for name in ("dcp over 3", "safetensors, dcp over 4"):
        yield Case(f"large: {name}", "large", ROUTES[name], "tensors")
    yield from _fsdp1_cases()
    yield from _resharded_cases()


def onto(**options: Any) -> Step:
    """`ckpttool reshard`; `to` is `dcp` unless it is said."""
    return ("reshard", options)


TP_RULES = ("*.up.*=tp:0", "*.down.weight=tp:1")
TP_MESH = onto(to_mesh="shard=2,tp=2", placements=TP_RULES)


def _resharded_cases() -> Iterator[Case]:
    """Saved by one mesh, laid out for another, loaded on that one."""
    hsdp = onto(to_mesh="replicate=2,shard=2")
    yield Case("dcp/fsdp2_w4: reshard 8, 3, 4", "dcp/fsdp2_w4", tuple(onto(to_world=n) for n in (8, 3, 4)))
    yield Case("dcp/fsdp2_w4: reshard onto HSDP", "dcp/fsdp2_w4", (hsdp,), "hsdp", (4,))
    yield Case("torch/full: reshard onto 2", "torch/full", (onto(to_world=2),), "ids", (2,))
    yield Case("dcp/fsdp2_tp_w4: reshard onto TP", "dcp/fsdp2_tp_w4", (onto(to_world=3), TP_MESH), "tp", (4,), TP_SIZES)
    yield Case("dcp/fsdp2_tp_w4: reshard onto 2", "dcp/fsdp2_tp_w4", (onto(to_world=2),), worlds=(2,), sizes=TP_SIZES)
    rank_files = onto(to_world=4, to="fsdp1", rng="rank0")
    yield Case("rank/fsdp1_w2: reshard onto 4", "rank/fsdp1_w2", (rank_files,), "fsdp1", (4,))


FSDP1_SAMPLES = ("rank/fsdp1_w2", "dcp/fsdp1_w2", "torch/fsdp1_full_w2", "dcp/fsdp2_w2")
# How FSDP1 is built, and what its sharded tensors are then.
FSDP1_CLASSES = {"fsdp1": None, "fsdp1 flat": None, "fsdp1 mesh": "dtensor", "fsdp1 named": "dtensor:cpu:row"}
# Of each world, what is not left to `make test-all`.
FSDP1_WORLDS = {
    1: ("fsdp1",),
    2: ("fsdp1", "fsdp1 flat", "fsdp1 mesh", "fsdp1 named"),
    3: ("fsdp1", "fsdp1 mesh"),
    4: ("fsdp1", "fsdp1 flat"),
    8: ("fsdp1",),
}


def _fsdp1_cases() -> Iterator[Case]:
    for world, brief in FSDP1_WORLDS.items():
        for sample in FSDP1_SAMPLES:
            for reader, tensor_class in FSDP1_CLASSES.items():
                if sample == "dcp/fsdp2_w2" and reader == "fsdp1 flat":
                    continue  # a flat parameter is in one group, and this sample has two for those of a block
                route = (("fsdp1", {"to_world": world, "tensor_class": tensor_class}),)
                long = sample != "rank/fsdp1_w2" or reader not in brief
                yield Case(f"{sample}: {reader} over {world}", sample, route, reader, (world,), long=long)
    for world in (2, 4):
        for reader in ("fsdp1 dcp", "fsdp1 flat dcp"):
            name = f"rank/fsdp1_w2: {reader} on {world}"
            yield Case(name, "rank/fsdp1_w2", ROUTES["dcp"], reader, (world,), long=world > 2)
        name, route = f"dcp/fsdp2_w2: fsdp1 mesh api on {world}", (("fsdp1", {"to_world": 2}), SAME)
        yield Case(name, "dcp/fsdp2_w2", route, "fsdp1 mesh api", (world,), long=world > 2)
    yield Case("rank/fsdp1_w2: fsdp1 and 2", "rank/fsdp1_w2", (), "fsdp1 and 2")


CASES = {case.name: case for case in _cases()}


def converted(source: str, route: tuple[Step, ...], folder: Path) -> str:
    """Take a checkpoint along a route; the answer is where the last step lies."""
    folder.mkdir(parents=True)
    for number, (to, options) in enumerate(route):
        step = str(folder / (f"{number}.pt" if to == "torch" else f"{number}-{to}"))
        if to == "reshard":
            reshard(source, step, **options)
        else:
            convert(source, step, to=to, **options)
        source = step
    return source


def description(case: Case, large: Path, folder: Path) -> dict[str, Any]:
    """Convert, and say all that the ranks need to know; or why there is nothing to read."""
    source, reference = (large, large) if case.sample == "large" else (path_of(case.sample), reference_of(case.sample))
    told: dict[str, Any] = {
        "name": case.name, "reader": case.reader, "sizes": case.sizes, "reference": str(reference),
        "scratch": str(folder),
    }  # fmt: skip
    try:
        told["path"] = converted(str(source), case.route, folder)
    except Exception as error:
        told["verdict"] = f"not converted: {type(error).__name__}: {error}"
    return told
