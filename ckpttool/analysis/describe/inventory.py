"""What a checkpoint holds, in one line: `model 31M, its ema, its AdamW, scheduler, RNG of 2 ranks`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ckpttool.analysis.describe.optimizers import OptimizerSummary
from ckpttool.catalogue.entries import Catalogue, Part, Path, dotted
from ckpttool.catalogue.models import Model, Models
from ckpttool.catalogue.parts import find_rank
from ckpttool.text import count, plural, some

_WORDS = (("scheduler", "scheduler"), ("scaler", "gradient scaler"), ("rng", "RNG"), ("dataloader", "data loader"))
_MANY = 6  # models that are named


def inventory(
    catalogue: Catalogue,
    every: Models,
    optimizers: Sequence[OptimizerSummary],
    step: float | None = None,
    tied: Collection[Path] = (),
) -> str:
    """Return the models with their numbers of parameters, the averages and optimizers of each, what else there is, and
    the step; empty where one part is all."""
    words = [*_models(every, tied), *_optimizers(every, optimizers), *_others(catalogue)]
    steps = [f"step {step:,}"] if step is not None else []
    return ", ".join([*words, *steps]) if len(words) > 1 else ""


def _models(every: Models, tied: Collection[Path]) -> Iterator[str]:
    trained = every.originals
    for model in trained[:_MANY]:
        yield f"{_name(model.part)} {count(sum(tensor.numel for tensor in model.parameters(tied)))}"
    if len(trained) > _MANY:
        yield f"{len(trained) - _MANY} more models"
    for model in every.models:
        if model not in trained:
            yield _of(_name(model.part), [model.average_of] if model.average_of else [], trained)


def _optimizers(every: Models, optimizers: Sequence[OptimizerSummary]) -> Iterator[str]:
    names = [(one.name or "optimizer", _owners(every, one)) for one in optimizers]
    alone = {of[0] for _, of in names if len(of) == 1}
    if len({name for name, _ in names}) == 1 < len(names) == len(alone) == len(every.originals):
        yield f"{names[0][0]} of each"
        return
    for name, of in names:
        yield _of(name, of, every.originals)


def _owners(every: Models, optimizer: OptimizerSummary) -> Sequence[Part]:
    """Return the models of an optimizer, whose part may have keys around it."""
    parts = (part for part in every.optimizer_of if optimizer.root[: len(part.root)] == part.root)
    part = max(parts, key=lambda one: len(one.root), default=None)
    return every.optimizer_of[part] if part is not None else []


def _of(name: str, owners: Sequence[Part], trained: Sequence[Model]) -> str:
    """Return `its ema`, or with the names of the models where there are several."""
    if not owners:
        return name
    if len(trained) == 1 and owners[0] == trained[0].part:
        return f"its {name}"
    return f"{name} of {' and '.join(map(_name, owners))}"


def _others(catalogue: Catalogue) -> Iterator[str]:
    entries = [entry for entry in catalogue.entries.values() if entry.part.kind not in ("model", "optimizer")]
    for kind, word in _WORDS:
        own = [entry for entry in entries if entry.part.kind == kind and not entry.embedded]
        ranks = {found[1] for entry in own if (found := find_rank(entry.path)) is not None}
        number = len({entry.part for entry in own})
        if ranks:
            yield f"{word} of {plural(len(ranks), 'rank')}"
        elif number:
            yield word if number == 1 or kind == "rng" else plural(number, word)
    others = dict.fromkeys(dotted(e.part.root or e.path[:1]) for e in entries if e.part.kind == "other" and e.path)
    if others:
        yield f"other: {some([*others])}"


def _name(part: Part) -> str:
    return dotted(part.root) or "model"
