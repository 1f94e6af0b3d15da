"""Names the likely cause of the first difference, by what differs in the first checkpoint after the resume.

What B resumed with is not in any checkpoint. Where one step lies between the save and the next checkpoint, it follows
from the moments: with the same gradient, `exp_avg` of A and B differ by `beta1` times the difference that they had
before the step. So moments that were lost, or are those of another parameter, are told apart from another gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckpttool.catalogue.parts import find_rank
from ckpttool.catalogue.shown import shown
from ckpttool.resume.run.compare import FirstDifference, is_counter
from ckpttool.resume.run.state import SavedState
from ckpttool.text import plural, some

_CLOSE = 1e-3  # of the largest element, by which a moment that was computed back may be off
_FACTORS = {"exp_avg": "betas", "exp_avg_sq": "betas", "momentum_buffer": "momentum"}


def cause(saved: str, paths: tuple[str, str], first: FirstDifference, seen: str | None = None) -> str | None:
    """Return the likely cause of the first difference, in a sentence; None if nothing tells it.

    `saved` is the checkpoint of A at the step at which B resumed, `paths` are those of A and B of the first difference.
    `seen` is what was observed to differ first: what does not explain that is no cause, but comes of it.
    """
    with SavedState(saved) as before, SavedState(paths[0]) as expected, SavedState(paths[1]) as found:
        return next(_Evidence(before, expected, found, first).causes(seen), None)


def is_vague(text: str) -> bool:
    """Return whether a cause only says where to look."""
    return text.startswith(("the gradient differs", "the update differs"))


class _Evidence:
    """The checkpoint that was resumed from, and those after it of A and B."""

    def __init__(self, saved: SavedState, expected: SavedState, found: SavedState, first: FirstDifference) -> None:
        self.saved, self.expected, self.found, self.step = saved, expected, found, first.step
        self.names = sorted(first.names)
        self.by_kind: dict[str, list[str]] = {}
        for name in self.names:
            state = expected if name in expected.tensors or name in expected.objects else found
            self.by_kind.setdefault(state.kind_of(name), []).append(name)
        self.counts = {name for name in expected.tensors if is_counter(name)}

    def causes(self, seen: str | None) -> Iterator[str]:
        """Yield what may be the cause, the most telling first. `seen` is what was observed to differ first."""
        # The last learning rates of a scheduler say no more than those of the optimizer.
        scheduled = any(not name.endswith("_last_lr") for name in self.by_kind.get("scheduler", ()))
        update, gradient = ("learning rate", "parameters"), ("loss", "gradient norm")
        # With what each explains, if it is the first that differs.
        ranked: tuple[tuple[Iterator[str], Sequence[str]], ...] = (
            (self._counters(), update),
            (self._values("scheduler") if scheduled else iter(()), update),
            (self._values("scaler"), (*gradient, "parameters")),
            (self._values("dataloader"), ("next batch",)),
            (self._hyperparameters(), update),
            (self._random(observed=seen is not None), (*gradient, "RNG state")),
            (self._values("progress"), ()),
            (self._apart(), gradient),
            (self._moments(), ("parameters",)),
            (self._update(), update),
            (self._gradient(), ()),
        )
        for found, explained in ranked:
            if seen is None or seen in explained:
                yield from found

    # Numbers ----------------------------------------------------------------------------------------------------------

    def _number(self, state: SavedState, name: str) -> float | None:
        tensor = state.tensors.get(name)
        if tensor is not None:
            values = tensor.as_float64()
            return float(values[0]) if values.size == 1 else None
        value = state.objects.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def _counters(self) -> Iterator[str]:
        """Yield that optimizer state was lost with its step counters, or that these are off."""
        off: dict[float, list[str]] = {}
        restarted: list[str] = []
        for name in self.names:
            if not is_counter(name):
                continue
            was, now, at = (self._number(state, name) for state in (self.expected, self.found, self.saved))
            if was is None or now is None or at is None:
                continue
            if at and now == was - at:
                restarted.append(name)
            else:
                off.setdefault(now - was, []).append(name)
        if restarted:
            parameters = [_parameter(name) for name in restarted]
            kept = [name for name in restarted if not self._is_lost(_parameter(name))]
            now, was = (self._number(state, restarted[0]) for state in (self.found, self.expected))
            which = "its" if len(restarted) == len(self.counts) else f"those of {some(parameters)}"
            counters = f"{which} step counters restarted: {now:g} and not {was:g} in step {self.step}"
            if kept:
                yield f"the step counters of the optimizer were not restored, its moments were: {counters}"
            elif len(restarted) == len(self.counts):
                yield f"the optimizer was not loaded: {counters}"
            else:
                yield f"the optimizer was loaded in part: {counters}"
        for by, names in off.items():
            of = f"{plural(len(names), 'parameter')} ({some([_parameter(name) for name in names])})"
            yield f"the step counters of the optimizer are off by {by:+g} for {of}"

    def _values(self, kind: str) -> Iterator[str]:
        """Yield that values of a kind restarted, are lost, or are not as they were."""
        titles = {"dataloader": "the data", "rng": "the RNG state", "scaler": "the grad scaler"}
        title = titles.get(kind, f"the {kind}")
        names = self.by_kind.get(kind, [])
        lost = [name for name in names if name in self.expected.objects and name not in self.found.objects]
        ranks = sorted({rank for name in names if (rank := self.expected.rank_of(name)) is not None})
        of = f" of rank {', '.join(map(str, ranks))}" if ranks else ""
        if kind == "rng" and names:
            leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
            which = ", ".join(leaf for leaf in leaves if find_rank((leaf,)) is None)
            yield f"{title}{of} was not restored" + (f" ({which})" if which else "")
        # `_step_count` begins at 1.
        for name in () if kind == "rng" else sorted(names, key=lambda name: not name.endswith("last_epoch")):
            was, now, at = (self._number(state, name) for state in (self.expected, self.found, self.saved))
            if was is not None and now is not None and at is not None:
                how = "restarted" if at and now == was - at else f"is off by {now - was:+g}"
                shown = ("was not restored" if kind in ("scheduler", "scaler") else how) if how == "restarted" else how
                yield f"{title}{of} {shown}: `{name}` is {now:g} and not {was:g} in step {self.step}"
        if lost:
            yield f"{title}{of} is lost: {some(lost)}"
        elif names and kind != "rng":
            yield f"{title}{of} was not restored: {some(names)}"

    def _random(self, *, observed: bool) -> Iterator[str]:
        """Yield RNG states that differ; where nothing tells of the batch, they may come of another one."""
        is_known = observed or any(self.expected.kind_of(name) == "dataloader" for name in self.expected.objects)
        either = (
            "" if is_known or "model" not in self.by_kind else ", or the batch was another (`--observe` tells which)"
        )
        for text in self._values("rng"):
            yield text + either

    def _hyperparameters(self) -> Iterator[str]:
        names = [name for name in self.by_kind.get("optimizer", ()) if ".param_groups." in name]
        for name in sorted(names, key=lambda name: not name.endswith(".lr")):
            was, now = self.expected.objects.get(name), self.found.objects.get(name)
            group, _, leaf = name.partition(".param_groups.")[2].partition(".")
            what = "the learning rate" if leaf == "lr" else f"`{leaf}`"
            values = f"{shown(now)} and not {shown(was)}"
            yield f"{what} of parameter group {group} was not restored: {values} in step {self.step}"

    def _apart(self) -> Iterator[str]:
        """Yield that only what takes no part in the step differs: buffers, averaged weights."""
        tensors = [name for name in self.names if name in self.expected.tensors or name in self.found.tensors]
        if not tensors:
            return
        trained = {_parameter(name) for name in self.counts}
        fqn = {name: name.partition(".")[2] for name in tensors}
        roots = {name.partition(".")[0] for name in tensors}
        models = {name.partition(".")[0] for name in self.expected.tensors if self.expected.kind_of(name) == "model"}
        of_models = all(self.expected.kind_of(name) == "model" for name in tensors)
        if of_models and len(roots) == 1 and len(models) > 1 and not self._is_trained(next(iter(roots))):
            yield f"the averaged weights `{roots.pop()}` were not restored: {some(tensors)}"
        elif of_models and trained and not any(fqn[name] in trained for name in tensors):
            yield f"{plural(len(tensors), 'buffer')} of the model not restored: {some(tensors)}"

    def _is_trained(self, root: str) -> bool:
        return root in ("model", "state_dict", "module", "net")

    # Moments ----------------------------------------------------------------------------------------------------------

    def _resumed(self, name: str) -> Any:
        """Return the moment that B resumed with if its gradient was that of A; None if it cannot be told."""
        leaf = name.rpartition(".")[2]
        tensors = [state.tensors.get(name) for state in (self.saved, self.expected, self.found)]
        factor = self._factor(name, leaf)
        if factor is None or any(one is None or one.shape != tensors[0].shape for one in tensors):  # type: ignore[union-attr]
            return None
        saved, expected, found = (one.as_float64() for one in tensors if one is not None)
        return saved + (found - expected) / factor

    def _factor(self, name: str, leaf: str) -> float | None:
        if leaf not in _FACTORS or not self._one_step(name):
            return None
        parameter, root = _parameter(name), name.partition(".")[0]
        prefix = f"{root}.param_groups."
        groups = {key.removeprefix(prefix).partition(".")[0] for key in self.saved.objects if key.startswith(prefix)}
        for group in sorted(groups):
            params = self.saved.objects.get(f"{prefix}{group}.params")
            if len(groups) > 1 and isinstance(params, list) and parameter not in params:
                continue
            value = self.saved.objects.get(f"{prefix}{group}.{_FACTORS[leaf]}")
            if isinstance(value, (tuple, list)) and len(value) == 2:
                value = value[1] if leaf == "exp_avg_sq" else value[0]
            return float(value) if isinstance(value, (int, float)) and value else None
        return None

    def _one_step(self, name: str) -> bool:
        """Return whether one step of the optimizer lies between the save and the first difference."""
        counter = f"{name.rpartition('.')[0]}.step"
        was, at = self._number(self.expected, counter), self._number(self.saved, counter)
        return at is None or was is None or was - at == 1

    def _is_lost(self, parameter: str) -> bool:
        """Return whether the moments of a parameter were zero when B resumed, or nothing tells."""
        for name in self.names:
            if name.endswith(".exp_avg") and _parameter(name) == parameter:
                resumed = self._resumed(name)
                return resumed is None or _near(resumed, 0.0 * resumed, self.saved.tensors[name].as_float64())
        return any(_parameter(name) == parameter and not is_counter(name) for name in self.names)

    def _moments(self) -> Iterator[str]:
        """Yield the moments that were zero when B resumed, or those of another parameter."""
        differing = [name for name in self.names if name.rpartition(".")[2] in _FACTORS and name in self.found.tensors]
        every = [name for name in self.expected.tensors if name.rpartition(".")[2] in _FACTORS]
        resumed = {name: value for name in differing if (value := self._resumed(name)) is not None}
        zero: list[str] = []
        taken: dict[tuple[str, str], list[str]] = {}
        for name, value in resumed.items():
            saved = self.saved.tensors[name].as_float64()
            if _near(value, 0.0 * value, saved) and saved.any():
                zero.append(name)
                continue
            leaf = name.rpartition(".")[2]
            for other in every:
                if other != name and other.endswith(f".{leaf}") and other in self.saved.tensors:
                    theirs = self.saved.tensors[other].as_float64()
                    if theirs.shape == value.shape and _near(value, theirs, saved):
                        taken.setdefault((_parameter(name), _parameter(other)), []).append(leaf)
        if zero and len(zero) == len(resumed):
            leaves = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in zero))
            if len(zero) == len([one for one in every if one.rpartition(".")[2] in leaves.split(", ")]):
                yield f"the moments of the optimizer were not restored ({leaves})"
            else:
                yield f"the moments of {some([*dict.fromkeys(map(_parameter, zero))])} were not restored ({leaves})"
        for (one, other), leaves_of in taken.items():
            how = "are swapped" if (other, one) in taken else f"of `{other}` were given to `{one}`"
            of = f" of `{one}` and `{other}`" if (other, one) in taken else ""
            yield f"the moments{of} {how} ({', '.join(dict.fromkeys(leaves_of))})"
        if zero and len(zero) < len(resumed):
            yield f"the moments of {some([*dict.fromkeys(map(_parameter, zero))])} were not restored"
        if resumed and len(resumed) < len(every):
            parameters = [*dict.fromkeys(map(_parameter, resumed))]
            yield f"the moments of {some(parameters)} were not those that were saved"

    def _update(self) -> Iterator[str]:
        """Yield that weights differ by another learning rate, where moments and gradients are the same."""
        if any(name.rpartition(".")[2] in _FACTORS for name in self.names):
            return
        ratios = []
        for name in self.names:
            if self.expected.kind_of(name) == "model" and name in self.saved.tensors and name in self.found.tensors:
                start, was, now = (one.tensors[name].as_float64() for one in (self.saved, self.expected, self.found))
                moved = abs(was - start)
                if start.shape == was.shape == now.shape and moved.size and moved.max() > 0:
                    at = int(moved.argmax())
                    ratios.append(float((now - start)[at] / (was - start)[at]))
        if ratios and max(ratios) - min(ratios) <= 1e-2 * abs(max(ratios)):
            far = f"the weights moved {ratios[0]:.3g} times as far in step {self.step}"
            yield f"the learning rate was not restored: {far}"
        elif ratios:
            yield "the update differs, with the same moments: the learning rate or the weight decay was not restored"

    def _gradient(self) -> Iterator[str]:
        """Yield what may have made another gradient: what the checkpoints do not show to be that of A."""
        if not any(
            name.rpartition(".")[2] in _FACTORS or self.expected.kind_of(name) == "model" for name in self.names
        ):
            return
        shown = {self.expected.kind_of(name) for name in self.expected.objects}
        if {"rng", "dataloader"} <= shown:
            yield (
                "the weights or buffers of the model were not restored: the gradient differs in step "
                f"{self.step}, with the data and the RNG states of A"
            )
        else:
            unseen = [
                title for kind, title in (("dataloader", "the batch"), ("rng", "the RNG state")) if kind not in shown
            ]
            yield (
                f"the gradient differs in step {self.step}: the weights, or what is not in the checkpoint, "
                f"{' or '.join(unseen)}, was not restored (`--observe` tells which)"
            )


def _parameter(name: str) -> str:
    """Return the parameter that a moment or a step counter belongs to."""
    return name.partition(".state.")[2].rpartition(".")[0]


def _near(value: Any, other: Any, scale: Any) -> bool:
    """Return whether two arrays are equal but for rounding, measured by a third."""
    largest = float(abs(scale).max()) if scale.size else 0.0
    return bool(value.size) and bool((abs(value - other) <= _CLOSE * largest).all()) and largest > 0.0
