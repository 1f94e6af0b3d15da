"""The docstrings of the public API: every parameter, property and field is told of."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import run

import ckpttool
from ckpttool.errors import SWITCHES, OverwriteError, UsageError

CLASSES = [name for name in ckpttool.__all__ if inspect.isclass(getattr(ckpttool, name))]
FUNCTIONS = ["open", *(name for name in ckpttool.__all__ if inspect.isfunction(getattr(ckpttool, name)))]


def functions() -> Iterator[tuple[str, Any]]:
    for name in FUNCTIONS:
        yield name, getattr(ckpttool, name)
    for name in CLASSES:
        for method, function in inspect.getmembers(getattr(ckpttool, name), inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("ckpttool"):
                yield f"{name}.{method}", function


def missing(function: Any) -> list[str]:
    """The parameters that have neither a line in `Args:` nor are named in the text."""
    text = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.M)
    listed = set(re.findall(r"^    \*{0,2}(\w+): \S", section[1], re.M)) if section else set()
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    in_text = set() if len(parameters) > 2 else set(re.findall(r"`(\w+)`", text))
    return [name for name in parameters if name not in listed | in_text]


@pytest.mark.parametrize(("name", "function"), list(functions()), ids=lambda value: value if type(value) is str else "")
def test_every_parameter_is_told_of(name: str, function: Any) -> None:
    first = (inspect.getdoc(function) or "").partition("\n")[0]
    assert re.fullmatch(r"[A-Z].*[.:,\w]", first), f"{name}: {first!r}"
    assert missing(function) == []


@pytest.mark.parametrize("name", CLASSES)
def test_every_property_and_field_is_told_of(name: str) -> None:
    kind = getattr(ckpttool, name)
    assert inspect.getdoc(kind)
    for own, value in inspect.getmembers(kind, lambda value: isinstance(value, property)):
        assert own.startswith("_") or inspect.getdoc(value), f"{name}.{own}"
    if dataclasses.is_dataclass(kind):
        sources = "".join(inspect.getsource(base) for base in kind.__mro__ if base is not object)
        for field in dataclasses.fields(kind):
            commented = re.search(rf"^    {field.name}: .*  #: \S", sources, re.M)
            told = field.name.startswith("_") or f"`{field.name}`" in str(kind.__doc__) or commented
            assert told, f"{name}.{field.name}"


def test_a_parameter_that_is_not_told_of_is_found() -> None:
    def function(one: int, two: int, three: int) -> None:
        """Do it.

        Args:
            one: elements.
            two:
        """

    assert missing(function) == ["two", "three"]


# Hints ----------------------------------------------------------------------------------------------------------------


def test_a_hint_names_options_as_the_command_line_does_and_parameters_in_python(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt")
    with pytest.raises(OverwriteError) as caught:
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert str(caught.value).endswith("hint: pass `overwrite=True` to replace it")
    said = run("convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")).stderr
    assert said.endswith("hint: pass `--overwrite` to replace it\n")


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("`--overwrite`", "`overwrite=True`"),
        ("`--no-strict`", "`strict=False`"),
        ("`--max-memory`", "`max_memory`"),
        ("`--to dcp`", '`to="dcp"`'),
        ("`--to-world 2`", "`to_world=2`"),
        ("`--shapes FROM`", "`shapes=FROM`"),
        ("`--rename OLD=NEW`", '`rename="OLD=NEW"`'),
        ("`--exclude '*.x'`", "`exclude='*.x'`"),
        ("`--only model --tensors x`", "`--only model --tensors x`"),
        ("`ckpttool verify --values x`", "`ckpttool verify --values x`"),
        ("`--values`", "`check_values=True`"),
    ],
)
def test_options_as_arguments(option: str, argument: str) -> None:
    assert str(UsageError("x", hint=f"use {option}")) == f"x\nhint: use {argument}"


def test_every_switch_of_a_function_is_known() -> None:
    parameters = [p for name in FUNCTIONS for p in inspect.signature(getattr(ckpttool, name)).parameters.values()]
    assert {p.name for p in parameters if p.default is False} <= SWITCHES
