"""An export, planned: which tensors of a source under which names in which files, what goes with them, and what there
is to say about it. Nothing is written until a file is asked for."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Tensor, dotted
from ckpttool.catalogue.patterns import any_of, rule
from ckpttool.errors import UsageError
from ckpttool.formats.safetensors.index import MAX_SHARD_SIZE
from ckpttool.layout import select as layout
from ckpttool.operations import arguments
from ckpttool.operations import write as making
from ckpttool.operations.export import (
    architecture as expected,
)
from ckpttool.operations.export import assets as beside
from ckpttool.operations.export import (
    key_maps as keymaps,
)
from ckpttool.operations.export import (
    model_card as card,
)
from ckpttool.operations.export import (
    select_model as choosing,
)
from ckpttool.operations.export import (
    ties,
    weights,
)
from ckpttool.operations.export.architecture import Expected
from ckpttool.operations.export.assets import Assets
from ckpttool.operations.export.select_model import Chosen
from ckpttool.operations.export.views import Viewed
from ckpttool.operations.write import Conversion
from ckpttool.producers import open as opening
from ckpttool.storage import mirrors
from ckpttool.storage.outgoing import Outgoing
from ckpttool.text import some
from ckpttool.transfer.threads import Progress

# Tiles of a cast are held several times over; smaller ones are as fast, and leave room for torch itself.
_WHILE_CASTING = 24 << 20


@dataclass(slots=True)
class Exported(Conversion):
    """The result of an export, or its plan."""

    parameters: dict[str, int] = field(default_factory=dict)  #: number of elements by dtype, tied ones counted once
    assets: list[str] = field(default_factory=list)  #: files that were copied: config, tokenizer, template, code
    key_map: str = ""  #: key map that was applied, or empty
    adapter: bool = False  #: whether it is a LoRA adapter
    compared: str = ""  #: class of transformers whose tensors were compared; with `--no-strict`, also what differs
    not_compared: str = ""  #: reason why they were not compared
    asked: float = 0.0  #: part of `seconds` that transformers took to build the model
    card: bool = False  #: whether a model card was written
    sent: Any = None  #: what was sent to the Hub; null for a directory


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user asks of an export, whatever the destination: `Wanted(dtype=("bfloat16",), assets="base/")`."""

    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Sequence[str] = ()
    strip_prefix: str | None = None
    key_map: str | None = None
    head_dim: int | None = None
    dtype: Sequence[str] = ()
    max_shard_size: int | str | None = None
    assets: str | None = None
    strict: bool = True
    card: bool = True
    shapes: str | None = None
    threads: int | None = None
    max_memory: int | str | None = None


@dataclass(slots=True)
class Export:
    """A plan: `files` in the order in which they are to be made, and what there is to say of all of them. The source
    is open as long as the block of `planned` lasts. `unless_there` are names of files that give way to one that the
    destination has: a card that nobody has named."""

    files: list[Outgoing]
    made: Exported
    source: Viewed
    laid: Catalogue
    tally: weights.Tally
    unless_there: tuple[str, ...] = ()

    def settle(self) -> Exported:
        """What was done, once every file was made."""
        self.made.checked, self.made.unchecked = self.tally.checked, self.tally.unchecked
        lost = self.tally.overflowed
        if lost:
            self.made.notes.append(
                f"{sum(lost.values())} values of {len(lost)} tensors are too large for their new dtype and are no "
                f"numbers now: {some(sorted(lost))}"
            )
        return self.made


@contextmanager
def planned(src: str, destination: str, wanted: Wanted, progress: Progress | None = None) -> Iterator[Export]:
    """Open the source and plan its export. `destination` is what the plan and the model card call it.

    `progress(done, total)` counts bytes of weights over all files. Raises the errors of `ckpttool.errors`.
    """
    most = arguments.size(wanted.max_shard_size, "--max-shard-size") or MAX_SHARD_SIZE
    memory = arguments.memory(wanted.max_memory)
    with making.given(src, wanted.shapes) as have, _mounted(wanted.assets) as assets:
        with opening.naming(src):
            viewed = Viewed(have.source)
            made = Exported(src, have.catalogue.format, destination, "safetensors")
            found = beside.collect(assets, src, have.catalogue)
            laid = _laid(have.catalogue, viewed, found, wanted, made)
        if memory is None and any(t.dtype != (t.origin or t).dtype for t in laid.tensors):
            memory = _WHILE_CASTING
        watched = making.awaiting(progress, have, laid)
        moving = weights.Moving(viewed, have.before, wanted.threads, memory, watched)
        tally = weights.Tally()
        files = weights.outgoing(laid, most, moving, tally, adapter=made.adapter)
        _summarise(made, laid, have.catalogue)
        files += _rest(found, made, laid, have.catalogue, wanted)
        made.files = [(file.name, file.size) for file in files]
        made.disk = sum(file.size for file in files)
        made.memory = making.expected_memory(laid, made.cast, wanted.threads, memory)
        named = wanted.assets is not None and not made.card
        yield Export(files, made, viewed, laid, tally, () if named else (beside.CARD,))


@contextmanager
def _mounted(folder: str | None) -> Iterator[str | None]:
    """The folder of assets, for as long as they are copied; that of a store as its mirror."""
    mirror = mirrors.mount(folder) if folder is not None else None
    try:
        yield folder if mirror is None else mirror.path
    finally:
        if mirror is not None:
            mirrors.unmount(mirror)


def _laid(source: Catalogue, viewed: Viewed, found: Assets | None, wanted: Wanted, made: Exported) -> Catalogue:
    """The tensors as they are to be written, each with its origin in the source."""
    chosen = choosing.model_of(source, wanted.only)
    chosen = choosing.named_anew(chosen, wanted.exclude, wanted.strip_prefix, wanted.rename)
    chosen = choosing.without_base(chosen)
    made.adapter = chosen.adapter is not None
    made.dropped = chosen.left
    said = found.config if found is not None else None
    if not made.adapter:
        chosen = _mapped(chosen, viewed, said, wanted, made)
    model = _expected(found, made)
    laid = _tied(chosen.catalogue, model, found, viewed, made)
    for pattern in [rule(text, "--dtype")[0] for text in wanted.dtype if "=" in text]:
        if not any(map(any_of([pattern]), (t.name for t in laid.tensors))):
            raise UsageError(f"`--dtype {pattern}=..` matches nothing", hint="patterns are over the names as written")
    laid = layout.cast(laid, layout.caster(wanted.dtype))
    if isinstance(model, Expected) and found is not None:
        _compare(laid, model, found, wanted, made)
    return laid


def _mapped(chosen: Chosen, viewed: Viewed, said: Mapping[str, Any] | None, wanted: Wanted, made: Exported) -> Chosen:
    names = [tensor.name for tensor in chosen.catalogue.tensors]
    keymap = keymaps.chosen(wanted.key_map, names, said)
    if keymap is None:
        return chosen
    head = wanted.head_dim or (beside.head_dim(said) if said is not None else None)
    mapped = keymaps.apply(keymap, chosen.catalogue, viewed, head)
    if len(mapped.unknown) == len(names):
        raise UsageError(
            f"`--key-map {wanted.key_map}`: no rule of it is about a tensor here",
            hint=f"names here are like `{names[len(names) // 2]}`",
        )
    made.key_map = keymap.name
    made.dropped = [*chosen.left, *mapped.left]
    if wanted.key_map is None:
        made.notes.append(f"the names are those of key map `{keymap.name}` ({keymap.title}), which is applied")
    return replace(chosen, catalogue=mapped.catalogue, left=made.dropped)


def _expected(found: Assets | None, made: Exported) -> Expected | str:
    if made.adapter:
        if found is None or beside.ADAPTER not in found.paths:
            made.notes.append(f"PEFT needs an `{beside.ADAPTER}` too, and there is none: pass `--assets`")
        made.not_compared = "a LoRA adapter is no model of its own"
    elif found is None or beside.CONFIG not in found.paths or found.config is None:
        made.not_compared = "there is no `config.json`: pass `--assets` with the directory that has it"
    else:
        began = time.monotonic()
        model = expected.expected(found.config)
        made.asked = time.monotonic() - began
        if not isinstance(model, str):
            return model
        made.not_compared = model
    return made.not_compared


def _tied(laid: Catalogue, model: Expected | str, found: Assets | None, viewed: Viewed, made: Exported) -> Catalogue:
    same = ties.same_bytes(viewed)
    if isinstance(model, Expected):
        tied = ties.by_model(laid, model.tied, same)
    elif made.adapter:
        return laid
    else:
        said = found.config if found is not None else None
        tied = ties.by_names(laid, beside.ties_words(said) if said is not None else None, same)
    made.notes += tied.notes
    return tied.catalogue


def _compare(laid: Catalogue, model: Expected, found: Assets, wanted: Wanted, made: Exported) -> None:
    shapes = {tensor.name: tensor.shape for tensor in laid.tensors if tensor.alias is None}
    compared = expected.compare(shapes, model)
    if compared.differs:
        error = expected.refusal(compared, shapes, model, found.config_path)
        if wanted.strict:
            raise error
        made.not_compared = error.message
        return
    made.compared = f"{model.architecture} of transformers {model.transformers}"
    if compared.prefix:
        what = "without" if compared.prefix[0] == "+" else "with"
        made.notes.append(
            f"the names are {what} `{compared.prefix[1:]}`, which transformers sees to when it loads them"
        )
    if compared.in_memory:
        other = next((name for name in model.files if name not in shapes), "")
        made.notes.append(
            f"the names are those that transformers has in memory; it loads them, but files have others: `{other}`"
        )


def _rest(found: Assets | None, made: Exported, laid: Catalogue, source: Catalogue, wanted: Wanted) -> list[Outgoing]:
    """What goes along with the weights."""
    files: list[Outgoing] = []
    if found is not None:
        files, notes = beside.outgoing(found, _main_dtype(laid), adapter=made.adapter)
        made.notes += [*found.notes, *notes]
        made.assets = [file.name for file in files]
    if wanted.card and beside.CARD not in made.assets:
        named = found.config.get("architectures") if found is not None and found.config is not None else None
        first = str(named[0]) if isinstance(named, list) and named else None
        title = os.path.basename(made.destination.rstrip("/"))
        facts = card.Facts(
            made.source, title, made.source_format, made.parameters, made.tensors, made.bytes, made.key_map, first,
            made.adapter, made.cast,
        )  # fmt: skip
        files.append(beside.of_bytes(beside.CARD, card.text(facts, source).encode()))
        made.card = True
    return files


def _main_dtype(laid: Catalogue) -> str | None:
    """The floating-point dtype of most of the bytes; 8-bit floats are a matter of quantization, not of `dtype`."""
    counted: Counter[str] = Counter()
    for tensor in laid.tensors:
        if tensor.dtype.kind == "float" and tensor.dtype.itemsize > 1:
            counted[tensor.dtype.name] += tensor.nbytes
    return max(counted, key=lambda name: (counted[name], DTYPES[name].itemsize)) if counted else None


def _summarise(made: Exported, laid: Catalogue, source: Catalogue) -> None:
    count: Counter[str] = Counter()
    for tensor in laid.tensors:
        origin = tensor.origin or tensor
        first = _unviewed(origin)
        made.tensors += 1
        if first != tensor.name:
            made.renamed.append((first, tensor.name))
        if origin.dtype != tensor.dtype:
            made.cast.append((tensor.name, origin.dtype.name, tensor.dtype.name))
        if tensor.alias is not None:
            made.ties.append((tensor.name, dotted(tensor.alias)))
        else:
            made.bytes += tensor.nbytes
            count[tensor.dtype.name] += tensor.numel
    made.parameters = dict(count.most_common())
    made.notes[:0] = [*making.taken_of_run(source), *map(str, source.warnings + laid.warnings)]


def _unviewed(tensor: Tensor) -> str:
    return (tensor.origin or tensor).name
