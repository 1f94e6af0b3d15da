"""Opening a checkpoint of any format: its parts told apart, and a word about names that would run commands elsewhere.

Nothing in a checkpoint runs here. But whoever looks at one wants to know that it would, and nothing of that kind is
passed on to a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ckpttool import producers
from ckpttool.catalogue import parts
from ckpttool.catalogue.entries import Catalogue, Object, Path, dotted
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions, Source
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError, ReadError, UsageError
from ckpttool.layout.optimizer.names import is_model_order
from ckpttool.producers.mount import Mounted
from ckpttool.serialization import strict_json as strictjson
from ckpttool.serialization import unsafe_globals as harm
from ckpttool.storage import stores as mirrors
from ckpttool.storage.files import failed

_LARGEST_SHAPES = 64 << 20


def open_source(path: str, shapes: str | None = None) -> Source:
    """The checkpoint at `path`, or what a framework left in a directory. `shapes` is a checkpoint or a JSON file that
    knows the parameters' shapes. Raises ReadError or CorruptError."""
    options = NO_HINTS if shapes is None else shapes_from(shapes)
    source, asked = _opened(path, options)
    if options.shapes and options.ordered:
        source.catalogue.facts["parameter order"] = tuple(options.shapes)
    elif options.shapes:
        source.catalogue.facts["shapes without order"] = shapes
    try:
        parts.assign(source.catalogue)
        source.catalogue.warnings += _warnings(source.catalogue, asked)
    except BaseException:
        source.close()
        raise
    return source


def _opened(path: str, options: OpenOptions) -> tuple[Source, set[str]]:
    """What lies at a path or an address, and the harm that its pickles name."""
    mirror = mirrors.mount(path)
    if mirror is None:
        with naming(path), harm.noting_harm() as asked:
            return producers.open_source(path, options), asked
    try:
        with naming(path), harm.noting_harm() as asked:
            source = Mounted.over(producers.open_source(mirror.path, options))
    except BaseException:
        mirrors.unmount(mirror)
        raise
    source.closing(lambda: mirrors.unmount(mirror))
    catalogue = source.catalogue
    catalogue.warnings[:] = [replace(w, text=mirrors.as_typed(w.text)) for w in catalogue.warnings]
    catalogue.faults[:] = map(mirrors.in_their_words, catalogue.faults)
    for found in catalogue.facts.get("run", ()):
        found["path"] = mirrors.as_typed(found["path"])
    return source, asked


@contextmanager
def naming(path: str | None) -> Iterator[None]:
    """Errors of a directory's reader name the file in it; put the directory before, so that it is known which."""
    try:
        yield
    except CkptError as raised:
        error = mirrors.in_their_words(raised)
        if path is None or path.rstrip("/") in error.message or not isinstance(error, CorruptError | ReadError):
            raise error from None
        raise type(error)(f"`{path}`: {error.message}", hint=error.hint, **{"file": path, **error.facts}) from None


def shapes_from(path: str) -> OpenOptions:
    """The shapes of a model's parameters, from a checkpoint of the model or from JSON: `[["embed.weight", [29, 7]],
    ...]` or `{"embed.weight": [29, 7], ...}` in the order of the model. Raises ReadError, CorruptError or UsageError.
    """
    if path.endswith(".json") and not path.endswith(".index.json"):
        return OpenOptions(_shapes_in(path))
    with opened(path) as source:
        models = [p for p in parts.parts(source.catalogue) if p.kind == "model"]
        if len(models) != 1:
            raise UsageError(f"`--shapes {path}`: has {len(models) or 'no'} models, and one is needed")
        depth = len(models[0].root)
        found = {dotted(t.path[depth:]): t.shape for t in source.catalogue.tensors if t.part == models[0]}
        return OpenOptions(found, ordered=source.catalogue.format != "safetensors" and is_model_order(list(found)))


def _shapes_in(path: str) -> dict[str, tuple[int, ...]]:
    try:
        with open(mirrors.here(path), "rb") as stream:
            listed = strictjson.parse(stream.read(_LARGEST_SHAPES + 1)[:_LARGEST_SHAPES], f"`{path}`")
    except OSError as error:
        raise failed(error, path, "read") from None
    pairs = list(listed.items()) if isinstance(listed, dict) else listed
    found: dict[str, tuple[int, ...]] = {}
    for pair in pairs if isinstance(pairs, list) else [None]:
        match pair:
            case (str() as name, [*sizes]) if all(type(n) is int and n >= 0 for n in sizes) and name not in found:
                found[name] = tuple(sizes)
            case _:
                raise CorruptError(
                    f"`{path}`: {pair!r:.80} is not a name and a shape, or the second of that name",
                    hint='write `[["embed.weight", [29, 7]], ...]` in the order of the model',
                    file=path,
                )
    return found


@contextmanager
def opened(path: str, shapes: str | None = None) -> Iterator[Source]:
    """An open source with its parts told apart. Raises ReadError or CorruptError."""
    source = open_source(path, shapes)
    try:
        yield source
    finally:
        source.close()


def harmful(objects: Iterable[Object]) -> Iterator[tuple[str, str]]:
    """Entries whose values name something that runs commands, and what."""
    for entry in objects:
        for called in sorted(harm.harmful_names(entry.value)):
            yield entry.name, called


def harmful_attributes(catalogue: Catalogue) -> Iterator[tuple[Path, str]]:
    """Dicts whose attributes name something that runs commands, and what."""
    for path, container in catalogue.containers.items():
        if container.attrs:
            for called in sorted(harm.harmful_names(container.attrs)):
                yield path, called


def _warnings(catalogue: Catalogue, asked: set[str]) -> Iterator[Warning]:
    hidden = set(asked)
    for name, called in harmful(o for o in catalogue.objects if o.is_read):
        hidden.discard(called)
        yield _unsafe(f"`{name}` names `{called}`, which runs code where it is loaded; not here", called)
    for path, called in harmful_attributes(catalogue):
        hidden.discard(called)
        yield _unsafe(
            f"the attributes of `{dotted(path)}` name `{called}`, which runs code where it is loaded; not here, and "
            "they are not passed on",
            called,
        )
    hidden.difference_update(name for w in catalogue.warnings if w.kind == "unsafe-global" for name in w.names)
    for called in sorted(hidden):
        # A pickle can call a function and throw away what it returned.
        text = f"a pickle names `{called}`, which runs code where it is loaded, outside of every entry; not here"
        yield _unsafe(text, called)


def _unsafe(text: str, called: str) -> Warning:
    return Warning("unsafe-global", text, names=(called,))
