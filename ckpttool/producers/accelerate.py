"""What accelerate and the Trainer of transformers resume from.

Upstream: `load_accelerator_state` and `load_fsdp_model` of accelerate 1.15, `_load_from_checkpoint`,
`_load_optimizer_and_scheduler` and `_load_rng_state` of transformers 5.23.
"""

from __future__ import annotations

import re

from ckpttool.catalogue.entries import Catalogue, Object, Part
from ckpttool.catalogue.protocols import Format
from ckpttool.catalogue.values import stub_name
from ckpttool.errors import UsageError
from ckpttool.formats import named
from ckpttool.producers.arrange import Arranging
from ckpttool.producers.names import step_in
from ckpttool.producers.writer import Arranged, Component

_TORCH, _DCP, _SAFE = named("torch"), named("dcp"), named("safetensors")


# accelerate -----------------------------------------------------------------------------------------------------------


def _is_sampler(laid: Catalogue, part: Part) -> bool:
    """Whether this is the sampler of accelerate, which it saves as an object: nobody else's can be set in its place."""
    entry = laid.entries.get(part.root)
    return isinstance(entry, Object) and (stub_name(entry.value) or "").startswith("accelerate.")


_ACCELERATE_RNG = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}


def _numbered(stem: str, number: int) -> str:
    return f"{stem}_{number}" if number else stem


def accelerate_sharded(a: Arranging) -> Arranged:
    """For FSDP with `SHARDED_STATE_DICT`."""
    _sharded(a)
    return _accelerate_rest(a)


def _sharded(a: Arranging, most: int | None = None) -> None:
    for n, part in [*a.numbered("model")][:most]:
        root = (_numbered("model", n),)
        a.take(part, a.piece(Component(f"pytorch_model_fsdp_{n}", _DCP, root, ("model",))), root)
    for n, part in [*a.numbered("optimizer")][:most]:
        root = (_numbered("optimizer", n),)
        a.take(part, a.piece(Component(f"optimizer_{n}", _DCP, root, ("optimizer",))), root)


def accelerate_full(a: Arranging) -> Arranged:
    """For FSDP with `FULL_STATE_DICT`."""
    return _accelerate_whole(a, "pytorch_model_fsdp", ".bin", _TORCH)


def accelerate_ddp(a: Arranging) -> Arranged:
    """For one process, or DDP."""
    if a.laid.format in ("dcp", "rankfiles") and not any(t.alias for t in a.laid.tensors if t.part.kind == "model"):
        # It cannot be seen whether two tensors were one. `load_model` of safetensors refuses a tied tensor that is
        # there under both names, `load_state_dict` takes it.
        return _accelerate_whole(a, "pytorch_model", ".bin", _TORCH)
    return _accelerate_whole(a, "model", ".safetensors", _SAFE)


def _accelerate_whole(a: Arranging, stem: str, suffix: str, form: Format) -> Arranged:
    for n, part in a.numbered("model"):
        root = (_numbered("model", n),)
        a.take(part, a.piece(Component(_numbered(stem, n) + suffix, form, root)), root)
    for n, part in a.numbered("optimizer"):
        root = (_numbered("optimizer", n),)
        a.take(part, a.piece(Component(_numbered("optimizer", n) + ".bin", _TORCH, root)), root)
    return _accelerate_rest(a)


def _accelerate_rest(a: Arranging) -> Arranged:
    for n, part in a.numbered("scheduler"):
        root = (_numbered("scheduler", n),)
        a.take(part, a.piece(Component(_numbered("scheduler", n) + ".bin", _TORCH, root)), root)
    for part in a.parts("scaler")[:1]:
        a.take(part, a.piece(Component("scaler.pt", _TORCH, ("scaler",))), ("scaler",))
    loaders = [*a.stateful_loaders()]
    for part in a.parts("dataloader"):
        found = re.fullmatch(r"(sampler|dataloader)((_\d+)?)", str(part.root[-1])) if len(part.root) == 1 else None
        if found is not None and (part in loaders or (found[1] == "sampler" and _is_sampler(a.laid, part))):
            stem = "sampler" if found[1] == "sampler" else "dl_state_dict"
            a.take(part, a.piece(Component(f"{stem}{found[2]}.bin", _TORCH, part.root)), part.root)
    for name in dict.fromkeys(str(e.path[0]) for e in a.left() if e.path and e.part.kind == "other"):
        if re.fullmatch(r"custom_checkpoint_\d+", name):
            piece = a.piece(Component(f"{name}.pkl", _TORCH, (name,)))
            for entry in [e for e in a.left() if e.path[0] == name]:
                a.put(entry, piece, entry.path)
    pieces: dict[int, int] = {}

    def of_rank(rank: int) -> tuple[int, tuple[str, ...]]:
        root = ("rng", f"rank{rank}")
        if rank not in pieces:
            pieces[rank] = a.piece(Component(f"random_states_{rank}.pkl", _TORCH, root))
        return pieces[rank], root

    own = re.compile(r"step|(torch|xm)_\w*seed")
    a.note_without(a.generators(_ACCELERATE_RNG, lambda inside: own.fullmatch(str(inside[0])), of_rank))
    return a.done("accelerate keeps no such value")


# Trainer --------------------------------------------------------------------------------------------------------------

# Without these it stops: a batch size, which it compares with its own to warn, and the state of its own control, which
# it updates when it saves. Every other value has a default.
_CONTROL = dict.fromkeys(
    ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"), False
)
_LEAST = {
    "train_batch_size": 0,
    "log_history": [],
    "stateful_callbacks": {"TrainerControl": {"args": _CONTROL, "attributes": {}}},
}
_TRAINER_RNG = {"python": "python", "numpy": "numpy", "torch": "cpu"}


def trainer(a: Arranging) -> Arranged:
    """For one process or DDP: the model whole, the optimizer by ids."""
    model, optimizer = a.one("model"), a.one("optimizer")
    if model is not None:
        a.take(model, a.piece(Component("model.safetensors", _SAFE, ("model",))), ("model",))
    if optimizer is not None:
        a.take(optimizer, a.piece(Component("optimizer.pt", _TORCH, ("optimizer",))), ("optimizer",))
    return _trainer_rest(a)


def trainer_sharded(a: Arranging) -> Arranged:
    """For FSDP with `SHARDED_STATE_DICT`: accelerate saves model and optimizer."""
    _sharded(a, 1)
    return _trainer_rest(a)


def _trainer_rest(a: Arranging) -> Arranged:
    scheduler = a.one("scheduler")
    if scheduler is not None:
        a.take(scheduler, a.piece(Component("scheduler.pt", _TORCH, ("scheduler",))), ("scheduler",))
    for part in a.parts("scaler")[:1]:
        a.take(part, a.piece(Component("scaler.pt", _TORCH, ("scaler",))), ("scaler",))
    for entry in [e for e in a.left() if e.path[:1] == ("training_args",)]:
        if entry.path == ("training_args",):
            a.put(entry, a.piece(Component("training_args.bin", _TORCH, ("training_args",))), entry.path)
    _trainer_state(a)
    pieces: dict[int, int] = {}

    def of_rank(rank: int) -> tuple[int, tuple[str, ...]]:
        alone = a.wanted.world == 1
        root = ("rng",) if alone else ("rng", f"rank{rank}")
        if rank not in pieces:
            pieces[rank] = a.piece(Component("rng_state.pth" if alone else f"rng_state_{rank}.pth", _TORCH, root))
        return pieces[rank], root

    own = re.compile(r"cuda|npu|hpu|mlu|musa|xla")
    a.note_without(a.generators(_TRAINER_RNG, lambda inside: own.fullmatch(str(inside[0])), of_rank))
    return a.done("the Trainer keeps no such value")


def _trainer_state(a: Arranging) -> None:
    """Its own, or the least that it needs: the step. It skips as many batches of the first epochs."""
    found = [e for e in a.left() if e.part.kind == "progress" and e.path[:1] == ("trainer_state",)]
    step = next((a.number(e) for e in found if e.path[1:] == ("global_step",)), None)
    if step is not None:
        piece = a.piece(Component("trainer_state.json", None, ("trainer_state",)))
        for entry in found:
            a.put(entry, piece, entry.path)
    else:
        step = a.step()
        step = step_in(a.wanted.name) if step is None else step
        if step is None:
            raise UsageError(
                "the Trainer goes on from the step in `trainer_state.json`, and nothing here says which it is",
                hint="call the destination `checkpoint-N`",
            )
        a.piece(Component("trainer_state.json", None, ("trainer_state",), plain={"global_step": step, **_LEAST}))
        a.notes.append(
            f"`trainer_state.json` is made with step {step} and no history; what it does not say is as the Trainer has "
            "it by default, such as 500 for `logging_steps`, `eval_steps` and `save_steps`"
        )
    a.fold_step(step)
    if a.wanted.name != f"checkpoint-{step}":
        a.notes.append(f"the Trainer finds the newest checkpoint by its name, which would be `checkpoint-{step}`")
