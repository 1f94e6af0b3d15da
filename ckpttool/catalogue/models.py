"""Tells the models of a checkpoint apart: averages of others, whose each optimizer is, and what the parameters are.

A copy with the names and shapes of a model is its average (EMA, SWA, teacher, target) if a key says so: of two that no
key tells apart, both are models. An optimizer belongs to the model whose parameters have the names that it lists, or
the shapes of its state; what it lists are the parameters, what else a module saves are buffers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import compress
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Part, Path, Tensor, dotted
from ckpttool.catalogue.signatures import MOMENTS, is_module_name
from ckpttool.errors import CkptError

# Buffers of transformers, timm, torchvision, Meta's Llama and TransformerEngine. Parameters have real numbers; integers
# that belong to one are those of a quantised weight.
_BUFFER = re.compile(
    r"(.*[._])?(inv_freq|freqs_cis|(cos|sin)_cached|position_ids|relative_position_index|masked_bias|"
    r"num_batches_tracked|_extra_state|tokens_per_expert)"
)
_QUANTIZED = re.compile(
    r"(.*[._])?(q?weight|qdata|int_data|packed|weight_packed|blocks|scales?|q?zeros|absmax|codes)(_\w+)?"
)
_STATISTICS = re.compile(r"(.*\.)?(running_mean|running_var)")
_KEYS = ("running_mean", "running_var")
_ADAPTERS = ("lora_", "lycoris_")  # whose rank and strength kohya's scripts and LyCORIS keep in buffers
_END = 100  # characters of a name, which may have a million
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_AVERAGES = {"ema", "avg", "average", "averaged", "swa", "shadow", "polyak", "teacher", "target", "moving", "momentum"}
_AVERAGES |= {"phema", "slow", "old"}
_COPIES = {*_AVERAGES, "best", "master"}
_TRAINED = "current_model_state"  # beside the average, which Lightning saves as the model
_HEAD = re.compile(r"(.*\.)?(lm_head|output|decoder|head|proj_out|generator|wte|\w*emb\w*|tok\w*)\.weight")
_PLAIN = {"optimizer", "optim", "opt", "state", "dict"}
_WHOLE = {
    *("model", "network", "net", "module", "weights", "params", "custom", "checkpoint", "ckpt", "copy", "full"),
    *("pytorch", "hf", "huggingface", "safetensors", "pretrained", "consolidated", "export", "exported", "final"),
} | _PLAIN
_LARGE = 1 << 20  # bytes of an object that is not read
_FEW = 12  # keys that may be those of several models
_DEPTH = 2  # of keys in the names of a model, of which some lie around its parts
_MANY = 64  # models that each optimizer is compared with


@dataclass(eq=False)
class Model:
    """A model: `Model(Part("model", ("ema",)), [...], True, Part("model", ("model",)))`. An average is one too where it
    is not known of which model."""

    part: Part
    tensors: list[Tensor]
    candidates: list[Tensor] = field(default_factory=list)  # what is not known to be a buffer
    is_average: bool = False
    average_of: Part | None = None
    optimizers: list[_Trained] = field(default_factory=list)
    shapes: tuple[Ints, ...] = ()
    counts: Counter[Ints] = field(default_factory=Counter)

    @cached_property
    def names(self) -> dict[str, Ints]:
        """The shapes by the names of the candidates with real or complex elements: of a million, only if two models
        are compared."""
        return {tensor.fqn: tensor.shape for tensor in self.candidates if _is_real(tensor)}

    def parameters(self, tied: Collection[Path] = ()) -> list[Tensor]:
        """Return the parameters: what its optimizers list, and what only a parameter is called; where there is none,
        what is not known to be a buffer. `tied` are tensors whose bytes another one has."""
        candidates = [one for one in self.candidates if one.path not in tied] if tied else self.candidates
        return _listed(candidates, self.optimizers) if self.optimizers else candidates


@dataclass(slots=True)
class Models:
    """The models of a checkpoint, and the models that each optimizer is of: none where several fit equally."""

    models: list[Model]
    optimizer_of: dict[Part, list[Part]]

    @property
    def trained(self) -> list[Model]:
        """The models that are not averages; all, if each is one."""
        return [model for model in self.models if not model.is_average] or self.models

    @property
    def originals(self) -> list[Model]:
        """The trained ones, of those with the same bytes one."""
        return [model for model in self.trained if model.average_of is None] or self.trained

    @property
    def counted(self) -> list[Model]:
        """The models whose parameters count: each that is not a copy. Beside what is trained, one with the same names
        and shapes is a copy where the model of each optimizer is known and its key names nothing else (`D`, `vae`), nor
        the next of several (`2` beside `0` and `1`)."""
        is_known = bool(self.optimizer_of) and all(self.optimizer_of.values())
        trained = [model for model in self.originals if is_known and model.optimizers]
        forms, numbered = {_form(model.names) for model in trained}, {_numbered(model.part.root) for model in trained}
        return [
            model
            for model in self.originals
            if model.optimizers
            or _form(model.names) not in forms
            or not _is_plain(model.part.root)
            or _numbered(model.part.root) in numbered
        ]


@dataclass(slots=True)
class _Trained:
    """What an optimizer says of its parameters: their names or numbers in order, and the shapes of its state."""

    part: Part
    listed: list[Hashable] = field(default_factory=list)
    shapes: dict[Hashable, Ints] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the parameters; none where they are numbers."""
        keys = self.listed or [*self.shapes]
        return [key for key in keys if isinstance(key, str)] if all(isinstance(key, str) for key in keys) else []


def models(catalogue: Catalogue) -> Models:
    """Return the models of a catalogue, whose entries have their parts."""
    tensors: dict[Part, list[Tensor]] = {}
    states: dict[Part, list[Entry]] = {}
    for entry in catalogue.entries.values():
        if entry.part.kind == "model" and isinstance(entry, Tensor):
            tensors.setdefault(entry.part, []).append(entry)
        elif entry.part.kind == "optimizer":
            states.setdefault(entry.part, []).append(entry)
    optimizers = [training(part, entries) for part, entries in states.items()]
    # Of one model, all optimizers together say what is trained; of several, each may be of another.
    groups = [optimizers] if len(tensors) == 1 else [[one] for one in optimizers]
    result = Models([_model(part, of, groups) for part, of in tensors.items()], {})
    _find_averages(result.models, optimizers)
    _find_copies(result.models, optimizers)
    _find_owners(result, optimizers)
    return result


def _model(part: Part, tensors: list[Tensor], optimizers: Sequence[Sequence[_Trained]]) -> Model:
    fqns = [tensor.fqn for tensor in tensors]
    statistics = {fqn for fqn in fqns if fqn.endswith(_KEYS)}
    are_candidates = [not is_buffer(fqn, tensor, statistics) for fqn, tensor in zip(fqns, tensors, strict=True)]
    candidates = _without_averages([*compress(tensors, are_candidates)], optimizers)
    shapes = tuple(tensor.shape for tensor in candidates if _is_real(tensor))
    return Model(part, tensors, candidates, shapes=shapes, counts=Counter(shapes))


def _without_averages(candidates: list[Tensor], optimizers: Sequence[Sequence[_Trained]]) -> list[Tensor]:
    """Return the candidates without those below a key that says that they are a copy of what lies below another key:
    `online_model.0.weight ema_model.0.weight`; all if optimizers, some of which may share them, list both."""
    names = {tensor.fqn: tensor.shape for tensor in candidates}
    averages = tuple(f"{key}." for key in _averaged_below(names, _DEPTH if any(optimizers) else 0))
    others = [tensor for tensor in candidates if not tensor.fqn.startswith(averages)] if averages else candidates
    fewest, most = (sum(map(_is_real, some)) for some in (others, candidates)) if averages else (0, 0)
    listed = (sum(max(len(one.listed), len(one.shapes)) for one in together) for together in optimizers)
    return candidates if any(fewest < number <= most for number in listed) else others


def _averaged_below(names: Mapping[str, Ints], depth: int) -> Iterator[str]:
    """Yield the keys that say so, below which lies what lies below another key beside each of them, at most so deep."""
    below = _below_keys(names)
    if len(below) > _FEW:
        return
    averages = {key: _form(inner) for key, inner in below.items() if is_averaged((key,))}
    originals = {key: inner for key, inner in below.items() if key not in averages}
    if averages and originals:
        forms = {_form(inner) for inner in originals.values()}
        # Below `module.`, which is no part of a name.
        forms.add(_form({name: shape for name, shape in names.items() if name.partition(".")[0] not in averages}))
        yield from averages if forms.issuperset(averages.values()) else ()
    for key, inner in originals.items() if depth else ():
        yield from (f"{key}.{one}" for one in _averaged_below(inner, depth - 1))


def _below_keys(names: Mapping[str, Ints]) -> dict[str, dict[str, Ints]]:
    """Return the names below each first key, without it; of a few more than `_FEW`."""
    below: dict[str, dict[str, Ints]] = {}
    for name, shape in names.items():
        first, _, rest = name.partition(".")
        below.setdefault(first, {})[rest] = shape
        if len(below) > _FEW:
            break
    return below


def _is_real(tensor: Tensor) -> bool:
    return tensor.dtype.kind in ("float", "complex")


# Buffers --------------------------------------------------------------------------------------------------------------


def is_statistic(name: str, names: Collection[str]) -> bool:
    """Return whether this is one of the two buffers of a normalisation layer, which always come together."""
    match = _STATISTICS.fullmatch(name)
    return match is not None and all(f"{match[1] or ''}{key}" in names for key in _KEYS)


def is_buffer(name: str, tensor: Tensor, names: Collection[str]) -> bool:
    """Return whether a tensor, called `name` in a model, is known to be a buffer; `names` are those of the model."""
    end = name[-_END:]
    if tensor.dtype.kind in ("int", "bool") and (tensor.dtype.itemsize == 8 or not _QUANTIZED.fullmatch(end)):
        return True
    if tensor.embedded and "_buffers" in tensor.path:
        return True
    above, _, last = end.rpartition(".")
    if last == "alpha" and not tensor.shape and name.startswith(_ADAPTERS):
        return True
    # Of a million names few have other last keys, which alone tell.
    return _is_called_buffer(last if "\n" not in above else end) or (last in _KEYS and is_statistic(name, names))


@lru_cache(4096)
def _is_called_buffer(name: str) -> bool:
    return _BUFFER.fullmatch(name) is not None


def is_vocabulary(tensor: Tensor) -> bool:
    """Return whether a tensor is called as the embedding or the head of a language model is."""
    end = tensor.fqn[-_END:]
    return end.endswith(".weight") and _HEAD.fullmatch(end) is not None


def _listed(candidates: list[Tensor], optimizers: Sequence[_Trained]) -> list[Tensor]:
    """Return the candidates that are in an optimizer, or that only a parameter is called: one may be frozen."""
    names = {name for optimizer in optimizers for name in optimizer.names}
    shapes = Counter(shape for one in optimizers if not one.names for shape in one.shapes.values())
    if not names and (not shapes or any(len(one.shapes) < len(one.listed) for one in optimizers)):
        named = [tensor for tensor in candidates if is_module_name(tensor.fqn)]
        return named if len(named) == sum(len(one.listed) for one in optimizers) else candidates
    known, taken = {*shapes, *(t.shape for t in candidates if t.fqn in names)}, set[Path]()
    left: list[Tensor] = []
    for tensor in sorted(candidates, key=lambda t: not is_module_name(t.fqn)):
        if tensor.fqn in names or shapes[tensor.shape] > 0:
            shapes[tensor.shape] -= 1
            taken.add(tensor.path)
        elif is_module_name(tensor.fqn):
            left.append(tensor)
    if len(left) == 1 and left[0].shape in known and is_vocabulary(left[0]):
        left = []  # the second name of tied weights, which the optimizer has once
    taken |= {tensor.path for tensor in left}
    return [tensor for tensor in candidates if tensor.path in taken]


# Averages -------------------------------------------------------------------------------------------------------------


def _find_averages(every: Sequence[Model], optimizers: Sequence[_Trained]) -> None:
    """Mark the models whose keys say that they are copies, and of which one."""
    words = {model.part: words_in((*model.part.root, *_outermost(model))) for model in every}
    if trained_now := {model.shapes for model in every if _TRAINED in model.part.root}:
        alike = [model.part for model in every if model.shapes in trained_now]
        words |= {part: {*words[part], "averaged"} for part in alike if _TRAINED not in part.root}
    said = _COPIES if any(not words[model.part] & _COPIES for model in every) else _AVERAGES
    copies = [model for model in every if words[model.part] & said]
    others = [model for model in every if not words[model.part] & said]
    if not copies or not others:
        return
    by_form: dict[Hashable, list[Model]] = defaultdict(list)
    for model in others:
        for form in _forms(model):
            by_form[form].append(model)
    trained = [tuple(one.shapes.values()) for one in optimizers]
    for copy in copies:
        found = next((by_form[form] for form in _forms(copy) if form in by_form), [])
        if not found and copy.shapes in trained and len(others) == 1:
            found = others  # a list of parameters without the buffers
        found = found or [one for one in others[:_MANY] if copy.names and copy.names.items() <= one.names.items()]
        rest = words[copy.part] - _COPIES
        named = [one for one in found if words[one.part] & rest] if len(found) > 1 else found
        copy.average_of = named[0].part if len(named) == 1 else None
        copy.is_average = bool(found) or "ema" in words[copy.part]


def _outermost(model: Model) -> Iterator[str]:
    """Yield the first key of a model's names if it is that of all: `ema_models.0.weight`."""
    firsts = {tensor.fqn.partition(".")[0] for tensor in model.candidates[:_MANY]}
    yield from firsts if len(firsts) == 1 else ()


def is_averaged(root: Path) -> bool:
    """Return whether a key says that a model is an average of another, or follows it."""
    return not _AVERAGES.isdisjoint(words_in(root))


def words_in(root: Path) -> set[str]:
    """Return the words in the keys of a path, in lower case."""
    return {word.lower() for key in root if isinstance(key, str) for word in _WORDS.findall(key[-200:])}


def _is_plain(root: Path) -> bool:
    """Return whether a key is one that any model may have: `custom_checkpoint_0`, `hf_ckpt`."""
    return all(word in _WHOLE or word.isdecimal() for word in words_in(root))


def _numbered(root: Path) -> Path:
    """Return a path with `#` in place of its numbers; of one without, which no other has, the path."""
    return tuple(re.sub(r"\d+", "#", key[-200:]) if isinstance(key, str) else key for key in root)


def _forms(model: Model) -> Iterator[Hashable]:
    """Yield what models have alike: shapes in order; names without what is before all of them, with their shapes; and
    the same of what lies below each of a few keys."""
    yield model.shapes
    yield _form(model.names)
    if len(below := _below_keys(model.names)) <= _FEW:
        yield from map(_form, below.values())


def _form(names: Mapping[Any, Any]) -> Hashable:
    return frozenset(names.items())


def _find_copies(every: Sequence[Model], optimizers: Sequence[_Trained]) -> None:
    """Mark the models whose bytes another one has, as checksums in the files tell. Each optimizer has one of its own:
    two models that are all zeros are two."""
    fitting = Counter(_form(Counter(one.shapes.values())) for one in optimizers)
    beside = {one.part.root[:-1] for one in optimizers}
    same: dict[Hashable, list[Model]] = defaultdict(list)
    for model in sorted(every, key=lambda one: one.part.root[:-1] not in beside):
        nonempty = next((tensor for tensor in model.tensors if tensor.numel), None)
        if model.is_average or nonempty is None or checksum(nonempty) is None:
            continue  # most files have no checksums, for which not all tensors are looked at
        stored = {(tensor.fqn.rpartition(".")[2], checksum(tensor)) for tensor in model.tensors if tensor.numel}
        if all(crc for _, crc in stored):
            same[frozenset(stored), model.shapes].append(model)
    for first, *others in same.values():
        for copy in others[max(fitting[_form(first.counts)] - 1, 0) :]:
            copy.average_of = first.part


def checksum(tensor: Tensor) -> tuple[str, Ints, int] | None:
    """Return the dtype, shape and CRC of a tensor that lies in one piece; None where the file has no CRC of it."""
    # Most files have none, of which no chunk is made for this.
    chunks = tensor.chunks
    has_crc = len(chunks) == 1 and (chunks.crcs is not None or chunks.records)
    crc = chunks.at(0).extent.crc if has_crc else None
    return (tensor.dtype.name, tensor.shape, crc) if crc else None


# Optimizers -----------------------------------------------------------------------------------------------------------


def training(part: Part, entries: Iterable[Entry]) -> _Trained:
    """Return what the entries of an optimizer say of its parameters."""
    result, depth = _Trained(part), len(part.root)
    flat: dict[str, None] = {}
    for entry in entries:
        tail = entry.path[depth:]
        last = str(tail[-1]).replace("/", ".") if tail else ""
        if isinstance(entry, Tensor):
            owner, _, kind = last.rpartition(".")
            if kind in MOMENTS and (owner or len(tail) > 1):
                result.shapes.setdefault(_key(owner.removeprefix("state.") if owner else tail[-2]), entry.shape)
            elif (first := last.removeprefix("state.").partition("."))[0] in MOMENTS and first[2]:
                result.shapes.setdefault(_key(first[2]), entry.shape)  # `exp_avg.0.weight`
        elif last == "params" and "param_groups" in tail:
            result.listed += map(_key, _list(entry))
        elif last == "param_groups":
            groups = [group for group in _list(entry) if isinstance(group, dict)]
            listed = [group.get("params") for group in groups]
            result.listed += [_key(key) for keys in listed if isinstance(keys, list) for key in keys]
        if last.startswith("param_groups."):
            flat[last.removeprefix("param_groups.").rpartition(".")[0]] = None
    result.listed = result.listed or [*flat]
    return result


def _key(key: object) -> Hashable:
    if isinstance(key, str) and key.isdecimal() and len(key) < 10:
        return int(key)
    return key if isinstance(key, (str, int)) else str(type(key))


def _list(entry: Object) -> list[object]:
    if entry.nbytes > _LARGE:
        return []
    try:
        value = entry.value
    except CkptError:
        return []  # whoever needs it says so
    return value if isinstance(value, list) else []


def _find_owners(found: Models, optimizers: Sequence[_Trained]) -> None:
    """Set the models that each optimizer is of, by what fits best."""
    trained = found.originals
    by_shapes: dict[Hashable, list[Model]] = defaultdict(list)
    for model in trained:
        by_shapes[_form(model.counts)].append(model)
    unknown: list[_Trained] = []
    for optimizer in optimizers:
        owners = _fitting(optimizer, trained, by_shapes)
        if len(owners) > 1:
            owners = _named_alike(optimizer.part, owners)
        found.optimizer_of[optimizer.part] = [model.part for model in owners]
        for model in owners:
            model.optimizers.append(optimizer)
        if not owners:
            unknown.append(optimizer)
    left = [model for model in trained if not model.optimizers]
    together = Counter(shape for model in left for shape in model.shapes)
    if len(unknown) == 1 and len(left) > 1 and together == Counter(unknown[0].shapes.values()):
        # Of several models at once: `AdamW(chain(a.parameters(), b.parameters()))`.
        found.optimizer_of[unknown[0].part] = [model.part for model in left]
        for model in left:
            model.optimizers.append(unknown[0])


def _fitting(optimizer: _Trained, trained: Sequence[Model], by_shapes: Mapping[Hashable, list[Model]]) -> list[Model]:
    names, shapes = optimizer.names, [*optimizer.shapes.values()]
    if names:
        return [model for model in trained[:_MANY] if all(name in model.names for name in names)]
    if not shapes:
        number = len(optimizer.listed)
        return [model for model in trained if number and len(model.shapes) == number]
    wanted = Counter(shapes)
    if len(shapes) >= len(optimizer.listed) and (exact := by_shapes.get(_form(wanted))):
        # What is sorted by name, as safetensors are, tells nothing by its order, nor do two orders of the same names.
        forms = {_form(one.names) for one in exact if one.shapes == tuple(shapes)}
        return [one for one in exact if _form(one.names) in forms or [*one.names] == sorted(one.names)] or exact
    within = [one for one in trained[:_MANY] if wanted <= one.counts and len(optimizer.listed) <= len(one.shapes)]
    closest = min((len(model.shapes) for model in within), default=0)
    return [model for model in within if len(model.shapes) == closest]


def _named_alike(optimizer: Part, owners: list[Model]) -> list[Model]:
    """Return the one of several models whose key is beside the optimizer's, or in it; none where no key tells."""
    key = dotted(optimizer.root[-1:])
    words = words_in(optimizer.root[-1:])
    own = words - _WHOLE
    for fits in (
        [one for one in owners if own and words_in(one.part.root[-1:]) - _WHOLE == own],  # `netG optG`
        [one for one in owners if one.part.root[:-1] == optimizer.root[:-1] and len(one.part.root) > 1],
        [one for one in owners if one.part.root and words_in(one.part.root[-1:]) <= words],
        [one for one in owners if one.part.root and key.startswith(dotted(one.part.root[-1:]))],
        [one for one in owners if one.part.root[-1:] == ("model",) and words <= _PLAIN],
    ):
        if len(fits) == 1:
            return fits
    return []
