"""Samples of torch.save files: the training state in every variant of the container."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from sample import sample
from torch.utils.serialization import config
from training import detached, extra, full_state, train

TORCH = "torch 2.13 `torch.save`"


def load(folder: Path) -> Any:
    """Read `ckpt.pt` with torch, which may run code of ours: the file was just written by us."""
    return torch.load(folder / "ckpt.pt", weights_only=False)


@sample(
    "torch/full",
    what="whole training state: model, AdamW, scheduler, RNG, step, extra",
    trap="tied weights, int keys, tuples, empty containers, inf and NaN, integers over 64 bits, a `Namespace`, NumPy",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_full(folder: Path) -> Any:
    """The state that most other samples save too."""
    state = full_state(train())
    torch.save(state, folder / "ckpt.pt")
    return state


@sample(
    "torch/model",
    what="bare `state_dict()`",
    trap="an `OrderedDict` with a `_metadata` attribute; tied head; 0-d integer and bool buffers; no root key",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_model(folder: Path) -> Any:
    """What tutorials tell people to save."""
    state = train().model.state_dict()
    torch.save(state, folder / "ckpt.pt")
    return state


def brief_state() -> dict[str, Any]:
    """The training state without the optimizer and the generators: for variants of the container."""
    run = train()
    return {"model": run.model.state_dict(), "scheduler": run.scheduler.state_dict(), "step": 3, "extra": extra()}


@sample(
    "torch/proto5",
    what="`pickle_protocol=5`",
    trap="as `torch/proto4`, and `BYTEARRAY8`",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
@sample(
    "torch/proto4",
    what="`pickle_protocol=4`",
    trap="short strings, sets, `STACK_GLOBAL`, frames, memo by `MEMOIZE`; `weights_only=True` refuses it",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_protocols(folder: Path) -> Any:
    """The pickle with opcodes that torch itself never writes by default."""
    values = {
        "set": {1, 2},
        "frozen": frozenset({3}),
        "bytes": b"\xff" * 300,
        "array": bytearray(b"x"),
        "long": "é" * 300,
    }
    state = {**brief_state(), "values": values}
    torch.save(state, folder / "ckpt.pt", pickle_protocol=int(folder.name[-1]))
    return state


@sample(
    "torch/buffer",
    what="saved to a `BytesIO`",
    trap="records lie under `archive/` instead of the name of the file",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_buffer(folder: Path) -> Any:
    """As uploads and object stores get it; the file name says nothing about the records."""
    state, buffer = brief_state(), io.BytesIO()
    torch.save(state, buffer)
    (folder / "ckpt.pt").write_bytes(buffer.getvalue())
    return state


@sample(
    "torch/nocrc",
    what="`set_crc32_options(False)`",
    trap="the CRC of every record is 0; Python's `zipfile` refuses the file",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_nocrc(folder: Path) -> Any:
    """Saved without checksums."""
    state = brief_state()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, folder / "ckpt.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    return state


@sample(
    "torch/align4096",
    what="`torch.utils.serialization.config.save.storage_alignment = 4096`",
    trap="payloads on page boundaries, padded by extra fields of the local headers",
    writer=TORCH,
    load=load,
    reference=False,
    strides=True,
)
def torch_align4096(folder: Path) -> Any:
    """Few tensors: each takes a page."""
    state = {"weight": torch.arange(35.0).reshape(5, 7), "bias": torch.arange(5.0), "step": torch.tensor(3)}
    with config.patch("save.storage_alignment", 4096):
        torch.save(state, folder / "ckpt.pt")
    return state


@sample(
    "torch/skip_data",
    what="saved under `torch.serialization.skip_data()`",
    trap="every record is there with its size, and is a hole under a CRC of 0: no weights were written",
    writer=TORCH,
    load=load,
    strides=True,
)
def torch_skip_data(folder: Path) -> Any:
    """The reference holds zeros, which is what the holes read as."""
    state = {"weight": torch.arange(35.0).reshape(5, 7), "bias": torch.arange(5, dtype=torch.bfloat16), "step": 3}
    with torch.serialization.skip_data():
        torch.save(state, folder / "ckpt.pt")
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped(folder: Path) -> Any:
    """Read `ckpt.pt` and take the wrappers' prefixes off the names."""
    state = load(folder)
    return {".".join(part for part in key.split(".") if part not in WRAPPERS): state[key] for key in state}


@sample(
    "torch/ddp",
    what="a state dict with the prefixes of wrappers at several depths",
    trap="`module.`, `_orig_mod.`, `_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`; the reference has none",
    writer="torch 2.13 `torch.save`; the names are put in by hand",
    load=unwrapped,
)
def torch_ddp(folder: Path) -> Any:
    """DistributedDataParallel over torch.compile over FSDP over activation checkpointing."""
    state = detached(train().model.state_dict())
    wrapped = {}
    for key, value in state.items():
        inner = key.replace("layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.")
        inner = inner.replace("layers.1.", "layers.1._checkpoint_wrapped_module._orig_mod.")
        wrapped[f"module._orig_mod.{inner}"] = value
    torch.save(wrapped, folder / "ckpt.pt")
    return state
