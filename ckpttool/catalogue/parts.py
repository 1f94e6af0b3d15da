"""Classifies keys into parts: model, optimizer, scheduler, rng, dataloader, scaler, progress, other.

By the content first: a dict with `state` and `param_groups` is an optimizer whatever it is called (`signatures`). Names
that training code uses decide where the content does not. A part is found at any depth (`app.model`, `app.optim`), and
each of several optimizers is one; tensors at the root beside the optimizer are the model (torchtitan). A value that
every rank has under one name has the key of its rank behind the key of its part: what rank 3 saved at `rng.torch` is
`rng.rank3.torch` in the catalogue.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ckpttool.catalogue.entries import KINDS, OTHER, Catalogue, Object, Part, Path, Tensor, dotted
from ckpttool.catalogue.models import models, training
from ckpttool.catalogue.shown import numpy_scalar
from ckpttool.catalogue.signatures import MOMENTS, KeyNode, is_extra_state, is_generator, is_module_name, tree
from ckpttool.catalogue.values import Stub, stub_name
from ckpttool.errors import UsageError
from ckpttool.text import meant, some

_NAMES = (
    (
        "optimizer",
        r"(.*_)?(optim|optimizer|optimizers|opt)(_state(s|_dict)?)?(_\d+)?|optimizer_(?!history)\w+|optim_\w+",
    ),
    ("scheduler", r"(.*_)?(lr_)?schedulers?(_state(_dict)?)?|lr_scheduler\w*|sched|opt_param_scheduler"),
    ("rng", r"(.*_)?rng(_state(s|_dict)?)?|random_states?|rng_\w+|(torch|cuda|numpy|python)_rng\w*"),
    (
        "dataloader",
        r"(train_|val_)?((data_?)?loaders?|dl|samplers?|dataset|iterator)(_state(_dict)?)?(_\d+)?|data_iter\w*",
    ),
    ("scaler", r"(grad_|loss_)?scaler(_state(_dict)?)?"),
    (
        "progress",
        r"(global_|current_|cur_|train_|total_|decay_)?(step|steps|epoch|epochs|iteration|iter|iter_num|num_steps)"
        r"|progress|train_state|trainer_state|(num_)?tokens(_seen)?|consumed_\w+|best_\w+|loops"
        r"|ite|itr|it|updates?|num_updates|trained_\w+|iterations|training_step|cur_itrs|batch_(idx_train|num_total)"
        r"|(start|last|finished)_epoch|epochs_run|loss(es)?|metrics?|(\w+_)?history",
    ),
    ("model", r"(.*_)?(model|models|network|net|module|ema|state_dict|model_state(_dict)?|params|weights)(_\d+)?"),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _NAMES)
_ANY_NAME = re.compile("|".join(f"(?:{pattern})" for _, pattern in _NAMES), re.IGNORECASE)
_COUNTER = re.compile(r"(global_|current_|total_)?(step|epoch|iteration)s?", re.IGNORECASE)
_REPLAY = re.compile(r"(.*_)?(replay|rb|buffer|memory|rollouts?|experience)(_\w+)?", re.IGNORECASE)
_EXPERIENCE = {"obs", "observations", "next_obs", "next_observations", "actions", "rewards", "dones", "terminals"}
_EXPERIENCE |= {"obs2", "act", "action", "rew", "reward", "done", "terminated", "states", "next_states", "log_prob"}
_STATISTIC = re.compile(r"(?s)(.*\.)?(running_mean|running_var|num_batches_tracked)")
_SEEN = re.compile(r"(?s)(.*\.)?_?((running|current)_)?(mean|var|variance|std|count|num_batches_tracked)")
_AMOUNT = re.compile(r"(?:.*\.)?(?:count|num_batches_tracked)")
_ARGUMENTS = {"argparse.Namespace", "types.SimpleNamespace", "yacs.config.CfgNode", "omegaconf.dictconfig.DictConfig"}

GENERATORS = {
    "python": r"python|random|random_state|python_(rng|random)(_state)?",
    "numpy": r"numpy|numpy_random_seed|numpy_(rng|random)(_state)?|np",
    "torch": r"torch|cpu|torch_manual_seed|(torch|cpu)_(rng|random)(_state)?",
    "cuda": r"cuda|cuda_all|torch_cuda_manual_seed|cuda_(rng|random)(_state)?",
}
"""What the state of a generator is called: by scripts, accelerate, the Trainer, verl."""
PER_RANK = ("rng", "dataloader")
"""The kinds of which every rank has values of its own."""
# Keys of Megatron's torch_dist, which are whole names at the root: `optimizer.state.exp_avg.decoder.layers..`.
_WHOLE_NAMES = (
    ("optimizer", re.compile(r"(chained_\d+\.)?optimizer\.(state|distributed|param_to_group_meta)\..+")),
    ("rng", re.compile(r"rng_state/shard_.+")),
)
_BEGINNINGS = ("chained_", "optimizer.", "rng_state/")  # of them, which most names do not have
READ = "kinds by values"
"""The fact of the kinds of parts that no names or shapes tell, by their roots."""
_RANK_KEY = re.compile(r"(?:dp_)?rank_?(\d+)")


def kind_of_key(key: object) -> str | None:
    """Return the kind that a key names, `optim_state_dict` -> `optimizer`; None for any other key."""
    if not isinstance(key, str):
        return None
    # What is before a dot can only be the `.*` of a pattern: of 100,000 names with few last keys few are looked at.
    above, dot, last = key.rpartition(".")
    return _kind_of_name(dot + last if "\n" not in above else key)


@lru_cache(4096)
def _kind_of_name(key: str) -> str | None:
    if not _ANY_NAME.fullmatch(key):  # as most names, of which there may be 200,000
        return None
    return next(kind for kind, pattern in _PATTERNS if pattern.fullmatch(key))


def assign(catalogue: Catalogue) -> None:
    """Set `part` of every entry."""
    root = tree(catalogue)
    division = _Division()
    division.divide(root, ())
    division.divide_rest()
    for node, part in division.parts:
        for entry in node.entries():
            entry.part = part
    read: dict[Path, str] = catalogue.facts.get(READ, {})
    for entry in catalogue.tensors if read else ():
        if entry.part.kind == "model" and (kind := read.get(entry.part.root)) is not None:
            entry.part = entry.part._replace(kind=kind)
    for key, node in root.children.items():
        kind = _kind_of_whole_name(key)
        if kind is not None:
            for entry in node.entries():
                entry.part = Part(kind)


def _kind_of_whole_name(key: object) -> str | None:
    if not isinstance(key, str) or not key.startswith(_BEGINNINGS):
        return None
    return next((kind for kind, pattern in _WHOLE_NAMES if pattern.fullmatch(key)), None)


class _Division:
    """Divides a tree into parts. A later one of `parts` overrules what an earlier one marked."""

    def __init__(self) -> None:
        self.parts: list[tuple[KeyNode, Part]] = []
        # Beside parts: what only the shapes of models and optimizers elsewhere can tell.
        self._rest: list[tuple[Path, Mapping[Any, KeyNode], bool]] = []

    def divide(self, node: KeyNode, path: Path) -> None:
        kind = node.kind
        if kind is not None and not (kind == "rng" and any(map(kind_of_key, node.children))):
            self._add(node, kind, path)
            return
        kinds = {key: kind for key, child in node.children.items() if (kind := _kind_of(key, child))}
        telling = {*kinds}
        if all(isinstance(node.children[key].entry, Tensor) and not node.children[key].is_part for key in telling):
            # A state dict whose buffer is called `tokens_seen` is a state dict.
            telling = set()
        deeper = {
            key for key, child in node.children.items() if child.children and key not in telling and child.has_parts
        }
        if not telling and not deeper:
            kind = _kind_of_rest(node)
            self.parts.append((node, Part(kind, path)))
            if kind == "model":
                self._add_beside(node, "model", path)
            return
        self.parts.append((node, OTHER._replace(root=path)))
        start = len(self.parts)
        for key, child in node.children.items():
            kind = kinds[key] if key in telling else None
            if kind is not None and not _is_around(kind, child):
                self._add(child, kind, (*path, key))
            elif kind is not None or key in deeper:
                self.divide(child, (*path, key))
        rest = {key: c for key, c in node.children.items() if key not in telling and key not in deeper and c.has_tensor}
        has_model = any(part.kind == "model" for _, part in self.parts[start:])
        if rest:
            self._rest.append((path, rest, has_model))

    def _add(self, node: KeyNode, kind: str, path: Path) -> None:
        self.parts.append((node, Part(kind, path)))
        if kind == "optimizer":
            several = list(_optimizers(node, path))
            if len(several) > 1:
                self.parts += [(one, Part(kind, root)) for one, root in several]
        if node.kind is None and (kind == "model" or (kind == "optimizer" and node.holds("optimizer"))):
            self._add_beside(node, kind, path)

    def _add_beside(self, node: KeyNode, kind: str, path: Path) -> None:
        """Add what the module was made from, which lies beside a state dict, and the counters around it or around an
        optimizer, but for how often an average was updated."""
        for key, child in node.children.items():
            is_own = kind == "model" and (isinstance(child.entry, Tensor) or key in ("updates", "num_updates"))
            is_value = not child.children and not is_own
            if is_value and kind_of_key(key) == "progress":
                self.parts.append((child, Part("progress", (*path, key))))
            elif kind == "model" and _is_settings(child):
                self.parts.append((child, Part("other", (*path, key))))

    def divide_rest(self) -> None:
        """Divide the tensors beside the parts: into models, which have the shapes of others or of an optimizer's state
        or names that only modules have, replay buffers, and others."""
        if not self._rest:
            return
        known = {shapes for node, part in self.parts if part.kind == "model" for shapes in _sequences(node)}
        states = [
            tuple(training(part, (e for e in node.entries() if isinstance(e, Tensor))).shapes.values())
            for node, part in self.parts
            if part.kind == "optimizer"
        ]
        trained = Counter(shape for shapes in states for shape in shapes)
        # Of one tensor that is no model's: `log_alpha`, whose optimizer would fit any model with such a bias.
        alone: Counter[Shapes] = Counter(shapes for shapes in states if len(shapes) == 1 and shapes not in known)
        beside = (((*path, key), node) for path, rest, _ in self._rest if alone for key, node in rest.items())
        bare = [(path, node, (*_sequences(node),)[:1]) for path, node in beside if isinstance(node.entry, Tensor)]
        for path, node, form in bare:
            if form and 0 < alone[form[0]] == sum(form == other for _, _, other in bare):
                self.parts.append((node, Part("model", path)))
        known |= {shapes for shapes in states if shapes}
        is_new = bool(states) and not trained
        is_alone = not any(part.kind in ("model", "optimizer") for _, part in self.parts)
        for path, rest, has_model in self._rest:
            chosen = {} if has_model else rest if is_new or _has_module(rest) else _trained_in(rest, trained)
            # Tensors beside the optimizer and no model of that name: they are the model (torchtitan).
            self.parts += [(node, Part("model", path)) for node in chosen.values()]
            for key, node in rest.items() if not chosen else ():
                is_shaped = bool(node.children) and bool(known & {*_sequences(node)})
                if _has_module({key: node}) or is_shaped or (is_alone and _is_parameters(key, node, rest)):
                    self.parts.append((node, Part("model", (*path, key) if node.children else path)))
                elif node.children and isinstance(key, str) and _REPLAY.fullmatch(key):
                    self.parts.append((node, Part("dataloader", (*path, key))))


def _kind_of(key: object, child: KeyNode) -> str | None:
    """Return the kind of a child by its content, or by its name where that agrees with what it holds."""
    if not child.children and isinstance(child.entry, Tensor) and not is_generator(child.entry):  # as most are
        kind = kind_of_key(key)
        return kind if kind is not None and _tells(kind, child) else None
    if child.kind is not None:
        return child.kind
    if key in MOMENTS and child.is_state_dict:
        return "optimizer"
    kind = kind_of_key(key)
    if child.has_metadata and child.is_state_dict and not _is_statistics(child, kind):
        return "model"
    if _is_statistics(child, kind):
        return "other"
    if kind is not None and _tells(kind, child):
        return kind
    return "model" if child.is_state_dict else "progress" if _is_progress(child) else None


def _is_statistics(node: KeyNode, kind: str | None) -> bool:
    """Return whether a module has nothing but the means and variances of what it has seen, which nothing trains; where
    its key names a model, also how much that was."""
    names = [*map(str, node.children)] if kind in (None, "model") and node.has_tensor else []
    is_module = kind is None and (node.has_metadata or any(map(is_module_name, names)))
    is_module = is_module or any(map(_AMOUNT.fullmatch, names))
    return len(names) > 1 and is_module and all(_SEEN.fullmatch(name[-100:]) for name in names)


def _is_progress(node: KeyNode) -> bool:
    """Return whether these are plain values, and one of them counts steps or epochs."""
    entries = [one.entry for one in node.children.values()]
    if not all(isinstance(e, Object) for e in entries) or "progress" not in map(kind_of_key, node.children):
        return False
    # What was not read yet, as in DCP, is not read for this.
    values = [entry.value for entry in entries if isinstance(entry, Object) and entry.is_read]
    return all(
        value is None or isinstance(value, (bool, int, float, str)) or numpy_scalar(value) is not None
        for value in values
    )


def _is_around(kind: str, child: KeyNode) -> bool:
    """Return whether a dict called `model`, `optimizer` or `train_state` is one around parts of its own."""
    if child.kind is not None or child.is_state_dict or not child.has_parts:
        return False
    if kind == "optimizer":
        return any(one.kind not in (None, kind) for one in child.children.values())
    if kind == "model":
        is_bare = any(isinstance(one.entry, Tensor) for one in child.children.values())
        named = (one for key, one in child.children.items() if kind_of_key(key) == "optimizer")
        is_beside = child.state_dicts == 1 and any(_tells("optimizer", one) for one in named)
        return child.holds("optimizer") or (not is_bare and (is_beside or child.state_dicts > 1))
    return child.holds("optimizer") or child.holds("model")


def _is_settings(node: KeyNode) -> bool:
    """Return whether this is a dict of plain values, and no extra state of a module, which may be a dict, too."""
    if not node.children:
        return False
    return all(isinstance(e, Object) and not any(map(is_extra_state, e.path)) for e in node.entries())


def _optimizers(node: KeyNode, path: Path) -> Iterator[tuple[KeyNode, Path]]:
    """Yield the optimizers in a list or a dict of them."""
    if {"state", "param_groups"} <= node.children.keys():
        yield node, path
        return
    for key, child in node.children.items():
        if child.kind == "optimizer":
            yield from _optimizers(child, (*path, key))


def _kind_of_rest(node: KeyNode) -> str:
    """Return the kind of a whole that is not divided: a model, if there are tensors in it, but not of integers alone,
    and no name of a replay buffer."""
    if len(_EXPERIENCE & node.children.keys()) > 1 and not any(map(is_module_name, node.children)):
        return "dataloader"
    if isinstance(node.entry, Object) and isinstance(node.entry.value, Stub):
        # A graph or a replay buffer that was pickled whole has tensors, too.
        return "model" if _has_module({"": node}) else "other"
    # Numbers of samples are no weights, and those of a quantised model are beside its scales.
    is_model = any(isinstance(e, Tensor) and e.dtype.kind not in ("int", "bool") for e in node.entries())
    if is_model or _has_module({"": node}):
        return "model"
    is_counter = node.children and all(isinstance(key, str) and _COUNTER.fullmatch(key) for key in node.children)
    return "progress" if is_counter else "other"


Shapes = tuple[tuple[int, ...], ...]


def _sequences(node: KeyNode) -> Iterator[Shapes]:
    """Yield the shapes of the tensors in their order: of all, and of the parameters."""
    tensors = [entry for entry in node.entries() if isinstance(entry, Tensor) and entry.dtype.kind == "float"]
    if tensors:
        yield tuple(tensor.shape for tensor in tensors)
        yield tuple(tensor.shape for tensor in tensors if not _STATISTIC.fullmatch(str(tensor.path[-1])[-100:]))


def _is_parameters(key: object, node: KeyNode, beside: Mapping[Any, KeyNode]) -> bool:
    """Return whether tensors beside a counter or a generator are the model of a whole that has no other: those of a
    dict, as they are where nothing is beside them, and not those inside the objects of other classes."""
    tensors = [entry for one in beside.values() for entry in one.entries() if isinstance(entry, Tensor)]
    is_replay = isinstance(key, str) and _REPLAY.fullmatch(key) is not None
    is_experience = len(beside.keys() & _EXPERIENCE) > 1 or _kind_of_rest(node) == "dataloader"
    return not (is_replay or is_experience) and all(e.dtype.kind == "float" and not e.embedded for e in tensors)


def _has_module(rest: Mapping[Any, KeyNode]) -> bool:
    """Return whether some tensors have names that only modules have."""
    tensors = (e for one in rest.values() for e in one.entries() if isinstance(e, Tensor) and e.path)
    return any(is_module_name(tensor.path[-1]) for tensor in tensors)


def _trained_in(rest: Mapping[Any, KeyNode], trained: Counter[tuple[int, ...]]) -> dict[Any, KeyNode]:
    """Return the first tensors of the shapes of what the optimizers train; none if some are not here."""
    left, chosen = trained.copy(), dict[Any, KeyNode]()
    for key, node in rest.items():
        tensors = [entry for entry in node.entries() if isinstance(entry, Tensor)]
        shapes = Counter(tensor.shape for tensor in tensors)
        if shapes <= left:
            left -= shapes
            chosen[key] = node
    return chosen if trained and not left else {}


def _tells(kind: str, child: KeyNode) -> bool:
    """Return whether a key of a known name is a part here. A module called `net` or `module` is none unless it holds
    tensors below it, a tensor called `scaler` in a model is not a grad scaler, and an `opt` may be a `Namespace`."""
    if kind == "model":
        return bool(child.children) and child.has_tensor
    if kind == "optimizer" and child.children and not child.has_tensor:
        return child.holds("optimizer") or not child.children.keys().isdisjoint(("state", "param_groups"))
    if kind in ("optimizer", "scheduler", "scaler"):
        return bool(child.children) or _may_be_state(child.entry)
    if kind == "progress" and isinstance(child.entry, Tensor):
        # Beside the parameters of torchtitan, a tensor `tokens_seen` is a buffer of the model like any other.
        return bool(_COUNTER.fullmatch(str(child.entry.path[-1])))
    # A copy of the best weights by a dict of one's own: `best_state = {name: value.clone() for ...}`.
    return kind != "progress" or not child.is_state_dict


def _may_be_state(entry: Tensor | Object | None) -> bool:
    """Return whether an object may be the state of an optimizer, or its place: a number, a text or the arguments of a
    script are none."""
    if not isinstance(entry, Object) or not entry.is_read:
        return isinstance(entry, Object)
    return not isinstance(entry.value, (str, int, float)) and stub_name(entry.value) not in _ARGUMENTS


def parts(catalogue: Catalogue) -> list[Part]:
    """Return the parts in order of appearance, kinds in the order of `KINDS`."""
    seen = dict.fromkeys(entry.part for entry in catalogue.entries.values())
    return sorted(seen, key=lambda part: KINDS.index(part.kind))


def stop_at_absent(catalogue: Catalogue, only: Sequence[str]) -> None:
    """Raise the error of a part that could not be opened, unless `only` selects others."""
    for fault in catalogue.faults:
        root = fault.facts.get("absent")
        if root is not None and (not only or {root, root.partition(".")[0], kind_of_key(root)} & {*only}):
            raise fault


def stop_at_absent_below(catalogue: Catalogue, root: str) -> None:
    """Raise the error of a part that could not be opened, if it is what the name `root` stands for, around it, or below
    it; "" is the whole checkpoint."""
    for fault in catalogue.faults:
        absent = fault.facts.get("absent")
        if absent is not None and (not root or f"{absent}.".startswith(f"{root}.") or root.startswith(f"{absent}.")):
            raise fault


def matcher(
    names: Iterable[str], catalogue: Catalogue, other: Catalogue | None = None, *, single: bool = False
) -> Callable[[Part], bool]:
    """Return a predicate for the parts named on the command line: by kind (`model`) or by root key (`ema`); an average
    is no `model` where there is another. Raises UsageError for a name that is not part of the catalogue, nor of the
    other, if there is one, and with `single` for `model` where there are several."""
    present, elsewhere = parts(catalogue), parts(other) if other else []
    chosen: set[Part] = set()
    for name in names:
        # A root key is the more exact name: `--only model` with `model` and `ema` there means `model`.
        matches = [p for p in present if dotted(p.root) == name] or [p for p in present if p.kind == name]
        if single and name == "model" and len(matches) > 1:
            matches = [model.part for model in models(catalogue).trained]
            if len(matches) > 1:
                roots = [dotted(p.root) for p in matches]
                hint = f"`--only {roots[0]}` takes one; `{'`, `'.join(roots)}` together take all"
                raise UsageError(f"there are {len(matches)} models: {some(roots)}", hint=hint, found=roots)
        if not matches and not any(name in (dotted(p.root), p.kind) for p in elsewhere):
            labels = [p.kind if not p.root else dotted(p.root) for p in present]
            known = list(dict.fromkeys([*labels, *(p.kind for p in present)]))
            hint = f"the parts are {', '.join(f'`{n}`' for n in labels)}"
            raise UsageError(
                f"there is no part `{name}`", hint=_part_meant(name, known, catalogue) or meant(name, known, hint)
            )
        chosen.update(matches)
    return chosen.__contains__


def _part_meant(name: str, known: Sequence[str], catalogue: Catalogue) -> str | None:
    """Return the hint for several parts in one word, and for a name below a part; None for anything else."""
    several = [one.strip() for one in name.split(",")]
    if len(several) > 1 and {*several} <= {*known}:
        return f"one at a time: repeat the option, as in `--only {several[0]} --only {several[1]}`"
    pattern = f"{name.rstrip('.*')}.*"
    if any(entry.name.startswith(pattern[:-1]) for entry in catalogue.entries.values()):
        return f"a name inside a part is for `--tensors '{pattern}'` of `convert`"
    if any(entry.name == name for entry in catalogue.entries.values()):
        return f"the name of a tensor is for `--tensors {name}` of `convert`"
    if "." in name and any(f".{pattern[:-1]}" in f"{entry.name}." for entry in catalogue.entries.values()):
        return f"a name inside a part is for `--tensors '*.{name}*'` of `convert`"
    return None


# Values of one rank ---------------------------------------------------------------------------------------------------


def rank_key(rank: int) -> str:
    """Return the key of a rank: `rank3`."""
    return f"rank{rank}"


def with_rank(path: Path, rank: int) -> Path:
    """Return the path in the catalogue of the value that `rank` has at `path`: the key of the rank stands behind the
    last key of a kind in `PER_RANK`, else at the end."""
    depth = next((i for i in range(len(path), 0, -1) if kind_of_key(path[i - 1]) in PER_RANK), len(path))
    return (*path[:depth], rank_key(rank), *path[depth:])


def find_rank(path: Path) -> tuple[int, int] | None:
    """Return the depth and the number of the rank's key in a path: `("rng", "rank3", "torch")` is `(1, 3)`."""
    for depth, key in enumerate(path):
        match = _RANK_KEY.fullmatch(key) if isinstance(key, str) else None
        if match is not None:
            return depth, int(match[1])
    return None


def without_rank(path: Path) -> Path:
    """Return the path that the value has in the file of its own rank."""
    match = find_rank(path)
    return path if match is None else (*path[: match[0]], *path[match[0] + 1 :])
