"""The values of counters that were saved as tensors: the step of a dict, those of an optimizer."""

from __future__ import annotations

import struct
from contextlib import closing, suppress

from ckpttool.catalogue import boxes
from ckpttool.catalogue.counters import NUMBER, NUMBERS, READ, step, unread
from ckpttool.catalogue.entries import Object, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError
from ckpttool.producers.open import opened
from ckpttool.storage.files import Pool
from ckpttool.transfer.read import ChunkReader

# How `struct` calls an element, without numpy.
_CODES = {"float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "uint8": "B"}


def note_counters(source: Source) -> None:
    """Add to the facts the values of the few tensors of one number that tell the step, where nothing else does."""
    facts = source.catalogue.facts
    tensors = [] if READ in facts else unread(source.catalogue)
    if tensors:
        facts[READ] = {}
        with closing(Pool()) as pool:
            for tensor in tensors:
                with suppress(CkptError):
                    facts[READ][tensor.path] = _number(tensor, source, pool)


def step_of(path: str) -> int | None:
    """Return the step that a checkpoint was saved at, as it or its optimizer says; None if neither does. Its name
    counts only where a framework gave it: others may be called anything."""
    with suppress(CkptError), opened(path) as source:
        facts = source.catalogue.facts
        for name in (NUMBER, NUMBERS, *(() if facts.keys() & {"producer", "components"} else ("step",))):
            facts.pop(name, None)
        note_counters(source)
        epochs = source.catalogue.entries.get(("epochs_run",))  # torchtune saves after epochs, and counts them alone
        found = epochs.value if isinstance(epochs, Object) else step(source.catalogue)
        return int(found) if found is not None else None
    return None


def _number(tensor: Tensor, source: Source, pool: Pool) -> float | None:
    code = _CODES.get(tensor.dtype.name)
    if code is None or len(tensor.chunks) == 0 or not source.resolve(tensor, tensor.chunks.at(0)).plain:
        return None
    bits = ChunkReader(source, pool, tensor, tensor.chunks.at(0)).read(boxes.whole(tensor.shape))
    number: float = struct.unpack(f"<{code}", bits)[0]
    return number
