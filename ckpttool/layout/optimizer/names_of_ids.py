"""Maps the ids of an optimizer to the names of parameters. Pure.

    model        embed (29, 7)    qkv (21, 7)    norm (7,)    rope (7,)     in the order of the state dict
    group 0      id 0 (29, 7)     id 1 (21, 7)
    group 1                                      id 2 (7,)                  or is it rope?

torch numbers parameters group by group, and a group has them in the order of the model. That order is the state
dict's, less its buffers and the second names of tied tensors; which of the rest a group left out is told by the shapes
of its state. Every way in which all groups fit is looked at in one pass over the model: there has to be exactly one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Part, Tensor, dotted
from ckpttool.catalogue.models import is_statistic, models
from ckpttool.errors import CorruptError, UsageError
from ckpttool.layout import select
from ckpttool.layout.optimizer.parse import LIKE_PARAMETER, Optimizer, OptimizerEntry, ParameterGroup, optimizers
from ckpttool.layout.rename import strip_wrappers
from ckpttool.text import plural, some

# Rows and columns of a factored second moment: torch.optim.Adafactor; transformers, fairseq.
_FACTORED = (("row_var", "col_var", 1), ("exp_avg_sq_row", "exp_avg_sq_col", 0))
_MAX_WORK = 2_000_000
_MANUAL = (
    "say in the training script which is which: save the optimizer with names (torch 2.6: "
    "`AdamW(model.named_parameters())`), or by `get_state_dict`"
)
_BUFFERS = (
    "`--shapes` with the names of `model.named_parameters()` leaves buffers out, which may be enough; which group or "
    f"frozen parameter is which it does not tell: {_MANUAL}"
)
_OTHER_MODEL = (
    "`--model-from` names the model that was trained with it; pieces that FSDP1's `optimizer.state_dict()` has on each "
    "rank are nobody's by name: `FSDP.optim_state_dict` saves names"
)


def name_ids(optimizers: Sequence[Optimizer], source: Catalogue) -> list[dict[int, str]]:
    """Return the name of each id of these optimizers, all spelt by ids; `source` has the model.

    Raises UsageError when the model does not say which parameter is which, CorruptError when it cannot be the model.
    """
    if len(select.rivals(source)) > 1 and (owners := _owners(optimizers, source)) is not None:
        return [_names_in(part, one, source) for one, part in zip(optimizers, owners, strict=True)]
    names: list[dict[int, str]] = [{} for _ in optimizers]
    groups = [(i, group) for i, optimizer in enumerate(optimizers) for group in optimizer.groups if group.params]
    # Without a model, all names that the groups give are right.
    alone = all(_own_names(group) for _, group in groups) and not select.models(source)
    known = {} if alone or not groups else {tensor.fqn: tensor.shape for tensor in _model(source)}
    left: list[tuple[int, ParameterGroup]] = []
    for i, group in groups:
        own = _own_names(group) or _name_of_key(optimizers[i], known)
        clean = own if alone else [name if name in known else strip_wrappers(name) for name in own]
        if clean and (alone or known.keys() >= {*clean}):
            names[i] |= dict(zip(group.params, clean, strict=True))
        else:
            left.append((i, group))
    if left:
        done = {name for named in names for name in named.values()}
        model = {name: shape for name, shape in _parameters(source).items() if name not in done}
        _check_ordered(source, optimizers[left[0][0]], model)
        order = list(model)
        for (i, group), places in zip(left, _places(left, optimizers, model, source), strict=True):
            names[i] |= {key: order[place] for key, place in zip(group.params, places, strict=True)}
    for optimizer, named in zip(optimizers, names, strict=True):
        twice = next((name for name, count in Counter(named.values()).items() if count > 1), None)
        if twice is not None:
            raise CorruptError(f"`{optimizer.name}` has two parameters called `{twice}`", found=twice)
    return names


def parameters_of_ids(source: Catalogue) -> dict[tuple[Part, str], str]:
    """Return the name of the parameter of each id of all optimizers, by its part and key. Raises as `name_ids` does."""
    numbered = [optimizer for optimizer in optimizers(source) if optimizer.spelling == "id"]
    named = zip(numbered, name_ids(numbered, source), strict=True)
    return {(optimizer.part, str(key)): name for optimizer, names in named for key, name in names.items()}


def _names_in(part: Part, optimizer: Optimizer, source: Catalogue) -> dict[int, str]:
    return name_ids([optimizer], select.select(source, lambda entry: entry.part == part))[0]


def _owners(optimizers: Sequence[Optimizer], source: Catalogue) -> list[Part] | None:
    """Return the model of each optimizer, each of another one; None where that is not known of all."""
    known = models(source).optimizer_of
    owners = [of[0] for one in optimizers if len(of := known.get(one.part, [])) == 1]
    return owners if len({*owners}) == len(optimizers) else None


def _own_names(group: ParameterGroup) -> list[str]:
    value = group.value("param_names")
    fits = isinstance(value, list) and len(value) == len(group.params) and all(isinstance(v, str) for v in value)
    return value if fits else []


def _name_of_key(optimizer: Optimizer, model: Mapping[str, Ints]) -> list[str]:
    """Return the parameter whose name is the key of its own optimizer, `{"fc.weight": AdamW([fc.weight])}`, if the
    shape of its state is that of the parameter."""
    if len(optimizer.params) != 1 or not optimizer.part.root:
        return []
    key, name = optimizer.params[0], str(optimizer.part.root[-1])
    same = name in model and parameter_shape(optimizer.state.get(key, ())) in (None, model[name])
    return [name] if same else []


# The model ------------------------------------------------------------------------------------------------------------


def _parameters(source: Catalogue) -> dict[str, Ints]:
    """Return what may be a parameter of the model, with its shape, in the order of the state dict."""
    tensors = _model(source)
    names = {tensor.fqn for tensor in tensors}
    aliases = find_aliases(t.origin or t for t in tensors)
    parameters: dict[str, Ints] = {}
    for tensor in tensors:
        tied = tensor.alias is not None or (tensor.origin or tensor).path in aliases
        if not tied and tensor.dtype.kind in ("float", "complex") and not is_statistic(tensor.fqn, names):
            parameters[tensor.fqn] = tensor.shape
    # What `--shapes` does not list is a buffer.
    return {name: parameters[name] for name in source.facts.get("parameter order", parameters) if name in parameters}


def _model(source: Catalogue) -> list[Tensor]:
    every, numbers = select.models(source), "the optimizer numbers its parameters"
    if not every:
        hint = "name one with `--model-from`: the model that was trained with this optimizer"
        raise UsageError(f"{numbers}, and no model here says which they are", hint=hint)
    rivals = [dotted(root) for root in select.rivals(source)]
    if len(rivals) > 1:
        hint = "take one of them and its optimizer alone: `--only`, then `--optim-from`"
        raise UsageError(f"{numbers}, and there are several models: {some(rivals)}", hint=hint)
    return [entry for entry in every[0][1] if isinstance(entry, Tensor)]


def _check_ordered(source: Catalogue, optimizer: Optimizer, model: dict[str, Ints]) -> None:
    """Raise UsageError for a model that may be sorted by name, as safetensors files are: by shape alone state could be
    given to another layer that is as large."""
    tensors = [t for t in _model(source) if len(t.chunks) and source.files]
    if "parameter order" in source.facts or len(tensors) < 2 or not _is_sorted_by_dtype(tensors):
        return
    direct = any(map(_is_safetensors(source), tensors))
    # Nothing says of another format where it came from: when no two are of one shape, the shapes tell.
    if direct or (len(tensors) > 2 and len(set(model.values())) < len(model)):
        how = "as safetensors, sorted by name" if direct else "sorted by name, as by safetensors"
        message = f"`{optimizer.name}` numbers its parameters in the order of a model that is stored here only {how}"
        raise UsageError(message, hint=order_hint(source))


# Shapes ---------------------------------------------------------------------------------------------------------------


def parameter_shape(items: Sequence[OptimizerEntry]) -> Ints | None:
    """Return the shape of the parameter that this state is for; None when it does not tell."""
    shapes = {str(i.below[0]): i.entry.shape for i in items if len(i.below) == 1 and isinstance(i.entry, Tensor)}
    like = {shape for name, shape in shapes.items() if name in LIKE_PARAMETER}
    if len(like) == 1:
        return like.pop()
    for row, column, kept in _FACTORED:
        if not like and row in shapes and column in shapes and shapes[column]:
            return (*shapes[row][: len(shapes[row]) - kept], shapes[column][-1])
    # What has one element may be a count.
    rest = {shape for shape in shapes.values() if prod(shape) > 1}
    return rest.pop() if len(rest) == 1 and not like else None


def trained_parameters(source: Catalogue) -> dict[str, Ints | None] | None:
    """Return the names and shapes of all parameters that have state or are in a parameter group, without the root of
    the model; None where there is no optimizer. A shape is None where the state does not tell it.

    Raises UsageError or CorruptError when the names of ids are not clear.
    """
    every = optimizers(source)
    if not every:
        return None
    numbered = [optimizer for optimizer in every if optimizer.spelling == "id"]
    names = iter(name_ids(numbered, source))
    shapes: dict[str, Ints | None] = {}
    for optimizer in every:
        name_of = next(names) if optimizer.spelling == "id" else {}
        for key in (*optimizer.params, *optimizer.state, *optimizer.loose):
            name = str(name_of.get(key, key))
            items = optimizer.state.get(key) or optimizer.loose.get(key, [])
            shapes[name] = shapes.get(name) or parameter_shape(items)
    return shapes


def _places(
    left: list[tuple[int, ParameterGroup]], optimizers: Sequence[Optimizer], model: dict[str, Ints], source: Catalogue
) -> list[list[int]]:
    shapes = [[parameter_shape(optimizers[i].state.get(key, ())) for key in group.params] for i, group in left]
    names, optimizer = list(model), optimizers[left[0][0]].name
    _check_counts(shapes, [*model.values()], optimizer)
    fits = ways(shapes, [*model.values()])
    if fits is None:
        raise UsageError(f"`{optimizer}`: its groups fit the parameters of the model in too many ways", hint=_MANUAL)
    if not fits:
        message = f"`{optimizer}`: the shapes of its state do not follow the order of the model's parameters"
        raise CorruptError(message, hint=_OTHER_MODEL)
    vague = [(left[g][1].params[k], places) for g, row in enumerate(fits) for k, places in enumerate(row) if places[1:]]
    if vague:
        candidates = [names[place] for place in vague[0][1]]
        example = f"{vague[0][0]}: {some(candidates)}"
        message = f"`{optimizer}`: {len(vague)} of its ids fit more than one parameter, such as {example}"
        hint = _MANUAL if "parameter order" in source.facts else _BUFFERS
        raise UsageError(message, hint=hint, found=candidates)
    return [[places[0] for places in row] for row in fits]


def _check_counts(shapes: list[list[Ints | None]], model_shapes: list[Ints], optimizer: str) -> None:
    requested, available = sum(map(len, shapes)), Counter(model_shapes)
    if requested > len(model_shapes):
        message = f"`{optimizer}` has {requested} parameters, but the model has {len(model_shapes)}"
        raise CorruptError(message, hint=_OTHER_MODEL)
    for shape, count in Counter(shape for row in shapes for shape in row if shape is not None).items():
        if count > available[shape]:
            what = (
                f"{plural(count, 'parameter')} of shape {list(shape)}, but the model has {available[shape] or 'none'}"
            )
            message = f"`{optimizer}` has state for {what}"
            raise CorruptError(message, hint=_OTHER_MODEL, found=count, expected=available[shape])


State = tuple[int, ...]


def ways(groups: Sequence[Sequence[Ints | None]], model: Sequence[Ints]) -> list[list[list[int]]] | None:
    """Return the places in `have` that each of `wanted` can take: every group in order, no place twice, shapes the
    same.

    An empty list when there is no way, None when there are too many to follow. `wanted` None fits any shape. A state
    of the search is how far each group has come; places that cannot be passed over, as later ones are too few of
    their shape, keep the states few.
    """
    total, slack, at = sum(map(len, groups)), Counter(model), [*map(_positions, groups)]
    for group in at:
        slack.subtract({shape: len(ks) for shape, ks in group.items()})
    seen: Counter[Ints] = Counter()
    layers: list[dict[State, list[State]]] = []
    current: dict[State, list[State]] = {(0,) * len(groups): []}
    followed = 0
    for place, shape in enumerate(model):
        seen[shape] += 1
        after: dict[State, list[State]] = defaultdict(list)
        for state in current:
            used = sum(bisect_left(group.get(shape, ()), k) for group, k in zip(at, state, strict=True))
            spare = seen[shape] - used <= slack[shape]
            for g, k in enumerate(state):
                if k < len(groups[g]) and (groups[g][k] == shape or (spare and groups[g][k] is None)):
                    after[(*state[:g], k + 1, *state[g + 1 :])].append(state)
            if spare and total - sum(state) < len(model) - place:
                after[state].append(state)
            followed += len(groups) * len(groups)
            if followed > _MAX_WORK:
                return None
        layers.append(after)
        current = after
    end = tuple(map(len, groups))
    return _collected(groups, layers, end) if end in current or not total else []


def _positions(group: Sequence[Ints | None]) -> dict[Ints, list[int]]:
    positions: dict[Ints, list[int]] = defaultdict(list)
    for k, shape in enumerate(group):
        if shape is not None:
            positions[shape].append(k)
    return positions


def _collected(groups: Sequence[Sequence[Any]], layers: list[dict[State, list[State]]], end: State) -> list[Any]:
    """Return every way that came to the end, followed back."""
    places: list[list[set[int]]] = [[set() for _ in row] for row in groups]
    reached = {end}
    for place in range(len(layers) - 1, -1, -1):
        before: set[State] = set()
        for state in reached:
            for previous in layers[place].get(state, ()):
                before.add(previous)
                for g, (was, now) in enumerate(zip(previous, state, strict=True)):
                    if was != now:
                        places[g][was].add(place)
        reached = before
    return [[sorted(places) for places in row] for row in places]


# Order of names -------------------------------------------------------------------------------------------------------
#
# embed.w, layers.0.q.w, layers.0.k.w, norm.w      as a model walks its modules
# embed.w, layers.0.k.w, layers.0.q.w, norm.w      sorted, as safetensors does


def is_model_order(names: Sequence[str]) -> bool:
    """Return whether names come as a model walks them, and are not just sorted, which nothing but chance tells from it:
    what came from safetensors is."""
    return follows_modules(names) and (len(names) < 3 or list(names) != sorted(names))


def follows_modules(names: Sequence[str]) -> bool:
    """Return whether the names of a module come in one run, its own before those of modules in it. DCP without key
    paths lists tensors by the rank that saved them."""
    done: set[str] = set()
    nested: set[str] = set()
    around: list[str] = []
    for name in names:
        modules = [*accumulate(name.split(".")[:-1], "{}.{}".format)]
        done |= set(around) - set(modules)
        if done & set(modules) or (modules[-1] if modules else "") in nested:
            return False
        nested |= {"", *modules[:-1]} if modules else set()
        around = modules
    return True


def is_sorted(source: Catalogue, tensors: Sequence[Tensor]) -> bool:
    """Return whether these tensors of a model may be sorted by name: each file of safetensors is."""
    return any(map(_is_safetensors(source), tensors)) or _is_sorted_by_dtype(tensors)


def _is_sorted_by_dtype(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are in the order of their names, those of each dtype apart, as safetensors has them."""
    apart: dict[str, list[str]] = defaultdict(list)
    for tensor in tensors:
        apart[tensor.dtype.name].append(tensor.fqn)
    return all(one == sorted(one) for one in apart.values())


def _is_safetensors(source: Catalogue) -> Callable[[Tensor], bool]:
    in_file = [file.name.endswith(".safetensors") for file in source.files]
    return lambda tensor: bool(len(tensor.chunks) and in_file) and in_file[tensor.chunks.file[0]]


def order_hint(source: Catalogue) -> str:
    """Return where the order may come from."""
    listed = '`json.dump([[name, list(p.shape)] for name, p in model.named_parameters()], open("order.json", "w"))`'
    tried = source.facts.get("shapes without order")
    if tried is not None:
        return f"`--shapes {tried}` is not in the order of a model either; pass the file that {listed} makes"
    return (
        "pass `--shapes FROM`, a torch.save file or DCP directory that has the model's order, or the JSON file that "
        f"{listed} makes"
    )
