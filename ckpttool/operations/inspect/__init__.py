"""`inspect`: what the index of a checkpoint says, without reading its weights."""

from __future__ import annotations

import os

from ckpttool.catalogue.entries import Catalogue, File
from ckpttool.catalogue.validation import validate
from ckpttool.catalogue.warning import Kind, Warning
from ckpttool.errors import CkptError
from ckpttool.producers.foreign.recognition import Recognition, UnsupportedError
from ckpttool.producers.open import opened
from ckpttool.storage.stores import locate
from ckpttool.text import some


def inspect(path: str | os.PathLike[str], *, shapes: str | None = None) -> Catalogue:
    """Everything that the index of the checkpoint at `path` says, without reading a weight or running anything.

    Of a checkpoint of another tool that is recognised and not opened, `facts["recognised"]` alone says what it is.
    """
    try:
        opening = opened(os.fspath(path), shapes)
    except UnsupportedError as error:
        return _unopened(os.fspath(path), error.recognition)
    with opening as source:
        catalogue = source.catalogue
        try:
            validate(catalogue)
        except CkptError as error:
            # What is wrong stops a conversion; whoever looks wants to see the rest all the same.
            faults = catalogue.faults or [error]
            unread = [fault for fault in faults if "needs" in fault.facts]  # something else is missing, not a byte
            damaged = _folded([fault for fault in faults if fault not in unread])
            catalogue.warnings[:0] = [
                *(Warning("damaged", f"damaged: {text}") for text in damaged),
                *(Warning(_unread_kind(fault), f"{fault.message}; {fault.hint}") for fault in unread),
            ]
        return catalogue


def _unread_kind(fault: CkptError) -> Kind:
    return "unknown-shape" if fault.facts["needs"] == "--shapes" else "lost-shards"


def _unopened(path: str, recognition: Recognition) -> Catalogue:
    location = locate(path)
    catalogue = Catalogue(recognition.title)
    if location.is_file():
        sizes = {location.name: location.size()}
    else:
        sizes = {name: (location / name).size() for name in location.below()}
    catalogue.files = [File(location / name, name, nbytes) for name, nbytes in sizes.items()]
    recognition.annotate(catalogue)
    return catalogue


def _folded(faults: list[CkptError]) -> list[str]:
    """What to say of faults; those with the same fact `alike`, what is wrong with each tensor, as one. Pure."""
    groups: dict[object, list[CkptError]] = {}
    for i, fault in enumerate(faults):
        groups.setdefault(fault.facts.get("alike", i), []).append(fault)
    return [
        one.message
        if not more
        else f"{1 + len(more)} tensors {what}: "
        f"{some([fault.facts['tensor'] for fault in (one, *more)])}; of the first: {one.message}"
        for what, (one, *more) in groups.items()
    ]
