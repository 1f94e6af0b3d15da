"""Directories with random contents under random names: every tensor comes out of a conversion, or nothing is written.

What was saved is remembered by its digests; what was written is loaded by torch and DCP.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_leaves

import ckpttool
from ckpttool.errors import CkptError

NAMES = """
    model optimizer state ckpt net G netD optG policy critic ema teacher scheduler rng trainer_state extra_state buffer
    stats config args metadata scaler loader unet vae weights averages history best final step x 0 sub/model 0/critic
    a/b/net rank_0/state checkpoint/net pretrained/model
""".split()  # noqa: SIM905
STEPS = ("step_{}/", "checkpoint-{}/", "{}/", "ckpt_{:06}_", "model_step{}_", "e{}_")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
Digests = Counter[tuple[str, tuple[int, ...], str]]


class Directory:
    """A directory, and the digests of the tensors that are to come out of it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.random, self.saved = path, random.Random(seed), Digests()
        torch.manual_seed(seed)

    def tensor(self) -> torch.Tensor:
        shape = [self.random.randint(1, 5) for _ in range(self.random.randint(0, 3))]
        return torch.randint(0, 100, shape).to(self.random.choice(DTYPES))

    def model(self) -> dict[str, torch.Tensor]:
        rows = self.random.randint(1, 5)
        names = self.random.sample(["embed", "blocks.0.attn", "blocks.1.mlp", "norm", "head", "mu"], 3)
        return {f"{name}.weight": torch.randn(rows, self.random.randint(1, 5)) for name in names}

    def optimizer(self) -> dict[str, Any]:
        parameters = [torch.nn.Parameter(tensor) for tensor in self.model().values()]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = self.random.choice([torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])(parameters)
        optimizer.step()
        state: dict[str, Any] = optimizer.state_dict()
        return state

    def contents(self) -> dict[str, Any]:
        """A model, an optimizer, values, or a training state of all of them."""
        values = {self.random.choice(["lr", "queue", "mean", "step"]): self.tensor(), "best": self.random.random()}
        kinds: list[Callable[[], dict[str, Any]]] = [self.model, self.optimizer, lambda: values]
        kinds.append(
            lambda: {"model": self.model(), "optimizer": self.optimizer(), "epoch": 3, "more": [self.tensor()]}
        )
        return self.random.choice(kinds)()

    def save(self, name: str, suffix: str, contents: dict[str, Any]) -> None:
        path = self.path / name
        if any(one.name.partition(".")[0] == path.name for one in path.parent.glob("*")) or path.parent.is_file():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = [one for one in tree_leaves(contents) if isinstance(one, torch.Tensor)]
        if suffix == "dcp":
            dcp.save(contents, checkpoint_id=path, no_dist=True)
        elif suffix == ".safetensors":
            save_file({f"t.{i}": one.contiguous() for i, one in enumerate(tensors)}, f"{path}{suffix}")
        elif suffix in (".npz", ".pkl"):
            tensors = [one for one in tensors if one.dtype != torch.bfloat16] or [torch.ones(2)]
            arrays = {f"a{i}": one.numpy() for i, one in enumerate(tensors)}
            np.savez(f"{path}.npz", **arrays) if suffix == ".npz" else Path(f"{path}.pkl").write_bytes(
                pickle.dumps(arrays)
            )
        else:
            torch.save(contents, f"{path}{suffix}")
        self.saved += digests(tensors)

    def add(self) -> None:
        suffix = self.random.choice(["", ".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".pkl", "dcp"])
        self.save(self.random.choice(NAMES), suffix, self.contents())

    def add_steps(self) -> None:
        """Write the same files for each of a few steps; those of the last are to come out."""
        template = self.random.choice(STEPS)
        files = {
            name: self.random.choice([".pt", ".pth", ".safetensors", "dcp"]) for name in self.random.sample("uvw", 2)
        }
        for step in range(10, self.random.choice([20, 40]), 10):
            self.saved.clear()
            for name, suffix in files.items():
                torch.manual_seed(self.random.randint(0, 99))
                self.save(template.format(step) + name, suffix, {name: torch.randn(3, 4), "step": torch.tensor(step)})


def digests(values: Any) -> Digests:
    """Return how many tensors and arrays have the same bytes; the same one counts each time."""
    tensors = (torch.from_numpy(one) if isinstance(one, np.ndarray) else one for one in tree_leaves(values))
    of = [
        (str(t.dtype), tuple(t.shape), t.reshape(-1).view(torch.uint8)) for t in tensors if isinstance(t, torch.Tensor)
    ]
    return Counter((dtype, shape, hashlib.sha256(data.numpy().tobytes()).hexdigest()) for dtype, shape, data in of)


@pytest.mark.parametrize("target", ["torch", "dcp", "same"])
@pytest.mark.parametrize("is_run", [False, True], ids=["parts", "run"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 60))])
def test_nothing_in_a_random_directory_is_lost(seed: int, is_run: bool, target: str, tmp_path: Path) -> None:
    source = Directory(tmp_path / "source", seed)
    source.path.mkdir()
    if is_run:
        source.add_steps()
    for _ in range(source.random.randint(0 if is_run else 1, 4)):
        source.add()
    out = tmp_path / ("out.pt" if target == "torch" else "out")
    try:
        how: dict[str, Any] = {"producer": "same"} if target == "same" else {"to": target}
        ckpttool.convert(source.path, out, **how)
    except CkptError as error:
        # It names what it stops at, and leaves nothing behind.
        assert str(source.path) in str(error) or any(name.partition("/")[0] in str(error) for name in NAMES), error
        assert not out.exists()
        return
    if target == "same":
        ckpttool.convert(out, tmp_path / "again.pt", to="torch")
        out = tmp_path / "again.pt"
    elif target == "dcp":
        dcp_to_torch_save(out, tmp_path / "loaded.pt")
        shutil.rmtree(out)
        out = tmp_path / "loaded.pt"
    written = digests(torch.load(out, weights_only=False))
    assert not source.saved.keys() - written.keys()
