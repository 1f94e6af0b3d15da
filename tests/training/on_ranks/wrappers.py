"""Objects of the script's own that have the model's shards: a wrapper around model and optimizer, an average."""

from __future__ import annotations

import io
from typing import Any

import error_cases
import practices
import torch
import torch.distributed.checkpoint as torch_dcp
import training_scripts
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from training import Run

import ckpttool


class Application(Stateful):
    """As torch's tutorial has it, for FSDP2, and the same for FSDP1."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        """In shards."""
        if isinstance(self.run.model, Fsdp):
            with Fsdp.state_dict_type(self.run.model, StateDictType.SHARDED_STATE_DICT):
                optim = Fsdp.optim_state_dict(self.run.model, self.run.optimizer)
                return {"model": self.run.model.state_dict(), "optim": optim}
        model, optim = get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In shards, as `dcp.load` hands them out."""
        if not isinstance(self.run.model, Fsdp):
            set_state_dict(
                self.run.model, self.run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
            return
        with Fsdp.state_dict_type(self.run.model, StateDictType.SHARDED_STATE_DICT):
            self.run.model.load_state_dict(state["model"])
            optim = Fsdp.optim_state_dict_to_load(self.run.model, self.run.optimizer, state["optim"])
            self.run.optimizer.load_state_dict(optim)


class Average:
    """Of the parameters, in their shards."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: value.detach() * 3 for name, value in model.state_dict().items() if value.dim()}
        self.decay = 0.5

    def state_dict(self) -> dict[str, Any]:
        """As it is."""
        return {"shadow": self.shadow, "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What comes in other shards is an error."""
        for name, value in self.shadow.items():
            assert type(value) is type(state["shadow"][name]), name
            value.copy_(state["shadow"][name])
        self.decay = state["decay"]


class Meter:
    """Small."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        """As it is."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it was."""
        self.seen = state["seen"]


def wrapper(kind: str, strategy: str) -> str:
    """`dcp.save` of a `Stateful` around both, into the same, and into model and optimizer by themselves."""
    saved, place = practices.fresh(kind, trained=True), practices.folder() / "dcp"
    torch_dcp.save({"app": Application(saved), "step": 4}, checkpoint_id=place)
    for around in (True, False):
        run = practices.fresh(kind)
        app = Application(run) if around else {"model": run.model, "optim": run.optimizer}
        state: dict[str, Any] = {"app": app, "step": 0}
        ckpttool.load_into(place, state, strategy=strategy)
        if around:
            practices.keep_lost(run, saved)
        said = training_scripts.difference(training_scripts.whole(run), training_scripts.whole(saved))
        if said != "equal" or state["step"] != 4:
            return f"around {around}: {said}, step {state['step']}"
    return "equal"


def average(kind: str, strategy: str) -> str:
    """Saved and loaded by us beside the model, in shards, with small objects in a dict."""
    saved, place = practices.fresh(kind, trained=True), practices.folder() / "saved"
    mean, meters = Average(saved.model), {"train": Meter(), "valid": Meter()}
    mean.decay, meters["train"].seen = 0.9, [1.5, {"top": (1, 5)}]
    ckpttool.save(place, saved.model, saved.optimizer, ema=mean, meters=meters)
    run = practices.fresh(kind)
    mine, fresh = Average(run.model), {"train": Meter(), "valid": Meter()}
    state: dict[str, Any] = {"model": run.model, "optim": run.optimizer, "ema": mine, "meters": fresh}
    ckpttool.load_into(place, state, strategy=strategy)
    if (mine.decay, fresh["train"].seen, fresh["valid"].seen) != (0.9, [1.5, {"top": (1, 5)}], []):
        return f"{mine.decay} {fresh['train'].seen}"
    said = training_scripts.difference(training_scripts.detached(mine.shadow), training_scripts.detached(mean.shadow))
    return said if said != "equal" else practices.compare(saved, None, run)


class Scales(torch.nn.Module):
    """A module whose state is not a tensor of its own, as TransformerEngine keeps for 8-bit floats. Like its modules
    it refuses state in another form than it saves."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.register_buffer("seen", torch.zeros(2))

    def get_extra_state(self) -> Any:
        """As it is."""
        return self.value

    def set_extra_state(self, state: Any) -> None:
        """As it was."""
        assert type(state) is type(self.value), type(state)
        self.value = state


def scales(number: int) -> torch.nn.ModuleDict:
    """One of each form."""
    history = {"amax": torch.full((3,), float(number)), "recipe": {"margin": number, "of": [torch.ones(2) * number, 1]}}
    stream = io.BytesIO()
    torch.save(history, stream)
    stream.seek(number)
    pickled = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    forms = {
        "tensor": pickled,
        "dict": history,
        "stream": stream,
        "bytes": stream.getvalue(),
        "number": number,
        "no": {},
    }
    return torch.nn.ModuleDict({name: Scales(value) for name, value in forms.items()})


def extra_state(kind: str, strategy: str) -> str:
    """Of modules inside the model, by each format of `save`."""

    def with_scales(number: int, device: str = "") -> Run:
        model = training_scripts.bare(training_scripts.SMALL, device)
        model.fp8 = scales(number)
        if device == "meta":
            model.fp8.to("meta")
        return Run(training_scripts.KINDS[kind](model), None, None)

    for format in ("dcp", "torch", *(["fsdp1"] if "fsdp1" in kind else [])):
        place, run = practices.folder() / "saved", with_scales(3)
        for module in run.model.modules():
            if isinstance(module, Scales):
                module.seen += 5
        ckpttool.save(place, run.model, format=format)
        other = with_scales(4, "meta" if kind == "fsdp2" else "")
        loaded = ckpttool.load(place, other.model, strategy=strategy)
        if loaded.missing or loaded.unexpected:
            return f"{format}: {loaded.missing} {loaded.unexpected}"
        for saved, ours in zip(run.model.modules(), other.model.modules(), strict=True):
            if isinstance(saved, Scales):
                pairs = [(saved.value, ours.value), (saved.seen, ours.seen)]
                if said := next((said for pair in pairs if (said := unlike(*pair))), ""):
                    return f"{format}: {said}"
    return "equal"


class Soap(torch.optim.Optimizer):
    """Keeps its state as SOAP does: a list of matrices, by dimension of the parameter, `[]` for one that is too long.
    Under FSDP2 each rank has all of a matrix."""

    def __init__(self, params: Any, lr: float = 0.7, longest: int = 10) -> None:
        super().__init__(params, {"lr": lr, "longest": longest})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Once more."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self.state[parameter], group)

    def _update(self, parameter: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        sharded = isinstance(parameter, DTensor)
        whole = parameter.grad.full_tensor() if sharded else parameter.grad
        if not state:
            sides = [torch.zeros(n, n, device=whole.device) if n <= group["longest"] else [] for n in parameter.shape]
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "GG": sides, "Q": None}
        state["step"] += 1
        state["exp_avg"].lerp_(parameter.grad, 0.1)
        for dim, matrix in enumerate(state["GG"]):
            if len(matrix):
                rows = whole.movedim(dim, 0).reshape(len(matrix), -1)
                matrix.lerp_(rows @ rows.T, 0.1)
        state["Q"] = [torch.linalg.qr(matrix)[0] if len(matrix) else [] for matrix in state["GG"]]
        rate = group["lr"] * (1 + sum(float(matrix.sum()) for matrix in state["Q"] if len(matrix)) / 100)
        parameter.sub_(state["exp_avg"], alpha=rate)


def lists(kind: str, strategy: str) -> str:
    """State that is a list of tensors, of an optimizer that keeps a square one shaped as its parameter."""

    def fresh() -> Run:
        model = training_scripts.KINDS[kind](training_scripts.bare(training_scripts.SMALL))
        return Run(model, Soap(model.parameters()), None)

    saved, place = fresh(), practices.folder()
    for group in saved.optimizer.param_groups:
        group["lr"] = 0.01
    training_scripts.steps(saved, training_scripts.SMALL.vocab)
    for format in ("dcp", "torch"):
        ckpttool.save(place / format, saved.model, saved.optimizer, format=format)
        run = fresh()
        if "fsdp1" in kind:
            return error_cases.refused(run, place / format, "nested", strategy=strategy)
        ckpttool.load(place / format, run.model, run.optimizer, strategy=strategy)
        for one, other in zip(saved.optimizer.state.values(), run.optimizer.state.values(), strict=True):
            kinds = [[type(value) for value in [*of["GG"], *of["Q"], of["exp_avg"]]] for of in (one, other)]
            if kinds[0] != kinds[1]:
                return f"{format}: {kinds}"
        said = practices.compare(saved, None, run)
        if said != "equal":
            return f"{format}: {said}"
    return "equal"


def unlike(one: Any, other: Any) -> str:
    """How two values differ; empty when they do not."""
    if type(one) is not type(other):
        return f"{type(one)}, {type(other)}"
    if isinstance(one, dict):
        return "".join(unlike(value, other.get(key)) for key, value in one.items()) + str(
            one.keys() - other.keys() or ""
        )
    if isinstance(one, list):
        return "".join(map(unlike, one, other)) + ("" if len(one) == len(other) else "lengths")
    if isinstance(one, io.BytesIO):
        return unlike([one.getvalue(), one.tell()], [other.getvalue(), other.tell()])
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return "" if same else f"{one!r:.50}, {other!r:.50}"


OWN = {f.__name__: f for f in (wrapper, average, extra_state, lists)}
