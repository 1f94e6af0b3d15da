"""Rank files: one torch.save file for each rank, which nothing but all of them together is the checkpoint of.

    rank0.pt              rank1.pt                    or model_world_size_2_rank_0.pt, optim_world_size_2_rank_0.pt, ...
      model                 model
        embed.weight          embed.weight            ShardedTensor or DTensor: rows 0..15 here, 15..29 there
        tokens_seen           tokens_seen             plain: the same in both
      optim ...             optim ...
      rng                   rng                       each rank's own

What writes them: `torch.save` of FSDP1's `SHARDED_STATE_DICT` (ShardedTensor; with a device mesh DTensor), of FSDP2 and
any other DTensor, on every rank, torch 2.0 to 2.15; verl, accelerate, OLMo, Composer. NO_SHARD and a world of one rank
save plain tensors. Names: see `sets`. Sharded tensors: see `containers/sharded`. How ranks become one: see `merging`.
"""

from __future__ import annotations

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import NO_HINTS, Format, Loss, OpenOptions, Sink, SinkOptions, Source

# What reads, merges and writes is imported on use: every command of the tool asks whether a path is a set.


def recognise(path: str) -> bool:
    """Whether these are rank files, or this is one."""
    from ckpttool.formats.rankfiles import discover

    return discover.recognise(path)


def open(path: str, options: OpenOptions = NO_HINTS) -> Source:
    """The catalogue of a set: of a directory, of the set that a file belongs to, or of a pattern.

    Raises ReadError when there are several, CorruptError for a file that is not whole.
    """
    from ckpttool.formats.rankfiles import discover, reader

    return reader.open_set(discover.find(path), options)


def _create(path: str, planned: Catalogue, options: SinkOptions) -> Sink:
    from ckpttool.formats.rankfiles import writer

    return writer.create(path, planned, options)


def _losses(catalogue: Catalogue, path: str) -> list[Loss]:
    from ckpttool.formats.rankfiles import writer

    return writer.losses(catalogue, path)


FORMAT = Format(
    name="rankfiles",
    title="one torch.save file per rank (FSDP1, FSDP2, DTensor)",
    recognise=recognise,
    open=open,
    create=_create,
    losses=_losses,
    chunked=True,
    to="fsdp1",
    even=True,
)
