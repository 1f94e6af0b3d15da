"""DINOv2: one file per rank, with the LOCAL flat parameters of FSDP1; all steps lie in one directory.

    model_0009999.rank_3.pth last_checkpoint.rank_0

Upstream: DINOv2 `fsdp/__init__.py`.
"""

from __future__ import annotations

import re

from ckpttool.producers.components import IGNORED, RANK_FILES, Layout, Pattern, Producer, match_components
from ckpttool.producers.directory import Directory

RANK_FILE = r"(?P<name>.+)\.rank_(?P<rank>\d+)\.pth"
_PATTERNS = (Pattern(RANK_FILE, kind=RANK_FILES), Pattern(r"last_checkpoint\.rank_\d+", kind=IGNORED))


def rank_files(directory: Directory) -> dict[str, list[str]]:
    """Return the files of each checkpoint: `{"model_0009999": ["model_0009999.rank_0.pth", ...]}`."""
    files: dict[str, list[str]] = {}
    for match in directory.matching(RANK_FILE):
        files.setdefault(match["name"], []).append(match.string)
    return files


def step_of(name: str) -> int | None:
    """`model_0009999` -> 9999; None for a name without a number. Pure."""
    match = re.search(r"(\d+)$", name)
    return int(match[1]) if match else None


def _recognise(directory: Directory) -> bool:
    return len(rank_files(directory)) == 1


def _layout(directory: Directory) -> Layout:
    return match_components(directory, _PATTERNS)


DINOV2 = Producer("DINOv2", "files `<name>.rank_R.pth` of DINOv2", _recognise, _layout)
