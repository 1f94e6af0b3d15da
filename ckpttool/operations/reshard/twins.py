"""Second names of tied weights, told by their bytes: checkpoints that store each name by itself do not say it."""

from __future__ import annotations

from contextlib import closing

from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.protocols import Source
from ckpttool.layout import rechunk
from ckpttool.models.ties import beginning, same_bytes
from ckpttool.storage.files import Pool
from ckpttool.transfer.read import read_tiles


def find_twins(source: Source, planned: Catalogue, *, everywhere: bool = False) -> dict[Path, Path]:
    """Return the tensors of a model that have the bytes of a parameter, each with that parameter.

    Tensors of which all elements are one are left out: a mean of zeros is not a bias of zeros.
    """
    twins: dict[Path, Path] = {}
    begins: dict[Path, bytes] = {}
    with closing(Pool()) as pool:

        def begin(tensor: Tensor) -> bytes:
            if tensor.path not in begins:
                begins[tensor.path] = beginning(source, pool, tensor.origin or tensor)
            return begins[tensor.path]

        for tensor, parameters in rechunk.possible_twins(planned, everywhere=everywhere):
            for parameter in parameters:
                one, other = begin(tensor), begin(parameter)
                may_be_same = one.startswith(other) or other.startswith(one)
                if may_be_same and same_bytes(source, tensor, parameter) and not _is_constant(source, tensor, pool):
                    twins[tensor.path] = parameter.path
                    break
    return twins


def _is_constant(source: Source, tensor: Tensor, pool: Pool) -> bool:
    """Return whether all elements of a tensor are the same. Reads up to the first that differs."""
    first = None
    for _, bits in read_tiles(tensor.origin or tensor, source, pool):
        first = bits.flat[0] if first is None else first
        if (bits != first).any():
            return False
    return True
