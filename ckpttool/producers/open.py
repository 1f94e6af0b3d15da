"""The one entry of the read side: what lies at a path (`resolve`), and opening it (`open_source`).

Nothing in a checkpoint is executed. Names in its pickles that would run code elsewhere are reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ckpttool import formats, producers
from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Object, Path, dotted
from ckpttool.catalogue.protocols import NO_HINTS, Format, OpenOptions, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, ReadError, UsageError
from ckpttool.formats.detect import detect
from ckpttool.layout.optimizer.names_of_ids import is_model_order
from ckpttool.producers import reader, runs
from ckpttool.producers.combined import CombinedSource
from ckpttool.producers.components import Producer
from ckpttool.producers.directory import Directory
from ckpttool.serialization import strict_json, unsafe_globals
from ckpttool.storage.stores import Location, local_path, locate
from ckpttool.text import some

_LARGEST_SHAPES = 64 << 20


@dataclass(frozen=True, slots=True)
class Resolved:
    """What lies at a path: a checkpoint of one `format`, or a `directory` that a `producer` left.

    `path` is that of the checkpoint itself; `run` is the run that it was chosen from, or that lies beside it.
    """

    path: Location
    format: Format | None = None
    producer: Producer | None = None
    directory: Directory | None = None
    run: runs.Run | None = None


def resolve(path: str) -> Resolved:
    """Recognise what lies at `path`; of a run, its newest complete checkpoint. Raises ReadError."""
    location = locate(path)
    if not location.is_dir():
        return Resolved(location, detect(location))
    directory = Directory(location)
    producer = producers.recognise(directory)
    if producer is not None:
        return Resolved(location, None, producer, directory, _beside(directory, producer))
    row = None if runs.has_rank_files(directory) else next((r for r in formats.FORMATS if r.recognise(location)), None)
    run = runs.find(directory) if row is None else None
    if run is None or run.chosen is None:
        # The error of `detect` knows what else the directory has.
        return Resolved(location, row or detect(location))
    return replace(resolve(run.chosen.path), run=run)


def _beside(directory: Directory, producer: Producer) -> runs.Run | None:
    """The run around a final model that lies beside the checkpoints."""
    folders = producer.checkpoint_folders
    if not folders or not directory.has(folders):
        return None
    try:
        checkpoints = [c for c in runs.in_directory(directory) if re.fullmatch(folders, f"{c.name}/")]
    except CkptError:
        return None
    return runs.Run(directory, checkpoints, None) if checkpoints else None


def open_resolved(resolved: Resolved, options: OpenOptions = NO_HINTS) -> Source:
    """Open what `resolve` recognised. Raises ReadError or CorruptError."""
    if resolved.producer is not None and resolved.directory is not None:
        source = reader.open_directory(resolved.producer, resolved.directory, options)
    else:
        assert resolved.format is not None
        source = resolved.format.open(resolved.path, options)
    if resolved.run is not None:
        _describe_run(source.catalogue, resolved.run)
    return source


def _describe_run(catalogue: Catalogue, run: runs.Run) -> None:
    """Add the checkpoints of a run to the facts, and to the warnings why another may have been meant."""
    chosen = run.chosen
    if chosen is not None:
        # Of some layouts only the contents tell who wrote them.
        producer = catalogue.facts.get("producer", chosen.producer)
        if producer is not None:
            catalogue.facts["producer"] = producer
    catalogue.facts["run"] = [
        {
            "name": c.name,
            "path": c.path,
            "step": c.step,
            "bytes": c.nbytes,
            "producer": catalogue.facts.get("producer") if c is chosen else c.producer,
            "format": c.format,
            "complete": c.complete,
            "why_not": c.why_not,
            "taken": c is chosen,
        }
        for c in run.checkpoints
    ]
    if chosen is None:
        names = [c.name for c in reversed(run.checkpoints)]
        text = f"the final model is opened; the directory also has {some(names)}"
        catalogue.warnings.insert(0, Warning("chosen", text))
        return
    if run.newer:
        reasons = "; ".join(f"`{c.name}`: {c.why_not}" for c in run.newer[-3:])
        text = f"`{chosen.name}` is opened; newer checkpoints are incomplete: {reasons}"
        catalogue.warnings.insert(0, Warning("chosen", text))
    pointer = runs.pointer(run.directory)
    if pointer is not None and pointer[1] != chosen.step:
        text = f"`{pointer[0]}` names step {pointer[1]}, but step {chosen.step} is opened"
        catalogue.warnings.append(Warning("chosen", text))


def open_source(path: str, shapes: str | None = None) -> Source:
    """Open the checkpoint at `path`, or what a framework left in a directory; of a run, the newest complete one.

    Args: `shapes` is a checkpoint or a "json" file that has the shapes of the parameters.
    Raises ReadError or CorruptError.
    """
    options = NO_HINTS if shapes is None else shapes_from(shapes)
    source, named = _opened(path, options)
    if options.shapes and options.ordered:
        source.catalogue.facts["parameter order"] = tuple(options.shapes)
    elif options.shapes:
        source.catalogue.facts["shapes without order"] = shapes
    try:
        parts.assign(source.catalogue)
        source.catalogue.warnings += _warnings(source.catalogue, named)
    except BaseException:
        source.close()
        raise
    return source


def _opened(path: str, options: OpenOptions) -> tuple[Source, set[str]]:
    """The source at a path or an address, and the names in its pickles that run code."""
    location = locate(path)
    try:
        with naming(location), unsafe_globals.noting_harm() as named:
            source = open_resolved(resolve(location), options)
    except BaseException:
        if location is not path:
            location.store.close()
        raise
    if location is not path and not location.store.is_local:
        source = CombinedSource.over(source, location.store.close)
    return source, named


@contextmanager
def naming(path: str | None) -> Iterator[None]:
    """Context manager that puts `path` before the message of an error that names only a file in it."""
    try:
        yield
    except CkptError as error:
        if path is None or error.names(path.rstrip("/")) or not isinstance(error, CorruptError | ReadError):
            raise
        raise error.prefixed(f"`{path}`", file=path) from None


def location_of(path: str, catalogue: Catalogue) -> Location:
    """The location of an open checkpoint; of a run, that of the checkpoint which was chosen."""
    chosen = next((c["path"] for c in catalogue.facts.get("run", ()) if c["taken"]), path)
    if isinstance(chosen, Location):
        return chosen
    store = next((locate(file.location).store for file in catalogue.own_files if not file.missing), None)
    return locate(chosen) if store is None or store.is_local else store.locate(chosen)


def shapes_from(path: str) -> OpenOptions:
    """The shapes of a model's parameters, from a checkpoint of the model or from JSON: `[["embed.weight", [29, 7]],
    ...]` or `{"embed.weight": [29, 7], ...}` in the order of the model.

    Raises ReadError, CorruptError or UsageError.
    """
    if path.endswith(".json") and not path.endswith(".index.json"):
        return OpenOptions(_shapes_in(path))
    with opened(path) as source:
        models = [p for p in parts.parts(source.catalogue) if p.kind == "model"]
        if len(models) != 1:
            raise UsageError(f"`--shapes {path}`: has {len(models) or 'no'} models, and one is needed")
        depth = len(models[0].root)
        shapes = {dotted(t.path[depth:]): t.shape for t in source.catalogue.tensors if t.part == models[0]}
        return OpenOptions(shapes, ordered=source.catalogue.format != "safetensors" and is_model_order(list(shapes)))


def _shapes_in(path: str) -> dict[str, tuple[int, ...]]:
    location = local_path(path)
    value = strict_json.parse(location.head(_LARGEST_SHAPES), f"`{path}`")
    pairs = list(value.items()) if isinstance(value, dict) else value
    shapes: dict[str, tuple[int, ...]] = {}
    for pair in pairs if isinstance(pairs, list) else [None]:
        match pair:
            case (str() as name, [*sizes]) if all(type(n) is int and n >= 0 for n in sizes) and name not in shapes:
                shapes[name] = tuple(sizes)
            case _:
                raise CorruptError(
                    f"`{path}`: {pair!r:.80} is not a name and a shape, or the second of that name",
                    hint='write `[["embed.weight", [29, 7]], ...]` in the order of the model',
                    file=path,
                )
    return shapes


@contextmanager
def opened(path: str, shapes: str | None = None) -> Iterator[Source]:
    """Context manager of an open source. Raises ReadError or CorruptError."""
    source = open_source(path, shapes)
    try:
        yield source
    finally:
        source.close()


def harmful(objects: Iterable[Object]) -> Iterator[tuple[str, str]]:
    """Names of entries whose values name functions that run commands, with each function."""
    for entry in objects:
        for called in sorted(unsafe_globals.harmful_names(entry.value)):
            yield entry.name, called


def harmful_attributes(catalogue: Catalogue) -> Iterator[tuple[Path, str]]:
    """Paths of dicts whose attributes name functions that run commands, with each function."""
    for path, container in catalogue.containers.items():
        if container.attrs:
            for called in sorted(unsafe_globals.harmful_names(container.attrs)):
                yield path, called


def _warnings(catalogue: Catalogue, named: set[str]) -> Iterator[Warning]:
    elsewhere = set(named)
    for name, called in harmful(o for o in catalogue.objects if o.is_read):
        elsewhere.discard(called)
        yield _unsafe(f"`{name}` names `{called}`, which runs code where it is loaded; not here", called)
    for path, called in harmful_attributes(catalogue):
        elsewhere.discard(called)
        yield _unsafe(
            f"the attributes of `{dotted(path)}` name `{called}`, which runs code where it is loaded; not here, and "
            "they are not passed on",
            called,
        )
    elsewhere.difference_update(name for w in catalogue.warnings if w.kind == "unsafe-global" for name in w.names)
    for called in sorted(elsewhere):
        # A pickle can call a function and discard its result.
        text = f"a pickle names `{called}`, which runs code where it is loaded, outside of every entry; not here"
        yield _unsafe(text, called)


def _unsafe(text: str, called: str) -> Warning:
    return Warning("unsafe-global", text, names=(called,))
