"""Plans which rank holds which box of which tensor: a catalogue becomes one with other chunks. Pure.

    whole        one chunk on rank 0                           formats that know no others
    as_stored    the source's own chunks on its own ranks      dcp
    over_mesh    as FSDP2 cuts parameters on a mesh            --to-world, --to-mesh, --placements
    like         the boxes and the ranks of another            --like

Parameters are sharded and buffers are not. Checkpoints do not always say which is which, see `cuts`.
Source: `torch/distributed/fsdp/_fully_shard/_fsdp_param.py` of torch 2.13.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ckpttool.catalogue import boxes, parts
from ckpttool.catalogue.entries import Catalogue, Chunks, Entry, File, Path, Tensor, dotted
from ckpttool.catalogue.patterns import any_of
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import UsageError
from ckpttool.layout.mesh import Mesh, Placements, mesh_boxes, parse_placements, world_mesh
from ckpttool.layout.move import again, rebuilt
from ckpttool.layout.optimizer.keys import parse_key
from ckpttool.text import meant, plural, size, some


def whole(catalogue: Catalogue) -> Catalogue:
    """Plan every tensor as one chunk on rank 0, for formats without sharding. Pure."""
    return _placed(catalogue, lambda tensor: Chunks.placed([(boxes.whole(tensor.shape), 0)]))


def as_stored(catalogue: Catalogue, files: Sequence[int | None]) -> Catalogue:
    """Plan the chunks of the source on the ranks that wrote them; `files[i]` is the rank of file i. Pure."""

    def place(tensor: Tensor) -> Chunks:
        chunks = (tensor.origin or tensor).chunks
        placed = [((o, s), files[f] or 0) for o, s, f in zip(chunks.offsets, chunks.sizes, chunks.file, strict=True)]
        return Chunks.placed(_without_empty(placed, tensor))

    return _placed(catalogue, place)


def _without_empty(placed: list[tuple[boxes.Box, int]], tensor: Tensor) -> list[tuple[boxes.Box, int]]:
    # A rank without elements needs no chunk; a tensor without elements needs one.
    full = [p for p in placed if 0 not in p[0][1]]
    return full or [(boxes.whole(tensor.shape), placed[0][1] if placed else 0)]


def like(catalogue: Catalogue, reference: Catalogue, name: str) -> Catalogue:
    """Plan the boxes and ranks that each tensor has in another checkpoint, which messages call `name`. Pure.

    Raises UsageError for a tensor that is not there, or has another shape.
    """
    files = [file.rank for file in reference.files]
    by_name = {t.name: t for t in reference.tensors if not t.embedded}

    def place(tensor: Tensor) -> Chunks:
        match = by_name.get(tensor.name)
        if match is None and tensor.part.kind in parts.PER_RANK:
            # What belongs to a rank is of this world, not of a layout.
            return Chunks.placed([(boxes.whole(tensor.shape), 0)])
        if match is None:
            hint = meant(tensor.name, list(by_name), "it must be a checkpoint of the same model")
            if tensor.part.kind == "optimizer" and any(t.part.kind == "optimizer" for t in reference.tensors):
                hint = "where the two spell the optimizer otherwise, `ckpttool convert --optim-keys fqn` first"
            raise UsageError(f"`--like {name}`: has no tensor `{tensor.name}`", hint=hint, tensor=tensor.name)
        if match.shape != tensor.shape:
            raise UsageError(
                f"`--like {name}`: tensor `{tensor.name}` is {list(match.shape)} there, but {list(tensor.shape)} here",
                hint="it must be a checkpoint of the same model",
                tensor=tensor.name,
                found=list(match.shape),
                expected=list(tensor.shape),
            )
        chunks = match.chunks
        placed = [((o, s), files[f] or 0) for o, s, f in zip(chunks.offsets, chunks.sizes, chunks.file, strict=True)]
        return Chunks.placed(_without_empty(placed, match))

    return _placed(catalogue, place)


def _placed(catalogue: Catalogue, place: Callable[[Tensor], Chunks]) -> Catalogue:
    planned: dict[Path, Chunks] = {}
    entries: list[Entry] = []
    for entry in catalogue.entries.values():
        if isinstance(entry, Tensor):
            if entry.alias in planned and entry.alias is not None:
                chunks = planned[entry.alias]
            elif entry.embedded:
                chunks = Chunks.placed([(boxes.whole(entry.shape), 0)])
            else:
                chunks = place(entry)
            planned[entry.path] = chunks
            entry = again(entry, chunks=chunks)
        entries.append(entry)
    return rebuilt(catalogue, entries, catalogue.containers)


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


def over_world(catalogue: Catalogue, ranks: int, *, everywhere: bool = False) -> Catalogue:
    """`over_mesh` for ranks in one dimension. Pure."""
    return over_mesh(catalogue, world_mesh(ranks), everywhere=everywhere)


def over_mesh(catalogue: Catalogue, mesh: Mesh, rules: Rules = NO_RULES, *, everywhere: bool = False) -> Catalogue:
    """Parameters and what is shaped like them in the boxes that FSDP2 gives the ranks of `mesh`, the rest whole: each
    box once, on the rank that holds the least so far of those that have it. With `everywhere`, what is not cut is on
    each of the ranks, whose files are then listed. Pure.

    Raises UsageError for rules that match nothing, contradict each other or do not fit a tensor.
    """
    warnings: list[Warning] = []
    cut = cuts(catalogue, mesh, rules, untrained=everywhere, warnings=warnings)
    holders = _Ranks(mesh)

    def place(tensor: Tensor) -> Chunks:
        placed = cut.get(tensor.path)
        if placed is not None:
            return holders.cut(tensor, placed)
        if everywhere:
            return Chunks.placed([(boxes.whole(tensor.shape), rank) for rank in range(mesh.world)])
        return holders.whole(tensor)

    planned = _placed(catalogue, place)
    planned.warnings = [*planned.warnings, *warnings]
    planned.files = [File("", f"rank {rank}", 0, rank) for rank in range(mesh.world)] if everywhere else []
    return planned


class _Ranks:
    """The ranks of a mesh and how much each holds so far. Tensors of one shape share the columns of their boxes: a
    model has few shapes, and 1,024 ranks have many boxes."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._load = [0] * mesh.world
        self._boxes: dict[tuple[boxes.Ints, tuple[tuple[str, int], ...]], _Boxes] = {}

    def whole(self, tensor: Tensor) -> Chunks:
        rank = self._load.index(min(self._load))
        self._load[rank] += tensor.nbytes
        return Chunks.placed([(boxes.whole(tensor.shape), rank)])

    def cut(self, tensor: Tensor, placed: Placements) -> Chunks:
        key = (tensor.shape, tuple(sorted(placed.items())))
        columns = self._boxes.get(key)
        if columns is None:
            columns = self._boxes[key] = _Boxes.of(tensor.shape, self._mesh, placed)
        load, itemsize = self._load, tensor.dtype.itemsize
        owners: list[int] = []
        for holders, numel in zip(columns.ranks, columns.numels, strict=True):
            owner = holders[0] if len(holders) == 1 else min(holders, key=load.__getitem__)
            load[owner] += numel * itemsize
            owners.append(owner)
        return Chunks.on(columns.offsets, columns.sizes, owners)


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The boxes of one shape as columns, and the ranks that have each."""

    offsets: list[boxes.Ints]
    sizes: list[boxes.Ints]
    ranks: list[list[int]]
    numels: list[int]

    @classmethod
    def of(cls, shape: boxes.Ints, mesh: Mesh, placed: Placements) -> _Boxes:
        pairs = list(mesh_boxes(shape, mesh, placed))
        sizes = [box[1] for box, _ in pairs]
        return cls([box[0] for box, _ in pairs], sizes, [ranks for _, ranks in pairs], [prod(s) for s in sizes])


# What is cut ----------------------------------------------------------------------------------------------------------


def cuts(
    catalogue: Catalogue, mesh: Mesh, rules: Rules, *, untrained: bool = False, warnings: list[Warning] | None = None
) -> dict[Path, Placements]:
    """Return the placements of the tensors that are sharded. Pure.

    What the rules name first; else parameters, along dimension 0. The optimizer's state follows the parameter of its
    name, whatever the spelling of the optimizer, or, where parameters have numbers only, one of its shape.
    """
    return _Cutting(catalogue, mesh, rules, untrained, warnings if warnings is not None else []).all()


class _Cutting:
    def __init__(
        self, catalogue: Catalogue, mesh: Mesh, rules: Rules, untrained: bool, warnings: list[Warning]
    ) -> None:
        self._tensors = [t for t in catalogue.tensors if not t.embedded]
        self._mesh = mesh
        self._guessed = _sharded(catalogue, untrained)
        self._default: Placements = {"shard": 0} if "shard" in mesh.names else {}
        self._rules = _Ruling(rules, mesh, self._default)
        self._warnings = warnings

    def all(self) -> dict[Path, Placements]:
        placements: dict[Path, Placements] = {}
        ruled: set[Path] = set()
        parameters: dict[str, tuple[Tensor, Placements | None]] = {}
        for tensor in self._tensors:
            if tensor.part.kind == "optimizer":
                continue
            name = tensor.fqn
            named, placed = self._placements(tensor, (tensor.name, name))
            if tensor.alias is not None and tensor.alias not in ruled and named:
                # Tied: what is said of one name holds for the values.
                _set(placements, tensor.alias, placed)
                first = dotted(tensor.alias[len(tensor.part.root) :])
                parameters[first] = (tensor, placed)
            if named:
                ruled.add(tensor.path)
            if tensor.part.kind == "model":
                parameters.setdefault(name, (tensor, placed))
            _set(placements, tensor.path, placed)
        for state, placed in self._of_states(parameters):
            _set(placements, state.path, placed)
        self._rules.check_used([*parameters] or [t.name for t in self._tensors])
        self._note_frozen(placements, ruled)
        return placements

    def _note_frozen(self, placements: dict[Path, Placements], ruled: set[Path]) -> None:
        """Where the source cuts nothing, nothing tells a frozen weight from a buffer, and a name proves nothing."""
        models = [t for t in self._tensors if t.part.kind == "model"]
        trained = any(t.part.kind == "optimizer" and t.shape for t in self._tensors)
        if not trained or not self._default or any(len((t.origin or t).chunks) > 1 for t in models):
            return
        left = [
            tensor
            for tensor in models
            if tensor.path not in placements
            and tensor.path not in ruled
            and tensor.alias is None
            and tensor.numel
            and len(tensor.shape) > 1
            and tensor.dtype.kind == "float"
            and str(tensor.path[-1]).rpartition(".")[2] == "weight"
        ]
        if left:
            text = (
                f"{plural(len(left), 'weight')} ({size(sum(tensor.nbytes for tensor in left))}) that the optimizer has "
                f"no state of {'is' if len(left) == 1 else 'are'} left whole: {some([t.name for t in left])}; "
                "`reshard --shard PATTERN` cuts those that are frozen parameters"
            )
            self._warnings.append(Warning("placement", text))

    def _placements(self, tensor: Tensor, names: Sequence[str]) -> tuple[bool, Placements | None]:
        """Whether a rule is about the tensor; and what it gets, None to stay whole."""
        ruled, placed = self._rules.of(tensor, names)
        if not ruled:
            return False, self._default if tensor.path in self._guessed else None
        if placed is not None:
            _check_fits(tensor, self._mesh, placed)
        return True, placed if tensor.numel else None

    def _of_states(
        self, parameters: dict[str, tuple[Tensor, Placements | None]]
    ) -> Iterator[tuple[Tensor, Placements | None]]:
        by_shape: dict[boxes.Ints, list[Placements | None]] = defaultdict(list)
        for tensor, placed in parameters.values():
            if placed not in by_shape[tensor.shape]:
                by_shape[tensor.shape].append(placed)
        unsure: set[boxes.Ints] = set()
        for state in (t for t in self._tensors if t.part.kind == "optimizer"):
            name = _parameter_of(state)
            if name is not None and name in parameters:
                owner, placed = parameters[name]
                yield state, placed if state.shape == owner.shape else self._by_source(state)
            elif name is not None and state.shape and state.numel and not parameters:
                yield state, self._placements(state, (name,))[1]
            elif state.path not in self._guessed:
                yield state, None
            else:
                choices = [p for p in by_shape[state.shape] if p is not None]
                if len(choices) > 1:
                    unsure.add(state.shape)
                yield state, choices[0] if choices else self._default
        if unsure:
            shapes = ", ".join(str(list(shape)) for shape in sorted(unsure)[:3])
            text = (
                f"the optimizer names its parameters by number, and several placements fit {shapes}: its state is cut "
                "as the first of them; `ckpttool convert --optim-keys fqn` first tells them apart"
            )
            self._warnings.append(Warning("placement", text))

    def _by_source(self, state: Tensor) -> Placements | None:
        """State of a parameter in another shape (a factored moment, `step`): cut if the source cuts it."""
        return self._default if len((state.origin or state).chunks) > 1 else None


class _Ruling:
    """What the rules say of a tensor, and which of them matched none."""

    def __init__(self, rules: Rules, mesh: Mesh, default: Placements) -> None:
        self._default = default
        self._placements = [
            (f"--placements {pattern}={text}", any_of([pattern]), parse_placements(text, mesh))
            for pattern, text in rules.placements
        ]
        self._flags = [
            (f"{flag} {pattern}", any_of([pattern]), flag == "--shard")
            for flag, patterns in (("--shard", rules.shard), ("--replicate", rules.replicate))
            for pattern in patterns
        ]
        self._used: set[str] = set()

    def of(self, tensor: Tensor, names: Sequence[str]) -> tuple[bool, Placements | None]:
        """Whether a rule is about this tensor; and what it gets: None to stay whole."""
        matches_of_rules: list[tuple[str, Placements | None]] = []
        for text, matches, placed in self._placements:
            if any(map(matches, names)):
                self._used.add(text)
                if not matches_of_rules:
                    matches_of_rules.append((text, {**self._default, **placed}))
        for text, matches, is_shard in self._flags:
            if any(map(matches, names)):
                self._used.add(text)
                matches_of_rules.append((text, self._default if is_shard else None))
        for text, other in matches_of_rules[1:]:
            if (other is None) != (matches_of_rules[0][1] is None):
                raise UsageError(
                    f"tensor `{tensor.name}`: `{matches_of_rules[0][0]}` and `{text}` contradict each other",
                    hint="write patterns that do not both match it",
                    tensor=tensor.name,
                )
        return (True, matches_of_rules[0][1]) if matches_of_rules else (False, None)

    def check_used(self, names: Sequence[str]) -> None:
        """Raises UsageError for a rule that matched nothing: a misspelt one would change nothing, unseen."""
        for text, *_ in (*self._placements, *self._flags):
            if text not in self._used:
                hint = f"names here are like `{names[len(names) // 2]}`" if names else "there are no tensors"
                raise UsageError(f"`{text}` matches nothing", hint=hint)


def _check_fits(tensor: Tensor, mesh: Mesh, placed: Placements) -> None:
    """Raises UsageError for placements that FSDP2 refuses."""
    shape = list(tensor.shape)
    for name, dim in placed.items():
        if dim >= len(shape):
            raise UsageError(
                f"tensor `{tensor.name}` is {shape} and has no dimension {dim} to be cut by `{name}:{dim}`",
                hint=f"a rule for it alone, before this one, counts instead: `--placements '{tensor.name}=...'`",
                tensor=tensor.name,
                found=shape,
                expected=dim + 1,
            )
    dim = placed.get("shard", 0)
    # Of a dimension that both cut, FSDP2 sees what tensor parallelism has left.
    by = prod(size for name, size in zip(mesh.names, mesh.sizes, strict=True) if placed.get(name) == dim)
    if dim > 0 and shape[dim] % by:
        raise UsageError(
            f"tensor `{tensor.name}` is {shape}, and dimension {dim} does not divide by {by}: FSDP2 cuts no dimension "
            "but the first unevenly",
            hint="place it along another dimension, or choose another mesh",
            tensor=tensor.name,
            found=shape[dim],
            expected=f"a multiple of {by}",
        )


def _set(placements: dict[Path, Placements], path: Path, placed: Placements | None) -> None:
    if placed is None:
        placements.pop(path, None)
    else:
        placements[path] = placed


def _parameter_of(state: Tensor) -> str | None:
    """Return the FQN of the parameter that a tensor of the optimizer is about; None where it has an id. Pure."""
    key = parse_key(state.path, len(state.part.root))
    if key is None:
        return None
    name = key.parameter
    # DCP makes strings of integer keys.
    return None if name is not None and not key.flat and name.isdecimal() else name


def _sharded(catalogue: Catalogue, untrained: bool) -> set[Path]:
    """What FSDP would have sharded. Whether a tensor is a parameter or a buffer is not always written down: it is a
    parameter when the optimizer has state of its shape (and, if it names parameters, of its name) or when the source
    shards it; state is sharded when it is shaped like a parameter. With no optimizer and nothing sharded, every
    floating-point tensor of a model is taken for a parameter. With `untrained`, so are those that no optimizer has
    state of, frozen ones and second names of tied ones, as far as that can be told."""
    tensors = [t for t in catalogue.tensors if t.shape and t.numel and not t.embedded]
    models = [t for t in tensors if t.part.kind == "model"]
    states = [t for t in tensors if t.part.kind == "optimizer"]
    named: dict[Hashable, set[boxes.Ints]] = defaultdict(set)
    for state in states:
        depth = len(state.part.root)
        key = parse_key(state.path, depth)
        for name in state.path[depth:] if key is None else (key.owner,):
            named[name].add(state.shape)
    by_name = any(t.fqn in named for t in models)
    shapes = {t.shape for t in states}

    def is_parameter(tensor: Tensor) -> bool:
        if len((tensor.origin or tensor).chunks) > 1:
            return True
        if by_name:
            return tensor.shape in named.get(tensor.fqn, ())
        return tensor.shape in shapes

    cut = any(len((t.origin or t).chunks) > 1 for t in models)

    def may_be_parameter(tensor: Tensor) -> bool:
        if tensor.dtype.kind != "float" or (cut and tensor.shape[0] > 1):
            return False  # where others are cut, what has rows to cut and is whole is a buffer
        return not states or str(tensor.path[-1]).rpartition(".")[2] in ("weight", "bias")

    parameters = [t for t in models if is_parameter(t) or (untrained and may_be_parameter(t))]
    if not parameters and not states:
        parameters = [t for t in models if t.dtype.kind == "float"]
    like = {t.shape for t in parameters}
    moments = [t for t in states if t.shape in like or len((t.origin or t).chunks) > 1]
    return {t.path for t in (*parameters, *moments)}
