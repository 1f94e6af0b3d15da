"""What files beside weights say of them: the `config.json` of transformers, and the manifest, or the zip archive around
them, that has the CRC-32 of files, so that whoever reads all of one compares it.

A DCP directory has a manifest of its own (`formats.dcp.manifest`), which its index shows to be of this save, or stale.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import CkptError
from ckpttool.formats.dcp import manifest
from ckpttool.serialization.directory import Directory
from ckpttool.serialization.manifest import NAME
from ckpttool.storage.archives import ArchiveStore
from ckpttool.storage.stores import Location
from ckpttool.transfer import file_checksums

CONFIG = "config.json"
_TYPES = {"model_type": str, "architectures": list, "num_hidden_layers": int, "tie_word_embeddings": bool}
_OF_DCP = ".distcp"


def facts(location: Location, directory: Directory | None, catalogue: Catalogue) -> dict[str, Any]:
    """Return `model_type`, `architectures`, `num_hidden_layers` and `tie_word_embeddings` as a config beside the
    checkpoint has them; nothing where there is none, or it cannot be parsed."""
    for folder in _folders(location, directory, catalogue):
        config = folder.facts(CONFIG)
        # The model of an image and a text has the layers of each in a config of its own.
        text = config.get("text_config")
        text = text if isinstance(text, dict) else {}
        # Of two that contradict each other, versions of transformers go by one or the other.
        ties = {"tie_word_embeddings": True} if text.get("tie_word_embeddings") is True else {}
        config = text | config | ties
        if "architectures" in config or "model_type" in config:
            return {key: config[key] for key, kind in _TYPES.items() if type(config.get(key)) is kind}
    return {}


def _folders(location: Location, directory: Directory | None, catalogue: Catalogue) -> list[Directory]:
    if directory is None:
        # One file of a model that lies in a directory of its own.
        if catalogue.format == "safetensors" and (location.absolute().parent / CONFIG).is_file():
            with suppress(CkptError):
                return [Directory(location.absolute().parent)]
        return []
    assets = (str(name).rstrip("/") for name in catalogue.facts.get("assets", ()))
    inner = dict.fromkeys(name.rpartition("/")[0] or name for name in assets)
    return [directory, *(directory.folder(name) for name in inner if f"{name}/" in directory)]


def annotate(root: Location, catalogue: Catalogue) -> None:
    """Give each file the CRC-32 in the manifest of the directory. Those without tensors were read to open them: another
    CRC-32 of one is a fault."""
    if root.is_pattern() or all(file.name.endswith(_OF_DCP) for file in catalogue.own_files):
        return
    folder = root if root.is_dir() else root.parent
    listed, notes = manifest.carried(folder, {NAME: 0} if (folder / NAME).is_file() else {})
    catalogue.warnings += notes
    if listed.crcs:
        others = {i: file.location for i, file in enumerate(catalogue.files) if not file.name.endswith(_OF_DCP)}
        own = {i: location.relative_to(folder) for i, location in others.items() if location.is_below(folder)}
        hint = f"take it from where the checkpoint was saved, or remove `{NAME}` if it was saved again"
        for file in file_checksums.annotate(catalogue, own, listed.crcs, f"`{NAME}` beside it", hint):
            file.crcs_at = file.crcs_at or f"`{NAME}`"


def annotate_members(root: Location, catalogue: Catalogue) -> None:
    """Give each file in an archive the CRC-32 that a zip archive has of it, as `annotate` does."""
    crcs = root.store.crcs() if isinstance(root.store, ArchiveStore) else {}
    own = {i: file.location.key for i, file in enumerate(catalogue.files) if file.location.store is root.store}
    file_checksums.annotate(catalogue, own, crcs, "the archive", "take it from where the checkpoint was saved")
