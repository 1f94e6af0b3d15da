"""Frameworks whose checkpoints are read and not written.

    Composer             ep1-ba20/{.metadata, __R_0.distcp, composer_metadata.json}   everything under `state`
    Megatron Core        iter_0000010/{.metadata, __R_0.distcp, common.pt, metadata.json}
    Lightning, Fabric    x.ckpt/{.metadata, __R_0.distcp, meta.pt}
    OLMo-core, OLMo      step10/{config.json, .metadata.json, train/rank0.pt, model_and_optim/.metadata}
    OLMo, unsharded      step10-unsharded/{model,optim,train}.pt, config.yaml
    OLMo, old            step10/rank0.pt, config.yaml                                 FSDP1, one file per rank
    torch_checkpointing  step-10/{app_0.pt, app_1.pt, metadata.pkl}                   written as `tmp_step-10`
    torchtune            epoch_0/{model-00001-of-00002.bin, adapter_model.pt}         recipe_state.pt is elsewhere
    PyTorch's example    dcp_api/1763882964123/{model,optim}_state_dict.pt            FSDP2, gathered; the time of day

Upstream: composer `utils/checkpoint.py`, pytorch-lightning `fabric/strategies/fsdp.py`,
OLMo-core `train/checkpoint.py`, OLMo `checkpoint.py`, torch_checkpointing 0.1.1, pytorch/examples
`distributed/FSDP2/checkpoint.py`, torchtune 0.6.1 `training/checkpointing/_checkpointer.py`.
"""

from __future__ import annotations

from ckpttool.catalogue.warning import Warning
from ckpttool.producers.components import DCP_FILE, DCP_FILES, TEXTS, Layout, Pattern, Producer, match_components
from ckpttool.serialization.directory import Directory

COMPOSER = Producer(
    "Composer",
    (DCP_FILE,),
    (DCP_FILES, Pattern(r".*\.symlink", kind="asset"), Pattern(r"composer_metadata\.json", kind="asset")),
    folder="ep.*-ba.*",
    whole=True,
    confirm=lambda catalogue: any(path[:1] == ("state",) for path in catalogue.entries),
)
LIGHTNING = Producer("Lightning", (r"meta\.pt", DCP_FILE), (DCP_FILES, Pattern(r"meta\.pt")), whole=True)
MEGATRON = Producer(
    "Megatron Core",
    (DCP_FILE, r"metadata\.json"),
    (
        DCP_FILES,
        Pattern(r"common\.pt"),
        Pattern(r"(metadata|integrity)\.json|(modelopt_)?run_config\.yaml", kind="asset"),
    ),
    whole=True,
    applies=lambda directory: "sharded_backend" in directory.facts("metadata.json"),
)
TORCH_CHECKPOINTING = Producer(
    "torch_checkpointing",
    (r"metadata\.pkl", r"\w+_\d+\.pt"),
    (
        Pattern(r"(checkpoint|other)_(?P<rank>\d+)\.pt", kind="rank files"),
        Pattern(r"(?P<item>\w+?)_(?P<rank>\d+)\.pt", "{item}", "rank files"),
        Pattern(r"metadata\.pkl", kind="asset"),
    ),
)
PYTORCH_EXAMPLE = Producer(
    "PyTorch FSDP2 example",
    (r"model_state_dict\.pt", r"optim_state_dict\.pt"),
    (Pattern(r"model_state_dict\.pt", "model"), Pattern(r"optim_state_dict\.pt", "optim")),
)

_OF_TORCHTUNE = r"(ft-)?model-\d+-of-\d+"

TORCHTUNE = Producer(
    "torchtune",
    (rf"recipe_state\.pt|{_OF_TORCHTUNE}\.bin", rf"{_OF_TORCHTUNE}\.(safetensors|bin)|adapter_model\.pt"),
    (
        Pattern(rf"{_OF_TORCHTUNE}\.(safetensors|bin)", "model", "shard"),
        Pattern(r"(model\.safetensors|pytorch_model\.bin)\.index\.json", kind="ignored"),
        Pattern(r"adapter_model\.pt", "adapter_model"),
        Pattern(r"adapter_model\.(safetensors|bin)", "adapter_model", unless="adapter_model.pt"),  # the same for PEFT
        Pattern(r"recipe_state\.pt"),
        TEXTS,  # of the weights that training began with
        Pattern(r"epoch_\d+/", kind="ignored"),
    ),
    checkpoint_folders=r"epoch_\d+/",
)

_OF_OLMO = Pattern(r"rank(?P<rank>\d+)\.pt", kind="rank files")
_CONFIG = Pattern(r"config\.yaml", kind="asset")


def _add_train(directory: Directory, layout: Layout) -> None:
    if "train/" in directory:
        layout.merge(match_components(directory.folder("train"), (_OF_OLMO,)), "train")
    elif "train.pt" not in directory:
        text = "there is no `train` in it: no progress, no data loader, no random states"
        layout.warnings.append(Warning("missing-part", text))


OLMO = (
    Producer(
        "OLMo-core",
        ("model_and_optim/",),
        (
            Pattern(r"model_and_optim/"),
            Pattern(r"config\.(json|yaml)|\.metadata\.json|data_paths\.txt", kind="asset"),
            Pattern(r"train/", kind="ignored"),
        ),
        adjust=_add_train,
    ),
    Producer(
        "OLMo",
        (r"config\.yaml", r"model\.(pt|safetensors)", r"optim\.(pt|safetensors)|train\.pt"),
        (
            Pattern(r"model\.(pt|safetensors)", "model"),
            Pattern(r"optim\.(pt|safetensors)", "optim"),
            Pattern(r"train\.pt"),
            _CONFIG,
        ),
        expected=("model", "optim"),
        adjust=_add_train,
    ),
    Producer("OLMo, old", (r"config\.yaml", r"rank\d+\.pt"), (_OF_OLMO, _CONFIG)),
)
