"""What is found of how one model is made of another, and what stays open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.catalogue.boxes import Ints

Rule = dict[str, Any]


class ConfigFacts(NamedTuple):
    """What the config of the reference says: whether there is a rotary embedding, if that is known; how many heads
    queries have, and keys."""

    model_type: str | None = None
    head_dim: int | None = None
    rotary: bool | None = None
    heads: int | None = None
    kv_heads: int | None = None


@dataclass(slots=True)
class Candidate:
    """One way in which targets may be made."""

    text: str  #: it in words
    rules: list[Rule]  #: its rules, as a map has them


@dataclass(slots=True)
class Found:
    """Tensors that are made in one way. `by` is what decided: `name`, `renaming`, `words` or `shape`."""

    names: list[str]
    rules: list[Rule]
    by: str
    sources: list[str]
    doubted: list[Rule] = field(default_factory=list)  #: rules that hold if names do not mean what they mostly do
    assumed: list[Open] = field(default_factory=list)  #: what nothing shows of it, with the ways that are left out


@dataclass(slots=True)
class Open:
    """Tensors of which it is not known how they are made: `name` is their pattern; without candidates, unmatched.

    Of those that are assumed to be made in one way, the candidates are the others.
    """

    name: str  #: their name, with `{n}` for numbers
    names: list[str]  #: their names
    shape: Ints  #: the shape of each
    why: str  #: the reason
    candidates: list[Candidate] = field(default_factory=list)  #: the ways in which they may be made


@dataclass(slots=True)
class Solution:
    """What was found, and what was not."""

    found: list[Found] = field(default_factory=list)
    ambiguous: list[Open] = field(default_factory=list)
    unmatched: list[Open] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @property
    def assumed(self) -> list[Open]:
        """What is found in a way that nothing shows, though nothing is against it."""
        return [each for one in self.found for each in one.assumed]

    @property
    def rules(self) -> list[Rule]:
        """The rules of a map, those with fewer numbers first: of two that fit a name, the first one is used. Tensors
        that keep their names need none."""
        rules = [rule for one in self.found for rule in one.rules if rule["from"] != rule["to"] or "operations" in rule]
        return sorted(rules, key=lambda rule: str(rule["from"]).partition(",")[0].count("{"))
