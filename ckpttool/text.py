"""Text for people: sizes and counts, names and near names, untrusted text made safe to print. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Sized
from itertools import islice
from math import prod

from ckpttool.errors import UsageError

_DECIMAL = ("kB", "MB", "GB", "TB", "PB")
_THOUSANDS = ("k", "M", "B", "T")
_UNITS = {"": 1, **{f"{p}{b}": 1000 ** (i + 1) for i, p in enumerate("KMGTP") for b in ("", "B")}, "B": 1} | {
    f"{p}I{b}": 1024 ** (i + 1) for i, p in enumerate("KMGTP") for b in ("", "B")
}
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?![^.])")  # of a layer: all that is between two dots
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})\s*", re.ASCII)


def size(nbytes: float) -> str:
    """Return `812 B`, `4.94 kB`, `12.9 GB`: thousands, as disks and `--max-shard-size` count."""
    return _scaled(nbytes, "B", _DECIMAL, " ")


def count(n: int) -> str:
    """Return `9,999`, `12.3k`, `6.74B`: how many parameters."""
    return f"{n:,}" if n < 10_000 else _scaled(n, "", _THOUSANDS, "")


def _scaled(value: float, unit: str, larger: tuple[str, ...], space: str) -> str:
    if value < 1000:
        return f"{value:,.0f}{space}{unit}".rstrip()
    for name in larger:
        value /= 1000
        # What would round to 1000 belongs to the next unit.
        if value < 999.5 or name == larger[-1]:
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{digits}f}{space}{name}"
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Return `0.04 s`, `12 s`, `3 min 4 s`, `1 h 2 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def with_rate(seconds: float, nbytes: float) -> str:
    """Return `0.04 s`, or `12 s, 1.2 GB/s` of what is enough to have a rate."""
    return duration(seconds) + (f", {size(nbytes / seconds)}/s" if seconds >= 1 and nbytes >= 1_000_000 else "")


def plural(n: int, word: str) -> str:
    """Return `1 tensor`, `2 tensors`, `1,250 tensors`."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def none_or(n: int, word: str) -> str:
    """Return `no tensor`, `1 tensor`, `2 tensors`."""
    return plural(n, word) if n else f"no {word}"


def is_or_are(things: Sized | int) -> str:
    """Return the verb of a sentence about one thing or several, or a number of them."""
    return "is" if (things if isinstance(things, int) else len(things)) == 1 else "are"


def parse_size(text: str, flag: str) -> int:
    """Return 5,000,000,000 for `5GB`, 536,870,912 for `512MiB`, 4096 for `4096`. Raises UsageError naming `flag`."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"`{flag} {text}` is not a size",
            hint="write a number of bytes, or one with a unit: 5GB, 1.5GB, 512MiB",
            found=text,
        )
    nbytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if nbytes < 1:
        raise UsageError(f"`{flag} {text}` is less than one byte", found=text)
    return nbytes


def near_names(name: str, names: Sequence[str], most: int = 3) -> list[str]:
    """Return the names most like `name`: those in other case, that end in it or hold it first, then by spelling."""
    import difflib

    same = [n for n in names if n.lower() == name.lower() and n != name]
    ends = [n for n in names if n.endswith("." + name)]
    holds = [n for n in names if name in n and n not in ends]
    return (same or ends + holds or difflib.get_close_matches(name, names, most))[:most]


def meant(name: str, names: Sequence[str], otherwise: str) -> str:
    """Return a hint for an unknown name: the nearest ones, or `otherwise` if none is near."""
    near = near_names(name, names)
    return f"did you mean {', '.join(f'`{n}`' for n in near)}?" if near else otherwise


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first few of many names, for a message."""
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def ranges(numbers: Iterable[int], comma: str = ", ", most: int = 8) -> str:
    """Return numbers in ascending order, those in a row as one range: `0-2, 5`. Of more than `most` ranges, those in
    the middle are left out."""
    rows: list[list[int]] = []
    for number in sorted(numbers):
        if rows and number == rows[-1][1] + 1:
            rows[-1][1] = number
        else:
            rows.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in rows]
    return comma.join(words if len(words) <= most else [*words[: most - 1], "...", words[-1]])


def without_numbers(name: str) -> str:
    """Return `layers.*.up` for `layers.0.up`: with `*` for each number between two dots."""
    return _NUMBER.sub("*", name)


def folded_name(names: Sequence[str], most: int = 8) -> str | None:
    """Return one name for several that differ in their numbers only, `layers.0-2.up`, with `most` ranges for each
    number; None unless all combinations of their numbers are there."""
    if len(names) == 1:
        return names[0]
    columns = [{*column} for column in zip(*map(_NUMBER.findall, names), strict=True)]
    if prod(map(len, columns)) != len(names):
        return None
    texts = (ranges(map(int, column), ",", most) for column in columns)
    return _NUMBER.sub(lambda _: next(texts), names[0])


def is_number(key: str) -> bool:
    """Return whether a key is the number of a layer or an expert."""
    return key.isdecimal() and key.isascii() and len(key) <= 9


def natural(name: str) -> list[tuple[str, int]]:
    """Return a key that sorts names with their numbers as numbers: `layers.2` before `layers.10`."""
    return [(text, int(number or -1)) for text, number in re.findall(r"([^0-9]*)([0-9]{0,18})", name)]


def rank_ranges(numbers: Collection[int]) -> str:
    """Return `rank 3`, `ranks 0-3`, `ranks 0, 2-5`."""
    return f"rank{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def safe(text: str) -> str:
    """Return `text` with everything that a terminal would not print as itself written as an escape."""
    if text.isprintable():
        return text
    # A lone surrogate has no escape in `unicode_escape`'s strict mode, hence the error handler.
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text
    )


def literal(text: str, limit: int = 72) -> str:
    """Return the first characters of a text as Python spells them, in quotes: what cannot be printed is escaped."""
    return repr(text if len(text) <= limit else text[: limit + 1])


def cut(text: str, limit: int) -> str:
    """Return `text`, or its beginning and `...` when it is longer than `limit`."""
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."


def csv_cell(text: str) -> str:
    """Return text for a cell of comma-separated values: safe to print, and no formula where a spreadsheet opens it:
    a leading apostrophe keeps it from being one."""
    shown = safe(text)
    return f"'{shown}" if shown.lstrip(" ").startswith(("=", "+", "-", "@")) else shown


def markdown_code(text: str) -> str:
    """Return text as code of Markdown, in which nothing is markup, for a sentence or the cell of a table."""
    shown = safe(text).replace("|", "\\|")  # which ends a cell within code too
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for a notebook, of at most 20 rows, with its title above it. All text is escaped."""
    from html import escape

    rest = iter(rows)
    cells = [[f"<td>{escape(safe(str(cell)))}</td>" for cell in row] for row in islice(rest, 20)]
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    omitted = sum(1 for _ in rest)
    more = f"<p>and {omitted:,} more</p>" if omitted else ""
    return f"<p>{escape(safe(title))}</p><table><tr>{head}</tr>{body}</table>{more}"
