"""Other state than a model and an optimizer, on several ranks: what `save` gathers and `load_into` fills in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import practices
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import training_scripts
from torch.distributed._shard.sharded_tensor import Shard as Shard_
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training_scripts import HOME, KINDS, difference

import ckpttool


def whole(number: int = 0) -> torch.Tensor:
    """A tensor that every rank knows."""
    return torch.arange(15.0).reshape(5, 3) + 100 * number


def sharded(number: int = 0, dim: int | None = 0) -> DTensor:
    """The same on all ranks, which do not divide it evenly."""
    mesh = init_device_mesh(HOME[0].type, (dist.get_world_size(),))
    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(whole(number).to(HOME[0]), mesh, [placement])


def blank(value: Any) -> Any:
    """The same with zeros."""
    return torch.zeros_like(value)


def everywhere() -> dict[str, Any]:
    """Sharded tensors wherever a state can have them."""
    return {
        "weights": sharded(1),
        "columns": {3: sharded(2, 1)},
        "replicated": sharded(3, None),
        "list": [sharded(4), torch.ones(2), 5],
        "tuple": (sharded(5), [sharded(6)], "x"),
    }


def expected(value: Any) -> Any:
    """What is to be in it, whole."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: expected(below) for key, below in value.items()}
    return type(value)(map(expected, value)) if isinstance(value, (list, tuple)) else value


class Average:
    """An object of the script with sharded tensors in its state."""

    def state_dict(self) -> dict[str, Any]:
        """As an exponential moving average has it."""
        return {"decay": 0.9, "shadow": everywhere()}


def gathered(kind: str, format: str) -> str:
    """Every DTensor of an average and of an object is whole in what torch reads."""
    run, place = practices.fresh(kind), practices.folder() / "saved"
    ckpttool.save(place, run.model, format=format, average=everywhere(), meter=Average())
    wanted = expected(everywhere())
    if format == "torch":
        found = torch.load(place, weights_only=False)
        with ckpttool.open(place) as opened:
            if opened.catalogue.faults or opened.catalogue.warnings:
                return f"{opened.catalogue.faults} {opened.catalogue.warnings}"
        said = difference(found["meter"]["shadow"], wanted)
        return said if said != "equal" else difference(found["average"], wanted)
    columns = {"3": blank(sharded(2, 1))}
    state = {"average": everywhere() | {"columns": columns, "weights": blank(sharded())}}
    torch_dcp.load(state, checkpoint_id=place)
    found = expected(state["average"])
    return difference({**found, "columns": {3: found["columns"]["3"]}}, wanted)


class Holder:
    """An object without a state dict."""

    def __init__(self, value: Any) -> None:
        self.value = value


def held(kind: str, format: str) -> str:
    """An object that pickles one rank's shards is refused on all, and nothing is written."""
    run, place = practices.fresh(kind), practices.folder() / "saved"
    try:
        ckpttool.save(place, run.model, format=format, holder={"a": Holder(sharded())})
    except ckpttool.CkptError as error:
        said = error.message
    else:
        return "it was saved"
    return "equal" if "`holder.a`: a Holder contains a DTensor" in said and not place.exists() else said


def fail(call: Callable[[], Any]) -> ckpttool.CkptError | None:
    """The error of a call, if it is one of ours, and the same in words on all ranks."""
    try:
        call()
    except ckpttool.CkptError as error:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, error.message)
        return error if set(every) == {error.message} else ckpttool.CkptError(f"the ranks say {every}")
    return None


def said(call: Callable[[], Any], *words: str) -> str:
    """What is wrong with the error of a call, or `equal`."""
    error = fail(call)
    missing = [word for word in words if error is None or word not in error.message]
    return f"no {missing} in {error.message if error else 'nothing'}" if missing else "equal"


def plain_state() -> dict[str, Any]:
    """As `dcp.load` takes one: tensors below the keys of models and optimizers, in lists, and alone."""
    return {
        "random": whole(1),
        "model": {"w": whole(2), "d": sharded(3)},
        "optim": {"state": {0: {"exp_avg": sharded(4, 1), "step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.5}]},
        "module": {"layers.0.w": whole(5)},
        "list": [sharded(6), whole(7)],
        "own": {"d": sharded(8, None), "n": 3},
    }


def zeroed(value: Any) -> Any:
    """The same with zeros for tensors and numbers."""
    if isinstance(value, dict):
        return {key: zeroed(below) for key, below in value.items()}
    if isinstance(value, list):
        return [*map(zeroed, value)]
    return blank(value) if isinstance(value, torch.Tensor) else 0


def tensors(value: Any) -> list[torch.Tensor]:
    """All that are in it."""
    if isinstance(value, torch.Tensor):
        return [value]
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for one in below for tensor in tensors(one)]


def in_place(format: str, strategy: str) -> str:
    """What `dcp.load` fills in place: the same tensors have the same elements after."""
    place = practices.folder() / "saved"
    if format == "dcp":
        torch_dcp.save(plain_state(), checkpoint_id=place)
    else:
        ckpttool.save(place, torch.nn.Linear(1, 1), format=format, nested=plain_state())
    state = zeroed(plain_state())
    given = state if format == "dcp" else {"nested": state}
    before = tensors(state)
    ckpttool.load_into(place, given, strategy=strategy)
    if any(one is not other for one, other in zip(before, tensors(state), strict=True)):
        return "a tensor was replaced"
    wanted = plain_state()
    if format == "dcp":
        wanted = zeroed(plain_state())
        torch_dcp.load(wanted, checkpoint_id=place)
    return difference(expected(state), expected(wanted))


def on_meta(format: str, strategy: str) -> str:
    """As `dcp.load`, tensors of the meta device get memory of their dtype, wherever they are; the others stay."""
    place = practices.folder() / "saved"
    torch_dcp.save(plain_state(), checkpoint_id=place)

    def state() -> dict[str, Any]:
        result = zeroed(plain_state())
        result["random"] = result["random"].to("meta", torch.bfloat16)
        result["model"] = {"w": result["model"]["w"].to("meta"), "d": result["model"]["d"].to("meta")}
        result["list"] = [result["list"][0].to("meta", torch.float64), result["list"][1].to("meta")]
        return result

    own, wanted = state(), state()
    ckpttool.load_into(place, own, strategy=strategy)
    torch_dcp.load(wanted, checkpoint_id=place)
    pairs = [*zip(tensors(own), tensors(wanted), strict=True)]
    if any(one.is_meta or (one.device, one.dtype) != (other.device, other.dtype) for one, other in pairs):
        return f"{[(one.device, one.dtype) for one, _ in pairs]}"
    return difference(expected(own), expected(wanted))


def other_sizes(format: str, strategy: str) -> str:
    """A tensor of another size is refused before one is filled."""
    place = practices.folder() / "saved"
    torch_dcp.save(plain_state(), checkpoint_id=place)
    state = zeroed(plain_state())
    state["optim"]["state"][0]["step"] = torch.zeros(3)
    wrong = said(lambda: ckpttool.load_into(place, state, strategy=strategy), "`optim.state.0.step`: [] in", "[3] here")
    return wrong if wrong != "equal" else difference(expected(state)["model"], expected(zeroed(plain_state()))["model"])


def other_sizes_at_root(format: str, strategy: str) -> str:
    """A tensor beside models and optimizers is not replaced by one of another size, as `dcp.load` does not either."""
    place, state = practices.folder() / "saved", {"random": torch.zeros(3)}
    ckpttool.save(place, practices.fresh("plain").model, format=format, random=torch.ones(5))
    wrong = said(lambda: ckpttool.load_into(place, state, strategy=strategy), "`random`: [5] in", "[3] here")
    return wrong if wrong != "equal" else difference(state, {"random": torch.zeros(3)})


def failed_stage(stage: str, format: str) -> str:
    """A step of `save` that fails on one rank between collectives, on each rank in turn."""
    module, _, name = stage.rpartition(".")
    for number in range(dist.get_world_size()):
        for kind in (MemoryError, ValueError):
            place = practices.folder() / f"saved-{number}-{kind.__name__}"
            state: dict[str, Any] = {
                "average": {"pair": (sharded(1), 1), "one": sharded(2)},
                "rng": torch.get_rng_state(),
            }
            run = practices.fresh("fsdp2")
            is_there = dist.get_rank() == number
            injected = mock.patch(f"{module}.{name}", side_effect=kind("no luck")) if is_there else nullcontext()
            with injected:
                saving = partial(ckpttool.save, place, run.model, format=format, **state)
                wrong = said(saving, "no luck")
            if wrong != "equal" or place.exists():
                return f"rank {number}, {kind.__name__}: {wrong}, {place.exists()}"
    return "equal"


class Scaler:
    """An object with nothing to save, as a `GradScaler` that is not enabled."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember it."""
        self.loaded.append(state)


def empty_state(format: str, strategy: str) -> str:
    """Of ours it is in the checkpoint; DCP leaves it out."""
    run, place = practices.fresh("fsdp2"), practices.folder() / "saved"
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    if format == "theirs":
        torch_dcp.save({"model": run.model.state_dict(), "scaler": {}, "b": {}, "c": {"d": {}}}, checkpoint_id=place)
    else:
        ckpttool.save(place, run.model, format=format, scaler=disabled, b=Scaler(), c={"d": {}})
    own = Scaler()
    state = {"model": run.model, "scaler": disabled, "b": own, "c": {"d": {}}}
    ckpttool.load_into(place, state, strategy=strategy)
    return "equal" if own.loaded == [{}] and state["c"] == {"d": {}} else f"{own.loaded} {state['c']}"


def before_the_first_step(kind: str, format: str) -> str:
    """What was saved is what a fresh optimizer has, and it is still that."""
    run, untouched, other = practices.fresh(kind), practices.fresh(kind), practices.fresh(kind, trained=True)
    place = practices.folder() / "saved"
    other.model.load_state_dict(run.model.state_dict())
    ckpttool.save(place, run.model, run.optimizer, format=format)
    ckpttool.load(place, other.model, other.optimizer)
    if run.optimizer.state or other.optimizer.state:
        return f"state of {len(run.optimizer.state)} and {len(other.optimizer.state)} parameters"
    losses = [training_scripts.steps(each, practices.SMALL.vocab) for each in (untouched, run, other)]
    return "equal" if losses[0] == losses[1] == losses[2] else f"{losses}"


def pair(width: int = 4, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with an optimizer that has stepped."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def values(*pairs: tuple[torch.nn.Module, torch.optim.Optimizer]) -> list[Any]:
    """Everything of models and optimizers."""
    return copy.deepcopy([(model.state_dict(), optimizer.state_dict()) for model, optimizer in pairs])


def nothing_changed(what: str, strategy: str) -> str:
    """Two models of which the second does not fit, or whose optimizer fails on the last rank: both are as they were."""
    place, last = practices.folder() / "saved", dist.get_rank() == dist.get_world_size() - 1
    if dist.get_rank() == 0:
        (model, optimizer), (other, second) = pair(lr=0.5), pair(lr=0.5)
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        torch.save({"a": state, "b": {"model": other.state_dict(), "optim": second.state_dict()}}, place)
    dist.barrier()
    one, two = pair(lr=0.1), pair(5 if what == "sizes" else 4, lr=0.1)
    words = ["[4, 3] in the checkpoint, [5, 3] in the model"]
    if what == "expanded":
        two[0][0].register_buffer("scale", torch.ones(1).expand(3))
        state = torch.load(place) if dist.get_rank() == 0 else {}
        if dist.get_rank() == 0:
            state["b"]["model"]["0.scale"] = torch.ones(3)
            torch.save(state, place)
        dist.barrier()
        words = ["`0.scale` is an expanded tensor"]
    if what.startswith("hook"):

        def hook(*_: Any) -> None:
            if last:
                raise ValueError("no luck")

        add = two[1].register_load_state_dict_pre_hook if what == "hook" else two[1].register_load_state_dict_post_hook
        add(hook)
        words = ["AdamW.load_state_dict failed: ValueError: no luck"]
    before = values(one, two)
    state = {k: {"model": of[0], "optim": of[1]} for k, of in (("a", one), ("b", two))}
    wrong = said(lambda: ckpttool.load_into(place, state, strategy=strategy), *words)
    if wrong != "equal":
        return wrong
    return difference(values(one, two), before)


def load_hook(kind: str, strategy: str) -> str:
    """A module's hook that fails on the last rank only: all ranks say it, and go on to the next case."""
    place = practices.folder() / "saved"
    run = practices.fresh("plain", trained=True)
    if dist.get_rank() == 0:
        torch.save({"model": run.model.state_dict()}, place)
    dist.barrier()
    model = practices.fresh(kind).model

    def hook(*_: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no luck")

    next(iter(model.children())).register_load_state_dict_post_hook(hook)
    return said(lambda: ckpttool.load(place, model, strategy=strategy), "rank 1: ", "no luck")


def late_hook(kind: str, strategy: str) -> str:
    """A hook of `state_dict` that fails only when it is called again, on the last rank."""
    place = practices.folder() / "saved"
    run = practices.fresh("plain", trained=True)
    if dist.get_rank() == 0:
        torch.save({"model": run.model.state_dict()}, place)
    dist.barrier()
    model, calls = practices.fresh(kind).model, []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 1 and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no luck")

    next(iter(model.children())).register_state_dict_pre_hook(hook)
    return said(lambda: ckpttool.load(place, model, strategy=strategy), "rank 1: ", "no luck")


def own_hook(call: str, what: str) -> str:
    """What of FSDP1's model is the script's own fails on the last rank, with modules below it yet to be gathered."""
    run, place = practices.fresh("fsdp1", trained=True), practices.folder() / "saved"
    ckpttool.save(place, run.model, run.optimizer)
    is_there, first = dist.get_rank() == dist.get_world_size() - 1, next(iter(run.model.modules()))

    def hook(*_: Any) -> Any:
        raise ValueError("no luck")

    if is_there and what == "optimizer":
        run.optimizer.register_state_dict_pre_hook(hook)
    elif is_there and what == "extra":
        run.model.__class__ = type("Extra", (type(run.model),), {"get_extra_state": hook})
    elif is_there:
        (first.register_state_dict_pre_hook if what == "before" else first.register_state_dict_post_hook)(hook)
    hooks = [*first._state_dict_pre_hooks.values(), *first._state_dict_hooks.values()]
    if call == "load":
        wrong = said(lambda: ckpttool.load(place, run.model, run.optimizer), "rank 1: ", "no luck")
    else:
        saving = partial(ckpttool.save, place.with_name("b"), run.model, run.optimizer, format=call, other=run.model)
        wrong = said(saving, "rank 1: ", "no luck")
    if hooks != [*first._state_dict_pre_hooks.values(), *first._state_dict_hooks.values()]:
        return "its hooks are others now"
    return wrong if not place.with_name("b").exists() else "it was saved"


def failed_step(step: str, kind: str, strategy: str) -> str:
    """A step of `load` that fails on one rank between collectives, on each rank in turn. The model and the optimizer,
    which have a state, are as they were, or the error says that they are not."""
    saved, place = practices.fresh("plain", trained=True), practices.folder() / "saved"
    ckpttool.save(place, saved.model, saved.optimizer)
    module, name = step.rsplit(".", 1)
    for number in range(dist.get_world_size()):
        run = practices.fresh(kind, trained=True)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(3)
        before = copy.deepcopy(training_scripts.whole(run))
        is_there = dist.get_rank() == number
        failing = mock.patch(f"ckpttool.training.{module}.{name}", side_effect=MemoryError("no luck"))
        with failing if is_there else nullcontext():
            error = fail(lambda run=run: ckpttool.load(place, run.model, run.optimizer, strategy=strategy))
        if error is None and number and strategy == "broadcast":
            continue  # only rank 0 reads
        if error is None or "no luck" not in error.message:
            return f"rank {number}: {error and error.message}"
        found = difference(training_scripts.whole(run), before)
        if found != "equal" and "hold a part of" not in (error.hint or ""):
            return f"rank {number}: {found}"
        if found != "equal" and module != "check_read":
            return f"rank {number}: changed by a step before the model is filled: {found}"
    return "equal"


def blind_rank(name: str, strategy: str) -> str:
    """The last rank cannot even look at the path, as on a mount that is stale."""
    place = practices.folder() / "saved"
    if dist.get_rank() == 0:
        torch.save({"model": practices.fresh("plain").model.state_dict()}, place)
    dist.barrier()

    def fail_there(*_: Any) -> Any:
        raise OSError(116, "Stale file handle")

    last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch(name, fail_there) if last else nullcontext():
        return said(
            lambda: ckpttool.load(place, practices.fresh("plain").model, strategy=strategy), "Stale file handle"
        )


def without_own(format: str, strategy: str) -> str:
    """On more ranks than have saved: what a rank has none of stays, and is named."""
    place = practices.folder() / "saved"
    if dist.get_rank() == 0:
        torch.save({"step": 3, "rng": {"rank0": {"torch": whole(1)}}, "dataloader": {"rank0": {"seen": 5}}}, place)
    dist.barrier()
    own = Scaler()
    state: dict[str, Any] = {"step": 0, "rng": {"torch": blank(whole())}, "dataloader": own}
    loaded = ckpttool.load_into(place, state, strategy=strategy)
    first = dist.get_rank() == 0
    found = state["step"], loaded.without_own, own.loaded, torch.equal(state["rng"]["torch"], whole(1))
    wanted = (3, [] if first else ["rng", "dataloader"], [{"seen": 5}] if first else [], first)
    return "equal" if found == wanted and not loaded.missing else f"{found}, {loaded.missing}"


def empty_moments(kind: str, strategy: str) -> str:
    """The first state of an optimizer that is sharded has no elements."""
    mesh = init_device_mesh(HOME[0].type, (dist.get_world_size(),))

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.ParameterDict()
        for name, value in (("a", torch.zeros(0, 3)), ("b", whole(2))):
            model[name] = torch.nn.Parameter(distribute_tensor(value.to(HOME[0]), mesh, [Shard(0)]))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    place = practices.folder() / "saved"
    model, optimizer = made()
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {"momentum_buffer": parameter.detach().clone() + number}
    ckpttool.save(place, model, optimizer)
    again, fresh = made()
    ckpttool.load(place, again, fresh, strategy=strategy)
    found = [fresh.state[p]["momentum_buffer"].full_tensor() for p in again.parameters()]
    return difference(found, [torch.zeros(0, 3), whole(2) + 1])


def other_arguments(name: str, value: str) -> str:
    """Ranks that pass other arguments are told, and nothing is loaded."""
    run, place = practices.fresh("plain"), practices.folder() / "saved"
    ckpttool.save(place, run.model, format="torch")
    last = dist.get_rank() == dist.get_world_size() - 1
    options: dict[str, Any] = {"strict": False} if name == "strict" else {name: value}
    if name in ("format", "extra"):
        options = {"ema": run.model} if name == "extra" else {"format": value}
        call = lambda: ckpttool.save(place.with_name("b"), run.model, **(options if last else {}))  # noqa: E731
        return said(call, "rank 1 passes other")
    if name == "optimizer":
        call = lambda: ckpttool.load(place, run.model, run.optimizer if last else None)  # noqa: E731
    elif name == "names":
        state = {"other" if last else "step": 0}
        call = lambda: ckpttool.load_into(place, {"model": run.model, **state}, strategy="broadcast")  # noqa: E731
    else:
        call = lambda: ckpttool.load(place, run.model, **(options if last else {}))  # noqa: E731
    return said(call, "there is no strategy" if value == "fastest" else "rank 1 passes other")


class Tied(torch.nn.Module):
    """Two names of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(17, 6)
        self.head = torch.nn.Linear(6, 17, bias=False)
        self.head.weight = self.embed.weight
        self.layers = torch.nn.ModuleList()


def untied(kind: str, strategy: str) -> str:
    """Two weights that are tied in the model: refused if they differ, by both names."""
    place = practices.folder() / "saved"
    weight = torch.arange(102.0).reshape(17, 6)
    for name, other in (("equal", weight), ("differ", weight + (torch.arange(17) == 16)[:, None])):
        if dist.get_rank() == 0:
            torch.save({"embed.weight": weight, "head.weight": other.clone()}, f"{place}-{name}")
    dist.barrier()
    model = KINDS[kind](Tied().to(HOME[0]))

    def found() -> dict[str, Any]:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return {name: value.detach().clone() for name, value in state.items()}

    before = found()
    words = ("`embed.weight` and `head.weight` are different tensors",)
    wrong = said(lambda: ckpttool.load(f"{place}-differ", model, strategy=strategy), *words)
    if wrong != "equal" or difference(found(), before) != "equal":
        return f"{wrong}, or it was changed"
    ckpttool.load(f"{place}-equal", model, strategy=strategy)
    return difference(found(), {"embed.weight": weight, "head.weight": weight})


def sharded_buffers(format: str, strategy: str) -> str:
    """Buffers on the meta device that are cut over a mesh, one of them in two modules, beside plain tensors."""
    place = f"{practices.folder()}/saved.pt"
    state = {"a.table": whole(1), "b.table": whole(1), "b.weight": whole(2), "c.table": whole(3)}
    if dist.get_rank() == 0:
        torch.save(state, place)
    dist.barrier()
    mesh = init_device_mesh(HOME[0].type, (dist.get_world_size(),))
    with torch.device("meta"):
        model = torch.nn.ModuleDict({name: torch.nn.Module() for name in "abc"})
        cut = [distribute_tensor(torch.empty(5, 3), mesh, [Shard(dim)], src_data_rank=None) for dim in (0, 1)]
        model["b"].weight = torch.nn.Parameter(torch.empty(5, 3))
    for name, value in zip("abc", (cut[0], cut[0], cut[1]), strict=True):
        model[name].register_buffer("table", value)
    ckpttool.load(place, model, strategy=strategy)
    if model["a"].table is not model["b"].table:
        return "a buffer of two modules is two buffers"
    found = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    return difference(found, state)


def unknown_class(kind: str, strategy: str) -> str:
    """A value of a class of the script's own is never made, and not replaced by something else."""
    place = practices.folder() / "saved"
    ckpttool.save(place, practices.fresh("plain").model, format="torch", config={"a": Holder(3)})
    state = {"config": {"a": 7}}
    wrong = said(lambda: ckpttool.load_into(place, state, strategy=strategy), "`config.a` has an object of the class")
    loaded = ckpttool.load_into(place, state, strategy=strategy, strict=False)
    return wrong if state == {"config": {"a": 7}} and loaded.missing == ["config.a"] else f"{state} {loaded.missing}"


def several_shards(kind: str, strategy: str) -> str:
    """A ShardedTensor of which each rank has two shards, as `dcp.load` fills it."""
    place, rank = practices.folder() / "saved", dist.get_rank()
    torch_dcp.save({"t": whole()}, checkpoint_id=place)
    bounds = (0, 1, 2, 4, 5)
    shards = []
    for low, high in ((bounds[i], bounds[i + 1]) for i in (rank, rank + 2)):
        metadata = ShardMetadata([low, 0], [high - low, 3], f"rank:{rank}/cpu")
        shards.append(Shard_(torch.zeros(high - low, 3), metadata))
    tensor = init_from_local_shards(shards, 5, 3)
    ckpttool.load_into(place, {"t": tensor}, strategy=strategy)
    found = [shard.tensor for shard in tensor.local_shards()]
    return difference(found, [whole()[bounds[i] : bounds[i + 1]] for i in (rank, rank + 2)])


def differing(kind: str, format: str) -> str:
    """Values that the ranks have differently, whatever they are called, and one that only the last rank has."""
    place, rank = practices.folder() / "saved", dist.get_rank()
    last = dist.get_world_size() - 1
    noise = torch.Generator().manual_seed(rank).get_state()

    def state() -> dict[str, Any]:
        return {
            "noise": [noise],
            "meters": {"loss": 0.5 + rank, "step": 7, "bank": whole(rank), "weights": sharded(1)},
            "pair": (rank, whole()),
            **({"seen": {"here": 3}} if rank == last else {}),
        }

    run = practices.fresh(kind)
    given = state()
    ckpttool.save(place, run.model, format=format, **given)
    if not torch.equal(given["noise"][0], noise):
        return "the state of the script has changed"
    blanks: dict[str, Any] = {
        "noise": [blank(noise)],
        "meters": {"loss": 0.0, "step": 0, "bank": blank(whole()), "weights": blank(sharded(1))},
        "pair": None,
        "seen": {"here": 0},
    }
    if format != "fsdp1":  # of which the ranks have other names
        ckpttool.load_into(place, loaded := {"model": run.model, **blanks})
        wanted = expected({**state(), "seen": {"here": 3}})
        return difference({key: expected(loaded[key]) for key in wanted}, wanted)
    rest = ckpttool.load(place, run.model).rest
    found = rest["noise"][0], rest["meters"]["loss"], rest["meters"]["step"], rest["meters"]["bank"]
    return difference(found, (noise, 0.5 + rank, 7, whole(rank)))


def own_dict_by_rank(format: str, strategy: str) -> str:
    """A dict by rank that a script has itself comes back whole; without, a rank gets its own value, or none."""
    place, rank = practices.folder() / "saved", dist.get_rank()
    if rank == 0:
        torch.save({"loss": {"rank0": 1, "rank5": 2}, "step": 3}, place)
    dist.barrier()
    state: dict[str, Any] = {"loss": {"rank0": 0, "rank5": 0}, "step": 0}
    loaded = ckpttool.load_into(place, state, strategy=strategy)
    if state != {"loss": {"rank0": 1, "rank5": 2}, "step": 3} or loaded.without_own:
        return f"{state}, {loaded.without_own}"
    own: dict[str, Any] = {"loss": 0, "step": 0}
    loaded = ckpttool.load_into(place, own, strategy=strategy)
    wanted = ({"loss": 1, "step": 3}, []) if rank == 0 else ({"loss": 0, "step": 3}, ["loss"])
    return "equal" if (own, loaded.without_own) == wanted and not loaded.missing else f"{own}, {loaded}"


def saved_stages(kind: str, format: str) -> str:
    """Each rank has layers of its own and one that all have, as in a pipeline: saved and loaded as one model."""
    place, rank = practices.folder() / "saved", dist.get_rank()

    def stage() -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
        model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in ("shared", f"layer{rank}")})
        bias = [value for name, value in model.named_parameters() if name.endswith("bias")]
        weight = [value for name, value in model.named_parameters() if name.endswith("weight")]
        return model, torch.optim.AdamW([{"params": weight, "lr": 0.2}, {"params": bias, "lr": 0.1}])

    def state(model: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    model, optimizer = stage()
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        torch.nn.init.constant_(parameter, number + 10 * rank * ("layer" in name))
        parameter.grad = parameter.detach() + 1
    optimizer.step()
    ckpttool.save(place, model, optimizer, format=format, step=5)
    with ckpttool.open(place) as checkpoint:
        found = sorted({name.split(".")[-2] for name in checkpoint if name.startswith("model.")})
    if found != ["layer0", "layer1", "shared"]:
        return f"{found}"
    again, fresh = stage()
    ckpttool.load(place, again, fresh)
    wrong = difference(state(again, fresh), state(model, optimizer))
    if wrong != "equal":
        return wrong
    sent = said(
        lambda: ckpttool.load(place, again, fresh, strategy="broadcast"), "has different tensors from that of rank 0"
    )
    again["other"] = torch.nn.Linear(1, 1)
    lacks = said(lambda: ckpttool.load(place, again, None), "missing keys: `other.weight`")
    return next((one for one in (sent, lacks) if one != "equal"), "equal")


STATES: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        gathered,
        held,
        in_place,
        on_meta,
        other_sizes,
        empty_state,
        before_the_first_step,
        nothing_changed,
        load_hook,
        late_hook,
        other_sizes_at_root,
        failed_stage,
        failed_step,
        own_hook,
        blind_rank,
        without_own,
        empty_moments,
        other_arguments,
        untied,
        unknown_class,
        sharded_buffers,
        several_shards,
        differing,
        own_dict_by_rank,
        saved_stages,
    )
}
