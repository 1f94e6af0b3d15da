"""docs/reference/json.md has the fields of the results, each described."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import get_type_hints

import pytest
from support import json_schemas
from support.json_reference import GENERATED, generated
from support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "json.md"
CLASSES = [match[1] for match in GENERATED.finditer(PAGE.read_text())]


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
    described = {field for field, _ in json_schemas.descriptions(result)}
    assert described == {field for field in fields_of(result) if not field.startswith("_")}


def fields_of(result: type) -> set[str]:
    if dataclasses.is_dataclass(result):
        return {field.name for field in dataclasses.fields(result)}
    return set(get_type_hints(result))
