"""The JSON Schemas of docs/reference/schemas, made from the classes of what `--json` prints, and a check against them.

A field is described by its comment `#: ...`, as in the tables of docs/reference/json.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from jsonschema import Draft202012Validator

from ckpttool.analysis.audit import Audit
from ckpttool.analysis.describe.document_fields import Document
from ckpttool.analysis.differences.results import Diff
from ckpttool.analysis.result import Absent
from ckpttool.analysis.statistics.results import Stats
from ckpttool.cli import documents
from ckpttool.fleet.batch_result import Batch
from ckpttool.fleet.prune import Pruned
from ckpttool.operations.check import Checked
from ckpttool.operations.clean import Cleaned
from ckpttool.operations.export.plan import Exported
from ckpttool.operations.formats import Formats
from ckpttool.operations.match import Matched
from ckpttool.operations.repair import Repaired
from ckpttool.operations.report import HtmlReport
from ckpttool.operations.reshard import Resharding
from ckpttool.operations.samples import Samples
from ckpttool.operations.show import Shown
from ckpttool.operations.verify.report import Report
from ckpttool.operations.write import Conversion
from ckpttool.remote.cloud.upload import Uploaded
from ckpttool.remote.hub.upload import Sent
from ckpttool.resume import results as resume
from ckpttool.version import schema
from support.json_reference import fields
from support.paths import ROOT

FOLDER = ROOT / "docs" / "reference" / "schemas"
DOCUMENTS: dict[str, tuple[type, ...]] = {
    "inspect": (Document,),
    **{
        made.command: (documents.Judged, made)
        for made in (
            Conversion,
            Resharding,
            Exported,
            Stats,
            HtmlReport,
            Checked,
            Matched,
            Diff,
            Report,
            Repaired,
            Batch,
            Pruned,
            Cleaned,
            Shown,
            Samples,
            Formats,
            Audit,
            resume.TrialReport,
            resume.RunReport,
        )
    },
    "error": (documents.Error,),
}
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: _NUMBER,
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}
# Of definitions, where the class has another name.
_TITLES = {
    "Outlier": "Finding",
    "Fault": "Finding",
    "RunDifference": "Finding",
    "RankCheck": "Check",
    "ErrorFields": "Failure",
    "FormatFacts": "Format",
}
_OPEN = (documents.ErrorFields,)  # has fields that depend on the error
_OTHER_TYPES = {
    (kind, "sent"): Sent | Uploaded | None for kind in (Conversion, Resharding, Exported)
}  # which is not imported there


@cache
def made(command: str) -> str:
    """Return the schema of the document of a command, as it should be."""
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for cls in DOCUMENTS[command]:
        one = _object(cls, definitions)
        properties |= one["properties"]
        required += [name for name in one["required"] if name not in required]
    properties["schema"]["const"] = schema(command)
    if verdicts := [cls for cls in DOCUMENTS[command] if "verdict" in vars(cls) and vars(cls)["verdict"].__doc__]:
        text = vars(verdicts[0])["verdict"].__doc__
        properties["verdict"] = {"type": "string", "description": text}
    if "verdict" in properties and (words := re.findall("`([a-z ]+)`", properties["verdict"]["description"])):
        properties["verdict"]["enum"] = [word for word in words if not word.startswith("ckpttool")]
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{command}.json",
        "title": schema(command),
        "description": (DOCUMENTS[command][-1].__doc__ or "").strip().partition("\n")[0],
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return json.dumps(document | ({"$defs": definitions} if definitions else {}), indent=2) + "\n"


def check(text: str) -> dict[str, Any]:
    """Return the document that a command has printed, which must be valid by the schema that it names."""
    document: dict[str, Any] = json.loads(text)
    _, command, _ = document["schema"].split("/")
    wrong = [f"{error.json_path}: {error.message:.300}" for error in _validator(command).iter_errors(document)]
    assert not wrong, wrong
    return document


@cache
def _validator(command: str) -> Draft202012Validator:
    document = json.loads((FOLDER / f"{command}.json").read_text())
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    described = dict(descriptions(cls))
    hints = get_type_hints(cls)
    for one in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        hints[one.name] = list[one.metadata["fields"]] if "fields" in one.metadata else hints[one.name]  # type: ignore[misc]
    optional = getattr(cls, "__optional_keys__", frozenset())
    properties, required = {}, []
    for name, description in described.items():
        hint = _OTHER_TYPES.get((cls, name), hints[name])
        if name not in optional and Absent not in get_args(hint):
            required.append(name)
        properties[name] = {"description": description, **_schema(hint, definitions)}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": cls in _OPEN}


def descriptions(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the name and the description of each field of a class and its bases."""
    # A TypedDict does not keep its bases.
    written = re.match(r".*?^class \w+\((\w+)", inspect.getsource(cls), re.DOTALL | re.MULTILINE)
    for base in [getattr(import_module(cls.__module__), written[1])] if written else []:
        if is_typeddict(base) or dataclasses.is_dataclass(base):
            yield from descriptions(base)
    for name, _, description in fields(f"{cls.__module__}.{cls.__qualname__}"):
        yield name, description


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        kinds = [_schema(arg, definitions) for arg in args if arg is not Absent]
        if {} in kinds:
            return {}
        names = [kind.get("type") for kind in kinds if set(kind) == {"type"}]
        return {"type": names} if len(names) == len(kinds) else {"anyOf": kinds}
    if origin is list:
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    if origin is tuple and args[1:] == (...,):
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is tuple:
        items = [_schema(arg, definitions) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    name = _TITLES.get(hint.__name__, hint.__name__)
    if name not in definitions:
        definitions[name] = None  # in its place, before those within it
        definitions[name] = {"description": (hint.__doc__ or "").partition("\n")[0], **_object(hint, definitions)}
    return {"$ref": f"#/$defs/{name}"}
