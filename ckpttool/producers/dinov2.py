"""DINOv2: one file per rank, with the LOCAL flat parameters of FSDP1; all steps lie in one directory.

    model_0009999.rank_3.pth last_checkpoint.rank_0

Upstream: DINOv2 `fsdp/__init__.py`.
"""

from __future__ import annotations

from ckpttool.producers.components import Layout, Pattern, Producer, match_components
from ckpttool.producers.directory import Directory

_RANK_FILE = r"(?P<name>.+)\.rank_(?P<rank>\d+)\.pth"
_PATTERNS = (Pattern(_RANK_FILE, kind="rank files"), Pattern(r"last_checkpoint\.rank_\d+", kind="ignored"))


def _recognise(directory: Directory) -> bool:
    return len({match["name"] for match in directory.matching(_RANK_FILE)}) == 1


def _layout(directory: Directory) -> Layout:
    return match_components(directory, _PATTERNS)


DINOV2 = Producer("DINOv2", "files `<name>.rank_R.pth` of DINOv2", _recognise, _layout, rank_files=_RANK_FILE)
