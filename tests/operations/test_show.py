"""`show`: the elements of a slice, values that are not tensors, and what is said of a name that is none."""

from __future__ import annotations

import pytest
import torch
from support.cli import FULL, run

import ckpttool
from ckpttool.errors import UsageError


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(FULL, weights_only=False)["model"]
    return loaded


@pytest.mark.parametrize("text", ["[0:4, :8]", "0:4,:2", "[-1]", "[3, 2:]", "[:, -1]", "7", "[:]"])
def test_the_elements_of_a_slice_are_those_of_torch(text: str, state: dict[str, torch.Tensor]) -> None:
    weight = state["layers.0.qkv.weight"]
    expected = eval(f"weight[{text.strip('[]')}]", {"weight": weight})
    shown = ckpttool.show(FULL, "model.layers.0.qkv.weight", text)
    assert shown.values == expected.flatten().tolist() and shown.norm == pytest.approx(float(weight.norm()))
    behind = ckpttool.show(FULL, f"model.layers.0.qkv.weight[{text.strip('[]')}]")
    assert behind.values == shown.values and behind.slice == shown.slice


@pytest.mark.parametrize("text", ["[0:4, 9]", "[a]", "[]", "[0, 0, 0]", "[4:2]", "[::2]", "[99:]", "[1-2]"])
def test_slices_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a slice of `model\.layers\.0\.qkv\.weight`, whose shape is"):
        ckpttool.show(FULL, "model.layers.0.qkv.weight", text)


def test_a_value_that_is_not_a_tensor_is_shown() -> None:
    """It was refused: "it is an object; `inspect` shows it"."""
    assert run("show", FULL, "step", "-q").stdout == "3\n"
    shown = ckpttool.show(FULL, "optim.param_groups.0.betas")
    assert (shown.type, shown.value) == ("tuple", [0.9, 0.95])
    assert run("show", FULL, "optim.param_groups.0.betas", "--json").exit_code == 0
    assert "(0.9, 0.95)" in run("show", FULL, "optim.param_groups.0.betas").stdout


def test_a_pattern_and_a_group_of_names_have_their_commands() -> None:
    for name, pattern in (("model.layers.1.*", "model.layers.1.*"), ("model.layers.1", "model.layers.1.*")):
        with pytest.raises(UsageError) as raised:
            ckpttool.show(FULL, name)
        assert f"`ckpttool inspect {FULL} --tensors '{pattern}'` lists the 7 that match" in str(raised.value.hint)
