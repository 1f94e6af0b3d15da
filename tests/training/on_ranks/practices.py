"""What people do today to load (shared guides' ways 1 to 7), by torch's own functions, and the same by `ckpttool.load`.

Each trains a run, saves it as the practice has it, and loads it twice: as the practice has it, and by us. Both are
compared with the run that was saved, trained on, and compared again: model, optimizer and losses, bit by bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import training_scripts
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import Run
from training_scripts import HOME, KINDS, SMALL, difference

import ckpttool

Load = Callable[[Run, Path], None]
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def fresh(kind: str, trained: bool = False, device: str = "") -> Run:
    """A run with two parameter groups, by names that a flat parameter can keep apart."""
    model = training_scripts.bare(SMALL, device)
    names = [name for name, _ in model.named_parameters()]
    blocks = [name for name in names if name.startswith("layers.")]
    model = KINDS[kind](model)
    run = Run(model, training_scripts.optimizer_for(model, [blocks, [n for n in names if n not in blocks]]), None)
    if trained:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.02)
        for group, rate, decay in zip(run.optimizer.param_groups, (1e-2, 3e-3), (0.1, 0.0), strict=True):
            group |= {"lr": rate, "weight_decay": decay, "betas": (0.9, 0.95), "eps": 1e-8}
        # As a scheduler does: a key that a fresh optimizer does not have.
        torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
        training_scripts.steps(run, SMALL.vocab)
    return run


def compare(saved: Run, theirs: Run | None, ours: Run) -> str:
    """As loaded, and after going on."""
    if theirs is None:
        theirs = saved
    for when in ("as loaded", "gone on"):
        if when == "gone on":
            losses = [training_scripts.steps(run, SMALL.vocab) for run in (theirs, ours)]
            if losses[0] != losses[1]:
                return f"losses {losses}"
        others = {"what was saved": saved, "torch's": theirs} if when == "as loaded" else {"torch's": theirs}
        for what, other in others.items():
            said = difference(training_scripts.whole(ours), training_scripts.whole(other))
            if said != "equal":
                return f"{when}, compared with {what}: {said}"
    return "equal"


def folder() -> Path:
    """One for all ranks."""
    import tempfile

    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    return Path(told[0])


def by_us(run: Run, path: Path, strategy: str) -> None:
    """The one line that takes the place of each practice."""
    loaded = ckpttool.load(path, run.model, run.optimizer, strategy=strategy)
    assert loaded.strategy == strategy
    assert loaded.rest.get("extra", {"epoch": 3}) == {"epoch": 3}, loaded.rest


# 1 --------------------------------------------------------------------------------------------------------------------


def full_config() -> Any:
    """Not offloaded: torch 2.13 would end with a segmentation fault on the CPU."""
    return FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)


def fsdp1_full(kind: str, strategy: str) -> str:
    """FULL, one file from rank 0."""
    saved, place = fresh(kind, trained=True), folder() / "full.pt"
    with Fsdp.state_dict_type(saved.model, FULL, *full_config()):
        state = {"model": saved.model.state_dict(), "optim": Fsdp.optim_state_dict(saved.model, saved.optimizer)}
    if dist.get_rank() == 0:
        torch.save({**state, "extra": {"epoch": 3}}, place)
    dist.barrier()
    theirs, ours = fresh(kind), fresh(kind)
    there = torch.load(place, weights_only=False)
    with Fsdp.state_dict_type(
        theirs.model, FULL, FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)
    ):
        theirs.model.load_state_dict(there["model"])
        theirs.optimizer.load_state_dict(
            Fsdp.optim_state_dict_to_load(theirs.model, theirs.optimizer, copy.deepcopy(there["optim"]))
        )
    by_us(ours, place, strategy)
    return compare(saved, theirs, ours)


# 2 --------------------------------------------------------------------------------------------------------------------


def unwrapped_weights(kind: str, strategy: str) -> str:
    """Weights that never saw FSDP."""
    place = folder() / "weights.pt"
    trained = fresh("plain", trained=True)
    if dist.get_rank() == 0:
        torch.save(trained.model.state_dict(), place)
    dist.barrier()
    # `sync_module_states=True`, the other way, wants a GPU.
    theirs = fresh(kind).model
    with Fsdp.state_dict_type(theirs, FULL, FullStateDictConfig()):
        theirs.load_state_dict(torch.load(place, weights_only=True))
    ours = fresh(kind).model
    loaded = ckpttool.load(place, ours, strategy=strategy)
    if loaded.missing or loaded.unexpected:
        return f"{loaded.missing} {loaded.unexpected}"
    found = []
    for model in (theirs, ours):
        with Fsdp.state_dict_type(model, FULL, FullStateDictConfig()):
            found.append(training_scripts.detached(dict(model.state_dict())))
    return difference(found[1], found[0])


# 3 --------------------------------------------------------------------------------------------------------------------


def fsdp1_dcp(kind: str, strategy: str) -> str:
    """SHARDED through DCP; by hand the model has to be loaded before the optimizer."""
    saved, place = fresh(kind, trained=True), folder() / "dcp"
    with Fsdp.state_dict_type(saved.model, SHARDED):
        state = {"model": saved.model.state_dict(), "optim": Fsdp.optim_state_dict(saved.model, saved.optimizer)}
    torch_dcp.save({**state, "extra": {"epoch": 3}}, checkpoint_id=place)
    theirs, ours = fresh(kind), fresh(kind)
    if kind == "fsdp1 hybrid" or HOME[0].type not in ("cpu", "cuda"):
        # `load_sharded_optimizer_state_dict` of torch 2.13 gives wrong moments here; `ShardedTensor` knows CUDA only.
        by_us(ours, place, strategy)
        return compare(saved, None, ours)
    with Fsdp.state_dict_type(theirs.model, SHARDED):
        state = {"model": theirs.model.state_dict()}
        torch_dcp.load(state, checkpoint_id=place)
        theirs.model.load_state_dict(state["model"])
        optim = load_sharded_optimizer_state_dict(state["model"], "optim", torch_dcp.FileSystemReader(place))
        flat = Fsdp.optim_state_dict_to_load(theirs.model, theirs.optimizer, optim["optim"])
        theirs.optimizer.load_state_dict(flat)
    by_us(ours, place, strategy)
    return compare(saved, theirs, ours)


# 4 and 7 --------------------------------------------------------------------------------------------------------------


def fsdp2_dcp(kind: str, strategy: str) -> str:
    """`dcp.save` from every rank, `dcp.load` in place; ours into a model on the meta device."""
    saved, place = fresh(kind, trained=True), folder() / "dcp"
    model, optim = get_state_dict(saved.model, saved.optimizer, options=StateDictOptions(cpu_offload=True))
    torch_dcp.save({"model": model, "optim": optim, "extra": {"epoch": 3}}, checkpoint_id=place)
    theirs, ours = fresh(kind), fresh(kind, device="" if kind == "tp" else "meta")
    model, optim = get_state_dict(theirs.model, theirs.optimizer)
    state = {"model": model, "optim": optim}
    torch_dcp.load(state, checkpoint_id=place)
    set_state_dict(theirs.model, theirs.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    keep_lost(theirs, saved)
    by_us(ours, place, strategy)
    return compare(saved, theirs, ours)


def keep_lost(theirs: Run, saved: Run) -> None:
    """What torch loses on the way: keys that a fresh optimizer lacks, such as a scheduler's `initial_lr` (with
    broadcast on all ranks but the first), and that `betas` are a tuple."""
    for group, right in zip(theirs.optimizer.param_groups, saved.optimizer.param_groups, strict=True):
        group |= {key: value for key, value in right.items() if key != "params"}


# 5 --------------------------------------------------------------------------------------------------------------------


def full_broadcast(kind: str, strategy: str) -> str:
    """`set_model_state_dict` and `set_optimizer_state_dict` from a full file of rank 0."""
    saved, place = fresh(kind, trained=True), folder() / "full.pt"
    options = StateDictOptions(full_state_dict=True)
    model, optim = get_state_dict(saved.model, saved.optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": model, "optim": optim, "extra": {"epoch": 3}}, place)
    dist.barrier()
    theirs, ours = fresh(kind), fresh(kind)
    there = torch.load(place, weights_only=False) if dist.get_rank() == 0 else {"model": {}, "optim": {}}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    set_model_state_dict(theirs.model, there["model"], options=options)
    set_optimizer_state_dict(theirs.model, theirs.optimizer, there["optim"], options=options)
    keep_lost(theirs, saved)
    by_us(ours, place, strategy)
    for run in (ours, saved):
        for group in run.optimizer.param_groups:
            assert type(group["betas"]) is tuple and "initial_lr" in group, group
    return compare(saved, theirs, ours)


# 6 --------------------------------------------------------------------------------------------------------------------


def transformers_model(what: str, strategy: str) -> str:
    """FSDP2: rank 0 has the model, the others have it on the meta device; what is passing (rotary frequencies) is in no
    checkpoint. FSDP1: every rank has it, with other values. Both tie the output to the embedding."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    place, (name, wrapper) = folder() / "hf", what.split()
    config: Any = GPT2Config(vocab_size=29, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    if name == "llama":
        config = LlamaConfig(
            vocab_size=29, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=True,
        )  # fmt: skip
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(place)
    dist.barrier()
    reference = AutoModelForCausalLM.from_pretrained(place).eval().to(HOME[0])
    tokens = torch.arange(10).reshape(2, 5).to(HOME[0])
    expected = reference(input_ids=tokens).logits
    torch.manual_seed(4)
    with torch.device(HOME[0] if dist.get_rank() == 0 or wrapper == "fsdp1" else "meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert len(blocks) == 2
    if wrapper == "fsdp1":
        model = Fsdp(
            model, auto_wrap_policy=ModuleWrapPolicy({type(blocks[0])}), device_id=HOME[0],
            use_orig_params=True,
        )  # fmt: skip
    else:
        for module in (*blocks, model):
            fully_shard(module)
    loaded = ckpttool.load(place, model, strategy=strategy)
    if loaded.missing or loaded.unexpected:
        return f"missing {loaded.missing}, unexpected {loaded.unexpected}"
    found = model(input_ids=tokens).logits
    state, _ = get_state_dict(model, (), options=StateDictOptions(full_state_dict=True))
    said = difference(training_scripts.detached(dict(state)), training_scripts.detached(dict(reference.state_dict())))
    return said if said != "equal" or torch.equal(found, expected) else "other logits"


def names_of_files(what: str, strategy: str) -> str:
    """A model whose files have other names, stacked experts apart or fused parts, as `from_pretrained` loads it."""
    from support import tiny_models

    place, (model_type, wrapper) = folder() / "hf", what.split(maxsplit=1)
    torch.manual_seed(3)
    saved = tiny_models.made(model_type)
    if dist.get_rank() == 0:
        saved.save_pretrained(place)
    dist.barrier()
    reference = type(saved).from_pretrained(place).to(HOME[0])
    torch.manual_seed(4)
    model: Any = tiny_models.made(model_type).to(HOME[0])
    kinds = {type(module) for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())}
    assert kinds
    if wrapper.startswith("fsdp1"):
        model = Fsdp(
            model, auto_wrap_policy=ModuleWrapPolicy(kinds), device_id=HOME[0],
            use_orig_params=wrapper == "fsdp1",
        )  # fmt: skip
    else:
        for module in (*(one for one in model.modules() if type(one) in kinds), model):
            fully_shard(module)
    loaded = ckpttool.load(place, model, strategy=strategy)
    if loaded.missing or loaded.unexpected:
        return f"missing {loaded.missing}, unexpected {loaded.unexpected}"
    state, _ = get_state_dict(model, (), options=StateDictOptions(full_state_dict=True))
    return difference(training_scripts.detached(dict(state)), training_scripts.detached(dict(reference.state_dict())))


def quietly(practice: Callable[[str, str], str]) -> Callable[..., str]:
    """Without what torch says of functions that the guides still teach."""

    def run(kind: str, strategy: str) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return practice(kind, strategy)

    return run


PRACTICES = {
    f.__name__: quietly(f)
    for f in (fsdp1_full, unwrapped_weights, fsdp1_dcp, fsdp2_dcp, full_broadcast, transformers_model, names_of_files)
}
