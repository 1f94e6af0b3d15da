"""FSDP1's flat parameters: `LOCAL_STATE_DICT`, whose files have pieces of one dimension and no shapes.

    use_orig_params=True       rank 0             rank 1
      layers.0.norm.weight     7 elements         0 elements       1-D pieces; end to end they are the parameter
      layers.0.qkv.weight      140                7
      layers.0._flat_param     [0, 148) of 296    [148, 296)       ShardedTensor; says the same once more
    use_orig_params=False
      layers.0._flat_param     [0, 77) of 154     [77, 154)        all there is: the parameters of the unit, end to end
    either
      tokens_seen              0-d                0-d              buffers and ignored parameters, whole on each rank

A unit is a module that FSDP wrapped. Its flat parameter holds the parameters below it that no nested unit holds, in the
order in which the modules register them, a shared one once. With `use_orig_params=True` each begins at a multiple of 16
bytes (of the dtype it is computed in) and the end is padded to a multiple of the world size; with False there is no
padding in the files. Upstream: `torch/distributed/fsdp/_flat_param.py` and `_state_dict_utils.py`, torch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.protocols import OpenOptions
from ckpttool.catalogue.shown import spelt
from ckpttool.errors import CorruptError, UsageError
from ckpttool.flat.pieces import (
    MISSING,
    Counted,
    FlatPiece,
    Parameter,
    Place,
    Rebuilt,
    Trees,
    Unit,
    is_line,
    lined_up,
    of_two_saves,
    rebuild,
)
from ckpttool.serialization.dtensor import FLAT_PARAM, RankShard
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.text import some


class ModelParameters(NamedTuple):
    """What became of a model's state dict. `tensors` are the parameters, under every name they have; `whole`, the names
    that each rank has a whole tensor (or another value) under; `counted`, what the optimizer has ids for, in order."""

    tensors: dict[str, Rebuilt]
    whole: tuple[str, ...]
    counted: tuple[Counted, ...]


class _Flat(NamedTuple):
    """A flat parameter as the files have it: the module it stands for, and its pieces, each once."""

    unit: str
    dtype: Dtype
    numel: int
    pieces: tuple[FlatPiece, ...]

    @property
    def module(self) -> str:
        return f"`{self.unit}`" if self.unit else "the root"


def is_flat(trees: Trees) -> bool:
    """Return whether these are the model state dicts of a `LOCAL_STATE_DICT` set. Pure."""
    return any(isinstance(value, RankShard) and unit_of(name) is not None for name, value in trees[0].items())


def no_shapes(missing: Sequence[str]) -> CorruptError:
    """Return the error for parameters whose shapes are not known."""
    message = f"there is no shape for {len(missing)} parameters of the files: {some(missing)}"
    hint = "`--shapes` has to name a checkpoint of the same model, with the same names"
    return CorruptError(message, hint=hint, missing=missing)


def model(trees: Trees, place: Place, options: OpenOptions, files: Sequence[str] = ()) -> ModelParameters:
    """Return the parameters of a `LOCAL_STATE_DICT` set. `files` are the names of the ranks' files, for messages. Pure.

    Raises UsageError when there are no shapes, or their order has to be known and is not; CorruptError when they do not
    fit.
    """
    if options.shapes is None:
        where = some(files, 2) or "these files"
        raise shapes_needed(f"{where}: a LOCAL_STATE_DICT set has flat parameters", files=list(files))
    rank = next((rank for rank, tree in enumerate(trees) if tree.keys() != trees[0].keys()), None)
    if rank is not None:
        odd = sorted(map(str, trees[rank].keys() ^ trees[0].keys()))
        raise of_two_saves(f"rank 0 and rank {rank} do not have the same entries: {some(odd)}", ranks=[0, rank])
    flats = {flat.unit: flat for flat in _flat_parameters(trees)}
    pieces = _pieces_by_name(trees, flats.values(), options.shapes)
    if pieces:
        return _from_pieces(trees, place, flats, pieces, options.shapes)
    return _from_flats(trees, place, flats, options)


def shapes_needed(what: str, **facts: Any) -> UsageError:
    """Return the error for flat parameters without the shapes of what is in them. Pure."""
    return UsageError(
        f"{what}, and not the shapes of what is in them",
        hint="pass `--shapes FROM`: a checkpoint of the same model saved by torch or DCP, a safetensors file, or "
        'JSON of names and shapes in model order, like `{"embed.weight": [29, 7]}`',
        needs="--shapes",
        **facts,
    )


def unordered(flat: str, count: int, **facts: Any) -> UsageError:
    """Return the error for a flat parameter whose parameters are not known in order. Pure."""
    given = "the shapes that were given are in alphabetical or some other order, not in that of the model"
    how = "a checkpoint that torch or DCP saved, or JSON of names and shapes in the order of `model.state_dict()`"
    message = f"{flat} holds {count} parameters one after the other, and {given}"
    return UsageError(message, hint=f"pass `--shapes` {how}", **facts)


# What the files hold --------------------------------------------------------------------------------------------------


def unit_of(name: Any) -> str | None:
    """Return the module whose flat parameter this is the name of; the root is ""."""
    if isinstance(name, str) and not name.endswith(FLAT_PARAM):  # as of a million tensors all
        return None
    unit, _, last = spelt(name).rpartition(".")
    return unit if last == FLAT_PARAM else None


def _flat_parameters(trees: Trees) -> Iterator[_Flat]:
    for name, first in trees[0].items():
        unit = unit_of(name)
        if unit is None or not isinstance(first, RankShard):
            continue
        pieces: list[FlatPiece] = []
        for rank, tree in enumerate(trees):
            shard = tree[name]
            if not isinstance(shard, RankShard) or (shard.dtype, shard.shape) != (first.dtype, first.shape):
                raise _differing(name, rank, _described(shard), _described(first))
            for offsets, ref in ((local.offsets, local.ref) for local in shard.boxes):
                if not is_line(ref) or len(offsets) != 1 or len(first.shape) != 1:
                    message = f"a flat parameter has one dimension, this has {_described(shard)}"
                    raise CorruptError(f"`{name}`: rank {rank}: {message}", tensor=name, rank=rank)
                pieces.append(FlatPiece(offsets[0], offsets[0] + ref.shape[0], rank, ref))
        numel = first.shape[0]
        fault = boxes.tiling_fault((numel,), [(p.start,) for p in pieces], [(p.stop - p.start,) for p in pieces])
        if fault is not None:
            message = f"flat parameter `{name}` of {numel} elements is not covered exactly: {fault}"
            raise CorruptError(message, hint=MISSING, tensor=name, expected=numel)
        yield _Flat(unit, first.dtype, numel, tuple(pieces))


def _differing(name: str, rank: int, found: str | Dtype, expected: str | Dtype) -> CorruptError:
    return of_two_saves(f"`{name}`: rank {rank} has {found}, but rank 0 {expected}", tensor=name, ranks=[0, rank])


def _described(value: Any) -> str:
    is_tensor = isinstance(value, (RankShard, TensorRef))
    return f"{value.dtype} {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"


def _pieces_by_name(trees: Trees, flats: Iterable[_Flat], shapes: Mapping[str, Ints]) -> dict[str, list[TensorRef]]:
    """Return what each rank has of every parameter that is there under its own name."""
    inside = {(p.rank, p.ref.storage.key) for flat in flats for p in flat.pieces}
    pieces: dict[str, list[TensorRef]] = {}
    for name in trees[0]:
        refs = [tree[name] for tree in trees]
        if not isinstance(name, str) or not all(map(is_line, refs)):
            continue
        views = any((rank, ref.storage.key) in inside for rank, ref in enumerate(refs) if ref.shape[0])
        # Flat parameters that were moved to the CPU are no longer what the pieces are views of. A buffer has the same
        # length everywhere, and that length is its shape.
        if views or len({ref.shape for ref in refs}) > 1 or shapes.get(name, refs[0].shape) != refs[0].shape:
            pieces[name] = refs
    return pieces


def owner_of(name: str, units: Iterable[str]) -> str | None:
    """Return the innermost unit that a parameter lies in."""
    around = [unit for unit in units if not unit or name.startswith(f"{unit}.")]
    return max(around, key=len, default=None)


def _spare(trees: Trees, name: str) -> Iterator[Parameter]:
    """Yield a tensor of which every rank has all: a parameter that FSDP was told to ignore, or a buffer."""
    ref = trees[0][name]
    if isinstance(ref, TensorRef) and ref.dtype.kind in ("float", "complex"):
        yield Parameter(name, ref.shape, (prod(ref.shape),) * len(trees), certain=False)


# use_orig_params=True -------------------------------------------------------------------------------------------------


def _from_pieces(
    trees: Trees,
    place: Place,
    flats: Mapping[str, _Flat],
    pieces: Mapping[str, list[TensorRef]],
    shapes: Mapping[str, Ints],
) -> ModelParameters:
    first = _tied_pieces(pieces)
    known = {name: shapes[name] for name in pieces if name in shapes}
    # A shared parameter may be in the source of the shapes under one of its names only.
    known = {first[name]: shape for name, shape in known.items()} | known
    missing = [name for name in pieces if first[name] not in known]
    if missing:
        raise no_shapes(missing)
    tensors: dict[str, Rebuilt] = {}
    counted: list[Counted] = []
    numels: dict[str | None, list[int]] = {unit: [] for unit in (*flats, None)}
    for name in trees[0]:
        if name not in pieces:
            counted += _spare(trees, name)
            continue
        refs = pieces[name]
        shape = known.get(name, known[first[name]])
        parameter = Parameter(name, shape, tuple(ref.shape[0] for ref in refs))
        tensors |= rebuild(refs[0].dtype, [parameter], _line(parameter, refs), place)
        if first[name] == name:
            counted.append(parameter)
            numels[owner_of(name, flats)].append(prod(shape))
    for unit, flat in flats.items():
        total = sum(numels[unit])
        # How far each parameter is padded depends on the dtype of the computation, which is not in the files.
        if not total <= flat.numel < total + 15 * len(numels[unit]) + len(trees):
            what = (
                f"the pieces under the names of its parameters have {total} elements, the flat parameter {flat.numel}"
            )
            raise of_two_saves(f"{flat.module}: {what}", tensor=unit, found=flat.numel, expected=total)
    whole = tuple(name for name in trees[0] if name not in pieces and unit_of(name) not in flats)
    return ModelParameters(tensors, whole, tuple(counted))


def _line(parameter: Parameter, refs: Sequence[TensorRef]) -> tuple[FlatPiece, ...]:
    """Return the pieces of one parameter, end to end in the order of the ranks."""
    name, shape, *_ = parameter
    odd = next((rank for rank, ref in enumerate(refs) if ref.dtype != refs[0].dtype), None)
    if odd is not None:
        raise _differing(name, odd, refs[odd].dtype, refs[0].dtype)
    numel = sum(ref.shape[0] for ref in refs)
    if numel != (need := prod(shape)):
        message = f"`{name}`: the pieces of all ranks have {numel} elements, but {list(shape)} needs {need}"
        hint = "the shapes are those of another model, or a rank's file is missing"
        raise CorruptError(message, hint=hint, tensor=name, found=numel, expected=need)
    return lined_up(enumerate(refs))


def _tied_pieces(pieces: Mapping[str, list[TensorRef]]) -> dict[str, str]:
    """Return for each name the first one whose pieces are the same bytes."""
    names: dict[object, str] = {}
    first: dict[str, str] = {}
    for name, refs in pieces.items():
        where = tuple((r.storage.key, r.offset, r.shape[0]) if r.shape[0] else None for r in refs)
        first[name] = names.setdefault(where, name) if any(where) else name
    return first


# use_orig_params=False ------------------------------------------------------------------------------------------------


def _from_flats(trees: Trees, place: Place, flats: Mapping[str, _Flat], options: OpenOptions) -> ModelParameters:
    shapes = options.shapes or {}
    members: dict[str | None, dict[str, Ints]] = {unit: {} for unit in (*flats, None)}
    for name, shape in shapes.items():
        # What the files have under its own name is a buffer, or a parameter that FSDP ignored.
        if name not in trees[0]:
            members[owner_of(name, flats)][name] = shape
    tensors: dict[str, Rebuilt] = {}
    counted: list[Counted] = []
    # The files have everything in the order in which the model has its parameters, flat ones and others.
    for entry in trees[0]:
        module = unit_of(entry)
        if module is not None and module in flats:
            unit, of_unit = _cut(flats[module], members[module], place, len(trees), ordered=options.ordered)
            counted.append(unit)
            tensors |= of_unit
        else:
            counted += _spare(trees, entry)
    whole = tuple(name for name in trees[0] if unit_of(name) not in flats)
    return ModelParameters({name: tensors[name] for name in shapes if name in tensors}, whole, tuple(counted))


def _cut(
    flat: _Flat, shapes: Mapping[str, Ints], place: Place, world: int, *, ordered: bool
) -> tuple[Unit, dict[str, Rebuilt]]:
    """Return what a flat parameter is made of, by the shapes of the parameters that lie in its unit."""
    first = _ties(flat, shapes)
    own = tuple(Parameter(name, shape) for name, shape in shapes.items() if first[name] == name)
    if len(own) > 1 and not ordered:
        raise unordered(f"the flat parameter of {flat.module}", len(own), unit=flat.unit)
    tensors = dict(rebuild(flat.dtype, own, flat.pieces, place))
    step = max((piece.stop - piece.start for piece in flat.pieces), default=0)
    return Unit(flat.unit, own, (step,) * world), {name: tensors[first[name]] for name in shapes}


def _ties(flat: _Flat, shapes: Mapping[str, Ints]) -> dict[str, str]:
    """Return for each name of a unit the first of the same parameter: those make up the flat parameter.

    Nothing says which names are shared; but they are of the same shape, and their elements are not there twice."""
    total = sum(map(prod, shapes.values()))
    if not shapes:
        message = f"the shapes name no parameter of {flat.module}, whose flat parameter has {flat.numel} elements"
        hint = "the shapes are those of another model"
        raise CorruptError(message, hint=hint, unit=flat.unit, found=flat.numel, expected=0)
    if total == flat.numel:
        return {name: name for name in shapes}
    first: dict[Ints, str] = {}
    again = [name for name, shape in shapes.items() if first.setdefault(shape, name) != name]
    shared = _only_choice({name: prod(shapes[name]) for name in again}, total - flat.numel)
    if shared is None:
        need = f"its {len(shapes)} parameters need {total}: {some(list(shapes))}"
        message = f"the flat parameter of {flat.module} has {flat.numel} elements, but {need}"
        hint = "the shapes are those of another model; or leave all but one of the names of a shared parameter out"
        raise CorruptError(message, hint=hint, unit=flat.unit, found=flat.numel, expected=total)
    # Names of one shape are all shared or all not, or there would have been another choice.
    return {name: first[shape] if name in shared else name for name, shape in shapes.items()}


def _only_choice(numels: Mapping[str, int], total: int) -> tuple[str, ...] | None:
    """Return the names whose numbers of elements make up `total`; None unless there is exactly one choice.

    One name that does is taken whatever else might add up: shared embeddings, beside layers that are all alike."""
    if total <= 0:
        return None
    single = [name for name, numel in numels.items() if numel == total]
    if single:
        return (single[0],) if len(single) == 1 else None
    # For each sum: what makes it up, or None when two choices do.
    sums: dict[int, tuple[str, ...] | None] = {0: ()}
    for name, numel in numels.items():
        for have, chosen in list(sums.items()):
            if have + numel <= total and numel:
                again = have + numel in sums or chosen is None
                sums[have + numel] = None if again else (*(chosen or ()), name)
        if len(sums) > 100_000:
            return None
    return sums.get(total)
