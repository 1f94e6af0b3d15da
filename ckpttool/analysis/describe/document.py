"""The document of `inspect --json`: docs/reference/json.md. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ckpttool.analysis.describe import sharding, summary, warnings
from ckpttool.analysis.describe.document_fields import ObjectEntry, TensorEntry
from ckpttool.analysis.describe.format_value import jsonable, peek, type_name
from ckpttool.analysis.describe.listing import ALL, Listing
from ckpttool.analysis.result import as_json
from ckpttool.catalogue import counters
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Catalogue, Object, Path, Tensor, dotted
from ckpttool.catalogue.shown import shown
from ckpttool.errors import DONE
from ckpttool.version import schema

_LISTED = ("tensors", "objects", "warnings")
# Facts for the next step of a conversion, and of what the step is told by.
_INNER = ("buffers", "components", "whole objects", "parameter order", "shapes without order", *counters.FACTS)


def document(catalogue: Catalogue, path: str, listing: Listing = ALL, exit_code: int = DONE) -> Iterator[str]:
    """Yield the document as JSON text, a tensor or an object a line: a large checkpoint has hundreds of
    megabytes of it. `listing` selects tensors and objects;
    `exit_code` is that of the command."""
    headline, parts = summary.head(catalogue, None)
    found = [*catalogue.warnings, *warnings.findings(catalogue, find_aliases(catalogue.tensors))]
    head: dict[str, Any] = {
        "schema": schema("inspect"),
        "exit_code": exit_code,
        "verdict": "damaged" if summary.damage(catalogue) else "readable",
        "message": str(headline),
        "path": path,
        "format": catalogue.format,
        "world_size": headline.world_size,
        "step": headline.step,
        "epoch": headline.epoch,
        "parameters": headline.parameters,
        "dtypes": headline.dtypes,
        "architecture": headline.architecture,
        "layers": headline.layers,
        "optimizers": [
            {"root": dotted(o.root), "name": o.name, "state": as_json(o.state)} for o in headline.optimizers
        ],
        "parts": as_json(parts),
        "payload_bytes": sum(line.payload_bytes for line in parts),
        "file_bytes": catalogue.nbytes(),
        "bytes_per_rank": sharding.bytes_per_rank(catalogue),
        "files": [{"path": f.name, "nbytes": f.size, "rank": f.rank} for f in catalogue.own_files],
    }
    for key, value in catalogue.facts.items():
        if key not in (*_INNER, *_LISTED):
            head.setdefault(str(key), jsonable(value, catalogue.entries))
    yield "{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items())
    yield ',\n "tensors": ['
    placements = sharding.Placements(catalogue)
    yield from _lines(_tensor(t, catalogue, placements.of(t)) for t in listing.tensors(catalogue))
    yield '],\n "objects": ['
    yield from _lines(_object(o, catalogue) for o in listing.objects(catalogue))
    yield f'],\n "warnings": {json.dumps([str(warning) for warning in found])}}}\n'


def _lines(items: Iterator[Any]) -> Iterator[str]:
    for i, item in enumerate(items):
        yield f"{',' if i else ''}\n  {json.dumps(item)}"


def path_json(path: Path) -> list[Any]:
    """Return a key path for JSON: strings and integers as they are."""
    return [key if isinstance(key, (str, int)) else shown(key) for key in path]


def _tensor(tensor: Tensor, catalogue: Catalogue, placement: sharding.MeshPlacement | None) -> TensorEntry:
    files, chunks = catalogue.files, tensor.chunks
    return {
        "name": tensor.name,
        "path": path_json(tensor.path),
        "part": tensor.part.kind,
        "dtype": tensor.dtype.name,
        "shape": tensor.shape,
        "nbytes": tensor.nbytes,
        "placements": None if placement is None else placement.placements,
        "mesh": None if placement is None else placement.mesh,
        "chunks": [
            {"offsets": offsets, "sizes": sizes, "file": files[file].name, "rank": files[file].rank}
            for offsets, sizes, file in zip(chunks.offsets, chunks.sizes, chunks.file, strict=True)
        ],
    }


def _object(entry: Object, catalogue: Catalogue) -> ObjectEntry:
    value, instead = peek(entry)
    kind, shown = ("unread", instead) if instead else (type_name(value), jsonable(value, catalogue.entries))
    return {"name": entry.name, "path": path_json(entry.path), "part": entry.part.kind, "type": kind, "value": shown}
