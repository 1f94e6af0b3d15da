"""A model card for a model without one: its source and its contents. Pure.

No date and no path: the same source gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpttool.catalogue.entries import Catalogue
from ckpttool.storage.stores import is_remote, locate
from ckpttool.text import count, plural, size
from ckpttool.version import __version__


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of the card: `Facts("run", "out", "dcp", {"bfloat16": 494_032_768}, 290, 988_065_536, "", None)`."""

    source: str
    title: str
    format: str
    parameters: Mapping[str, int]
    tensors: int
    nbytes: int
    key_map: str
    architecture: str | None
    adapter: bool = False
    cast: Sequence[tuple[str, str, str]] = ()


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


def text(facts: Facts, catalogue: Catalogue) -> str:
    """Return the card, as Markdown with the header that the Hub reads."""
    total = sum(facts.parameters.values())
    dtypes = ", ".join(f"{name} ({count(n)})" for name, n in facts.parameters.items())
    library = "peft" if facts.adapter else "transformers" if facts.architecture else "safetensors"
    what = "a LoRA adapter" if facts.adapter else f"a `{facts.architecture}`" if facts.architecture else "a model"
    producer = catalogue.facts.get("producer")
    run = catalogue.facts.get("run", ())
    source = facts.source if is_remote(facts.source) else locate(facts.source).name
    taken = next((f"{source}/{entry['name']}" for entry in run if entry["taken"]), source)
    rows = [
        ("Made from", f"`{taken}`, {facts.format}" + (f" as {producer} leaves it" if producer else "")),
        ("Made by", f"ckpttool {__version__}, `ckpttool export`"),
        ("Parameters", f"{count(total)} in {plural(facts.tensors, 'tensor')}, {size(facts.nbytes)}"),
        ("Dtypes", dtypes or "none"),
        *([("Cast", _casts(facts.cast))] if facts.cast else []),
        *([("Names", f"by key map `{facts.key_map}`")] if facts.key_map else []),
        ("Digest of the source", f"`sha256:{digest(catalogue)}` over names, sizes and stored checksums of its files"),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    title = facts.title or "Model"
    return (
        f"---\nlibrary_name: {library}\n---\n\n# {title}\n\nThe weights of {what}, taken out of a training checkpoint"
        f"{', and cast' if facts.cast else ' bit for bit'}.\n\n| | |\n|---|---|\n{table}\n\n"
        "This page was made by a program. What the model is for, what it was trained on and under which license it "
        "stands is for its author to add.\n"
    )


def _casts(cast: Sequence[tuple[str, str, str]]) -> str:
    counted = Counter((old, new) for _, old, new in cast)
    return ", ".join(f"{plural(n, 'tensor')} from {old} to {new}" for (old, new), n in counted.items())
