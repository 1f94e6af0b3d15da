"""torch_checkpointing: one file per item and rank; written as `tmp_step-10`, then renamed.

    step-10/{app_0.pt, app_1.pt, metadata.pkl}

Upstream: torch_checkpointing 0.1.1.
"""

from __future__ import annotations

from ckpttool.producers.components import Layout, Pattern, Producer, match_components
from ckpttool.producers.directory import Directory

_PATTERNS = (
    Pattern(r"(checkpoint|other)_(?P<rank>\d+)\.pt", kind="rank files"),
    Pattern(r"(?P<item>model)_(?P<rank>\d+)\.pt", "{item}", "rank files"),
    Pattern(r"(?P<item>\w+?)_(?P<rank>\d+)\.pt", "{item}", "rank files"),
    Pattern(r"metadata\.pkl", kind="ignored"),
)


def _recognise(directory: Directory) -> bool:
    return "metadata.pkl" in directory and directory.has(r"\w+_\d+\.pt")


def _layout(directory: Directory) -> Layout:
    return match_components(directory, _PATTERNS)


TORCH_CHECKPOINTING = Producer("torch_checkpointing", "a `step-N` of torch_checkpointing", _recognise, _layout)
