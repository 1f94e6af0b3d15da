"""Opening a checkpoint of any format: its parts told apart, and a word about names that would run commands elsewhere.

Nothing in a checkpoint runs here. But whoever looks at one wants to know that it would, and nothing of that kind is
passed on to a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ckpttool import formats, parts
from ckpttool.catalogue import Catalogue, Object, Path, dotted
from ckpttool.containers import pickles
from ckpttool.contract import Source
from ckpttool.errors import CorruptError, ReadError


def open_source(path: str) -> Source:
    """The checkpoint at `path`. Raises ReadError or CorruptError."""
    with naming(path), pickles.noting_harm() as asked:
        source = formats.open_source(path)
    try:
        parts.assign(source.catalogue)
        source.catalogue.warnings += _warnings(source.catalogue, asked)
    except BaseException:
        source.close()
        raise
    return source


@contextmanager
def naming(path: str | None) -> Iterator[None]:
    """Errors of a directory's reader name the file in it; put the directory before, so that it is known which."""
    try:
        yield
    except (CorruptError, ReadError) as error:
        if path is None or path.rstrip("/") in error.message:
            raise
        raise type(error)(f"`{path}`: {error.message}", hint=error.hint, **{"file": path, **error.facts}) from None


@contextmanager
def opened(path: str) -> Iterator[Source]:
    """An open source with its parts told apart. Raises ReadError or CorruptError."""
    source = open_source(path)
    try:
        yield source
    finally:
        source.close()


def harmful(objects: Iterable[Object]) -> Iterator[tuple[str, str]]:
    """Entries whose values name something that runs commands, and what."""
    for entry in objects:
        for called in sorted(pickles.harmful_names(entry.value)):
            yield entry.name, called


def harmful_attributes(catalogue: Catalogue) -> Iterator[tuple[Path, str]]:
    """Dicts whose attributes name something that runs commands, and what."""
    for path, container in catalogue.containers.items():
        if container.attrs:
            for called in sorted(pickles.harmful_names(container.attrs)):
                yield path, called


def _warnings(catalogue: Catalogue, asked: set[str]) -> Iterator[str]:
    hidden = set(asked)
    for name, called in harmful(o for o in catalogue.objects if o.is_read):
        hidden.discard(called)
        yield f"`{name}` names `{called}`, which runs code where it is loaded; not here"
    for path, called in harmful_attributes(catalogue):
        hidden.discard(called)
        yield (
            f"the attributes of `{dotted(path)}` name `{called}`, which runs code where it is loaded; not here, and "
            "they are not passed on"
        )
    told = "\n".join(catalogue.warnings)
    for called in sorted(name for name in hidden if f"`{name}`" not in told):
        # A pickle can call a function and throw away what it returned.
        yield f"a pickle names `{called}`, which runs code where it is loaded, outside of every entry; not here"
