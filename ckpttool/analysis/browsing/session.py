"""Checkpoints that are looked at: the one at a path, and the others of its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ckpttool.analysis.browsing.folding import Tree
from ckpttool.analysis.browsing.survey import Survey
from ckpttool.analysis.describe import summary
from ckpttool.analysis.describe.headline import Headline
from ckpttool.analysis.describe.sharding import Placements
from ckpttool.analysis.statistics.places import parameter_of
from ckpttool.catalogue.entries import Catalogue, Part, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.errors import CkptError
from ckpttool.layout.optimizer.names_of_ids import parameters_of_ids
from ckpttool.producers import open, runs


class Opened:
    """An open checkpoint, with what is known of its values."""

    def __init__(self, path: str, shapes: str | None) -> None:
        self.path = path
        self.source: Source = open.open_source(path, shapes)
        self.tensors: list[Tensor] = [*self.catalogue.tensors]
        self.tree = Tree(self.tensors)
        self.survey = Survey(self.source, self.tensors, lambda: self.parameter_names)
        self.unnamed = ""  # why it is not known which parameters an optimizer numbers

    @property
    def catalogue(self) -> Catalogue:
        """What the index says."""
        return self.source.catalogue

    @cached_property
    def headline(self) -> Headline:
        """What it holds, in a line."""
        return summary.head(self.catalogue, self.source)[0]

    @cached_property
    def placements(self) -> Placements:
        """How its tensors lie on the mesh."""
        return Placements(self.catalogue)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each tensor by its name."""
        return {tensor.name: i for i, tensor in enumerate(self.tensors)}

    @cached_property
    def moments(self) -> dict[str, list[int]]:
        """The numbers of the tensors that an optimizer keeps of a parameter, by its name in the model."""
        found: dict[str, list[int]] = {}
        names = self.parameter_names
        for i, tensor in enumerate(self.tensors):
            if tensor.part.kind == "optimizer":
                key = ".".join(parameter_of(tensor)[0])
                found.setdefault(names.get((tensor.part, key), key), []).append(i)
        return found

    @cached_property
    def parameter_names(self) -> dict[tuple[Part, str], str]:
        """The names of the parameters that an optimizer has numbers for."""
        try:
            return parameters_of_ids(self.catalogue)
        except CkptError as error:
            self.unnamed = error.message
            return {}

    def moments_of(self, tensor: Tensor) -> list[int]:
        """Return the numbers of the tensors that an optimizer keeps of a parameter."""
        return self.moments.get(tensor.fqn, []) if tensor.part.kind == "model" else []


@dataclass
class Session:
    """The checkpoints that were opened, which stay open until `close`."""

    path: str
    shapes: str | None = None
    steps: list[runs.RunCheckpoint] = field(default_factory=list)
    _opened: dict[str, Opened] = field(default_factory=dict)

    def open(self) -> Opened:
        """Open the checkpoint at the path; of a run, the newest complete one. Raises ReadError or CorruptError."""
        opened = self._opened[self.path] = Opened(self.path, self.shapes)
        if "run" in opened.catalogue.facts:
            self.steps = [step for step in runs.checkpoints(self.path) if step.complete]
            taken = [row["path"] for row in opened.catalogue.facts["run"] if row["taken"]]
            if taken:
                opened.path = str(taken[0])
                self._opened[opened.path] = opened
        return opened

    def beside(self, opened: Opened, by: int) -> Opened | None:
        """Return the checkpoint of the run that is `by` steps after one; None if there is none. Raises ReadError."""
        paths = [str(step.path) for step in self.steps]
        at = paths.index(opened.path) + by if opened.path in paths else -1
        if not 0 <= at < len(paths):
            return None
        if paths[at] not in self._opened:
            self._opened[paths[at]] = Opened(paths[at], self.shapes)
        return self._opened[paths[at]]

    def close(self) -> None:
        """Stop reading, and close all files."""
        for opened in {id(one): one for one in self._opened.values()}.values():
            opened.survey.stop()
            opened.source.close()
