"""A model card for a model without one: its source and its contents. Pure.

No date and no path: the same source gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpttool.catalogue.entries import Catalogue
from ckpttool.operations.write import Conversion
from ckpttool.storage.stores import is_remote, locate
from ckpttool.text import count, plural, size
from ckpttool.version import __version__


def digest(catalogue: Catalogue) -> str:
    """Return a digest of the source: names and sizes of its files, and the checksums in its index."""
    sha = hashlib.sha256()
    for file in sorted(catalogue.own_files, key=lambda file: file.name):
        sha.update(f"{file.name}\0{file.size}\n".encode("utf-8", "backslashreplace"))
    names = [file.name for file in catalogue.files]
    for tensor in catalogue.tensors:
        for record in tensor.chunks.records.values():
            if record.crc is not None:
                line = f"{names[record.file]}\0{record.offset}\0{record.nbytes}\0{record.crc:08x}\n"
                sha.update(line.encode("utf-8", "backslashreplace"))
    return sha.hexdigest()


def text(
    result: Conversion,
    catalogue: Catalogue,
    parameters: Mapping[str, int],
    key_map: str,
    architecture: str | None,
    *,
    is_adapter: bool,
) -> str:
    """Return the card for an export of the source `catalogue`, as Markdown with the header that the Hub reads."""
    total = count(sum(parameters.values()))
    dtypes = ", ".join(f"{name} ({count(n)})" for name, n in parameters.items())
    library = "peft" if is_adapter else "transformers" if architecture else "safetensors"
    what = "a LoRA adapter" if is_adapter else f"a `{architecture}`" if architecture else "a model"
    producer = catalogue.facts.get("producer")
    run = catalogue.facts.get("run", ())
    source = result.source if is_remote(result.source) else locate(result.source).name
    taken = next((f"{source}/{entry['name']}" for entry in run if entry["taken"]), source)
    rows = [
        ("Made from", f"`{taken}`, {result.source_format}" + (f" as {producer} leaves it" if producer else "")),
        ("Made by", f"ckpttool {__version__}, `ckpttool export`"),
        (
            "Parameters",
            f"{total} in {plural(result.tensors, 'tensor')}, {size(result.bytes)}",
        ),
        ("Dtypes", dtypes or "none"),
        *([("Cast", _casts(result.cast))] if result.cast else []),
        *([("Names", f"by key map `{key_map}`")] if key_map else []),
        ("Digest of the source", f"`sha256:{digest(catalogue)}` over names, sizes and stored checksums of its files"),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    title = result.destination.rstrip("/").rpartition("/")[2] or "Model"
    return (
        f"---\nlibrary_name: {library}\n---\n\n# {title}\n\nThe weights of {what}, taken out of a training checkpoint"
        f"{', and cast' if result.cast else ' bit for bit'}.\n\n| | |\n|---|---|\n{table}\n\n"
        "This page was made by a program. What the model is for, what it was trained on and under which license it "
        "stands is for its author to add.\n"
    )


def _casts(cast: Sequence[tuple[str, str, str]]) -> str:
    counted = Counter((old, new) for _, old, new in cast)
    return ", ".join(f"{plural(n, 'tensor')} from {old} to {new}" for (old, new), n in counted.items())
