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
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.protocols import NO_HINTS, Format, OpenOptions, Source
from ckpttool.errors import UsageError
from ckpttool.layout.optimizer import order as ordering
from ckpttool.layout.optimizer import respell as optimkeys
from ckpttool.producers import accelerate as hflayouts
from ckpttool.producers import reader as mounts
from ckpttool.producers import shardlayouts
from ckpttool.producers.arrange import Arranging, Wanted
from ckpttool.producers.directory import Listing
from ckpttool.producers.writer import Arranged
from ckpttool.text import meant


@dataclass(frozen=True, slots=True)
class Writable:
    """A layout that can be written: `Writable("accelerate:sharded", "accelerate", "fqn", arrange, chunked=True)`.

    `reader` is the name of the producer that reads it, `keys` how it spells optimizers; `ordered` says that it always
    makes them of the model's parameters in their order. `chunked`, `even` and `splits` are those of `Format`;
    `tensor_class` is what its sharded tensors are unless told.
    """

    name: str
    reader: str
    keys: str
    arrange: Callable[[Arranging], Arranged]
    chunked: bool = False
    even: bool = False
    splits: bool = False
    ordered: bool = False
    tensor_class: str = "sharded_tensor"

    def spell(self, laid: Catalogue, source: Catalogue) -> Catalogue:
        """The optimizers as the framework spells them. Pure."""
        return ordering.numbered(laid, source) if self.ordered else optimkeys.respell(laid, self.keys, source)

    def format(self, arranged: Arranged | None = None) -> Format:
        """The layout as a format that a conversion writes; before it is arranged, what its flags may be."""
        return Format(
            name=self.name,
            title=f"what {self.name.partition(':')[0]} leaves",
            recognise=lambda path: False,
            open=self._open,
            create=arranged.create if arranged is not None else None,
            losses=arranged.losses if arranged is not None else None,
            # Of whole tensors, `--to-world` says how many processes have a file of their own.
            chunked=self.chunked or arranged is None,
            even=self.even,
            splits=self.splits,
        )

    def _open(self, path: str, options: OpenOptions = NO_HINTS) -> Source:
        row = next(row for row in producers.PRODUCERS if row.name == self.reader)
        return mounts.open_source(row, Listing(path), options)


_ACCELERATE = (
    Writable("accelerate:sharded", "accelerate", "fqn", hflayouts.accelerate_sharded, chunked=True),
    Writable("accelerate:full", "accelerate", "fqn", hflayouts.accelerate_full),
    Writable("accelerate:ddp", "accelerate", "id", hflayouts.accelerate_ddp),
)
_TRAINER = (
    Writable("trainer", "transformers Trainer", "id", hflayouts.trainer, splits=True, ordered=True),
    Writable("trainer:sharded", "transformers Trainer", "fqn", hflayouts.trainer_sharded, chunked=True),
)
_TORCHTITAN = Writable("torchtitan", "torchtitan", "flat", shardlayouts.torchtitan, chunked=True)
_VERL = Writable(
    "verl", "verl", "id", shardlayouts.verl,
    chunked=True, even=True, ordered=True, tensor_class="dtensor:cuda:fsdp",
)  # fmt: skip


# The table ------------------------------------------------------------------------------------------------------------

WRITABLE = (*_ACCELERATE, *_TRAINER, _TORCHTITAN, _VERL)
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
    """The layout itself. A producer's own comes back as it was; else accelerate's is the one for FSDP when the source
    is cut over ranks, or is to be."""
    row = named(name)
    pieces = [str(piece["path"]) for piece in source.facts.get("mounted", ())]
    sharded = any(re.fullmatch(r"pytorch_model_fsdp_\d+/", path) for path in pieces)
    full = any(re.fullmatch(r"pytorch_model_fsdp(_\d+)?\.bin", path) for path in pieces)
    if name == "trainer":
        return _TRAINER[1 if sharded and source.facts.get("producer") == row.reader else 0]
    if name != "accelerate":
        return row
    if full and to_world is None:
        return _ACCELERATE[1]
    cut = any(len(t.chunks) > 1 for t in source.tensors if not t.embedded)
    return _ACCELERATE[0 if cut or (to_world or 1) > 1 else 2]


def arrange(row: Writable, laid: Catalogue, wanted: Wanted) -> tuple[Arranging, Arranged]:
    """What is to be written where, and what was said about it. Pure but for small values that are read."""
    arranging = Arranging(laid, wanted)
    return arranging, row.arrange(arranging)
