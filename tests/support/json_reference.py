"""The generated tables of docs/reference/json.md: the fields of a result, as its class describes them.

<!-- fields of ckpttool.operations.write.Conversion -->      begins a table
<!-- end -->                                                 ends it

A field is described by a comment `#: ...` behind it or above it. A field without one is not in the JSON.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module

GENERATED = re.compile(r"^<!-- fields of ([\w.]+) -->\n(.*?)^<!-- end -->\n", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(
    r"^    (?:#: (?P<above>.*)\n    )?(?P<name>\w+): (?P<type>[^=#\n]+?)(?: = [^\n]*?)?(?:  #: (?P<behind>.*))?$",
    re.MULTILINE,
)
_JSON = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "Any": "any", "None": "null"}
_STRINGS = ("Kind", "State", "TrialVerdict", "RunVerdict")  # which are literals


def generated(page: str) -> str:
    """Return `page` with its tables as they should be."""
    return GENERATED.sub(lambda m: f"<!-- fields of {m[1]} -->\n{_table(m[1])}<!-- end -->\n", page)


def fields(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type and the description of each field that the class `name` itself has."""
    module, _, cls = name.rpartition(".")
    source = inspect.getsource(getattr(import_module(module), cls))
    body = re.split(r"^    (?:def|@)", source, maxsplit=1, flags=re.MULTILINE)[0]
    for match in _FIELD.finditer(re.sub(r'""".*?"""', "", body, count=1, flags=re.DOTALL)):
        description = match["above"] or match["behind"]
        if description:
            yield match["name"], match["type"], description


def _table(name: str) -> str:
    module, _, cls = name.rpartition(".")
    verdict = vars(getattr(import_module(module), cls)).get("verdict")
    rows = [f"| `verdict` | string | {verdict.__doc__.rstrip('.')} |"] if isinstance(verdict, property) else []
    rows += [f"| `{field}` | {_json_type(kind)} | {description} |" for field, kind, description in fields(name)]
    return "\n".join(["", "| field | type | meaning |", "|---|---|---|", *rows, "", ""])


def _json_type(annotation: str) -> str:
    """Return what a Python type is in JSON: `list[str] | None` is `list of string, or null`."""
    kind = annotation.removesuffix(" | None").removesuffix(" | Absent").replace("int | float", "float")
    if inner := re.fullmatch(r"list\[(.*)\]", kind):
        words = f"list of {_json_type(inner[1])}"
    elif " | " in kind:
        words = " or ".join(map(_json_type, kind.split(" | ")))
    elif kind.startswith("tuple") or kind == "Ints":
        words = "list"
    else:
        words = "string" if kind in _STRINGS else _JSON.get(kind, "object")
    return f"{words}, or null" if kind != annotation else words
