"""DeepSpeed: a directory of torch.save files, of ZeRO, where each rank has its piece of the optimizer, or universal.

    mp_rank_00_model_states.pt                    ZeRO 0, 1, 2: module in 16 bits, shapes, counters, what the user added
    zero_pp_rank_{dp}_mp_rank_00_model_states.pt  ZeRO 3: the same, without the elements of partitioned parameters
    [bf16_]zero_pp_rank_{dp}_mp_rank_00_optim_states.pt      a rank's pieces of float32 weights and optimizer state
    layer_0_expert_{e}_mp_rank_00_model_states.pt  an expert in 16 bits; its float32 weights are in the pieces
    zero/{name}/fp32.pt exp_avg.pt exp_avg_sq.pt  universal, in place of those: one of each parameter

What comes out has the names of any other checkpoint: `model`, `optimizer` under names of parameters, `lr_scheduler`,
`loss_scaler`, counters. Names of files: see `members`. Where parameters lie in the pieces: see
`flat.zero_partitions`.

Upstream: DeepSpeed 0.19 `runtime/engine.py` (`_common_checkpoint_state`), `runtime/zero/stage_1_and_2.py` and
`stage3.py` (`state_dict`), `runtime/bf16_optimizer.py`, `utils/zero_to_fp32.py`, `checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import Format, deferred

FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed directory, ZeRO or universal",
    recognise=deferred(f"{__name__}.members", "recognise"),
    open=deferred(f"{__name__}.reader", "open"),
    any_state=True,
    marks="DeepSpeed's `*_model_states.pt`",
)
