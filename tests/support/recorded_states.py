"""Recorded states made by hand: changed as dicts, then written and read as those of a run."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ckpttool.resume.states import RecordedState, read
from ckpttool.resume.worker.record import Writer

FOLDER = tempfile.TemporaryDirectory(prefix="recorded-states-")


@dataclass
class State:
    """What a recorded state is to hold; `tensors` are arrays of numpy."""

    tensors: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    ties: list[tuple[str, ...]] = field(default_factory=list)
    buffers: frozenset[str] = frozenset()
    boxes: dict[str, list[Any]] = field(default_factory=dict)
    world: int = 1

    def recorded(self) -> RecordedState:
        folder = tempfile.mkdtemp(dir=FOLDER.name)
        writer = Writer(folder)
        for name, values in self.tensors.items():
            writer.add(name, torch.from_numpy(np.ascontiguousarray(values)).reshape(values.shape))
        writer.close({"kinds": self.kinds, "ties": self.ties, "buffers": [*self.buffers]})
        for rank in range(self.world):
            boxes = {name: of_ranks[rank] for name, of_ranks in self.boxes.items()}
            with open(os.path.join(folder, f"rank{rank}.json"), "w", encoding="utf-8") as stream:
                json.dump({"objects": self.objects if rank == 0 else {}, "boxes": boxes, "pieces": {}}, stream)
        return read(folder, self.world)
