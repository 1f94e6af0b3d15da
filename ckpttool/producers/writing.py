"""Writing what a framework resumes from: a table of layouts. Adding one is a row, and a function that arranges.

    accelerate:sharded   pytorch_model_fsdp_0/ optimizer_0/   DCP, for FSDP with SHARDED_STATE_DICT
    accelerate:full      pytorch_model_fsdp.bin optimizer.bin         FSDP with FULL_STATE_DICT
    accelerate:ddp       model.safetensors optimizer.bin              one process, or DDP
                         scheduler.bin scaler.pt sampler.bin dl_state_dict.bin custom_checkpoint_0.pkl
                         random_states_{rank}.pkl
    trainer              model.safetensors optimizer.pt scheduler.pt scaler.pt trainer_state.json training_args.bin
                         rng_state.pth rng_state_{rank}.pth
    torchtitan           {.metadata, __R_0.distcp}: the model at the root, optimizer lr_scheduler train_state dataloader
    verl                 actor/{model,optim,extra_state}_world_size_{W}_rank_{rank}.pt actor/fsdp_config.json data.pt

Upstream: accelerate 1.15 `checkpointing.py` and `utils/fsdp_utils.py`, transformers 5.23 `trainer.py`, torchtitan
`components/checkpoint.py`, verl `utils/checkpoint/fsdp_checkpoint_manager.py`. What lies where is what the readers of
these directories know: a layout is right when they give back what was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ckpttool import producers
from ckpttool.catalogue import Catalogue
from ckpttool.contract import NO_HINTS, Format, OpenOptions, Source
from ckpttool.errors import UsageError
from ckpttool.formats import named as format_named
from ckpttool.producers import mounts
from ckpttool.producers.arranging import Arranging, Wanted
from ckpttool.producers.composing import Arranged, Component
from ckpttool.producers.listing import Listing
from ckpttool.wording import meant

_TORCH, _DCP, _SAFE = format_named("torch"), format_named("dcp"), format_named("safetensors")
_RANKS = format_named("rankfiles")


@dataclass(frozen=True, slots=True)
class Writable:
    """A layout that can be written: `Writable("accelerate:sharded", "accelerate", "fqn", arrange, chunked=True)`.

    `reader` is the name of the producer that reads it, `keys` how it spells optimizers. `even` and `chunked` are those
    of `Format`; `tensor_class` is what its sharded tensors are unless told; `place` what a directory of it is to be
    called, and the number that the name then says.
    """

    name: str
    reader: str
    keys: str
    arrange: Callable[[Arranging], Arranged]
    chunked: bool = False
    even: bool = False
    splits: bool = False
    tensor_class: str = "sharded_tensor"
    place: str = ""

    def format(self, arranged: Arranged | None = None) -> Format:
        """The layout as a format that a conversion writes; before it is arranged, what its flags may be."""
        return Format(
            name=self.name,
            title=f"what {self.name.partition(':')[0]} leaves",
            recognise=lambda path: False,
            open=self._open,
            create=arranged.create if arranged is not None else None,
            losses=arranged.losses if arranged is not None else None,
            chunked=self.chunked,
            even=self.even,
            splits=self.splits,
        )

    def _open(self, path: str, options: OpenOptions = NO_HINTS) -> Source:
        row = next(row for row in producers.PRODUCERS if row.name == self.reader)
        return mounts.open_source(row, Listing(path), options)


# accelerate -----------------------------------------------------------------------------------------------------------

_ACCELERATE_RNG = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}


def _numbered(stem: str, number: int) -> str:
    return f"{stem}_{number}" if number else stem


def _accelerate_sharded(a: Arranging) -> Arranged:
    for n, part in a.numbered("model"):
        root = (_numbered("model", n),)
        a.take(part, a.piece(Component(f"pytorch_model_fsdp_{n}", _DCP, root, ("model",))), root)
    for n, part in a.numbered("optimizer"):
        root = (_numbered("optimizer", n),)
        a.take(part, a.piece(Component(f"optimizer_{n}", _DCP, root, ("optimizer",))), root)
    return _accelerate_rest(a)


def _accelerate_full(a: Arranging) -> Arranged:
    return _accelerate_whole(a, "pytorch_model_fsdp", ".bin", _TORCH)


def _accelerate_ddp(a: Arranging) -> Arranged:
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
    for part in a.parts("dataloader"):
        # Those of accelerate itself: no two frameworks keep the same of a data loader.
        found = re.fullmatch(r"(sampler|dataloader)((_\d+)?)", str(part.root[-1])) if len(part.root) == 1 else None
        if found is not None:
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

    a.generators(_ACCELERATE_RNG, lambda inside: re.fullmatch(r"step|(torch|xm)_\w*seed", str(inside[0])), of_rank)
    return a.done("accelerate keeps no such value")


_ACCELERATE = (
    Writable("accelerate:sharded", "accelerate", "fqn", _accelerate_sharded, chunked=True),
    Writable("accelerate:full", "accelerate", "fqn", _accelerate_full),
    Writable("accelerate:ddp", "accelerate", "id", _accelerate_ddp),
)


# The table ------------------------------------------------------------------------------------------------------------

WRITABLE: tuple[Writable, ...] = (*_ACCELERATE,)
NAMES = tuple(dict.fromkeys(row.name.partition(":")[0] for row in WRITABLE))


def named(name: str) -> Writable:
    """The first layout of that name, whose flags are the most that one of them has. Raises UsageError."""
    found = [row for row in WRITABLE if name in (row.name, row.name.partition(":")[0])]
    if found:
        return found[0]
    names = [*NAMES, *(row.name for row in WRITABLE if ":" in row.name)]
    hint = meant(name, names, f"one of {', '.join(f'`{n}`' for n in names)}")
    raise UsageError(f"there is no layout of a producer `{name}` that we write", hint=hint)


def chosen(name: str, source: Catalogue, to_world: int | None) -> Writable:
    """The layout itself: of accelerate's, the one for FSDP when the source is cut over ranks, or is to be."""
    row = named(name)
    if ":" in name or row not in _ACCELERATE:
        return row
    pieces = [str(piece["path"]) for piece in source.facts.get("mounted", ())]
    if any(re.fullmatch(r"pytorch_model_fsdp(_\d+)?\.bin", path) for path in pieces) and to_world is None:
        return _ACCELERATE[1]
    cut = any(len(t.chunks) > 1 for t in source.tensors if not t.embedded)
    return _ACCELERATE[0 if cut or (to_world or 1) > 1 else 2]


def arrange(row: Writable, laid: Catalogue, wanted: Wanted) -> tuple[Arranging, Arranged]:
    """What is to be written where, and what was said about it. Pure but for small values that are read."""
    arranging = Arranging(laid, wanted)
    return arranging, row.arrange(arranging)
