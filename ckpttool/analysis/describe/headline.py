"""The headline of a checkpoint: `404M parameters, bfloat16, Qwen3ForCausalLM, 28 layers, AdamW state float32`. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from ckpttool.analysis.describe.optimizers import OptimizerSummary
from ckpttool.catalogue.dtypes import dtype
from ckpttool.catalogue.entries import Catalogue, Path, Tensor
from ckpttool.catalogue.models import Models
from ckpttool.text import count, plural

_DTYPES = 3
_LAYERS = re.compile(r"((?:[^.]+\.)*?(?:\w*layers?|\w*blocks?|h))\.([0-9]{1,9})\.")


@dataclass(frozen=True, slots=True)
class Headline:
    """What a checkpoint is in a few figures; what is unknown is None or empty.

    `Headline(404_000_000, ["bfloat16"], "Qwen3ForCausalLM", 28, [OptimizerSummary(...)], 4, 3)`.
    """

    parameters: int | None = None
    dtypes: Sequence[str] = ()
    architecture: str | None = None
    layers: int | None = None
    optimizers: Sequence[OptimizerSummary] = field(default=())
    world_size: int = 1
    step: float | None = None
    epoch: int | None = None

    def __str__(self) -> str:
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        if self.parameters is not None:
            yield f"{count(self.parameters)} parameter{'' if self.parameters == 1 else 's'}"
        if self.dtypes:
            more = len(self.dtypes) - _DTYPES
            yield " and ".join([*self.dtypes[:_DTYPES], *([f"{more} more"] if more > 0 else [])])
        if self.architecture is not None:
            yield self.architecture
        if self.layers is not None:
            yield plural(self.layers, "layer")
        for state, number in Counter(filter(None, map(str, self.optimizers))).items():
            yield state if number == 1 else f"{number} x {state}"
        if self.world_size > 1:
            yield f"{self.world_size:,} ranks"
        if self.step is not None:
            yield f"step {self.step:,}"
        elif self.epoch is not None:
            yield f"epoch {self.epoch:,}"


def headline(
    catalogue: Catalogue,
    every: Models,
    optimizers: Sequence[OptimizerSummary],
    step: float | None,
    tied: Collection[Path],
    epoch: int | None = None,
) -> Headline:
    """Return the headline. `tied` are tensors whose bytes another one has, which are not counted again."""
    found = parameters(every, tied)
    of_dtype: dict[str, int] = {}
    for tensor in found:
        name = tensor.dtype.name
        of_dtype[name] = of_dtype.get(name, 0) + tensor.numel
    elements = sum(of_dtype.values())
    dtypes = Counter({name: numel * dtype(name).itemsize for name, numel in of_dtype.items()})
    classes = catalogue.facts.get("architectures")
    layers = catalogue.facts.get("num_hidden_layers")
    recognised = catalogue.facts.get("recognised", {}).get("parameters")
    counted = elements if found and not _holds_views(catalogue, found) else None
    return Headline(
        # What is quantised or in partitions is counted as it was before.
        parameters=counted if recognised is None else recognised,
        dtypes=[name for name, _ in dtypes.most_common()],
        architecture=classes[0]
        if found and isinstance(classes, list) and classes and isinstance(classes[0], str)
        else None,
        layers=layers if isinstance(layers, int) and found and layers > 0 else _layers(found),
        optimizers=optimizers,
        world_size=catalogue.world_size,
        step=step,
        epoch=epoch,
    )


def parameters(found: Models, tied: Collection[Path] = ()) -> list[Tensor]:
    """Return the parameters of the models: their tensors without `tied` ones, without buffers, and without copies
    (EMA) of those that are trained."""
    return [tensor for model in found.counted for tensor in model.parameters(tied)]


def _holds_views(catalogue: Catalogue, tensors: Sequence[Tensor]) -> bool:
    """Return whether there are flat parameters, and beside them one rank's views of what is in them."""
    if all(warning.kind != "unknown-shape" for warning in catalogue.warnings):
        return False
    flat = [tensor.fqn.endswith("_flat_param") for tensor in tensors]
    return any(flat) and not all(flat)


def _layers(tensors: Sequence[Tensor]) -> int | None:
    """Return how many layers the stack has that holds most of the model; None if its numbers have gaps, or if there are
    several stacks, as of an encoder and a decoder."""
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    module, stack = "", ""
    size = 0
    for tensor in tensors:
        above = tensor.fqn.rpartition(".")[0]
        if above != module:  # as neighbours are mostly of one module
            sizes[stack] += size
            match = _LAYERS.match(f"{above}.")
            module, stack, size = above, match[1] if match else "", 0
            if match:
                numbers[stack].add(int(match[2]))
        size += tensor.numel
    sizes[stack] += size
    del sizes[""]
    if not sizes:
        return None
    (stack, size), *others = sizes.most_common()
    is_alone = sum(other for _, other in others) < size / 4
    return len(numbers[stack]) if is_alone and max(numbers[stack]) + 1 == len(numbers[stack]) else None
