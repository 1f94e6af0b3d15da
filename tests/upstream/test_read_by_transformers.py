"""Models of transformers, from a training state to what `from_pretrained` reads: the same weights and logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import transformers
from same import raw_bytes
from support.upstream_readers import detached, difference, safetensors_in
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpttool import convert

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.tensor([[1, 5, 7, 2, 28], [3, 3, 0, 9, 11]])


def llama(tied: bool) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=12, intermediate_size=13, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=29, n_positions=11, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: llama(False),
    "llama, tied": lambda: llama(True),
    "llama, tied, bfloat16": lambda: llama(True).bfloat16(),
    "gpt2": gpt2,
}


def trained(name: str) -> tuple[transformers.PreTrainedModel, torch.optim.Optimizer]:
    """A model after a step of AdamW."""
    torch.manual_seed(5)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    return model.eval(), optimizer


def saved(kind: str, name: str, folder: Path) -> tuple[transformers.PreTrainedModel, Path]:
    """The model, and its training state as a person saves it: in one file, in DCP with FQNs, or sharded by rank."""
    model, optimizer = trained(name)
    if kind == "torch":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, folder / "state.pt")
        return model, folder / "state.pt"
    weights, moments = get_state_dict(model, optimizer)
    torch_dcp.save({"model": weights, "optimizer": moments, "step": 1}, checkpoint_id=folder / "state", no_dist=True)
    if kind == "dcp":
        return model, folder / "state"
    convert(str(folder / "state"), str(folder / "sharded"), to="dcp", to_world=4)
    return model, folder / "sharded"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("most", [2000, None])
@pytest.mark.parametrize("kind", ["torch", "dcp", "dcp of 4 ranks"])
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained(name: str, kind: str, most: int | None, tmp_path: Path) -> None:
    model, state = saved(kind, name, tmp_path)
    out = tmp_path / "out"
    convert(str(state), str(out), to="safetensors", only=["model"], max_shard_size=most)
    assert (out / "model.safetensors.index.json").exists() is (most is not None)
    model.config.save_pretrained(out)
    found, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    same_model(found, model)


def same_model(found: Any, model: Any) -> None:
    """Weights, ties and what it computes."""
    assert difference(dict(detached(found.state_dict())), dict(detached(model.state_dict()))) == "equal"
    one, other = found.get_output_embeddings().weight, found.get_input_embeddings().weight
    assert (one is other) is bool(model.config.tie_word_embeddings)
    with torch.no_grad():
        assert raw_bytes(found.eval()(TOKENS).logits) == raw_bytes(model(TOKENS).logits)


@pytest.mark.parametrize("name", MODELS)
def test_same_files_as_save_pretrained(name: str, tmp_path: Path) -> None:
    model, state = saved("torch", name, tmp_path)
    convert(str(state), str(tmp_path / "ours"), to="safetensors", only=["model"], max_shard_size=2000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=2000)
    ours, theirs = safetensors_in(tmp_path / "ours"), safetensors_in(tmp_path / "theirs")
    tied = {"lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"}
    assert set(ours) - tied == set(theirs) - tied
    assert len(ours) == len(theirs)
    assert all(difference(ours[key], theirs[key]) == "equal" for key in set(ours) & set(theirs))


def test_back_to_a_training_state(tmp_path: Path) -> None:
    """What `save_pretrained` wrote becomes DCP and a torch file, and loads into the model again."""
    model, _ = trained("llama, tied")
    model.save_pretrained(tmp_path / "hf", max_shard_size=2000)
    convert(str(tmp_path / "hf"), str(tmp_path / "model.pt"), to="torch")
    convert(str(tmp_path / "hf"), str(tmp_path / "dcp"), to="dcp", to_world=3)
    for read in (lambda: torch.load(tmp_path / "model.pt", weights_only=True), lambda: through_dcp(tmp_path / "dcp")):
        again = MODELS["llama, tied"]().eval()
        missing, unexpected = again.load_state_dict(read(), strict=False)
        assert set(missing) <= {"lm_head.weight"}
        assert not unexpected
        same_model(again, model)


def through_dcp(path: Path) -> Any:
    """`dcp.load` into the state dict of a new model, without the tied name, which transformers leave out."""
    state = {k: torch.zeros_like(v) for k, v in MODELS["llama, tied"]().state_dict().items() if k != "lm_head.weight"}
    torch_dcp.load(state, checkpoint_id=path, no_dist=True)
    return state
