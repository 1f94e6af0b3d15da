"""`diff`: how two checkpoints differ, whatever their formats and however many ranks wrote them.

A `selection` of both is matched by name in `compare`, which compares objects; `tensors` compares tensors by value.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing

from ckpttool.analysis.differences import selection
from ckpttool.analysis.differences.compare import compare_sources
from ckpttool.analysis.differences.elements import Tolerance
from ckpttool.analysis.differences.results import Diff, Side
from ckpttool.analysis.differences.same_files import SameFiles
from ckpttool.analysis.differences.tensors import Options
from ckpttool.catalogue.chosen import notes_of_run, taken
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import UsageError
from ckpttool.operations import arguments
from ckpttool.producers import open
from ckpttool.reports import page_file
from ckpttool.storage import files
from ckpttool.storage.stores import path_text
from ckpttool.transfer.execute import DEFAULT_THREADS
from ckpttool.transfer.file_checksums import check_tensors
from ckpttool.transfer.threads import Progress


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    tensors: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: str | Sequence[str] = (),
    strip_wrappers: bool = False,
    strip_prefix: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    ulp: int | None = None,
    ignore_dtype: bool = False,
    sharded: bool = False,
    shapes: str | None = None,
    html: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Return every difference between the checkpoints at `a` and `b`.

    Args:
        a: the first checkpoint, of any format.
        b: the second, likewise.
        only: parts to compare, by kind (`model`, `optimizer`, ...) or by key; a string, or several. All without any.
        drop: parts to exclude, likewise.
        tensors: globs of dotted names of the tensors to compare, where `*` also matches dots, or `re:` and a regular
            expression; all without any.
        exclude: globs of names to exclude, likewise.
        rename: rules `OLD=NEW` for names of the first, in which `*` captures; `@FILE` reads rules.
        strip_wrappers: whether to remove the wrappers of DDP, FSDP and `torch.compile`, such as `module.`, from names.
        strip_prefix: a prefix to remove from the names of the model.
        rtol: relative tolerance of elements, relative to `b`.
        atol: absolute tolerance of elements.
        ulp: tolerance of elements in ULPs. With none of the three, elements are equal when their bits are.
        ignore_dtype: whether another dtype is not a difference by itself.
        sharded: whether another sharding is a difference.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.
        html: an HTML file to write: the pages of `report`, with the statistics of B minus A.
        threads: number of threads that read and compare; None chooses it.
        progress: called with the bytes done and the bytes in all, several times a second, from this thread.

    Raises:
        UsageError: if the arguments do not fit each other or the checkpoints.
        ReadError: if there is no checkpoint at `a` or `b`, or it cannot be read.
        CorruptError: if one of them is damaged.
        OverwriteError: if `html` exists and is not a page of ckpttool's.
        StorageError: if `html` cannot be written.
    """
    began = time.monotonic()
    paths = path_text(a), path_text(b)
    tolerances = {"rtol": rtol, "atol": atol, "ulp": ulp}
    given = {name: value for name, value in tolerances.items() if value is not None}
    page, page_path = None, page_file.checked(html)
    if page_path is not None:
        from ckpttool.reports.differences import DifferencePage

        page = DifferencePage()
    options = Options(
        _tolerance(given),
        ignore_dtype,
        sharded,
        threads=threads or DEFAULT_THREADS,
        progress=progress,
        observe=page.observe if page is not None else None,
    )
    selected = arguments.selection(only, drop, tensors, exclude, rename, strip_wrappers, strip_prefix)
    result = Diff(Side(paths[0]), Side(paths[1]), ", ".join(f"{name} {value}" for name, value in given.items()) or None)
    with ExitStack() as stack:
        sources = _opened(stack, paths[0], shapes), _opened(stack, paths[1], shapes)
        for path, source in zip(paths, sources, strict=True):
            result.notes += notes_of_run(source.catalogue, path)
        one, other = (taken(path, source.catalogue) for path, source in zip(paths, sources, strict=True))
        catalogues = selection.select(sources, (one, other), selected, result.notes)
        for side, source, catalogue in zip((result.a, result.b), sources, catalogues, strict=True):
            side.format, side.world_size = source.catalogue.format, source.catalogue.world_size
            side.tensor_count, side.object_count = sum(1 for _ in catalogue.tensors), sum(1 for _ in catalogue.objects)
            side.payload_bytes = sum(t.nbytes for t in catalogue.tensors if t.alias is None)
        compare_sources(sources, catalogues, result, options)
        if result.only_a and result.only_b:
            result.hint = selection.advice(catalogues)
        compared = _compared(sources, catalogues)
        for number, source in enumerate(sources):
            with closing(files.Pool()) as pool:
                check_tensors((pair[number] for pair in compared), source, pool, options.threads)
            files.check_unchanged(source.catalogue.versions)
        result.seconds = time.monotonic() - began
        if page is not None and page_path is not None:
            page_file.write(page.text(result, catalogues), page_path)
    return result


def _compared(sources: tuple[Source, Source], catalogues: tuple[Catalogue, Catalogue]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of both that were read."""
    same, one, other = SameFiles(sources), *catalogues
    pairs = ((a, other.entries.get(a.path)) for a in one.tensors)
    found = [(a.origin or a, b.origin or b) for a, b in pairs if isinstance(b, Tensor)]
    return [pair for pair in found if not same.have(*pair)]


def _tolerance(given: Mapping[str, float]) -> Tolerance | None:
    for name, value in given.items():
        if not isinstance(value, int | float):
            raise UsageError(f"`--{name} {value}`: a tolerance is a number, not `{type(value).__name__}`")
        if not 0 <= value < float("inf"):
            raise UsageError(f"`--{name} {value}` is not a distance", hint="write a number that is not negative")
    if given.get("ulp", 0) >= 1 << 64:
        raise UsageError(f"`--ulp {given['ulp']}`: no two numbers are that far apart")
    return Tolerance(given.get("atol", 0.0), given.get("rtol", 0.0), int(given.get("ulp", 0))) if given else None


def _opened(stack: ExitStack, path: str, shapes: str | None) -> Source:
    with open.naming(path):
        return stack.enter_context(open.opened(path, shapes))
