"""Options of scripts in the classes that they are pickled in."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any


class CfgNode(dict):
    """A dict whose keys are attributes, as yacs, EasyDict and OmegaConf have them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass
class TrainingArguments:
    """Options of a trainer as an object of a library's class."""

    output_dir: str = "out"
    learning_rate: float = 5e-5
    per_device_train_batch_size: int = 8
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass
class Hyperparameters:
    """Options of a script as a dataclass of its own."""

    width: int = 8
    layers: int = 2
    extra: dict[str, Any] = field(default_factory=lambda: {"dropout": 0.1})


class Version:
    """A version as an object, like that of `packaging`."""

    def __init__(self, text: str) -> None:
        self.release = tuple(int(one) for one in text.split("."))


class RunningMeanStd:
    """Running statistics of observations, with arrays of numpy."""

    def __init__(self, mean: Any, var: Any, count: float) -> None:
        self.mean, self.var, self.count = mean, var, count


def arguments(**more: Any) -> Namespace:
    """Options that were parsed from a command line."""
    return Namespace(lr=1e-3, batch_size=8, epochs=10, output=PurePosixPath("runs/a"), betas=[0.9, 0.95], **more)


def options(**more: Any) -> dict[str, Any]:
    """Options as a dict of scalars."""
    return {"lr": 1e-3, "batch_size": 8, "epochs": 10, "dtype": "bfloat16", "compile": True, **more}
