"""Starts torchtitan's trainer on a CPU: `titan_on_cpu.py WORD...`.

Stubbed are: what it asks of `torch.cuda`, which is asked of `torch.cpu`; flex attention, which has no backward on a
CPU, by dense attention with the same mask; `torch.distributed.set_timeout`, of a later torch, which does nothing; and
how FSDP2 scales gradients on several ranks, which is by sums, since gloo has no `PREMUL_SUM`.
"""

import runpy
import types
from typing import Any

import torch

torch._utils._get_available_device_type = lambda: "cpu"
for name in ("reset_peak_memory_stats", "empty_cache", "set_device"):
    setattr(torch.cpu, name, lambda *args, **kwargs: None)
torch.cpu.get_device_name = lambda *args: "cpu"  # type: ignore[attr-defined]
torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]
torch.cpu.get_device_properties = lambda *args: types.SimpleNamespace(total_memory=1 << 34, name="cpu")
torch.cpu.memory_stats = lambda *args: {}
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda *args, **kwargs: None

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.nn.attention.flex_attention import create_mask  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402


def dense(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **rest: Any) -> Any:
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, types.SimpleNamespace(lse=torch.zeros(q.shape[:-1]))


def divide(module: Any, factor: float) -> None:
    set_divide_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


set_divide_factor = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = divide  # type: ignore[method-assign]
FlexAttention._compiled_flex_attn = staticmethod(dense)
runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
