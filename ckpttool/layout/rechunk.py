"""Plans which rank holds which box of which tensor: a catalogue becomes one with other chunks. Pure.

    whole        one chunk on rank 0                           formats that know no others
    as_stored    the source's own chunks on its own ranks      dcp
    over_mesh    as FSDP2 cuts parameters on a mesh            --to-world, --to-mesh, --placements
    like         the boxes and the ranks of another            --like

Parameters are sharded and buffers are not. Checkpoints do not always say which is which, see `sharded`.
Source: `torch/distributed/fsdp/_fully_shard/_fsdp_param.py` of torch 2.13.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpttool.catalogue import boxes, parts
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, File, Object, Path, Tensor, dotted
from ckpttool.catalogue.patterns import any_of
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import UsageError
from ckpttool.layout.mesh import Mesh, Placements, mesh_boxes, parse_placements, world_mesh
from ckpttool.layout.move import derived, rebuilt
from ckpttool.layout.optimizer.parse import parse_key
from ckpttool.storage.stores import local_path
from ckpttool.text import is_or_are, meant, plural, size, some


def whole(catalogue: Catalogue, ranks: int = 1) -> Catalogue:
    """Plan every tensor as one chunk on rank 0, for formats without sharding, or on each of several ranks."""
    return _placed(catalogue, lambda tensor: _whole_on(tensor, range(ranks)))


def as_stored(catalogue: Catalogue, files: Sequence[int | None]) -> Catalogue:
    """Plan the chunks of the source on the ranks that wrote them; `files[i]` is the rank of file i."""
    place = _as_on(files)
    return _placed(catalogue, lambda tensor: place(tensor.origin or tensor))


def _whole_on(tensor: Tensor, ranks: Sequence[int] = (0,)) -> Chunks:
    if len(ranks) == 1:
        return Chunks.whole_on(tensor.shape, ranks[0])
    return Chunks.placed([(boxes.whole(tensor.shape), rank) for rank in ranks])


def _as_on(files: Sequence[int | None]) -> Callable[[Tensor], Chunks]:
    """Return a function that plans the chunks that a tensor has, on the ranks that wrote them."""
    shared: dict[bytes, array[int]] = {}  # of the ranks of a tensor's chunks, there are as many columns as shardings

    def place(tensor: Tensor) -> Chunks:
        chunks = tensor.chunks
        if len(chunks) == 1 and chunks.sizes[0] == tensor.shape:
            return Chunks.whole_on(tensor.shape, files[chunks.file[0]] or 0)
        ranks = array("l", [files[file] or 0 for file in chunks.file])
        # A rank without elements needs no chunk; a tensor without elements needs one.
        full = [i for i, sizes in enumerate(chunks.sizes) if 0 not in sizes]
        if not full:
            return _whole_on(tensor, [ranks[0] if ranks else 0])
        if len(full) == len(ranks):
            return Chunks.from_columns(chunks.offsets, chunks.sizes, shared.setdefault(ranks.tobytes(), ranks))
        offsets, sizes = [chunks.offsets[i] for i in full], [chunks.sizes[i] for i in full]
        return Chunks.from_columns(offsets, sizes, array("l", [ranks[i] for i in full]))

    return place


def like(catalogue: Catalogue, reference: Catalogue, name: str) -> Catalogue:
    """Plan the boxes and ranks that each tensor has in another checkpoint, which messages call `name`.

    Raises UsageError for a tensor that is not there, or has another shape.
    """
    stored = _as_on([file.rank for file in reference.files])
    by_name = {t.name: t for t in reference.tensors if not t.embedded}
    other_model = "it must be a checkpoint of the same model"

    def place(tensor: Tensor) -> Chunks:
        match = by_name.get(tensor.name)
        if match is None and tensor.part.kind in parts.PER_RANK:
            # What belongs to a rank is of this world, not of a layout.
            return _whole_on(tensor)
        if match is None:
            hint = meant(tensor.name, list(by_name), other_model)
            if tensor.part.kind == "optimizer" and any(t.part.kind == "optimizer" for t in reference.tensors):
                hint = "where the two spell the optimizer otherwise, `ckpttool convert --optim-keys fqn` first"
            raise UsageError(f"`--like {name}` has no tensor `{tensor.name}`", hint=hint, tensor=tensor.name)
        if match.shape != tensor.shape:
            there, here = list(match.shape), list(tensor.shape)
            message = f"`--like {name}`: tensor `{tensor.name}` is {there} there, but {here} here"
            raise UsageError(message, hint=other_model, tensor=tensor.name, found=there, expected=here)
        return stored(match)

    return _placed(catalogue, place)


def _placed(catalogue: Catalogue, place: Callable[[Tensor], Chunks]) -> Catalogue:
    planned: dict[Path, Chunks] = {}

    def replan(entry: Entry) -> Entry:
        if isinstance(entry, Object):
            return entry
        chunks = planned.get(entry.alias) if entry.alias is not None else None
        planned[entry.path] = chunks or (_whole_on if entry.embedded else place)(entry)
        return derived(entry, chunks=planned[entry.path])

    return rebuilt(catalogue, map(replan, catalogue.entries.values()), catalogue.containers)


# A mesh ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rules:
    """What overrules the guess of which tensors are cut, and along which dimension:
    `Rules(placements=(("*.wq.weight", "tp:0"),), replicate=("*.inv_freq",))`.

    A pattern matches the full name of a tensor, or its name within the model (`layers.0.wq.weight`). The first that
    matches counts. The optimizer's state of a parameter follows the parameter.
    """

    placements: tuple[tuple[str, str], ...] = ()
    shard: tuple[str, ...] = ()
    replicate: tuple[str, ...] = ()


NO_RULES = Rules()
NO_TWINS: Mapping[Path, Path] = {}


def over_world(catalogue: Catalogue, ranks: int, *, everywhere: bool = False) -> Catalogue:
    """Plan as `over_mesh` does, for ranks in one dimension."""
    return over_mesh(catalogue, world_mesh(ranks), everywhere=everywhere)


def over_mesh(
    catalogue: Catalogue,
    mesh: Mesh,
    rules: Rules = NO_RULES,
    *,
    everywhere: bool = False,
    twins: Mapping[Path, Path] = NO_TWINS,
) -> Catalogue:
    """Plan parameters and their optimizer state as FSDP2 shards them, and the rest whole, balanced over the ranks.
    With `everywhere`, each rank holds the tensors that are not cut: one file for each rank, as with rank files.
    `twins` are tensors with the bytes of a parameter, which they are tied to, by their paths; see `possible_twins`.

    A box that several ranks hold is planned on the one that holds the least. Tied tensors are on the same ranks.
    Raises UsageError for rules that match nothing, contradict each other or do not fit a tensor.
    """
    cutting = _Cutting(catalogue, mesh, rules, untrained=everywhere, twins=twins)
    cut = cutting.all()
    holders = _Ranks(mesh)

    def place(tensor: Tensor) -> Chunks:
        if tensor.path in cut:
            return holders.cut(tensor, cut[tensor.path])
        return _whole_on(tensor, range(mesh.world)) if everywhere else holders.whole(tensor)

    planned = _placed(catalogue, place)
    planned.warnings = [*planned.warnings, *cutting.warnings]
    planned.files = [File(local_path(""), f"rank {rank}", 0, rank) for rank in range(mesh.world)] if everywhere else []
    return planned


def possible_twins(catalogue: Catalogue, *, everywhere: bool = False) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield each tensor of a model that nothing says to be a parameter, with the parameters of its shape and dtype: it
    is the second name of one of them if it has the same bytes. FSDP2 saves each name of tied weights by itself, and
    the optimizer has state of the first only."""
    tensors = [tensor for tensor in catalogue.tensors if not tensor.embedded]
    guessed = sharded(tensors, everywhere)
    parameters: dict[tuple[boxes.Ints, str], list[Tensor]] = defaultdict(list)
    models = [t for t in tensors if t.part.kind == "model" and t.alias is None]
    for tensor in models:
        if tensor.path in guessed:
            parameters[tensor.shape, tensor.dtype.name].append(tensor)
    for tensor in models:
        alike = parameters.get((tensor.shape, tensor.dtype.name)) if tensor.path not in guessed else None
        if alike:
            yield tensor, alike


class _Ranks:
    """The ranks of a mesh and how much each holds so far. Tensors of one shape share the columns of their boxes, and of
    who has them: a model has few shapes, and 1,024 ranks have many boxes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._load = [0] * mesh.world
        self._boxes: dict[object, tuple[list[boxes.Ints], list[boxes.Ints], list[list[int]], list[int]]] = {}
        self._owners: dict[bytes, array[int]] = {}

    def whole(self, tensor: Tensor) -> Chunks:
        rank = self._load.index(min(self._load))
        self._load[rank] += tensor.nbytes
        return _whole_on(tensor, [rank])

    def cut(self, tensor: Tensor, placed: Placements) -> Chunks:
        key = (tensor.shape, *sorted(placed.items()))
        if key not in self._boxes:
            pairs = list(mesh_boxes(tensor.shape, self._mesh, placed))
            sizes = [size for (_, size), _ in pairs]
            offsets, holders = [offset for (offset, _), _ in pairs], [ranks for _, ranks in pairs]
            self._boxes[key] = offsets, sizes, holders, [*map(prod, sizes)]
        offsets, sizes, holders, numels = self._boxes[key]
        load, itemsize = self._load, tensor.dtype.itemsize
        owners = array("l")
        for ranks, numel in zip(holders, numels, strict=True):
            owner = ranks[0] if len(ranks) == 1 else min(ranks, key=load.__getitem__)
            load[owner] += numel * itemsize
            owners.append(owner)
        return Chunks.from_columns(offsets, sizes, self._owners.setdefault(owners.tobytes(), owners))


# What is cut ----------------------------------------------------------------------------------------------------------


class _Cutting:
    """Finds the placements of the tensors that are sharded.

    What the rules name first; else parameters, along dimension 0. The optimizer's state follows the parameter of its
    name, whatever the spelling of the optimizer, or, where parameters have numbers only, one of its shape.
    """

    def __init__(
        self, catalogue: Catalogue, mesh: Mesh, rules: Rules, *, untrained: bool, twins: Mapping[Path, Path]
    ) -> None:
        self._tensors = [t for t in catalogue.tensors if not t.embedded]
        self._twins = twins
        self._mesh = mesh
        self._guessed = sharded(self._tensors, untrained)
        self._default: Placements = {"shard": 0} if "shard" in mesh.names else {}
        placed = [(p, text, {**self._default, **parse_placements(text, mesh)}) for p, text in rules.placements]
        self._rules: list[tuple[str, Callable[[str], bool], Placements | None]] = [
            *((f"--placements {p}={text}", any_of([p]), cuts) for p, text, cuts in placed),
            *((f"--shard {p}", any_of([p]), self._default) for p in rules.shard),
            *((f"--replicate {p}", any_of([p]), None) for p in rules.replicate),
        ]
        self._used: set[str] = set()
        self.warnings: list[Warning] = []

    def all(self) -> dict[Path, Placements]:
        placements: dict[Path, Placements | None] = {}
        ruled: set[Path] = set()
        parameters: dict[str, tuple[Tensor, Placements | None]] = {}
        for tensor in self._tensors:
            if tensor.part.kind == "optimizer":
                continue
            named, placed = self._placements(tensor, (tensor.name, tensor.fqn))
            if tensor.alias is not None and tensor.alias not in ruled and named:
                # Tied: what is said of one name holds for the values.
                placements[tensor.alias] = placed
                parameters[dotted(tensor.alias[len(tensor.part.root) :])] = (tensor, placed)
            if named:
                ruled.add(tensor.path)
            if tensor.part.kind == "model":
                parameters.setdefault(tensor.fqn, (tensor, placed))
            placements[tensor.path] = placed
        placements |= {path: placements.get(twin) for path, twin in self._twins.items() if path not in ruled}
        placements |= {state.path: placed for state, placed in self._of_states(parameters)}
        self._check_used([*parameters] or [t.name for t in self._tensors])
        cut = {path: placed for path, placed in placements.items() if placed is not None}
        self._note_frozen({*cut, *ruled})
        return cut

    def _note_frozen(self, settled: set[Path]) -> None:
        """Note weights that may be frozen: where the source cuts nothing, only names tell them from buffers."""
        models = [t for t in self._tensors if t.part.kind == "model"]
        trained = any(t.part.kind == "optimizer" and t.shape for t in self._tensors)
        if not trained or not self._default or any(map(_is_cut, models)):
            return
        whole = [t for t in models if t.path not in settled and t.alias is None and t.numel and t.dtype.kind == "float"]
        left = [t for t in whole if len(t.shape) > 1 and str(t.path[-1]).rpartition(".")[2] == "weight"]
        if left:
            weights = f"{plural(len(left), 'weight')} ({size(sum(tensor.nbytes for tensor in left))})"
            are_whole = f"{is_or_are(left)} replicated, not sharded: {some([t.name for t in left])}"
            how = "`reshard --shard PATTERN` shards frozen parameters"
            text = f"{weights} without optimizer state {are_whole}; {how}"
            self.warnings.append(Warning("placement", text))

    def _placements(self, tensor: Tensor, names: Sequence[str]) -> tuple[bool, Placements | None]:
        """Return whether a rule is about the tensor; and what it gets, None to stay whole."""
        matching = [(text, placed) for text, matches, placed in self._rules if any(map(matches, names))]
        self._used.update(text for text, _ in matching)
        if not matching:
            return False, self._default if tensor.path in self._guessed else None
        first, placed = matching[0]
        for text, other in matching[1:]:
            if (other is None) != (placed is None):
                message = f"tensor `{tensor.name}`: `{first}` and `{text}` contradict each other"
                raise UsageError(message, hint="write patterns that do not both match it", tensor=tensor.name)
        if placed is not None:
            _check_fits(tensor, self._mesh, placed)
        return True, placed if tensor.numel else None

    def _check_used(self, names: Sequence[str]) -> None:
        """Raise UsageError for a rule that matched nothing: a misspelt one would change nothing, unseen."""
        unused = next((text for text, *_ in self._rules if text not in self._used), None)
        if unused is not None:
            hint = f"names here are like `{names[len(names) // 2]}`" if names else "there are no tensors"
            raise UsageError(f"`{unused}` matches nothing", hint=hint)

    def _of_states(
        self, parameters: dict[str, tuple[Tensor, Placements | None]]
    ) -> Iterator[tuple[Tensor, Placements | None]]:
        by_shape: dict[boxes.Ints, list[Placements]] = defaultdict(list)
        for tensor, placed in parameters.values():
            if placed is not None and placed not in by_shape[tensor.shape]:
                by_shape[tensor.shape].append(placed)
        unsure: set[boxes.Ints] = set()
        for state in (t for t in self._tensors if t.part.kind == "optimizer"):
            name = _parameter_of(state)
            if name is not None and name in parameters:
                owner, placed = parameters[name]
                # A factored moment or `step` is of another shape: cut if the source cuts it.
                yield state, placed if state.shape == owner.shape else self._default if _is_cut(state) else None
            elif name is not None and state.shape and state.numel and not parameters:
                yield state, self._placements(state, (name,))[1]
            elif state.path not in self._guessed:
                yield state, None
            else:
                choices = by_shape[state.shape]
                if len(choices) > 1:
                    unsure.add(state.shape)
                yield state, choices[0] if choices else self._default
        if unsure:
            shapes = ", ".join(str(list(shape)) for shape in sorted(unsure)[:3])
            why = f"the optimizer names its parameters by number, and several placements fit {shapes}"
            how = "its state is cut as the first of them; `ckpttool convert --optim-keys fqn` first tells them apart"
            self.warnings.append(Warning("placement", f"{why}: {how}"))


def _is_cut(tensor: Tensor) -> bool:
    """Return whether the source cuts a tensor."""
    stored = tensor.origin or tensor
    return len(stored.chunks) > 1 or (stored.origin is not None and _is_cut(stored.origin))


def _check_fits(tensor: Tensor, mesh: Mesh, placed: Placements) -> None:
    """Raise UsageError for placements that FSDP2 refuses."""
    shape = list(tensor.shape)
    for name, dim in placed.items():
        if dim >= len(shape):
            message = f"tensor `{tensor.name}` is {shape} and has no dimension {dim} to be cut by `{name}:{dim}`"
            hint = f"a rule for it alone, before this one, counts instead: `--placements '{tensor.name}=...'`"
            raise UsageError(message, hint=hint, tensor=tensor.name, found=shape, expected=dim + 1)
    dim = placed.get("shard", 0)
    # Of a dimension that both cut, FSDP2 sees what tensor parallelism has left.
    by = prod(size for name, size in mesh.size.items() if placed.get(name) == dim)
    if dim > 0 and shape[dim] % by:
        message = f"tensor `{tensor.name}` is {shape}, and dimension {dim} does not divide by {by}"
        raise UsageError(
            f"{message}: FSDP2 cuts no dimension but the first unevenly",
            hint="place it along another dimension, or choose another mesh",
            tensor=tensor.name,
            found=shape[dim],
            expected=f"a multiple of {by}",
        )


def _parameter_of(state: Tensor) -> str | None:
    """Return the FQN of the parameter that a tensor of the optimizer is about; None where it has an id."""
    key = parse_key(state.path, len(state.part.root))
    # DCP makes strings of integer keys.
    return None if key is None or (not key.flat and str(key.parameter).isdecimal()) else key.parameter


def sharded(every: Sequence[Tensor], untrained: bool) -> set[Path]:
    """Return what FSDP would have sharded. Whether a tensor is a parameter or a buffer is not always written down: it
    is a parameter when the optimizer has state of its shape (and, if it names parameters, of its name) or when the
    source shards it; state is sharded when it is shaped like a parameter. With no optimizer and nothing sharded, every
    floating-point tensor of a model is taken for a parameter. With `untrained`, so are those that no optimizer has
    state of, frozen ones and second names of tied ones, as far as that can be told."""
    tensors = [t for t in every if t.shape and t.numel]
    models = [t for t in tensors if t.part.kind == "model"]
    states = [t for t in tensors if t.part.kind == "optimizer"]
    named: dict[Hashable, set[boxes.Ints]] = defaultdict(set)
    for state in states:
        below = state.path[len(state.part.root) :]
        key = parse_key(below)
        for name in below if key is None else (key.owner,):
            named[name].add(state.shape)
    by_name = any(t.fqn in named for t in models)
    shapes = {t.shape for t in states}
    cut = any(map(_is_cut, models))

    def is_parameter(tensor: Tensor) -> bool:
        return _is_cut(tensor) or tensor.shape in (named.get(tensor.fqn, ()) if by_name else shapes)

    def may_be_parameter(tensor: Tensor) -> bool:
        if tensor.dtype.kind != "float" or (cut and tensor.shape[0] > 1):
            return False  # where others are cut, what has rows to cut and is whole is a buffer
        return not states or str(tensor.path[-1]).rpartition(".")[2] in ("weight", "bias")

    # Another name of the same storage is the same parameter.
    names = {t.alias or t.path for t in models if is_parameter(t)}
    parameters = [t for t in models if (t.alias or t.path) in names or (untrained and may_be_parameter(t))]
    if not parameters and not states:
        parameters = [t for t in models if t.dtype.kind == "float"]
    like = {t.shape for t in parameters}
    return {t.path for t in parameters} | {t.path for t in states if t.shape in like or _is_cut(t)}
