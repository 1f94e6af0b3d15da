"""Keeps the statistics of checkpoints in the cache, by what identifies their files: size, inode, and the times at which
the bytes and the inode last changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ckpttool.analysis.result import as_json
from ckpttool.analysis.statistics.collect import Update
from ckpttool.analysis.statistics.elements import Channels, Statistics
from ckpttool.analysis.statistics.histogram import Central, Compact
from ckpttool.analysis.statistics.results import GroupStatistics, TensorStatistics
from ckpttool.analysis.statistics.spectral import Spectrum
from ckpttool.analysis.statistics.thumbnails import Thumbnail
from ckpttool.catalogue.entries import Tensor
from ckpttool.storage import cache
from ckpttool.storage.files import Fingerprint
from ckpttool.version import __version__

_KIND = "stats"
_LAYOUT = 5  # of the cached document

Rows = tuple[list[TensorStatistics], list[GroupStatistics]]


def key_of(fingerprint: Fingerprint, tensors: Sequence[Tensor], spectral: bool) -> str:
    """Return the name of the statistics of these tensors of these files. Pure."""
    names = [(tensor.name, str(tensor.part), tensor.dtype.name, tensor.shape) for tensor in tensors]
    identities = sorted((path, version.identity) for path, version in fingerprint.items())
    text = json.dumps([_LAYOUT, __version__, spectral, identities, names])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def load(key: str, kind: str = _KIND) -> Rows | None:
    """Return the statistics that were stored, or None."""
    folder = cache.folder_of_results(kind)
    data = cache.read(folder, key) if folder is not None else None
    if data is None:
        return None
    try:
        document = json.loads(data)
        tensors = [_tensor(row) for row in document["tensors"]]
        return tensors, [_group(row) for row in document["groups"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # somebody else's, or damaged


def store(key: str, tensors: Sequence[TensorStatistics], groups: Sequence[GroupStatistics], kind: str = _KIND) -> None:
    """Store statistics. Those of another `kind` are apart: `browse` has none of groups."""
    folder = cache.folder_of_results(kind)
    if folder is None:
        return
    document = {"tensors": as_json(tensors), "groups": as_json(groups)}
    cache.write(folder, key, json.dumps(document).encode())
    cache.prune(folder)


def _tensor(row: dict[str, Any]) -> TensorStatistics:
    tensor = TensorStatistics(**{**row, "shape": tuple(row["shape"]), "statistics": _statistics(row["statistics"])})
    tensor.rows, tensor.columns = (Channels(**row[name]) if row[name] else None for name in ("rows", "columns"))
    tensor.update = Update(**row["update"]) if row["update"] else None
    tensor.histogram = _histogram(row["histogram"])
    tensor.thumbnail = Thumbnail(**row["thumbnail"]) if row["thumbnail"] else None
    tensor.spectrum = Spectrum(**row["spectrum"]) if row["spectrum"] else None
    return tensor


def _group(row: dict[str, Any]) -> GroupStatistics:
    group = GroupStatistics(**{**row, "statistics": _statistics(row["statistics"])})
    group.histogram = _histogram(row["histogram"])
    return group


def _statistics(row: dict[str, Any]) -> Statistics:
    # JSON has no infinity: a sum that is too large for a float64 is a word.
    values: dict[str, Any] = {name: float(value) if isinstance(value, str) else value for name, value in row.items()}
    return Statistics(**values)


def _histogram(row: dict[str, Any] | None) -> Compact | None:
    if not row:
        return None
    central = Central(**row["central"]) if row["central"] else None
    return Compact([(sign, step, count) for sign, step, count in row["counts"]], central)
