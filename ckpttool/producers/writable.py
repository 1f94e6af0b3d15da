"""Layouts that can be written, by the names that `--producer` takes: `accelerate`, `accelerate:full`, `trainer`, ...

A layout is right when the reader of the framework's directories gives back what was written.
"""

from __future__ import annotations

from contextlib import closing

from ckpttool import formats
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import NO_HINTS, Format, OpenOptions, Source
from ckpttool.errors import UsageError
from ckpttool.layout.optimizer import model_order, respell
from ckpttool.producers import PRODUCERS, reader, same
from ckpttool.producers.components import Producer, WritableLayout
from ckpttool.producers.open import open_source
from ckpttool.producers.writer import OutputLayout
from ckpttool.serialization.directory import Directory
from ckpttool.storage.stores import Location, local_path
from ckpttool.text import meant

LAYOUTS = tuple(sorted((layout for row in PRODUCERS for layout in row.writes), key=lambda layout: layout.framework))


def named(name: str) -> WritableLayout:
    """Return the layout called `name`; of a framework with several, the first, whose flags are the most that one of
    them has. Raises UsageError."""
    for layout in LAYOUTS:
        if name in (layout.name, layout.framework):
            return layout
    if name == same.SAME or local_path(name).exists():
        return same.LAYOUT
    if name.lower() in formats.OF_TRANSFORMERS:
        hint = "`ckpttool export` writes a model for transformers and vLLM"
        raise UsageError(f"no layout of a producer is called `{name}`", hint=hint)
    if "/" in name:
        raise UsageError(f"`--producer {name}`: no such checkpoint", hint="name an existing one, whose layout is used")
    names = [*dict.fromkeys(layout.framework for layout in LAYOUTS), *(x.name for x in LAYOUTS if ":" in x.name)]
    hint = meant(name, names, f"one of {', '.join(f'`{n}`' for n in names)}")
    raise UsageError(f"no layout of a producer is called `{name}`", hint=hint)


def choose(name: str, source: Catalogue, to_world: int | None) -> WritableLayout | Format:
    """Return the layout called `name`, or the one that suits the source when `name` is a framework with several; the
    format of a checkpoint that is of one."""
    layout = named(name)
    if name == same.SAME:
        return same.layout(source, name)
    if layout.name == same.SAME:
        with closing(open_source(name)) as like:
            return same.layout(like.catalogue, name)
    producer = _producer_of(layout)
    if name == layout.framework and producer.choose is not None:
        return producer.choose(source, to_world)
    return layout


def _producer_of(layout: WritableLayout) -> Producer:
    return next(row for row in PRODUCERS if layout in row.writes)


def spell_optimizers(layout: WritableLayout, catalogue: Catalogue, source: Catalogue) -> Catalogue:
    """Return the catalogue with optimizer state keyed as the framework keys it. Pure."""
    if not layout.keys:
        return catalogue
    if layout.ordered:
        return model_order.numbered(catalogue, source)
    return respell.respell(catalogue, layout.keys, source)


def as_format(layout: WritableLayout, output: OutputLayout | None = None) -> Format:
    """Return the layout as a format that a conversion writes; without `output`, for its flags only."""

    def open_written(location: Location, options: OpenOptions = NO_HINTS) -> Source:
        if layout.open is not None:
            return layout.open(Directory(location), options)
        return reader.open_directory(_producer_of(layout), Directory(location), options)

    return Format(
        name=layout.name,
        title=f"what {layout.framework} leaves",
        recognise=lambda path: False,
        open=open_written,
        create=output.create if output is not None else None,
        losses=output.losses if output is not None else lambda planned, path: [],
        # Of whole tensors, `--to-world` says how many processes have a file of their own.
        chunked=layout.chunked or output is None,
        even=layout.even,
        splits=layout.splits,
    )
