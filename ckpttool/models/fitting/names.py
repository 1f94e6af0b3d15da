"""Compares the names, shapes and dtypes of two models. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.findings import DIFFERENCE, SUSPECT, Finding
from ckpttool.models.reference import Known
from ckpttool.text import folded_name, plural, without_numbers

_SUFFIX = 3  # keys of a name that tell which tensor it is, wherever the model hangs
# What is left of an adapter or of quantisation in a model that should have neither.
_OF_ADAPTER = re.compile(r"(.*\.)?(lora_\w+|base_layer|modules_to_save|adapter_\w+)(\..*)?")
_OF_QUANTISED = re.compile(
    r".*[._](scales?|scale_inv|absmax|quant_map|quant_state\S*|qzeros|g_idx|qweight|amax_history|zero_point|observer\S*)"
)
_WORDS = ("embed", "wte", "lm_head", "output", "tok_")
_GRAVITIES = ("prefix", "missing", "left over", "extra", "shape", "tie", "content", "dtype", "unknown")


class Mismatch(TypedDict):
    """Something in which a model does not fit the reference."""

    kind: str  #: `missing`, `extra`, `left over`, `prefix`, `shape`, `tie`, `content`, `dtype` or `unknown`
    message: str  #: what it is, for people
    names: list[str]  #: names of the tensors
    found: str | None  #: what the checkpoint has
    expected: str | None  #: what the reference has
    fails: bool  #: whether the model does not fit because of it; a dtype is no reason, but integers without scales are


def mismatch(
    kind: str,
    message: str,
    names: Sequence[str] = (),
    found: str | None = None,
    expected: str | None = None,
    fails: bool = True,
) -> Finding:
    """Return a mismatch as a finding. Pure."""
    gravity = DIFFERENCE if fails else SUSPECT
    return Finding(gravity, kind, message, names=names, found=found, expected=expected)


def order(finding: Finding) -> tuple[int, str]:
    """Return the place of a mismatch among others: the gravest first. Pure."""
    return _GRAVITIES.index(finding.kind), finding.message


Model = Mapping[str, Known]


def without_prefix(model: Model, reference: Model) -> tuple[dict[str, str], Finding | None]:
    """Return the name in the reference that each name of the model would have if all of them had another prefix, and
    the finding that this is. Where the names fit, they are returned as they are."""
    same = {name: name for name in model}
    fitting = sum(name in reference for name in model)
    if 2 * fitting >= min(len(model), len(reference)):
        return same, None
    ends: dict[tuple[str, Ints], list[str]] = defaultdict(list)
    for name, known in reference.items():
        ends[_end(name), known.shape].append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name, known in model.items():
        for other in ends.get((_end(name), known.shape), ())[:8]:
            votes[_prefixes(name, other)] += 1
    if not votes:
        return same, None
    (old, new), count = votes.most_common(1)[0]
    if old == new or 2 * count < len(reference):
        return same, None
    renamed = same | {name: _with_prefix(name, old, new, reference) for name in model if name.startswith(old)}
    what = f"names begin with `{old}`" if old else "names have no prefix"
    where = f"with `{new}`" if new else "without one"
    message = f"{what}, and those of the reference {where}: {plural(count, 'tensor')}"
    return renamed, mismatch("prefix", message, [], old, new)


def _with_prefix(name: str, old: str, new: str, reference: Model) -> str:
    rest = name.removeprefix(old)
    return rest if rest in reference else new + rest


def _end(name: str) -> str:
    return ".".join(name.split(".")[-_SUFFIX:])


def _prefixes(name: str, other: str) -> tuple[str, str]:
    a, b = name.split("."), other.split(".")
    while a and b and a[-1] == b[-1]:
        del a[-1], b[-1]
    return "".join(f"{key}." for key in a), "".join(f"{key}." for key in b)


def mismatches(model: Model, reference: Model, *, ties_words: bool | None) -> Iterator[Finding]:
    """Yield in what a model, under the names of the reference, differs from it."""
    missing = [
        name for name in reference if name not in model and not _is_tied_away(name, model, reference, ties_words)
    ]
    extra = [name for name in model if name not in reference and not _is_tied_away(name, reference, model, ties_words)]
    left = [name for name in extra if is_left_over(name)]
    yield from _folded("missing", missing, lambda name: ("", _text(reference[name])), "is missing", "are missing")
    text = "is left of an adapter or of quantisation", "are left of an adapter or of quantisation"
    yield from _folded("left over", left, lambda name: (_text(model[name]), ""), *text)
    more = [name for name in extra if name not in {*left}]
    text = "is not in the reference", "are not in the reference"
    yield from _folded("extra", more, lambda name: (_text(model[name]), ""), *text)
    both = [name for name in model if name in reference]
    shapes = [name for name in both if model[name].shape != reference[name].shape]
    yield from _folded("shape", shapes, lambda name: (_shape(model[name]), _shape(reference[name])), "", "", _why)
    dtypes = [name for name in both if reference[name].dtype and model[name].dtype != reference[name].dtype]
    for (found, expected), names in _grouped(dtypes, lambda name: (model[name].dtype, reference[name].dtype)):
        message = f"{plural(len(names), 'tensor')}: {found}, and {expected} in the reference"
        is_float = expected.startswith(("float", "bfloat"))
        # With what is left of their scales, the model does not fit in any case.
        is_code = is_float and not left and found.startswith(("int", "uint"))
        if is_code:
            message += ": codes of quantised weights, whose scales are missing"
        elif is_float and not left and found.startswith("float8") and not expected.startswith("float8"):
            message += ": right if they were cast, wrong if they were quantised, as there are no scales; "
            message += "`--content` compares the values"
        yield mismatch("dtype", message, names, found, expected, fails=is_code)
    yield from _ties(model, reference, ties_words)


def is_left_over(name: str) -> bool:
    """Return whether a name is that of an adapter's tensor, or of what belongs to a quantised weight. Pure."""
    return is_scale(name) or _OF_ADAPTER.fullmatch(name) is not None


def is_scale(name: str) -> bool:
    """Return whether a name is that of what belongs to a quantised weight, such as its scale. Pure."""
    return _OF_QUANTISED.fullmatch(name) is not None


def _is_tied_away(name: str, model: Model, other: Model, ties_words: bool | None) -> bool:
    """Return whether a tensor that a model does not have is one of its others: tied weights are stored once."""
    tied_to = other[name].tied_to
    if tied_to is not None and tied_to in model:
        return True
    twins = [twin for twin, known in other.items() if known.tied_to == name]
    if any(twin in model for twin in twins):
        return True
    return bool(ties_words) and _is_head(name)


def _is_head(name: str) -> bool:
    return name in ("lm_head.weight", "output.weight") or name.endswith(".lm_head.weight")


def _ties(model: Model, reference: Model, ties_words: bool | None) -> Iterator[Finding]:
    for name in filter(_is_head, model):
        if ties_words and model[name].tied_to is None and name not in reference:
            text = f"`{name}` has bytes of its own, and the reference ties it to the embedding"
            yield mismatch("tie", f"{text}: compare them with `ckpttool diff`", [name], "untied", "tied", fails=False)
        if ties_words is False and model[name].tied_to is not None:
            text = f"`{name}` is `{model[name].tied_to}`, and the reference does not tie them"
            yield mismatch("tie", text, [name], "tied", "untied")


def _grouped(names: Iterable[str], key: Callable[[str], tuple[str, str]]) -> list[tuple[tuple[str, str], list[str]]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return list(groups.items())


def _folded(
    kind: str,
    names: Sequence[str],
    texts: Callable[[str], tuple[str, str]],
    one: str,
    many: str,
    why: Callable[[str, str, str], str] | None = None,
) -> Iterator[Finding]:
    """Yield one mismatch for all names that differ in their numbers only."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in names:
        groups.setdefault((without_numbers(name), *texts(name)), []).append(name)
    for (pattern, found, expected), members in groups.items():
        name = folded_name(members, 4) or pattern
        if why is not None:
            text = why(pattern, found, expected)
        else:
            text = f"{one if len(members) == 1 else many} ({found or expected})"
        count = f" ({plural(len(members), 'tensor')})" if len(members) > 1 else ""
        yield mismatch(kind, f"`{name}`{count} {text}", members, found or None, expected or None)


def _why(pattern: str, found: str, expected: str) -> str:
    have, want = found.strip("[]").split(", "), expected.strip("[]").split(", ")
    text = f"has shape {found}, and {expected} in the reference"
    if len(have) == len(want) == 2 and have == want[::-1]:
        return f"{text}: it is transposed"
    if len(have) == len(want) and have[1:] == want[1:] and any(word in pattern for word in _WORDS):
        what = "padded" if int(have[0]) > int(want[0]) else "trimmed"
        return f"{text}: the vocabulary is {what}"
    return text


def _shape(known: Known) -> str:
    return str(list(known.shape))


def _text(known: Known) -> str:
    return f"{known.dtype} {list(known.shape)}".strip()
