"""FSDP1's flat parameters in whatever is not one file for each rank: a DCP directory of `LOCAL_STATE_DICT`, or a file
made of one.

    use_orig_params=True       embed.weight [97], norm.weight [0], ...     the piece of one rank: DCP drops the others'
                               _flat_param [212]                           all of them, each at a multiple of 16 bytes
    use_orig_params=False      _flat_param [210]                           all there is: end to end, without padding

The flat parameter has all elements. Where its parameters begin follows from their shapes, their order, and the dtype in
which they are computed, which the files do not say: what fits the number of elements, and the lengths of the pieces, in
one way only is taken. `flat` has the same for files of ranks, which keep the pieces of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from math import prod
from typing import Any

from ckpttool.catalogue import boxes
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, Extent, Path, Tensor, dotted
from ckpttool.catalogue.protocols import OpenOptions, Source
from ckpttool.errors import CkptError, CorruptError, UsageError
from ckpttool.flat.fsdp1_parameters import no_shapes, owner_of, shapes_needed, unit_of, unordered
from ckpttool.layout.optimizer.names_of_ids import is_model_order
from ckpttool.layout.optimizer.parse import parse_key
from ckpttool.text import some

_ALIGNMENTS = (2, 4, 8, 16)  # elements of 16 bytes, of every dtype that FSDP computes in
_MAX_LEFT_OUT = 2  # kinds of tensors that look whole and are
_SAMPLED = 1024  # elements of each end of a piece
_PADDING = 42  # what FSDP puts between parameters
_MAX_SHARED = 2  # names of one unit that are other names of its parameters
Read = Callable[[Tensor, int, int], Any]
"""Reads elements of a tensor of one dimension, from one on and so many, as an array of numbers."""


@dataclass(slots=True)
class _Model:
    """A state dict with flat parameters: them by unit, and the names of its other tensors, in order."""

    root: Path
    flats: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the parameters of a unit begin in its flat parameter, and which names are others of the same parameter."""

    begins: tuple[tuple[str, int], ...]
    shared: tuple[tuple[str, str], ...] = ()


def restore(source: Source, options: OpenOptions, read: Read) -> None:
    """Replace the flat parameters of a source by the parameters in them. Without shapes, or with those of another
    model, that is a fault of its catalogue, and so is an optimizer of which the pieces of one rank are left."""
    catalogue = source.catalogue
    models = _models(catalogue)
    if not models or any("needs" in fault.facts for fault in catalogue.faults):
        return
    catalogue.faults += _lost_optimizers(catalogue)
    try:
        if options.shapes is None:
            flats = [dotted(flat.path) for model in models for flat in model.flats.values()]
            raise shapes_needed(f"{some(flats, 2)}: flat parameters of FSDP1 (LOCAL_STATE_DICT)", names=flats)
        for model in models:
            _restore(source, read, model, options.shapes, ordered=options.ordered)
    except CkptError as error:
        catalogue.faults.append(error)


def _models(catalogue: Catalogue) -> list[_Model]:
    models: dict[Path, _Model] = {}
    for tensor in catalogue.tensors:
        unit = unit_of(tensor.path[-1]) if tensor.path else None
        if unit is not None and len(tensor.shape) == 1 and tensor.dtype.kind == "float":
            models.setdefault(tensor.path[:-1], _Model(tensor.path[:-1])).flats[unit] = tensor
    for tensor in catalogue.tensors if models else ():
        model = models.get(tensor.path[:-1])
        if model is not None and isinstance(tensor.path[-1], str) and unit_of(tensor.path[-1]) not in model.flats:
            model.others[tensor.path[-1]] = tensor
    return list(models.values())


def _lost_optimizers(catalogue: Catalogue) -> Iterator[CorruptError]:
    """Yield a fault for each raw `optimizer.state_dict()`: the ranks have their pieces under the same names, of which
    DCP keeps one."""
    shapes: dict[Path, list[Tensor]] = defaultdict(list)
    for tensor in catalogue.tensors:
        key = parse_key(tensor.path)
        if key is not None and key.section == "state" and type(key.owner) is int:
            shapes[key.root].append(tensor)
    for root, tensors in shapes.items():
        pieces = [tensor.name for tensor in tensors if len(tensor.shape) == 1]
        if pieces and all(len(tensor.shape) < 2 for tensor in tensors):
            name = dotted(root)
            what = f"`{name or 'the optimizer'}` is the raw state of an optimizer over flat parameters"
            yield CorruptError(
                f"{what}: each rank had its own piece of `{pieces[0]}` and {len(pieces) - 1} more, and one is left",
                hint=f"save it with `FSDP.optim_state_dict`; or leave it out: `--drop {name or 'optimizer'}`",
                concerns=[name or tensor.name for tensor in tensors],
            )


def _restore(source: Source, read: Read, model: _Model, shapes: Mapping[str, Ints], *, ordered: bool) -> None:
    """Put the parameters of one state dict in the place of its flat parameters, and of the pieces under their names."""
    flats = {unit: flat for unit, flat in model.flats.items() if shapes.get(str(flat.path[-1])) != flat.shape}
    lines = [name for name, one in model.others.items() if len(one.shape) == 1 and one.dtype.kind == "float"]
    pieces = {name for name in lines if shapes.get(name) != model.others[name].shape}
    missing = sorted(pieces - shapes.keys())
    if missing:
        raise no_shapes(missing)
    order = [name for name in shapes if name not in model.others or name in pieces]
    if pieces:
        order = [name for name in shapes if name in {*lines}] if ordered else lines
        ordered = ordered or is_model_order(lines)
    restored: dict[str, Tensor] = {}
    for unit, flat in flats.items():
        names = [name for name in order if owner_of(name, flats) == unit]
        restored |= _restored(source, read, model, flat, names, shapes, pieces, ordered=ordered)
    _replace(source.catalogue, flats, restored, shapes)


def _restored(
    source: Source,
    read: Read,
    model: _Model,
    flat: Tensor,
    names: Sequence[str],
    shapes: Mapping[str, Ints],
    pieces: set[str],
    *,
    ordered: bool,
) -> dict[str, Tensor]:
    """Return the parameters in a flat parameter by name."""
    layouts = list(dict.fromkeys(_layouts(model, flat, names, shapes, pieces)))
    layouts = [
        one for one in layouts if _has_padding(one, read, flat, shapes) and _has_values(one, read, flat, model, shapes)
    ]
    if not layouts:
        total = sum(prod(shapes[name]) for name in names)
        raise CorruptError(
            f"`{dotted(flat.path)}` has {flat.shape[0]} elements, and its {len(names)} parameters need {total}: "
            f"{some(list(names))}",
            hint="the shapes are those of another model, or in another order than that of `model.state_dict()`",
            tensor=dotted(flat.path),
            found=flat.shape[0],
            expected=total,
        )
    if len(layouts[0].begins) > 1 and not ordered:
        raise unordered(f"`{dotted(flat.path)}`", len(layouts[0].begins))
    if len(layouts) > 1:
        differing = sorted({name for name, _ in {*layouts[0].begins} ^ {*layouts[1].begins}})
        raise UsageError(
            f"`{dotted(flat.path)}`: the offsets of its parameters are ambiguous: {some(differing)}",
            hint="save the model with `FULL_STATE_DICT` or `SHARDED_STATE_DICT`",
            tensor=dotted(flat.path),
        )
    placed = [
        (chunk.offsets[0], chunk.sizes[0], source.resolve(flat, chunk)) for chunk in flat.chunks if chunk.sizes[0]
    ]
    if any(not extent.plain or extent.lease is not None for *_, extent in placed):
        raise UsageError(
            f"`{dotted(flat.path)}`: flat parameters are not restored from compressed items",
            hint="save them without stream extensions, or with `SHARDED_STATE_DICT`",
            tensor=dotted(flat.path),
        )
    found = {}
    for name, begin in layouts[0].begins:
        path, shape = (*model.root, name), shapes[name]
        chunks = _cut(shape, begin, placed, flat.dtype.itemsize)
        found[name] = Tensor(path, flat.dtype, shape, chunks, part=flat.part)
    for name, first in layouts[0].shared:
        one = found[first]
        found[name] = Tensor((*model.root, name), one.dtype, one.shape, one.chunks, alias=one.path, part=one.part)
    return found


def _cut(shape: Ints, begin: int, placed: Iterable[tuple[int, int, Extent]], itemsize: int) -> Chunks:
    """Return the chunks of a parameter that begins at an element of a flat parameter, of which `placed` has the start,
    the length and the place of each piece."""
    chunks, end = Chunks(), begin + prod(shape)
    for start, size, extent in placed:
        low, high = max(begin, start), min(end, start + size)
        for (offsets, sizes), at in boxes.flat_range(shape, low - begin, high - begin):
            offset, nbytes = extent.offset + (low - start + at) * itemsize, prod(sizes) * itemsize
            chunks.add(offsets, sizes, extent._replace(offset=offset, nbytes=nbytes))
    return chunks


# Where parameters begin -----------------------------------------------------------------------------------------------


def _layouts(
    model: _Model, flat: Tensor, names: Sequence[str], shapes: Mapping[str, Ints], pieces: set[str]
) -> Iterator[_Layout]:
    """Yield every layout that has as many elements as the flat parameter, and pieces as long as those beside it."""
    # What has the shape of the parameter may be all of it on one rank, or a buffer, which is on each.
    kinds = {name.rpartition(".")[2] for name in names if name in model.others and name not in pieces}
    left_out = chain.from_iterable(combinations(sorted(kinds), count) for count in range(_MAX_LEFT_OUT + 1))
    alignments = _ALIGNMENTS if pieces else (1,)
    for without in dict.fromkeys([*left_out, tuple(sorted(kinds))]):
        own = [name for name in names if name in pieces or name.rpartition(".")[2] not in without]
        for shared in _shared(own, shapes):
            kept = [name for name in own if name not in shared]
            for alignment in alignments:
                begins, total = _begins(kept, shapes, alignment)
                if _fits(total, flat, padded=bool(pieces)) and _has_lengths(begins, flat, model, shapes, pieces):
                    yield _Layout(tuple(begins), tuple(shared.items()))


def _shared(names: Sequence[str], shapes: Mapping[str, Ints]) -> Iterator[dict[str, str]]:
    """Yield what may be further names of parameters, each with the first: none, and few that are of one shape."""
    first: dict[Ints, str] = {}
    again = {name: first[shapes[name]] for name in names if first.setdefault(shapes[name], name) != name}
    for count in range(_MAX_SHARED + 1):
        for some_of in combinations(again, count):
            yield {name: again[name] for name in some_of}


def _begins(names: Sequence[str], shapes: Mapping[str, Ints], alignment: int) -> tuple[list[tuple[str, int]], int]:
    begins, end = [], 0
    for name in names:
        begin = -(-end // alignment) * alignment
        begins.append((name, begin))
        end = begin + prod(shapes[name])
    return begins, end


def _fits(total: int, flat: Tensor, *, padded: bool) -> bool:
    numel = flat.shape[0]
    world = _world(flat)
    return numel == (-(-total // world) * world if padded else total)


def _world(flat: Tensor) -> int:
    """Return how many ranks have a piece of a flat parameter of which all are of one length."""
    return max(1, sum(1 for sizes in flat.chunks.sizes if sizes[0]))


def _has_lengths(
    begins: Iterable[tuple[str, int]], flat: Tensor, model: _Model, shapes: Mapping[str, Ints], pieces: set[str]
) -> bool:
    """Return whether each piece that is left is as long as what some rank has of its parameter."""
    bounds = [
        (offsets[0], offsets[0] + sizes[0])
        for offsets, sizes in zip(flat.chunks.offsets, flat.chunks.sizes, strict=True)
    ]
    for name, begin in begins:
        if name in pieces:
            end = begin + prod(shapes[name])
            lengths = {max(0, min(end, high) - max(begin, low)) for low, high in bounds}
            if model.others[name].shape[0] not in lengths:
                return False
    return True


def _has_values(layout: _Layout, read: Read, flat: Tensor, model: _Model, shapes: Mapping[str, Ints]) -> bool:
    """Return whether what is left of the pieces begins and ends with the bytes that the flat parameter has there."""
    begins = dict(layout.begins)
    begins |= {name: begins[first] for name, first in layout.shared}
    for name, begin in begins.items():
        piece = model.others.get(name)
        if piece is None or not piece.numel or piece.dtype != flat.dtype:
            continue
        count = min(piece.numel, _SAMPLED)
        places = [(at, read(piece, at, count).tobytes()) for at in {0, piece.numel - count}]
        end, found = begin + prod(shapes[name]), False
        for offsets, sizes in zip(flat.chunks.offsets, flat.chunks.sizes, strict=True):
            low, high = max(begin, offsets[0]), min(end, offsets[0] + sizes[0])
            if high - low == piece.numel:
                found |= all(read(flat, low + at, count).tobytes() == given for at, given in places)
        if not found:
            return False
    return True


def _has_padding(layout: _Layout, read: Read, flat: Tensor, shapes: Mapping[str, Ints]) -> bool:
    """Return whether everything between the parameters is padding."""
    last = 0
    for name, begin in (*layout.begins, ("", flat.shape[0])):
        if begin > last and not (read(flat, last, begin - last) == _PADDING).all():
            return False
        last = begin + prod(shapes.get(name, ()))
    return True


def _replace(
    catalogue: Catalogue, flats: Mapping[str, Tensor], restored: Mapping[str, Tensor], shapes: Mapping[str, Ints]
) -> None:
    """Put restored parameters in the place of the first entry of their state dict, in the order of the shapes."""
    gone = {tensor.path for tensor in (*flats.values(), *restored.values())}
    own = {tensor.path: tensor for name in shapes if (tensor := restored.get(name)) is not None}
    entries: dict[Path, Entry] = {}
    for path, entry in catalogue.entries.items():
        if path in gone:
            entries |= own
            own = {}
        else:
            entries[path] = entry
    catalogue.entries = entries
