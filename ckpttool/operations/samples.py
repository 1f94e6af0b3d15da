"""`samples`: write the checkpoints and the training scripts of the documentation's examples."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ckpttool.analysis.result import Result
from ckpttool.errors import OverwriteError, ReadError
from ckpttool.reports.report import Block, Facts, Line, bold
from ckpttool.storage.stores import Location, Outgoing, destination, locate
from ckpttool.text import plural, size, some

if TYPE_CHECKING:
    import os

#: What the documentation calls each, and where it is below the samples.
NAMES = {
    "run7/step-500": "checkpoints/dcp/fsdp2_w4/ckpt",
    "run7/step-1000": "checkpoints/dcp/hsdp_w4/ckpt",
    "fsdp1-run": "checkpoints/rank/fsdp1_w4/ckpt",
    "local-run": "checkpoints/rank/fsdp1_local_w2/ckpt",
    "full-run.pt": "checkpoints/torch/fsdp1_full_w2/ckpt.pt",
    "full.pt": "checkpoints/torch/full/ckpt.pt",
    "wrapped.pt": "checkpoints/torch/ddp/ckpt.pt",
    "llama": "checkpoints/hf/llama/ckpt",
    "model.safetensors": "checkpoints/safetensors/single/ckpt.safetensors",
    "finetune": "checkpoints/run/trainer/ckpt",
    "deepspeed": "checkpoints/other/deepspeed_zero3_w2",
    "saved": "checkpoints/run/accelerate_fsdp2_sharded_w2/ckpt",
}
#: Scripts beside the samples, which have the same name there: training to resume, and a recipe of a trial.
SCRIPTS = ("train_fsdp2.py", "training.py", "recipe_fsdp2.py", "recipe_model.py")


class Sample(NamedTuple):
    """A sample checkpoint."""

    path: str  #: its path below `destination`
    nbytes: int  #: bytes of its files


@dataclass(slots=True, repr=False)
class Samples(Result):
    """The samples that were written."""

    command: ClassVar[str] = "samples"

    destination: str  #: path of the directory, as it was typed
    samples: list[Sample]  #: the checkpoints

    @property
    def verdict(self) -> str:
        """`written`."""
        return "written"

    @property
    def message(self) -> str:
        """What was written."""
        return f"wrote {self.destination}: {self.contents}"

    @property
    def contents(self) -> str:
        """How many there are, and their bytes."""
        return f"{plural(len(self.samples), 'sample')}, {size(sum(one.nbytes for one in self.samples))}"


def blocks(result: Samples, verbose: bool = False) -> Iterator[Block]:
    """Yield what was written."""
    yield Line(["wrote ", bold(result.destination), f": {result.contents}"])
    yield Facts([(one.path, size(one.nbytes)) for one in result.samples])


def samples(directory: str | os.PathLike[str], *, overwrite: bool = False) -> Samples:
    """Write sample checkpoints and scripts into a new directory.

    Raises OverwriteError if `directory` exists and is not to be replaced, or holds something else than samples,
    StorageError if it cannot be written.
    """
    outgoing, written = [], []
    for name, below in {**NAMES, **{name: name for name in SCRIPTS}}.items():
        source = _root() / below
        files = {f"{name}/{file}": source / file for file in source.below()} if source.is_dir() else {name: source}
        written.append(Sample(name, sum(file.size() for file in files.values())))
        outgoing += [Outgoing(target, file.size(), partial(_copy, file)) for target, file in files.items()]
    _check_is_samples(destination(str(directory)), [one.name for one in outgoing])
    destination(str(directory)).publish(outgoing, overwrite=overwrite)
    return Samples(str(directory), written)


def _check_is_samples(place: Location, names: Collection[str]) -> None:
    """Raise OverwriteError for a directory with other files than samples: `--overwrite` would remove those."""
    if place.is_remote or not (place.exists() or place.is_link()):
        return
    text = f"`{place}` exists and is not a directory"
    if place.is_dir():
        first = {name.partition("/")[0] for name in names}
        others = sorted({*place.below()}.difference(names) | {*place.names()}.difference(first))
        text = f"`{place}` contains files that are not samples: {some(others, 3)}" if others else ""
    if text:
        raise OverwriteError(text, hint="name a new directory", file=place)


def _root() -> Location:
    """Return where the samples are: in the package if it was installed from a wheel, else in the checkout."""
    package = locate(str(resources.files("ckpttool")))
    for root in (package / "sample_files", package.parent / "samples"):
        if root.is_dir():
            return root
    raise ReadError("this installation of ckpttool has no samples", hint="install the wheel: `pip install ckpttool`")


def _copy(source: Location, path: str) -> None:
    locate(path).put(source.read())
