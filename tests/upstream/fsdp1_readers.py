"""What FSDP1 makes of converted checkpoints, on all ranks of a world: readers of `read_on_ranks.py`.

The oracle is a set of rank files that FSDP1 itself saved in this world: it loads the full reference, saves sharded, and
loads that into a new model. A converted checkpoint goes into another new model. Both are compared piece by piece and
bit by bit, trained on the same batches, and compared again, with every loss.

    reader           FSDP1 with                                   a checkpoint loaded by
    fsdp1            use_orig_params=True                         torch.load of the rank's file
    fsdp1 flat       use_orig_params=False                        the same
    fsdp1 mesh       a device mesh without names, so DTensor      the same
    fsdp1 named      a device mesh with one                       the same
    fsdp1 dcp        use_orig_params=True                         dcp.load, load_sharded_optimizer_state_dict
    fsdp1 flat dcp   use_orig_params=False                        the same
    fsdp1 mesh api   a device mesh                                get_state_dict, dcp.load, set_state_dict
    fsdp1 and 2      FSDP1 to FSDP2 and back; see `read_and_migrate`
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from support import upstream_readers
from support.upstream_readers import detached, difference, hollow
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional
from training import Block, Run, Sizes, Transformer, seed

Told = Mapping[str, Any]
Meshes = Mapping[str, DeviceMesh]
STEPS = 3


def spoiled_model(told: Told) -> nn.Module:
    """A model that shares no value with the one that was saved."""
    seed(4321)
    model = Transformer(Sizes(**told["sizes"]))
    model.tokens_seen.fill_(-1)
    model.frozen.logical_not_()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(17.0)
    return model


def optimizer_over(named: list[tuple[list[str], nn.Parameter]], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW with the parameters in groups as they were saved, each parameter given with the names that it holds."""
    chosen = [[p for names, p in named if names[0] in group["params"]] for group in groups]
    return torch.optim.AdamW(
        [{"params": one, "weight_decay": 0.7} for one in chosen], lr=3.0, betas=(0.1, 0.2), eps=0.3
    )


def build(told: Told, meshes: Meshes, groups: list[dict[str, Any]]) -> Run:
    """FSDP1 over every block and the root."""
    reader = told["reader"]
    options: dict[str, Any] = {"use_orig_params": "flat" not in reader}
    if "mesh" in reader or "named" in reader:
        options["device_mesh"] = meshes["row" if "named" in reader else "plain"]
    wrapped = Fsdp(
        spoiled_model(told), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **options
    )
    named = [
        ([name.replace("_fsdp_wrapped_module.", "") for name in names_of(wrapped, name, parameter)], parameter)
        for name, parameter in wrapped.named_parameters()
    ]
    return with_scheduler(wrapped, optimizer_over(named, groups))


def names_of(model: nn.Module, name: str, parameter: nn.Parameter) -> list[str]:
    """The name of a parameter, or those of the parameters in a flat one."""
    if not name.endswith("_flat_param"):
        return [name]
    return [name.removesuffix("_flat_param") + fqn for fqn in parameter._fqns]  # type: ignore[attr-defined]


def with_scheduler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Run:
    """A run before its first step."""
    return Run(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=11, gamma=0.1))


def sharded(run: Run) -> dict[str, Any]:
    """What this rank saves."""
    with warnings.catch_warnings(), Fsdp.state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
        warnings.simplefilter("ignore")
        return {"model": run.model.state_dict(), "optim": Fsdp.optim_state_dict(run.model, run.optimizer)}


def load(run: Run, state: Mapping[str, Any], kind: StateDictType = StateDictType.SHARDED_STATE_DICT) -> None:
    """What a training script does with the state of its rank, or with a full one."""
    full = kind == StateDictType.FULL_STATE_DICT
    configs = (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)) if full else (None, None)
    with warnings.catch_warnings(), Fsdp.state_dict_type(run.model, kind, *configs):
        warnings.simplefilter("ignore")
        run.model.load_state_dict(state["model"])
        loaded = Fsdp.optim_state_dict_to_load(run.model, run.optimizer, state["optim"])
        run.optimizer.load_state_dict(loaded)


def load_file(run: Run, folder: str | Path) -> dict[str, Any]:
    """Load the file of this rank; the answer is what it has beside model and optimizer."""
    state = torch.load(Path(folder) / f"rank{dist.get_rank()}.pt", weights_only=False)
    load(run, state)
    return {key: value for key, value in state.items() if key not in ("model", "optim")}


def load_dcp(run: Run, folder: str | Path) -> None:
    """As the guides of FSDP1 have it: the model first, then the optimizer by its layout."""
    state: dict[str, Any] = {"model": sharded(run)["model"]}
    torch_dcp.load(state, checkpoint_id=folder)
    optim = load_sharded_optimizer_state_dict(state["model"], "optim", torch_dcp.FileSystemReader(folder))
    load(run, {**state, **optim})


def load_api(run: Run, folder: str | Path, beside: Mapping[str, Any]) -> None:
    """As FSDP2 has it, and FSDP1 with a mesh. Without one, torch 2.13 cannot load so what it saved itself."""
    model, optim = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optim": optim, **hollow(beside)}
    torch_dcp.load(state, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def train(run: Run, vocab: int) -> list[float]:
    """A few steps on batches that are the same on all ranks; the losses."""
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(vocab, (2, 5), generator=generator)
        loss = functional.cross_entropy(run.model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        losses.append(loss.item())
    return losses


def pieces(tree: Any) -> Any:
    """The same tree with what this rank has of every sharded tensor."""
    if isinstance(tree, ShardedTensor):
        return [shard.tensor for shard in tree.local_shards()]
    if isinstance(tree, DTensor):
        return tree.to_local()
    if isinstance(tree, Mapping):
        return {key: pieces(value) for key, value in tree.items()}
    return [pieces(value) for value in tree] if type(tree) is list else tree


def seen(run: Run) -> Any:
    """This rank's pieces of model and optimizer."""
    return detached(pieces(sharded(run)))


def read(told: Told, meshes: Meshes) -> str:
    """Load what was converted and what FSDP1 saved, and train on with both."""
    reference = upstream_readers.trusted(told["reference"])
    groups = reference["optim"]["param_groups"]
    make = partial(build, told, meshes, groups)
    theirs, ours = make(), make()
    own = upstreams_own(told, make, reference)
    load_file(theirs, own)
    beside = {key: value for key, value in reference.items() if key not in ("model", "optim")}
    rest: Any = beside
    if told["reader"].endswith("dcp"):
        load_dcp(ours, told["path"])
    elif told["reader"].endswith("api"):
        load_api(ours, told["path"], beside)
    else:
        rest = load_file(ours, told["path"])
    said = difference(seen(ours), seen(theirs))
    if said == "equal":
        said = difference(rest, beside)
    if said != "equal":
        return f"as loaded: {said}"
    vocab = Sizes(**told["sizes"]).vocab
    losses = train(ours, vocab), train(theirs, vocab)
    if losses[0] != losses[1]:
        return f"losses {losses[0]} and {losses[1]}"
    said = difference(seen(ours), seen(theirs))
    return said if said == "equal" else f"after {STEPS} steps: {said}"


def upstreams_own(told: Told, make: Callable[[], Run], reference: Mapping[str, Any]) -> Path:
    """The rank files that FSDP1 saves in this world once it has loaded the full reference."""
    folder = Path(told["scratch"]) / f"own-{told['reader']}-{dist.get_world_size()}"
    run = make()
    load(run, copy.deepcopy(dict(reference)), StateDictType.FULL_STATE_DICT)
    save(sharded(run), folder)
    return folder


def save(state: Any, folder: Path) -> None:
    """A file for each rank, all of them there when this returns."""
    folder.mkdir(exist_ok=True, parents=True)
    torch.save(state, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()


# FSDP1 to FSDP2 and back ----------------------------------------------------------------------------------------------


def converted(source: Path, target: Path, *options: str) -> None:
    """One command, on rank 0."""
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "ckpttool", "convert", str(source), str(target), *options]
        # What torchrun has started has its variables from the start, which a command sees; a forked rank does not.
        own = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            (target.parent / "failed").write_text(done.stderr)
    dist.barrier()
    failed = target.parent / "failed"
    if failed.exists():
        raise RuntimeError(failed.read_text())


def fsdp2_run(told: Told, meshes: Meshes, groups: list[dict[str, Any]]) -> Run:
    """FSDP2 over every block and the root."""
    model = spoiled_model(told)
    for layer in model.layers:
        fully_shard(layer, mesh=meshes["row"])
    fully_shard(model, mesh=meshes["row"])
    return with_scheduler(model, optimizer_over([([n], p) for n, p in model.named_parameters()], groups))


def whole(run: Run) -> Any:
    """Model and optimizer as torch gathers them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optim = get_state_dict(run.model, run.optimizer, options=StateDictOptions(full_state_dict=True))
    optim["state"] = dict(sorted(optim["state"].items()))
    return detached({"model": dict(model), "optim": optim})


def read_and_migrate(told: Told, meshes: Meshes) -> str:
    """FSDP1 saves, FSDP2 goes on as FSDP1 does; FSDP2 saves, FSDP1 goes on as FSDP2 does. All ranks see one batch."""
    reference, vocab = upstream_readers.trusted(told["reference"]), Sizes(**told["sizes"]).vocab
    groups = reference["optim"]["param_groups"]
    # torch finds the saved group of a group by its parameters: one without any would get nothing back.
    names = [name for group in groups for name in group["params"]]
    for group, light in zip(groups, (False, True), strict=True):
        group["params"] = [name for name in names if light == (reference["model"][name].ndim < 2)]
    folder = Path(told["scratch"]) / f"migrated-{dist.get_world_size()}"
    first = build(told, meshes, groups)
    load(first, copy.deepcopy(dict(reference)), StateDictType.FULL_STATE_DICT)
    around = {"scheduler": first.scheduler.state_dict(), "step": 3, "rng": {"torch": torch.get_rng_state()}}
    save({**sharded(first), **around}, folder / "fsdp1")
    converted(folder / "fsdp1", folder / "dcp", "--to", "dcp")

    second = fsdp2_run(told, meshes, groups)
    load_api(second, folder / "dcp", around)
    for what, one, other in (("loaded", first, second), ("trained on by FSDP2", first, second)):
        if what != "loaded" and (losses := (train(one, vocab), train(other, vocab))) and losses[0] != losses[1]:
            return f"losses {losses[0]} and {losses[1]}"
        said = difference(whole(other), whole(one))
        if said != "equal":
            return f"FSDP1 to FSDP2, {what}: {said}"

    model, optim = get_state_dict(second.model, second.optimizer)
    torch_dcp.save({"model": model, "optim": optim, "step": 6}, checkpoint_id=folder / "fsdp2")
    dist.barrier()
    converted(folder / "fsdp2", folder / "back", "--to", "fsdp1", "--to-world", str(dist.get_world_size()))
    third = build(told, meshes, groups)
    load_file(third, folder / "back")
    said = difference(whole(third), whole(second))
    if said != "equal":
        return f"FSDP2 to FSDP1, loaded: {said}"
    if (losses := (train(third, vocab), train(second, vocab))) and losses[0] != losses[1]:
        return f"losses {losses[0]} and {losses[1]}"
    said = difference(whole(third), whole(second))
    return said if said == "equal" else f"FSDP2 to FSDP1, trained on: {said}"


READERS: dict[str, Callable[[Told, Meshes], str]] = {
    **dict.fromkeys(
        ("fsdp1", "fsdp1 flat", "fsdp1 mesh", "fsdp1 named", "fsdp1 dcp", "fsdp1 flat dcp", "fsdp1 mesh api"), read
    ),
    "fsdp1 and 2": read_and_migrate,
}
