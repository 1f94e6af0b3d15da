"""Write the key maps of transformers: from the names that it has in memory to those that `save_pretrained` writes.

    python -m support.generate_key_maps        # from `tests/`: about three minutes

Each is what the registry of the installed transformers says of small models of every class of a model type. Where two
classes of one type differ, the second has a file of its own.
"""

from __future__ import annotations

import datetime
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from ckpttool.layout.key_maps import FORMAT
from ckpttool.models import key_maps, written_names
from ckpttool.models.written_names import WrittenNames
from support import tiny_models

FOLDER = Path(key_maps.FOLDER) / "transformers"


def generated() -> dict[str, str]:
    """The text of each file, by the model type or class that it is for."""
    found: dict[str, list[WrittenNames]] = {}
    titles: dict[str, str] = {}
    for model_type, kind in tiny_models.classes():
        written = [one for model in models(model_type, kind) for one in _written(model)]
        for name in (model_type, kind.__name__):
            try:
                written_names.rules([*found.get(name, []), *written])
            except ValueError:
                continue
            found.setdefault(name, []).extend(written)
            titles[name] = kind.__name__
            break
    rules = {name: written_names.rules(written) for name, written in found.items()}
    return {name: _text(name, each) for name, each in sorted(rules.items()) if each}


def models(model_type: str, kind: Any) -> Iterator[Any]:
    """Models of a class on the meta device, as far as it can be made small."""
    # With nine layers it has each kind of layer; where all are sparse by default, the first one may be dense.
    for layers in (2, 9):
        try:
            config = tiny_models.config(model_type, layers)
            for one in (config, *(getattr(config, key) for key in config.sub_configs)):
                types = getattr(one, "mlp_layer_types", None)
                if layers > 2 and types and "dense" not in types:
                    one.mlp_layer_types = ["dense", *types[1:]]
            with torch.device("meta"):
                model = kind(config)
        # Some models cannot be made so small, or need a library that is not installed.
        except Exception as error:
            warnings.warn(f"{kind.__name__}: {error!r:.200}", stacklevel=1)
        else:
            yield model


def _written(model: Any) -> list[WrittenNames]:
    state = model.state_dict()
    # A config may ask for a bias where the default has none.
    biases = {
        f"{name[:-6]}bias": t.flatten(1)[:, 0] for name, t in state.items() if name.endswith(".weight") and t.ndim > 1
    }
    try:
        try:
            return written_names.of_model(model, {**biases, **state})
        except IndexError:  # of an axis that no bias has
            return written_names.of_model(model, state)
    except NotImplementedError as error:
        warnings.warn(f"{type(model).__name__}: {error}", stacklevel=1)
        return []


def _text(name: str, rules: Sequence[Any]) -> str:
    lines = ",\n".join("    " + json.dumps(rule) for rule in rules)
    made = {"transformers": transformers.__version__, "date": f"{datetime.date.today()}"}
    title = f"{name} as transformers 5 has it in memory"
    head = {"format": FORMAT, "name": f"{name}-transformers", "title": title, "generated": made}
    begin = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{begin}  "rules": [\n{lines}\n  ]\n}}\n'


def main() -> None:
    """Write the files, and remove those of models that are written as they are."""
    transformers.utils.logging.set_verbosity_error()
    files = generated()
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in files.items():
        (FOLDER / f"{name}.json").write_text(text)


if __name__ == "__main__":
    main()
