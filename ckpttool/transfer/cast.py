"""Casts elements from one dtype to another, as torch rounds."""

from __future__ import annotations

from ckpttool.catalogue.dtypes import Dtype
from ckpttool.transfer.numbers import Array


def cast_array(array: Array, old: Dtype, new: Dtype) -> tuple[memoryview, int]:
    """Return the bytes of a contiguous tile's elements as `new`, rounded as torch rounds, and how many finite elements
    are not finite in `new`."""
    import numpy as np

    raw = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
    if old == new:
        return raw.data, 0
    import torch

    before = torch.frombuffer(raw, dtype=getattr(torch, old.name))
    after = before.to(getattr(torch, new.name))
    overflowed = 0
    # torch does not check 8-bit floats; those without an infinity overflow to NaN.
    finite = (after.float() if new.itemsize == 1 else after).isfinite()
    if not finite.all():
        overflowed = int(((before.float() if old.itemsize == 1 else before).isfinite() & ~finite).sum())
    return after.view(torch.uint8).numpy().data, overflowed
