"""The solver of `match`: what it finds is right, in random models, and what names and shapes do not tell stays open."""

from __future__ import annotations

import numpy as np
import pytest
from support.random_models import Operation, Side, State, applied, random_case, transpose_unseen

from ckpttool.models.matching.solution import ConfigFacts, Solution
from ckpttool.models.matching.solve import solve

Shapes = dict[str, tuple[int, ...]]


def shapes(state: State) -> Shapes:
    return {name: array.shape for name, array in state.items()}


def solved(seed: int, *others: Operation) -> tuple[Solution, Side, Side]:
    model, source, target = random_case(seed, *others)
    rotary = None if model.positions or seed % 2 else True
    facts = ConfigFacts(None, model.head_dim if seed % 3 else None, rotary)
    return solve(shapes(source.state), shapes(target.state), facts), source, target


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 4000), marks=pytest.mark.long)])
def test_a_composition_of_operations_is_found_again_or_open_and_never_wrong(seeds: range) -> None:
    found = whole = 0
    for seed in seeds:
        solution, source, target = solved(seed)
        open_ = [name for one in (*solution.ambiguous, *solution.unmatched) for name in one.names]
        names = [name for one in solution.found for name in one.names]
        assert sorted(names + open_) == sorted(target.state), seed
        for one in solution.found:
            made: State = {}
            for rule in one.rules:
                made |= applied(rule, source.state)
            for name in one.names:
                assert np.array_equal(made[name], target.state[name]), (seed, source.log, target.log, name, one.rules)
        found += len(names)
        whole += not open_
    # A solver that finds nothing is never wrong.
    assert found > 25 * len(seeds)
    assert whole > 0.4 * len(seeds)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 4000), marks=pytest.mark.long)])
def test_what_is_wrong_was_called_assumed(seeds: range) -> None:
    """Square matrices may be transposed where no name and no shape shows it."""
    found = assumed = wrong = 0
    for seed in seeds:
        solution, source, target = solved(seed, *[transpose_unseen] * 6)
        doubts = {name: one for one in solution.assumed for name in one.names}
        for one in solution.found:
            made: State = {}
            for rule in one.rules:
                made |= applied(rule, source.state)
            for name in one.names:
                found += 1
                assumed += name in doubts
                if not np.array_equal(made[name], target.state[name]):
                    wrong += 1
                    others = [applied(other.rules[0], source.state) for other in doubts[name].candidates]
                    assert any(np.array_equal(other[name], target.state[name]) for other in others), seed
    assert 0 < wrong < assumed < found / 5


def layers(names: dict[str, tuple[int, ...]], count: int = 3) -> Shapes:
    return {name.replace("{n}", str(n)): shape for n in range(count) for name, shape in names.items()}


def rules(solution: Solution) -> list[object]:
    return [[rule["from"], rule["to"], rule.get("operations")] for rule in solution.rules]


def test_experts_are_stacked_and_fused() -> None:
    parts = {f"h.{{n}}.experts.{e}.{one}.weight": (24, 8) for e in range(4) for one in ("w1", "w3")}
    source = layers(parts | {f"h.{{n}}.experts.{e}.w2.weight": (8, 24) for e in range(4)})
    target = layers(
        {"model.layers.{n}.mlp.experts.gate_up_proj": (4, 48, 8), "model.layers.{n}.mlp.experts.down_proj": (4, 8, 24)}
    )
    solution = solve(source, target)
    assert not solution.ambiguous and not solution.unmatched
    assert rules(solution) == [
        [
            ["h.{n}.experts.{e}.w1.weight", "h.{n}.experts.{e}.w3.weight"],
            "model.layers.{n}.mlp.experts.gate_up_proj",
            [{"concat": 0}, {"stack": 0}],
        ],
        ["h.{n}.experts.{e}.w2.weight", "model.layers.{n}.mlp.experts.down_proj", [{"stack": 0}]],
    ]
    back = solve(target, source)
    assert not back.ambiguous and not back.unmatched
    assert rules(back)[0] == [
        "model.layers.{n}.mlp.experts.gate_up_proj",
        ["h.{n}.experts.{e}.w1.weight", "h.{n}.experts.{e}.w3.weight"],
        [{"unstack": 0}, {"split": 0}],
    ]


@pytest.mark.parametrize(("first", "axis"), [("layers", 0), ("experts", 1)])
def test_experts_of_all_layers_are_one_tensor(first: str, axis: int) -> None:
    """As Megatron-LM has them, or by experts first; also where gate and up are one."""
    parts = {f"model.layers.{{n}}.mlp.experts.{e}.gate_proj.weight": (24, 8) for e in range(4)}
    parts |= {f"model.layers.{{n}}.mlp.experts.{e}.up_proj.weight": (24, 8) for e in range(4)}
    target = layers(parts | {f"model.layers.{{n}}.mlp.experts.{e}.down_proj.weight": (8, 24) for e in range(4)})
    size = (3, 4) if first == "layers" else (4, 3)
    source = {f"decoder.layers.mlp.experts.experts.linear_fc{k}.weight": size for k in (1, 2)}
    source = {name: (*shape, *((48, 8) if "fc1" in name else (8, 24))) for name, shape in source.items()}
    solution, back = solve(source, target), solve(target, source)
    for one in (solution, back):
        assert not one.ambiguous and not one.unmatched
    down = "model.layers.{e}.mlp.experts.{f}.down_proj.weight"
    assert [rule["operations"] for rule in solution.rules] == [
        [{"unstack": axis}, {"unstack": 0}, {"split": 0}],
        [{"unstack": axis}, {"unstack": 0}],
    ]
    assert [down, "decoder.layers.mlp.experts.experts.linear_fc2.weight", [{"stack": 0}, {"stack": axis}]] in rules(
        back
    )
    square = {name: (4, 4, *shape[2:]) for name, shape in source.items()}
    four = layers({name.replace(".0.", ".{n}.", 1): shape for name, shape in target.items() if ".0.mlp" in name}, 4)
    open_ = solve(square, four)
    assert not open_.found and {one.why for one in open_.ambiguous} == {"its shape does not show which axis is which"}
    assert [len(one.candidates) for one in open_.ambiguous] == [2, 2, 2]


def test_the_list_that_is_stacked_is_the_one_that_is_left() -> None:
    """The layers are stacked, and the experts, of which there are as many, stay a list; or the other way round."""
    source = layers({f"layers.{{n}}.mlp.experts.{e}.w.weight": (24, 8) for e in range(3)})
    experts = layers({"experts.{n}.w.weight": (3, 24, 8)})
    assert rules(solve(source, experts)) == [
        ["layers.{e}.mlp.experts.{n}.w.weight", "experts.{n}.w.weight", [{"stack": 0}]]
    ]
    per_layer = layers({"h.{n}.moe.w.weight": (3, 24, 8)})
    assert rules(solve(source, per_layer)) == [
        ["layers.{n}.mlp.experts.{e}.w.weight", "h.{n}.moe.w.weight", [{"stack": 0}]]
    ]
    nameless = {name.replace("layers", "a").replace("experts", "b"): shape for name, shape in source.items()}
    assert not solve(nameless, experts).found
    assert len(solve(nameless, experts).ambiguous[0].candidates) == 2


def test_parameters_that_a_source_lacks_are_unmatched() -> None:
    """The bias of a query is not lost where a fused weight has none."""
    source = layers({"h.{n}.attn.qkv_proj.bias": (24,), "h.{n}.fc.weight": (16, 8)})
    target = layers(
        {
            f"l.{{n}}.self_attn.{one}_proj.{leaf}": (8, 8)[: 2 - (leaf == "bias")]
            for one in "qkv"
            for leaf in ("weight", "bias")
        }
    )
    target |= layers({"l.{n}.fc.weight": (16, 8), "l.{n}.fc.bias": (16,)})
    solution = solve(source, target, ConfigFacts(None, 4, False))
    open_ = [name for one in (*solution.ambiguous, *solution.unmatched) for name in one.names]
    assert sorted([*open_, *(name for one in solution.found for name in one.names)]) == sorted(target)
    assert {name.split(".", 2)[2] for name in open_} == {*(f"self_attn.{one}_proj.weight" for one in "qkv"), "fc.bias"}


def test_megatron_has_queries_keys_and_values_by_groups() -> None:
    source = layers({f"decoder.layers.{{n}}.self_attention.linear_{one}.weight": (32, 16) for one in ("qkv", "proj")})
    source = {name: shape if "qkv" in name else (16, 16) for name, shape in source.items()}
    rows = {"q": 16, "k": 8, "v": 8, "o": 16}
    target = layers({f"model.layers.{{n}}.self_attn.{one}_proj.weight": (rows[one], 16) for one in rows})
    solution = solve(source, target, ConfigFacts("llama", 4, True))
    assert [rule.get("operations") for rule in solution.rules] == [
        [{"split": {"axis": 0, "parts": [2, 1, 1], "groups": 2}}],
        None,
    ]
    unknown = solve(source, target, ConfigFacts("llama", None, True))
    assert [one.rules[0]["to"] for one in unknown.found] == ["model.layers.{n}.self_attn.o_proj.weight"]
    assert "size of a head is unknown" in unknown.ambiguous[0].why


def test_a_square_matrix_is_transposed_if_the_others_of_its_name_are() -> None:
    source = layers(
        {"h.{n}.attn.c_proj.weight": (8, 8), "h.{n}.mlp.c_proj.weight": (32, 8), "h.{n}.attn.gate.weight": (8, 8)}
    )
    target = {name: shape[::-1] for name, shape in source.items()}
    solution = solve(source, target)
    assert [rule["operations"] for rule in solution.rules] == [[{"transpose": [0, 1]}]] * 2
    assert [one.name for one in solution.ambiguous] == ["h.{n}.attn.gate.weight"]
    assert [one.text for one in solution.ambiguous[0].candidates] == [
        "`h.{n}.attn.gate.weight` as it is",
        "`h.{n}.attn.gate.weight` transposed",
    ]


def test_rows_of_a_rotary_embedding_are_open_under_other_names() -> None:
    source = layers({f"layers.{{n}}.attention.w{one}.weight": (8, 8) for one in "qkvo"})
    target = layers({f"model.layers.{{n}}.self_attn.{one}_proj.weight": (8, 8) for one in "qkvo"})
    solution = solve(source, target, ConfigFacts("llama", 4, True))
    assert [one.name[-13:] for one in solution.ambiguous] == ["q_proj.weight", "k_proj.weight"]
    assert solution.ambiguous[0].candidates[1].rules[0]["operations"] == [{"rows": {"to": "halves", "head_dim": 4}}]
    assert len(solve(source, target, ConfigFacts("gpt2", 4, False)).rules) == 4
    same = {name.replace("model.", "base."): shape for name, shape in target.items()}
    assert not solve(same, target, ConfigFacts("llama", 4, True)).ambiguous


def attention(at: str, words: str, d: int = 8, width: int = 32) -> State:
    """Queries of 4 heads, keys and values of 2, and the output, in two layers of transformers' Llama."""
    rng = np.random.default_rng(len(words))
    rows = [4 * d, 2 * d, 2 * d, width]
    return {
        f"{at}.{n}.{word}.weight": rng.integers(0, 1 << 30, (size, width))
        for n in range(2)
        for word, size in zip(words.split(), rows, strict=True)
    }


HF = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("layers", "attn.q_proj attn.k_proj attn.v_proj attn.output_proj"),  # torchtune
        ("decoder.layers", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.output_proj"),  # fairseq2
        ("model.layers", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.output_proj"),
    ],
)
@pytest.mark.parametrize("is_source", [True, False])
def test_rows_of_a_rotary_embedding_are_open_between_libraries(at: str, words: str, is_source: bool) -> None:
    """torchtune and fairseq2 have those of a Llama in another order under the names `q_proj` and `k_proj`: `hf_to_tune`
    permutes `t.view(heads, 2, head_dim // 2, dim).transpose(1, 2)`."""
    hf = attention("model.layers", HF)
    other = {}
    for (name, array), word in zip(hf.items(), words.split() * 2, strict=True):
        heads = {"q_proj": 4, "k_proj": 2}.get(word.split(".")[1])
        permuted = array.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(array.shape) if heads else array
        other[f"{at}.{name.split('.')[2]}.{word}.weight"] = permuted
    source, target = (other, hf) if is_source else (hf, other)
    solution = solve(shapes(source), shapes(target), ConfigFacts("llama", 8, True))
    open_ = {name for one in solution.ambiguous for name in one.names}
    assert open_ == {name for name in target if "q_proj" in name or "k_proj" in name} and not solution.unmatched
    for one in solution.ambiguous:
        made = [applied(candidate.rules[0], source) for candidate in one.candidates]
        right = [all(np.array_equal(each[name], target[name]) for name in one.names) for each in made]
        assert right.count(True) == 1


def test_rows_under_names_of_one_library_stay() -> None:
    hf, other = attention("model.layers", HF), attention("language_model.layers", HF)
    other |= {f"language_model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(4) for n in range(2)}
    solution = solve(shapes(other), shapes(hf), ConfigFacts("llama", 8, True))
    assert len(solution.found) == 4 and not solution.ambiguous


@pytest.mark.parametrize("facts", [ConfigFacts("gpt_neox", 8, True, 4, 4), ConfigFacts("gpt_neox", 8, True)])
@pytest.mark.parametrize("is_source", [True, False])
def test_a_fused_query_key_and_value_may_have_another_order(facts: ConfigFacts, is_source: bool) -> None:
    """litgpt has `qkv` of a Pythia part by part; GPT-NeoX views `query_key_value` as `(heads, 3 * head_dim)`."""
    rng = np.random.default_rng(1)
    litgpt, neox = {}, {}
    for n in range(2):
        for leaf, rest in (("weight", (32,)), ("bias", ())):
            parts = [rng.integers(0, 1 << 30, (32, *rest)) for _ in "qkv"]
            litgpt[f"transformer.h.{n}.attn.qkv.{leaf}"] = np.concatenate(parts)
            heads = np.stack([part.reshape(4, 8, *rest) for part in parts], 1)
            neox[f"gpt_neox.layers.{n}.attention.query_key_value.{leaf}"] = heads.reshape(96, *rest)
            out = rng.integers(0, 1 << 30, (32, *rest))
            litgpt[f"transformer.h.{n}.attn.proj.{leaf}"] = neox[f"gpt_neox.layers.{n}.attention.dense.{leaf}"] = out
    source, target = (litgpt, neox) if is_source else (neox, litgpt)
    solution = solve(shapes(source), shapes(target), facts)
    fused = [one for one in solution.ambiguous if "qkv" in one.name or "query_key_value" in one.name]
    assert sorted(one.shape for one in fused) == [(96,), (96, 32)]
    for one in fused:
        assert len({candidate.text for candidate in one.candidates}) == len(one.candidates) > 1
        made = [applied(candidate.rules[0], source) for candidate in one.candidates]
        right = [all(np.array_equal(each[name], target[name]) for name in one.names) for each in made]
        assert right.count(True) == 1


def test_equal_shapes_whose_names_say_nothing_are_open() -> None:
    source = layers({f"blk.{{n}}.{one}": (8, 24) for one in ("aa", "bb")}) | {"blk.head": (50, 8)}
    target = layers({f"layers.{{n}}.{one}_proj.weight": (8, 24) for one in ("gate", "up")}) | {"layers.foo": (50, 8)}
    solution = solve(source, target)
    assert sorted(len(one.candidates) for one in solution.ambiguous) == [1, 2, 2]
    assert not solution.found and len(solution.unused) == 6


def test_a_vocabulary_is_trimmed_in_all_that_have_it() -> None:
    source = {"tok_embeddings.weight": (128, 8), "output.weight": (128, 8), "norm.weight": (8,)}
    target = {"model.embed_tokens.weight": (100, 8), "lm_head.weight": (100, 8), "model.norm.weight": (8,)}
    trim = [{"trim": {"axis": 0, "size": 100, "from": 128}}]
    assert [rule.get("operations") for rule in solve(source, target).rules] == [trim, trim, None]
    assert len(solve(source | {"output.weight": (300, 8)}, target).unmatched) == 2


def test_missing_layers_and_parameters_are_unmatched() -> None:
    target = layers({"h.{n}.fc.weight": (8, 4), "h.{n}.fc.bias": (8,), "h.{n}.ln.weight": (4,)})
    source = {name: shape for name, shape in target.items() if name not in ("h.1.fc.weight", "h.2.fc.bias")}
    source["h.0.ln.weight"] = (5,)
    solution = solve(source, target)
    assert sorted(name for one in solution.unmatched for name in one.names) == [
        "h.0.ln.weight",
        "h.1.fc.weight",
        "h.2.fc.bias",
    ]
    assert "shape [5] in the source" in next(one.why for one in solution.unmatched if one.name == "h.0.ln.weight")


def test_a_rule_takes_no_tensors_that_are_not_its_own() -> None:
    """Layer 0 has another shape, so that a rule for all layers would take it, too."""
    source = layers({"layers.{n}.mlp.wide.weight": (8, 4)}, 4) | {"layers.0.mlp.wide.weight": (9, 4)}
    target = layers({"h.{n}.mlp.wide.weight": (8, 4)}, 4)
    del target["h.0.mlp.wide.weight"]
    found = solve(source, target).rules
    assert [rule["to"] for rule in found] == [f"h.{n}.mlp.wide.weight" for n in (1, 2, 3)]


def test_two_towers_of_one_shape_are_told_apart_by_their_names() -> None:
    source = {f"{side}_model.layers.{n}.fc1.weight": (8, 4) for side in ("text", "vision") for n in range(2)}
    target = {f"clip.{side}.encoder.{n}.fc1.weight": (8, 4) for side in ("text", "vision") for n in range(2)}
    assert [rule["to"] for rule in solve(source, target).rules] == [
        "clip.text.encoder.{n}.fc1.weight",
        "clip.vision.encoder.{n}.fc1.weight",
    ]
    unnamed = {name.replace("text", "a").replace("vision", "b"): shape for name, shape in source.items()}
    assert not solve(unnamed, target).found
