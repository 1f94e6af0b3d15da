"""The layout that another checkpoint has: `--producer same`, that of the source; `--producer DIR`, that of a directory.

Each component is written in the format and under the name that it has there, and the assets are copied: what was
converted to DCP, and trained or changed, becomes again what a script reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool import formats
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Format, OpenOptions, Source
from ckpttool.errors import UsageError
from ckpttool.producers import PRODUCERS, contents, reader
from ckpttool.producers.components import Mounted, WritableLayout, deepest
from ckpttool.producers.directory import Directory
from ckpttool.text import some

if TYPE_CHECKING:
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout

SAME = "same"
_WHOLE = "`{}` has it in a whole object, {}, which cannot be made again without its class, and not as a state dict"
COMPONENTS = "components"
"""The fact of a catalogue that has its components, in the order in which they were opened."""


def layout(like: Catalogue, name: str) -> WritableLayout:
    """Return the layout of a checkpoint, called `name` in messages. Raises UsageError for one that is a single file or
    of a single format."""
    mounted: list[Mounted] = like.facts.get(COMPONENTS, [])
    if not has_components(like):
        hint = f"`--to {formats.named(like.format).target}` writes it" if like.format else ""
        raise UsageError(f"`--producer {name}`: it is of one format, and no directory of several files", hint=hint)
    producer = like.facts.get("producer")

    def build(builder: LayoutBuilder) -> OutputLayout:
        return _build(builder, mounted, like)

    def opened(directory: Directory, options: OpenOptions) -> Source:
        row = next((row for row in PRODUCERS if row.name == producer), None)
        if row is not None:
            return reader.open_directory(row, directory, options)
        return reader.open_layout(contents.layout(directory, step=like.facts.get("step")), directory, options)

    return WritableLayout(SAME, "", build, chunked=True, splits=True, open=opened)


def has_components(catalogue: Catalogue) -> bool:
    """Return whether a checkpoint is made of several files, of which each is opened by itself."""
    return any(one.format != "asset" for one in catalogue.facts.get(COMPONENTS, ()))


def format_of(catalogue: Catalogue) -> Format:
    """Return the format of a checkpoint that is of one."""
    return next(row for row in formats.FORMATS if row.name == catalogue.format)


def _build(builder: LayoutBuilder, mounted: list[Mounted], like: Catalogue) -> OutputLayout:
    """Return each entry in the component whose root is the deepest above it; of a model of several files, in the file
    that it has there."""
    number_of: dict[Path, int] = {}
    of_file: dict[tuple[Path, str], int] = {}
    whole: dict[int, Mounted] = {}
    for one in mounted:
        key = (one.key,) if one.key else ()
        row = next((row for row in formats.FORMATS if row.name == one.format), None)
        for copy in one.copies:
            builder.copy(copy, one.name) if one.format == "asset" else builder.copy(one.name, copy)
        if one.format == "asset":
            continue
        if one.name.endswith(".index.json"):
            for name in one.files[1:]:
                of_file[one.root, name] = builder.component(name, row, one.root, key=key)
            # Its tensors are those of the files that it names, also after a conversion.
            shard = next(file for file in like.files if file.name == one.files[1])
            builder.copy(shard.location.absolute().parent / one.name.rpartition("/")[2], one.name)
            number_of.setdefault(one.root, of_file[one.root, one.files[1]])
            continue
        name, world = one.name.rstrip("/").replace("*", "{rank}"), len(one.files) or None
        number = builder.component(name, row, one.root, key=key, digits=one.digits, world=world)
        number_of.setdefault(one.root, number)
        of_file[one.root, one.name] = number
        whole |= {number: one} if one.modules else {}
    for entry in list(builder.remaining()):
        if entry.embedded:
            continue
        stored, root = like.entries.get(entry.path), deepest(entry.path, number_of)
        if root is not None:
            file = like.files[stored.chunks.file[0]].name if isinstance(stored, Tensor) and stored.chunks else ""
            number = of_file.get((root, file), number_of[root])
            if number in whole and entry.part.kind == "model":
                builder.lose(entry, _WHOLE.format(whole[number].name, some(whole[number].modules)))
            else:
                builder.add(entry, number, entry.path)
    return builder.finish("the layout has no file for it")
