"""Which step of training a checkpoint is of: its counters, under the names that people give them. Pure.

trainer_state.global_step  iter_num  meta.iter  optim.training_step        steps, the best name first
optim.state.0.step  ema.updates                                            how often an optimizer or an average ran
epoch  last_epoch  train_state.epochs_run                                  epochs, which are not steps
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

from ckpttool.catalogue.entries import Catalogue, Entry, Object, Part, Tensor, dotted
from ckpttool.catalogue.shown import numpy_scalar
from ckpttool.catalogue.values import Stub
from ckpttool.errors import CkptError

READ = "counters"
"""The fact of the values of tensors that `unread` names, by their paths."""
NUMBER = "number"
"""The fact of a number in the name of the checkpoint that may be its step, without a word for it."""
NUMBERS = "numbers"
"""The fact of all numbers in the name."""
EPOCH = "epoch"
"""The fact of a number in the name that a word calls an epoch."""
FACTS = (EPOCH, READ, NUMBER, NUMBERS)
_LARGE = 1 << 20  # an object of more bytes is not a number
_PLAIN = (
    r"global_steps?|Timestamp\.batch",
    r"((current|train|training|trained|last_train)_)?steps?",
    "num_steps|steps_run|global_batch_step|num_updates|updates?|batch_idx_train|batch_num_total",
)
# What may count micro-batches or samples: a name that says the step comes before it.
_STEP = (*_PLAIN, r"(cur_|current_)?(iterations?|iters?|itrs?)|iter_(num|step)|it|ite", r"total_steps?|step_count")
# By the kind of the part, the best name first. An optimizer and an average count their own updates, which come last.
_STEPS = {"progress": _STEP, "other": _STEP, "optimizer": ("global_step|training_step|num_updates|iteration",)}
_OWN = {"optimizer": "step", "model": "(num_)?updates"}
_ENDS = {"step", "ates"}  # of these names, which few of a million tensors have
_EPOCH = ("(current_)?epoch(_number)?", "(last|finished)_epoch|epochs_(run|completed)", "start_epoch|epochs")
_EPOCHS = {"progress": _EPOCH, "other": _EPOCH}
# What somebody set, and did not count.
_SET = r"(.*_)?(config|cfg|args|arguments|hparams|hyper_?parameters|kwargs|settings)(_\w+)?"

_Rank = tuple[int, int, int]  # by the part, the name and the depth


@cache
def _pattern(names: str) -> re.Pattern[str]:
    return re.compile(rf"(?:.*[./])?(?:{names})", re.IGNORECASE | re.DOTALL)


def _is(key: str, names: str) -> bool:
    return _pattern(names).fullmatch(key) is not None


def step(catalogue: Catalogue) -> float | None:
    """Return the step: of a counter or as many as the optimizers made updates, if the name of the checkpoint says the
    same; else of the counter with the best name, else in the name of the checkpoint, before which no counter comes that
    may count micro-batches (`iter`); else the number of updates.

    A number in the name that no word calls a step may be an epoch: one that a counter says, or of fewer steps than the
    optimizers made updates.
    """
    ranked, own, facts = _ranked(catalogue), _own(catalogue), catalogue.facts
    counted = [number for _, number in ranked]
    named, number = facts.get("step"), facts.get(NUMBER)
    plain = [number for (_, name, _), number in ranked if name < len(_PLAIN)]
    plain += [named] if isinstance(named, int) else []
    epochs = _counted(catalogue, _EPOCHS)
    if number is not None and (own is None or own <= number) and all(abs(one - number) > 1 for one in epochs):
        named = named if isinstance(named, int) else number
    agreed = (count for count in (*counted, own) if count in facts.get(NUMBERS, ()))
    numbers = (*agreed, *plain, *counted, named if isinstance(named, int) else None, own)
    return next((number for number in numbers if number is not None), None)


def is_step(entry: Entry) -> bool:
    """Return whether an entry counts the steps of all of training, by its name."""
    is_progress = entry.part.kind == "progress" and 0 < len(entry.path) <= 2
    return is_progress and any(_is(str(entry.path[-1]), names) for names in _STEP)


def unread(catalogue: Catalogue) -> list[Tensor]:
    """Return the tensors of one number that `step` has to know: none where an object and the name say the same."""
    counted, facts = _counted(catalogue), catalogue.facts
    if counted and (counted[0] in facts.get(NUMBERS, ()) or not facts.keys() & {"step", NUMBER, NUMBERS}):
        return []
    rank = min((rank for rank, entry in _counters(catalogue) if isinstance(entry, Tensor)), default=None)
    counters = (entry for of_rank, entry in _counters(catalogue) if of_rank == rank)
    return [entry for entry in (*counters, *_of_updates(catalogue)) if isinstance(entry, Tensor)]


def epoch(catalogue: Catalogue) -> int | None:
    """Return the epoch: of a counter, else in the name of the checkpoint."""
    numbers = [*_counted(catalogue, _EPOCHS), catalogue.facts.get(EPOCH)]
    return next((number for number in numbers if isinstance(number, int) and number >= 0), None)


def _counted(catalogue: Catalogue, names: Mapping[str, Sequence[str]] = _STEPS) -> list[float]:
    return [number for _, number in _ranked(catalogue, names)]


def _ranked(catalogue: Catalogue, names: Mapping[str, Sequence[str]] = _STEPS) -> list[tuple[_Rank, float]]:
    """Return the numbers of the counters with their ranks, the best name first, and of one name the highest."""
    known = ((rank, _number(catalogue, entry)) for rank, entry in _counters(catalogue, names))
    numbers = ((rank, number) for rank, number in known if number is not None)
    return sorted(numbers, key=lambda one: (one[0], -one[1]))


def _counters(catalogue: Catalogue, of_kinds: Mapping[str, Sequence[str]] = _STEPS) -> Iterator[tuple[_Rank, Entry]]:
    """Yield what may count steps, each with its rank: by its part, its name and its depth."""
    for entry in chain(catalogue.entries.values(), _of_whole(catalogue)):
        names = of_kinds.get(entry.part.kind)
        if names is None or not entry.path or (isinstance(entry, Tensor) and entry.numel != 1):
            continue
        key = dotted(entry.path[-2:])
        name = next((i for i, one in enumerate(names) if _is(key, one)), None)
        if name is not None and _is_counted(entry):
            yield ([*of_kinds].index(entry.part.kind), name, len(entry.path)), entry


def _of_whole(catalogue: Catalogue) -> Iterator[Object]:
    """Yield the numbers of the one object that a whole state is: a dataclass, a `Namespace`."""
    whole = catalogue.entries.get(())
    states = whole.value.state if isinstance(whole, Object) and whole.is_read and isinstance(whole.value, Stub) else ()
    for key, value in (item for state in states if isinstance(state, dict) for item in state.items()):
        if isinstance(key, str) and isinstance(value, (int, float)):
            yield Object((key,), value)


def _is_counted(entry: Entry) -> bool:
    return not any(_is(str(key), _SET) for key in entry.path[:-1])


def _own(catalogue: Catalogue) -> float | None:
    """Return how many updates all optimizers made, else an average of the weights; None if they do not agree."""
    updates = _of_updates(catalogue)
    for kind in _OWN:
        numbers = {_number(catalogue, entry) for entry in updates if entry.part.kind == kind} - {None}
        if numbers:
            return numbers.pop() if len(numbers) == 1 else None
    return None


def _of_updates(catalogue: Catalogue) -> list[Entry]:
    """Return the counters of updates: the first and the last of each optimizer, as there is one for each parameter."""
    of_part: dict[Part, list[Entry]] = {}
    for entry in catalogue.entries.values():
        path = entry.path
        if not path or str(path[-1])[-4:].casefold() not in _ENDS or (name := _OWN.get(entry.part.kind)) is None:
            continue
        if isinstance(entry, Tensor) and entry.numel != 1:
            continue
        if _is(str(path[-1]).replace("/", ".").rpartition(".")[2], name):
            of_part.setdefault(entry.part, [])[1:] = [entry]
    return [entry for entries in of_part.values() for entry in entries]


def _number(catalogue: Catalogue, entry: Entry) -> float | None:
    """Return the number that an entry is, None if it is none or has not been read."""
    if isinstance(entry, Tensor):
        value = catalogue.facts.get(READ, {}).get(entry.path)
    else:
        try:
            value = entry.value if entry.nbytes <= _LARGE else None
        except CkptError:
            value = None
    value = numpy_scalar(value) if isinstance(value, Stub) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value
