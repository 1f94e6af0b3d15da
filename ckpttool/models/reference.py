"""References: models that others are to fit, of which only headers are read, or the config alone.

with ExitStack() as stack:
    reference = read(stack, "hf://Qwen/Qwen3-0.6B")
    reference.known["model.norm.weight"]            # Known((1024,), "bfloat16")
    reference.files["model.safetensors"][:2]        # names in the order of their bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.chosen import notes_of_run
from ckpttool.catalogue.entries import Catalogue, Tensor, dotted
from ckpttool.errors import UsageError
from ckpttool.layout.rename import rename_entries, strip_wrappers
from ckpttool.layout.select import models
from ckpttool.layout.views import Viewed
from ckpttool.models import architecture, assets, select_model
from ckpttool.models.assets import Assets
from ckpttool.producers.open import naming, opened
from ckpttool.serialization import strict_json
from ckpttool.storage.stores import Location, locate
from ckpttool.text import some

_MAX_CONFIG = 16 << 20


@dataclass(slots=True)
class Known:
    """What is known of a tensor of a model without its values: `Known((32, 8), "bfloat16")`. `dtype` is empty if only a
    config is known; `tied_to` is the name of the tensor whose bytes it shares."""

    shape: Ints
    dtype: str
    tied_to: str | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Known:
        """Return what is known of a tensor of a catalogue."""
        return cls(tensor.shape, tensor.dtype.name, dotted(tensor.alias) if tensor.alias is not None else None)


@dataclass(slots=True)
class Reference:
    """What is known of a reference: its tensors by name, in its order; without a source, by its config alone.

    `files` are the names in each safetensors file, in the order of their bytes: empty for other formats. `folder` is
    the directory with the files beside the weights, and `assets` are those. `notes` say which checkpoint of a run is
    meant.
    """

    path: str
    known: dict[str, Known]
    folder: Location
    assets: Assets
    source: Viewed | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def with_values(self) -> Viewed:
        """Return the source, for `--content`. Raises UsageError if there is a config alone."""
        if self.source is None:
            hint = "name a checkpoint instead of its config"
            raise UsageError("`--content` compares values, and the reference has none", hint=hint)
        return self.source

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The parsed `config.json`, if there is one."""
        return self.assets.config


def read(stack: ExitStack, path: str, *, is_run: bool = False) -> Reference:
    """Return the reference at `path`: a checkpoint of any format or `hf://org/name`, of which only headers are read; or
    a `config.json`, of which transformers makes the model without weights. It is open until `stack` is closed.

    Of a run's checkpoint with several models, it is that which is trained, and names are without wrappers. Raises
    UsageError for a config whose model is unknown, ReadError and CorruptError.
    """
    location = locate(path)
    stack.callback(location.store.close)
    if location.name.endswith(".json") and location.is_file() and not location.name.endswith(".index.json"):
        return _of_config(path, location)
    with naming(path):
        source = stack.enter_context(opened(location))
        of_run = [dotted(root) for root, _ in models(source.catalogue)[:1] if root] if is_run else []
        model = _model(source.catalogue, path, of_run)
        model = rename_entries(model, strip_wrappers) if is_run else model
        beside = assets.collect(None, source.catalogue)
    tensors = {tensor.name: tensor for tensor in model.tensors}
    known = {name: Known.of(tensor) for name, tensor in tensors.items()}
    folder = beside.folder or (location if location.is_dir() else location.parent)
    files = _files(source.catalogue.files, tensors) if source.catalogue.format == "safetensors" else {}
    notes = notes_of_run(source.catalogue, path)
    return Reference(path, known, folder, beside, Viewed(source), tensors, files, notes)


def _model(source: Catalogue, path: str, only: list[str]) -> Catalogue:
    try:
        return select_model.model_of(source, only)
    except UsageError as error:
        names = [dotted(root) for root, _ in models(source)]
        if only or len(names) < 2:
            raise
        raise UsageError(
            f"a reference is one model, and there are {len(names)}: {some(names, 5)}",
            hint=f"`ckpttool convert {path} reference.safetensors --only {names[0]}` makes one of them",
            found=names,
        ) from error


def _of_config(path: str, location: Location) -> Reference:
    config = strict_json.parse(location.head(_MAX_CONFIG), f"`{path}`")
    expected = architecture.expected(config) if isinstance(config, dict) else "it is not an object"
    if isinstance(expected, str):
        hint = "name a checkpoint, or install what is missing: `pip install transformers`"
        raise UsageError(f"`{path}`: the tensors of this config are unknown: {expected}", hint=hint)
    known = {name: Known(tuple(shape), "") for name, shape in expected.files.items()}
    return Reference(path, known, location.parent, Assets(config=config))


def _files(files: list[Any], tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in the order of their bytes. Tied ones are where their bytes are
    under the first of their names."""
    places = [
        (tensor.chunks.file[0], tensor.chunks.offset[0], number, name)
        for number, (name, tensor) in enumerate(tensors.items())
        if len(tensor.chunks) == 1 and tensor.alias is None
    ]
    named: dict[str, list[str]] = {}
    for file, _, _, name in sorted(places):
        named.setdefault(files[file].name, []).append(name)
    return named
