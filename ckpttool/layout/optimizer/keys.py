"""The key paths of an optimizer's entries, taken apart; and the kinds of state that optimizers keep. Pure.

    nested   (*root, "state", OWNER, "exp_avg")          (*root, "param_groups", 0, "lr")
    flat     (*root, "state.layers.0.w.exp_avg")         (*root, "param_groups.layers.0.w.lr")

OWNER is the FQN or the id of a parameter. Flat keys are those of `flatten_optimizer_state_dict=True`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from ckpttool.catalogue.entries import Path


class Key(NamedTuple):
    """A key path taken apart: `Key(("optim",), "state", "layers.0.w", ("exp_avg",))`.

    `owner` is a parameter, or, in nested `param_groups`, the index of a group; None where the path ends before it.
    """

    root: Path
    section: str  # "state" or "param_groups"
    owner: Hashable
    below: Path
    flat: bool = False

    @property
    def parameter(self) -> str | None:
        """The FQN of the parameter that the entry is about; None where it has an id, or is about a group."""
        return self.owner if isinstance(self.owner, str) and (self.flat or self.section == "state") else None

    @property
    def path(self) -> Path:
        """The path that was parsed."""
        if self.flat:
            return (*self.root, f"{self.section}.{self.owner}.{self.below[0]}", *self.below[1:])
        return (*self.root, self.section, self.owner, *self.below)


def parse_key(path: Path, start: int = 0) -> Key | None:
    """Return the parts of the path of an optimizer's entry, whose root is at least `start` keys long; None for a path
    without `state` or `param_groups`."""
    for depth in range(start, len(path)):
        key = path[depth]
        if isinstance(key, str) and key in ("state", "param_groups"):
            return Key(path[:depth], key, path[depth + 1] if depth + 1 < len(path) else None, path[depth + 2 :])
        if isinstance(key, str) and key.startswith(("state.", "param_groups.")):
            section, _, rest = key.partition(".")
            owner, _, last = rest.rpartition(".")
            if owner:
                return Key(path[:depth], section, owner, (last, *path[depth + 1 :]), True)
    return None


class StateKind(NamedTuple):
    """What optimizers keep under one key: `StateKind("second moment", squares=True)`."""

    title: str | None = None
    like_parameter: bool = True  # has the shape of its parameter, whatever the optimizer
    squares: bool = False  # has no negative values
    certain: bool = False  # a key that no optimizer uses for anything of another shape


# Of torch.optim, then of others. Factored second moments (Adafactor of torch, transformers, fairseq) are rows and
# columns of a parameter.
STATE_KINDS: dict[str, StateKind] = {
    "exp_avg": StateKind("first moment", certain=True),
    "exp_avg_sq": StateKind("second moment", squares=True, certain=True),
    "max_exp_avg_sq": StateKind("largest second moment", squares=True, certain=True),
    "momentum_buffer": StateKind("momentum", certain=True),
    "square_avg": StateKind("second moment", squares=True, certain=True),
    "sum": StateKind("sum of squares", squares=True),
    "acc_delta": StateKind(squares=True),
    "exp_inf": StateKind(squares=True),
    "variance": StateKind(squares=True),
    **dict.fromkeys(("row_var", "col_var"), StateKind(like_parameter=False, squares=True)),
    **dict.fromkeys(("exp_avg_sq_row", "exp_avg_sq_col"), StateKind(like_parameter=False, squares=True)),
    **dict.fromkeys(("grad_avg", "prev", "step_size", "ax"), StateKind()),
    **dict.fromkeys(("momentum", "hessian", "state1", "state2", "master_weights"), StateKind()),
    **dict.fromkeys(("exp_avg_slow", "exp_avg_diff", "previous_grad"), StateKind()),
}
LIKE_PARAMETER = frozenset(name for name, kind in STATE_KINDS.items() if kind.like_parameter)
"""Keys of state that has the shape of its parameter."""
CERTAINLY_LIKE_PARAMETER = frozenset(name for name, kind in STATE_KINDS.items() if kind.certain)
"""Those of them whose shape tells that state belongs to another parameter."""
