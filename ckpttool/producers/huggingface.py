"""What accelerate, the Trainer of transformers and `save_pretrained` leave.

    model.safetensors pytorch_model.bin pytorch_model_fsdp.bin      the model, whole
    pytorch_model_fsdp_0/ optimizer_0/                              DCP, keys under `model`, `optimizer`
    pytorch_model_fsdp_rank3.bin pytorch_model_fsdp_0_rank3.bin     LOCAL; SHARDED without DCP: a file for each rank
    optimizer.bin scheduler.bin sampler.bin scaler.pt random_states_3.pkl custom_checkpoint_0.pkl         accelerate
    optimizer.pt scheduler.pt rng_state_3.pth rng_state.pth trainer_state.json training_args.bin          Trainer

Upstream: accelerate 1.15 `checkpointing.py` and `utils/fsdp_utils.py`, transformers 5.23 `trainer.py`. The second
model or optimizer has `_1` in its name. Beside LOCAL files the optimizer is saved through DCP, which knows the shapes.
"""

from __future__ import annotations

from ckpttool.producers.directory import Listing
from ckpttool.producers.pieces import ASSET, EACH, KNOWN, MANY, SET, VALUES, Layout, Mount, Piece, Producer, lay_out

ASSETS = (
    r"(config|generation_config|added_tokens|special_tokens_map|chat_template|adapter_config|quantization_config"
    r"|[a-z_]*processor_config|[a-z_]*tokenizer_config|tokenizer|vocab|modules|preprocessor)\.json"
    r"|(all|train|eval|predict|test)_results\.json|vocab\.txt|merges\.txt|.*\.model|.*\.jinja|.*\.tiktoken|README\.md|LICENSE.*|.*\.py"
)
# Of a repository that the files lie in, and not of the model.
_REPOSITORY = Piece(r"\.git(/|attributes|ignore|keep|modules)", how=KNOWN)
_I = r"(_(?P<i>\d+))?"
_MODEL = (
    Piece(r"pytorch_model_fsdp_(?P<i>\d+)/", "model", below="model"),
    Piece(rf"pytorch_model_fsdp{_I}\.bin", "model"),
    Piece(rf"pytorch_model_fsdp{_I}_rank(?P<rank>\d+)\.bin", "model", SET, shapes_from="optimizer_{i}/"),
    Piece(r"model\.safetensors\.index\.json", "model"),
    Piece(rf"model{_I}\.safetensors", "model"),
    Piece(r"model-\d+-of-\d+\.safetensors", how=KNOWN),
    Piece(rf"pytorch_model{_I}\.bin", "model"),
    Piece(r"pytorch_model-\d+-of-\d+\.bin", "model", MANY),
    Piece(r"pytorch_model\.bin\.index\.json", how=KNOWN),
    Piece(r"adapter_model\.(safetensors|bin)", "model"),
)
_OPTIMIZER = (
    Piece(r"optimizer_(?P<i>\d+)/", "optimizer", below="optimizer"),
    Piece(rf"optimizer{_I}\.(bin|pt)", "optimizer"),
    Piece(rf"optimizer{_I}_rank(?P<rank>\d+)\.bin", "optimizer", SET),
)
_REST = (
    Piece(rf"scheduler{_I}\.(bin|pt)", "scheduler"),
    Piece(r"scaler\.pt", "scaler"),
    Piece(ASSETS, how=ASSET),
    _REPOSITORY,
)
_ACCELERATE = (
    *_MODEL,
    *_OPTIMIZER,
    Piece(rf"sampler{_I}\.bin", "sampler"),
    Piece(rf"dl_state_dict{_I}\.bin", "dataloader"),
    Piece(r"random_states_(?P<rank>\d+)\.pkl", "rng", EACH),
    Piece(r"custom_checkpoint_(?P<n>\d+)\.pkl", "custom_checkpoint_{n}"),
    *_REST,
)
_TRAINER = (
    *_MODEL,
    *_OPTIMIZER,
    Piece(r"rng_state_(?P<rank>\d+)\.pth", "rng", EACH),
    Piece(r"rng_state\.pth", "rng"),
    Piece(r"trainer_state\.json", "trainer_state", VALUES),
    Piece(r"training_args\.bin", "training_args"),
    *_REST,
)
# The output directory of the Trainer holds its last model too, beside the checkpoints.
CHECKPOINT = r"checkpoint-\d+/"
_BESIDE = (Piece(CHECKPOINT, how=KNOWN), Piece(r"(runs|logs|wandb)/", how=KNOWN))
_WEIGHTS = r"(?!training_args).*\.(bin|pt|pth|ckpt|h5|msgpack|onnx|gguf|ot)"
_PRETRAINED = (
    Piece(r"pytorch_model\.bin"),
    Piece(r"pytorch_model-\d+-of-\d+\.bin", how=MANY),
    Piece(r"pytorch_model\.bin\.index\.json", how=KNOWN),
    _REPOSITORY,
    Piece(rf"(?!{_WEIGHTS}$).*[^/]", how=ASSET),
    Piece(r".*/", how=KNOWN),
)


def _is_accelerate(listing: Listing) -> bool:
    return listing.has(r"random_states_\d+\.pkl|optimizer\.bin|pytorch_model_fsdp(_\d+)?(/|\.bin|_rank\d+\.bin)")


def _is_trainer(listing: Listing) -> bool:
    return "trainer_state.json" in listing


def _is_pretrained(listing: Listing) -> bool:
    if (
        not listing.has(r"(adapter_)?config\.json")
        or "ckpttool.json" in listing
        or listing.has(r"\.metadata|__\d+\.metadata")
    ):
        return False
    return listing.has(r".*\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin")


def _accelerate(listing: Listing) -> Layout:
    return _checked(listing, lay_out(listing, _ACCELERATE, ("model", "optimizer", "rng")))


def _trainer(listing: Listing) -> Layout:
    return _checked(listing, lay_out(listing, (*_TRAINER, *_BESIDE), ("model", "optimizer", "rng")))


def _pretrained(listing: Listing) -> Layout:
    """The format of safetensors knows how the files of a model belong together; those of torch.save are ours."""
    if not listing.has(r".*\.safetensors"):
        return _checked(listing, lay_out(listing, _PRETRAINED))
    pieces = (Piece(r".*\.safetensors(\.index\.json)?", how=KNOWN), *_PRETRAINED[2:])
    made = lay_out(listing, pieces)
    made.mounts = [Mount("")]
    return _checked(listing, made)


def _checked(listing: Listing, made: Layout) -> Layout:
    """The files that an index names must be there."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        table = listing.facts(index).get("weight_map")
        if isinstance(table, dict):
            gone = sorted({str(name) for name in table.values()} - set(listing.names))
            made.missing += [f"`{name}` is missing, but `{index}` names it" for name in gone[:3]]
    return made


PRODUCERS = (
    Producer("transformers Trainer", "a `checkpoint-N` of the Trainer of transformers", _is_trainer, _trainer),
    Producer("accelerate", "what `Accelerator.save_state` of accelerate leaves", _is_accelerate, _accelerate),
)
PRETRAINED = Producer("transformers", "a model directory of transformers", _is_pretrained, _pretrained)
# What may lie in a directory as a model of its own, beside the checkpoints of the run.
FINAL = (PRODUCERS[0], PRETRAINED)
