"""Run on ranks: DCP saves a state of fewer tensors than ranks, and an empty one."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
dcp.save({"a": torch.arange(6.0), "b": torch.ones(3)}, checkpoint_id=Path(sys.argv[1]) / "few")
dcp.save({}, checkpoint_id=Path(sys.argv[1]) / "none")
dist.destroy_process_group()
