"""The optimizer's spelling: how its state says which parameter it belongs to. Pure.

id     state {0: {exp_avg}}                    param_groups [{lr, params: [0, 1]}]          optimizer.state_dict()
fqn    state {"layers.0.w": {exp_avg}}         param_groups [{lr, params: ["layers.0.w"]}]  FSDP, get_state_dict
flat   "state.layers.0.w.exp_avg"              "param_groups.layers.0.w.lr"    flatten_optimizer_state_dict=True
"""

from __future__ import annotations

from ckpttool.catalogue import Catalogue

SPELLINGS = ("fqn", "id", "flat")


def respell(catalogue: Catalogue, spelling: str) -> Catalogue:
    """Every optimizer of the catalogue in the given spelling."""
    return catalogue
