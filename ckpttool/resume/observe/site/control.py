"""Leaves out one part of what a script has restored, so that a comparison is seen to notice it.

How many tensors, generators, schedulers and batches it has changed is recorded. It acts where training goes on, after
all that the script itself restores.
"""

import random
import sys
from collections.abc import Iterator
from typing import Any

from .state import living, local, rank, write

_SEED = 987_654_321


class Perturbation:
    """Changes one part of the state of a process, on each rank what this rank has of it:

    moments     the tensors of each optimizer are zero where its first step begins; its step counters stay
    rng         the generators of random, numpy and torch are seeded anew at each forward pass up to the first step
    scheduler   the schedulers of torch, and learning rates of their optimizers, are at their start
    loader      the first batch that a DataLoader gives is dropped
    weights     one element of the first weight with a gradient is another
    """

    def __init__(self, what: str, folder: str, torch: Any) -> None:
        self._what, self._folder, self._torch = what, folder, torch
        self._count, self._stepped = 0, set[int]()

    def control_forward(self) -> None:
        """Act where a forward pass begins: numbers are drawn in it. One that comes before the restore may be undone."""
        if self._what == "rng" and not self._stepped:
            self._add(self._seed())

    def control_step(self, optimizer: Any) -> None:
        """Act where the first step of an optimizer begins that trains."""
        is_first, is_own = not self._stepped, id(optimizer) not in self._stepped
        with self._torch.no_grad():
            if self._what == "moments" and is_own:
                self._add(sum(map(self._clear, _moments(self._torch, optimizer))))
            elif self._what == "rng" and is_first:
                self._add(self._seed())
            elif self._what == "scheduler" and is_first:
                self._add(sum(map(_restart, living(self._torch.optim.lr_scheduler.LRScheduler)[0])))
            elif self._what == "weights" and not self._count:
                self._add(self._change(optimizer))
        self._stepped.add(id(optimizer))

    def control_fetch(self) -> bool:
        """Return whether the batch that comes is dropped."""
        if self._what != "loader" or self._count or not self._torch.is_grad_enabled():
            return False
        self._add(1)
        return True

    def _seed(self) -> int:
        seed = _SEED + 1_000 * self._count + rank(self._torch)
        random.seed(seed)
        self._torch.manual_seed(seed)  # of all devices
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)
        return 2 + (numpy is not None)

    def _clear(self, tensor: Any) -> int:
        own = local(tensor)
        is_set = bool(own.any())
        own.zero_()
        return int(is_set)

    def _change(self, optimizer: Any) -> int:
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            own = local(parameter.detach())
            if parameter.grad is not None and own.is_floating_point() and own.numel():
                first = own[(0,) * own.dim()]
                first.copy_(first + 0.1 * max(1.0, abs(float(first))))
                return 1
        return 0

    def _add(self, count: int) -> None:
        self._count += count
        write(self._folder, {"changed": count})


def _moments(torch: Any, optimizer: Any) -> Iterator[Any]:
    """Yield the tensors of an optimizer's state, in lists too, but for its step counters."""
    for parameter, state in optimizer.state.items():
        size = parameter.numel() if isinstance(parameter, torch.Tensor) else 0
        for key, value in state.items() if isinstance(state, dict) else ():
            for one in torch.utils._pytree.tree_leaves(value):
                if isinstance(one, torch.Tensor) and key != "step" and (one.numel() > 1 or size == 1):
                    yield one


def _restart(scheduler: Any) -> int:
    """Set a scheduler and the learning rates of its optimizer to their start."""
    scheduler.last_epoch = 0
    for group in scheduler.optimizer.param_groups:
        initial = group.get("initial_lr")
        if initial is not None and hasattr(group["lr"], "fill_"):
            group["lr"].fill_(initial)
        elif initial is not None:
            group["lr"] = initial
    return 1
