"""Who wrote this directory, and what lies where in it: a table of producers. Adding one is a row in a family.

    huggingface     accelerate, the Trainer of transformers, a model directory
    torchnative     Lightning, Composer, torchtitan, OLMo, torch_checkpointing
    rankfamilies    verl, DINOv2

A run directory mixes formats: accelerate leaves two DCP directories, a torch.save file and a pickle for each rank. A
producer knows the fingerprint of what it leaves, mounts every piece under the part that it is, and says whether the
checkpoint is complete. A directory of several checkpoints (`checkpoint-100`, `checkpoint-200`) is a run.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from ckpttool import formats
from ckpttool.catalogue.protocols import OpenOptions, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError
from ckpttool.producers import huggingface, runs
from ckpttool.producers import reader as mounts
from ckpttool.producers import torchtitan as torchnative
from ckpttool.producers import verl as rankfamilies
from ckpttool.producers.directory import Listing
from ckpttool.producers.pieces import Producer
from ckpttool.producers.runs import Found
from ckpttool.text import some

PRODUCERS: tuple[Producer, ...] = (
    *huggingface.PRODUCERS,
    *rankfamilies.PRODUCERS,
    *torchnative.PRODUCERS,
    # Last: a `config.json` beside weights is in the directories of others too.
    huggingface.PRETRAINED,
)


def recognise(listing: Listing) -> Producer | None:
    """The first row of the table whose fingerprint this is."""
    return next((row for row in PRODUCERS if row.recognise(listing)), None)


def open_source(path: str, options: OpenOptions) -> Source:
    """What a framework left at `path`, or the one checkpoint there; of a run, the newest that is complete.

    Raises ReadError or CorruptError.
    """
    if not os.path.isdir(path):
        return formats.open_source(path, options)
    listing = Listing(path)
    row = recognise(listing)
    if row is not None:
        return _with_run(mounts.open_source(row, listing, options), listing, row)
    kind = next((f for f in formats.FORMATS if f.recognise(path)), None) if not _several(listing) else None
    if kind is not None:
        return kind.open(path, options)
    within, found = _run(listing)
    if not found:
        # Its error knows what else may be meant.
        return formats.open_source(path, options)
    taken = runs.newest(path, found, recognise)
    source = open_source(taken.path, options)
    _describe(source, found, taken, within)
    return source


def checkpoints(path: str) -> list[Found]:
    """The checkpoints of a run, oldest first; none when `path` is no run. Raises ReadError."""
    return _run(Listing(path))[1] if os.path.isdir(path) else []


def _run(listing: Listing) -> tuple[Listing, list[Found]]:
    found = runs.checkpoints(listing, recognise)
    for inner in () if found else runs.below(listing):
        found = runs.checkpoints(inner, recognise)
        if found:
            return inner, found
    return listing, found


def _several(listing: Listing) -> bool:
    """Whether rank files of several checkpoints lie in one directory."""
    return len(rankfamilies.dino_names(listing)) > 1


def _describe(source: Source, found: list[Found], taken: Found, listing: Listing) -> None:
    catalogue = source.catalogue
    # Of some only the contents tell who wrote them, and those of this one are known now.
    known = replace(taken, producer=catalogue.facts.get("producer", taken.producer))
    catalogue.facts["run"] = _table([known if f is taken else f for f in found], known)
    if known.producer is not None:
        catalogue.facts["producer"] = known.producer
    newer = found[found.index(taken) + 1 :]
    if newer:
        said = "; ".join(f"`{f.name}`: {f.why_not}" for f in newer[-3:])
        text = f"`{taken.name}` is taken, as what is newer is not complete: {said}"
        catalogue.warnings.insert(0, Warning("chosen", text))
    pointer = runs.pointed(listing)
    if pointer is not None and pointer[1] != taken.step:
        text = f"`{pointer[0]}` names step {pointer[1]}, but step {taken.step} is taken"
        catalogue.warnings.append(Warning("chosen", text))


def _with_run(source: Source, listing: Listing, row: Producer) -> Source:
    """The Trainer leaves its last model beside the checkpoints of the run: that is what the directory itself holds."""
    if row not in huggingface.FINAL or not listing.has(huggingface.CHECKPOINT):
        return source
    try:
        found = [f for f in runs.checkpoints(listing, recognise) if re.fullmatch(huggingface.CHECKPOINT, f"{f.name}/")]
    except CkptError:
        return source
    if found:
        source.catalogue.facts["run"] = _table(found, None)
        lies = "lies" if len(found) == 1 else "lie"
        text = f"the model in the directory itself is taken; {some([f.name for f in reversed(found)])} {lies} in it too"
        source.catalogue.warnings.insert(0, Warning("chosen", text))
    return source


def _table(found: list[Found], taken: Found | None) -> list[dict[str, object]]:
    return [
        {
            "name": f.name, "path": f.path, "step": f.step, "bytes": f.nbytes, "producer": f.producer,
            "format": f.format, "complete": f.complete, "why_not": f.why_not, "taken": f is taken,
        }
        for f in found
    ]  # fmt: skip
