"""Frameworks that save through DCP, or as torch does it itself.

    Lightning, Fabric     x.ckpt/{.metadata, __R_0.distcp, meta.pt}      modules and optimizers; the rest in meta.pt
    Composer              ep1-ba20/{.metadata, __R_0.distcp}             everything under `state`, and `rng` by rank
    torchtitan            step-10/{.metadata, __R_0.distcp}              model keys at the root, flattened optimizer
                          step-10/{sharded/, model-*.safetensors}        the last one, for transformers
    OLMo-core, OLMo       step10/{config.json, .metadata.json, train/rank0.pt, model_and_optim/.metadata}
    OLMo, unsharded       step10-unsharded/{model,optim,train}.pt, config.yaml
    OLMo, old             step10/rank0.pt, config.yaml                   FSDP1, a file for each rank
    torch_checkpointing   step-10/{app_0.pt, app_1.pt, metadata.pkl}     written as tmp_step-10, then renamed

Upstream: pytorch-lightning `fabric/strategies/fsdp.py`, composer `utils/checkpoint.py`, torchtitan
`components/checkpoint.py`, OLMo-core `train/checkpoint.py`, OLMo `checkpoint.py`, torch_checkpointing 0.1.1.
"""

from __future__ import annotations

from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.warning import Warning
from ckpttool.producers.directory import Listing
from ckpttool.producers.pieces import ASSET, KNOWN, SET, Layout, Mount, Piece, Producer, lay_out

_DCP = r"(\.metadata|__\d+\.metadata|.*\.distcp)"
_IN_DCP = (Piece(rf"{_DCP}|\.metadata\.tmp|__\d+\.metadata\.tmp|\.metadata\.bck", how=KNOWN),)


def is_dcp(listing: Listing) -> bool:
    """Whether the files of DCP lie in a directory, the index or not."""
    return listing.has(_DCP)


def _beside_dcp(listing: Listing, pieces: tuple[Piece, ...] = ()) -> Layout:
    made = lay_out(listing, (*_IN_DCP, *pieces))
    made.mounts.insert(0, Mount(""))
    return made


def _lightning(listing: Listing) -> Layout:
    return _beside_dcp(listing, (Piece(r"meta\.pt"),))


def _is_composer(listing: Listing) -> bool:
    return is_dcp(listing) and listing.name.startswith("ep") and "-ba" in listing.name


def _composer(listing: Listing) -> Layout:
    return _beside_dcp(listing, (Piece(r".*\.symlink", how=KNOWN), Piece(r"composer_metadata\.json", how=ASSET)))


def _says_composer(catalogue: Catalogue) -> bool:
    return any(path[:1] == ("state",) for path in catalogue.entries)


def _is_titan(listing: Listing) -> bool:
    return listing.name.removeprefix("step-").isdecimal() and (is_dcp(listing) or "sharded/" in listing)


def _titan(listing: Listing) -> Layout:
    return _beside_dcp(listing, (Piece(r".*\.safetensors(\.index\.json)?|sharded/", how=KNOWN),))


def _says_titan(catalogue: Catalogue) -> bool:
    """A model at the root with its optimizer beside it; a step that is only a model could be anybody's."""
    roots = {str(path[0]).partition(".")[0] for path in catalogue.entries if path}
    return "model" not in roots and ("train_state" in roots or {"optimizer", "lr_scheduler"} <= roots)


_OLMO_CORE = (
    Piece(r"model_and_optim/"),
    Piece(r"config\.(json|yaml)|\.metadata\.json|data_paths\.txt", how=ASSET),
)
_OLMO_TRAIN = (Piece(r"rank(?P<rank>\d+)\.pt", how=SET),)
_OLMO_WHOLE = (
    Piece(r"model\.(pt|safetensors)", "model"),
    Piece(r"optim\.(pt|safetensors)", "optim"),
    Piece(r"train\.pt"),
    Piece(r"config\.yaml", how=ASSET),
)
_OLMO_OLD = (Piece(r"rank(?P<rank>\d+)\.pt", how=SET), Piece(r"config\.yaml", how=ASSET))


def _olmo_core(listing: Listing) -> Layout:
    made = lay_out(listing, (*_OLMO_CORE, Piece(r"train/", how=KNOWN)))
    if "train/" in listing:
        made.merge(lay_out(listing.folder("train"), _OLMO_TRAIN), "train")
    else:
        text = "there is no `train/` in it: no progress, no data loader, no random states"
        made.warnings.append(Warning("missing-part", text))
    return made


def _is_olmo_whole(listing: Listing) -> bool:
    return "config.yaml" in listing and listing.has(r"model\.(pt|safetensors)")


def _olmo_whole(listing: Listing) -> Layout:
    made = lay_out(listing, _OLMO_WHOLE, ("model", "optim"))
    if "train.pt" not in listing:
        text = "there is no `train.pt` in it: no progress, no random states"
        made.warnings.append(Warning("missing-part", text))
    return made


def _is_olmo_old(listing: Listing) -> bool:
    return "config.yaml" in listing and listing.has(r"rank\d+\.pt")


def _olmo_old(listing: Listing) -> Layout:
    return lay_out(listing, _OLMO_OLD)


_TORCH_CHECKPOINTING = (
    Piece(r"(checkpoint|other)_(?P<rank>\d+)\.pt", how=SET),
    Piece(r"(?P<item>model)_(?P<rank>\d+)\.pt", "{item}", SET),
    Piece(r"(?P<item>\w+?)_(?P<rank>\d+)\.pt", "{item}", SET),
    Piece(r"metadata\.pkl", how=KNOWN),
)


def _is_torch_checkpointing(listing: Listing) -> bool:
    return "metadata.pkl" in listing and listing.has(r"\w+_\d+\.pt")


def _torch_checkpointing(listing: Listing) -> Layout:
    return lay_out(listing, _TORCH_CHECKPOINTING)


PRODUCERS = (
    Producer(
        "Lightning", "a sharded checkpoint of Lightning or Fabric",
        lambda listing: "meta.pt" in listing and is_dcp(listing), _lightning,
    ),
    Producer("Composer", "a sharded checkpoint of Composer", _is_composer, _composer, _says_composer),
    Producer("torchtitan", "a `step-N` of torchtitan", _is_titan, _titan, _says_titan),
    Producer(
        "OLMo-core", "a `stepN` of OLMo-core, or of OLMo in its new form",
        lambda listing: "model_and_optim/" in listing, _olmo_core,
    ),
    Producer("OLMo", "a `stepN-unsharded` of OLMo", _is_olmo_whole, _olmo_whole),
    Producer("OLMo, old", "a `stepN` of OLMo in its old form", _is_olmo_old, _olmo_old),
    Producer("torch_checkpointing", "a `step-N` of torch_checkpointing", _is_torch_checkpointing, _torch_checkpointing),
)  # fmt: skip
