"""The docstrings of the public API: every parameter, property and field is told of."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import ckpttool

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
