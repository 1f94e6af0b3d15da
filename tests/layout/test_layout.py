"""Catalogue to catalogue: names, ties, casts and chunks, against what torch does with the same state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoints

import ckpttool
from ckpttool.analysis.describe.summary import summarise
from ckpttool.catalogue import parts
from ckpttool.catalogue.boxes import Box
from ckpttool.catalogue.entries import Catalogue, Object, Part, Tensor, dotted
from ckpttool.catalogue.flatten import links, unflatten
from ckpttool.catalogue.patterns import renamer
from ckpttool.catalogue.values import stub_type
from ckpttool.errors import UsageError
from ckpttool.layout import dtype_rules as casting
from ckpttool.layout import select as layout
from ckpttool.layout.rename import rename_entries, strip_wrappers, without_root


def started(state: dict[Any, Any], cuts: dict[str, Sequence[Box]] | None = None) -> Catalogue:
    catalogue = checkpoints.state(state, cuts)
    parts.assign(catalogue)
    return layout.start(catalogue)


def tree(catalogue: Catalogue) -> Any:
    """The state with the name of its source in place of each tensor."""
    return unflatten(catalogue, lambda e: e.value if isinstance(e, Object) else f"<{(e.origin or e).name}>")


def aliases(catalogue: Catalogue) -> dict[str, str]:
    return {t.name: dotted(t.alias) for t in catalogue.tensors if t.alias is not None}


def tied() -> dict[str, Any]:
    embed = torch.zeros(4, 2)
    return {"embed": embed, "head": embed, "again": embed, "other": torch.zeros(4, 2)}


def by_name(prefix: str = "", **more: Any) -> dict[str, Any]:
    """A model and an optimizer that calls its parameters by name, as DCP's state dict functions give them."""
    names = [f"{prefix}layers.0.w", f"{prefix}layers.1.w"]
    return {
        "model": {name: torch.zeros(4, 2) for name in names},
        "optim": {
            "state": {name: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4, 2)} for name in names},
            "param_groups": [{"lr": 0.1, "params": names}],
        },
        **more,
    }


def flattened(prefix: str = "") -> dict[str, Any]:
    """The same with `flatten_optimizer_state_dict=True`: names, dots and all, in one key."""
    names = [f"{prefix}layers.0.w", f"{prefix}layers.1.w"]
    optim: dict[str, Any] = {f"state.{name}.exp_avg": torch.zeros(4, 2) for name in names}
    return {
        "model": {name: torch.zeros(4, 2) for name in names},
        "optim": optim | {f"param_groups.{name}.lr": 0.1 for name in names},
    }


# Start and select -----------------------------------------------------------------------------------------------------


def test_start_knows_ties_and_leaves_the_source_as_it_is() -> None:
    source = checkpoints.state(tied())
    laid = layout.start(source)
    assert aliases(laid) == {"head": "embed", "again": "embed"}
    assert aliases(source) == {}
    assert all(t.origin is source.entries[t.path] for t in laid.tensors)
    laid.containers[("x",)] = laid.containers.get((), None)  # type: ignore[assignment]
    assert ("x",) not in source.containers


def test_a_tied_tensor_whose_first_name_goes_keeps_its_bytes_under_the_next() -> None:
    laid = layout.select(started(tied()), lambda e: e.name != "embed")
    assert [t.name for t in laid.tensors] == ["head", "again", "other"]
    assert aliases(laid) == {"again": "head"}
    assert laid.tensor(("head",)).origin is not None
    last = layout.select(laid, lambda e: e.name != "head")
    assert aliases(last) == {}


def test_a_tie_whose_later_name_goes_is_none() -> None:
    assert aliases(layout.select(started(tied()), lambda e: e.name not in ("head", "again"))) == {}


def test_select_keeps_the_containers_on_the_way_to_what_is_kept() -> None:
    state = {"a": OrderedDict(x=torch.zeros(1)), "b": [{"y": 1}, {"y": 2}], "c": {"z": 3}}
    laid = layout.select(started(state), lambda e: e.name in ("b.1.y", "c.z"))
    assert tree(laid) == {"b": [{"y": 2}], "c": {"z": 3}}
    assert ("a",) not in laid.containers


def test_what_follows_in_a_list_moves_up() -> None:
    stub = stub_type("some.module", "Class")(torch.zeros(2))
    deep: list[Any] = [{"w": torch.zeros(1)}, {"w": torch.ones(1), "sub": [torch.zeros(1), stub, torch.ones(1)]}]
    laid = started({"model": {"layers": [torch.zeros(1), *deep]}, "step": 3})
    left = layout.select(laid, lambda e: e.name not in ("model.layers.0", "model.layers.2.sub.0"))
    assert [e.path for e in left.entries.values() if not (isinstance(e, Tensor) and e.embedded)] == [
        ("model", "layers", 0, "w"), ("model", "layers", 1, "w"),
        ("model", "layers", 1, "sub", 0), ("model", "layers", 1, "sub", 1), ("step",),
    ]  # fmt: skip
    assert left.containers.keys() == {("model", "layers"), ("model", "layers", 1, "sub")}
    held = left.entries[("model", "layers", 1, "sub", 0)]
    assert isinstance(held, Object) and [left.tensor(link.path).embedded for link in links(held.value)] == [True]
    away = rename_entries(laid, renamer(["model.layers.1=model.first"]))
    assert ("model", "layers", 1, "sub", 2) in away.entries


def test_tensors_inside_an_object_go_and_stay_with_it() -> None:
    state = {"rng": (torch.zeros(2), torch.ones(2)), "w": torch.zeros(1)}
    laid = started(state)
    embedded = {t.path for t in laid.tensors if t.embedded}
    assert len(embedded) == 2
    assert set(layout.select(laid, lambda e: e.name != "w").entries) == {("rng",), *embedded}
    assert set(layout.select(laid, lambda e: e.name != "rng").entries) == {("w",)}
    # A pattern speaks of the object, not of the tensors in it.
    assert set(layout.select(laid, layout.matching(["w"], [], laid)).entries) == {("w",), ("rng",), *embedded}


@pytest.mark.parametrize(
    ("tensors", "exclude", "left"),
    [
        (["*"], [], ["model.w", "model.b", "step"]),
        (["*.w"], [], ["model.w", "step"]),
        (["*.w", "*.b"], ["*.b"], ["model.w", "step"]),
        ([], ["model.*"], ["step"]),
        ([], ["step"], ["model.w", "model.b"]),
    ],
)
def test_tensors_and_exclude(tensors: list[str], exclude: list[str], left: list[str]) -> None:
    laid = started({"model": {"w": torch.zeros(1), "b": torch.zeros(1)}, "step": 3})
    assert [e.name for e in layout.select(laid, layout.matching(tensors, exclude, laid)).entries.values()] == left


# Names ----------------------------------------------------------------------------------------------------------------


def test_renaming_keeps_keys_that_are_no_strings() -> None:
    state = {"optim": {"state": {0: {"exp_avg": torch.zeros(1)}, 10: {"exp_avg": torch.zeros(1)}}}, "step": 3}
    laid = rename_entries(started(state), renamer(["optim.state.*.exp_avg=optim.state.*.m"]))
    assert tree(laid)["optim"] == {
        "state": {0: {"m": "<optim.state.0.exp_avg>"}, 10: {"m": "<optim.state.10.exp_avg>"}}
    }
    laid = rename_entries(started(state), renamer(["optim=opt", "step=global.step"]))
    assert tree(laid)["opt"]["state"][0] == {"exp_avg": "<optim.state.0.exp_avg>"}
    assert [e.name for e in laid.objects] == ["global.step"]


def test_renaming_keeps_containers() -> None:
    ordered: OrderedDict[str, Any] = OrderedDict({"layers.0.w": torch.zeros(1)})
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    state = {"model": ordered, "groups": [{"lr": 1}, {"lr": 2}]}
    laid = rename_entries(started(state), renamer(["model=net", "groups=deep.groups"]))
    found = tree(laid)
    assert type(found["net"]) is OrderedDict
    assert found["net"]._metadata == {"": {"version": 1}}
    assert found["net"] == {"layers.0.w": "<model.layers.0.w>"}
    assert [o.value for o in laid.objects] == [1, 2]
    assert unflatten(laid, lambda e: 0)["deep.groups"] == [{"lr": 0}, {"lr": 0}]


def test_renaming_keeps_ties_parts_and_origins() -> None:
    laid = rename_entries(started({"model": tied(), "step": 3}), renamer(["model=net"]))
    assert aliases(laid) == {"net.head": "net.embed", "net.again": "net.embed"}
    assert {t.part for t in laid.tensors} == {Part("model", ("net",))}
    assert [(t.origin or t).name for t in laid.tensors] == ["model.embed", "model.head", "model.again", "model.other"]


def test_what_is_inside_an_object_moves_with_it_and_its_links_follow() -> None:
    stub = stub_type("some.module", "Class")(torch.zeros(2), key=torch.ones(1))
    state = {"a": {"thing": stub, "pair": (torch.zeros(1), {"deep": [torch.ones(3)]})}, "w": torch.zeros(1)}
    laid = rename_entries(started(state), renamer(["a=b"]))
    for entry in laid.objects:
        found = [laid.entries[link.path] for link in links(entry.value)]
        assert found and all(isinstance(t, Tensor) and t.embedded for t in found)
    assert {e.path[0] for e in laid.entries.values()} == {"b", "w"}
    renamed = laid.entries[("b", "thing")]
    assert isinstance(renamed, Object)
    assert type(renamed.value) is type(stub)
    # Whatever a stub remembers, it goes on remembering.
    for slot in type(stub).__mro__[-2].__slots__:
        assert hasattr(renamed.value, slot) == hasattr(stub, slot), slot


def test_collisions_are_refused_by_name() -> None:
    laid = started({"a": {"w": torch.zeros(1)}, "b": {"w": torch.zeros(1)}, "c.w": 1})
    for rules in (["a=b"], ["b=a"], ["a=c"], ["c.w=a.w"], ["re:.*=x"]):
        with pytest.raises(UsageError, match="would both be called"):
            rename_entries(laid, renamer(rules))
    swapped = rename_entries(laid, renamer(["a=b", "b=a"]))
    assert tree(swapped) == {"b": {"w": "<a.w>"}, "a": {"w": "<b.w>"}, "c.w": 1}


@pytest.mark.parametrize("rules", [["step=model"], ["model=step"]])
def test_a_value_where_another_needs_a_dict_is_refused(rules: list[str]) -> None:
    laid = started({"model": {"w": {"a": torch.zeros(1)}}, "step": 3})
    with pytest.raises(UsageError, match="needs a dict of that name"):
        rename_entries(laid, renamer(rules))


@pytest.mark.parametrize(
    ("rules", "new"),
    [
        (["model.layers=model.h"], ["h.0.w", "h.1.w"]),
        (["model=net"], ["layers.0.w", "layers.1.w"]),
        (["model.*=*"], ["layers.0.w", "layers.1.w"]),
        (["model.layers.*=net.h.*"], ["net.h.0.w", "net.h.1.w"]),
        (["*.layers.0.*=*.first.*"], ["first.w", "layers.1.w"]),
    ],
)
def test_the_optimizer_follows_the_models_names(rules: list[str], new: list[str]) -> None:
    laid = rename_entries(started(by_name()), renamer(rules))
    optim = tree(laid)["optim"]
    assert list(optim["state"]) == new
    assert optim["param_groups"] == [{"lr": 0.1, "params": new}]
    laid = rename_entries(started(flattened()), renamer(rules))
    assert list(tree(laid)["optim"]) == [f"state.{n}.exp_avg" for n in new] + [f"param_groups.{n}.lr" for n in new]


@pytest.mark.parametrize("last", ["ema", "model_ema", "net"])
@pytest.mark.parametrize("spelt", [by_name, flattened])
def test_the_optimizer_follows_the_first_of_several_models(spelt: Callable[[], dict[str, Any]], last: str) -> None:
    state = {last: {name: torch.ones(4, 2) for name in by_name()["model"]}, **spelt()}
    before = tree(started(state))["optim"]
    assert tree(rename_entries(started(state), renamer([f"{last}.layers.0.w={last}.shadow"])))["optim"] == before
    both = rename_entries(started(state), renamer([f"{last}.layers.0.w={last}.shadow", "model.layers.0.w=model.first"]))
    names = {dotted(e.path[1:]) for e in both.entries.values() if e.path[0] == "optim"}
    assert not any("shadow" in name for name in names)
    assert any(name.startswith("state.first.") for name in names)


@pytest.mark.parametrize("name", ["eps", "exp_avg", "state", "param_groups", "lr", "params"])
def test_a_parameter_that_is_called_like_a_key_of_the_optimizer(name: str) -> None:
    group = {"lr": 0.1, "eps": 1e-8, "params": [name, "other"]}
    moments = {"eps": 1, "exp_avg": torch.zeros(2), "state": torch.zeros(2)}
    state: dict[str, Any] = {
        "model": {name: torch.zeros(2), "other": torch.zeros(2)},
        "optim": {"state": {name: moments, "other": dict(moments)}, "param_groups": [group]},
    }
    found = tree(rename_entries(started(state), renamer([f"model.{name}=model.new"])))["optim"]
    assert list(found) == ["state", "param_groups"]
    assert {key: list(value) for key, value in found["state"].items()} == {
        key: list(moments) for key in ("new", "other")
    }
    assert found["param_groups"] == [group | {"params": ["new", "other"]}]
    flat = {f"state.{name}.eps": torch.zeros(2), f"param_groups.{name}.eps": 1, "eps": 1}
    laid = rename_entries(started({"model": state["model"], "optim": flat}), renamer([f"model.{name}=model.new"]))
    assert list(tree(laid)["optim"]) == ["state.new.eps", "param_groups.new.eps", "eps"]


def test_an_optimizer_that_counts_its_parameters_stays() -> None:
    state = by_name()
    state["optim"] = {"state": {0: {"exp_avg": torch.zeros(4, 2)}}, "param_groups": [{"params": [0, 1]}]}
    laid = rename_entries(started(state), renamer(["model.layers=model.h"]))
    assert tree(laid)["optim"] == {
        "state": {0: {"exp_avg": "<optim.state.0.exp_avg>"}},
        "param_groups": [{"params": [0, 1]}],
    }


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("module.layers.0.w", "layers.0.w"),
        ("module.module.w", "w"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.attn._fsdp_wrapped_module.w", "layers.0.attn.w"),
        ("layers.module.w", "layers.w"),
        ("module", "module"),
        ("layers.module", "layers.module"),
        ("module_list.0.w", "module_list.0.w"),
        ("submodule.w", "submodule.w"),
    ],
)
def test_wrappers_at_any_depth(name: str, stripped: str) -> None:
    assert strip_wrappers(name) == stripped


def test_wrappers_are_taken_off_the_model_and_the_optimizer_follows() -> None:
    state = by_name("_orig_mod.module.", module={"thing": 1})
    laid = rename_entries(started(state), strip_wrappers, within_parts=True)
    found = tree(laid)
    assert list(found["model"]) == list(found["optim"]["state"]) == ["layers.0.w", "layers.1.w"]
    assert found["optim"]["param_groups"][0]["params"] == ["layers.0.w", "layers.1.w"]
    assert found["module"] == {"thing": 1}


def test_wrappers_of_a_bare_model_and_of_nested_dicts() -> None:
    bare = rename_entries(started({"module.w": torch.zeros(1)}), strip_wrappers, within_parts=True)
    assert tree(bare) == {"w": "<module.w>"}
    state = {"model": {"module": {"w": torch.zeros(1), "b": torch.zeros(1)}}, "step": 3}
    nested = rename_entries(started(state), strip_wrappers, within_parts=True)
    assert tree(nested)["model"] == {"w": "<model.module.w>", "b": "<model.module.b>"}


def test_wrappers_that_hide_a_collision() -> None:
    laid = started({"model": {"module.w": torch.zeros(1), "w": torch.zeros(1)}, "step": 3})
    with pytest.raises(UsageError, match=r"`model.module.w` and `model.w` would both be called `model.w`"):
        rename_entries(laid, strip_wrappers, within_parts=True)


def test_without_root() -> None:
    ordered: OrderedDict[str, Any] = OrderedDict(tied())
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    laid = started({"app": {"model": ordered, "optim": by_name()["optim"]}})
    alone = layout.select(laid, lambda e: e.part.kind == "model")
    (part,) = parts.parts(alone)
    bare = without_root(alone, part)
    found = tree(bare)
    assert type(found) is OrderedDict
    assert found._metadata == {"": {"version": 1}}
    assert list(found) == ["embed", "head", "again", "other"]
    assert aliases(bare) == {"head": "embed", "again": "embed"}
    assert {t.part for t in bare.tensors} == {Part("model", ())}
    assert {t.part for t in alone.tensors} == {Part("model", ("app", "model"))}


@pytest.mark.parametrize("value", [3, (torch.zeros(2), 1), torch.tensor(3)])
def test_a_part_that_is_one_value_keeps_its_key(value: Any) -> None:
    laid = layout.select(started({"model": tied(), "step": value}), lambda e: e.part.kind == "progress")
    (part,) = parts.parts(laid)
    assert set(without_root(laid, part).entries) == set(laid.entries)
    assert ("step",) in laid.entries


# Dtypes ---------------------------------------------------------------------------------------------------------------


def cast(state: dict[Any, Any], *rules: str) -> dict[str, str]:
    laid = started(state)
    new = casting.cast(laid, casting.caster(rules))
    return {t.name: t.dtype.name for t in new.tensors if t.dtype != laid.tensor(t.path).dtype}


MIXED: dict[str, Any] = {
    "model": {
        "w": torch.zeros(2),
        "half": torch.zeros(2, dtype=torch.float16),
        "small": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "packed": torch.zeros(2, dtype=torch.float4_e2m1fn_x2),
        "ids": torch.zeros(2, dtype=torch.int64),
        "mask": torch.zeros(2, dtype=torch.bool),
        "wave": torch.zeros(2, dtype=torch.complex64),
    },
    "optim": {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []},
    "rng": (torch.zeros(2),),
}


@pytest.mark.parametrize(
    ("rules", "changed"),
    [
        ([], {}),
        (["bfloat16"], {"model.w": "bfloat16", "model.half": "bfloat16"}),
        (["torch.bfloat16"], {"model.w": "bfloat16", "model.half": "bfloat16"}),
        (["fp16"], {"model.w": "float16"}),
        (["*=float64"], {"model.w": "float64", "model.half": "float64", "model.small": "float64",
                         "optim.state.0.exp_avg": "float64"}),
        (["model.small=float32", "bf16"], {"model.w": "bfloat16", "model.half": "bfloat16", "model.small": "float32"}),
        (["model.w=float64", "*=half"], {"model.w": "float64", "model.small": "float16",
                                         "optim.state.0.exp_avg": "float16"}),
        (["model.w=float32", "*.w=float16"], {}),
        (["model.ids=float32"], {}),
        ([r"re:.*\.(w|ids|wave|mask|packed)=float16"], {"model.w": "float16"}),
    ],
)  # fmt: skip
def test_cast_rules(rules: list[str], changed: dict[str, str]) -> None:
    assert cast(MIXED, *rules) == changed


@pytest.mark.parametrize(
    "text", ["int8", "w=int64", "bool", "complex64", "float4_e2m1fn_x2", "nonsense", "w=", "qint8"]
)
def test_dtypes_to_which_nothing_is_cast(text: str) -> None:
    with pytest.raises(UsageError, match="`dtype="):
        casting.caster([text])


def test_a_cast_that_takes_one_of_two_tied_names_unties_them() -> None:
    laid = casting.cast(started(tied()), casting.caster(["head=bfloat16", "again=bfloat16"]))
    assert {t.name: t.dtype.name for t in laid.tensors}["embed"] == "float32"
    assert aliases(laid) == {"again": "head"}
    both = casting.cast(started(tied()), casting.caster(["bfloat16"]))
    assert aliases(both) == {"head": "embed", "again": "embed"}
    first = casting.cast(started(tied()), casting.caster(["embed=bfloat16"]))
    assert aliases(first) == {"again": "head"}


def test_two_moments_that_are_the_same_bytes_are_told(tmp_path: Path) -> None:
    """What `FSDP.optim_state_dict` gave with `offload_to_cpu`, on CPUs."""
    moment = torch.ones(4)
    for name, other in (("wrong", moment), ("right", moment.clone())):
        state = {"state": {"w": {"step": torch.tensor(1.0), "exp_avg": moment, "exp_avg_sq": other}}}
        torch.save({"optim": {**state, "param_groups": [{"params": ["w"]}]}}, tmp_path / f"{name}.pt")
        notes = ckpttool.convert(tmp_path / f"{name}.pt", tmp_path / f"{name}.out.pt").notes
        shown = [w for w in summarise(ckpttool.inspect(tmp_path / f"{name}.pt")).warnings if "same bytes" in str(w)]
        assert [bool([n for n in notes if "same bytes" in n]), bool(shown)] == [name == "wrong"] * 2
