"""Rank files: one torch.save file for each rank, which nothing but all of them together is the checkpoint of.

    rank0.pt              rank1.pt                    or model_world_size_2_rank_0.pt, optim_world_size_2_rank_0.pt, ...
      model                 model
        embed.weight          embed.weight            ShardedTensor or DTensor: rows 0..15 here, 15..29 there
        tokens_seen           tokens_seen             plain: the same in both
      optim ...             optim ...
      rng                   rng                       each rank's own

What writes them: `torch.save` of FSDP1's `SHARDED_STATE_DICT` (ShardedTensor; with a device mesh DTensor), of FSDP2 and
any other DTensor, on every rank, torch 2.0 to 2.15; verl, accelerate, OLMo, Composer. NO_SHARD and a world of one rank
save plain tensors. Names: see `sets`. Sharded tensors: see `sharded_pickle`. How ranks become one: see `merging`.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import Format, deferred

FORMAT = Format(
    name="rankfiles",
    title="one torch.save file per rank (FSDP1, FSDP2, DTensor)",
    recognise=deferred(f"{__name__}.discover", "recognise"),
    open=deferred(f"{__name__}.reader", "open"),
    create=deferred(f"{__name__}.writer", "create"),
    losses=deferred(f"{__name__}.writer", "losses"),
    chunked=True,
    to="fsdp1",
    even=True,
)
