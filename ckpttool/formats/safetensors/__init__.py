"""safetensors: one file, a directory of them, or a whole training state without pickle.

    model.safetensors                                            one file; see `safetensors_header`
    model-00001-of-00002.safetensors .. + model.safetensors.index.json   several; see `sharding`
    [sharded/]shard-00001-model-00001-of-00001.safetensors ..    pieces of tensors, one file per rank (and index)
    model.safetensors optimizer.safetensors .. + ckpttool.json   ours; see `state_json`

Upstream: safetensors 0.8, huggingface_hub 2.4, transformers 5, and torch 2.8 to 2.13 `HuggingFaceStorageWriter`, which
keeps the offset of a piece in the header's `DCP_SHARDING_INFO` and the size of the whole tensor nowhere. A tensor's
path is its name, dots and all; a tied tensor is written once and its other name kept in `__metadata__` (or in the
index), as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

from ckpttool.catalogue.protocols import Format, deferred

FORMAT = Format(
    name="safetensors",
    title="safetensors file or directory",
    recognise=deferred(f"{__name__}.reader", "recognise"),
    open=deferred(f"{__name__}.reader", "open"),
    create=deferred(f"{__name__}.writer", "create"),
    losses=deferred(f"{__name__}.writer", "losses"),
    is_file=lambda path: path.endswith(".safetensors"),
    splits=True,
    sorts_names=True,
    marks="safetensors (its header, or a directory of `*.safetensors`)",
    suffixes=(".safetensors",),
)
