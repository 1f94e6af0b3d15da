"""Objects of the script's own that have the model's shards: a wrapper around model and optimizer, an average."""

from __future__ import annotations

import io
from typing import Any

import practices
import torch
import torch.distributed.checkpoint as torch_dcp
import training_scripts
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import StateDictType
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
    """A module with state that is no tensor of its own, as TransformerEngine keeps for 8-bit floats. Like its modules
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


OWN = {f.__name__: f for f in (wrapper, average, extra_state)}
