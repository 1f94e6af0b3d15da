"""Key maps: rules that give tensors other names, and make tensors of others by index operations.

    {"format": 2, "name": "llama-meta", "model_types": ["llama"], "needs": [pattern, ..], "never": [pattern, ..],
     "rules": [
      {"from": "layers.{n}.attention.wq.weight", "to": "model.layers.{n}.self_attn.q_proj.weight",
       "operations": [{"rows": "halves"}]},
      {"from": "layers.{n}.moe.experts.w1", "to": "model.layers.{n}.mlp.experts.{e}.gate_proj.weight",
       "operations": [{"unstack": 0}]},
      {"from": "rope.freqs", "to": null}]}

`docs/reference/key-maps.md` explains the grammar. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.shown import shown
from ckpttool.errors import UsageError
from ckpttool.layout.assemblies import Assembly
from ckpttool.layout.index_operations import (
    Concat,
    Facts,
    Operation,
    Row,
    Rows,
    Split,
    Stack,
    Table,
    Unstack,
    parse_operation,
)
from ckpttool.layout.move import derived, rebuilt
from ckpttool.layout.views import Viewed
from ckpttool.text import literal, some

FORMAT = 2
_ANYTHING, _DIGITS = ".*", r"\d+"
_FIELD = re.compile(r"\{(\w+)(\*?)\}")
_EXAMPLE = '`{"from": "blocks.{n}.w", "to": "model.layers.{n}.weight"}`'


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A name with fields: `{n}` stands for a number, `{rest*}` for anything."""

    text: str
    pattern: re.Pattern[str] = field(compare=False, repr=False)

    @property
    def fields(self) -> dict[str, None]:
        """The names of its fields, in order."""
        return dict.fromkeys(match[1] for match in _FIELD.finditer(self.text))

    def is_one_of(self, names: Iterable[str]) -> bool:
        """Return whether one of some names is such a name."""
        return any(map(self.pattern.fullmatch, names))

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the name with values in place of its fields."""
        return _FIELD.sub(lambda match: values[match[1]], self.text)


@dataclass(frozen=True, slots=True)
class Rule:
    """The tensors of some names become those of others, by operations; none if there are no others."""

    sources: tuple[NamePattern, ...]
    targets: tuple[NamePattern, ...]
    operations: tuple[Operation, ...] = ()

    @property
    def shared(self) -> list[str]:
        """The fields of both sides."""
        return [name for name in self.sources[0].fields if not self.targets or name in self.targets[0].fields]

    @property
    def stacks(self) -> list[str]:
        """The fields of `sources` alone, numbers of stacks: the operation `stack` takes the last one first."""
        return [name for name in self.sources[0].fields if name not in self.shared]

    @property
    def unstacks(self) -> list[str]:
        """The fields of `targets` alone: the operation `unstack` makes the first one first."""
        return [name for name in self.targets[0].fields if name not in self.shared]

    @property
    def rows(self) -> list[int]:
        """The number of tensors that each operation makes, in each layer and of each number of a stack: a `split` as
        many as there are targets, or, before a `concat`, as one of both says; 0 if neither does."""
        rows, made = len(self.sources), []
        for place, operation in enumerate(self.operations):
            if isinstance(operation, Concat):
                rows = 1
            elif isinstance(operation, Split):
                later = next((one for one in self.operations[place + 1 :] if isinstance(one, Concat)), None)
                rows = len(self.targets) if later is None else len(operation.parts or later.parts)
            made.append(rows)
        return made

    @property
    def is_renaming(self) -> bool:
        """Whether each tensor only gets another name."""
        return not self.operations and len(self.targets) == 1


@dataclass(frozen=True, slots=True)
class KeyMap:
    """A key map: the models that it is for, patterns that recognise them, and its rules."""

    name: str
    title: str = ""
    model_types: tuple[str, ...] = ()
    needs_config: bool = False
    needs: tuple[NamePattern, ...] = ()
    never: tuple[NamePattern, ...] = ()
    rules: tuple[Rule, ...] = ()
    generated: Mapping[str, str] = field(default_factory=dict)  # by which version of which library, and when

    def fits(self, names: Sequence[str], config: Mapping[str, Any] | None) -> bool:
        """Return whether these are names of the producer, and the config, if there is one, is of such a model."""
        if self.generated:
            return self._begins(names)
        kind = (config or {}).get("model_type")
        if (kind is None and self.needs_config) or (kind is not None and kind not in self.model_types):
            return False
        has_all = all(one.is_one_of(names) for one in self.needs)
        return has_all and not any(one.is_one_of(names) for one in self.never)

    def _begins(self, names: Sequence[str]) -> bool:
        """Return whether some names are those that the rules begin with, and none is one that they only end with.

        A rule by which names stay says nothing: what it makes others of may have been made already.
        """
        old, new = (_any_of(name for rule in self.rules for name in side(rule)) for side in (_sources, _targets))
        begin = _any_of(name for rule in self.rules if rule.sources != rule.targets for name in rule.sources)
        after = (name for name in names if not old.fullmatch(name))
        return any(map(begin.fullmatch, names)) and not any(map(new.fullmatch, after))

    @property
    def inverse(self) -> KeyMap:
        """The map of the other direction. Raises UsageError for a rule that cannot be undone."""
        return KeyMap(f"{self.name} reversed", rules=tuple(_inverse(rule) for rule in self.rules))

    def data(self) -> dict[str, Any]:
        """Return the map as JSON has it."""
        head: dict[str, Any] = {"format": FORMAT, "name": self.name, "title": self.title}
        head |= {"generated": dict(self.generated), "model_types": [*self.model_types]}
        head |= {"needs_config": self.needs_config}
        head |= {key: [one.text for one in names] for key, names in (("needs", self.needs), ("never", self.never))}
        return {key: value for key, value in head.items() if value} | {"rules": [_data(rule) for rule in self.rules]}


_sources, _targets = attrgetter("sources"), attrgetter("targets")


def _any_of(names: Iterable[NamePattern]) -> re.Pattern[str]:
    return re.compile("|".join(re.sub(r"\?P<\w+>", "?:", name.pattern.pattern) for name in names), re.DOTALL)


def _inverse(rule: Rule) -> Rule:
    if not rule.targets:
        hint = "leave these tensors out with `--exclude`, and the rule out of the map"
        raise UsageError(f"the rule for `{rule.sources[0].text}` drops tensors and cannot be undone", hint=hint)
    return Rule(rule.targets, rule.sources, tuple(operation.inverse for operation in reversed(rule.operations)))


def _data(rule: Rule) -> dict[str, Any]:
    def text(names: Sequence[NamePattern]) -> Any:
        return names[0].text if len(names) == 1 else [one.text for one in names] or None

    done = [{one.name: one.data()} for one in rule.operations]
    return {"from": text(rule.sources), "to": text(rule.targets)} | ({"operations": done} if done else {})


# Parsing --------------------------------------------------------------------------------------------------------------


def parse(data: Any, where: str) -> KeyMap:
    """Parse a key map from its JSON. Raises UsageError, which names the file `where`."""
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise UsageError(
            f"`{where}`: a key map is an object with a list `rules`",
            hint='`{"format": 2, "name": "mine", "rules": [{"from": "blocks.{n}.w", "to": "model.layers.{n}.w"}]}`',
        )
    version = data.get("format", 1)
    if version not in (1, FORMAT):
        raise UsageError(
            f"`{where}`: format {shown(version)} of key maps is unknown", hint=f"this version reads 1 and {FORMAT}"
        )
    generated = data.get("generated", {})
    needs, never = (
        tuple(_name(text, where, wild=True) for text in _strings(data, key, where)) for key in ("needs", "never")
    )
    return KeyMap(
        str(data.get("name", where)),
        str(data.get("title", "")),
        tuple(_strings(data, "model_types", where)),
        bool(data.get("needs_config")),
        needs,
        never,
        tuple(_rule(rule, where, version) for rule in data["rules"]),
        {str(key): str(value) for key, value in generated.items()} if isinstance(generated, dict) else {},
    )


def _strings(data: Mapping[str, Any], key: str, where: str) -> list[str]:
    strings = data.get(key, [])
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise UsageError(f"`{where}`: `{key}` of a key map is a list of strings")
    return strings


def _rule(data: Any, where: str, version: int) -> Rule:
    rule = _parsed(data, where, version) if isinstance(data, dict) else None
    if rule is None:
        raise UsageError(
            f"`{where}`: {shown(data, limit=100)} is not a rule of a key map",
            hint=f"{_EXAMPLE}; `to` may be a list, or null to drop it; `operations` are a list",
        )
    return rule


def _parsed(data: Mapping[str, Any], where: str, version: int) -> Rule | None:
    old, new = data.get("from"), data.get("to")
    olds, news = _listed(old), _listed(new)
    if "to" not in data or not olds or (new is not None and not news):
        return None
    sources = tuple(_name(text, where) for text in olds)
    targets = tuple(_name(text, where) for text in news)
    # Each side has the same fields in all of its names.
    if any(len({frozenset(one.fields) for one in side}) > 1 for side in (sources, targets)):
        return None
    rows = data.get("rows") if version == 1 else None
    only_source, only_target = _own_fields(sources, targets), _own_fields(targets, sources)
    if not targets:
        return None if rows or data.get("operations") else Rule(sources, ())
    if rows not in (None, "halves") or any(f"{{{name}*}}" in olds[0] + news[0] for name in only_source + only_target):
        return None
    if (operations := data.get("operations")) is None:
        operations = _default(len(sources), len(targets), len(only_source), len(only_target), rows)
        return Rule(sources, targets, tuple(operations))
    parsed = [parse_operation(one) for one in operations] if isinstance(operations, list) else [None]
    known = tuple(one for one in parsed if one is not None)
    kinds = [type(one) for one in known]
    numbered = [kind for kind in kinds if kind in (Stack, Unstack)]
    fits = (
        numbered == [Stack] * len(only_source) + [Unstack] * len(only_target)
        and (len(sources) == 1 or Concat in kinds)
        and (len(targets) == 1 or Split in kinds)
    )
    rule = Rule(sources, targets, known)
    fits = fits and len(known) == len(parsed) and rule.rows[-1:] in ([], [len(targets)]) and 0 not in rule.rows
    return rule if fits else None


def _own_fields(side: Sequence[NamePattern], other: Sequence[NamePattern]) -> list[str]:
    others = other[0].fields if other else {}
    return [name for name in side[0].fields if name not in others] if side and other else []


def _default(sources: int, targets: int, stacks: int, unstacks: int, rows: str | None) -> Iterator[Operation]:
    """Yield the operations of a rule that names none: stacks first, then parts along the axis behind."""
    yield from [Stack(0)] * stacks
    if sources > 1:
        yield Concat(stacks)
    if rows:
        yield Rows(rows)
    if targets > 1:
        yield Split(unstacks)
    yield from [Unstack(0)] * unstacks


def _listed(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    return values if isinstance(values, list) and all(isinstance(one, str) for one in values) else []


def _name(text: str, where: str, *, wild: bool = False) -> NamePattern:
    seen: set[str] = set()
    pattern, end = "", 0
    for match in _FIELD.finditer(text):
        if match[1] in seen or not match[1].isidentifier():
            message = f"`{where}`: a number in {literal(text)} has no name of its own"
            raise UsageError(message, hint="write `{n}` for the first number of a name, `{m}` for the second")
        seen.add(match[1])
        pattern += _escaped(text[end : match.start()], wild) + f"(?P<{match[1]}>{_ANYTHING if match[2] else _DIGITS})"
        end = match.end()
    return NamePattern(text, re.compile(pattern + _escaped(text[end:], wild), re.DOTALL))


def _escaped(text: str, wild: bool) -> str:
    return ".*".join(map(re.escape, text.split("*"))) if wild else re.escape(text)


# Applying -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """The tensors that a rule makes others of, by their place in it: the number of the name, those of the stacks."""

    rule: Rule
    values: dict[str, str]
    members: dict[tuple[int, Ints], Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Mapped:
    """What a map made of tensors: them in order, the names that it has no rule for, and those that it dropped.

    `renamed` has the new names of those that only got another one, `made_of` the sources of all others, by new name.
    """

    tensors: list[Tensor]
    unknown: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    made_of: dict[str, list[str]] = field(default_factory=dict)


def apply(keymap: KeyMap, planned: Catalogue, viewed: Viewed, facts: Facts) -> tuple[Catalogue, list[str]]:
    """Return the model under the names of the map, in the same order, and the names that it has no rule for. `facts`
    are numbers of its config.

    Raises UsageError when two tensors would have one name, when operations do not fit a tensor, when one that a rule
    needs is missing, or when a fact is unknown.
    """
    mapped = map_tensors(keymap, planned.tensors, viewed, facts)
    return rebuilt(planned, mapped.tensors, {}), mapped.unknown


def map_tensors(keymap: KeyMap, tensors: Iterable[Tensor], viewed: Viewed, facts: Facts) -> Mapped:
    """Return what a map makes of tensors. Raises UsageError, as `apply` does."""
    tensors = list(tensors)
    order: list[_Group | Tensor] = []
    groups: dict[tuple[int, tuple[str, ...]], _Group] = {}
    mapped = Mapped([])
    for tensor in tensors:
        found = next(matches(keymap, tensor.name), None)
        if found is None:
            mapped.unknown.append(tensor.name)
            order.append(tensor)
            continue
        number, rule, place, values = found
        if not rule.targets:
            mapped.dropped.append(tensor.name)
            continue
        key = number, tuple(values[name] for name in rule.shared)
        if key not in groups:
            order.append(groups.setdefault(key, _Group(rule, values)))
        groups[key].members[place, tuple(int(values[name]) for name in rule.stacks)] = tensor
    new_path: dict[Path, Path] = {}
    for one in order:
        if isinstance(one, Tensor):
            mapped.tensors.append(one)
            continue
        if one.rule.is_renaming:
            old, new = one.members[0, ()], one.rule.targets[0].filled(one.values)
            mapped.tensors.append(derived(old, path=(new,)))
            mapped.renamed[old.name], new_path[old.path] = new, (new,)
            continue
        for tensor, sources in _apply_rule(keymap, one, viewed, facts):
            mapped.tensors.append(tensor)
            mapped.made_of[tensor.name] = [source.name for source in sources]
    unknown = set(mapped.unknown)
    kept = {tensor.path for tensor in tensors if tensor.name in unknown}
    mapped.tensors = [_aliased(tensor, new_path, kept) for tensor in mapped.tensors]
    _check_apart(mapped.tensors, keymap)
    return mapped


def matches(keymap: KeyMap, name: str) -> Iterator[tuple[int, Rule, int, dict[str, str]]]:
    """Yield the rules that are about a name, of which the first applies: its number, the rule, which of its sources the
    name is, and the values of the fields."""
    for number, rule in enumerate(keymap.rules):
        for place, source in enumerate(rule.sources):
            if match := source.pattern.fullmatch(name):
                yield number, rule, place, match.groupdict()


def _apply_rule(keymap: KeyMap, group: _Group, viewed: Viewed, facts: Facts) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the tensors that the operations of a rule make, each with those that it is made of."""
    rule, values = group.rule, group.values
    table, sources = _table(keymap, group)
    first = sources[0]
    try:
        for operation, rows in zip(rule.operations, rule.rows, strict=True):
            table = operation.apply(table, facts, rows)
    except UsageError as error:
        raise UsageError(
            f"key map `{keymap.name}`: `{first.name}` {list(first.shape)} to `{rule.targets[0].text}`: {error.message}",
            hint=error.hint or "`--map none` leaves the names as they are",
            **{**error.facts, "tensor": first.name},
        ) from None
    for numbers in table[0]:
        filled = values | dict(zip(rule.unstacks, map(str, numbers), strict=True))
        for target, row in zip(rule.targets, table, strict=True):
            path: Path = (target.filled(filled),)
            one = row[numbers]
            used = sorted({place for place, _ in one.pieces if place >= 0})
            places = {place: number for number, place in enumerate(used)}
            pieces = [piece._replace(tensor=places.get(piece.tensor, -1)) for piece in one.pieces]
            taken = [sources[place] for place in used]
            origin = viewed.view([tensor.origin or tensor for tensor in taken], path, one.shape, pieces, one.fold)
            yield replace(first, path=path, shape=one.shape, alias=None, origin=origin), taken


def _table(keymap: KeyMap, group: _Group) -> tuple[Table, list[Tensor]]:
    """Return the assemblies of the sources of a rule, and the sources. Raises UsageError if one is missing."""
    rule = group.rule
    lengths = [max(column) + 1 for column in zip(*(numbers for _, numbers in group.members), strict=True)]
    sources: list[Tensor] = []
    table: Table = []
    for place, source in enumerate(rule.sources):
        row: Row = {}
        for numbers in _indexes(lengths):
            tensor = group.members.get((place, numbers))
            if tensor is None:
                missing = source.filled(group.values | dict(zip(rule.stacks, map(str, numbers), strict=True)))
                raise UsageError(
                    f"key map `{keymap.name}`: there is no `{missing}`, from which `{rule.targets[0].text}` is made",
                    hint="`--map none` leaves the names as they are",
                    tensor=missing,
                )
            row[numbers] = Assembly.of(len(sources), tensor.shape)
            sources.append(tensor)
        table.append(row)
    if len({tensor.dtype for tensor in sources}) > 1:
        dtypes = sorted({tensor.dtype.name for tensor in sources})
        raise UsageError(
            f"key map `{keymap.name}`: `{rule.targets[0].text}` cannot be built from tensors of {' and '.join(dtypes)}",
            hint="tensors that become one have one dtype",
            tensor=sources[0].name,
        )
    return table, sources


def _indexes(lengths: Sequence[int]) -> Iterator[Ints]:
    """Yield all indexes of an array, the last number first. `itertools.product` keeps the numbers, and they may be
    those of a name with a number of any size."""
    if not lengths:
        yield ()
    for number in range(lengths[0]) if lengths else ():
        for rest in _indexes(lengths[1:]):
            yield (number, *rest)


def _aliased(tensor: Tensor, new_path: Mapping[Path, Path], kept: set[Path]) -> Tensor:
    """Untie a tensor from one that was made into others or dropped."""
    if tensor.alias is None:
        return tensor
    alias = new_path.get(tensor.alias, tensor.alias if tensor.alias in kept else None)
    return derived(tensor, alias=alias if tensor.path != alias else None)


def _check_apart(tensors: Iterable[Tensor], keymap: KeyMap) -> None:
    taken: dict[str, Tensor] = {}
    for tensor in tensors:
        other = taken.setdefault(tensor.name, tensor)
        if other is not tensor:
            both = some([(t.origin or t).name for t in (other, tensor)])
            raise UsageError(
                f"key map `{keymap.name}`: {both} would both be called `{tensor.name}`",
                hint="exclude one of them with `--exclude`",
                tensor=tensor.name,
            )
