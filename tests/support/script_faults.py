"""Faults of training scripts, each an edit of how they save or load, and what the cause has to be called.

`named` is a regular expression for the cause that `verify-resume run` reports.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScriptFault:
    """An edit of a script, `old` to `new`, and the name of the cause."""

    script: str
    name: str
    old: str
    new: str
    named: str

    def planted(self, text: str) -> str:
        """The text of the script with the fault in it."""
        assert text.count(self.old) == 1, (self.name, text.count(self.old))
        return text.replace(self.old, self.new)


_SINGLE = (
    (
        "optimizer not loaded",
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        "",
        "optimizer was not loaded",
    ),
    (
        "scheduler not loaded",
        '    scheduler.load_state_dict(checkpoint["scheduler"])\n',
        "",
        "scheduler was not restored",
    ),
    ("data not loaded", '    data.load_state_dict(checkpoint["dataloader"])\n', "", "data loader.*epoch 0 and not 1"),
    ("average not loaded", '    average = checkpoint["ema"]\n', "", r"`ema\..* were not restored"),
    ("torch's RNG", '    torch.set_rng_state(checkpoint["rng"]["torch"])\n', "", r"RNG state.*torch"),
    ("numpy's RNG", '    np.random.set_state(checkpoint["rng"]["numpy"])\n', "", r"RNG state.*numpy"),
    ("Python's RNG", '    random.setstate(checkpoint["rng"]["python"])\n', "", r"RNG state.*python"),
    (
        "moments swapped",
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        '    state = checkpoint["optimizer"]["state"]\n    state[1], state[2] = state[2], state[1]\n'
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        r"moments of `blocks.0.key.weight` and `blocks.0.query.weight` are swapped",
    ),
    (
        "second moments zero",
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        '    [one["exp_avg_sq"].zero_() for one in checkpoint["optimizer"]["state"].values()]\n'
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        r"moments.*not restored.*exp_avg_sq",
    ),
    (
        "step counters zero",
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        '    [one["step"].zero_() for one in checkpoint["optimizer"]["state"].values()]\n'
        '    optimizer.load_state_dict(checkpoint["optimizer"])\n',
        r"step counters.*not restored, its moments were",
    ),
    (
        "learning rate",
        '    iter_num = checkpoint["iter_num"]\n',
        '    iter_num = checkpoint["iter_num"]\n    for group in optimizer.param_groups:\n        group["lr"] = 1e-2\n',
        "learning rate of parameter group 0",
    ),
    (
        "buffer",
        '    model.load_state_dict(checkpoint["model"])\n',
        '    checkpoint["model"].pop("seen")\n    model.load_state_dict(checkpoint["model"], strict=False)\n',
        "buffers? .*model.seen",
    ),
    (
        "betas",
        '    iter_num = checkpoint["iter_num"]\n',
        '    iter_num = checkpoint["iter_num"]\n    optimizer.param_groups[0]["betas"] = (0.9, 0.999)\n',
        "`betas` of parameter group 0",
    ),
    (
        "weights rounded",
        '        "model": model.state_dict(),\n',
        '        "model": {name: value.bfloat16() for name, value in model.state_dict().items()},\n',
        r"weights of the model were not restored",
    ),
    (
        "one weight",
        '    model.load_state_dict(checkpoint["model"])\n',
        '    model.load_state_dict(checkpoint["model"])\n    model.blocks[1].up.weight.data[3, 2] *= 2\n',
        r"weights of the model were not restored \(`model.blocks.1.up.weight`\)",
    ),
)
_FSDP2 = (
    (
        "optimizer not loaded",
        'set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])',
        'model.load_state_dict(state["model"])\n    optimizer.state.clear()',
        "optimizer was not loaded",
    ),
    ("scheduler not loaded", '    scheduler.load_state_dict(state["scheduler"])\n', "", "scheduler was not restored"),
    (
        "data not loaded",
        'data.load_state_dict(state["dataloader"][f"rank{rank}"])',
        "pass",
        r"the data of rank 0, 1 restarted",
    ),
    (
        "data of rank 0 on all ranks",
        'data.load_state_dict(state["dataloader"][f"rank{rank}"])',
        "data.position = 4 * step",
        r"the data of rank 1|rank 1 has the batch of rank 0",
    ),
    (
        "RNG of rank 1",
        '        torch.set_rng_state(state["rng"][f"rank{rank}"])\n',
        '        torch.set_rng_state(state["rng"][f"rank{rank}"]) if rank == 0 else None\n',
        "RNG state of rank 1",
    ),
    ("RNG of all ranks", '        torch.set_rng_state(state["rng"][f"rank{rank}"])\n', "", "RNG state of rank 0, 1"),
    (
        "one parameter",
        "    set_state_dict(model",
        "    torch.nn.init.ones_(model.head.bias.to_local())\n"
        '    state["model"]["head.bias"] = model.state_dict()["head.bias"].clone()\n    set_state_dict(model',
        r"weights of the model were not restored \(`model.head.bias`\)",
    ),
    (
        "moments swapped",
        "    set_state_dict(model",
        '    own = state["optim"]["state"]\n    one, other = "layers.0.up.weight", "layers.1.up.weight"\n'
        "    own[one], own[other] = own[other], own[one]\n    set_state_dict(model",
        "are swapped",
    ),
    (
        "second moments zero",
        "    set_state_dict(model",
        '    [one["exp_avg_sq"].zero_() for one in state["optim"]["state"].values()]\n    set_state_dict(model',
        r"moments.*not restored.*exp_avg_sq",
    ),
    (
        "weight decay",
        '    step = state["step"]\n',
        '    step = state["step"]\n    optimizer.param_groups[0]["weight_decay"] = 0.0\n',
        "`weight_decay` of parameter group 0",
    ),
)
FAULTS = [
    *(ScriptFault("train_single.py", *row) for row in _SINGLE),
    *(ScriptFault("train_fsdp2.py", *row) for row in _FSDP2),
]
