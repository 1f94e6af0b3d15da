"""Selects and renames what people name: the options of `convert`, `reshard`, `export`, `diff` and `stats`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Part
from ckpttool.catalogue.patterns import any_of, pattern_meant, renamer, rule
from ckpttool.errors import UsageError
from ckpttool.layout import select
from ckpttool.layout.rename import rename_entries, strip_wrappers
from ckpttool.text import some


@dataclass(frozen=True, slots=True)
class Selection:
    """Options that select and rename: `Selection(only=("model",), rename=("blocks=layers",))`."""

    only: Sequence[str] = ()
    drop: Sequence[str] = ()
    tensors: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    strip_wrappers: bool = False
    strip_prefix: str | None = None

    def wanted_parts(self, source: Catalogue, other: Catalogue | None = None) -> Callable[[Part], bool]:
        """Return whether `--only` and `--drop` leave a part of the source in. Raises UsageError for one that neither
        has."""
        is_selected = parts.matcher(self.only, source, other, single=True) if self.only else lambda part: True
        is_dropped = parts.matcher(self.drop, source, other)
        return lambda part: is_selected(part) and not is_dropped(part)


def check_matches(flag: str, patterns: Sequence[str], *planned: Catalogue) -> None:
    """Raise UsageError for a pattern that matches no name: a misspelled one would select the wrong entries."""
    for pattern in patterns:
        if not select.matched([pattern], *planned):
            names = [entry.source_name for catalogue in planned for entry in catalogue.entries.values()]
            raise _matches_nothing(f"`{flag} {pattern}` matches nothing", pattern, names)


def _matches_nothing(message: str, text: str, names: Sequence[str]) -> UsageError:
    example = f"names here are like `{names[len(names) // 2]}`" if names else "nothing is left"
    return UsageError(
        message, hint=pattern_meant(text, names, f"{example}; `ckpttool inspect --tensors '*'` lists them")
    )


def filtered(selection: Selection, *planned: Catalogue) -> list[Catalogue]:
    """Return the entries that `--tensors` and `--exclude` leave of each. Raises UsageError as `check_matches` does."""
    check_matches("--tensors", selection.tensors, *planned)
    check_matches("--exclude", selection.exclude, *planned)
    if not selection.tensors and not selection.exclude:
        return [*planned]
    is_wanted = select.matching(selection.tensors, selection.exclude, *planned)
    return [select.select(one, is_wanted) for one in planned]


def stripper(selection: Selection, *planned: Catalogue) -> Callable[[str], str]:
    """Return what `--strip-wrappers` and `--strip-prefix` make of the name of a parameter. Raises UsageError for a
    prefix that none has."""
    strip: Callable[[str], str] = strip_wrappers if selection.strip_wrappers else str
    if not selection.strip_prefix:
        return strip
    prefix = selection.strip_prefix.rstrip(".") + "."
    if not any(strip(tensor.fqn).startswith(prefix) for one in planned for tensor in one.tensors):
        names = [strip(tensor.fqn) for one in planned for tensor in one.tensors if tensor.part.kind == "model"]
        firsts = [*dict.fromkeys(name.partition(".")[0] for name in names)]
        hint = f"names in the model begin with {some(firsts)}" if firsts else None
        raise UsageError(f"`--strip-prefix {selection.strip_prefix}`: no tensor of a model has this prefix", hint=hint)
    return lambda name: strip(name).removeprefix(prefix)


def check_dtypes(dtype: Sequence[str], planned: Catalogue) -> None:
    """Raise UsageError for a rule of `--dtype` whose pattern matches no name."""
    names = [entry.name for entry in planned.entries.values()]
    for pattern in [rule(text, "--dtype")[0] for text in dtype if "=" in text]:
        if not any(map(any_of([pattern]), names)):
            raise _matches_nothing(f"`--dtype {pattern}` matches nothing", pattern, names)


def renamed_by(planned: Catalogue, rename: Sequence[str]) -> Catalogue:
    """Return the entries under the names that the rules of `--rename` give. Raises UsageError for a rule that changes
    none, or for names that collide."""
    for text in rename:
        step, names = renamer([text]), [entry.name for entry in planned.entries.values()]
        if all(step(name) == name for name in names):
            error = _matches_nothing(f"`--rename {text}` changes no name", text, names)
            if re.search(r"\(\.|\.\*\)|\\[1-9d]|\$|\^", text):
                error.hint = "a rule is not a regular expression: `*` captures, `'layers.*.w=blocks.*.w'`"
            elif (whole := _whole_rule(*rule(text, "--rename"), names)) is not None:
                error.hint = f"a rule matches whole names: did you mean `--rename '{whole}'`?"
            raise error
    return rename_entries(planned, renamer(rename)) if rename else planned


def _whole_rule(old: str, new: str, names: Sequence[str]) -> str | None:
    """Return the rule that replaces `old` where it is within names; None if it is within none. Pure."""
    if "*" in old + new or old.startswith("re:"):
        return None
    for around in ("*.{}.*", "*.{}", "{}.*"):
        step = renamer([whole := f"{around.format(old)}={around.format(new)}"])
        if any(step(name) != name for name in names):
            return whole
    return None


def check_not_empty(planned: Catalogue, source: Catalogue) -> None:
    """Raise UsageError where everything was excluded; a checkpoint of nothing is one."""
    if not planned.entries and source.entries:
        raise UsageError("nothing is left to write", hint="`ckpttool inspect` lists what there is")
