"""`ckpttool.load`, `load_into` and `save` on the ranks of real process groups, against torch's own functions.

What is loaded and what it is compared with is in `on_ranks/`: `load_cases.py`, `practices.py` and
`error_cases.py`. All cases of a world are one launch.
"""

from __future__ import annotations

import pytest
from support.torchrun import Verdicts

STRATEGIES = ("parallel", "broadcast")
FSDP1 = ("fsdp1", "fsdp1 flat", "fsdp1 grad", "fsdp1 none", "fsdp1 mixed", "fsdp1 mesh", "fsdp1 hybrid")
EVEN = ("hsdp", "tp", "fsdp1 hybrid")  # kinds that need an even number of ranks, at least 2
Cases = list[list[str]]


FLIPPED = (
    ("dcp", "model.embed.weight", "fsdp2"),
    ("dcp", "model.embed.weight", "fsdp2"),
    ("dcp", "optim.state.layers.0.down.weight.exp_avg", "columns"),
    ("dcp", "optim.state.layers.0.down.weight.exp_avg", "fsdp2"),
    ("dcp", "model.norm.weight", "ddp"),
    ("dcp", "model.norm.weight", "ddp"),
    ("torch", "model.layers.0.down.weight", "columns"),
    ("torch", "model.layers.0.down.weight", "columns"),
    ("torch", "model.layers.0.up.weight", "fsdp2"),
    ("torch", "model.embed.weight", "fsdp1"),
    ("rank", "rank1.pt", "fsdp2"),
    ("rank", "rank2.pt", "ddp"),
)


def by_turns(cases: Cases) -> Cases:
    """Of those that differ in the strategy alone one, with one strategy and the other by turns: for `make test`."""
    alike: dict[tuple[str, ...], Cases] = {}
    for case in cases:
        alike.setdefault(tuple(word for word in case if word not in STRATEGIES), []).append(case)
    return [same[i % len(same)] for i, same in enumerate(alike.values())]


def every_second(cases: Cases) -> Cases:
    """Of the cases with one function the first, the third and so on: for `make test`."""
    by_function: dict[str, Cases] = {}
    for case in cases:
        by_function.setdefault(case[0], []).append(case)
    return [case for same in by_function.values() for case in same[::2]]


def everyday() -> Cases:
    """Two ranks: each practice, each kind of model, each way to fail, once or twice."""
    cases = [
        ["fsdp1_full", "fsdp1", "parallel"],
        ["fsdp1_full", "fsdp1 flat", "broadcast"],
        ["unwrapped_weights", "fsdp1", "broadcast"],
        ["unwrapped_weights", "fsdp1 flat", "parallel"],
        *(["fsdp1_dcp", kind, STRATEGIES[i % 2]] for i, kind in enumerate(FSDP1)),
        *(["fsdp2_dcp", kind, strategy] for kind in ("fsdp2", "hsdp", "tp") for strategy in STRATEGIES),
        ["full_broadcast", "fsdp2", "parallel"],
        ["full_broadcast", "hsdp", "broadcast"],
    ]
    cases += [
        ["sample", "dcp/fsdp2_w4", "fsdp2", "parallel"],
        ["sample", "dcp/fsdp2_w4", "fsdp2", "broadcast"],
        ["sample", "dcp/fsdp2_w4", "compiled", "broadcast"],
        ["sample", "torch/full", "fsdp1", "parallel"],
        ["sample", "rank/fsdp1_w4", "fsdp2", "parallel", "meta"],
        ["foreign", "dcp/safetensors_w2", "fsdp1", "parallel"],
        ["foreign", "dcp/safetensors_w2", "fsdp1 flat", "broadcast"],
        ["foreign", "safetensors/single", "fsdp2", "broadcast"],
        ["foreign", "torch/ddp", "fsdp2", "parallel"],
        ["foreign", "torch/model", "columns", "broadcast"],
        ["directory", "run/torchtitan_w2", "fsdp2", "parallel"],
        ["directory", "run/lightning_w2", "fsdp2", "broadcast"],
    ]
    cases += [["own_bytes", kind] for kind in ("fsdp2", "tp", "columns", "hsdp", "ddp", "fsdp1", "fsdp1 flat")]
    cases += [["casts", kind, strategy] for kind in ("plain", "fsdp2") for strategy in STRATEGIES]
    cases += [["wide", kind, strategy] for kind in ("plain", "fsdp2") for strategy in STRATEGIES]
    cases += [["rounds", "fsdp1", "dcp"], ["rounds", "fsdp1", "fsdp1"], ["rounds", "fsdp2", "torch"]]
    for wrong in ("other_shapes", "other_names", "other_groups", "one_rank_blind", "damaged"):
        cases += [[wrong, "fsdp2", strategy] for strategy in STRATEGIES]
    cases += [["another_save", kind, strategy] for kind in ("fsdp2", "ddp", "columns") for strategy in STRATEGIES]
    for i, flipped in enumerate(FLIPPED):
        cases.append(["flipped", *flipped, STRATEGIES[i % 2]])
    return [
        *cases,
        ["other_groups", "fsdp1", "parallel"],
        *(["two_checkpoints", "fsdp1", strategy] for strategy in STRATEGIES),
        ["without_moments", "fsdp2", "broadcast"],
        ["without_moments", "fsdp1", "parallel"],
        ["without_moments", "fsdp1 flat", "broadcast"],
        ["damaged", "fsdp1", "broadcast"],
        ["chance", "fsdp2", "parallel"],
        *(["stages", "plain", strategy] for strategy in STRATEGIES),
        *(["one_object_fails", "fsdp2", when] for when in ("saving", "loading")),
        ["elsewhere", "fsdp2", "dcp"],
        ["wrapper", "fsdp2", "parallel"],
        ["wrapper", "fsdp1", "broadcast"],
        *(["extra_state", kind, strategy] for kind in ("plain", "fsdp2", "fsdp1") for strategy in STRATEGIES),
        *(["lists", kind, strategy] for kind in ("plain", "fsdp2") for strategy in STRATEGIES),
        ["lists", "fsdp1", "parallel"],
        ["average", "fsdp2", "broadcast"],
        ["average", "tp", "parallel"],
        *(["names_of_files", f"{one} fsdp2", strategy] for one in ("vit", "mixtral") for strategy in STRATEGIES),
        ["names_of_files", "llava fsdp2", "parallel"],
        ["names_of_files", "gpt_neox fsdp2", "broadcast"],
        ["names_of_files", "mixtral fsdp1", "parallel"],
        ["names_of_files", "vit fsdp1 flat", "broadcast"],
    ]


SAMPLES = (
    "dcp/fsdp2_w4", "dcp/hsdp_w4", "dcp/fsdp2_tp_w4", "dcp/flat_optim_w2", "dcp/zstd_w2",
    "dcp/safetensors_w2", "dcp/fsdp1_w2", "torch/full", "torch/fsdp1_full_w2", "rank/fsdp1_w4", "rank/fsdp1_hybrid_w4",
    "rank/fsdp1_mesh_w2", "rank/fsdp2_w4", "rank/fsdp2_tp_w4", "rank/hsdp_w4",
)  # fmt: skip
DIRECTORIES = (
    "run/accelerate_fsdp1_sharded_w2", "run/accelerate_fsdp2_sharded_w2", "run/composer_w2", "run/fabric_w2",
    "run/lightning_w2", "run/torchtitan_w2",
)  # fmt: skip


TRANSFORMERS = ("llama fsdp2", "gpt2 fsdp2", "llama fsdp1", "gpt2 fsdp1")


def all_of(world: int) -> Cases:
    """Every sample into every kind of model that a world has."""
    kinds = ["plain", "ddp", "fsdp2", "fsdp1", *(["hsdp", "tp"] if world % 2 == 0 else [])]
    cases = [
        ["sample", name, kind, STRATEGIES[(i + j) % 2]]
        for i, name in enumerate(SAMPLES)
        for j, kind in enumerate(kinds)
    ]
    cases += [["directory", name, "fsdp2", STRATEGIES[i % 2]] for i, name in enumerate(DIRECTORIES)]
    cases += [["fsdp1_full", kind, strategy] for kind in FSDP1[:2] for strategy in STRATEGIES]
    cases += [["fsdp1_dcp", kind, strategy] for kind in FSDP1[: 7 if world % 2 == 0 else 6] for strategy in STRATEGIES]
    cases += [["transformers_model", what, strategy] for what in TRANSFORMERS for strategy in STRATEGIES]
    cases += [["own_bytes", kind] for kind in (*kinds, "fsdp1 flat", "fsdp1 mesh")]
    cases += [[what, "fsdp2", strategy] for what in ("wrapper", "average") for strategy in STRATEGIES]
    return cases + [["rounds", kind, format] for kind in ("fsdp1", "fsdp2") for format in ("dcp", "torch")]


def ids(cases: Cases) -> list[str]:
    return [" ".join(case) for case in cases]


# Compiling takes ten seconds, and these kinds of FSDP1 are saved as the others.
SLOW = {"compiled", "fsdp1 grad", "fsdp1 none", "fsdp1 mixed"}
BRIEF = every_second([case for case in by_turns(everyday()) if not SLOW & {*case}])


@pytest.mark.parametrize("case", ids(BRIEF))
def test_two_ranks(verdicts: Verdicts, case: str) -> None:
    assert verdicts("brief", 2, BRIEF)[case] == "equal"


REST = [case for case in everyday() if case not in BRIEF]


@pytest.mark.long
@pytest.mark.parametrize("case", ids(REST))
def test_all_cases_of_two_ranks(verdicts: Verdicts, case: str) -> None:
    assert verdicts("rest", 2, REST)[case] == "equal"


@pytest.mark.long
@pytest.mark.parametrize(("world", "case"), [(world, case) for world in (1, 2, 3, 4, 8) for case in ids(all_of(world))])
def test_every_world(verdicts: Verdicts, world: int, case: str) -> None:
    assert verdicts("all", world, all_of(world))[case] == "equal"


NEED_TWO = ("one_rank_blind", "two_checkpoints", "damaged", "stages")


def on_gpus(world: int) -> Cases:
    """Those of every day that this number of ranks can do, and models with tensors on the CPU or on no device yet."""
    kinds = EVEN if world % 2 else ()
    cases = [case for case in everyday() if case[1] not in kinds and (world > 1 or case[0] not in NEED_TWO)]
    for strategy in STRATEGIES:
        cases += [["sample", "dcp/fsdp2_w4", "offloaded", strategy], ["apart", "plain", strategy]]
        cases += [["transformers_model", what, strategy] for what in TRANSFORMERS]
    return cases


@pytest.mark.gpu
@pytest.mark.parametrize("group", ["both", "alone"])
def test_on_gpus(verdicts: Verdicts, gpus: int, group: str) -> None:
    """With a process group for tensors of the CPU as well, and with one for those of the GPUs alone."""
    found = verdicts(f"gpus-{group}", gpus, on_gpus(gpus), "accelerator", group)
    wrong = [f"{case}: {said}" for case, said in found.items() if said != "equal"]
    assert not wrong, f"{len(wrong)} of {len(found)} cases:\n" + "\n".join(wrong)
