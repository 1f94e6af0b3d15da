"""The layout that another checkpoint has: `--producer same`, that of the source; `--producer DIR`, that of a directory.

Each component is written in the format and under the name that it has there, and the assets are copied: what was
converted to DCP, and trained or changed, becomes again what a script reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpttool import formats
from ckpttool.catalogue.entries import Catalogue, Path
from ckpttool.catalogue.protocols import OpenOptions, Source
from ckpttool.errors import UsageError
from ckpttool.producers import PRODUCERS, contents, reader
from ckpttool.producers.components import Mounted, WritableLayout
from ckpttool.producers.directory import Directory

if TYPE_CHECKING:
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout

SAME = "same"
COMPONENTS = "components"
"""The fact of a catalogue that has its components, in the order in which they were opened."""


def layout(like: Catalogue, name: str) -> WritableLayout:
    """Return the layout of a checkpoint, called `name` in messages. Raises UsageError for one that is a single file or
    of a single format."""
    mounted: list[Mounted] = like.facts.get(COMPONENTS, [])
    if not mounted:
        hint = f"`--to {formats.named(like.format).target}` writes it" if like.format else ""
        raise UsageError(f"`--producer {name}`: it is of one format, and no directory of several files", hint=hint)
    producer = like.facts.get("producer")

    def build(builder: LayoutBuilder) -> OutputLayout:
        return _build(builder, mounted)

    def opened(directory: Directory, options: OpenOptions) -> Source:
        row = next((row for row in PRODUCERS if row.name == producer), None)
        if row is not None:
            return reader.open_directory(row, directory, options)
        return reader.open_layout(contents.layout(directory), directory, options)

    return WritableLayout(SAME, "", build, chunked=True, splits=True, open=opened)


def _build(builder: LayoutBuilder, mounted: list[Mounted]) -> OutputLayout:
    """Return each entry in the component whose root is the deepest above it."""
    number_of: dict[Path, int] = {}
    for one in mounted:
        if one.root not in number_of:
            row = next((row for row in formats.FORMATS if row.name == one.format), None)
            key = (one.key,) if one.key else ()
            number_of[one.root] = builder.component(_name(one), row, one.root, key=key, digits=one.digits)
        for copy in one.copies:
            builder.copy(one.name, copy)
    for entry in list(builder.remaining()):
        if not entry.embedded and (number := _deepest(entry.path, number_of)) is not None:
            builder.add(entry, number, entry.path)
    return builder.finish("the layout has no file for it")


def _name(one: Mounted) -> str:
    """Return the name of a component to write: files that share a model become one again."""
    name = re.sub(r"(-\d{5}-of-\d{5})?\.(safetensors|bin)\.index\.json$", r".\2", one.name.rstrip("/"))
    return re.sub(r"-\d{5}-of-\d{5}(?=\.[a-z]+$)", "", name).replace("*", "{rank}")


def _deepest(path: Path, number_of: Mapping[Path, int]) -> int | None:
    return next((number_of[path[:n]] for n in range(len(path), -1, -1) if path[:n] in number_of), None)
