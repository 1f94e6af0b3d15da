"""Sharded tensors that lie: about their size, about the ranks of their mesh, and about whose part they are."""

from __future__ import annotations

from collections.abc import Sequence

from support.lying_files import file, integer, lie, saved, tree
from support.lying_shards import dtensor, items, mesh, placement, replicate, sharded, spec


def on_ranks(ranks: Sequence[int], shape: tuple[int, int], rank: int = 0, at: int = 0, *, is_cut: bool = True) -> bytes:
    """A DTensor whose local tensor is [2, 3], on a mesh of these ranks."""
    made = mesh((len(ranks),), items(map(integer, ranks)), (at,), rank=rank)
    return dtensor(spec(made, placement() if is_cut else replicate()), shape)


FAR = r"tensor `w`: its mesh has rank -?\d+, not one of at most 1048576 ranks"
TWICE = r"tensor `w`: its mesh \(.*\) has a rank twice"
LARGE = r"tensor `w`: a tensor with a size of 2\*\*63 or more"
NAMES = ("ckpt.pt", "model_world_size_1_rank_0.pt")

for name, value, pattern in (
    ("rank 2**31", on_ranks([2**31], (2, 3), 2**31), FAR),
    ("rank 2**63", on_ranks([2**63], (2, 3), 2**63), FAR),
    ("rank 2**31 on a mesh of two", on_ranks([0, 2**31], (4, 3)), FAR),
    ("its own rank is 2**31, on a mesh without it", on_ranks([0], (2, 3), 2**31), FAR),
    ("rank -1", on_ranks([0], (2, 3), -1), FAR),
    ("a rank twice", on_ranks([0, 0], (4, 3)), TWICE),
    ("a rank twice, the second of them", on_ranks([0, 0], (4, 3), at=1), TWICE),
    ("a rank twice, replicated", on_ranks([0, 0], (2, 3), is_cut=False), TWICE),
    ("another rank twice, replicated", on_ranks([0, 1, 1], (2, 3), is_cut=False), TWICE),
    ("a DTensor of size 2**63", on_ranks([0], (2, 2**63)), LARGE),
    ("a ShardedTensor of size 2**63", sharded((2**63, 3)), LARGE),
    ("a ShardedTensor of size 2**63 on two ranks", sharded((2**63, 3), world=2), LARGE),
    ("a ShardedTensor of size 2**70", sharded((2**70, 3)), LARGE),
    ("a shard at 2**63", sharded((2**64, 3), (2**63, 0)), LARGE),
):
    for file_name in NAMES:
        lie(f"mesh: {name}, in {file_name}", file(file_name, saved(tree(w=value))), pattern)

# What lies elsewhere, or is not there: the file can be shown.
PART = r"the part of rank \d+ of a checkpoint of \d+ ranks: the rest is in no file|no file of ranks? [\d, -]+ of \d+"
for name, value, pattern in (
    ("rank 7 of one", on_ranks([0], (2, 3), 7), PART),
    ("a ShardedTensor of 2**124 elements", sharded((2**62, 2**62)), "tensor `w` .* is not covered exactly"),
    (
        "a shard outside of its tensor",
        sharded((2, 3), (1, 0)),
        "tensor `w` .* is not covered exactly: .* reaches outside",
    ),
    ("the first of 2**20 ranks", sharded((4, 3), world=1 << 20), PART + "|is not covered exactly"),
    ("rank 5 of 8", sharded((4, 3), rank=5, world=8), PART + "|is not covered exactly"),
):
    for file_name in NAMES:
        lie(f"mesh: {name}, in {file_name}", file(file_name, saved(tree(w=value))), pattern, late=True)
