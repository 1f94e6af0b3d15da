"""A training state with what a mesh finds hard: ties, buffers, scalars, odd dtypes and names, several groups."""

from __future__ import annotations

from typing import Any

import torch

FLOATS = ("float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")


def values(shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    """Different in every tensor, any bits."""
    values.seed += 1
    generator = torch.Generator().manual_seed(values.seed)
    kind = getattr(torch, dtype)
    size = torch.empty((), dtype=kind).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, size), generator=generator, dtype=torch.uint8)
    return raw.view(kind).reshape(shape) if dtype != "bool" else raw.reshape(shape).bool()


values.seed = 0  # type: ignore[attr-defined]


def model() -> dict[str, torch.Tensor]:
    """Parameters and buffers; `head.weight` is `embed.weight`."""
    made = {f"{kind}.weight": values((5, 3), kind) for kind in (*FLOATS, "complex64")}
    made |= {f"counts.{kind}": values((6, 2), kind) for kind in INTS}
    made |= {"embed.weight": values((11, 4)), "layers.0.up.weight": values((13, 4)), "layers.0.up.bias": values((13,))}
    made |= {"layers.0.down.weight": values((4, 6)), "layers.0.gate": values(()), "one.row": values((1, 8))}
    made |= {
        "rope": values((3,)),
        "seen": torch.tensor(7),
        "nothing.weight": torch.empty(0, 4),
        "deep.w": values((2, 3, 4)),
    }
    # What a module has of its own, what wrappers add, and what is not a name at all.
    made |= {
        "type": values((4, 2)),
        "up.forward": values((4, 2)),
        "_orig_mod.x": values((4, 2)),
        "a..b": values((4, 2)),
    }
    made |= {"modules.0": values((4, 2)), "both": values((4, 2)), "both.w": values((4, 2)), "x-y.1": values((4, 2))}
    made["head.weight"] = made["embed.weight"]
    return made


def groups(names: list[Any], tensor_lr: bool) -> list[dict[str, Any]]:
    """Three, of which two differ in a name only."""
    third = max(1, len(names) // 3)
    return [
        {"lr": 0.1, "betas": (0.9, 0.95), "initial_lr": 0.2, "name": "decay", "foreach": None, "params": names[:third]},
        {
            "lr": 0.1,
            "betas": (0.9, 0.95),
            "initial_lr": 0.2,
            "name": "none",
            "foreach": None,
            "params": names[third:-1],
        },
        {"lr": torch.tensor(0.3) if tensor_lr else 0.3, "betas": [0.9, 0.99], "name": "last", "params": names[-1:]},
    ]


def adamw(tensors: dict[str, torch.Tensor], *, by_number: bool = False) -> dict[str, Any]:
    """Moments of every parameter, some of another dtype than it, `step` a tensor; some factored ones."""
    names = [
        name for name, value in tensors.items() if value.is_floating_point() and name not in ("rope", "head.weight")
    ]
    state: dict[Any, Any] = {}
    for number, name in enumerate(names):
        shape = tuple(tensors[name].shape)
        kept = {"step": torch.tensor(3.0), "exp_avg": values(shape), "exp_avg_sq": values(shape), "kind": "adam"}
        if name == "float16.weight":
            kept["exp_avg"] = values(shape, "float8_e4m3fn")
        if name == "layers.0.up.weight":
            kept["row"] = values(shape[:1])  # factored, beside moments that are not
        if name == "layers.0.down.weight":
            kept = {"step": 3, "row": values(shape[:1]), "nested": {"factor": values((6, 6))}}
        if name != "type":  # not stepped yet
            state[number if by_number else name] = kept
    keys = list(range(len(names))) if by_number else names
    return {"state": state, "param_groups": groups(keys, not by_number)}


def sgd(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One group with momentum."""
    names = [name for name, value in tensors.items() if value.dtype == torch.float32 and value.dim() > 1]
    state = {name: {"momentum_buffer": values(tuple(tensors[name].shape))} for name in names if name != "head.weight"}
    return {"state": state, "param_groups": [{"lr": 0.1, "momentum": 0.9, "params": [*state]}]}


def whole() -> dict[str, Any]:
    """AdamW by names, an average of the weights with one of them, a scheduler, a step, values of ranks."""
    tensors = model()
    ema = {name: values(tuple(v.shape)) for name, v in tensors.items() if name.startswith("layers")}
    return {
        "model": tensors,
        "ema": {**ema, "layers.0.up.bias": tensors["layers.0.up.bias"]},
        "optim": adamw(tensors),
        "scheduler": {"last_epoch": 3, "base_lrs": [0.1, 0.1, 0.3], "lambdas": [{}]},
        "rng": {f"rank{rank}": {"torch": values((16,), "uint8"), "seed": rank} for rank in range(3)},
        "step": 1000,
        "empty": {},
        "history": [torch.arange(3.0), {"loss": 0.5}],
        "args": {"shape": (1, 2), "table": {(1, 2): tensors["rope"]}},
    }


def numbered() -> dict[str, Any]:
    """As `Optimizer.state_dict` numbers parameters."""
    tensors = {name: value for name, value in model().items() if name in ("embed.weight", "layers.0.up.weight", "rope")}
    return {"model": tensors, "optimizer": adamw(tensors, by_number=True), "step": 1}


def with_momentum() -> dict[str, Any]:
    """SGD."""
    tensors = model()
    return {"model": tensors, "optimizer": sgd(tensors)}
