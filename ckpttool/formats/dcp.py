"""torch.distributed.checkpoint directories."""

from __future__ import annotations

from ckpttool.contract import Format, Source


def recognise(path: str) -> bool:
    return False


def open(path: str) -> Source:
    raise NotImplementedError


FORMAT = Format("dcp", "torch.distributed.checkpoint directory", recognise, open, chunked=True)
