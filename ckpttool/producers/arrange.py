"""Which part of a training state is which piece of a producer's layout: the steps that all layouts are made of. Pure.

A layout takes parts one after the other and says where each goes. What nobody has taken in the end is lost, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Part, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Loss
from ckpttool.errors import LossError
from ckpttool.layout import select as layout
from ckpttool.producers.writer import Arranged, Component

# What the state of a generator is called: by torch scripts, accelerate, the Trainer, verl.
_GENERATORS = {
    "python": r"python|random|random_state|python_(rng|random)(_state)?",
    "numpy": r"numpy|numpy_random_seed|numpy_(rng|random)(_state)?|np",
    "torch": r"torch|cpu|torch_manual_seed|(torch|cpu)_(rng|random)(_state)?",
}
_STEPS = r"(global_|current_|train_|total_)?(step|steps|iteration|iter|iter_num|num_steps)"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a layout is to know beside the state: `Wanted(2, "checkpoint-400", read)`.

    `world` is the number of ranks, `name` what the destination is called, `read` the value of a small tensor of
    integers.
    """

    world: int
    name: str
    read: Callable[[Tensor], int | None]


class Arranging:
    """A state on its way into a layout. Every `take` gives one part its piece."""

    def __init__(self, laid: Catalogue, wanted: Wanted) -> None:
        self.laid, self.wanted = laid, wanted
        self.components: list[Component] = []
        self.notes: list[str] = []
        self.folded: set[Path] = set()  # by where they lie in the source
        self._folded: set[Path] = set()
        self._moved: dict[Path, Path] = {}
        self._places: dict[Path, int] = {}
        self._parts: dict[Path, Part] = {}
        self._added: list[Object] = []
        self._lost: dict[Path, str] = {}

    # What is there ----------------------------------------------------------------------------------------------------

    def parts(self, kind: str) -> list[Part]:
        """The parts of a kind, in order of appearance."""
        return [part for part in parts.parts(self.laid) if part.kind == kind]

    def numbered(self, kind: str) -> Iterator[tuple[int, Part]]:
        """The parts of a kind with the number that each has in its name; the one without a number is the first."""
        found = self.parts(kind)
        numbers = {p: int(m[1]) for p in found if p.root and (m := re.search(r"_(\d+)$", str(p.root[-1])))}
        plain = [p for p in found if p not in numbers]
        if len(plain) > 1:
            plain = [p for p in plain if not p.root or re.fullmatch(rf"{kind}|optim|lr_scheduler", str(p.root[-1]))]
        if not plain and len(found) == 1:
            numbers, plain = {}, found
        if len(plain) == 1 and 0 not in numbers.values():
            yield 0, plain[0]
        yield from ((number, part) for part, number in numbers.items())

    def one(self, kind: str) -> Part | None:
        """The first of a kind, for layouts that know no second."""
        return next((part for _, part in self.numbered(kind)), None)

    def left(self) -> Iterator[Entry]:
        """What nothing has been done with so far."""
        for path, entry in self.laid.entries.items():
            if path not in self._places and path not in self._lost and path not in self._folded:
                yield entry

    # What becomes of it -----------------------------------------------------------------------------------------------

    def piece(self, component: Component) -> int:
        """Add a piece to the layout."""
        self.components.append(component)
        return len(self.components) - 1

    def take(self, part: Part, number: int, root: Path) -> None:
        """A whole part into a piece, under `root`."""
        for path, entry in self.laid.entries.items():
            if entry.part == part and path not in self._places:
                self.put(entry, number, (*root, *path[len(part.root) :]), Part(part.kind, root))

    def put(self, entry: Entry, number: int, path: Path, part: Part | None = None) -> None:
        """One entry into a piece."""
        self._moved[entry.path] = path
        self._places[entry.path] = number
        if part is not None:
            self._parts[path] = part

    def stateful_loaders(self) -> Iterator[Part]:
        """Data loaders as torchdata's `StatefulDataLoader` says them, which accelerate and verl both use."""
        for part in self.parts("dataloader"):
            keys = {
                path[len(part.root)] for path, e in self.laid.entries.items() if e.part == part and path != part.root
            }
            if "_snapshot" in keys and keys & {"_num_yielded", "_steps_since_snapshot"}:
                yield part

    def add(self, number: int, entry: Object) -> None:
        """A value that the source has elsewhere, or in another form."""
        self._added.append(entry)
        self._places[entry.path] = number

    def fold(self, entry: Entry) -> None:
        """Leave an entry out that the layout says by other means, or that says nothing."""
        self._folded.add(entry.path)
        self.folded.add(entry.origin if isinstance(entry, Object) else (entry.origin or entry).path)

    def lose(self, entry: Entry, why: str) -> None:
        """Say why an entry has no place."""
        self._lost.setdefault(entry.path, why)

    def done(self, otherwise: str) -> Arranged:
        """The layout; `otherwise` is why what is left has no place in it."""
        for entry in list(self.left()):
            second = entry.part.kind in ("model", "optimizer", "scheduler")
            self.lose(entry, _second(entry.part) if second else otherwise)
        kept = layout.select(self.laid, lambda entry: entry.path not in self._folded)
        moved = layout.move(kept, {old: new for old, new in self._moved.items() if old in kept.entries})
        for path, part in self._parts.items():
            if path in moved.entries:
                moved.entries[path].part = part
        places = {self._moved.get(path, path): number for path, number in self._places.items()}
        for entry in self._added:
            if entry.path in moved.entries:
                raise LossError(f"`{entry.name}` is there already, with another value")
            moved.entries[entry.path] = entry
        lost = [
            Loss(entry.name, why)
            for path, why in self._lost.items()
            if not (isinstance(entry := self.laid.entries[path], Tensor) and entry.embedded)
        ]
        return Arranged(moved, self.components, places, lost)

    # Values that several layouts have ---------------------------------------------------------------------------------

    def step(self) -> int | None:
        """The step that the state says it is of."""
        for entry in self.laid.entries.values():
            if entry.part.kind == "progress" and re.fullmatch(_STEPS, str(entry.path[-1])) and len(entry.path) <= 2:
                value = self.number(entry)
                if value is not None:
                    return value
        said = self.laid.facts.get("step")
        return said if isinstance(said, int) else None

    def number(self, entry: Entry) -> int | None:
        """The value of an entry that counts something."""
        if isinstance(entry, Tensor):
            return self.wanted.read(entry)
        return entry.value if type(entry.value) is int else None

    def fold_step(self, step: int | None) -> None:
        """Leave out what says the step that the layout says by its own means."""
        for entry in list(self.left()):
            named = entry.part.kind == "progress" and re.fullmatch(_STEPS, str(entry.path[-1]))
            if named and len(entry.path) <= 2 and step is not None and self.number(entry) == step:
                self.fold(entry)

    def generators(
        self, names: dict[str, str], own: Callable[[Path], object], place: Callable[[int], tuple[int, Path]]
    ) -> set[int]:
        """The states of the generators, of each rank under the names that the framework has for them; what ranks have
        any. `own` knows the framework's other values, `place(rank)` is the piece of a rank and the root there."""
        seen: set[int] = set()
        for entry in list(self.left()):
            if entry.part.kind != "rng" or (isinstance(entry, Tensor) and entry.embedded):
                continue
            below = entry.path[max(0, len(entry.part.root) - 1) :]
            found = parts.find_rank(below)
            rank = found[1] if found is not None else 0
            inside = parts.without_rank(below)[1:] or below
            kind = _generator(inside, entry)
            if rank >= self.wanted.world:
                self.lose(entry, f"it is of rank {rank}, and {self.wanted.world} ranks have no file for it")
            elif kind is not None or own(inside):
                seen.add(rank)
                number, root = place(rank)
                self.put(
                    entry,
                    number,
                    (*root, names[kind], *inside[1:]) if kind else (*root, *inside),
                    Part("rng", root[:1]),
                )
            elif inside[-1:] == ("step",) and isinstance(entry, Object) and entry.value == 0:
                # How many batches accelerate has gathered gradients of.
                self.fold(entry)
            else:
                self.lose(entry, "it is not in the form in which this framework keeps the state of its generators")
        return seen

    def note_without(self, seen: set[int]) -> None:
        """Say which ranks have no generators, when some have."""
        without = [str(rank) for rank in range(self.wanted.world) if rank not in seen]
        if seen and without:
            shown = ", ".join(without[:8]) + (", ..." if len(without) > 8 else "")
            self.notes.append(f"no states of random number generators for {len(without)} ranks: {shown}")


def _generator(inside: Path, entry: Entry) -> str | None:
    """Which generator a value belongs to: tensors are torch's, tuples the others'."""
    if len(inside) != 1:
        return None
    kind = next((k for k, pattern in _GENERATORS.items() if re.fullmatch(pattern, str(inside[0]))), None)
    if isinstance(entry, Tensor):
        return kind if kind == "torch" and entry.dtype.name == "uint8" and len(entry.shape) == 1 else None
    return kind if kind in ("python", "numpy") and isinstance(entry.value, tuple) else None


def _second(part: Part) -> str:
    return f"there is a place for another {part.kind} than `{dotted(part.root)}`, and no second one"
