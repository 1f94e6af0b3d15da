"""What proves that files are of two saves: whole states side by side, counters that all ranks of a save have alike.

    kind         entries                                     why
    progress     step, epoch, iteration, global_step, ...    ranks count together
    scheduler    last_epoch, _step_count                     stepped by every rank
    optimizer    step of a parameter; lr of a group          stepped by every rank; of one group everywhere

A random number generator, a dataloader, tokens seen and losses are a rank's own by nature, and prove nothing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping
from typing import Any

from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Entry, Object, Path, Tensor, dotted
from ckpttool.errors import CorruptError, ReadError
from ckpttool.formats.rankfiles.comparing import Comparing
from ckpttool.formats.rankfiles.rank_file import RankFile
from ckpttool.serialization.dtensor import Shard
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.text import some

_COUNTERS = {
    "progress": re.compile(
        r"((global|current|total|train|num|last|completed)_)*(step|steps|epoch|epochs|iteration|iterations|iter|iters)"
        r"(_num|_count|_idx)?",
        re.IGNORECASE,
    ),
    "scheduler": re.compile(r"last_epoch|_?step_count|num_steps"),
    "optimizer": re.compile(r"(.*\.)?(step|lr|initial_lr)"),
}
_MINOR = ("scheduler", "rng", "dataloader", "scaler", "progress")
_SPELT = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


class TwoSaves:
    """The counters that differ: `{("step",): ("progress", {1: Object(("step",), 3)})}`."""

    def __init__(self) -> None:
        self._found: dict[Path, tuple[str, dict[int, Entry]]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, kind: str, path: Path, entry: Entry, rank: int) -> None:
        """What a rank has at `path` differs from what is in the catalogue; kept if that is a counter."""
        names = _COUNTERS.get(kind)
        # A counter that is a list of one for each optimizer ends in an index.
        key = next((key for key in reversed(path) if not isinstance(key, int)), "")
        if names is not None and names.fullmatch(str(key)) and _is_counter(entry):
            self._found.setdefault(path, (kind, {}))[1][rank] = entry

    def fault(
        self,
        catalogue: Catalogue,
        comparing: Comparing,
        names: Mapping[int, str],
        absent: Mapping[Path, Collection[int]],
        stages: bool,
    ) -> CorruptError | None:
        """The proof, of all entries that are one the plainest; None when there is none. With pipeline `stages` the
        groups of one number are of other parameters on each, and may have another learning rate."""
        kinds = [*_COUNTERS][: 2 if stages else 3]
        proofs = [path for kind in kinds for path, (of, _) in self._found.items() if of == kind]
        if not proofs:
            return None
        path, *further = proofs
        ours, theirs = catalogue.entries[path], self._found[path][1]
        by: dict[str, list[int]] = {}
        for rank in names:
            if rank in theirs or rank not in absent.get(path, ()):
                by.setdefault(_value(theirs.get(rank, ours), comparing), []).append(rank)
        told = [
            f"{value} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))}"
            f"{', ...' if len(ranks) > 8 else ''} ({some([names[rank].strip('`') for rank in ranks])})"
            for value, ranks in by.items()
        ]
        more = f"; so {'does' if len(further) == 1 else 'do'} {some([*map(dotted, further)])}" if further else ""
        many = "two" if len(by) < 3 else str(len(by))
        return CorruptError(
            f"the files are of {many} saves: `{dotted(path)}` differs between ranks: {' and '.join(told[:4])}{more}",
            hint="take all files from one save: what is made of several is a model that never was",
            ranks=sorted(theirs), found=dict(by), entries=[dotted(p) for p in proofs[:100]],
        )  # fmt: skip


def check_parts(patterns: Mapping[str, str], loaded: Mapping[Path, RankFile]) -> None:
    """Raises ReadError when the files of one part are whole training states, and those of another hold weights too:
    these are two runs in a directory. `patterns` are what names the files of each part."""
    whole, weights = [], []
    for root, file in loaded.items():
        part = str(root[0]) if root else ""
        held = _held(file.tree)
        if {"model", "optimizer"} <= held:
            whole.append(part)
        elif held & {"model", "optimizer"} and parts.kind_of_key(part) not in _MINOR:
            weights.append(part)
    if not whole or len(whole) + len(weights) < 2:
        return
    found = [patterns[part] for part in (*whole, *weights)]
    choices = " or ".join([f"`'{pattern}'`" for pattern in found[:4]])
    raise ReadError(
        f"{some([pattern.rpartition('/')[2] for pattern in found], 6)} are checkpoints of their own: files of the "
        "first hold model and optimizer, so they are no part of one",
        hint=f"name one: {choices}",
        found=found,
    )  # fmt: skip


def _held(tree: Any) -> set[str]:
    """The kinds of parts that a file has at its root: `{"model", "optimizer"}`; a bare state dict is a model."""
    if not isinstance(tree, dict):
        return set()
    if {"state", "param_groups"} <= tree.keys():
        return {"optimizer"}
    held = {kind for key, value in tree.items() if isinstance(value, dict) and (kind := parts.kind_of_key(key))}
    return held or {"model" for value in tree.values() if isinstance(value, (TensorRef, Shard))}


def _is_counter(entry: Entry) -> bool:
    if isinstance(entry, Tensor):
        return entry.numel == 1
    return isinstance(entry.value, (int, float)) and not isinstance(entry.value, bool)


def _value(entry: Entry, comparing: Comparing) -> str:
    if isinstance(entry, Object):
        return repr(entry.value)
    spelt = _SPELT.get(entry.dtype.name)
    if spelt is None or not len(entry.chunks):
        return "another value"
    return f"{struct.unpack(spelt, comparing.bytes_of(entry.chunks[0].extent))[0]:g}"
