"""A training state under the names of a key map: `convert --map`, of the model and what its optimizer keeps."""

from __future__ import annotations

from functools import partial

from ckpttool.catalogue.entries import Catalogue, Path
from ckpttool.catalogue.warning import Warning
from ckpttool.layout.key_maps import KeyMap
from ckpttool.layout.optimizer import respell
from ckpttool.layout.optimizer.map_state import apply_to_state
from ckpttool.layout.optimizer.parse import optimizers
from ckpttool.layout.select import models
from ckpttool.layout.views import Viewed
from ckpttool.models import assets, key_maps, start, ties

_NUMBERED = (
    "the optimizer names its parameters now, which it numbered: the order of the numbers in the other model is unknown"
)


def mapped(planned: Catalogue, viewed: Viewed, name: str, optim_keys: str | None) -> tuple[Catalogue, set[Path], bool]:
    """Return a state, whose optimizers name their parameters, as a key map makes it, in the direction in which its
    rules are about the names here, with the paths of the source that it is made of, and whether operations made some of
    it. Its warnings name the map.

    Raises UsageError for a map that does not fit, LossError for state of an optimizer that cannot follow.
    """
    beside = assets.collect(None, viewed.catalogue)
    names = [entry.fqn for _, entries in models(planned) for entry in entries]
    keymap = _in_direction(key_maps.chosen(name, names, beside.config), names)
    facts = key_maps.facts(beside.config, beside.head_dim)
    result = apply_to_state(keymap, planned, viewed, facts, partial(ties.same_bytes, viewed))
    of = "of the model and its optimizer" if optimizers(planned) else "of the model"
    result.catalogue.warnings += [Warning("names", f"the names {of} are by key map `{keymap.name}`")]
    # As in the source, but not by numbers.
    spellings = {optimizer.spelling for optimizer in optimizers(viewed.catalogue)}
    if optim_keys is None and "id" in spellings:
        result.catalogue.warnings += [Warning("optimizer-keys", _NUMBERED)]
    catalogue = respell.respell(result.catalogue, optim_keys or ("flat" if spellings == {"flat"} else "fqn"))
    return catalogue, result.merged | start.read(viewed, catalogue), result.uses_operations


def _in_direction(keymap: KeyMap | None, names: list[str]) -> KeyMap:
    assert keymap is not None
    sources = [source for rule in keymap.rules for source in rule.sources]
    targets = [target for rule in keymap.rules for target in rule.targets]
    if not any(one.is_one_of(names) for one in sources) and any(one.is_one_of(names) for one in targets):
        return keymap.inverse
    return keymap
