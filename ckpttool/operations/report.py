"""`report`: one HTML file about a checkpoint, or about the steps of a run, that opens offline.

Its pages are those of `reports`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ckpttool.analysis.describe.hyperparameters import tables
from ckpttool.analysis.result import Result
from ckpttool.analysis.statistics.findings import Outlier
from ckpttool.analysis.statistics.results import Stats
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.findings import Finding, published
from ckpttool.operations.inspect import inspect
from ckpttool.operations.stats import stats
from ckpttool.reports import description, page_file
from ckpttool.reports.page import Book, Section, render, sections
from ckpttool.reports.report import Block, Facts, Findings, Line, Text, bold
from ckpttool.storage.stores import local_path, locate, path_text
from ckpttool.text import plural, size
from ckpttool.transfer.threads import Progress

__all__ = ["HtmlReport", "report"]

_SHOWN = 10  # findings
_GOOD = (
    "Nothing stands out: no NaN, no infinity, no layer or expert unlike the others of its kind, no moment or weight "
    "that is all zero."
)


@dataclass(slots=True, repr=False)
class HtmlReport(Result):
    """The HTML file that `report` wrote."""

    command: ClassVar[str] = "report"

    path: str  #: path of the checkpoint, as it was typed
    destination: str  #: the HTML file
    headline: str = ""  #: what the checkpoint holds, for people
    file_bytes: int = 0  #: size of the HTML file
    pages: list[str] = field(default_factory=list)  #: names of its pages
    findings: list[Finding] = field(default_factory=list, metadata=published(Outlier))  #: the gravest first
    notes: list[str] = field(default_factory=list)  #: remarks, such as which checkpoint of a run was read
    seconds: float = 0.0  #: duration

    @property
    def verdict(self) -> str:
        """`findings` if something stands out, else `ordinary`."""
        return "findings" if self.findings else "ordinary"

    @property
    def message(self) -> str:
        """What was written."""
        return f"wrote {self.destination}: {size(self.file_bytes)}, {plural(len(self.findings), 'finding')}"

    @property
    def lines(self) -> Iterable[str]:
        """What `--quiet` prints: the HTML file."""
        return (self.destination,)


def blocks(result: HtmlReport, verbose: bool = False) -> Iterator[Block]:
    """Yield what was written, and what stands out."""
    yield Line([bold(result.path)])
    if result.headline:
        yield Text(result.headline)
    pages = f"{size(result.file_bytes)}, {plural(len(result.pages), 'page')}"
    yield Facts([("wrote", f"{result.destination}: {pages}")], is_apart=True)
    yield Findings("findings", result.findings, _SHOWN, f"{len(result.findings):,}")


def report(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    only: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    tensors: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    steps: str | Sequence[int | str] | None = None,
    shapes: str | None = None,
    cache: bool = True,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> HtmlReport:
    """Write one HTML file about the checkpoint at `path`: what stands out, statistics, histograms, shards, bytes.

    The file needs no network and nothing beside it.

    Args:
        path: a checkpoint of any format; of a run directory, its newest complete checkpoint.
        output: the HTML file to write.
        only: parts to read, by kind (`model`) or key; all without any.
        drop: parts to leave out.
        tensors: globs of the dotted names to read; all without any.
        exclude: globs of names to leave out.
        steps: of a run directory, the steps to draw side by side: `"all"` complete ones, or some by their numbers,
            `"500,1000"` or `[500, 1000]`; the other pages are about the last of them.
        shapes: a checkpoint or JSON file with the shapes of parameters, for FSDP1 flat parameters.
        cache: whether to keep the statistics, and to take those that were kept of the same files; not of the Hub's.
        overwrite: whether to replace a file that exists.
        threads: how many threads read and calculate.
        progress: called with bytes done and in all, from this thread.

    Raises:
        UsageError: if there is no such part, or no such step.
        ReadError: if there is no checkpoint at `path`, or it cannot be read.
        CorruptError: if it is damaged.
        OverwriteError: if `output` exists.
        StorageError: if it cannot be written.
    """
    began = time.monotonic()
    path, output = path_text(path), path_text(output)
    page_file.check_suffix(output)
    with local_path(output).stage(overwrite=overwrite, is_file=True) as stage:
        found = stats(
            path,
            only=only,
            drop=drop,
            tensors=tensors,
            exclude=exclude,
            steps=steps,
            shapes=shapes,
            cache=cache,
            threads=threads,
            progress=progress,
        )
        values = [_hyperparameters(inspect(one.path, shapes=shapes)) for one in found.steps[:-1]]
        catalogue = inspect(found.steps[-1].path if found.steps else path, shapes=shapes)
        values += [_hyperparameters(catalogue) for _ in found.steps[-1:]]
        title = found.headline or path
        book = Book("report", path, title, found, catalogue, hyperparameters=values, call=_call(path, steps))
        book.sections = [
            Section("Findings", found.findings, good=_GOOD),
            *sections(description.on_page(catalogue, None, ("read", f"{found.numel:,} elements"), run=_newest(found))),
        ]
        content = render(book).encode()
        stage.path.put(content)
    seconds = time.monotonic() - began
    return HtmlReport(path, output, found.headline, len(content), [*book.pages], found.findings, found.notes, seconds)


def _call(path: str, steps: str | Sequence[int | str] | None) -> str:
    """Return the command line of a report on these steps."""
    several = [steps] if isinstance(steps, str | int) else steps or ()
    return " ".join(["ckpttool report", path, *(["--steps", ",".join(map(str, several))] if several else [])])


def _newest(found: Stats) -> list[tuple[str, str]]:
    """Return the fact that says which of the steps all pages but that of the steps are about."""
    if not found.steps:
        return []
    name, number = f"`{locate(found.steps[-1].path).name}`", len(found.steps)
    others = f", the newest of {plural(number, 'step')}; the page Steps compares all" if number > 1 else ""
    return [("run", name + others)]


def _hyperparameters(catalogue: Catalogue) -> dict[str, str]:
    """Return the hyper-parameters of a checkpoint, `{"group 0: lr": "0.01"}`; without the group where there is one."""
    optimizers = [entry for entry in catalogue.entries.values() if entry.part.kind == "optimizer"]
    found: dict[str, str] = {}
    for table in tables(optimizers, catalogue.entries):
        for title, column in zip(table.titles, table.columns, strict=True):
            prefix = f"{title}: " if len(table.columns) > 1 else ""
            found |= {prefix + name: value for name, value in column.values.items()}
    return found
