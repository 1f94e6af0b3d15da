"""Replaces flat parameters by the tensors that `flat.model` and `flat.optimizer` restore, between reading and merging.

    in every tree   {"model": {embed.weight: 1-D, _flat_param: ShardedTensor}, "optim": {state: {0: 1-D}, ...}}
    becomes         {"model": {embed.weight: Marker(0)},                       "optim": {state: {embed.weight: ...}}}
    and at the end the catalogue has the tensor that a marker stands for, of chunks in the files of all ranks

Only these sets need the trees of all ranks at once. The markers are plain text, the same on each rank, so that merging
leaves them where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Extent, Object, Path, Tensor, dotted
from ckpttool.catalogue.protocols import OpenOptions
from ckpttool.errors import CkptError, CorruptError
from ckpttool.formats.rankfiles.compare import CopyComparer
from ckpttool.formats.rankfiles.flat import optimizer as flat_optimizer
from ckpttool.formats.rankfiles.flat import parameters
from ckpttool.formats.rankfiles.flat.pieces import Counted, Parameter, Place, Rebuilt
from ckpttool.formats.rankfiles.merge import RankState
from ckpttool.serialization.dtensor import Shard
from ckpttool.serialization.torch_pickle import TensorRef

_DEPTH = 4
_MARK = "\0rebuilt "


class Rebuilding:
    """Finds the flat pieces of a set, and puts what they are pieces of into its trees and then into its catalogue."""

    def __init__(self, states: Sequence[RankState], options: OpenOptions) -> None:
        self._states, self._options = states, options
        self._rebuilt: list[Rebuilt] = []
        self.faults: dict[Path, CkptError] = {}
        self.models: list[Path] = []
        self.optimizers: list[Path] = []
        for path, node in _dicts(states[0]):
            if parameters.is_flat([node]):
                self.models.append(path)
        for path, node in _dicts(states[0]):
            raw = _is_optimizer(node) and flat_optimizer.is_raw([node], beside_flat=bool(self.models))
            if raw and (self.models or not self._all_lines()):
                self.optimizers.append(path)

    def _all_lines(self) -> bool:
        """Whether even the model has nothing of two dimensions: then an optimizer without is no wonder."""
        tensors = [
            v
            for p, node in _dicts(self._states[0])
            if not _is_optimizer(node)
            for v in node.values()
            if isinstance(v, (TensorRef, Shard)) and not _within_optimizer(self._states[0], p)
        ]
        return bool(tensors) and all(len(v.shape) < 2 for v in tensors)

    def run(self) -> None:
        """Put markers into the trees; an optimizer that cannot be rebuilt is left as it is, and among `faults`. Raises
        CorruptError or UsageError when what a model needs is not there."""
        counted: Sequence[Counted] | None = None
        for path in self.models:
            trees = [state.node(path) for state in self._states]
            model = parameters.model(trees, self._placer(path), self._options, self._files(path))
            counted = counted or model.counted
            whole = set(model.whole)
            markers = {name: self._mark(rebuilt) for name, rebuilt in model.tensors.items()}
            for tree in trees:
                kept = {name: value for name, value in tree.items() if name in whole}
                order = [name for name in tree if name in whole or name in markers]
                order += [name for name in markers if name not in tree]
                tree.clear()
                tree.update((name, kept.get(name, markers.get(name))) for name in order)
        for path in self.optimizers:
            trees = [state.node(path) for state in self._states]
            try:
                known = counted or self._named(path)
            except CkptError as error:
                self._blame(path, error)
                continue
            try:
                marked = self._marked(flat_optimizer.optimizer(trees, self._placer(path), known, self._replica()))
            except CkptError as error:
                if self.models or any(True for state in self._states for file in state.files.values() if file.shards):
                    self._blame(path, error)
                # Plain on every rank: Adafactor's state is of one dimension too, and no piece of anything.
                continue
            for tree in trees:
                tree.clear()
                tree.update(marked)

    def _blame(self, optimizer: Path, error: CkptError) -> None:
        """Say that an error is that of one optimizer, and how to go on without."""
        hint = error.hint or "save it again"
        if optimizer:
            name = dotted(optimizer)
            self.faults[optimizer] = type(error)(
                error.message, hint=f"{hint}; or leave it out: `--drop {name}`", **{**error.facts, "concerns": [name]}
            )
        else:
            self.faults[optimizer] = error

    def _named(self, optimizer: Path) -> Sequence[Parameter]:
        """The parameters of the model that an optimizer is of."""
        candidates = [
            path
            for path, node in _dicts(self._states[0])
            if not _within_optimizer(self._states[0], path)
            and not _is_optimizer(node)
            and any(isinstance(v, (TensorRef, Shard)) and v.dtype.kind == "float" for v in node.values())
        ]
        if candidates:
            trees = [state.node(candidates[0]) for state in self._states]
            return flat_optimizer.named(trees, self._placer(candidates[0]))
        if self._options.shapes is not None and self._options.ordered:
            return [Parameter(name, shape) for name, shape in self._options.shapes.items()]
        files = self._files(optimizer)
        raise CorruptError(
            f"`{files[0]}`: the optimizer has flat pieces under integer ids, and no model is beside it to name them",
            hint="name the directory, or a pattern that matches the model's files too, or pass `--shapes FROM`: a "
            "checkpoint of the model",
            files=files,
        )

    def _replica(self) -> list[int] | None:
        """The ranks, by their place here, that have everything once, where the model's mesh has several replicas."""
        for _, node in _dicts(self._states[0]):
            for value in node.values():
                if isinstance(value, Shard) and "Replicate" in value.placements and len(value.within) > 1:
                    where = {state.rank: i for i, state in enumerate(self._states)}
                    choices = [
                        range(1) if placement == "Replicate" else range(size)
                        for size, placement in zip(value.mesh, value.placements, strict=True)
                    ]
                    replica = set(product(*choices))
                    every = product(*map(range, value.mesh))
                    return [where[rank] for rank, at in zip(value.within, every, strict=True) if at in replica]
        return None

    def _placer(self, path: Path) -> Place:
        files = [state.file_of(path) for state in self._states]

        def place(rank: int, ref: TensorRef) -> Extent:
            return files[rank].place(ref)

        return place

    def _files(self, path: Path) -> list[str]:
        return [state.file_of(path).name for state in self._states]

    def _mark(self, rebuilt: Rebuilt) -> str:
        self._rebuilt.append(rebuilt)
        return f"{_MARK}{len(self._rebuilt) - 1}"

    def _marked(self, value: Any) -> Any:
        if isinstance(value, Rebuilt):
            return self._mark(value)
        if isinstance(value, dict):
            return {key: self._marked(child) for key, child in value.items()}
        return [self._marked(child) for child in value] if type(value) is list else value

    def finish(self, catalogue: Catalogue, comparer: CopyComparer) -> Iterator[CkptError]:
        """Add the restored tensors to the catalogue; yield the faults of their replicas."""
        for path, entry in catalogue.entries.items():
            if isinstance(entry, Object) and isinstance(entry.value, str) and entry.value.startswith(_MARK):
                rebuilt = self._rebuilt[int(entry.value.removeprefix(_MARK))]
                catalogue.entries[path] = Tensor(path, rebuilt.dtype, rebuilt.shape, rebuilt.chunks)
                yield from self._compare(path, rebuilt, comparer)

    def _compare(self, path: Path, rebuilt: Rebuilt, comparer: CopyComparer) -> Iterator[CkptError]:
        if not rebuilt.copies or len(rebuilt.chunks) != 1:
            return
        extent = rebuilt.chunks[0].extent
        itemsize, shape = rebuilt.dtype.itemsize, rebuilt.shape
        other = [r for r, e in rebuilt.copies if comparer.same(itemsize, shape, extent, e) is False]
        if other:
            names = [self._states[r].rank for r in other]
            yield CorruptError(
                f"tensor `{dotted(path)}` differs between ranks that should have the same: ranks "
                f"{', '.join(map(str, names))} ({', '.join(f'`{self._files(path)[r]}`' for r in other)})",
                hint="the files are not of one save: copy all of them again from the same step",
                tensor=dotted(path),
                ranks=names,
                concerns=[dotted(path)],
            )


def is_needed(state: RankState) -> bool:
    """Whether a rank has flat pieces, as far as it alone can tell."""
    return any(parameters.is_flat([n]) or (_is_optimizer(n) and flat_optimizer.is_raw([n])) for _, n in _dicts(state))


def _is_optimizer(node: Mapping[Any, Any]) -> bool:
    return isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def _within_optimizer(state: RankState, path: Path) -> bool:
    return any(_is_optimizer(node) for at, node in _dicts(state) if len(at) < len(path) and path[: len(at)] == at)


def _dicts(state: RankState) -> Iterable[tuple[Path, dict[Any, Any]]]:
    """The dicts of a rank's trees that may be a model or an optimizer."""
    todo: list[tuple[Path, Any]] = [(root, file.tree) for root, file in state.files.items()]
    dicts = []
    for path, node in todo:
        if isinstance(node, dict):
            dicts.append((path, node))
            if len(path) < _DEPTH:
                todo += [((*path, key), child) for key, child in node.items() if isinstance(child, dict)]
    return dicts
