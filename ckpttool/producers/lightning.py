"""Lightning and Fabric: modules and optimizers in DCP, the rest in one file.

    x.ckpt/{.metadata, __R_0.distcp, meta.pt}

Upstream: pytorch-lightning `fabric/strategies/fsdp.py`.
"""

from __future__ import annotations

from ckpttool.producers.components import Layout, Pattern, Producer, dcp_layout, is_dcp
from ckpttool.producers.directory import Directory


def _recognise(directory: Directory) -> bool:
    return "meta.pt" in directory and is_dcp(directory)


def _layout(directory: Directory) -> Layout:
    return dcp_layout(directory, (Pattern(r"meta\.pt"),))


LIGHTNING = Producer("Lightning", "a sharded checkpoint of Lightning or Fabric", _recognise, _layout)
