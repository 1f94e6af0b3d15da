"""Sorts the parameters of each group into the order of the model, as in `AdamW(model.parameters())`. Pure.

    param_groups [{params: [norm.w, layers.0.w]}]    model layers.0.w, norm.w    ->    [{params: [layers.0.w, norm.w]}]

FSDP1 with flat parameters has them unit by unit, the root's first. Where the next optimizer is known to be made of the
model's parameters as they come, and numbers them, the ids have to be given in that order. Who knows it, best first:

    --shapes      lists the parameters in the order of the model
    the model     when it is not sorted by name: what was a safetensors file once is so in any format
    the groups    when they go through the model as a model does, and are not sorted by name either
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.catalogue.entries import Catalogue, Entry, Tensor
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import UsageError
from ckpttool.layout import select
from ckpttool.layout.move import rebuilt
from ckpttool.layout.optimizer.names_of_ids import follows_modules, is_sorted, order_hint
from ckpttool.layout.optimizer.parse import Optimizer, optimizers, parse_key
from ckpttool.layout.optimizer.respell import respell

_LISTS = (("params",), ("param_names",))


def numbered(catalogue: Catalogue, source: Catalogue) -> Catalogue:
    """Return the optimizers spelt by ids in the order of the model in `source`. Those that have ids already keep them.

    Raises UsageError when neither the model nor the groups are known to be in that order.
    """
    if all(optimizer.spelling == "id" for optimizer in optimizers(catalogue)):
        return catalogue
    named = respell(catalogue, "fqn", source)
    is_listed = "parameter order" in source.facts
    places = {name: place for place, name in enumerate(_order(source))}
    warnings: list[Warning] = []
    for optimizer in optimizers(named):
        missing = next((name for name in optimizer.params if name not in places), None)
        if missing is not None and is_listed:
            hint = "it has to list all parameters, by the names that the source has for them"
            message = f"`--shapes` does not list `{missing}`, which `{optimizer.name}` has"
            raise UsageError(message, hint=hint, found=missing)
        if missing is not None:
            _check_own_order(optimizer, source)
        elif any(sorted(group.params, key=places.__getitem__) != group.params for group in optimizer.groups):
            authority = "`--shapes`" if is_listed else "the model"
            text = f"`{optimizer.name}`: its parameters are numbered in the order of {authority}, not of its groups"
            warnings.append(Warning("optimizer-keys", text))
    entries = [_ordered(entry, places) for entry in named.entries.values()]
    result = respell(rebuilt(named, entries, named.containers), "id", source)
    result.warnings = [*result.warnings, *warnings]
    return result


def _order(source: Catalogue) -> Sequence[str]:
    """Return the parameters in the order of the model; none when that is not known."""
    if "parameter order" in source.facts:
        order: Sequence[str] = source.facts["parameter order"]
        return order
    for _, entries in select.models(source)[:1]:
        tensors = [entry for entry in entries if isinstance(entry, Tensor)]
        names = [tensor.fqn for tensor in tensors]
        if follows_modules(names) and not is_sorted(source, tensors):
            return names
    return ()


def _check_own_order(optimizer: Optimizer, source: Catalogue) -> None:
    """Raise UsageError for groups in an order that may not be the model's, where nothing else has that."""
    lists = [group.params for group in optimizer.groups if len(group.params) > 1]
    if not lists:
        return
    flat = "FSDP1" in f"{source.facts.get('layout')} {source.facts.get('mounted')}"
    by_name = max(map(len, lists)) > 2 and all(names == sorted(names) for names in lists)
    if flat or by_name or not all(map(follows_modules, lists)):
        why = "sorted by name" if by_name else "as FSDP1 has them" if flat else "not in the order of a model"
        order = "in the order of the model, which is not known: its groups list them"
        message = f"the parameters of `{optimizer.name}` are to be numbered {order} {why}, and the model is no help"
        raise UsageError(message, hint=order_hint(source))


def _ordered(entry: Entry, places: dict[str, int]) -> Entry:
    """Return the entry, with its names in order if it lists the parameters of a group."""
    key = parse_key(entry.path, len(entry.part.root)) if entry.part.kind == "optimizer" else None
    if key is None or key.section != "param_groups" or key.below not in _LISTS or isinstance(entry, Tensor):
        return entry
    names = entry.value
    if not isinstance(names, list) or not all(isinstance(name, str) and name in places for name in names):
        return entry
    ordered = sorted(names, key=places.__getitem__)
    return entry if ordered == names else entry.at(entry.path, change=lambda value: [*ordered])
