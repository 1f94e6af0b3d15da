"""Reads what the `config.json` of transformers beside a checkpoint says that the model is."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError
from ckpttool.serialization.directory import Directory
from ckpttool.storage.stores import Location

NAME = "config.json"
_TYPES = {"model_type": str, "architectures": list, "num_hidden_layers": int}


def facts(location: Location, directory: Directory | None, catalogue: Catalogue) -> dict[str, Any]:
    """Return `model_type`, `architectures` and `num_hidden_layers` as a config beside the checkpoint has them; nothing
    where there is none, or it cannot be parsed."""
    for folder in _folders(location, directory, catalogue):
        config = folder.facts(NAME)
        # The model of an image and a text has the layers of each in a config of its own.
        text = config.get("text_config")
        config = (text if isinstance(text, dict) else {}) | config
        if "architectures" in config or "model_type" in config:
            return {key: config[key] for key, kind in _TYPES.items() if type(config.get(key)) is kind}
    return {}


def _folders(location: Location, directory: Directory | None, catalogue: Catalogue) -> list[Directory]:
    if directory is None:
        # One file of a model that lies in a directory of its own.
        if catalogue.format == "safetensors" and (location.absolute().parent / NAME).is_file():
            with suppress(CkptError):
                return [Directory(location.absolute().parent)]
        return []
    assets = (str(name).rstrip("/") for name in catalogue.facts.get("assets", ()))
    inner = dict.fromkeys(name.rpartition("/")[0] or name for name in assets)
    return [directory, *(directory.folder(name) for name in inner if f"{name}/" in directory)]
