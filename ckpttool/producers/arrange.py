"""Arranging a training state in the layout of a framework: the steps that all layouts are made of. Pure.

A layout adds parts to components one after the other. What is in no component in the end is lost, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ckpttool import formats
from ckpttool.catalogue import parts
from ckpttool.catalogue.counters import is_step
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Part, Path, Tensor, dotted
from ckpttool.catalogue.protocols import Format, FormatLoss
from ckpttool.catalogue.step_names import step_in
from ckpttool.errors import LossError, UsageError
from ckpttool.layout import select
from ckpttool.layout.move import move
from ckpttool.producers.components import Constant
from ckpttool.producers.writer import OutputComponent, OutputLayout
from ckpttool.text import rank_ranges


class LayoutBuilder:
    """A state on its way into a layout: each part is added to a component. `folded` are the paths in the source of
    entries that the layout stores by other means.

    Args: `name` is the base name of the destination, `read_integer` returns the value of a small tensor of integers.
    """

    def __init__(
        self, catalogue: Catalogue, world_size: int, name: str, read_integer: Callable[[Tensor], int | None]
    ) -> None:
        self.catalogue, self.world_size, self.name, self._read_integer = catalogue, world_size, name, read_integer
        self.notes: list[str] = []
        self.folded: set[Path] = set()
        self._components: list[OutputComponent] = []
        self._copies: list[tuple[str, str]] = []
        self._folded: set[Path] = set()
        self._moved: dict[Path, Path] = {}
        self._component_of: dict[Path, int] = {}
        self._parts: dict[Path, Part] = {}
        self._values: list[Object] = []
        self._lost: dict[Path, str] = {}

    # What the state has -----------------------------------------------------------------------------------------------

    def parts(self, kind: str) -> list[Part]:
        """Return the parts of a kind, in order of appearance."""
        return [part for part in parts.parts(self.catalogue) if part.kind == kind]

    def numbered(self, kind: str) -> Iterator[tuple[int, Part]]:
        """Yield the parts of a kind with the number in the name of each; the one without a number is the first."""
        of_kind = self.parts(kind)
        numbers = {p: int(m[1]) for p in of_kind if p.root and (m := re.search(r"_(\d+)$", str(p.root[-1])))}
        plain = [p for p in of_kind if p not in numbers]
        if len(plain) > 1:
            plain = [p for p in plain if not p.root or re.fullmatch(rf"{kind}|optim|lr_scheduler", str(p.root[-1]))]
        if not plain and len(of_kind) == 1:
            numbers, plain = {}, of_kind
        if len(plain) == 1 and 0 not in numbers.values():
            yield 0, plain[0]
        yield from ((number, part) for part, number in numbers.items())

    def first(self, kind: str) -> Part | None:
        """Return the first part of a kind, for layouts with one of it."""
        return next((part for _, part in self.numbered(kind)), None)

    def stateful_loaders(self) -> Iterator[Part]:
        """Yield the data loaders with the keys of torchdata's `StatefulDataLoader`, as accelerate and verl use."""
        for part in self.parts("dataloader"):
            depth = len(part.root)
            keys = {p[depth] for p, e in self.catalogue.entries.items() if e.part == part and p != part.root}
            if "_snapshot" in keys and keys & {"_num_yielded", "_steps_since_snapshot"}:
                yield part

    def remaining(self) -> Iterator[Entry]:
        """Return the entries that are neither in a component, nor folded, nor lost."""
        placed = (self._component_of, self._lost, self._folded)
        return (entry for path, entry in self.catalogue.entries.items() if not any(path in paths for paths in placed))

    # Where it goes ----------------------------------------------------------------------------------------------------

    def component(
        self,
        name: str,
        format: str | Format,
        root: Path = (),
        *,
        key: Path = (),
        values: Mapping[str, Any] | None = None,
        constants: Sequence[Constant] = (),
        digits: int = 1,
        world: int | None = None,
    ) -> int:
        """Add a component and return its number. See `OutputComponent`; `format` may be a name."""
        row = formats.named(format) if isinstance(format, str) else format
        self._components.append(OutputComponent(name, row, root, key, values or {}, constants, digits, world))
        return len(self._components) - 1

    def copy(self, name: str, to: str) -> None:
        """Have a file, one that is written or one at a location of its own, copied under another name."""
        self._copies.append((name, to))

    def add_part(self, part: Part | None, name: str, format: str, root: Path, key: Path = ()) -> None:
        """Add a component that has one part, if there is one."""
        if part is not None:
            self.add_part_to(self.component(name, format, root, key=key), part, root)

    def add_part_to(self, component: int, part: Part | None, root: Path) -> None:
        """Add a whole part to a component, under `root`."""
        for path, entry in self.catalogue.entries.items():
            if part is not None and entry.part == part and path not in self._component_of:
                self.add(entry, component, (*root, *path[len(part.root) :]), Part(part.kind, root))

    def add(self, entry: Entry, component: int, path: Path, part: Part | None = None) -> None:
        """Add one entry to a component."""
        self._moved[entry.path] = path
        self._component_of[entry.path] = component
        if part is not None:
            self._parts[path] = part

    def add_value(self, component: int, entry: Object) -> None:
        """Add a value that the source does not have, or has in another form."""
        self._values.append(entry)
        self._component_of[entry.path] = component

    def add_scaler(self) -> None:
        """Add the first gradient scaler, as accelerate and the Trainer save it."""
        self.add_part(next(iter(self.parts("scaler")), None), "scaler.pt", "torch", ("scaler",))

    def fold(self, entry: Entry) -> None:
        """Leave out an entry that the layout stores by other means, or that has no meaning."""
        self._folded.add(entry.path)
        self.folded.add(entry.origin if isinstance(entry, Object) else (entry.origin or entry).path)

    def lose(self, entry: Entry, why: str) -> None:
        """Record why an entry has no place in the layout."""
        self._lost.setdefault(entry.path, why)

    def finish(self, otherwise: str) -> OutputLayout:
        """Return the layout; `otherwise` is why the remaining entries have no place in it. Raises LossError when two
        values go to the same path."""
        for entry in list(self.remaining()):
            kind, name = entry.part.kind, dotted(entry.part.root)
            second = f"there is a place for another {kind} than `{name}`, and no second one"
            self.lose(entry, second if kind in ("model", "optimizer", "scheduler") else otherwise)
        kept = select.select(self.catalogue, lambda entry: entry.path not in self._folded)
        moved = move(kept, {old: new for old, new in self._moved.items() if old in kept.entries})
        for path, part in self._parts.items():
            if path in moved.entries:
                moved.entries[path].part = part
        component_of = {self._moved.get(path, path): number for path, number in self._component_of.items()}
        for value in self._values:
            if value.path in moved.entries:
                raise LossError(f"`{value.name}` already exists, with another value")
            moved.entries[value.path] = value
        lost = ((self.catalogue.entries[path], why) for path, why in self._lost.items())
        losses = [FormatLoss(entry.name, why) for entry, why in lost if not entry.embedded]
        return OutputLayout(moved, self._components, component_of, losses, self._copies)

    # Values that several layouts have ---------------------------------------------------------------------------------

    def step(self) -> int | None:
        """Return the step that the state has."""
        steps = (self.integer(entry) for entry in self.catalogue.entries.values() if is_step(entry))
        step = next((step for step in steps if step is not None), self.catalogue.facts.get("step"))
        return step if isinstance(step, int) else None

    def step_or_name(self, reads: str, called: str) -> int:
        """Return the step that the state has, else the one in the name of the destination. Raises UsageError when there
        is none; the message says where the framework `reads` it, and what to have the destination `called`."""
        step = self.step()
        step = step_in(self.name) if step is None else step
        if step is None:
            raise UsageError(f"{reads}, and the source does not contain it", hint=f"call the destination `{called}`")
        return step

    def integer(self, entry: Entry) -> int | None:
        """Return the value of an entry that is one integer; else None."""
        if isinstance(entry, Tensor):
            return self._read_integer(entry)
        return entry.value if type(entry.value) is int else None

    def fold_step(self, step: int | None) -> None:
        """Fold the entries that are the same step as the one that the layout stores."""
        for entry in list(self.remaining()):
            if step is not None and is_step(entry) and self.integer(entry) == step:
                self.fold(entry)

    def add_generators(
        self, names: Mapping[str, str], is_own: Callable[[Path], object], place: Callable[[int], tuple[int, Path]]
    ) -> set[int]:
        """Add the states of random number generators, and return the ranks that have any.

        Args: `names` are the framework's names of the generators, `is_own(path)` tells other values of the framework,
        `place(rank)` returns the component of a rank and the root in it.
        """
        with_state: set[int] = set()
        for entry in list(self.remaining()):
            if entry.part.kind != "rng" or entry.embedded:
                continue
            path = entry.path[max(0, len(entry.part.root) - 1) :]
            of_rank = parts.find_rank(path)
            rank = of_rank[1] if of_rank is not None else 0
            below = parts.without_rank(path)[1:] or path
            kind = _generator(below, entry)
            if rank >= self.world_size:
                self.lose(entry, f"it is of rank {rank}, and {self.world_size} ranks have no file for it")
            elif kind is not None or is_own(below):
                with_state.add(rank)
                component, root = place(rank)
                renamed = (names[kind], *below[1:]) if kind else below
                self.add(entry, component, (*root, *renamed), Part("rng", root[:1]))
            elif below[-1:] == ("step",) and isinstance(entry, Object) and entry.value == 0:
                # How many batches accelerate has accumulated gradients of.
                self.fold(entry)
            else:
                self.lose(entry, "it is not in the form in which this framework keeps the state of its generators")
        return with_state

    def add_generator_files(self, name: str, names: Mapping[str, str], own: re.Pattern[str]) -> None:
        """Add the states of generators in a file per rank, `{rank}` in its name; without that, in one file."""

        @cache
        def place(rank: int) -> tuple[int, Path]:
            root = ("rng", f"rank{rank}") if "{rank}" in name else ("rng",)
            return self.component(name.replace("{rank}", str(rank)), "torch", root), root

        with_state = self.add_generators(names, lambda below: own.fullmatch(str(below[0])), place)
        without = [rank for rank in range(self.world_size) if rank not in with_state]
        if with_state and without:
            self.notes.append(f"no states of random number generators for {rank_ranges(without)}")


def _generator(path: Path, entry: Entry) -> str | None:
    """Return which generator a value belongs to: tensors are torch's, tuples the others'."""
    if len(path) != 1:
        return None
    kind = next((k for k, pattern in parts.GENERATORS.items() if re.fullmatch(pattern, str(path[0]))), None)
    if isinstance(entry, Tensor):
        return kind if kind == "torch" and entry.dtype.name == "uint8" and len(entry.shape) == 1 else None
    return kind if kind in ("python", "numpy") and isinstance(entry.value, tuple) else None
