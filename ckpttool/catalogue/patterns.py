"""The one grammar of patterns: a glob over the dotted full name in which `*` crosses dots, or `re:` and a regular
expression that must match the whole name. Pure."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable, Sequence
from operator import add

from ckpttool.errors import UsageError
from ckpttool.text import meant

_EXAMPLES = {
    "--rename": "write OLD=NEW, such as `--rename 'model.*=*'`",
    "--placements": "such as `'*.wq.weight=tp:0'`",
}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern. Raises UsageError for an invalid regular expression."""
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:])
        except re.error as error:
            raise UsageError(f"`{pattern}` is not a regular expression: {error}") from None
    return re.compile(fnmatch.translate(pattern))


def any_of(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate for names that match one of the patterns."""
    compiled = [compile_pattern(p) for p in patterns]
    return lambda name: any(c.fullmatch(name) for c in compiled)


def several(value: str | Sequence[str]) -> Sequence[str]:
    """Return a string as a sequence of one, and any other sequence as it is. Raises UsageError for what is no text."""
    values = [value] if value is None or isinstance(value, str) else value
    if wrong := [one for one in values if not isinstance(one, str)]:
        raise UsageError(f"names and patterns are of type `str`, not `{type(wrong[0]).__name__}`")
    return values


def rule(text: str, flag: str) -> tuple[str, str]:
    """Split `PATTERN=VALUE` into its two sides. Raises UsageError if there is no `=`."""
    left, equals, right = text.rpartition("=") if text.startswith("re:") else text.partition("=")
    if not equals or not left:
        hint = _EXAMPLES.get(flag, "such as `'*.norm.weight=float32'`")
        raise UsageError(f"`{flag} {text}` is not of the form PATTERN=VALUE", hint=hint)
    return left, right


def pattern_meant(pattern: str, names: Sequence[str], otherwise: str) -> str:
    """Return the hint for a pattern that matches none of the names: the one that matches the whole of names of which
    it is a part, a name that is like it, or `otherwise`."""
    if pattern in names and not pattern.startswith("re:"):
        return f"`[` begins a set of characters in a pattern: for that name, write `'{glob.escape(pattern)}'`"
    begins, ends = f"{pattern}.*", f"*.{pattern}"
    for whole in (begins, ends, f"*.{begins}") if not pattern.startswith("re:") else ():
        matches = [name for name in dict.fromkeys(names) if compile_pattern(whole).fullmatch(name)]
        if len(matches) == 1 and not re.search(r"[*?\[]", matches[0]):
            return f"did you mean `{matches[0]}`?"
        if matches:
            return f"a pattern matches whole names: did you mean `'{whole}'`?"
    return _expression_meant(pattern, names) or meant(pattern, [*dict.fromkeys(names)], otherwise)


def _expression_meant(pattern: str, names: Sequence[str]) -> str | None:
    """Return the hint for a glob that is a regular expression, or has braces as in a shell; None for any other."""
    if pattern.startswith("re:"):
        return None
    if "{" in pattern and "," in pattern:
        return "braces do not expand in a pattern: repeat the option, or write `re:` and a regular expression"
    if not re.search(r"\\.|[.\])][*+?]|[\^$|]", pattern):
        return None
    try:
        expression = re.compile(pattern)
    except re.error:
        return None
    whole = f"re:{pattern}" if any(map(expression.fullmatch, names)) else f"re:.*({pattern}).*"
    return f"for a regular expression, write `'{whole}'`" if any(map(expression.search, names)) else None


def renamer(rules: Sequence[str]) -> Callable[[str], str]:
    """Return a function that renames by the first matching `OLD=NEW` rule. In a glob, each `*` of NEW stands for what
    the same `*` of OLD matched; after `re:`, NEW is a replacement in Python's syntax (`\\1`). A rule without `*`
    renames that one name, or everything below it: `model.blk=model.layers` also renames `model.blk.0.weight`."""
    compiled = [_rename_rule(*rule(text, "--rename")) for text in rules]

    def rename(name: str) -> str:
        new = next((new for step in compiled if (new := step(name)) is not None), name)
        if name and not new:
            message = f"`--rename` leaves `{name}` no name"
            raise UsageError(message, hint="to leave a tensor out, use `--exclude`", tensor=name)
        return new

    return rename


def _glob_renamer(old: str, new: str) -> Callable[[str], str | None]:
    """Return what renames by a glob. As a regular expression with `(.*)` for each star, it would take exponential
    time."""
    between = new.split("*")
    # Between stars, each sign matches one character. What fnmatch makes of it is `(?s:...)\Z`.
    pieces = [re.compile(fnmatch.translate(text)[4:-3], re.DOTALL) for text in old.split("*")]

    def rename(name: str) -> str | None:
        stars = _stars(pieces, name)
        return None if stars is None else "".join(map(add, between, [*stars[: len(between) - 1], ""]))

    return rename


def _stars(pieces: Sequence[re.Pattern[str]], name: str) -> list[str] | None:
    """Return what each star between the pieces of a glob matches, the first as much as it can; None if the name does
    not match. From the last piece to the first, each is put as far right as it goes, and never moved again."""
    first, *others = pieces
    if not others:
        return [] if first.fullmatch(name) else None
    head, end = first.match(name), len(name)
    if head is None:
        return None
    stars: list[str] = []
    for number, piece in enumerate(reversed(others)):
        match = piece.match if number else piece.fullmatch  # the last piece ends where the name does
        found = next(filter(None, (match(name, at, end) for at in range(end, head.end() - 1, -1))), None)
        if found is None:
            return None
        stars += [name[found.end() : end]] if number else []
        end = found.start()
    return [name[head.end() : end], *reversed(stars)]


def _rename_rule(old: str, new: str) -> Callable[[str], str | None]:
    flag, leading = f"`--rename {old}={new}`", ""
    pieces = [piece.replace("\\", r"\\") for piece in new.split("*")]
    if old.startswith("re:"):
        pattern, template = compile_pattern(old), new
    elif not any(sign in old for sign in "*?["):
        if "*" in new:
            raise UsageError(f"{flag}: a `*` on the right stands for one on the left")
        pattern, template, leading = re.compile(re.escape(old) + r"(\..*)?", re.DOTALL), rf"{pieces[0]}\g<1>", "."
    else:
        if new.count("*") > old.count("*"):
            raise UsageError(f"{flag}: the right side has more `*` than the left")
        return _glob_renamer(old, new)

    def rename(name: str) -> str | None:
        match = pattern.fullmatch(name)
        try:
            return match.expand(template).lstrip(leading) if match else None
        except (re.error, IndexError) as error:
            raise UsageError(f"{flag}: {error}") from None

    return rename
