"""Labels for the values of a checkpoint: what a person who reads the script says that each of them is.

A layout wraps each value that it saves in a label, which holds for all below it; a value without one is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal[
    "model", "ema", "optimizer", "scheduler", "scaler", "rng", "dataloader", "progress", "config", "metrics", "other"
]


@dataclass(frozen=True, slots=True)
class Labelled:
    """A value with its role, and for one of several models the name of that model."""

    role: Role
    value: Any
    owner: str | None = None


def model(value: Any, owner: str | None = None) -> Labelled:
    return Labelled("model", value, owner)


def ema(value: Any, owner: str | None = None) -> Labelled:
    """Label a copy beside a model that is not the model: its average, target, teacher, best."""
    return Labelled("ema", value, owner)


def optimizer(value: Any, owner: str | None = None) -> Labelled:
    return Labelled("optimizer", value, owner)


def scheduler(value: Any, owner: str | None = None) -> Labelled:
    return Labelled("scheduler", value, owner)


def scaler(value: Any) -> Labelled:
    return Labelled("scaler", value)


def rng(value: Any) -> Labelled:
    return Labelled("rng", value)


def dataloader(value: Any) -> Labelled:
    return Labelled("dataloader", value)


def progress(value: Any) -> Labelled:
    return Labelled("progress", value)


def config(value: Any) -> Labelled:
    return Labelled("config", value)


def metrics(value: Any) -> Labelled:
    return Labelled("metrics", value)


def other(value: Any) -> Labelled:
    return Labelled("other", value)


def bare(value: Any) -> Any:
    """The value itself, as the script has it, without labels at any depth."""
    if isinstance(value, Labelled):
        return bare(value.value)
    if type(value) is dict:
        return {key: bare(below) for key, below in value.items()}
    if type(value) in (list, tuple):
        return type(value)(bare(below) for below in value)
    return value


def labels(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Labelled]]:
    """Every label with the keys that lead to it."""
    if isinstance(value, Labelled):
        yield keys, value
    elif type(value) is dict and value:
        for key, below in value.items():
            yield from labels(below, (*keys, key))
    elif type(value) in (list, tuple) and value:
        for index, below in enumerate(value):
            yield from labels(below, (*keys, index))
    else:
        raise TypeError(f"{keys}: a value without a label")
