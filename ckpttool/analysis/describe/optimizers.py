"""What the optimizers of a checkpoint are and keep: class, kinds of state, defaults of hyper-parameters. Pure.

A checkpoint does not name the class of its optimizer. It is recognised by the keys of its parameter groups and of its
state, and stays unknown where they fit several classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ckpttool.analysis.describe import hyperparameters
from ckpttool.analysis.describe.hyperparameters import HyperparameterTable
from ckpttool.catalogue.entries import Entry, Object, Path, Tensor
from ckpttool.catalogue.signatures import MOMENTS
from ckpttool.catalogue.values import stub_name
from ckpttool.layout.optimizer.parse import parse_key


class _Class(NamedTuple):
    """A class of torch.optim: keys of its groups and state that tell it from others, kinds of state of which it has
    one, and the defaults of its keys as `shown` writes them, without `lr` and `weight_decay`."""

    keys: frozenset[str]
    kinds: frozenset[str]
    defaults: dict[str, str]


def _class(keys: str, kinds: str, **defaults: str) -> _Class:
    flags = {"maximize": "False", "foreach": "None", "capturable": "False", "differentiable": "False", "fused": "None"}
    return _Class(frozenset(keys.split()), frozenset(kinds.split()), defaults | flags)


_CLASS = ("class", "name", "type", "optimizer")  # keys of it in a file beside the state
_BETAS = {"betas": "(0.9, 0.999)", "eps": "1e-08"}
_MOMENTS = "exp_avg exp_avg_sq"
_DECOUPLED = "decoupled_weight_decay"  # of AdamW and Adam since torch 2.7, and only in it they differ

# The constructors in `torch/optim/*.py` of torch 2.13; older ones have fewer keys, with the same defaults.
CLASSES = {
    "Adam": _class("betas amsgrad", _MOMENTS, **_BETAS, amsgrad="False", decoupled_weight_decay="False"),
    "AdamW": _class("betas amsgrad", _MOMENTS, **_BETAS, amsgrad="False", decoupled_weight_decay="True"),
    "NAdam": _class("momentum_decay", "mu_product", **_BETAS, momentum_decay="0.004", decoupled_weight_decay="False"),
    "RAdam": _class("decoupled_weight_decay exp_avg_sq", _MOMENTS, **_BETAS, decoupled_weight_decay="False"),
    "Adamax": _class("betas exp_inf", "exp_inf", **_BETAS),
    "SGD": _class("dampening nesterov", "momentum_buffer", momentum="0", dampening="0", nesterov="False"),
    "Muon": _class(
        "ns_steps",
        "momentum_buffer",
        momentum="0.95",
        nesterov="True",
        ns_coefficients="(3.4445, -4.775, 2.0315)",
        eps="1e-07",
        ns_steps="5",
        adjust_lr_fn="None",
    ),
    "RMSprop": _class("alpha centered", "square_avg", momentum="0", alpha="0.99", eps="1e-08", centered="False"),
    "Rprop": _class("etas", "prev", etas="(0.5, 1.2)", step_sizes="(1e-06, 50)"),
    "ASGD": _class("lambd", "ax", lambd="0.0001", alpha="0.75", t0="1000000.0"),
    "Adadelta": _class("rho", "acc_delta", rho="0.9", eps="1e-06"),
    "Adafactor": _class("beta2_decay", "row_var variance", beta2_decay="-0.8", eps="(None, 0.001)", d="1.0"),
    "Adagrad": _class("initial_accumulator_value", "sum", lr_decay="0", eps="1e-10", initial_accumulator_value="0"),
}


@dataclass(slots=True)
class StateFigures:
    """The tensors of one kind and dtype in an optimizer's state."""

    kind: str  #: `exp_avg`, `momentum_buffer`, ...
    dtype: str  #: dtype, as torch calls it
    tensor_count: int = 0  #: number of tensors
    numel: int = 0  #: number of their elements
    payload_bytes: int = 0  #: bytes of values


@dataclass(slots=True)
class OptimizerSummary:
    """One optimizer: `OptimizerSummary(("optim",), "AdamW", [StateFigures("exp_avg", ...), ...], ...)`. `name` is its
    class in torch.optim, None where that cannot be told; `table` has its hyper-parameters, None where it has none."""

    root: Path
    name: str | None
    state: list[StateFigures]
    table: HyperparameterTable | None

    def __str__(self) -> str:
        """`AdamW state float32`; `Adam state (exp_avg, exp_avg_sq) float32` where it may be any class like Adam."""
        # The counter of steps has a dtype of its own.
        kept = [state for state in self.state if state.numel > state.tensor_count] or self.state
        kinds = list(dict.fromkeys(state.kind for state in kept))
        dtypes = " and ".join(dict.fromkeys(state.dtype for state in kept))
        if self.name is not None:
            return f"{self.name} state {dtypes}" if kept else f"{self.name} without state"
        title = "Adam state" if self._is_like_adam else "optimizer state"
        return f"{title} ({', '.join(kinds)}) {dtypes}" if kept else ""

    @property
    def defaults(self) -> list[str]:
        """The names of the hyper-parameters that all groups leave at the default of the class."""
        known = CLASSES.get(self.name or ("Adam" if self._is_like_adam else ""))
        if known is None or self.table is None:
            return []
        columns = [column.values for column in self.table.columns]
        return [
            name
            for name in self.table.names
            if all(values.get(name) == known.defaults.get(name, "") for values in columns)
        ]

    @property
    def _is_like_adam(self) -> bool:
        kinds = {state.kind for state in self.state}
        # Scripts make one optimizer of Muon for the matrices and of Adam for the rest.
        return kinds >= CLASSES["Adam"].kinds and not kinds & CLASSES["Muon"].kinds


def optimizers(
    entries: Collection[Entry], catalogue: Mapping[Path, Entry], tied: Collection[Path] = ()
) -> list[OptimizerSummary]:
    """Return the optimizers among `entries`, those of `catalogue` that belong to one. `tied` are tensors whose bytes
    another one has."""
    found: dict[Path, dict[tuple[str, str], StateFigures]] = {}
    for entry in entries:
        if not isinstance(entry, Tensor):
            continue
        key = parse_key(entry.path, len(entry.part.root))
        if key is not None and key.section != "state":
            continue
        if entry.embedded:  # in an optimizer that was pickled whole, `optimizer.state.state.<tensor>.exp_avg.#1`
            root, kind = entry.part.root, [str(one) for one in entry.path if not str(one).startswith("#")][-1]
        elif key is None:  # `0.exp_avg`, `exp_avg.0.weight`: the state alone, under names of one's own
            root, kind = entry.part.root, _kind_in(re.split(r"[./]", entry.fqn))
        else:
            root, kind = key.root, str(key.below[0] if key.below else key.owner)
        states = found.setdefault(root, {})
        state = states.setdefault((kind, entry.dtype.name), StateFigures(kind, entry.dtype.name))
        state.tensor_count += 1
        if entry.path not in tied:
            state.numel += entry.numel
            state.payload_bytes += entry.nbytes
    tables = {table.root: table for table in hyperparameters.tables(entries, catalogue)}
    results = []
    for root in {**found, **tables}:
        state_of, table = list(found.get(root, {}).values()), tables.get(root)
        name = _name(table, {state.kind for state in state_of}) or _said(root, catalogue)
        results.append(OptimizerSummary(root, name, state_of, table))
    return results


def _said(root: Path, catalogue: Mapping[Path, Entry]) -> str | None:
    """Return the class that an optimizer is an object of, or that a file of its name says: `optimizer.json` beside
    `optimizer.safetensors`."""
    whole = catalogue.get(root)
    name = stub_name(whole.value) if isinstance(whole, Object) and whole.is_read else None
    if name is not None:
        return name.rpartition(".")[2] if name.startswith("torch.optim.") else None
    beside = ((*root[:-1], f"{root[-1]}.json", key) for key in _CLASS) if root else ()
    values = (entry.value for path in beside if isinstance(entry := catalogue.get(path), Object) and entry.is_read)
    return next((value for value in values if isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w+", value)), None)


def _kind_in(words: list[str]) -> str:
    """Return what is kept by the words of a flat name: of each parameter its moment, `exp_avg` of `state/0/exp_avg`, or
    what stands behind `state` where names of parameters follow, `param` of `state.param.layers.0.weight`."""
    behind = [word for before, word in pairwise(words) if before == "state" and not word.isdigit()]
    return next((word for word in [*words, *behind] if word in MOMENTS), (behind or words[-1:])[0])


def _name(table: HyperparameterTable | None, kinds: set[str]) -> str | None:
    """Return the class in torch.optim that groups with such keys and state of such kinds belong to, if it is one."""
    if table is None:
        return None
    keys = {*table.names, *kinds}
    names = [name for name, c in CLASSES.items() if c.keys <= keys and (c.kinds & kinds or not kinds)]
    if not names or names[0] != "Adam":
        return names[0] if names else None
    decoupled = {column.values.get(_DECOUPLED) for column in table.columns}
    return {"True": "AdamW", "False": "Adam"}.get(str(decoupled.pop())) if len(decoupled) == 1 else None
