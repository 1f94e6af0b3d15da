"""`convert --map`: model and optimizer of a run as another model has its parameters, which torch goes on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import map_on_ranks
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.cli import run
from support.torchrun import torchrun
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ckpttool
from ckpttool.errors import CkptError, LossError, UsageError


def rules_of(folder: Path, *rules: dict[str, Any]) -> str:
    path = folder / "map.json"
    path.write_text(json.dumps({"format": 2, "name": "fused", "rules": rules or map_on_ranks.RULES}))
    return str(path)


def saved(folder: Path, form: str) -> tuple[Path, dict[str, Any]]:
    """A trained model and its optimizer, in a form."""
    model, optimizer = map_on_ranks.trained(shard=False)
    flat = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    by_name = get_state_dict(model, optimizer, options=flat)[1]
    numbered = form in ("torch", "fsdp1")
    state = {"model": model.state_dict(), "optim": optimizer.state_dict() if numbered else by_name, "step": 3}
    path = folder / ("run" if form == "dcp" else "run.pt")
    if form == "dcp":
        torch_dcp.save(state, checkpoint_id=path, no_dist=True)
    else:
        torch.save(state, path)
    if form == "fsdp1":
        ckpttool.convert(path, folder / "ranks", to="fsdp1", to_world=2)
        path = folder / "ranks"
    return path, {"model": model.state_dict(), "optim": get_state_dict(model, optimizer)[1]}


@pytest.mark.parametrize(("form", "to"), [("torch", "dcp"), ("dcp", "torch"), ("flat", "torch"), ("fsdp1", "dcp")])
def test_torch_goes_on_with_the_fused_model(form: str, to: str, tmp_path: Path) -> None:
    path, state = saved(tmp_path, form)
    result = ckpttool.convert(path, tmp_path / "fused", to=to, key_map=rules_of(tmp_path), check=True)
    assert result.dropped == [] and any("key map `fused`" in note for note in result.notes)
    assert any("names its parameters now" in note for note in result.notes) == (form == "torch")
    if to == "dcp":
        dcp_to_torch_save(tmp_path / "fused", tmp_path / "fused.pt")
    made = torch.load(tmp_path / ("fused.pt" if to == "dcp" else "fused"))
    model = map_on_ranks.Fused()
    optimizer = map_on_ranks.grouped(model)
    set_state_dict(model, optimizer, model_state_dict=made["model"], optim_state_dict=made["optim"])
    assert made["step"] == 3
    map_on_ranks.compare((state["model"], state["optim"]), get_state_dict(model, optimizer))


def test_the_reversed_map_takes_it_apart_again(tmp_path: Path) -> None:
    path, state = saved(tmp_path, "dcp")
    rules = rules_of(tmp_path)
    ckpttool.convert(path, tmp_path / "fused.pt", key_map=rules)
    result = ckpttool.convert(tmp_path / "fused.pt", tmp_path / "again.pt", key_map=rules)
    assert any("`fused reversed`" in note for note in result.notes)
    made = torch.load(tmp_path / "again.pt")
    assert made["model"].keys() == state["model"].keys()
    assert all(torch.equal(value, state["model"][name]) for name, value in made["model"].items())
    for name, own in state["optim"]["state"].items():
        assert all(torch.equal(made["optim"]["state"][name][key], value) for key, value in own.items())
    for one, other in zip(made["optim"]["param_groups"], state["optim"]["param_groups"], strict=True):
        assert {*one.pop("params")} == {*other["params"]}
        assert one == {key: value for key, value in other.items() if key != "params"}
    # Steps have bytes of their own: torch counts in place.
    steps = [own["step"].data_ptr() for own in made["optim"]["state"].values()]
    assert len({*steps}) == len(steps)


def test_all_parts_follow_a_renaming(tmp_path: Path) -> None:
    """State of any shape follows a rule without operations; averaged weights and objects are there, too."""
    state = {
        "model": {"a.weight": torch.ones(4, 6), "b.weight": torch.zeros(3), "a._extra_state": "recipe"},
        "ema": {"a.weight": torch.full((4, 6), 2.0), "b.weight": torch.zeros(3)},
        "optim": {
            "state": {"a.weight": {"exp_avg_sq_row": torch.ones(4), "exp_avg_sq_col": torch.ones(6), "step": 5}},
            "param_groups": [{"lr": 0.5, "params": ["a.weight", "b.weight"], "param_names": ["a.weight", "b.weight"]}],
        },
    }
    torch.save(state, tmp_path / "run.pt")
    rules = rules_of(tmp_path, {"from": "a.{rest*}", "to": "c.{rest*}"}, {"from": "b.weight", "to": None})
    result = ckpttool.convert(tmp_path / "run.pt", tmp_path / "out.pt", key_map=rules)
    assert result.dropped == ["model.b.weight", "ema.b.weight"]
    made = torch.load(tmp_path / "out.pt")
    assert [*made["model"]] == ["c.weight", "c._extra_state"] and made["model"]["c._extra_state"] == "recipe"
    assert [*made["ema"]] == ["c.weight"] and made["ema"]["c.weight"][0, 0] == 2
    assert made["optim"]["param_groups"] == [{"lr": 0.5, "params": ["c.weight"], "param_names": ["c.weight"]}]
    assert made["optim"]["state"].keys() == {"c.weight"} and made["optim"]["state"]["c.weight"]["step"] == 5


def moments(shape: tuple[int, ...] = (4, 6), step: float = 5.0, **more: Any) -> dict[str, Any]:
    return {"step": torch.tensor(step), "exp_avg": torch.rand(shape), **more}


REFUSED: list[tuple[dict[str, Any], list[list[str]], str]] = [
    ({"a": moments(), "b": moments(step=6)}, [["a", "b"]], r"`step` of `a` and `b` differ.*`c` is made"),
    ({"a": moments(), "b": moments()}, [["a"], ["b"]], r"`c` is built from `a`, `b`.*several parameter groups"),
    ({"a": moments()}, [["a"]], r"of these `b` is not in the optimizer"),
    ({"a": moments()}, [["a", "b"]], r"`a` and `b` do not both have `exp_avg`, `step`"),
    ({n: moments(exp_avg_sq_row=torch.ones(4)) for n in "ab"}, [["a", "b"]], r"a\.exp_avg_sq_row`, of shape \[4\]"),
    ({n: moments(GG=[torch.ones(4, 4)]) for n in "ab"}, [["a", "b"]], r"a\.GG\.0`, of shape \[4, 4\],.*`c`"),
    ({n: moments(absmax1=torch.ones(1, 1, 3)) for n in "ab"}, [["a", "b"]], r"a\.absmax1`, of shape \[1, 1, 3\]"),
    (
        {"a": moments(), "b": moments(), "x": {}},
        [["a", "b"], ["layers.a"]],
        r"has `layers\.a`, which.*does not have it",
    ),
]


@pytest.mark.parametrize(("state", "groups", "message"), REFUSED)
def test_state_that_cannot_follow_is_refused_by_name(
    state: dict[str, Any], groups: list[list[str]], message: str, tmp_path: Path
) -> None:
    listed = [{"lr": 0.5, "params": names} for names in groups]
    model = {"a": torch.ones(4, 6), "b": torch.ones(4, 6)}
    torch.save({"model": model, "optim": {"state": state, "param_groups": listed}}, tmp_path / "run.pt")
    rules = rules_of(tmp_path, {"from": ["a", "b"], "to": "c"}, {"from": "layers.{rest*}", "to": "blocks.{rest*}"})
    with pytest.raises(LossError, match=message) as caught:
        ckpttool.convert(tmp_path / "run.pt", tmp_path / "out.pt", key_map=rules)
    assert caught.value.exit_code == 5 and not (tmp_path / "out.pt").exists()
    ckpttool.convert(tmp_path / "run.pt", tmp_path / "out.pt", key_map=rules, only="model")
    assert torch.equal(torch.load(tmp_path / "out.pt")["c"], torch.ones(8, 6))


def test_one_parameter_becomes_several_and_ties_are_told(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    own = moments() | {"exp_avg": whole + 1}
    optim = {"state": {"w": own}, "param_groups": [{"lr": 0.5, "params": ["w"]}]}
    torch.save({"model": {"w": whole, "head": whole}, "optim": optim}, tmp_path / "run.pt")
    rules = rules_of(tmp_path, {"from": "w", "to": ["x", "y"]})
    result = ckpttool.convert(tmp_path / "run.pt", tmp_path / "out.pt", key_map=rules)
    assert any("tied weights that the map changes" in note and "`model.head`" in note for note in result.notes)
    made = torch.load(tmp_path / "out.pt")
    assert torch.equal(made["model"]["head"], whole) and torch.equal(made["model"]["y"], whole[2:])
    assert made["optim"]["param_groups"] == [{"lr": 0.5, "params": ["x", "y"]}]
    state = made["optim"]["state"]
    assert torch.equal(torch.cat([state["x"]["exp_avg"], state["y"]["exp_avg"]]), whole + 1)
    assert state["x"]["step"] == state["y"]["step"] == 5
    assert state["x"]["step"].data_ptr() != state["y"]["step"].data_ptr()


def test_what_does_not_fit_is_a_usage_error(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, "torch")
    rules = rules_of(tmp_path, {"from": "other.{n}", "to": "x.{n}"})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"key_map": rules}, "none of its rules matches a tensor"),
        ({"key_map": rules, "optim_keys": "id"}, "ids depend on the order"),
        ({"key_map": rules, "producer": "torchtitan"}, "`producer` cannot be used together"),
        ({"key_map": rules, "optim_from": str(path)}, "`optim_from` cannot be used together"),
        ({"key_map": rules, "only": "optim"}, "none of its rules matches a tensor"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            ckpttool.convert(path, tmp_path / "out.pt", **options)
    with pytest.raises(CkptError, match=r"would both be called `embed\.weight`"):
        rule = {"from": "layers.0.q.weight", "to": "embed.weight", "operations": [{"transpose": [0, 1]}]}
        ckpttool.convert(path, tmp_path / "out.pt", key_map=rules_of(tmp_path, rule))
    torch.save({"model": {"a": torch.ones(4, 6), "a.extra": "recipe"}}, tmp_path / "object.pt")
    with pytest.raises(LossError, match=r"`model\.a\.extra` is not a tensor"):
        rule = {"from": "a{rest*}", "to": "b{rest*}", "operations": [{"transpose": [0, 1]}]}
        ckpttool.convert(tmp_path / "object.pt", tmp_path / "out.pt", key_map=rules_of(tmp_path, rule))
    done = run("convert", str(path), str(tmp_path / "out.pt"), "--map", "none")
    assert done.exit_code == 0


@pytest.mark.long
def test_fsdp2_goes_on_with_the_fused_model(tmp_path: Path) -> None:
    script = Path(map_on_ranks.__file__)
    torchrun(2, script, "train", tmp_path / "run")
    ckpttool.convert(tmp_path / "run", tmp_path / "fused", to="dcp", to_world=2, key_map=rules_of(tmp_path), check=True)
    assert torchrun(2, script, "resume", tmp_path / "run", tmp_path / "fused").count("alike") == 2
