"""Checkpoints of other tools that are recognised, and what ckpttool does and does not do with each.

Some are opened as what they are made of (a DCP directory, safetensors), and `describe` adds what is known of them.
The others are not opened as one checkpoint: `recognise` says what they are, `inspect` shows that, and everything else
stops with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError, CorruptError
from ckpttool.producers.directory import Directory
from ckpttool.producers.foreign import deepspeed, deltas, gguf, megatron, orbax, paddle, peft, quantized
from ckpttool.producers.foreign.recognition import Recognition
from ckpttool.storage.stores import Location

_WEIGHTS = ("safetensors", "torch")
_DIRECTORIES: tuple[Callable[[Directory], Recognition | None], ...] = (
    deepspeed.recognise,
    megatron.recognise,
    orbax.recognise,
    paddle.recognise,
)


def recognise(location: Location, directory: Directory | None) -> Recognition | None:
    """Return what a checkpoint is that is not opened; None for any other. `directory` is its listing, None for a file.

    Raises ReadError or CorruptError.
    """
    if directory is None:
        return gguf.recognise(location) if location.is_file() else None
    return next((found for row in _DIRECTORIES if (found := row(directory)) is not None), None)


def describe(catalogue: Catalogue, location: Location) -> Recognition | None:
    """Return what else is known of an open catalogue; None if it is nothing but its format."""
    if (found := deepspeed.describe(catalogue) or megatron.describe(catalogue)) is not None:
        return found
    if catalogue.format not in _WEIGHTS:
        return None
    metadata = _facts(location, "model.safetensors.index.json").get("metadata")
    return (
        deltas.describe(catalogue, metadata if isinstance(metadata, dict) else {})
        or peft.describe(catalogue, _facts(location, peft.CONFIG))
        or quantized.describe(catalogue, _quantization(location), scale_faults(catalogue, location))
    )


def scale_faults(catalogue: Catalogue, location: Location) -> list[CorruptError]:
    """Return an error for each way in which the scales of quantised weights do not fit to the weights. One file of
    several has none: the rest may be in another."""
    if catalogue.format not in _WEIGHTS or re.search(r"-\d{5}-of-\d{5}\.", location.name):
        return []
    return quantized.faults(quantized.analyse(catalogue, _quantization(location)))


def _quantization(location: Location) -> dict[str, Any]:
    config = _facts(location, "config.json").get("quantization_config")
    return config if isinstance(config, dict) else {}


def _facts(location: Location, name: str) -> dict[str, Any]:
    """The contents of a JSON file in the directory; nothing of one file alone, which may be a copy from anywhere."""
    with suppress(CkptError):
        return Directory(location).facts(name) if location.is_dir() else {}
    return {}
