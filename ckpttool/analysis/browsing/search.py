"""What is typed into the search of `browse`: words of names, `dtype=bfloat16`, `rank=3`, `rms>1 and nan>0`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from ckpttool.analysis.statistics.results import COLUMNS, CONDITION, TensorStatistics
from ckpttool.catalogue.conditions import condition
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.patterns import any_of
from ckpttool.errors import UsageError

FIELDS = ("dtype", "part", "rank", "file", "dim")
"""What a tensor can be asked for before any value is read."""

_FIELD = re.compile(rf"({'|'.join(FIELDS)})=([^=\s]+)")
_WORD = re.compile(r"[A-Za-z_*?\[][\w.*?\[\]!:/$^()+|\\-]*")
_COMPARISON = re.compile(r"[<>=!]")
_JOINING = ("and", "or", "not")


class Query(NamedTuple):
    """A search. `names` and `fields` need the index only, `holds` the statistics of a tensor."""

    matches: Callable[[Tensor], bool]
    holds: Callable[[TensorStatistics], bool] | None


def parse(text: str, catalogue: Catalogue) -> Query:
    """Return the search that a text is. A word without `*` is found anywhere in a name.

    Raises UsageError for a condition that is none.
    """
    tests: list[Callable[[Tensor], bool]] = []
    rest: list[str] = []
    words = text.split()
    for i, word in enumerate(words):
        field = _FIELD.fullmatch(word)
        if field is not None:
            tests.append(_field(field[1], field[2], catalogue))
        elif word.startswith("re:") or (
            _WORD.fullmatch(word)
            and word not in (*_JOINING, *COLUMNS)
            and not any(_COMPARISON.match(near) for near in words[i + 1 : i + 2])
        ):
            is_pattern = word.startswith("re:") or any(sign in word for sign in "*?[")
            named = any_of([word if is_pattern else f"*{word}*"])
            tests.append(lambda tensor, named=named: named(tensor.name))  # type: ignore[misc]
        else:
            rest.append(word)
            continue
        if rest and rest[-1] == "and":
            rest.pop()  # `rms > 1 and dtype=bfloat16`
    if rest and rest[0] == "and":
        rest.pop(0)
    condition_text = " ".join(rest)
    if condition_text in COLUMNS:
        condition_text += " > 0"  # `nan`
    compare = condition(condition_text, CONDITION, "/") if rest else None
    holds = (lambda row: compare(row.known())) if compare is not None else None
    return Query(lambda tensor: all(test(tensor) for test in tests), holds)


def _field(name: str, value: str, catalogue: Catalogue) -> Callable[[Tensor], bool]:
    if name == "dtype":
        wanted = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f32": "float32"}.get(value, value)
        return lambda tensor: tensor.dtype.name == wanted
    if name == "part":
        return lambda tensor: value in (tensor.part.kind, str(tensor.part))
    if name == "file":
        named = any_of([f"*{value}*"])
        return lambda tensor: any(named(catalogue.files[i].name) for i in set(tensor.chunks.file))
    if not value.isdecimal():
        raise UsageError(f"`/ {name}={value}`: {value} is not a number", hint=f"type `{name}=0`", found=value)
    number = int(value)
    if name == "dim":
        return lambda tensor: len(tensor.shape) == number
    files = {i for i, file in enumerate(catalogue.files) if file.rank == number}
    return lambda tensor: not files.isdisjoint(tensor.chunks.file)
