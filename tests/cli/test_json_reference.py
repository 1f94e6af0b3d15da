"""docs/reference/json.md has the fields of the results, each described."""

from __future__ import annotations

import dataclasses
from importlib import import_module

import pytest
from support.json_reference import GENERATED, fields, generated
from support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "json.md"
CLASSES = [match[1] for match in GENERATED.finditer(PAGE.read_text())]
NOT_IN_JSON = {"Audit": {"catalogue"}, "Total": {"sums"}}


def test_the_tables_are_current(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text()
    current = generated(page)
    if request.config.getoption("--accept"):
        PAGE.write_text(current)
    assert current == page, "run `pytest tests/cli/test_json_reference.py --accept`"


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_described(name: str) -> None:
    module, _, cls = name.rpartition(".")
    result = getattr(import_module(module), cls)
    inherited = {field.name for base in result.__mro__[1:-1] for field in dataclasses.fields(base)}
    own = {field.name for field in dataclasses.fields(result)} - inherited - NOT_IN_JSON.get(cls, set())
    assert {field for field, _, _ in fields(name)} == own
