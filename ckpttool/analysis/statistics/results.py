"""What `stats` returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from ckpttool.analysis.result import Result
from ckpttool.analysis.statistics.collect import Collected, Update
from ckpttool.analysis.statistics.elements import FRACTIONS, Accumulator, Channels, Statistics
from ckpttool.analysis.statistics.findings import Outlier
from ckpttool.analysis.statistics.histogram import Compact
from ckpttool.analysis.statistics.places import NO_NAMES, Names, place_of
from ckpttool.analysis.statistics.spectral import Spectrum
from ckpttool.analysis.statistics.thumbnails import Thumbnail
from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.conditions import Columns, Values
from ckpttool.catalogue.entries import Tensor
from ckpttool.catalogue.findings import Finding, published
from ckpttool.errors import DIFFERS, DONE, UsageError
from ckpttool.text import meant, natural, plural, some

QUANTILES = [f"p{fraction * 100:g}" for fraction in FRACTIONS]
COLUMNS = [
    "numel", "zeros", "nan", "inf", "subnormals", "min", "max", "mean", "std", "rms", "absmax", "l1", "l2", "kurtosis",
    *(name.replace(".", "_") for name in QUANTILES), "outlying_rows", "outlying_columns", "update",
    "stable_rank", "singular_value",
]  # fmt: skip
"""Names of statistics, as conditions, sorting and tables have them."""
_TEXTS = ("name", "moment", "layer", "kind", "expert", "dtype")
CONDITION = Columns(COLUMNS, _TEXTS, "statistic", "'nan > 0 or absmax > 1e4'")


@dataclass(slots=True)
class TensorStatistics:
    """The statistics of a tensor, and where it stands in the model."""

    name: str  #: dotted name
    part: str  #: part, with its key if that has another name: `optimizer (optim)`
    moment: str  #: of optimizer state, which: `exp_avg`; else empty
    layer: str  #: its layer: `layers.3`; empty outside of the layers
    kind: str  #: its name with `*` for the numbers of layers and experts
    expert: str  #: number of its expert; empty outside of experts
    dtype: str  #: dtype, as torch calls it
    shape: Ints  #: shape
    nbytes: int  #: bytes
    tied_to: str | None  #: name of the tensor whose bytes it shares; null if it has its own
    statistics: Statistics  #: statistics of its elements
    rows: Channels | None = None  #: its rows; null if it is not a matrix of floating-point numbers
    columns: Channels | None = None  #: its columns, likewise
    update: Update | None = None  #: Adam's update, of a first moment with the second beside it; else null
    histogram: Compact | None = None  #: a small histogram; null if the elements are not numbers
    thumbnail: Thumbnail | None = None  #: a picture of one of the 4,096 largest matrices, of the last step; else null
    spectrum: Spectrum | None = None  #: estimates of singular values (`--spectral`) of a matrix; else null

    def values(self) -> dict[str, float | None]:
        """Return the statistics by the names in `COLUMNS`."""
        return {
            **_values(self.statistics),
            "stable_rank": self.spectrum.stable_rank if self.spectrum is not None else None,
            "singular_value": self.spectrum.singular_values[0] if self.spectrum is not None else None,
            "outlying_rows": self.rows.outlying if self.rows is not None else None,
            "outlying_columns": self.columns.outlying if self.columns is not None else None,
            "update": self.update.rms if self.update is not None else None,
        }

    def known(self) -> Values:
        """Return what conditions compare: the statistics, the name, and where the tensor stands."""
        return {**self.values(), **{name: getattr(self, name) for name in _TEXTS}}


def row_of(tensor: Tensor, found: Collected | None, tied_to: str | None, names: Names = NO_NAMES) -> TensorStatistics:
    """Return the statistics of a tensor from what was collected of it, or of the tensor it is tied to; None of a tensor
    without elements."""
    if found is None:
        found = Collected(Accumulator(tensor.dtype).result(), None, None, None, None)
    row = row_with(tensor, found.statistics, tied_to, names)
    row.histogram, row.rows, row.columns, row.update = found.histogram, found.rows, found.columns, found.update
    row.thumbnail = found.thumbnail
    return row


def row_with(tensor: Tensor, statistics: Statistics, tied_to: str | None, names: Names = NO_NAMES) -> TensorStatistics:
    """Return a row with these statistics alone."""
    place, dtype = place_of(tensor, names), tensor.dtype.name
    return TensorStatistics(tensor.name, *place, dtype, tensor.shape, tensor.nbytes, tied_to, statistics)


@dataclass(slots=True)
class GroupStatistics:
    """The statistics of the tensors of one dtype that have something in common, over all of their elements."""

    by: str  #: what they have in common: `part`, `kind`, `layer` or `expert`
    part: str  #: part
    moment: str  #: of optimizer state, which; else empty
    name: str  #: name of the part, kind, layer or expert
    dtype: str  #: dtype
    tensor_count: int  #: number of tensors, tied ones counted once
    statistics: Statistics  #: statistics of all elements
    histogram: Compact | None = None  #: a small histogram; null if the elements are not numbers

    def values(self) -> dict[str, float | None]:
        """Return the statistics by the names in `COLUMNS`."""
        return _values(self.statistics)


def _values(statistics: Statistics) -> dict[str, float | None]:
    quantiles = statistics.quantiles or {}
    own = {name: getattr(statistics, name) for name in COLUMNS if hasattr(statistics, name)}
    named = {name.replace(".", "_"): quantiles.get(name) for name in QUANTILES}
    return {**own, "nan": statistics.nans, "inf": statistics.infs, **named}


@dataclass(slots=True)
class StepStatistics:
    """The statistics of one checkpoint of a run."""

    path: str  #: its path
    step: int | None  #: its step
    tensors: list[TensorStatistics]  #: statistics of each tensor
    groups: list[GroupStatistics]  #: statistics of each group
    findings: list[Finding] = field(metadata=published(Outlier))  #: what stands out


@dataclass(slots=True, repr=False)
class Stats(Result):
    """The statistics of a checkpoint."""

    command: ClassVar[str] = "stats"

    path: str  #: path, as it was typed
    headline: str = ""  #: what it holds, for people
    step: float | None = None  #: step it was saved at, if known
    tensors: list[TensorStatistics] = field(default_factory=list)  #: statistics of each tensor
    groups: list[GroupStatistics] = field(default_factory=list)  #: statistics of each group
    findings: list[Finding] = field(default_factory=list, metadata=published(Outlier))  #: the gravest first
    steps: list[StepStatistics] = field(default_factory=list)  #: of a run (`--steps`), each, the oldest first
    failed: list[str] = field(default_factory=list)  #: names of the tensors for which `--fail-on` is true
    fail_on: str | None = None  #: that condition
    numel: int = 0  #: number of elements that were read
    read_bytes: int = 0  #: bytes of them
    cached: bool = False  #: whether they are from the cache
    notes: list[str] = field(default_factory=list)  #: remarks, such as which checkpoint of a run was read
    seconds: float = 0.0  #: duration

    @property
    def verdict(self) -> str:
        """`failed` if `--fail-on` is true of a tensor, `findings` if something stands out, else `ordinary`."""
        return "failed" if self.failed else "findings" if self.findings else "ordinary"

    @property
    def message(self) -> str:
        """The verdict in a sentence."""
        of = f"{plural(len(self.tensors), 'tensor')}, {self.numel:,} elements"
        if self.failed:
            return f"{self.path}: `{self.fail_on}` is true of {plural(len(self.failed), 'tensor')}: {some(self.failed)}"
        return f"{self.path}: {of}; {plural(len(self.findings), 'finding')}"

    @property
    def exit_code(self) -> int:
        """1 if `--fail-on` is true of a tensor."""
        return DIFFERS if self.failed else DONE

    @property
    def lines(self) -> Iterator[str]:
        """What `--quiet` prints: what stands out, and why it failed."""
        yield from (f"{finding.kind}: {finding.message}" for finding in self.findings)
        yield from [self.message] if self.failed else []

    def sort(self, column: str | None) -> None:
        """Sort the tensors by the statistic `column`, the largest first; None leaves them as they were saved."""
        if column is not None:
            figures = {row.name: row.values()[column] for row in self.tensors}
            largest = {name: float("-inf") if value is None else value for name, value in figures.items()}
            self.tensors.sort(key=lambda row: (-largest[row.name], natural(row.name)))

    def by(self, what: str) -> Iterator[GroupStatistics]:
        """Return the groups by `what`: `part`, `kind`, `layer` or `expert`."""
        return (group for group in self.groups if group.by == what)


def checked_column(name: str) -> str:
    """Return `name`, if it is one of `COLUMNS`. Raises UsageError for any other."""
    if name not in COLUMNS:
        hint = meant(name, COLUMNS, f"the statistics are {', '.join(COLUMNS)}")
        raise UsageError(f"`--sort {name}`: there is no statistic `{name}`", hint=hint, found=name)
    return name
