"""Recognises checkpoints of PaddlePaddle, whose files end with `.distcp` too.

    0.metadata  0_0.distcp  1_0.distcp        {id}.metadata, {rank}_{id}.distcp

Upstream: Paddle 3.3 `distributed/flex_checkpoint/dcp/save_state_dict.py`.
"""

from __future__ import annotations

from ckpttool.catalogue.warning import Warning
from ckpttool.producers.directory import Directory
from ckpttool.producers.foreign.recognition import Recognition, ranks

_INDEX, _DATA = r"(?P<id>\d+)\.metadata", r"(?P<rank>\d+)_(?P<id>\d+)\.distcp"


def recognise(directory: Directory) -> Recognition | None:
    """Return what a directory of Paddle is; None for any other directory."""
    indexes = [m["id"] for m in directory.matching(_INDEX)]
    files = list(directory.matching(_DATA))
    if not files or ".metadata" in directory:
        return None
    saved = sorted({int(m["rank"]) for m in files})
    warnings = []
    if not indexes:
        warnings.append(Warning("missing-file", "there is no `*.metadata`, which is the index of its tensors"))
    if absent := sorted(set(range(min(saved[-1] + 1, 1 << 16))) - set(saved)):
        warnings.append(Warning("missing-file", f"the file of rank {absent[0]} is missing"))
    return Recognition(
        "PaddlePaddle distributed",
        parallelism=ranks(saved[-1] + 1),
        details={"files": len(files)},
        can=("inspect it",),
        cannot=("read its tensors",),
        hint="load it with Paddle, and save it with safetensors",
        warnings=tuple(warnings),
    )
