"""`ckpttool check`: planted mistakes are named, and a sound fine-tune in any format raises no alarm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.cli import run

import ckpttool
from ckpttool.models.fitting.names import without_prefix
from ckpttool.models.fitting.values import blocks
from ckpttool.models.reference import Known

State = dict[str, torch.Tensor]
HIDDEN, HEADS, EXPERTS = 32, 4, 4


def released() -> State:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    state = {"model.embed_tokens.weight": weight(96, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(3):
        name = f"model.layers.{layer}"
        for one in ("q_proj", "k_proj", "v_proj", "o_proj"):
            state[f"{name}.self_attn.{one}.weight"] = weight(HIDDEN, HIDDEN)
        state[f"{name}.input_layernorm.weight"] = torch.ones(HIDDEN) + weight(HIDDEN)
        state[f"{name}.mlp.gate.bias"] = weight(EXPERTS)
        for expert in range(EXPERTS):
            state[f"{name}.mlp.experts.{expert}.gate_proj.weight"] = weight(48, HIDDEN)
            state[f"{name}.mlp.experts.{expert}.up_proj.weight"] = weight(48, HIDDEN)
            state[f"{name}.mlp.experts.{expert}.down_proj.weight"] = weight(HIDDEN, 48)
    state["lm_head.weight"] = weight(96, HIDDEN)
    return state


def tuned(state: State, scale: float = 1e-3) -> State:
    generator = torch.Generator().manual_seed(1)
    return {name: value + torch.randn(value.shape, generator=generator) * scale for name, value in state.items()}


@pytest.fixture
def reference(tmp_path: Path) -> str:
    folder = tmp_path / "released"
    folder.mkdir()
    save_file({name: value.to(torch.bfloat16) for name, value in released().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "none", "tie_word_embeddings": False}))
    return str(folder)


def check(state: State, reference: str, folder: Path, **options: bool) -> ckpttool.Checked:
    torch.save({"model": state}, folder / "x.pt")
    return ckpttool.check(folder / "x.pt", reference, **options)


@pytest.mark.parametrize("form", ["torch", "dcp", "fsdp1", "safetensors"])
def test_a_fine_tune_fits_in_every_format(tmp_path: Path, reference: str, form: str) -> None:
    torch.save({"model": tuned(released())}, tmp_path / "x.pt")
    path = tmp_path / "x.pt"
    if form != "torch":
        path = tmp_path / ("y.safetensors" if form == "safetensors" else "y")
        world = {} if form == "safetensors" else {"to_world": 2}
        ckpttool.convert(tmp_path / "x.pt", path, to=form, **world)
    found = ckpttool.check(path, reference, content=True)
    assert found.verdict == "fits" and found.matched == found.reference_tensor_count == len(released())
    assert [one.kind for one in found.mismatches] == ["dtype"]
    assert found.similarity is not None and found.similarity > 0.99


def swap(state: State, one: str, other: str) -> None:
    state[one], state[other] = state[other], state[one]


LAYER = "model.layers.1"
EXPERT = f"{LAYER}.mlp.experts.2"
Q = f"{LAYER}.self_attn.q_proj.weight"
NORM = f"{LAYER}.input_layernorm.weight"


def other_rotary_order(state: State) -> None:
    rows = state[Q].view(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN)
    state[Q] = rows.transpose(1, 2).reshape(HIDDEN, HIDDEN).contiguous()


def layers_off_by_one(state: State) -> None:
    old = dict(state)
    for name in old:
        if name.startswith("model.layers."):
            number = int(name.split(".")[2])
            state[name] = old[name.replace(f"layers.{number}.", f"layers.{(number + 1) % 3}.")]


def kept(state: State, name: str, value: torch.Tensor) -> None:
    state[name] = value.contiguous()


# What is changed, the kind of mismatch, and a tensor that it must name.
MISTAKES: dict[str, tuple[Callable[[State], object], str, str]] = {
    "gate and up swapped": (
        lambda s: swap(s, f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"), "content",
        f"{EXPERT}.up_proj.weight",
    ),
    "two experts swapped": (
        lambda s: swap(s, f"{EXPERT}.up_proj.weight", f"{LAYER}.mlp.experts.1.up_proj.weight"), "content",
        f"{EXPERT}.up_proj.weight",
    ),
    "one expert dropped": (lambda s: s.pop(f"{EXPERT}.down_proj.weight"), "missing", f"{EXPERT}.down_proj.weight"),
    "one expert never loaded": (
        lambda s: s[f"{EXPERT}.down_proj.weight"].normal_(std=0.02), "content", f"{EXPERT}.down_proj.weight",
    ),
    "one expert zero": (lambda s: s[f"{EXPERT}.up_proj.weight"].zero_(), "content", f"{EXPERT}.up_proj.weight"),
    "rows of heads in the other order": (other_rotary_order, "content", Q),
    "a transposed matrix": (
        lambda s: kept(s, f"{EXPERT}.up_proj.weight", s[f"{EXPERT}.up_proj.weight"].T), "shape",
        f"{EXPERT}.up_proj.weight",
    ),
    "a transposed square matrix": (lambda s: kept(s, Q, s[Q].T), "content", Q),
    "the embedding of another model": (
        lambda s: s["model.embed_tokens.weight"].normal_(std=0.02), "content", "model.embed_tokens.weight",
    ),
    "rows of the embedding shifted": (
        lambda s: kept(s, "model.embed_tokens.weight", s["model.embed_tokens.weight"].roll(1, 0)), "content",
        "model.embed_tokens.weight",
    ),
    "layers off by one": (layers_off_by_one, "content", Q),
    "a norm missing": (lambda s: s.pop("model.norm.weight"), "missing", "model.norm.weight"),
    "a bias lost": (lambda s: s.pop(f"{LAYER}.mlp.gate.bias"), "missing", f"{LAYER}.mlp.gate.bias"),
    "the vocabulary padded": (
        lambda s: kept(s, "lm_head.weight", torch.cat([s["lm_head.weight"], torch.zeros(32, HIDDEN)])), "shape",
        "lm_head.weight",
    ),
    "an adapter left unmerged": (
        lambda s: kept(s, f"{LAYER}.self_attn.q_proj.lora_A.default.weight", torch.zeros(4, HIDDEN)), "left over",
        f"{LAYER}.self_attn.q_proj.lora_A.default.weight",
    ),
    "a scale left over": (
        lambda s: kept(s, f"{LAYER}.self_attn.q_proj.weight_scale", torch.ones(1)), "left over",
        f"{LAYER}.self_attn.q_proj.weight_scale",
    ),
    "a buffer too many": (lambda s: kept(s, "model.rotary.inv_freq", torch.ones(4)), "extra", "model.rotary.inv_freq"),
    "q and k swapped": (lambda s: swap(s, Q, Q.replace("q_proj", "k_proj")), "content", Q),
    "half of a matrix": (lambda s: s[Q][HIDDEN // 2 :].normal_(std=0.02), "content", Q),
    "one NaN": (lambda s: s[Q].view(-1)[777:778].fill_(float("nan")), "content", Q),
    "one infinity": (lambda s: s[Q].view(-1)[777:778].fill_(float("-inf")), "content", Q),
    "a NaN in a tiny tensor": (
        lambda s: s[f"{LAYER}.mlp.gate.bias"][1:2].fill_(float("nan")), "content", f"{LAYER}.mlp.gate.bias",
    ),
    "a tensor of NaN": (lambda s: s[Q].fill_(float("nan")), "content", Q),
    "half of the rows zero": (lambda s: s[Q][::2].zero_(), "content", Q),
    "the second half zero": (lambda s: s[Q][HIDDEN // 2 :].zero_(), "content", Q),
    "a matrix times 8": (lambda s: s[Q].mul_(8), "content", Q),
    "a matrix halved": (lambda s: s[Q].mul_(0.5), "content", Q),
    "codes of int8": (lambda s: kept(s, Q, (s[Q] / s[Q].abs().max() * 127).round()), "content", Q),
    "a norm of ones": (lambda s: kept(s, NORM, torch.ones(HIDDEN)), "content", NORM),
    "a norm of zeros": (lambda s: kept(s, NORM, torch.zeros(HIDDEN)), "content", NORM),
    "two norms swapped": (lambda s: swap(s, NORM, NORM.replace("layers.1", "layers.2")), "content", NORM),
    "the head tied": (lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"]}), "tie", "lm_head.weight"),
}  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, reference: str, mistake: str) -> None:
    change, kind, name = MISTAKES[mistake]
    state = tuned(released())
    with torch.random.fork_rng():
        torch.manual_seed(2)
        change(state)
    found = check(state, reference, tmp_path, content=True)
    assert found.exit_code == 1
    named = {one for mismatch in found.mismatches if mismatch.kind == kind for one in mismatch.names}
    assert name in named, found.mismatches
    if mistake not in ("layers off by one", "two experts swapped", "the head tied", "two norms swapped"):
        wrong = {one for mismatch in found.mismatches if mismatch.fails for one in mismatch.names}
        assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("wrong", [0.5, 2.0, float("nan")])
def test_a_whole_model_that_is_broken_alike_does_not_fit(tmp_path: Path, reference: str, wrong: float) -> None:
    found = check({name: value * wrong for name, value in tuned(released()).items()}, reference, tmp_path, content=True)
    assert found.exit_code == 1 and Q in {name for one in found.mismatches for name in one.names if one.fails}


def test_infinities_of_the_reference_are_no_mistake(tmp_path: Path) -> None:
    state = {"w": torch.randn(64, 64), "mask": torch.full((8, 8), float("-inf")).triu(1)}
    save_file(state, tmp_path / "base.safetensors")
    own = tuned(state) | {"mask": state["mask"]}
    found = check(own, str(tmp_path / "base.safetensors"), tmp_path, content=True)
    assert not [one for one in found.mismatches if one.fails]


def test_trained_models_raise_no_alarm(tmp_path: Path) -> None:
    """Of transformers, trained for some steps from a model that was trained before: whole, tied, in bfloat16, with a
    bigger step, weight decay, frozen norms, and an optimizer that moves every element alike."""
    alarms = {}
    for tied in (True, False):
        for optimizer, kind in (
            (lambda p: torch.optim.AdamW(p, lr=1e-4), torch.float32),
            (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1), torch.float32),
            (lambda p: torch.optim.SGD(p, lr=1e-1), torch.bfloat16),
            (lambda p: torch.optim.AdamW(p, lr=1e-3), torch.bfloat16),
            (lambda p: torch.optim.Adagrad(p, lr=1e-3), torch.float32),
        ):
            torch.manual_seed(5)
            config = transformers.LlamaConfig(
                vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                tie_word_embeddings=tied, attention_bias=True,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(config)
            steps(model, torch.optim.AdamW(model.parameters(), lr=3e-3), 30)
            base = tmp_path / f"base-{tied}-{len(alarms)}"
            model.save_pretrained(base)
            steps(model, optimizer(model.parameters()), 12)
            state = {name: value.to(kind) for name, value in model.state_dict().items()}
            found = check(state, str(base), tmp_path, content=True)
            alarms[base.name] = [one.message for one in found.mismatches if one.fails]
    assert not any(alarms.values()), alarms


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Train a model on random tokens."""
    for _ in range(count):
        tokens = torch.randint(128, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_many_of_one_kind_are_one_mismatch(tmp_path: Path, reference: str) -> None:
    state = {name: value for name, value in tuned(released()).items() if ".up_proj." not in name}
    (mismatch,) = [one for one in check(state, reference, tmp_path).mismatches if one.fails]
    assert mismatch.message.startswith("`model.layers.0-2.mlp.experts.0-3.up_proj.weight` (12 tensors) are missing")
    assert len(mismatch.names) == 12


@pytest.mark.parametrize(("old", "new"), [("model.", "backbone."), ("model.", ""), ("", "wrapped.")])
def test_another_prefix_is_one_mismatch(tmp_path: Path, reference: str, old: str, new: str) -> None:
    state = {new + name.removeprefix(old): value for name, value in tuned(released()).items()}
    found = check(state, reference, tmp_path, content=True)
    assert [one.kind for one in found.mismatches if one.fails] == ["prefix"], found.mismatches
    assert found.matched == len(released())


def test_names_that_have_nothing_in_common_have_no_prefix() -> None:
    model = {f"a.{i}": Known((4,), "float32") for i in range(9)}
    assert without_prefix(model, {f"x.y.z.{i}": Known((5,), "float32") for i in range(9)})[1] is None


def test_from_scratch_it_cannot_be_known(tmp_path: Path, reference: str) -> None:
    state = {name: torch.randn_like(value) for name, value in released().items()}
    found = check(state, reference, tmp_path, content=True)
    assert found.verdict == "fits" and found.mismatches[-1].kind == "unknown"


def test_stacked_experts_are_compared_one_by_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{i}.experts.w1": torch.randn(40, 24, 16, generator=generator) for i in range(3)}
    save_file(state, tmp_path / "base.safetensors")
    state["layers.1.experts.w1"][33] = torch.randn(24, 16, generator=generator)
    found = check(state, str(tmp_path / "base.safetensors"), tmp_path, content=True)
    (mismatch,) = [one for one in found.mismatches if one.fails]
    assert mismatch.names == ["layers.1.experts.w1"] and "at [33, " in mismatch.message


@pytest.mark.parametrize("shape", [(1,), (7,), (4096, 3), (2, 100_000), (3, 5, 7), (1000, 9, 9), (2, 3, 4, 5)])
def test_blocks_lie_in_the_tensor(shape: tuple[int, ...]) -> None:
    for offsets, sizes in blocks(shape):
        assert all(o >= 0 and n > 0 and o + n <= full for o, n, full in zip(offsets, sizes, shape, strict=True))


def test_the_command(tmp_path: Path, reference: str) -> None:
    torch.save({"model": tuned(released())}, tmp_path / "x.pt")
    path = str(tmp_path / "x.pt")
    done = run("check", path, "--against", reference, "--content", "--threads", "2")
    assert done.exit_code == 0 and "fits" in done.stdout and "lowest cosine is 0.99" in done.stdout
    assert run("check", path, "--against", reference, "--json").exit_code == 0
    done = run("check", path, "--against", reference, "--exclude", "*.1.*", "-q", "-v")
    assert done.exit_code == 1 and done.stdout.startswith(
        "missing: `model.layers.*.mlp.experts.*.down_proj.weight` (6 tensors)"
    )
    renamed = run("check", path, "--against", reference, "--rename", "lm_head=head", "--map", "none", "--json")
    text = run("check", path, "--against", reference, "--rename", "lm_head=head", "--map", "none").stdout
    assert f"`ckpttool match {path} --like {reference}` finds out" in text
    done = run("check", path, "--against", reference, "--only", "model", "--strip-wrappers", "--shapes", path)
    assert "ckpttool match" not in done.stdout
    assert done.exit_code == 0
    assert {one["kind"] for one in json.loads(renamed.stdout)["mismatches"]} == {"missing", "extra", "dtype"}
    assert run("check", path, "--against", reference, "--strip-prefix", "model").exit_code == 1
    assert run("check", path, "--against", str(tmp_path / "none")).exit_code == 3
    assert run("check", path).exit_code == 2


def test_a_config_is_a_reference(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = transformers.Qwen3ForCausalLM(config)
    torch.save({"model": model.state_dict()}, tmp_path / "x.pt")
    found = ckpttool.check(tmp_path / "x.pt", tmp_path / "config.json")
    assert found.verdict == "fits", found.mismatches
    done = run("check", str(tmp_path / "x.pt"), "--against", str(tmp_path / "config.json"), "--content")
    assert done.exit_code == 2 and "has none" in done.stderr


def test_codes_without_scales_do_not_fit(reference: str, tmp_path: Path) -> None:
    """int8 was a note on dtypes, as if the values were cast."""
    state = released()
    codes = {n: (v / v.abs().amax() * 127).to(torch.int8) if "proj" in n else v for n, v in state.items()}
    (first, second) = check(codes, reference, tmp_path).mismatches
    assert (first.found, first.gravity) == ("int8", "difference") and "whose scales are missing" in first.message
    assert (second.found, second.gravity) == ("float32", "suspect")
    small = {n: v.to(torch.float8_e4m3fn) if "proj" in n else v for n, v in state.items()}
    made = check(small, reference, tmp_path)
    assert made.exit_code == 0 and any("right if they were cast" in one.message for one in made.mismatches)
