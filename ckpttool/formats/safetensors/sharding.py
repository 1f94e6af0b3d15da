"""Plans the safetensors files of a catalogue, and the names of tensors in them. Pure.

A model by the convention of Hugging Face, or a whole training state: each part in files of its own, so that the model's
load without the rest. A tied tensor is written once; its other names become `metadata`, as `save_model` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from math import prod
from typing import NamedTuple

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Part, Path, Tensor, dotted
from ckpttool.errors import LossError
from ckpttool.formats.safetensors import checksums, index, state_json
from ckpttool.formats.safetensors.state_json import TensorPlace
from ckpttool.serialization import safetensors_header
from ckpttool.serialization.safetensors_header import Spec

SUFFIX = ".safetensors"
MAX_SHARD_SIZE = 5 * 10**9  # huggingface_hub's MAX_SHARD_SIZE; transformers 5 passes 50 GB

FORMAT_PT = {"format": "pt"}
# Keys of the metadata of a header or of an index, which cannot be names of tied tensors.
STATE = "ckpttool.state"  # the key of the metadata that has the name of the state file, which lies beside
INDEX = "ckpttool.index"  # that of one that has the name of the index, if there is more in it than the files say
RESERVED = frozenset({"format", "total_size", checksums.KEY, STATE, INDEX})
ROOT = "ckpttool.root"  # the key of the metadata that has the keys around the model, as JSON
_RAW = DTYPES["uint8"]


class FilePlan(NamedTuple):
    """A file to be written: `FilePlan("model.safetensors", [Spec("w", float32, (64, 13))], {"format": "pt"})`."""

    name: str
    tensors: list[Spec]
    metadata: dict[str, str]
    keep_order: bool = False

    def header(self, more: Mapping[str, str] | None = None) -> bytes:
        """Return what the file begins with, with `more` metadata."""
        return safetensors_header.build_header(
            self.tensors, {**self.metadata, **(more or {})}, keep_order=self.keep_order
        )


@dataclass(slots=True)
class Plan:
    """All files, their indexes (`model.safetensors.index.json` and its bytes), and the place of each tensor."""

    files: list[FilePlan] = field(default_factory=list)
    indexes: dict[str, bytes] = field(default_factory=dict)
    places: dict[Path, TensorPlace] = field(default_factory=dict)


def beside(metadata: Mapping[str, str]) -> set[str]:
    """Return the names of the files that have what those with this metadata lack: a state file, an index. Pure."""
    names = {metadata.get(STATE, ""), metadata.get(INDEX, "")}
    return {name for name in names if name == state_json.NAME or (name.endswith(index.SUFFIX) and "/" not in name)}


def is_model(catalogue: Catalogue) -> bool:
    """Return whether all entries are tensors of one model (or of one unknown part)."""
    entries = catalogue.entries.values()
    kinds = [part.kind for part in {entry.part for entry in entries}]
    return kinds in (["model"], ["other"]) and all(isinstance(entry, Tensor) for entry in entries)


# A model --------------------------------------------------------------------------------------------------------------


def collisions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of tensors with the same name: `("a", "b")` and `("a.b",)`."""
    owners: dict[str, Tensor] = {}
    first = ((owners.setdefault(tensor.fqn, tensor), tensor) for tensor in tensors)
    return [(one, tensor) for one, tensor in first if one is not tensor]


def plan_model(
    catalogue: Catalogue,
    max_size: int | None,
    metadata: dict[str, str],
    *,
    stem: str = "model",
    count_parameters: bool = False,
    files: Mapping[str, Sequence[str]] | None = None,
    keep_order: bool = False,
) -> Plan:
    """Plan the files of a model, of at most `max_size` bytes each, or one file; their names begin with `stem`. With
    `count_parameters`, the index has the number of elements. `files` are the names of the tensors in each file, which
    then keep that order; with `keep_order`, they keep that of the catalogue. Raises LossError if names collide."""
    tensors = list(catalogue.tensors)
    for one, other in collisions(tensors):
        first, second = ("/".join(f"`{key}`" for key in t.path) for t in (one, other))
        text = f"tensors {first} and {second} would both be called `{other.fqn}`"
        raise LossError(text, hint="give one of them another name with `--rename`", tensor=other.fqn)
    plan = Plan()
    # The metadata cannot have a tie named `format`: such a tensor gets its own bytes.
    names = {t.path: t.fqn for t in tensors}
    owners = {t.path: t if names[t.path] in RESERVED else catalogue.first(t) for t in tensors}
    _add_group(plan, stem, names, owners, max_size, metadata, count_parameters=count_parameters, given=files)
    if files is not None or keep_order:
        plan.files = [file._replace(keep_order=True) for file in plan.files]
    plan.places |= {path: plan.places[owner.path] for path, owner in owners.items()}
    return plan


def _add_group(
    plan: Plan,
    stem: str,
    names: dict[Path, str],
    owners: dict[Path, Tensor],
    max_size: int | None,
    metadata: dict[str, str],
    *,
    count_parameters: bool = False,
    given: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Plan the files of tensors that share a file or an index, under these names.

    `owners` are the tensors under whose names the bytes are stored; `given` are the names in each file.
    """
    stored = [owners[path] for path in names if owners[path].path == path]
    total = sum(t.nbytes for t in stored)
    groups: Mapping[str, Sequence[str]] = given or {}
    if given is None:
        split_ = split([(names[t.path], t.nbytes) for t in stored], total if max_size is None else max_size)
        groups = dict(zip(file_names(stem, len(split_)), split_, strict=True))
    weight_map = {name: file for file, group in groups.items() for name in group}
    if given is not None:
        weight_map = {names[t.path]: weight_map[names[t.path]] for t in stored}
    # A remark with the name of a tensor would be read as a tie.
    remarks = {k: v for k, v in metadata.items() if v not in weight_map}
    ties = {n: names[o.path] for p, n in names.items() if (o := owners[p]).path != p and o.path in names}
    remarks = {k: v for k, v in (remarks | ties).items() if k not in RESERVED}
    index_name, header_metadata = stem + index.SUFFIX, FORMAT_PT | remarks
    if len(groups) > 1:
        # huggingface_hub keeps the metadata of several files in their index, which may be lost, or not there yet.
        header_metadata = FORMAT_PT | {INDEX: index_name} if remarks else FORMAT_PT
    kinds = {
        names[t.path]: (_RAW, (prod(t.shape) * t.dtype.itemsize,)) if is_raw(t) else (t.dtype, t.shape) for t in stored
    }
    for file, group in groups.items():
        plan.files.append(FilePlan(file, [Spec(name, *kinds[name]) for name in group], dict(header_metadata)))
    if len(groups) > 1:
        parameters = sum(t.numel for t in stored) if count_parameters else None
        plan.indexes[index_name] = index.build(total, remarks, weight_map, parameters)
    for tensor in stored:
        name = names[tensor.path]
        plan.places[tensor.path] = TensorPlace(weight_map[name], name, is_raw(tensor))


def file_names(stem: str, count: int) -> list[str]:
    """Return `["model.safetensors"]`, or `["model-00001-of-00002.safetensors", ...]`."""
    return [stem + (f"-{n:05d}-of-{count:05d}" if count > 1 else "") + SUFFIX for n in range(1, count + 1)]


def is_raw(tensor: Tensor) -> bool:
    """Return whether safetensors does not have this dtype, so that the tensor is stored as bytes."""
    kind = tensor.dtype.safetensors
    return kind is None or (kind == "F4" and not tensor.shape)


# A whole state --------------------------------------------------------------------------------------------------------


def plan_state(catalogue: Catalogue, max_size: int) -> Plan:
    """Plan the files of a whole training state: those of each part, of at most `max_size` bytes each."""
    parts: dict[Part, list[Tensor]] = {}
    for tensor in catalogue.tensors:
        parts.setdefault(tensor.part, []).append(tensor)
    owners = _owners(catalogue)
    plan = Plan()
    stems = _stems(list(parts))
    for part, tensors in parts.items():
        if any(owners[t.path] is t for t in tensors):
            _add_group(plan, stems[part], _unique_names(tensors), owners, max_size, {})
    plan.places |= {path: plan.places[owner.path] for path, owner in owners.items()}
    # What it was cannot be seen from the files of its parts, if the state file is lost, or not there yet.
    plan.files = [file._replace(metadata={**file.metadata, STATE: state_json.NAME}) for file in plan.files]
    return plan


def _owners(catalogue: Catalogue) -> dict[Path, Tensor]:
    """Return the tensor under whose name the bytes of each tensor are stored: one of a model, or the first."""
    firsts = {t.path: catalogue.first(t) for t in catalogue.tensors}
    owners: dict[Path, Tensor] = {}
    for tensor in sorted(catalogue.tensors, key=lambda t: (t.part.kind != "model", firsts[t.path] is not t)):
        owners.setdefault(firsts[tensor.path].path, tensor)
    return {path: owners[first.path] for path, first in firsts.items()}


def _stems(parts: list[Part]) -> dict[Part, str]:
    """Return the file name stem of each part: its kind, with the root key for a second part of that kind."""
    stems: dict[Part, str] = {}
    # If both `ema` and `model` are models, `model` gets the plain name.
    for part in sorted(parts, key=lambda p: p.root[-1:] != (p.kind,)):
        rooted = f"{part.kind}-" + re.sub(r"[^A-Za-z0-9_.]", "_", dotted(part.root))
        candidates = chain((part.kind, rooted), (f"{part.kind}-{n}" for n in count(2)))
        stems[part] = next(stem for stem in candidates if stem not in stems.values())
    return stems


def _unique_names(tensors: list[Tensor]) -> dict[Path, str]:
    """Return unique names for the header; the state file has the paths."""
    names: dict[str, Path | None] = {safetensors_header.METADATA: None}
    for tensor in tensors:
        name = tensor.fqn.encode("utf-8", "backslashreplace").decode()
        candidates = chain((name,), (f"{name}#{n}" for n in count(2)))
        names[next(unique for unique in candidates if unique not in names)] = tensor.path
    return {path: name for name, path in names.items() if path is not None}


def split(sizes: Iterable[tuple[str, int]], max_size: int) -> list[list[str]]:
    """Return the names of each file, in order, for files of at most `max_size` bytes.

    A larger tensor gets its own file, and the file before it is filled further, as in
    `split_state_dict_into_shards_factory`.
    """
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, nbytes in sizes:
        if nbytes > max_size:
            files.append([name])
            continue
        if filled + nbytes > max_size:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    return [*files, current] if current or not files else files
