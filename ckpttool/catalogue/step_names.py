"""Which number in the names of files and folders is the step. Pure.

step_100  epoch=3-step=900.ckpt  7epoch.pth       a word says it
checkpoint_3_900.pt  3-900/                       of an epoch and a step, the larger count is the step
epoch_1_iter_900.pt  epoch_2_iter_50.pt  e1_b900   within an epoch: both order checkpoints, and neither is the step
G_100.pth G_200.pth D_100.pth                     the number in which names that are alike differ
CKPT+2026-01-02+03-04-01+00                       a time, which orders checkpoints and is not a step
ema_0.9999_100.pt  ckpt_100_rank0.pt  model-00001-of-00002.bin      a rate, a rank and a shard are not steps
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from posixpath import commonprefix
from typing import Any, NamedTuple

_BEFORE, _AFTER = r"(?:^|[^a-z])(?:{})[-_=.]?(\d+)", r"(?:^|[^a-z\d.])(\d+)[-_]?(?:{})(?![a-z])"
_STEP, _EPOCH = r"(?:global_?)?steps?|iter|iteration|updates?", r"epoch|ep|round"
_SAVE = r"checkpoint|ckpt|ckp|chkpnt|snapshot|backup|weights"


def _patterns(*spelt: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE) for pattern in spelt)


# Words that count steps, and words that count something else where nothing counts steps.
STEPS = _patterns(_BEFORE.format(_STEP), _BEFORE.format("ba"), _AFTER.format(f"{_STEP}|iters"))
EPOCHS = _patterns(_BEFORE.format(_EPOCH), _AFTER.format("epochs?"), r"(?:^|[^a-z])e(\d+)_b\d+")
_BATCH = _patterns(r"(?:^|[^a-z])e\d+_b(\d+)")
WORDS = (*STEPS, *_BATCH, *EPOCHS)
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")
# Without a word that says what it counts, a small number may be of epochs.
_COUNT = r"(0\d{4,}|[1-9]\d\d+)"
_LARGE = _patterns(rf"(?:{_SAVE})[-_=]?{_COUNT}(?![\da-z])", rf"^{_COUNT}$", r"(?<!\d)(0\d{5,})(?![\da-z])")
NUMBERS = (*STEPS, *_patterns(_BEFORE.format(_SAVE), r"^(\d+)$"), *EPOCHS, *_patterns(_AFTER.format(_SAVE)), _LARGE[2])
# What is measured, and no count: `net_loss=-3.pt`. `reward_100.pt` may be a network of that name.
MEASURED = re.compile(
    r"(?<![a-z])(?:(?:loss|acc|accuracy|psnr|ssim|fid|bleu|ppl|perplexity|m?iou|auc|wer|cer|mae|r?mse)(?:=-?|[-_.]?)"
    r"|(?:metric|score|reward|return|error|map)=-?)\d+(?:\.\d+)?(?:e[-+]\d+)?",
    re.IGNORECASE,
)
# The layer in the name of a tensor: `weights/0.weight.npy`.
OF_TENSOR = re.compile(r"(?<![\w-])\d+(?=(?:\.\w+)*\.(?:weight|bias|running_\w+|num_batches_tracked)\.)")
# What has numbers and is not a step; a fraction may be the end of a name and its suffix: `model.0002.pth`.
_NO_STEPS = re.compile(
    rf"\d{{5}}-of-\d{{5}}|{OF_TENSOR.pattern}|"
    r"(?<![a-z\d])\d+\.\d+(?![\da-z])|"
    r"(?:rank|shard|world_?size|seed|port|(?<![a-z])(?:[dtpsm]p|ep(?=\d+[-_.][dtpsm]p)|(?<=[dtpsm]p\d[-_.])ep|sdp|v|lr|of|bs))[-_=.]?\d+"
    rf"|{MEASURED.pattern}",
    re.IGNORECASE,
)
# What numbers the parts of a checkpoint, or is a step: `optimizer_1.pt`, `optimizer_100.pt` beside `model_100.pt`.
_PARTS = re.compile(r"(?:layer|block|stage|expert|fold|optim|optimizer)[-_]?\d+", re.IGNORECASE)
_SEVERAL = re.compile(r"(?<![a-z])(?:agent|actor|critic|policy|player|member|head|worker|qf?)[-_]?\d", re.IGNORECASE)
_RENAMED = re.compile(r"\.\d+$")
_NUMBERED = re.compile(r".*(?=\.)")
# A day, with the time of day if one follows; or the seconds since 1970.
_TIME = re.compile(
    r"(?<!\d)20\d\d[-_+.]?[01]\d[-_+.]?[0-3]\d(?:[-_+.T ]+\d\d(?:[-_+.:h]\d\d(?:[-_+.:m]\d\d)?|\d{4}))?(?!\d)"
    r"|(?<!\d)(?<!(?:step|iter)[-_=])1[5-9]\d{8}(?!\d)"
)
_NUMBER = re.compile(r"\d+")
# An epoch and a step, in either order.
_PAIR = re.compile(rf"(?:(?:^|[^a-z])(?:{_SAVE})[-_=]?|^)(\d+)[-_](\d+)(?![\da-z])", re.IGNORECASE)


class Place(NamedTuple):
    """Where a name stands among others: `Place((1000,), 1000)`; of what is not a step, `Place((2, 50), None)`."""

    order: tuple[int, ...]
    step: int | None


def step_in(name: str, patterns: Sequence[re.Pattern[str]] = NUMBERS) -> int | None:
    """Return the step in a name: `epoch=0-step=100.ckpt` -> 100; None for a name without one."""
    plain = _masked(name)
    if patterns is NUMBERS and (pair := _PAIR.search(plain)) and not any(word.search(plain) for word in WORDS):
        return max(int(pair[1]), int(pair[2]))
    return next((int(match[1]) for pattern in patterns if (match := pattern.search(plain))), None)


def step_said(path: str) -> int | None:
    """Return the step of which a word in a path says that it is one, in the last part that does: `step-5/model.pt`,
    `checkpoint-5`; None without one."""
    said = (step_in(part, (*WORDS, _CHECKPOINT)) for part in reversed(path.rstrip("/").split("/")))
    return next((step for step in said if step is not None), None)


def facts_of(*groups: Iterable[str]) -> dict[str, Any]:
    """Return what all names of a group say: `step` and `epoch` by a word, a `number` that may be one, all `numbers`."""
    facts: dict[str, Any] = {"numbers": ()}
    for stems in ([_stem(_TIME.sub("", name.rpartition("/")[2])) for name in names] for names in groups):
        steps, numbers, epochs = ({step_in(stem, of) for stem in stems} for of in (STEPS, _LARGE, EPOCHS))
        for fact, found in (("step", steps), ("number", numbers if epochs == {None} else {None}), ("epoch", epochs)):
            if len(found) == 1 and found != {None}:
                facts.setdefault(fact, *found)
        common = [{*map(int, _NUMBER.findall(_masked(stem)))} for stem in stems]
        facts["numbers"] += tuple(set.intersection(*common)) if common else ()
    return facts


def time_in(name: str) -> int | None:
    """Return the digits of the time of day in a name, which order checkpoints; None for a name without one."""
    match = _TIME.search(name)
    return int("".join(_NUMBER.findall(match[0]))) if match is not None else None


def without_times(name: str) -> str:
    """Return a path with a `*` in place of a folder that is named by a time, and of the time in the name of a file."""
    *folders, last = name.split("/")
    folders = ["*" if _TIME.search(folder) is not None else folder for folder in folders]
    return "/".join([*folders, re.sub(rf"({_TIME.pattern})([-_.]?\d+)*", "*", last)])


def places_of(names: Iterable[str]) -> dict[str, Place]:
    """Return the places of names that lie beside each other; a name without one is left out. A word decides, else the
    number in which names that are alike differ: not if it counts from 0, as ranks and layers do."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in (names := [*names]):
        alike[_NUMBER.sub("#", _masked(name))].append(name)
    places: dict[str, Place] = {}
    undecided: list[list[str]] = []
    for group in alike.values():
        stems = {name: _stem(OF_TENSOR.sub("x", name.rstrip("/").rpartition("/")[2])) for name in group}
        said, spelt = (
            {n: s for n, stem in stems.items() if (s := step_in(stem, of)) is not None} for of in (WORDS, NUMBERS)
        )
        epochs = {name: epoch for name, stem in stems.items() if (epoch := step_in(stem, EPOCHS)) is not None}
        first, column = _columns(group)
        # Of an epoch there may be several: `checkpoint_1_100.pt checkpoint_1_200.pt`.
        found = said or (column if len({*column.values()}) > len({*spelt.values()}) else spelt)
        within = epochs if said else first if _is_even(first.values()) else {}
        if not (said or spelt) and _are_parts(column, group, names):
            continue
        if within.keys() == found.keys() and not _agree(within, found):
            places |= {name: Place((within[name], found[name]), None) for name in found}
        elif found:
            places |= {name: Place((step,), step) for name, step in found.items()}
        elif times := {name: time for name in group if (time := time_in(name)) is not None}:
            places |= {name: Place((time,), None) for name, time in times.items()}
        else:
            undecided.append(group)
    known = {place.step for place in places.values()}
    for group in undecided:
        # One that has no brother goes with those of the same number, as all do that are called alike.
        numbers = [{int(number) for number in _NUMBER.findall(_masked(name))} & known for name in group]
        if all(len(of_name) == 1 for of_name in numbers):
            places |= {name: Place((step,), step) for name, (step,) in zip(group, numbers, strict=True)}
    return places


def _are_parts(column: Mapping[str, int], group: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether a number counts from 1 what a checkpoint has several of: by its name, or beside a file that has no
    number: `actor.pt critic_1.pt critic_2.pt`; or how often a file was renamed: `last.pt last.pt.1`."""
    is_renamed = all(_RENAMED.search(name) and _RENAMED.sub("", name) in names for name in group)
    if is_renamed and max(column.values(), default=0) <= 2 * len(column):
        return True
    if sorted(column.values()) != [*range(1, len(column) + 1)]:
        return False
    suffix = _NUMBERED.sub("", group[0])
    beside = (name for name in names if name.endswith(suffix) and not _NUMBER.search(name))
    return _SEVERAL.search(group[0]) is not None or any(suffix and name not in group for name in beside)


def _agree(epochs: Mapping[str, int], steps: Mapping[str, int]) -> bool:
    """Return whether epochs neither fall as steps grow, nor grow without them: each has steps of its own."""
    pairs = sorted((steps[name], epoch) for name, epoch in epochs.items())
    return all(a <= b and (step < other or a == b) for (step, a), (other, b) in pairwise(pairs))


def _is_even(numbers: Iterable[int]) -> bool:
    """Return whether numbers count something: they are equally far from each other."""
    steps = sorted({*numbers})
    return len({b - a for a, b in pairwise(steps)}) < 2


def _stem(name: str) -> str:
    """Return a name without its suffixes: `0000100.pth.tar` is a number and nothing else."""
    return re.sub(r"(\.[a-z_]*[a-z][a-z_]*\d?)+$", "", name, flags=re.IGNORECASE)


def _masked(name: str, patterns: Sequence[re.Pattern[str]] = (_TIME, _NO_STEPS)) -> str:
    """Return a name with letters in place of the digits of what is not a step, and `200k` in full."""
    for pattern in patterns:
        name = pattern.sub(lambda match: re.sub(r"\d", "x", match[0]), name)
    return re.sub(r"(?<=\d)k(?![a-z\d])", "000", name)


def _columns(names: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers in which names differ that are alike: of several, the first, and the one that grows most."""
    rows = [[int(n) for n in _NUMBER.findall(_masked(name, (_TIME, _NO_STEPS, _PARTS)))] for name in names]
    columns = [one for one in zip(*rows, strict=True) if len({*one}) > 1 and {*one} != {*range(max(one) + 1)}]
    most = max(columns, key=max, default=())
    first = next((one for one in columns if one is not most), ())
    return dict(zip(names, first, strict=False)), dict(zip(names, most, strict=False))


def pattern_of(names: Sequence[str], others: Iterable[str]) -> str | None:
    """Return the shortest glob pattern that matches some names and none of the others; None if no simple one does."""
    numbers = sorted({number for name in names for number in _NUMBER.findall(name)}, key=len, reverse=True)
    begin, end = commonprefix(names), commonprefix([name[::-1] for name in names])[::-1]
    candidates = [f"{_escaped(begin)}*{_escaped(end)}"]
    depths = {name.count("/") for name in names}
    above = "*/" * depths.pop() if len(depths) == 1 else ""  # of files in folders: `models/100.pth states/100.state`
    for number in (n for n in numbers if all(n in name for name in names)):
        inside = (f"*{number}*{_escaped(end)}", f"*{number}*", f"{number}*", f"*[!0-9]{number}[!0-9]*")
        candidates += [f"{above}{one}" for one in inside]
    rest = [*others]
    for candidate in candidates:
        matches = re.compile(_as_regex(candidate)).fullmatch
        if all(map(matches, names)) and not any(map(matches, rest)):
            return candidate
    return None


def _as_regex(pattern: str) -> str:
    parts = re.split(r"(\[[^]]*\]|\*)", pattern)
    return "".join({"*": "[^/]*"}.get(p, p.replace("[!", "[^") if p[:1] == "[" else re.escape(p)) for p in parts)


def _escaped(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)
