"""Directories of several models: pipelines of diffusers, whose components `model_index.json` names, and models of
sentence-transformers, whose modules `modules.json` names.

The tensors go to the folder of their component or module; what else has weights goes along as it is. A directory that
would not load is refused.
"""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ckpttool.catalogue.entries import Catalogue
from ckpttool.errors import UsageError
from ckpttool.formats import named
from ckpttool.layout import select
from ckpttool.layout.rename import rename_entries
from ckpttool.models import asset_names, assets
from ckpttool.models.assets import Assets
from ckpttool.storage.stores import Location
from ckpttool.text import plural, some

_SAFE = named("safetensors")
# No variants, such as `model.fp16.safetensors`, which are loaded only when asked for.
_FILES = re.compile(r"(diffusion_pytorch_model|model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_OTHER_FILES = re.compile(r"(diffusion_pytorch_model|pytorch_model)(-\d{5}-of-\d{5})?\.bin")
_HAS_WEIGHTS = re.compile(
    r".*\.(Dense|LayerNorm|WeightedLayerPooling|LSTM|CNN|WordEmbeddings|WordWeights|StaticEmbedding)"
)
_FOLDER = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*")
_INNER = re.compile(r"(auto_model|model)\.")


@dataclass(frozen=True, slots=True)
class BundleModule:
    """Tensors with the names that they have in the files of a folder: `BundleModule("2_Dense/", catalogue)`."""

    folder: str
    catalogue: Catalogue


def place(planned: Catalogue, beside: Assets) -> tuple[Catalogue, list[BundleModule]]:
    """Return the tensors of the model that the config is of, and those of other modules. `main` of the assets becomes
    the folder of that model. Raises UsageError for a directory that would not load."""
    if beside.folder is None:
        return planned, []
    if asset_names.MODULES in beside.paths:
        return _place_modules(planned, beside, beside.folder)
    if asset_names.PIPELINE in beside.paths and assets.CONFIG not in beside.paths:
        return _place_component(planned, beside, beside.folder), []
    return planned, []


# Pipelines ------------------------------------------------------------------------------------------------------------


def _place_component(planned: Catalogue, beside: Assets, folder: Location) -> Catalogue:
    """Find the component that has these tensors, and let the weights of the others go along."""
    shapes = _shapes(planned)
    stored: dict[str, dict[str, Any]] = {}
    for name in asset_names.components(folder):
        if not (folder / name).is_dir():
            raise _incomplete(folder, f"`{asset_names.PIPELINE}` names `{name}`, and there is no such folder")
        if files := _weights(folder, name):
            stored[name] = _stored(folder, files)
    found = [name for name, there in stored.items() if there == shapes]
    if len(found) != 1:
        what = (
            f"{plural(len(found), 'component')} of this pipeline {'has' if len(found) == 1 else 'have'} these tensors"
        )
        listed = some(found or list(stored))
        raise UsageError(
            f"`{folder}`: {what if found else f'no component of this pipeline has these tensors: {listed}'}",
            hint=f"`--assets {folder}/{(found or [*stored, 'COMPONENT'])[0]}` exports a component alone",
            found=found,
        )
    for name in stored.keys() - set(found):
        for path in _weights(folder, name):
            beside.paths[path] = folder.inside(path)
    beside.notes.append(f"the tensors are those of component `{found[0]}`; the others are copied from `{folder}`")
    assets.settle(beside, f"{found[0]}/")
    return planned


# Modules of sentence-transformers -------------------------------------------------------------------------------------


def _place_modules(planned: Catalogue, beside: Assets, folder: Location) -> tuple[Catalogue, list[BundleModule]]:
    modules = _modules(beside.paths[asset_names.MODULES])
    paths = {str(one.get("name", one.get("idx"))): str(one.get("path") or "") for one in modules}
    kinds = {str(one.get("name", one.get("idx"))): str(one.get("type")) for one in modules}
    main = next((key for key, kind in kinds.items() if kind.endswith("Transformer")), None)
    if main is None or any(kind.endswith(".Router") for kind in kinds.values()):
        what = "a Router" if main is not None else "no Transformer"
        raise _incomplete(folder, f"`{asset_names.MODULES}` has {what}, which is not known how to export")
    for path in paths.values():
        if path and not _FOLDER.fullmatch(path):
            raise _incomplete(folder, f"`{asset_names.MODULES}` names `{path}`, which points outside of it")
    heads = {tensor.name.partition(".")[0] for tensor in planned.tensors}
    is_indexed = heads <= paths.keys()
    if is_indexed and main not in heads:
        raise _incomplete(folder, f"there are tensors of module {some(sorted(heads))}, and none of `{main}`")
    others = [_module(planned, key, paths[key], folder) for key in heads - {main}] if is_indexed else []
    for key, path in paths.items():
        written = any(one.folder == f"{path}/" for one in others)
        if key == main or written or kinds[key].endswith(".Normalize"):
            continue
        if not path or not (folder / path).is_dir():
            raise _incomplete(folder, f"`{asset_names.MODULES}` names `{path}`, and there is no such folder")
        files = _weights(folder, path)
        if not files and _HAS_WEIGHTS.fullmatch(kinds[key]):
            raise _incomplete(folder, f"`{path}` has no weights, and neither has the checkpoint")
        for name in files:
            beside.paths[name] = folder.inside(name)
        if files:
            beside.notes.append(f"the weights of `{path}` are copied from `{folder}`: the checkpoint has none")
    assets.settle(beside, f"{paths[main]}/" if paths[main] else "")
    return (_part(planned, f"{main}.", _INNER) if is_indexed else planned), others


def _module(planned: Catalogue, key: str, path: str, folder: Location) -> BundleModule:
    own = _part(planned, f"{key}.")
    if not path:
        raise _incomplete(folder, f"module `{key}` has tensors, and no folder in `{asset_names.MODULES}`")
    files = _weights(folder, path, strict=False) if (folder / path).is_dir() else []
    if files and _stored(folder, files) != _shapes(own):
        raise _incomplete(folder, f"the tensors of module `{key}` are not those of `{path}`")
    return BundleModule(f"{path}/", own)


def _part(planned: Catalogue, prefix: str, inner: re.Pattern[str] | None = None) -> Catalogue:
    chosen = select.select(planned, lambda entry: entry.name.startswith(prefix))

    def own_name(name: str) -> str:
        name = name.removeprefix(prefix)
        match = inner.match(name) if inner is not None else None
        return name[match.end() :] if match is not None else name

    return rename_entries(chosen, own_name)


def _modules(path: Location) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read())
    except (ValueError, RecursionError):
        modules = None
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise UsageError(f"`{path}`: not a list of modules", hint="take the one that sentence-transformers saved")
    return modules


# Weights that are there -----------------------------------------------------------------------------------------------


def _weights(folder: Location, inner: str, *, strict: bool = True) -> list[str]:
    """Return the names of the weights in a folder. Raises UsageError if they are not safetensors."""
    names = (folder / inner).names()
    found = [f"{inner}/{name}" for name in names if _FILES.fullmatch(name)]
    if strict and not found and any(map(_OTHER_FILES.fullmatch, names)):
        raise _incomplete(folder, f"the weights of `{inner}` are not safetensors, which alone are copied")
    return found


def _stored(folder: Location, files: list[str]) -> dict[str, Any]:
    shapes: dict[str, Any] = {}
    for name in files:
        if name.endswith(".safetensors"):
            with closing(_SAFE.open(folder / name)) as source:
                shapes |= _shapes(source.catalogue)
    return shapes


def _shapes(catalogue: Catalogue) -> dict[str, Any]:
    return {tensor.name: tensor.shape for tensor in catalogue.tensors if tensor.alias is None}


def _incomplete(folder: Location, why: str) -> UsageError:
    hint = "name a complete directory with `--assets`, or that of one component"
    return UsageError(f"`{folder}`: {why}", hint=hint)
