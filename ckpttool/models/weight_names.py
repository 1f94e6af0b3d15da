"""The names under which libraries look for the weights of a released model, and which of them take the place of others.
Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

# Weights of an earlier export, in another number of shards, another format or another dtype. Loaders would take them in
# place of the new ones or mix both; with an `adapter_config.json`, PEFT would put the adapter on the new model.
_STALE_MODEL = re.compile(
    r"model(\.\w+)?(-\d{5}-of-\d{5})?(\.\w+)?\.safetensors|model\.safetensors\.index(\.\w+)?\.json"
    r"|pytorch_model(\.\w+)?(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index(\.\w+)?\.json"
    r"|consolidated([.-][\w-]+)?\.(safetensors|pth)|consolidated\.safetensors\.index\.json"
    r"|tf_model(-\d{5}-of-\d{5})?\.h5(\.index\.json)?|flax_model(-\d{5}-of-\d{5})?\.msgpack(\.index\.json)?"
    r"|rust_model\.ot|adapter_config\.json|adapter_model\.(safetensors|bin)"
)
_STALE_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
_STALE_DIFFUSION = re.compile(
    r"diffusion_(pytorch|flax)_model(\.\w+)?(-\d{5}-of-\d{5})?\.(safetensors|bin|msgpack)"
    r"|diffusion_pytorch_model\.(safetensors|bin)\.index(\.\w+)?\.json"
)
_STALE = {
    re.compile(r"diffusion_pytorch_model(-\d{5}-of-\d{5})?\.safetensors"): _STALE_DIFFUSION,
    re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors"): _STALE_MODEL,
    re.compile(r"adapter_model\.safetensors"): _STALE_ADAPTER,
}


def outdated(names: Collection[str], there: Collection[str]) -> set[str]:
    """Return which files of a repository are weights that those of these names replace. Pure."""
    # The components of a pipeline have weights in folders of their own.
    written = {name.rpartition("/")[::2] for name in names}
    patterns = {(place, old) for place, name in written for new, old in _STALE.items() if new.fullmatch(name)}
    return {
        path
        for path in {*there} - {*names}
        if any(place == path.rpartition("/")[0] and old.fullmatch(path.rpartition("/")[2]) for place, old in patterns)
    }
