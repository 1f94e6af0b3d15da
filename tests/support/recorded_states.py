"""Recorded states made by hand: what the ranks of a trial have, changed as dicts, and then recorded by digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpttool.resume import states
from ckpttool.resume.observe.site.state import digest


@dataclass
class State:
    """What a recorded state is to hold: whole tensors, of which each rank has some rows or all, and values by rank."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    values: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    rng: list[dict[str, str]] = field(default_factory=lambda: [{}])
    parts: Mapping[str, str] = field(default_factory=dict)
    ties: list[list[str]] = field(default_factory=list)

    def recorded(self, step: int = 3) -> states.RunState:
        world = len(self.values)
        ranks = []
        for rank, values in enumerate(self.values):
            shards = {name: {**digest(torch, one.chunk(world)[rank]), "box": rank} for name, one in self.split(world)}
            whole = {name: digest(torch, one, rounded=True) for name, one in self.tensors.items()} if not rank else {}
            ranks.append(
                {
                    "rank": rank,
                    "step": step,
                    "tensors": whole,
                    "shards": shards,
                    "values": values,
                    "rng": self.rng[rank],
                    "ties": self.ties,
                    "parts": self.parts,
                    "batches": [],
                    "forward": None,
                    "kinds": {name: self.kinds.get(name.partition(".")[0], "weight") for name in self.tensors},
                }
            )
            ranks[-1]["kinds"] |= {name: kind for name, kind in self.kinds.items() if name in self.tensors}
        return states.RunState(ranks)

    def split(self, world: int) -> list[tuple[str, torch.Tensor]]:
        return [(name, one) for name, one in self.tensors.items() if one.ndim and len(one) >= world]
