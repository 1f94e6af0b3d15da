"""The one grammar of patterns: a glob over the dotted full name in which `*` crosses dots, or `re:` and a regular
expression that must match the whole name. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

from ckpttool.errors import UsageError


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
    """Return a string as a sequence of one, and any other sequence as it is."""
    return (value,) if isinstance(value, str) else value


def rule(text: str, flag: str) -> tuple[str, str]:
    """Split `PATTERN=VALUE` into its two sides. Raises UsageError if there is no `=`."""
    left, equals, right = text.rpartition("=") if text.startswith("re:") else text.partition("=")
    if not equals or not left:
        raise UsageError(f"`{flag} {text}` is not of the form PATTERN=VALUE")
    return left, right


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
        # fnmatch has no groups; what it makes of the text between stars is `(?s:...)\Z`.
        pattern = re.compile("(.*)".join(fnmatch.translate(text)[4:-3] for text in old.split("*")), re.DOTALL)
        template = pieces[0] + "".join(rf"\g<{n}>{piece}" for n, piece in enumerate(pieces[1:], 1))

    def rename(name: str) -> str | None:
        match = pattern.fullmatch(name)
        try:
            return match.expand(template).lstrip(leading) if match else None
        except (re.error, IndexError) as error:
            raise UsageError(f"{flag}: {error}") from None

    return rename
