"""The audit: each thing that a checkpoint can lack is planted into a whole one, and has to be told as what it is.

States are made and damaged by torch; what the samples of frameworks are is known from how they were made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.upstream_samples import path_of, reference
from typer.testing import CliRunner, Result

from ckpttool import convert
from ckpttool.analysis import audit as auditing
from ckpttool.analysis.audit import Audit, audit
from ckpttool.cli.app import application
from ckpttool.errors import CorruptError, ReadError, UsageError

STEPS = 3
RANKS = 2


def run(*words: str) -> Result:
    return CliRunner().invoke(application(), list(words))


def generators(seed: int) -> dict[str, Any]:
    import random

    return {
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed).get_state(),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }


def whole() -> dict[str, Any]:
    """A training state with everything in it, made by torch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 5), torch.nn.LayerNorm(5))
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    named = list(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(STEPS):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": {f"rank{rank}": generators(rank) for rank in range(RANKS)},
        "dataloader": {f"rank{rank}": {"position": 24} for rank in range(RANKS)},
        "scaler": {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000},
        "step": STEPS,
    }


def told(made: Audit, state: str) -> list[tuple[str, str]]:
    return [(check.what, check.message) for check in made.checks if check.state == state]


def audited(tmp_path: Path, state: dict[str, Any]) -> Audit:
    torch.save(state, tmp_path / "state.pt")
    return audit(tmp_path / "state.pt")


def test_a_whole_state_is_resumable_exactly(tmp_path: Path) -> None:
    made = audited(tmp_path, whole())
    assert (told(made, "differs"), told(made, "fails")) == ([], [])
    assert (made.verdict, made.message, made.step) == ("exactly", "resumable exactly", STEPS)
    assert [part.part for part in made.parts if part.present] == [
        "model", "optimizer", "scheduler", "rng", "dataloader", "scaler", "progress",
    ]  # fmt: skip
    mask = "infinities in `model.mask` (1 element), not a parameter: expected in masks"
    assert ("values", mask) in told(made, "note")


Edit = Callable[[dict[str, Any]], Any]


def moment(state: dict[str, Any], number: int, kind: str) -> torch.Tensor:
    made: torch.Tensor = state["optimizer"]["state"][number][kind]
    return made


def change(state: dict[str, Any], number: int, **values: Any) -> None:
    state["optimizer"]["state"][number] |= values


DIFFERENCES: dict[str, tuple[Edit, str, str]] = {
    "no scheduler": (lambda s: s.pop("scheduler"), "scheduler", "none, but `optimizer` had one"),
    "scheduler behind": (
        lambda s: s["scheduler"].update(last_epoch=1), "scheduler", "is at 1, but the optimizer or counters are at 3",
    ),
    "lr lost": (
        lambda s: s["optimizer"]["param_groups"][0].update(lr=1e-2), "scheduler", "but the groups have 0.01",
    ),
    "no generators": (lambda s: s.pop("rng"), "rng", "no RNG state: dropout and shuffling will differ"),
    "generators of one rank": (lambda s: s["rng"].pop("rank1"), "rng", "rank 1 of 2 ranks without RNG state"),
    "a generator of one rank": (
        lambda s: s["rng"]["rank1"].pop("numpy"), "rng", "rank 1 without the RNG state of numpy",
    ),
    "cuda of one rank": (
        lambda s: s["rng"]["rank0"].update(cuda=[torch.zeros(16, dtype=torch.uint8)]), "rng",
        "rank 1 without the RNG state of cuda",
    ),
    "one kind of generator": (
        lambda s: [rank.pop("python") for rank in s["rng"].values()], "rng", "no RNG state of python",
    ),
    "no dataloader": (lambda s: s.pop("dataloader"), "dataloader", "no dataloader/sampler state"),
    "dataloader of one rank": (
        lambda s: s["dataloader"].pop("rank0"), "dataloader", "`dataloader`: rank 0 of 2 without state",
    ),
    "one step differs": (
        lambda s: change(s, 1, step=torch.tensor(2.0)), "step", "3 for 5 parameters, but 2 for `1.weight`",
    ),
    "a counter differs": (lambda s: s.update(step=7), "progress", "`step` 7, but the optimizer is at 3"),
    "two counters": (lambda s: s.update(global_step=9), "progress", "counters do not agree: `step` 3, `global_step` 9"),
    "state of one parameter": (
        lambda s: s["optimizer"]["state"].pop(1), "optimizer state", "parameter `1.weight` without state",
    ),
    "second moment zeroed": (
        lambda s: moment(s, 1, "exp_avg_sq").zero_(), "values", "second moments all zero, first moments not",
    ),
}  # fmt: skip

REASONS: dict[str, tuple[Edit, str, str]] = {
    "no optimizer": (lambda s: s.pop("optimizer"), "parts", "no optimizer"),
    "no model": (lambda s: s.pop("model"), "parts", "no model"),
    "no state at all": (
        lambda s: s["optimizer"]["state"].clear(), "optimizer state", "the moments would restart at zero",
    ),
    "a moment of one": (
        lambda s: s["optimizer"]["state"][1].pop("exp_avg_sq"), "optimizer state",
        "parameter `1.weight` without `exp_avg_sq`, which others have",
    ),
    "another shape": (
        lambda s: change(s, 1, exp_avg=torch.zeros(3, 5)), "optimizer state",
        "`optimizer.state.1.exp_avg` is [3, 5], and its parameter [5, 5]",
    ),
    "betas lost": (
        lambda s: s["optimizer"]["param_groups"][1].pop("betas"), "param groups", "group 1 has no `betas`",
    ),
    "betas of all lost": (
        lambda s: [g.pop("betas") for g in s["optimizer"]["param_groups"]], "param groups", "but no `betas`",
    ),
    "lr of all lost": (
        lambda s: [g.pop("lr") for g in s["optimizer"]["param_groups"]], "param groups",
        "group 0 has no `lr`; group 1 has no `lr`",
    ),
    "NaN in a weight": (
        lambda s: s["model"]["0.bias"][1].fill_(float("nan")), "values", "NaN in `model.0.bias` (1 element)",
    ),
    "infinity in a weight": (
        lambda s: s["model"]["0.bias"][1].fill_(float("inf")), "values", "infinities in `model.0.bias` (1 element)",
    ),
    "NaN in a moment": (
        lambda s: moment(s, 0, "exp_avg")[0].fill_(float("nan")), "values",
        "NaN in `optimizer.state.0.exp_avg` (6 elements)",
    ),
    "negative second moment": (
        lambda s: moment(s, 0, "exp_avg_sq")[0, 0].fill_(-1e-9), "values",
        "negative second moments in `optimizer.state.0.exp_avg_sq` (1 element)",
    ),
    "a parameter in two groups": (
        lambda s: s["optimizer"]["param_groups"][1]["params"].append(0), "optimizer state", "list `0` twice",
    ),
    "a scale that is none": (lambda s: s["scaler"].update(scale=0.0), "scaler", "the scale of `scaler` is 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", DIFFERENCES)
def test_a_difference_is_named(tmp_path: Path, fault: str) -> None:
    edit, what, says = DIFFERENCES[fault]
    state = whole()
    edit(state)
    made = audited(tmp_path, state)
    assert told(made, "fails") == []
    assert [(w, says in s) for w, s in told(made, "differs")] == [(what, True)], told(made, "differs")
    assert (made.verdict, made.message) == ("with differences", f"resumable with 1 difference ({what})")


@pytest.mark.parametrize("fault", REASONS)
def test_a_reason_not_to_resume_is_named(tmp_path: Path, fault: str) -> None:
    edit, what, says = REASONS[fault]
    state = whole()
    edit(state)
    made = audited(tmp_path, state)
    assert [s for _, s in told(made, "fails") if says in s], told(made, "fails")
    assert {w for w, _ in told(made, "fails")} == {what}
    assert made.verdict == "no"


def test_an_infinity_that_the_model_says_is_a_parameter_is_no_mask(tmp_path: Path) -> None:
    """A name below a wrapper is the same parameter."""
    state = whole()
    state["model"] = {f"module.{name}": value for name, value in state["model"].items()}
    state["model"]["module.0.bias"][1] = float("inf")
    assert [s for _, s in told(audited(tmp_path, state), "fails")] == [
        "infinities in `model.module.0.bias` (1 element)"
    ]


def test_one_state_of_generators_does_not_do_for_two_ranks(tmp_path: Path) -> None:
    """DCP has two ranks' files, and only one state in them."""
    state = whole()
    state["rng"] = state["rng"]["rank0"]
    state["dataloader"] = state["dataloader"]["rank0"]
    torch.save(state, tmp_path / "state.pt")
    convert(tmp_path / "state.pt", tmp_path / "dcp", to="dcp", to_world=2)
    made = audit(tmp_path / "dcp")
    assert made.world_size == 2
    differs = [says.partition(";")[0] for _, says in told(made, "differs")]
    assert differs == ["one RNG state (python, numpy, torch) for 2 ranks"]


@pytest.mark.parametrize("to", ["dcp", "safetensors", "fsdp1"])
def test_every_format_is_audited_alike(tmp_path: Path, to: str) -> None:
    state = whole()
    change(state, 1, step=torch.tensor(2.0))
    state["model"]["0.bias"][2] = float("nan")
    torch.save(state, tmp_path / "state.pt")
    world = {"to_world": 2} if to != "safetensors" else {}
    convert(tmp_path / "state.pt", tmp_path / "out", to=to, **world)
    one, other = audit(tmp_path / "state.pt"), audit(tmp_path / "out")
    assert one.message == other.message == "not resumable: 1 reason (values)"
    assert told(one, "differs") == told(other, "differs")
    assert told(one, "fails") == told(other, "fails")


def test_a_directory_of_torch_dcp(tmp_path: Path) -> None:
    torch_dcp.save(whole(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    made = audit(tmp_path / "dcp")
    assert (made.verdict, made.step) == ("exactly", STEPS)


# What its framework saves, as far as the samples hold it: see samples/README.md.
RUNS = {
    "run/accelerate_fsdp2_sharded_w2": ("exactly", set()),
    "run/accelerate_fsdp1_local_w2": ("with differences", {"dataloader"}),
    "run/accelerate_ddp_w4": ("exactly", set()),
    "run/trainer_w2": ("exactly", set()),
    "run/torchtitan_w2": ("with differences", {"rng"}),
    "run/composer_w2": ("with differences", {"dataloader"}),
    "run/olmo_core_w2": ("exactly", set()),
    "run/verl_fsdp2_w2": ("exactly", set()),
    "rank/fsdp2_groups_w2": ("with differences", {"dataloader"}),
    "rank/verl_fsdp1_w2": ("with differences", {"dataloader"}),
    "dcp/flat_optim_w2": ("with differences", {"rng"}),
    "dcp/hsdp_w4": ("with differences", {"scheduler", "rng", "dataloader"}),
    "dcp/unflattened_w2": ("no", {"scheduler", "rng", "dataloader"}),
    "hf/llama": ("no", {"rng", "dataloader", "progress"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_run_directories(name: str) -> None:
    made = audit(path_of(name))
    assert (made.verdict, {w for w, _ in told(made, "differs")}) == RUNS[name]


def test_a_file_that_is_missing_is_a_reason(tmp_path: Path) -> None:
    torch_dcp.save(whole(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    next((tmp_path / "dcp").glob("*.distcp")).write_bytes(b"")
    made = audit(tmp_path / "dcp")
    assert made.verdict == "no"
    assert "files" in {w for w, _ in told(made, "fails")}


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReadError):
        audit(tmp_path / "nothing")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises((CorruptError, ReadError)):
        audit(tmp_path / "cut.pt")


def test_many_values_are_read_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = whole()
    state["model"]["0.bias"][0] = float("nan")
    torch.save(state, tmp_path / "state.pt")
    monkeypatch.setattr(auditing, "VALUES_UP_TO", 100)
    unread = audit(tmp_path / "state.pt")
    assert (unread.verdict, unread.values) == ("exactly", None)
    assert unread.message == "resumable exactly (values not read)"
    assert audit(tmp_path / "state.pt", values=True).verdict == "no"
    assert audit(tmp_path / "state.pt", values=False).verdict == "exactly"


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "state.pt"
    torch.save(whole(), path)
    return path


def test_the_command_begins_with_its_verdict(saved: Path) -> None:
    done = run("verify-resume", "audit", str(saved))
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, f"{saved}: resumable exactly")
    assert "weight_decay" in done.stdout
    assert run("verify-resume", "audit", str(saved), "-q").stdout == "exactly\n"
    assert "(values not read)" in run("verify-resume", "audit", str(saved), "--no-values").stdout


def test_exit_code_1_when_it_cannot_go_on(tmp_path: Path) -> None:
    state = whole()
    del state["optimizer"]
    torch.save(state, tmp_path / "state.pt")
    done = run("verify-resume", "audit", str(tmp_path / "state.pt"))
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0].endswith("state.pt: not resumable: 1 reason (parts)")


def test_json_holds_what_is_shown(saved: Path) -> None:
    said = json.loads(run("verify-resume", "audit", str(saved), "--json", "--values").stdout)
    assert said["schema"] == "ckpttool/audit/2"
    assert (said["verdict"], said["step"], said["world_size"], said["values"]) == ("exactly", 3, 1, True)
    assert {check["state"] for check in said["checks"]} == {"ok", "note"}
    (table,) = said["hyperparameters"]
    assert [column["values"]["weight_decay"] for column in table["groups"]] == ["0.1", "0.0"]


def test_names_are_shown_by_v(tmp_path: Path) -> None:
    state = whole()
    for number in range(2):
        state["optimizer"]["state"].pop(number)
    torch.save(state, tmp_path / "state.pt")
    path = str(tmp_path / "state.pt")
    assert "1.weight" in [line.strip() for line in run("verify-resume", "audit", path, "-v").stdout.splitlines()]
    assert "1.weight" not in [line.strip() for line in run("verify-resume", "audit", path).stdout.splitlines()]


def test_numbers_get_names_by_shapes(tmp_path: Path) -> None:
    """The model is only there as safetensors, which sorts it."""
    path = path_of("run/trainer_w2")
    named = reference("run/trainer_w2")["model"]
    order = [[name, list(value.shape)] for name, value in named.items() if name != "lm_head.weight"]
    (tmp_path / "order.json").write_text(json.dumps(order))
    assert "state not matched with parameters" in run("verify-resume", "audit", path).stdout
    assert (
        "whose state is whose"
        not in run("verify-resume", "audit", path, "--shapes", str(tmp_path / "order.json")).stdout
    )


RUN = """
import sys
from ckpttool.__main__ import main
sys.argv = ["ckpttool", "verify-resume", "audit", *sys.argv[1:]]
try:
    main()
finally:
    print(sorted({"torch"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("name", ["dcp/fsdp2_w4", "torch/full", "run/trainer_w2", "rank/fsdp1_w4"])
def test_torch_is_not_imported(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, path_of(name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


# With a recipe --------------------------------------------------------------------------------------------------------

RECIPE = """
import torch

def build(mesh):
    assert mesh.size() == 1
    model = torch.nn.Sequential(torch.nn.Linear(6, {width}), torch.nn.Linear({width}, 5), torch.nn.LayerNorm(5))
    model.register_buffer("mask", torch.zeros(2))
    {more}
    named = list(model.named_parameters())
    groups = [{{"params": [p for _, p in named if p.ndim > 1]}}, {{"params": [p for _, p in named if p.ndim < 2]}}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    state = {{"model": model.to(mesh.device_type), "optimizer": optimizer, "scheduler": scheduler}}
    return state | extra(model) if "extra" in globals() else state

def step(state, i):
    raise AssertionError("nothing is trained here")
"""


@pytest.mark.parametrize(
    ("width", "more", "says"),
    [
        (5, "", None),
        (4, "", "3 tensors (`0.weight`, `0.bias`, `1.weight`) of another shape: [5, 6], and the model has [4, 6]"),
        (5, "model.add_module('gate', torch.nn.Linear(5, 1, bias=False))",
         "tensor `gate.weight` of the recipe's model not in the checkpoint"),
        (5, "del model[2]; model.append(torch.nn.LayerNorm(5, bias=False))",
         "tensor `2.bias` of the checkpoint not in the recipe's model"),
        (5, "model.half()", "of another dtype: float32, and the model has float16"),
    ],
)  # fmt: skip
def test_the_model_of_a_recipe(tmp_path: Path, saved: Path, width: int, more: str, says: str | None) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE.format(width=width, more=more))
    made = audit(saved, recipe=str(tmp_path / "recipe.py"))
    found = [check.message for check in made.checks if check.what == "recipe" and check.state in ("differs", "fails")]
    if says is None:
        assert found == []
        expected = "the recipe's model, built on the meta device, has the same 7 tensors and shapes"
        assert ("recipe", expected) in told(made, "ok")
    else:
        assert any(says in one for one in found), found
        assert made.verdict != "exactly"


AVERAGE = """
class Average:
    def __init__(self, model):
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def state_dict(self):
        return {"shadow": [one.clone() for one in self.shadow]}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]

def extra(model):
    return {"average": Average(model)}
"""


def test_an_average_that_saves_copies_is_covered(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE.format(width=5, more="") + AVERAGE)
    made = audit(saved, recipe=str(tmp_path / "recipe.py"))
    messages = [check.message for check in made.checks if check.what == "recipe"]
    assert any("`average` of the recipe has no state in the checkpoint" in one for one in messages)
    assert not any(" holds " in one for one in messages), messages


@pytest.mark.parametrize(
    ("more", "state", "says"),
    [
        ("model.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}", "differs",
         "`model.shadow` holds 6 tensors that no `state_dict` of the recipe's state has, shaped like the model's"),
        ("globals()['AVERAGE'] = torch.optim.swa_utils.AveragedModel(model)", "differs", "`AVERAGE` holds 8 tensors"),
        ("import types; model[0].own = types.SimpleNamespace(table=[torch.ones(3)])", "note",
         "`model.0.own.table` holds 1 tensor"),
        ("class Own: pass\n    model[0].own = Own(); model[0].own.table = [torch.ones(3)]", "note",
         "`model.0.own.table` holds 1 tensor that no `state_dict` of the recipe's state has"),
        ("model.register_buffer('angles', torch.ones(3), persistent=False); model.again = [model[0].weight.data]",
         "note", None),
    ],
)  # fmt: skip
def test_tensors_of_a_recipe_that_no_part_covers(
    tmp_path: Path, saved: Path, more: str, state: str, says: str | None
) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE.format(width=5, more=more))
    made = audit(saved, recipe=str(tmp_path / "recipe.py"))
    found = [(check.state, check.message) for check in made.checks if " holds " in check.message]
    assert [one for one, _ in found] == ([state] if says else []), found
    assert says is None or says in found[0][1]
    assert state == "note" or made.verdict != "exactly"


def test_a_recipe_that_is_not_there_is_told_before_anything_is_read(saved: Path) -> None:
    done = run("verify-resume", "audit", str(saved), "--recipe", "nowhere.py")
    assert done.exit_code == 2
    with pytest.raises(UsageError, match=r"nowhere\.py"):
        audit(saved, recipe="nowhere.py")
