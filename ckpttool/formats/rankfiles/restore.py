"""Replaces flat parameters by the tensors that `flat.model` and `flat.optimizer` restore, between reading and merging.

    in every tree   {"model": {embed.weight: 1-D, _flat_param: ShardedTensor}, "optim": {state: {0: 1-D}, ...}}
    becomes         {"model": {embed.weight: Marker(0)},                       "optim": {state: {embed.weight: ...}}}
    and at the end the catalogue has the tensor that a marker stands for, of chunks in the files of all ranks

Only these sets need the trees of all ranks at once. The markers are plain text, the same on each rank, so that merging
leaves them where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, product
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Object, Path, Tensor, dotted
from ckpttool.catalogue.flatten import replaced
from ckpttool.catalogue.protocols import OpenOptions
from ckpttool.errors import CkptError, CorruptError, UsageError
from ckpttool.flat import fsdp1_optimizer, fsdp1_parameters
from ckpttool.flat.pieces import Counted, Parameter, Place, Rebuilt, Trees
from ckpttool.formats.rankfiles.compare import CopyComparer
from ckpttool.formats.rankfiles.merge import ONE_SAVE, RankState
from ckpttool.serialization.dtensor import RankShard
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.text import rank_ranges

_DEPTH = 4
_MARK = "\0rebuilt "


class Rebuilding:
    """Finds the flat pieces of a set, and puts what they are pieces of into its trees and then into its catalogue."""

    def __init__(self, states: Sequence[RankState], options: OpenOptions) -> None:
        self._states, self._options = states, options
        self._rebuilt: list[Rebuilt] = []
        self.faults: dict[Path, CkptError] = {}
        self._dicts = dict(_dicts(states[0]))
        self.models = [path for path, node in self._dicts.items() if fsdp1_parameters.is_flat([node])]
        self.optimizers = [
            path for path, node in self._dicts.items() if _is_optimizer(node) and self._is_raw(path, node)
        ]
        tensors = [tensor for _, tensors in self._beside() for tensor in tensors]
        # Where even the model has nothing of two dimensions, an optimizer without is no wonder.
        if not self.models and tensors and all(len(tensor.shape) < 2 for tensor in tensors):
            self.optimizers = []

    def _is_raw(self, path: Path, node: dict[Any, Any]) -> bool:
        beside_flat = bool(self.models)
        if node["state"] and not fsdp1_optimizer.is_raw([node], beside_flat=beside_flat):
            return False
        with suppress(KeyError, TypeError):  # a rank without; merging names it
            return fsdp1_optimizer.is_raw(self._nodes(path), beside_flat=beside_flat)
        return bool(node["state"])

    def _beside(self) -> Iterator[tuple[Path, list[TensorRef | RankShard]]]:
        """Yield the dicts that are not part of an optimizer, with their tensors."""
        roots = [path for path, node in self._dicts.items() if _is_optimizer(node)]
        for path, node in self._dicts.items():
            if not any(path[: len(root)] == root for root in roots):
                yield path, [value for value in node.values() if isinstance(value, (TensorRef, RankShard))]

    def run(self) -> None:
        """Put markers into the trees; an optimizer that cannot be rebuilt is left as it is, and among `faults`. Raises
        CorruptError or UsageError when what a model needs is not there."""
        counted: Sequence[Counted] = ()
        for path in self.models:
            trees = self._nodes(path)
            model = fsdp1_parameters.model(trees, self._placer(path), self._options, self._files(path))
            counted = counted or model.counted
            markers = {name: self._mark(rebuilt) for name, rebuilt in model.tensors.items()}
            for tree in trees:
                restored = {name: tree[name] for name in model.whole} | markers
                _replace(tree, {name: restored[name] for name in tree if name in restored} | markers)
        for path in self.optimizers:
            trees = self._nodes(path)
            known: Sequence[Counted] | None = None
            try:
                known = counted or self._named(path)
                rebuilt = self._optimizer(trees, self._placer(path), known)
                marked = replaced(rebuilt, Rebuilt, lambda tensor, _: self._mark(tensor))
            except CkptError as error:
                sharded = any(file.shards for state in self._states for file in state.files.values())
                # Plain on every rank: Adafactor's state is of one dimension too, and no piece of anything.
                if known is None or self.models or sharded:
                    self._blame(path, error)
                continue
            for tree in trees:
                _replace(tree, marked)

    def _optimizer(self, trees: Trees, place: Place, known: Sequence[Counted]) -> dict[str, Any]:
        """Return the optimizer by one replica; where all ranks have the same, by the first, or by all."""
        replica = self._replica()
        if replica is None and fsdp1_optimizer.are_alike(trees, place):
            with suppress(CorruptError):
                return fsdp1_optimizer.optimizer(trees, place, known, [0])
        return fsdp1_optimizer.optimizer(trees, place, known, replica)

    def _blame(self, optimizer: Path, error: CkptError) -> None:
        """Say that an error is that of one optimizer, and how to go on without."""
        if optimizer:
            name = dotted(optimizer)
            error.hint = f"{error.hint or 'save it again'}; or leave it out: `--drop {name}`"
            error.facts["concerns"] = [name]
        self.faults[optimizer] = error.with_traceback(None)  # whose frames hold the trees of all ranks

    def _named(self, optimizer: Path) -> Sequence[Parameter]:
        """Return the parameters of the model that an optimizer is of."""
        for path, tensors in self._beside():
            if any(tensor.dtype.kind == "float" for tensor in tensors):
                return fsdp1_optimizer.named(self._nodes(path), self._placer(path))
        if self._options.shapes is not None and self._options.ordered:
            return [Parameter(name, shape) for name, shape in self._options.shapes.items()]
        files = self._files(optimizer)
        what = "the optimizer has flat pieces under integer ids, and no model is beside it to name them"
        how = "name the directory, or a pattern that matches the model's files too"
        hint = f"{how}, or pass `--shapes FROM`: a checkpoint of the model"
        raise UsageError(f"`{files[0]}`: {what}", hint=hint, files=files, needs="--shapes")

    def _replica(self) -> list[int] | None:
        """Return the places here of ranks that together have everything once, where the mesh has replicas."""
        for value in chain.from_iterable(node.values() for node in self._dicts.values()):
            if isinstance(value, RankShard) and "Replicate" in value.placements and len(value.within) > 1:
                where = {state.rank: i for i, state in enumerate(self._states)}
                every = zip(value.within, product(*map(range, value.mesh)), strict=True)
                copied = [i for i, placement in enumerate(value.placements) if placement == "Replicate"]
                return [where[rank] for rank, at in every if not any(at[i] for i in copied)]
        return None

    def _nodes(self, path: Path) -> list[dict[Any, Any]]:
        return [state.node(path) for state in self._states]

    def _placer(self, path: Path) -> Place:
        files = [state.file_of(path) for state in self._states]
        return lambda rank, ref: files[rank].place(ref)

    def _files(self, path: Path) -> list[str]:
        return [state.file_of(path).name for state in self._states]

    def _mark(self, rebuilt: Rebuilt) -> str:
        self._rebuilt.append(rebuilt)
        return f"{_MARK}{len(self._rebuilt) - 1}"

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
        extent, itemsize = rebuilt.chunks[0].extent, rebuilt.dtype.itemsize
        other = [r for r, e in rebuilt.copies if comparer.same(itemsize, rebuilt.shape, extent, e) is False]
        if other:
            ranks, files, name = [self._states[r].rank for r in other], self._files(path), dotted(path)
            where = f"{rank_ranges(ranks)} ({', '.join(f'`{files[r]}`' for r in other)})"
            message = f"tensor `{name}` differs between ranks that should have the same: {where}"
            yield CorruptError(message, hint=ONE_SAVE, tensor=name, ranks=ranks, concerns=[name])


def is_needed(state: RankState) -> bool:
    """Return whether a rank has flat pieces, as far as it can tell: without state, all of it may be frozen."""
    nodes = [node for _, node in _dicts(state)]
    optimizers = [node for node in nodes if _is_optimizer(node)]
    are_raw = (not node["state"] or fsdp1_optimizer.is_raw([node]) for node in optimizers)
    return any(are_raw) or any(fsdp1_parameters.is_flat([node]) for node in nodes)


def _replace(tree: dict[Any, Any], content: dict[Any, Any]) -> None:
    tree.clear()
    tree.update(content)


def _is_optimizer(node: Mapping[Any, Any]) -> bool:
    return isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def _dicts(state: RankState) -> Iterator[tuple[Path, dict[Any, Any]]]:
    """Yield the dicts of a rank's trees that may be a model or an optimizer, outer ones first."""
    todo: list[tuple[Path, Any]] = [(root, file.tree) for root, file in state.files.items()]
    for path, node in todo:
        if isinstance(node, dict):
            yield path, node
            if len(path) < _DEPTH:
                todo += [((*path, key), child) for key, child in node.items() if isinstance(child, dict)]
