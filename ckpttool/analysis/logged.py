"""The losses that a script logs to files.

    json:log.jsonl          JSON lines
    csv:metrics.csv         a table, such as Lightning's CSVLogger writes
    tensorboard:runs        event files, in a folder or anywhere below it
    text:logs/*.txt         lines such as `Step 4 | loss:2.71`
    trainer:.               `log_history` of the last `trainer_state.json` that transformers' Trainer has written
    none                    no losses

A path is that of a file in the output directory of a run, `*` and `**` in it stand for anything, and `{out}` for the
directory itself. After a further `:` stands the key, column or tag of the loss: `json:log.jsonl:train/loss`.
"""

from __future__ import annotations

import csv
import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ckpttool.analysis.losses import Losses, Output
from ckpttool.errors import CorruptError, UsageError
from ckpttool.serialization import event_files
from ckpttool.text import meant

_NAMES = ("loss", "train_loss", "train/loss", "train_loss_step", "training_loss", "loss_metrics/global_avg_loss")
_STEPS = ("step", "global_step", "iter", "iteration", "iter_num")
Row = Mapping[str, Any]


def from_files(text: str) -> Losses | None:
    """Return a source of the losses in files, as `json:log.jsonl:train/loss` names them; None if it names no files.

    The source raises UsageError if something is logged there, but nothing by the name of the loss, and CorruptError for
    a damaged event file.
    """
    if text == "none":
        return lambda out, log, after: {}
    kind, _, rest = text.partition(":")
    if kind not in _READERS or not rest:
        return None
    pattern, _, name = rest.partition(":")
    read = _READERS[kind]

    def losses(out: str, log: str, after: int) -> Mapping[int, float]:
        where = os.path.join(out, pattern.replace("{out}", glob.escape(out)))
        return _of_rows(read(where), name or None, where)

    return losses


def _of_rows(rows: Iterable[Row], name: str | None, where: str) -> dict[int, float]:
    """Return the last loss of each step; the rows count where they have no step. Rows of a validation have no loss."""
    rows = list(rows)
    seen = list(dict.fromkeys(str(key) for row in rows for key in row if key not in _STEPS))
    # One name for all of them: the last row of the Trainer has the mean of all steps as `train_loss`.
    key = next((one for one in ((name,) if name else _NAMES) if one in seen), None)
    found: dict[int, float] = {}
    for row in rows:
        if key is None or row.get(key) in (None, ""):
            continue
        step = next((row[one] for one in _STEPS if row.get(one) not in (None, "")), len(found) + 1)
        with suppress(ValueError, TypeError):
            found[int(float(step))] = float(row[key])
    if seen and not found:
        wanted = name or "loss"
        hint = meant(wanted, seen, "name one of them after a further `:`")
        raise UsageError(f"`{where}` has no `{wanted}`, but {', '.join(sorted(seen))[:200]}", hint=hint, found=seen)
    return found


def _files(pattern: str, below: str | None = None) -> list[str]:
    """Return the files of a pattern, and those of a name below a folder, the oldest first."""
    found = glob.glob(pattern, recursive=True)
    if below is not None:
        inner = [os.path.join(glob.escape(one), "**", below) for one in found if os.path.isdir(one)]
        found = [*found, *(path for one in inner for path in glob.glob(one, recursive=True))]
    return sorted({path for path in found if os.path.isfile(path)}, key=lambda path: (os.path.getmtime(path), path))


def _json_lines(pattern: str) -> Iterator[Row]:
    for path in _files(pattern):
        with open(path, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                with suppress(ValueError, RecursionError):  # other output, or what a killed process has not finished
                    if isinstance(row := json.loads(line), dict):
                        yield row


def _text(pattern: str) -> Iterator[Row]:
    usual = Output(None)
    for path in _files(pattern):
        yield from ({"step": step, "loss": loss} for step, losses in usual.printed(path).items() for loss in losses)


def _table(pattern: str) -> Iterator[Row]:
    for path in _files(pattern):
        with open(path, encoding="utf-8", errors="replace", newline="") as stream:
            yield from csv.DictReader(stream)


def _event_files(pattern: str) -> Iterator[Row]:
    for path in _files(pattern, "*tfevents*"):
        with open(path, "rb") as stream:
            data = stream.read()
        try:
            for tag, step, value in event_files.scalars(data):
                yield {tag: value, "step": step}
        except CorruptError as error:
            raise error.prefixed(f"`{path}`", file=path) from None


def _trainer_state(pattern: str) -> Iterator[Row]:
    states = []
    for path in _files(pattern, "trainer_state.json"):
        with suppress(ValueError, RecursionError), open(path, encoding="utf-8") as stream:
            state = json.load(stream)
            if isinstance(state, dict) and isinstance(state.get("log_history"), list):
                states.append((int(state.get("global_step") or 0), path, state["log_history"]))
    if states:
        yield from (row for row in max(states)[2] if isinstance(row, dict))


_READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    "json": _json_lines,
    "csv": _table,
    "text": _text,
    "tensorboard": _event_files,
    "trainer": _trainer_state,
}
