"""The optimizer's spelling, against what torch makes of the same optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import checkpoints
from support.hang import no_hang
from support.optimizers import OPTIMIZERS, Tree, spelt, trained

import ckpttool
from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, File, Object, Part, Tensor, dotted
from ckpttool.catalogue.flatten import unflatten
from ckpttool.errors import CkptError, CorruptError, LossError, UsageError
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer import respell as optimkeys
from ckpttool.layout.optimizer.names_of_ids import ways
from ckpttool.layout.rename import rename_entries

WAYS = [(a, b) for a in optimkeys.SPELLINGS for b in optimkeys.SPELLINGS]


def started(state: Tree) -> Catalogue:
    catalogue = checkpoints.state(state)
    parts.assign(catalogue)
    return layout.start(catalogue)


def places(value: Any) -> Any:
    """A state with the address of its values in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, Mapping):
        return {key: places(v) for key, v in value.items()}
    return [places(v) for v in value] if isinstance(value, list) else value


def tree(laid: Catalogue, state: Tree) -> Any:
    """The same of a catalogue that was made of `state`."""

    def address(tensor: Tensor) -> int:
        found: Any = state
        for key in (tensor.origin or tensor).path:
            found = found[key]
        return int(found.data_ptr())

    return unflatten(laid, lambda e: e.value if isinstance(e, Object) else address(e))


# Every spelling from every other --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_torch_makes_of_it(name: str, before: str, after: str) -> None:
    net, optimizer = trained(OPTIMIZERS[name])
    state = {"model": net.state_dict(), "optim": spelt(net, optimizer, before), "step": 3}
    now = tree(optimkeys.respell(started(state), after), state)
    expected = places(spelt(net, optimizer, after))
    assert now["optim"] == expected
    assert list(now) == ["model", "optim", "step"]
    if after != "flat":
        assert [list(group) for group in now["optim"]["param_groups"]] == [list(g) for g in expected["param_groups"]]


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_sgd_without_momentum_has_no_state(before: str, after: str) -> None:
    net, optimizer = trained(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    for layer in net.layers:
        layer.norm = torch.nn.Identity()
    del net.rope
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = {"model": net.state_dict(), "optim": spelt(net, optimizer, before)}
    assert tree(optimkeys.respell(started(state), after), state)["optim"] == places(spelt(net, optimizer, after))


def small(**optim: Any) -> Tree:
    """A model of four parameters, and an optimizer whose state says their shapes."""
    shapes = {"a": (2, 3), "b": (3,), "c": (2, 3), "d": (3,)}
    model = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return {"model": model, "optim": optim}


def moments(*shapes: tuple[int, ...] | None) -> dict[int, Any]:
    return {i: {"exp_avg": torch.zeros(shape)} for i, shape in enumerate(shapes) if shape is not None}


def named(state: Tree) -> list[Any]:
    """The parameters of each group by name."""
    now = tree(optimkeys.respell(started(state), "fqn"), state)
    return [group["params"] for group in now["optim"]["param_groups"]]


def test_groups_of_which_one_way_fits() -> None:
    groups = [{"lr": 1, "params": [0, 1]}, {"lr": 2, "params": [2, 3]}]
    state = small(state=moments((2, 3), (2, 3), (3,), (3,)), param_groups=groups)
    assert named(state) == [["a", "c"], ["b", "d"]]


def test_a_parameter_without_state_takes_the_place_that_is_left() -> None:
    groups = [{"lr": 1, "params": [0, 1]}, {"lr": 2, "params": [2, 3]}]
    state = small(state=moments((2, 3), None, (3,), (3,)), param_groups=groups)
    assert named(state) == [["a", "c"], ["b", "d"]]
    assert set(tree(optimkeys.respell(started(state), "fqn"), state)["optim"]["state"]) == {"a", "b", "d"}


def test_two_optimizers_share_a_model() -> None:
    state = small()
    state["optim"] = {"state": moments((2, 3), (2, 3)), "param_groups": [{"params": [0, 1]}]}
    state["optimizer_2"] = {"state": moments((3,), (3,)), "param_groups": [{"params": [0, 1]}]}
    now = tree(optimkeys.respell(started(state), "fqn"), state)
    assert [now[key]["param_groups"][0]["params"] for key in ("optim", "optimizer_2")] == [["a", "c"], ["b", "d"]]


def test_a_list_of_optimizers() -> None:
    one = {"state": moments((2, 3), (3,), (2, 3), (3,)), "param_groups": [{"params": [0, 1, 2, 3]}]}
    state = {**small(), "optimizers": [one]}
    del state["optim"]
    now = tree(optimkeys.respell(started(state), "fqn"), state)
    assert now["optimizers"][0]["param_groups"] == [{"params": ["a", "b", "c", "d"]}]


def test_the_keys_of_optimizers_of_one_parameter_are_its_name() -> None:
    """As scripts save what steps in the backward pass: equal shapes were refused."""
    state = small()
    del state["optim"]
    names = {"c": (2, 3), "a": (2, 3), "d": (3,)}
    one = {name: {"state": moments(shape), "param_groups": [{"params": [0]}]} for name, shape in names.items()}
    now = tree(optimkeys.respell(started({**state, "optim": one}), "fqn"), {**state, "optim": one})
    assert {key: value["param_groups"][0]["params"] for key, value in now["optim"].items()} == {n: [n] for n in names}
    # A key that is no name of its shape says nothing.
    one["b"] = one.pop("c")
    with pytest.raises(UsageError, match="fit more than one parameter"):
        optimkeys.respell(started({**state, "optim": {"b": one["b"]}}), "fqn")


def test_the_model_called_model_says_the_names() -> None:
    state = small(state=moments((2, 3), (3,), (2, 3), (3,)), param_groups=[{"params": [0, 1, 2, 3]}])
    ema = {f"averaged.{name}": value.clone() for name, value in state["model"].items()}
    assert named({"ema": ema, **state}) == [["a", "b", "c", "d"]]


def test_names_need_no_model() -> None:
    optim = {"state": {"a": {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1, "params": ["a"]}]}
    models = {"generator_model": {"a": torch.zeros(2)}, "critic_model": {"a": torch.zeros(2)}}
    for state in ({**models, "optim": optim}, {"optim": optim, "step": 1}):
        assert set(tree(optimkeys.respell(started(state), "flat"), state)["optim"]) == {
            "state.a.exp_avg", "param_groups.a.lr"
        }  # fmt: skip
        now = tree(optimkeys.respell(started(state), "id"), state)
        assert now["optim"]["param_groups"] == [{"lr": 1, "params": [0]}]


def test_the_order_of_hyper_parameters_does_not_matter() -> None:
    flat = {"param_groups.a.lr": 1, "param_groups.a.eps": 2, "param_groups.b.eps": 2, "param_groups.b.lr": 1}
    state = small(**flat, **{"param_groups.c.lr": 1.0, "param_groups.c.eps": 2})
    assert named(state) == [["a", "b"], ["c"]]


def test_names_in_the_groups_are_taken_at_their_word() -> None:
    groups = [{"params": [0], "param_names": ["c"]}, {"params": [1], "param_names": ["a"]}]
    assert named(small(state=moments((2, 3), (2, 3)), param_groups=groups)) == [["c"], ["a"]]
    wrapped = [{"params": [0], "param_names": ["module._orig_mod.c"]}]
    assert named(small(state=moments((2, 3)), param_groups=wrapped)) == [["c"]]
    alone = {"state": moments((2, 3)), "param_groups": [{"params": [0], "param_names": ["w"]}]}
    assert tree(optimkeys.respell(started(alone), "fqn"), alone)["param_groups"][0]["params"] == ["w"]


@pytest.mark.parametrize("spelling", optimkeys.SPELLINGS)
def test_names_in_the_groups_follow_a_rename(spelling: str) -> None:
    groups = [{"params": ["a", "b"], "param_names": ["a", "b"]}]
    state = small(state={}, param_groups=groups)
    laid = rename_entries(optimkeys.respell(started(state), spelling), lambda name: f"x.{name}", within_parts=True)
    found = [e.value for e in laid.objects if e.name.endswith("param_names")]
    assert found == [["x.a", "x.b"]] * (2 if spelling == "flat" else 1)


def test_integer_keys_that_became_strings() -> None:
    state = small(
        state={str(i): v for i, v in moments((2, 3), (3,), (2, 3), (3,)).items()},
        param_groups=[{"params": [*range(4)]}],
    )
    assert list(tree(optimkeys.respell(started(state), "fqn"), state)["optim"]["state"]) == ["a", "b", "c", "d"]


def test_groups_that_are_one_value() -> None:
    """As DCP of torch up to 2.3 keeps them."""
    state = small(state=moments((2, 3), (3,), (2, 3), (3,)))
    laid = started(state)
    groups = [{"lr": 0.1, "params": [0, 1, 2, 3]}]
    laid.add(Object(("optim", "param_groups"), groups, part=Part("optimizer", ("optim",))))
    now = tree(optimkeys.respell(laid, "fqn"), state)
    assert now["optim"]["param_groups"] == [{"lr": 0.1, "params": ["a", "b", "c", "d"]}]


def test_state_of_no_parameter_is_kept_as_torch_keeps_it() -> None:
    state = small(
        state={**moments((2, 3), (3,), (2, 3), (3,)), "seen": {"tokens": 7}}, param_groups=[{"params": [*range(4)]}]
    )
    assert tree(optimkeys.respell(started(state), "fqn"), state)["optim"]["state"]["seen"] == {"tokens": 7}
    with pytest.raises(LossError, match="`seen`"):
        optimkeys.respell(started(state), "flat")


def test_ties_and_tensors_inside_values_follow() -> None:
    step = torch.zeros(1)
    state = small(
        state={"a": {"step": step, "pair": (torch.zeros(2), 1)}, "b": {"step": step}},
        param_groups=[{"betas": [0.9, torch.zeros(3)], "lr": torch.zeros(()), "params": ["b", "a"]}],
    )
    laid = optimkeys.respell(started(state), "id")
    assert {t.name: dotted(t.alias) for t in laid.tensors if t.alias} == {"optim.state.1.step": "optim.state.0.step"}
    assert laid.entries["optim", "state", 1, "pair"].value[0].path == ("optim", "state", 1, "pair", 0)  # type: ignore[union-attr]
    flat = optimkeys.respell(started(state), "flat")
    assert flat.entries["optim", "state.a.pair"].value[0].path == ("optim", "state.a.pair", 0)  # type: ignore[union-attr]
    ties = {t.name: dotted(t.alias) for t in flat.tensors if t.alias}
    assert ties["optim.param_groups.a.lr"] == "optim.param_groups.b.lr"
    assert ties["optim.param_groups.a.betas.1"] == "optim.param_groups.b.betas.1"
    back = tree(optimkeys.respell(flat, "fqn"), state)["optim"]
    assert back["param_groups"] == places(state["optim"]["param_groups"])


def test_dicts_inside_the_state_are_joined_as_torch_joins_them() -> None:
    """Shampoo and its like; `_flatten_optim_state_dict` is what `get_optimizer_state_dict` calls."""
    from torch.distributed.checkpoint.state_dict import _flatten_optim_state_dict

    nested = {
        "state": {"a": {"pre": {"0": {"l": torch.zeros(2)}}, "n": 3}},
        "param_groups": [{"lr": 1, "params": ["a"]}],
    }
    state = small(**nested)
    laid = optimkeys.respell(started(state), "flat")
    assert "strings: `pre`" in str(laid.warnings[0])
    assert tree(optimkeys.respell(laid, "fqn"), state)["optim"] == places(nested)
    assert tree(laid, state)["optim"] == places(_flatten_optim_state_dict(nested))


def test_lists_inside_the_state_stay_lists() -> None:
    state = small(
        state={"a": {"dirs": [torch.zeros(2), torch.zeros(2)]}}, param_groups=[{"d": {"x": [{}]}, "params": ["a"]}]
    )
    now = tree(flat := optimkeys.respell(started(state), "flat"), state)["optim"]
    assert now == {"state.a.dirs": places(state["optim"]["state"]["a"]["dirs"]), "param_groups.a.d": {"x": [{}]}}
    assert tree(optimkeys.respell(flat, "fqn"), state)["optim"] == places(state["optim"])


def test_a_flat_optimizer_alone_is_one() -> None:
    flat = {"state.a.n": 1, "param_groups.a.lr": 0.1}
    state = {"state": {"a": {"n": 1}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
    assert tree(optimkeys.respell(started(flat), "fqn"), flat) == state
    assert tree(optimkeys.respell(started(state), "flat"), state) == flat


# What is said, and what refused ---------------------------------------------------------------------------------------


def said(state: Tree, wanted: str) -> list[str]:
    return [str(warning) for warning in optimkeys.respell(started(state), wanted).warnings]


def test_a_way_back_that_is_not_exact_is_said() -> None:
    groups = [{"lr": 1, "params": ["a"]}, {"lr": 1, "params": ["b"]}, {"lr": 2, "params": []}]
    warnings = said(small(state={}, param_groups=groups), "flat")
    assert warnings == [
        "`optim`: 1 of its groups are empty, and flat keys do not mention them",
        "`optim`: groups with the same hyper-parameters become one when they are put together from flat keys",
    ]
    assert said(small(**{"param_groups.a.lr": 1, "param_groups.b.lr": 1, "state.a.n": 0}), "fqn") == [
        "`optim`: flat keys do not say which parameters were in one group: those with the same hyper-parameters are, "
        "which makes 1 group"
    ]
    groups = [{"lr": 1, "params": ["b"]}]
    assert "cannot be mapped back to parameters" in said(small(state={}, param_groups=groups), "id")[0]
    by_name = {name: {"exp_avg": torch.zeros(shape)} for name, shape in (("b", (3,)), ("a", (2, 3)))}
    groups = [{"lr": 1, "params": ["b", "a"]}]
    assert "the model here is in another order" in said(small(state=by_name, param_groups=groups), "id")[0]
    groups = [{"lr": 1, "params": ["b", "a"], "param_names": ["b", "a"]}]
    assert said(small(state=by_name, param_groups=groups), "id") == []


REFUSED: dict[str, tuple[Tree, type[CkptError], str]] = {
    "a buffer like a parameter": (
        small(state=moments((2, 3), (3,), (2, 3)), param_groups=[{"params": [0, 1, 2]}])
        | {"model": {"a": torch.zeros(2, 3), "b": torch.zeros(3), "mask": torch.zeros(3), "c": torch.zeros(2, 3)}},
        UsageError, "1 of its ids fit more than one parameter, such as 1: `b`, `mask`",
    ),
    "two groups of the same shapes": (
        small(state=moments((2, 3), (3,), (2, 3), (3,)), param_groups=[{"params": [0, 1]}, {"params": [2, 3]}]),
        UsageError, "4 of its ids fit more than one parameter",
    ),
    "counts alone, and a buffer": (
        small(state={}, param_groups=[{"params": [0, 1, 2]}]), UsageError, "fit more than one parameter",
    ),
    "another order": (
        small(state=moments((3,), (2, 3), (3,), (2, 3)), param_groups=[{"params": [0, 1, 2, 3]}]),
        CorruptError, "do not follow the order",
    ),
    "another shape": (
        small(state=moments((2, 3), (4,)), param_groups=[{"params": [0, 1]}]),
        CorruptError, r"state for 1 parameter of shape \[4\], but the model has none",
    ),
    "more than the model has": (
        small(state={}, param_groups=[{"params": [*range(5)]}]), CorruptError, "has 5 parameters, but the model has 4",
    ),
    "no model": (
        {"optim": {"state": moments((2, 3)), "param_groups": [{"params": [0]}]}}, UsageError, "no model here says",
    ),
    "two models": (
        {"generator_model": {"a": torch.zeros(2)}, "critic_model": {"a": torch.zeros(2)},
         "optim": {"state": moments((2,)), "param_groups": [{"params": [0]}]}},
        UsageError, "several models: `generator_model`, `critic_model`",
    ),
    "state that no group lists": (
        small(state=moments((2, 3), (3,)), param_groups=[{"params": [0]}]), CorruptError, "ids `1`, which no group",
    ),
    "no params": (small(state={}, param_groups=[{"lr": 1}]), CorruptError, "group 0 of `optim` lists no `params`"),
    "params of both kinds": (
        small(state={}, param_groups=[{"params": [0, "a"]}]), CorruptError, "neither names nor numbers",
    ),
    "params that are not a list": (small(state={}, param_groups=[{"params": 3}]), CorruptError, "not a list"),
    "a name twice": (
        small(state={}, param_groups=[{"params": [0, 1], "param_names": ["a", "a"]}]), CorruptError, "two parameters",
    ),
    "an id twice": (
        small(state={}, param_groups=[{"params": [0, 1]}, {"params": [1]}]), CorruptError, "list `1` twice",
    ),
    "both spellings": (small(**{"state.a.n": 1, "param_groups": [{"params": []}]}), CorruptError, "both nested and"),
    "flat without groups": (
        small(**{"state.a.n": 1, "param_groups.b.lr": 1}), CorruptError, "`optim.state.a.n`: `optim` has no hyper-",
    ),
    "flat tensors that may differ": (
        small(**{"param_groups.a.lr": torch.zeros(()), "param_groups.b.lr": torch.zeros(())}),
        UsageError, "as a tensor for each parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    state, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        optimkeys.respell(started(state), "fqn")


def test_a_model_in_the_order_of_its_names_says_nothing() -> None:
    """`b` of shape (3,) may be any of three: safetensors has lost the order."""
    state = small(state=moments((2, 3), (3,), (2, 3), (3,)), param_groups=[{"params": [0, 1, 2, 3]}])
    source = checkpoints.state(state)
    parts.assign(source)
    source.files = [File("model.safetensors", "model.safetensors", 1 << 40)]
    with pytest.raises(UsageError, match="as safetensors, sorted by name"):
        optimkeys.respell(layout.start(source), "fqn", source)
    state["model"] = {name: state["model"][name] for name in ("c", "d", "a", "b")}
    source = checkpoints.state(state)
    parts.assign(source)
    source.files = [File("model.safetensors", "model.safetensors", 1 << 40)]
    assert optimkeys.respell(layout.start(source), "fqn", source).entries["optim", "state", "c", "exp_avg"]


def test_a_spelling_that_is_none() -> None:
    with pytest.raises(UsageError, match="`ids` is not a style"):
        optimkeys.respell(started(small()), "ids")


# The root -------------------------------------------------------------------------------------------------------------


def test_another_key_for_the_optimizer() -> None:
    state = small(state=moments((2, 3)), param_groups=[{"params": [0]}])
    laid = optimkeys.respell_root(started(state), "optimizer")
    now = tree(laid, state)
    assert list(now) == ["model", "optimizer"] and now["optimizer"] == places(state["optim"])
    assert {e.part for e in laid.entries.values()} == {Part("model", ("model",)), Part("optimizer", ("optimizer",))}
    bare = state["optim"]
    assert tree(optimkeys.respell_root(started(bare), "optim"), bare) == {"optim": places(bare)}
    deep = {"app": {"model": state["model"], "optim": bare}}
    assert list(tree(optimkeys.respell_root(started(deep), "opt"), deep)["app"]) == ["model", "opt"]
    with pytest.raises(UsageError, match="no optimizer is here"):
        optimkeys.respell_root(started({"model": state["model"]}), "optim")
    with pytest.raises(UsageError, match="2 optimizers are here"):
        optimkeys.respell_root(started({**state, "optimizer_2": bare}), "optim")


# The search -----------------------------------------------------------------------------------------------------------


def enumerated(wanted: list[list[int | None]], have: list[int]) -> list[list[list[int]]]:
    """Every way, one by one."""

    def rows(row: list[int | None], start: int, taken: frozenset[int]) -> Iterable[list[int]]:
        if not row:
            yield []
            return
        for place in range(start, len(have)):
            if place not in taken and row[0] in (None, have[place]):
                yield from ([place, *rest] for rest in rows(row[1:], place + 1, taken))

    def all_rows(left: list[list[int | None]], taken: frozenset[int]) -> Iterable[list[list[int]]]:
        if not left:
            yield []
            return
        for row in rows(left[0], 0, taken):
            yield from ([row, *rest] for rest in all_rows(left[1:], taken | set(row)))

    found = list(all_rows(wanted, frozenset()))
    if not found:
        return []
    return [
        [sorted({one[g][k] for one in found}) for k in range(len(row))] for g, row in enumerate(wanted)
    ]  # fmt: skip


shapes = st.sampled_from([0, 1, 2])


@settings(max_examples=300)
@given(st.lists(st.lists(st.one_of(st.none(), shapes), max_size=3), max_size=3), st.lists(shapes, max_size=7))
def test_the_search_finds_what_there_is(wanted: list[list[int | None]], have: list[int]) -> None:
    rows: Any = [[shape if shape is None else (shape,) for shape in row] for row in wanted]
    if sum(map(len, wanted)):
        assert ways(rows, [(shape,) for shape in have]) == enumerated(wanted, have)


def test_thousands_of_parameters() -> None:
    layers = [("q", (4, 4)), ("k", (4, 4)), ("up", (8, 4)), ("up.bias", (8,)), ("norm", (4,)), ("rope", (3,))] * 600
    model = {f"layers.{i // 6}.{name}": torch.zeros(shape) for i, (name, shape) in enumerate(layers)}
    asked = {name: value for name, value in model.items() if "rope" not in name}
    groups = [[n for n, v in asked.items() if v.ndim > 1], [n for n, v in asked.items() if v.ndim < 2]]
    names = [name for group in groups for name in group]
    number = {name: i for i, name in enumerate(names)}
    state = {
        "model": model,
        "optim": {
            "state": {i: {"step": 1.0, "exp_avg": model[n], "exp_avg_sq": model[n]} for n, i in number.items()},
            "param_groups": [
                {"lr": lr, "betas": (0.9, 0.95), **dict.fromkeys("abcdefghij"), "params": [number[n] for n in group]}
                for lr, group in enumerate(groups)
            ],
        },
    }
    laid = started(state)
    with no_hang():
        for wanted in ("fqn", "flat", "id"):
            laid = optimkeys.respell(laid, wanted)
    assert tree(laid, state)["optim"] == places(state["optim"])


def test_the_order_may_come_from_elsewhere(tmp_path: Path) -> None:
    """transformers' Trainer: the model sorted by name in safetensors, the optimizer by numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    folder = tmp_path / "ckpt"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    order = [[name, list(parameter.shape)] for name, parameter in model.named_parameters()]
    (tmp_path / "order.json").write_text(json.dumps(order))
    torch.save(model.state_dict(), tmp_path / "order.pt")
    one = {"model_from": str(folder / "model.safetensors"), "optim_keys": "fqn"}
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(folder / "optimizer.pt", tmp_path / "out.pt", **one)
    assert "--shapes" in str(caught.value.hint)
    # Sorted by name it is in a torch file too, and two of its layers are of one shape.
    ckpttool.convert(folder / "model.safetensors", tmp_path / "sorted.pt")
    again = {**one, "model_from": str(tmp_path / "sorted.pt")}
    with pytest.raises(UsageError, match="sorted by name") as caught:
        ckpttool.convert(folder / "optimizer.pt", tmp_path / "out.pt", **again)
    assert "named_parameters()" in str(caught.value.hint)
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(folder / "optimizer.pt", tmp_path / "out.pt", shapes=str(folder / "model.safetensors"), **one)
    assert "model.safetensors` is not in the order of a model either" in str(caught.value.hint)
    for name in ("order.json", "order.pt"):
        ckpttool.convert(folder / "optimizer.pt", tmp_path / f"{name}.out.pt", shapes=str(tmp_path / name), **one)
        found = torch.load(tmp_path / f"{name}.out.pt")["optim"]["state"]
        for i, (key, _) in enumerate(model.named_parameters()):
            assert torch.equal(found[key]["exp_avg"], optimizer.state_dict()["state"][i]["exp_avg"])


def test_each_of_several_optimizers_is_named_by_the_model_that_fits_it(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    names = {}
    for key, width in (("G", 4), ("D", 5)):
        module = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.randn(6, 3)).sum().backward()
        optimizer.step()
        state |= {key: module.state_dict(), f"opt{key}": optimizer.state_dict()}
        names[key] = [name for name, _ in module.named_parameters()]
    torch.save(state, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", optim_keys="fqn")
    named = torch.load(tmp_path / "b.pt")
    for key, own in names.items():
        assert named[f"opt{key}"]["param_groups"][0]["params"] == own
        for i, name in enumerate(own):
            first = state[f"opt{key}"]["state"][i]["exp_avg"]
            assert torch.equal(named[f"opt{key}"]["state"][name]["exp_avg"], first)
