"""Checkpoints of other tools that are recognised, and what ckpttool does and does not do with each.

Some are opened as what they are made of (a DCP directory, safetensors), and `describe` adds what is known of them.
The others are not opened as one checkpoint: `recognise` says what they are, `inspect` shows that, and everything else
stops with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import deferred
from ckpttool.errors import CkptError, CorruptError
from ckpttool.producers.foreign.recognition import Recognition
from ckpttool.serialization.directory import Directory
from ckpttool.storage.stores import Location

_WEIGHTS = ("safetensors", "torch")
# Modules are imported for what has a mark of theirs: most checkpoints have none.
_Recognise = Callable[[Directory], Recognition | None]
_DIRECTORIES: tuple[tuple[str, str, _Recognise], ...] = (
    (
        r"mp_rank_\d\d(_\d{3})*/|latest_checkpointed_iteration\.txt",
        "Megatron-LM",
        deferred(f"{__name__}.directories", "megatron"),
    ),
    (r"_CHECKPOINT_METADATA|_METADATA|orbax\.checkpoint|\d+/", "Orbax", deferred(f"{__name__}.directories", "orbax")),
    (r"\d+_\d+\.distcp", "PaddlePaddle", deferred(f"{__name__}.directories", "paddle")),
)
_MEGATRON = "Megatron Core"
_NAME = re.compile(r"scale|lora_|qweight$|_blocks$|absmax$|\.SCB$|^__positions__$|\.indices$|^prompt_embeddings$")
_WORDS = re.findall(r"\w{3,}", _NAME.pattern)  # one of them is in each such name


def recognise(location: Location, directory: Directory | None) -> Recognition | None:
    """Return what a checkpoint is that is not opened; None for any other. `directory` is its listing, None for a file:
    a probe of a directory that fails is one of its `unseen`.

    Raises ReadError or CorruptError for a file.
    """
    if directory is None:
        from ckpttool.producers.foreign import gguf

        return gguf.recognise(location) if location.is_file() else None
    rows = ((tool, row) for mark, tool, row in _DIRECTORIES if directory.has(mark))
    return next((found for tool, row in rows if (found := directory.probe(tool, row)) is not None), None)


def describe(catalogue: Catalogue, location: Location) -> Recognition | None:
    """Return what else is known of an open catalogue; None if it is nothing but its format."""
    if catalogue.format == "torch" and ("ds_version",) in catalogue.entries:
        from ckpttool.producers.foreign import deepspeed

        return deepspeed.describe(catalogue)
    if _MEGATRON in (catalogue.facts.get("producer"), catalogue.facts.get("writer")):
        from ckpttool.producers.foreign import directories

        return directories.describe_megatron(catalogue)
    if not _is_marked(catalogue):
        return None
    from ckpttool.producers.foreign import weights

    directory = _directory(location)
    metadata = _facts(directory, "model.safetensors.index.json").get("metadata")
    return (
        weights.describe_update(catalogue, metadata if isinstance(metadata, dict) else {})
        or weights.describe_adapter(catalogue, _facts(directory, weights.CONFIG))
        or weights.describe_scales(catalogue, _quantization(directory), scale_faults(catalogue, location))
    )


def _is_marked(catalogue: Catalogue) -> bool:
    """Return whether a name is one of `has_mark`, or the first tensor is a row of bytes."""
    if catalogue.format not in _WEIGHTS:
        return False
    first = next(iter(catalogue.tensors), None)
    is_bytes = first is not None and first.dtype.name == "uint8" and len(first.shape) == 1
    return is_bytes or has_mark(tensor.name for tensor in catalogue.tensors)


def has_mark(names: Iterable[str]) -> bool:
    """Return whether a name is one of quantised weights, adapters or weight updates. Pure."""
    names = [*names]
    together = "\n".join(names)
    return any(word in together for word in _WORDS) and any(map(_NAME.search, names))


def scale_faults(catalogue: Catalogue, location: Location) -> list[CorruptError]:
    """Return an error for each way in which the scales of quantised weights do not fit to the weights. One file of
    several has none: the rest may be in another."""
    if not _is_marked(catalogue) or re.search(r"-\d{5}-of-\d{5}\.", location.name):
        return []
    from ckpttool.catalogue import quantization

    return quantization.faults(quantization.analyse(catalogue, _quantization(_directory(location))))


def _quantization(directory: Directory | None) -> dict[str, Any]:
    config = _facts(directory, "config.json").get("quantization_config")
    return config if isinstance(config, dict) else {}


def _facts(directory: Directory | None, name: str) -> dict[str, Any]:
    """Return the contents of a JSON file in the directory; nothing beside a file alone, which may be a copy."""
    return {} if directory is None else directory.facts(name)


def _directory(location: Location) -> Directory | None:
    with suppress(CkptError):
        return Directory(location) if location.is_dir() else None
    return None
