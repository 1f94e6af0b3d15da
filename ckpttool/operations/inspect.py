"""`inspect`: what the index of a checkpoint says, without reading its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ckpttool.analysis.describe.copies import note_copies
from ckpttool.analysis.describe.counters import note_counters
from ckpttool.analysis.describe.document import document
from ckpttool.analysis.describe.listing import ALL, Listing
from ckpttool.analysis.describe.summary import damage, summarise
from ckpttool.analysis.result import Result
from ckpttool.catalogue.entries import Catalogue, File, Tensor
from ckpttool.catalogue.patterns import pattern_meant
from ckpttool.catalogue.validation import stop_at_denied, validate
from ckpttool.catalogue.warning import Kind, Warning
from ckpttool.errors import DONE, CkptError, CorruptError, ReadError, UsageError
from ckpttool.producers import runs
from ckpttool.producers.foreign.recognition import Recognition, UnsupportedError
from ckpttool.producers.open import describe_run, opened
from ckpttool.reports import description
from ckpttool.reports.report import Block, Column, Findings
from ckpttool.serialization.directory import Directory
from ckpttool.serialization.unpickler import no_garbage_collection
from ckpttool.storage.stores import locate, path_text
from ckpttool.text import plural, some


@dataclass(repr=False)
class Inspection(Result):
    """What `ckpttool inspect` answers: a catalogue, and which of its tensors to list."""

    command: ClassVar[str] = "inspect"

    path: str
    catalogue: Catalogue
    listing: Listing
    strict: bool = False  # whether damage is an error

    @property
    def exit_code(self) -> int:
        """4 for damage if that is an error, else 0."""
        return CorruptError.exit_code if self.strict and damage(self.catalogue) else DONE

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors to list."""
        return self.listing.tensors(self.catalogue)

    @property
    def lines(self) -> Iterator[str]:
        """What `--quiet` prints: the names of the tensors."""
        return (tensor.name for tensor in self.tensors)

    def check(self, *, with_objects: bool) -> None:
        """Raise UsageError for a condition that is none, and if no tensor, nor object, has such a name."""
        by_name = Listing(self.listing.globs)
        objects = self.listing.objects(self.catalogue) if with_objects else []
        if not (self.tensors or by_name.tensors(self.catalogue) or objects) and by_name.globs:
            names = [tensor.name for tensor in self.catalogue.tensors]
            hint = pattern_meant(by_name.globs[0], names, "`--tensors '*'` lists all")
            raise UsageError(f"`{self.path}`: no tensor matches `{by_name.globs[0]}`", hint=hint)

    def json(self) -> Iterator[str]:
        """Yield the document of `--json`."""
        return document(self.catalogue, self.path, self.listing, self.exit_code)


def blocks(result: Inspection, verbose: bool = False, **how: int) -> Iterator[Block]:
    """Yield what is in the checkpoint; with a listing, its tensors. `how` is that of `reports.description`."""
    tensors = result.tensors if result.listing != ALL else None
    return description.blocks(result.catalogue, result.path, tensors, verbose=verbose, **how)


def rows(result: Inspection) -> tuple[list[Column], Iterator[list[object]]]:
    """Return the columns of `--csv` and `--md`, and a row for each tensor."""
    return description.rows(result.tensors, result.catalogue)


def page(result: Inspection) -> str:
    """Return the page of `--html`, of which nothing but the index of the checkpoint is read."""
    from ckpttool.reports.page import Book, render, sections

    summary = summarise(result.catalogue)
    book = Book.of_catalogue("inspect", result.path, result.catalogue, str(summary.headline))
    damaged = damage(result.catalogue)
    if damaged:
        book.verdict, book.is_good = "The checkpoint is damaged", False
    found = [Findings("findings", damaged, None), Findings("warnings", summary.warnings, None)]
    contents = description.contents(summary, verbose=True, exact=True)
    about = description.about(result.catalogue, summary, description.chosen(result.catalogue))
    book.sections = [*sections([*found, *about, *contents, *description.ranks_and_files(result.catalogue)])]
    return render(book)


@no_garbage_collection()
def inspect(
    path: str | os.PathLike[str], *, shapes: str | None = None, steps: int | str | Sequence[int | str] | None = None
) -> Catalogue:
    """Return everything that the index of the checkpoint at `path` says, without reading a weight or running anything.

    What is damaged is in the `warnings`. Of a checkpoint of another tool that is recognised and not opened,
    `facts["recognised"]` alone says what it is.

    Args:
        path: a checkpoint of any format; of a run directory, its newest complete one.
        shapes: a checkpoint or a JSON file with the names, shapes and order of the parameters, for FSDP1's flat
            parameters and optimizers keyed by numbers.
        steps: of a run directory, the steps to list, the newest of which is shown: `"all"` complete ones, some by their
            numbers, `"500,1000"` or `[500, 1000]`, or those from one to another, `"500..1000"`.

    Raises:
        UsageError: if there is no run, or none of its complete checkpoints is of a step.
        ReadError: if there is no checkpoint at `path`, or it cannot be read.
        CorruptError: if its index cannot be read.
    """
    if steps is not None:
        return _chosen(path_text(path), shapes, steps)
    try:
        opening = opened(path_text(path), shapes)
    except UnsupportedError as error:
        return _unopened(path_text(path), error.recognition)
    with opening as source:
        catalogue = source.catalogue
        stop_at_denied(catalogue)
        try:
            validate(catalogue)
        except CkptError as error:
            # What is wrong stops a conversion; whoever looks wants to see the rest all the same.
            faults = _truncated(catalogue, catalogue.faults or [error])
            unread = [fault for fault in faults if "needs" in fault.facts]  # something else is missing, not a byte
            others = [fault for fault in faults if "needs" not in fault.facts]
            unopened = [fault for fault in others if isinstance(fault, ReadError)]
            damaged = _folded([fault for fault in others if not isinstance(fault, ReadError)])
            catalogue.warnings[:0] = [
                *(Warning("damaged", f"damaged: {text}") for text in damaged),
                *(
                    Warning("damaged", f"not read: {'; '.join(filter(None, (fault.message, fault.hint)))}")
                    for fault in unopened
                ),
                *(Warning(_unread_kind(fault), f"{fault.message}; {fault.hint}") for fault in unread),
            ]
        note_copies(source)
        note_counters(source)
        return catalogue


def _chosen(path: str, shapes: str | None, steps: int | str | Sequence[int | str]) -> Catalogue:
    """Return the catalogue of the newest of some steps of a run, in which the others are listed."""
    location = locate(path)
    chosen = runs.chosen_steps(location, steps)
    catalogue = inspect(str(chosen[-1].path), shapes=shapes)
    directory, checkpoints = runs.search(Directory(location))
    describe_run(catalogue, runs.RunDirectory(directory, checkpoints, chosen[-1]))
    paths = {checkpoint.path for checkpoint in chosen}
    catalogue.facts["run"] = [entry for entry in catalogue.facts["run"] if entry["path"] in paths]
    return catalogue


def _truncated(catalogue: Catalogue, faults: list[CkptError]) -> list[CkptError]:
    """Return the faults, with one for all that lies behind the end of a truncated file. The warning of the objects that
    do is taken out of the catalogue."""
    cut = [fault for fault in faults if fault.facts.keys() >= {"file", "offset", "nbytes"}]
    for fault in cut[:1]:
        place, file = next(((i, f) for i, f in enumerate(catalogue.files) if f.name == fault.facts["file"]), (-1, None))
        if file is None or fault.facts["offset"] + fault.facts["nbytes"] <= file.size:
            continue
        warning = next((w for w in catalogue.warnings if w.kind == "unreadable" and w.file == file.name), None)
        lost = sum(_ends_behind(tensor, place, file.size) for tensor in catalogue.tensors)
        if warning is None and lost < 2:
            continue
        counts = [plural(lost, "tensor")]
        if warning is not None:
            catalogue.warnings.remove(warning)
            counts.append(plural(len(warning.names), "object"))
        message = f"`{file.name}`: truncated at {file.size:,} bytes: {' and '.join(counts)} lie beyond its end"
        faults = [CorruptError(message, hint=fault.hint, file=file.name), *(one for one in faults if one is not fault)]
    return faults


def _ends_behind(tensor: Tensor, file: int, size: int) -> bool:
    chunks = tensor.chunks
    places = zip(chunks.file, chunks.offset, chunks.nbytes, strict=True)
    return any(own == file and offset + nbytes > size for own, offset, nbytes in places)


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
    """Return what to say of faults; those with the same fact `alike`, what is wrong with each tensor, as one. Pure."""
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
