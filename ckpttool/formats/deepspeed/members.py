"""The files of a DeepSpeed directory by their names: whose each is, which are missing, which are from another save."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ckpttool.catalogue.entries import Extent
from ckpttool.errors import CkptError, CorruptError, ReadError
from ckpttool.serialization.torch_file import TorchFile
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage.stores import Location
from ckpttool.text import is_or_are, plural, some

WEIGHTS = r"(zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"
OPTIMIZER = r"(?P<kind>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"
LAYER = r"layer_(?P<layer>\d+)(-model_00)?-model_states\.pt"
FILES = rf"{WEIGHTS}|{OPTIMIZER}|{LAYER}|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt"
FILES = re.sub(r"\?P<\w+>", "", FILES)
"""The files that this format reads."""
_EXPERT = r"layer_\d+_expert_\d+_mp_rank_00_model_states\.pt"
_NOT_READ = (
    (
        r"layer_\d+_expert_\d+_mp_rank_(?!00)\d+_model_states\.pt|expert_\d+_mp_rank_\d+_model_states\.pt"
        r"|expp_rank_\d+_mp_rank_\d+_optim_states\.pt",
        "experts without ZeRO, of tensor parallelism or of a DeepSpeed of before 2022",
    ),
    (rf"(?!{LAYER}$)layer_\d+-.*model_states\.pt".replace("?P<layer>", ""), "layers of tensor parallelism"),
    (r"offloaded_tensors", "tensors on NVMe"),
)
CONVERT = "convert it with DeepSpeed's own `ds_to_universal.py`, and name what it writes"
UNIVERSAL = "zero"
"""The folder of a universal checkpoint that has one of each parameter."""
MAX_RANKS = 1 << 16


@dataclass(slots=True)
class StateFile:
    """A file that was opened, of one rank, and its tree."""

    rank: int
    name: str
    loaded: TorchFile
    tree: dict[Any, Any]

    def place(self, ref: TensorRef) -> Extent:
        """Return the extent of a tensor, in the catalogue's files."""
        return self.loaded.extent(ref)


@dataclass(slots=True)
class Members:
    """The names of the files of a directory by stage of the pipeline and data-parallel rank:
    `Members({(0, 0): "mp_rank_00_model_states.pt"}, {})`. `layers` are those of a pipeline, by their number. `faults`
    are what is wrong with the set. A `universal` one has a folder for each parameter in place of the optimizer's files,
    and may have a `copy` of the weights of rank 0."""

    weights: dict[tuple[int, int], str] = field(default_factory=dict)
    optimizer: dict[tuple[int, int], str] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    layers: dict[int, str] = field(default_factory=dict)
    faults: list[CkptError] = field(default_factory=list)
    partitioned: bool = False
    universal: bool = False
    copy: str = ""

    def check_world(self, world: int, stages: int) -> Iterator[CkptError]:
        """Yield what is missing of the files of `world` ranks in each stage, and what is left of a save with more."""
        ranks = world * stages
        for what, present, of_stage in (
            ("weights", self.weights, world if self.partitioned else 1),
            ("optimizer", self.optimizer, 0 if self.universal or not self.optimizer else world),
        ):
            every = [*product(range(stages), range(of_stage))]
            if absent := [stage * world + rank for stage, rank in every if (stage, rank) not in present]:
                where = some([f"rank {rank}" for rank in absent])
                text = f"the {what} file of {where} {is_or_are(absent)} missing: {ranks} ranks have saved"
                hint = "copy what is missing from where the checkpoint was saved"
                yield CorruptError(text, hint=hint, missing=absent, found=len(present), expected=len(every))
            if extra := [name for place, name in sorted(present.items()) if place not in every]:
                text = f"{some(extra)} {is_or_are(extra)} of a save with more ranks than {ranks}"
                hint = "files of an older save were left in the directory: move them away"
                yield CorruptError(text, hint=hint, files=extra, expected=ranks)


def recognise(location: Location) -> bool:
    """Return whether this is a directory with files of ZeRO, or a universal one."""
    if not location.is_dir():
        return False
    try:
        return any(re.fullmatch(FILES, entry.name) for entry in location.entries())
    except CkptError:
        return False


def renamed(name: str, root: str) -> str | None:
    """Return what a file was saved as, by what its archive is called inside, if that is of another rank or layer."""
    own, saved = _whose(name), _whose(f"{root}.pt")
    return None if saved in (None, own) else f"{root}.pt"


def _whose(name: str) -> tuple[int | str, ...] | None:
    """Return what kind of file this is and of whom: `("weights", 0, 2)` of rank 2."""
    for kind, pattern in (("weights", WEIGHTS), ("optimizer", OPTIMIZER), ("layer", LAYER), ("expert", _EXPERT)):
        if (match := re.fullmatch(pattern, name)) is not None:
            own = match.groupdict() if kind in ("weights", "optimizer") else {}
            return (kind, int(own["mp"]), int(own["dp"] or 0)) if own else (kind, *map(int, re.findall(r"\d+", name)))
    return None


def listed(location: Location) -> Members:
    """Return the files of a directory. Raises ReadError for those of some experts, and of tensor parallelism."""
    members = Members()
    names = location.names()
    members.universal = UNIVERSAL in names and (location / UNIVERSAL).is_dir()
    for pattern, what in _NOT_READ:
        if found := [name for name in names if re.fullmatch(pattern, name)]:
            text = f"`{location}`: {some(found)}: {what} of DeepSpeed, which are not read"
            raise ReadError(text, hint=CONVERT, file=location, found=found)
    members.experts = [name for name in names if re.fullmatch(_EXPERT, name)]
    for layer in filter(None, (re.fullmatch(LAYER, name) for name in names)):
        if len(layer["layer"]) > len(str(MAX_RANKS)):
            text = f"`{location}`: `{layer.string}` is of a layer that cannot be"
            raise CorruptError(text, hint="move it away", file=location)
        if (first := members.layers.setdefault(int(layer["layer"]), layer.string)) != layer.string:
            text = f"{some([first, layer.string])} are both of one layer"
            members.faults.append(CorruptError(text, hint="files of two saves are mixed: move those of one away"))
    for name in names:
        for pattern, present in ((WEIGHTS, members.weights), (OPTIMIZER, members.optimizer)):
            if (match := re.fullmatch(pattern, name)) is not None:
                _add(members, match, present, location)
    if (0, 0) not in members.weights:
        text = f"`{location}`: no `mp_rank_00_model_states.pt` beside {some([*members.optimizer.values()])}"
        raise CorruptError(text, hint="copy it from where the checkpoint was saved", file=location)
    if members.experts and members.partitioned:
        text = f"`{location}`: files of experts beside those of ZeRO 3, which DeepSpeed does not write"
        raise CorruptError(text, hint="files of two saves are mixed: move those of one away", file=location)
    if members.layers and (members.partitioned or members.experts):
        raise ReadError(f"`{location}`: a pipeline with ZeRO 3 or experts, which is not read", file=location)
    return members


def _add(members: Members, match: re.Match[str], present: dict[tuple[int, int], str], location: Location) -> None:
    name, rank, stage = match.string, int(match["dp"] or 0), int(match["mp"])
    place = stage, rank
    if stage and not members.layers and not members.universal:
        text = f"`{location}`: `{name}` is of model-parallel rank {stage}, and no file is of a pipeline's layers"
        raise ReadError(f"{text}: tensor parallelism is not read", hint=CONVERT, file=location)
    if max(place) >= MAX_RANKS:
        raise CorruptError(f"`{location}`: `{name}` is of rank {max(place)}, more than {MAX_RANKS}", file=location)
    if place in present and members.universal:
        members.copy = name  # for ZeRO 3, which opens them under another name
        return
    if place in present:
        both = some(sorted((present[place], name)))
        text = f"{both} are both of rank {rank}: {plural(2, 'save')} of other precisions, or stages, are mixed"
        members.faults.append(CorruptError(text, hint="move those of the older save away", ranks=[rank]))
    present[place] = name
    members.partitioned |= present is members.weights and match["dp"] is not None
