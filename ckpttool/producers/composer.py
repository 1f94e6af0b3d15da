"""Composer: one DCP directory, with everything under `state`, and `rng` by rank.

    ep1-ba20/{.metadata, __R_0.distcp, composer_metadata.json}

Upstream: composer `utils/checkpoint.py`.
"""

from __future__ import annotations

from ckpttool.catalogue.entries import Catalogue
from ckpttool.producers.components import Layout, Pattern, Producer, dcp_layout, is_dcp
from ckpttool.producers.directory import Directory

_BESIDE_DCP = (Pattern(r".*\.symlink", kind="ignored"), Pattern(r"composer_metadata\.json", kind="asset"))


def _recognise(directory: Directory) -> bool:
    return is_dcp(directory) and directory.name.startswith("ep") and "-ba" in directory.name


def _layout(directory: Directory) -> Layout:
    return dcp_layout(directory, _BESIDE_DCP)


def _confirm(catalogue: Catalogue) -> bool:
    return any(path[:1] == ("state",) for path in catalogue.entries)


COMPOSER = Producer("Composer", "a sharded checkpoint of Composer", _recognise, _layout, _confirm)
