"""What is loaded on the ranks, and what it is compared with: torch's own gathering, at saving and after loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import error_cases
import practices
import runs
import state_cases
import torch
import torch.distributed as dist
import training_scripts
import wrappers
from support.upstream_readers import expected_of, path_of
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from training import Run, Sizes
from training_scripts import HOME, KINDS, detached, difference

import ckpttool


def groups_of(reference: dict[str, Any]) -> list[list[str]]:
    """The parameters of each group by name; where the optimizer has numbers, as `training.train` groups them."""
    groups = [list(group["params"]) for group in reference["optim"]["param_groups"]]
    if any(isinstance(name, str) for group in groups for name in group):
        return groups
    model = training_scripts.bare(training_scripts.sizes_of(reference["model"]))
    named = list(model.named_parameters())
    if len(groups) == 1:
        return [[n for n, _ in named]]
    return [[n for n, p in named if p.ndim >= 2], [n for n, p in named if p.ndim < 2]]


def by_name(optim: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """An optimizer's state by names, if it is by numbers."""
    names = [name for group in groups for name in group]
    state = {names[int(key)] if str(key).isdecimal() else key: value for key, value in optim["state"].items()}
    found = [{**group, "params": listed} for group, listed in zip(optim["param_groups"], groups, strict=True)]
    return {"state": state, "param_groups": found}


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """The order of parameters and of groups is the script's, not the checkpoint's."""
    optim = state["optim"]
    groups = [{**g, "params": sorted(g["params"])} for g in optim["param_groups"] if g["params"]]
    groups.sort(key=lambda group: group["params"])
    for group in groups:
        group.pop("param_names", None)
    return {
        "model": dict(sorted(state["model"].items())),
        "state": {name: dict(sorted(optim["state"][name].items())) for name in sorted(optim["state"])},
        "groups": [dict(sorted(group.items())) for group in groups],
    }


def sample(name: str, kind: str, strategy: str, device: str = "") -> str:
    """A sample into a fresh model and an optimizer that has not stepped."""
    reference = expected_of(name)
    if "optim" not in reference:
        return foreign(name, kind, strategy)
    groups = groups_of(reference)
    expected = {"model": reference["model"], "optim": by_name(reference["optim"], groups)}
    model = KINDS[kind](training_scripts.bare(training_scripts.sizes_of(reference["model"]), device))
    run = Run(model, training_scripts.optimizer_for(model, groups), None)
    loaded = ckpttool.load(path_of(name), run.model, run.optimizer, strategy=strategy)
    if loaded.missing or loaded.unexpected:
        return f"missing {loaded.missing}, unexpected {loaded.unexpected}"
    said = difference(comparable(training_scripts.whole(run)), comparable(detached(expected)))
    if said != "equal":
        return said
    if run.model.get_submodule("").training is not True:
        return "not training"
    return f"unchecked: {loaded.unchecked}" if loaded.unchecked else said


def foreign(name: str, kind: str, strategy: str) -> str:
    """A model alone, which may have less than the file."""
    expected = expected_of(name)
    expected = expected.get("model", expected)
    model = KINDS[kind](training_scripts.bare(training_scripts.sizes_of(expected)))
    loaded = ckpttool.load(path_of(name), model, strategy=strategy, strict=name != "safetensors/single")
    if loaded.missing:
        return f"missing {loaded.missing}"
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    # safetensors has a tied weight once.
    names = sorted(found.keys() & expected.keys())
    return difference(detached({n: found[n] for n in names}), detached({n: expected[n] for n in names}))


# Run directories whose names of the model are the model's, but for a prefix.
PREFIXED = {"run/lightning_w2": "model"}
# These leave out what a scheduler puts into the groups.
WITHOUT_INITIAL = ("run/torchtitan_w2", "run/olmo_core_w2")


def directory(name: str, kind: str, strategy: str) -> str:
    """What a framework left, with its optimizer."""
    reference = expected_of(name)
    for group in reference["optim"]["param_groups"] if name in WITHOUT_INITIAL else ():
        del group["initial_lr"]
    groups = [list(group["params"]) for group in reference["optim"]["param_groups"]]
    model = runs.Tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(17.0)
    model = KINDS[kind](model.to(HOME[0]))
    run = Run(model, training_scripts.optimizer_for(model, groups), None)
    loaded = ckpttool.load(path_of(name), run.model, run.optimizer, strategy=strategy, strip_prefix=PREFIXED.get(name))
    if loaded.missing or loaded.unexpected:
        return f"missing {loaded.missing}, unexpected {loaded.unexpected}"
    if loaded.unchecked:
        return f"unchecked: {loaded.unchecked}"
    return difference(comparable(training_scripts.whole(run)), comparable(detached(reference)))


def own_bytes(kind: str) -> str:
    """No rank reads much more than it holds, of a checkpoint that was cut in another way."""
    place = practices.folder() / "full.pt"
    sizes = Sizes(vocab=512, width=256, hidden=512, layers=2)

    def fresh(wrap: Callable[[Any], Any]) -> Run:
        model = wrap(training_scripts.bare(sizes))
        return Run(model, torch.optim.AdamW(model.parameters()), None)

    if dist.get_rank() == 0:
        run = fresh(lambda model: model)
        training_scripts.steps(run, sizes.vocab, 1)
        torch.save({"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}, place)
    dist.barrier()
    run = fresh(KINDS[kind])
    began = int(Path("/proc/self/io").read_text().split()[1])
    loaded = ckpttool.load(place, run.model, run.optimizer, strategy="parallel")
    really = int(Path("/proc/self/io").read_text().split()[1]) - began
    held = sum(map(_local_bytes, _held_by_fsdp1(run) if kind.startswith("fsdp1") else _held(run)))
    if not held <= loaded.bytes_read <= 1.05 * held:
        return f"{loaded.bytes_read} read, {held} held"
    if HOME[0].type != "cpu":
        return "equal"  # what a GPU's libraries read in the meantime is not known
    # The directory of the file and its pickle besides; libraries that are imported on the way count here too.
    return "equal" if really < 1.05 * held + (4 << 20) else f"{really} really read, {held} held"


def _local_bytes(value: Any) -> int:
    """Of a tensor, what this rank has."""
    if isinstance(value, ShardedTensor):
        return sum(shard.tensor.nbytes for shard in value.local_shards())
    return int((value.to_local() if isinstance(value, DTensor) else value).nbytes)


def _held_by_fsdp1(run: Run) -> list[Any]:
    """Its sharded state dicts, of a tied weight once."""
    with Fsdp.state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
        model = {name: value for name, value in run.model.state_dict().items() if name != "lm_head.weight"}
        state = Fsdp.optim_state_dict(run.model, run.optimizer)["state"]
    moments = [value for of in state.values() for value in of.values()]
    return [value for value in [*model.values(), *moments] if isinstance(value, (torch.Tensor, ShardedTensor))]


def _held(run: Run) -> list[torch.Tensor]:
    """A tied weight once, as it is kept."""
    kept = {id(p): p for p in [*run.model.parameters(), *run.model.buffers()]}
    moments = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [value.detach() for value in [*kept.values(), *moments]]


def casts(kind: str, strategy: str) -> str:
    """float32 into bfloat16, and dtypes that gloo does not send."""
    place = practices.folder() / "full.pt"

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(7, 9, dtype=torch.bfloat16)
            self.register_buffer("small", torch.zeros(3, 5).to(torch.float8_e4m3fn))
            self.register_buffer("counts", torch.zeros(6, dtype=torch.uint16))
            self.register_buffer("passing", torch.zeros(2), persistent=False)
            self.layers: list[torch.nn.Module] = []

    generator = torch.Generator().manual_seed(dist.get_world_size())
    state = {
        "linear.weight": torch.randn(9, 7, generator=generator),
        "linear.bias": torch.randn(9, generator=generator),
        "small": torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn),
        "counts": torch.arange(65530, 65536).to(torch.uint16),
    }
    if dist.get_rank() == 0:
        torch.save(state, place)
    dist.barrier()
    model = KINDS[kind](Odd().to(HOME[0]))
    ckpttool.load(place, model, strategy=strategy)
    found = dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=kind == "fsdp2")))
    expected = {name: v.bfloat16() if name.startswith("linear") else v for name, v in state.items()}
    return difference(detached({name: found[name] for name in state}), expected)


def apart(kind: str, strategy: str) -> str:
    """Parameters where models are, a buffer on the CPU."""
    run, place = practices.fresh(kind, trained=True), practices.folder() / "full.pt"
    run.model.frozen = run.model.frozen.cpu()
    expected = training_scripts.whole(run)
    if dist.get_rank() == 0:
        torch.save({"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}, place)
    dist.barrier()
    ours = practices.fresh(kind)
    ours.model.frozen = ours.model.frozen.cpu()
    ckpttool.load(place, ours.model, ours.optimizer, strategy=strategy)
    where = ours.model.frozen.device.type
    return difference(training_scripts.whole(ours), expected) if where == "cpu" else f"the buffer is on {where}"


def wide(kind: str, strategy: str) -> str:
    """Tensors so large that memory is used again for them, trained, with a module that keeps what it is given."""

    class Keeping(torch.nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
            self.kept = [state[f"{prefix}weight"]]  # a list, that it does not become a parameter
            super()._load_from_state_dict(state, prefix, *others)

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(5)
            self.layers = torch.nn.ModuleList(
                (Keeping if i == 1 else torch.nn.Linear)(211 - 7 * i, 190 - 3 * i) for i in range(8)
            )
            for parameter in self.parameters():
                torch.nn.init.normal_(parameter, generator=generator)

    place = practices.folder() / "wide.pt"
    first = Wide()
    trained = torch.optim.AdamW(first.parameters())
    sum(p.square().sum() for p in first.parameters()).backward()
    trained.step()
    if dist.get_rank() == 0:
        torch.save({"model": first.state_dict(), "optim": trained.state_dict()}, place)
    dist.barrier()
    model = KINDS[kind](Wide().to(HOME[0]))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ckpttool.load(place, model, optimizer, strategy=strategy)
    found, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    moments = dict(zip(first.state_dict(), trained.state_dict()["state"].values(), strict=True))
    said = difference(
        detached({"model": found, "optim": state["state"]}),
        detached({"model": dict(first.state_dict()), "optim": moments}),
    )
    # Filled in place by `parallel`, a module is given nothing.
    kept = getattr(model.layers[1], "kept", [])
    if kind == "plain" and not all(torch.equal(value, first.layers[1].weight) for value in kept):
        return "what a module keeps was used again for another"
    return said


def rounds(kind: str, format: str) -> str:
    """Saved by us and loaded by us, with a scheduler, a step and each rank's own generator."""
    saved, place = practices.fresh(kind, trained=True), practices.folder() / "saved"
    scheduler = torch.optim.lr_scheduler.StepLR(saved.optimizer, 2)
    mine = {"torch": torch.Generator().manual_seed(dist.get_rank()).get_state()}
    ckpttool.save(place, saved.model, saved.optimizer, format=format, scheduler=scheduler, step=7, rng=mine)
    run = practices.fresh(kind)
    state: dict[str, Any] = {
        "model": run.model, "optim": run.optimizer, "step": 0, "rng": {"torch": torch.zeros(5056, dtype=torch.uint8)},
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(run.optimizer, 11),
    }  # fmt: skip
    ckpttool.load_into(place, state)
    said = difference(state["rng"], mine)
    if said != "equal" or state["step"] != 7:
        return f"rng {said}, step {state['step']}"
    if state["lr_scheduler"].state_dict() != scheduler.state_dict():
        return f"{state['lr_scheduler'].state_dict()}"
    return practices.compare(saved, None, run)


CASES: dict[str, Callable[..., str]] = {
    f.__name__: f for f in (sample, foreign, directory, own_bytes, casts, apart, wide, rounds)
}
CASES |= practices.PRACTICES | error_cases.WRONGS | wrappers.OWN | state_cases.STATES
