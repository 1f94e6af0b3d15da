"""Reads the statistics of all tensors of a checkpoint on a thread of its own, those that are wanted first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace

from ckpttool.analysis.statistics import cached
from ckpttool.analysis.statistics.collect import EPS, Collected, TensorReading, pictured, second_moments
from ckpttool.analysis.statistics.findings import findings
from ckpttool.analysis.statistics.places import Names
from ckpttool.analysis.statistics.results import TensorStatistics, row_of
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.entries import Path, Tensor
from ckpttool.catalogue.findings import Finding
from ckpttool.catalogue.protocols import Source
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError
from ckpttool.storage import files
from ckpttool.storage.files import Pool
from ckpttool.transfer.threads import Stopped, Work

_KIND = "browse"
_PAUSE = 2.0  # seconds between two looks at what stands out


class Survey:
    """The statistics of tensors, by their numbers, as they become known. `version` grows when something does.

    Of a checkpoint that is not on this machine, only tensors that are asked for are read. `names` returns those of the
    parameters that optimizers number.
    """

    def __init__(self, source: Source, tensors: Sequence[Tensor], names: Callable[[], Names]) -> None:
        self.rows: list[TensorStatistics | None] = [None] * len(tensors)
        self.errors: dict[int, str] = {}
        self.findings: list[Finding] = []
        self.damage: str | None = None  # what is wrong with the checkpoint as a whole
        self.done = self.version = 0
        self.finished = self.cached = False
        self.is_local = True
        self._source, self._tensors, self._names = source, tensors, names
        self._wanted: list[int] = []
        self._asked: set[int] = set()
        self._something = threading.Condition()
        self._work = Work()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, or go on after `stop`."""
        self._work = Work()
        if not self.finished:
            self._thread = threading.Thread(target=self._run, args=(self._work,), daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop soon, and wait until no file is read any more."""
        self._work.stopped.set()
        with self._something:
            self._something.notify()
        if self._thread is not None:
            self._thread.join()

    def want(self, numbers: Sequence[int], *, demanded: bool = False) -> None:
        """Read these tensors next. Those that are `demanded` are read even if they are not on this machine."""
        with self._something:
            self._wanted = [i for i in numbers if self.rows[i] is None and i not in self.errors]
            if demanded:
                self._asked |= {*self._wanted}
            self._something.notify()

    def _run(self, work: Work) -> None:
        try:
            self._survey(work)
        except Stopped:
            return
        except CkptError as error:
            self.damage = error.message
        self.version += 1

    def _survey(self, work: Work) -> None:
        catalogue = self._source.catalogue
        before = catalogue.versions
        self.is_local = all(file.missing or file.location in before for file in catalogue.own_files)
        is_sound = self._validate()
        work.note(0)
        key = cached.key_of(before, self._tensors, spectral=False) if self.is_local else None
        rows = (cached.load(key) or cached.load(key, _KIND)) if key is not None else None
        if rows is not None and len(rows[0]) == len(self._tensors):
            self.rows, self.cached = [*rows[0]], True
            self._finish()
            return
        aliases = find_aliases(self._tensors)
        numbers = {tensor.path: i for i, tensor in enumerate(self._tensors)}
        firsts = {numbers[path]: numbers[first] for path, first in aliases.items() if first in numbers}
        seconds = second_moments(catalogue, self._tensors)
        self._pictured = pictured(tensor for tensor in self._tensors if tensor.path not in aliases)
        again = time.monotonic() + _PAUSE
        with closing(Pool()) as pool:
            while (i := self._next(work)) is not None:
                first = firsts.get(i, i)
                try:
                    self._read(i, first, seconds, is_sound, pool, work)
                except CkptError as error:
                    self.errors[i] = error.message
                self.done += 1
                if time.monotonic() > again:
                    began = time.monotonic()
                    self.find()
                    # Of very many tensors that takes a while.
                    again = time.monotonic() + max(_PAUSE, 10 * (time.monotonic() - began))
                self.version += 1
        if not self.errors and key is not None:
            files.check_unchanged(before)
            cached.store(key, [row for row in self.rows if row is not None], [], _KIND)
        self._finish()

    def _validate(self) -> bool:
        try:
            validate(self._source.catalogue)
        except CkptError as error:
            self.damage = error.message
            self.version += 1
            return False
        return True

    def _read(
        self,
        i: int,
        first: int,
        seconds: dict[tuple[object, ...], tuple[Tensor, float]],
        is_sound: bool,
        pool: Pool,
        work: Work,
    ) -> None:
        tensor, tied = self._tensors[first], self.rows[first] if first != i else None
        if tied is None:
            found = None if not tensor.numel else self._collected(tensor, seconds, is_sound, pool, work)
            self.rows[first] = tied = row_of(tensor, found, None, self._names())
        if first != i:
            own = self._tensors[i]
            found = Collected(tied.statistics, tied.histogram, tied.rows, tied.columns, tied.update, tied.thumbnail)
            self.rows[i] = row_of(own, found, tensor.name, self._names())

    def _collected(
        self,
        tensor: Tensor,
        seconds: dict[tuple[object, ...], tuple[Tensor, float]],
        is_sound: bool,
        pool: Pool,
        work: Work,
    ) -> Collected:
        if not is_sound:
            validate(replace(self._source.catalogue, entries={tensor.path: tensor}))
        job = TensorReading(tensor, *seconds.get(tensor.path, (None, EPS)), pictured=tensor.path in self._pictured)
        for task in job.tasks():
            job.read(task, self._source, pool, work)
        return job.result()[1]

    def _next(self, work: Work) -> int | None:
        """Return the number of the tensor to read next, or None after the last. Raises Stopped."""
        with self._something:
            while True:
                work.note(0)
                while self._wanted:
                    i = self._wanted.pop(0)
                    if self._is_due(i) and (self.is_local or i in self._asked):
                        return i
                if self.is_local:
                    while self.done < len(self.rows) and self._place < len(self.rows):
                        self._place += 1
                        if self._is_due(self._place - 1):
                            return self._place - 1
                    return None
                self._something.wait(1.0)

    _place = 0
    _pictured: Collection[Path] = ()

    def _is_due(self, i: int) -> bool:
        return self.rows[i] is None and i not in self.errors

    def _finish(self) -> None:
        self.find()
        self.done = len(self.rows)
        self.finished = True
        self.version += 1

    def find(self) -> None:
        """Look for what stands out in what is known so far."""
        self.findings = findings([row for row in self.rows if row is not None])
