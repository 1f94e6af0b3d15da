"""Finds tensors that share their bytes: tied weights, and optimizer state that was overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.warning import Warning
from ckpttool.text import some


def find_aliases(tensors: Iterable[Tensor]) -> dict[Path, Path]:
    """Return the path of the first tensor with the same extents, for each later one. Tensors without elements
    have no bytes to share. An alias has the same dtype, shape and boxes too: a transposed view of the same storage is
    another tensor, and so are the same bytes in another order."""
    # Of a million tensors few begin where another one does.
    tensors = [tensor for tensor in tensors if tensor.chunks.file]
    begins = [(chunks := tensor.chunks).offset[0] << 20 | chunks.file[0] for tensor in tensors]
    if len({*begins}) == len(begins):
        return {}
    seen: set[int] = set()
    repeated = {begin for begin in begins if begin in seen or seen.add(begin)}  # type: ignore[func-returns-value]
    first: dict[tuple[object, ...], Path] = {}
    aliases: dict[Path, Path] = {}
    for tensor, begin in zip(tensors, begins, strict=True):
        if begin not in repeated or not tensor.numel:
            continue
        c = tensor.chunks
        boxes_and_codecs = map(tuple, (c.offsets, c.sizes, c.strides.items(), c.codecs.items()))
        places = (column.tobytes() for column in (c.file, c.offset, c.nbytes))
        kept = first.setdefault((tensor.dtype.name, tensor.shape, *boxes_and_codecs, *places), tensor.path)
        if kept != tensor.path:
            aliases[tensor.path] = kept
    return aliases


def one_moment_for_two(catalogue: Catalogue, aliases: Mapping[Path, Path]) -> list[Warning]:
    """Return a word about optimizer state of which two kinds (`exp_avg`, `exp_avg_sq`) are the same bytes. No optimizer
    has that. `full_optim_state_dict` of FSDP1, and `FSDP.optim_state_dict` with `offload_to_cpu`, write it on CPUs:
    what was gathered last, for all."""
    names = {_owner(path) for path, kept in aliases.items() if _owner(path) == _owner(kept) and path[-1] != kept[-1]}
    state = (catalogue.tensor(path) for path in aliases if _owner(path) in names)
    shared = [tensor.name for tensor in state if tensor.part.kind == "optimizer" and tensor.numel > 1]
    if not shared:
        return []
    text = (
        f"the optimizer's state is wrong: {len(shared)} moments are the same bytes as another one of their "
        f"parameter ({some(shared)}); FSDP1 saves that of a full state dict on CPUs"
    )
    return [Warning("suspect-values", text)]


def _owner(path: Path) -> Path:
    """Return the path of the parameter of optimizer state: all but the last key, or but the last word of a flat one."""
    last = path[-1] if path else ""
    return (*path[:-1], last.rpartition(".")[0]) if isinstance(last, str) and "." in last else path[:-1]
