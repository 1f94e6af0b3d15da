"""Random models as numpy arrays of unique integers, random index operations on them, and an interpreter of the rules
of a map that knows nothing of ckpttool."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
State = dict[str, Array]


# --- rules of a map, in numpy -----------------------------------------------------------------------------------------


def applied(rule: dict[str, Any], state: State) -> State:
    """Return what a rule makes of a state dict."""
    sources, targets = ([side] if isinstance(side, str) else side for side in (rule["from"], rule["to"]))
    fields = [set(re.findall(r"{(\w+)}", side[0])) for side in (sources, targets)]
    shared = sorted(fields[0] & fields[1])
    bound: dict[tuple[str, ...], dict[int, dict[tuple[int, ...], Array]]] = defaultdict(lambda: defaultdict(dict))
    stacked = [field for field in re.findall(r"{(\w+)}", sources[0]) if field not in fields[1]]
    for part, pattern in enumerate(sources):
        regex = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(pattern)))
        for name, array in state.items():
            if match := regex.fullmatch(name):
                at = tuple(int(match[field]) for field in stacked)
                bound[tuple(match[field] for field in shared)][part][at] = array
    result = {}
    unstacked = [field for field in re.findall(r"{(\w+)}", targets[0]) if field not in fields[0]]
    for numbers, parts in bound.items():
        arrays = {(part, at): array for part, by in parts.items() for at, array in by.items()}
        for step in rule.get("operations", ()):
            arrays = _step(step, arrays, max(len(sources), len(targets)) if "rows" in step else len(targets))
        for (part, at), array in arrays.items():
            name = targets[part]
            for field, value in [*zip(shared, numbers, strict=True), *zip(unstacked, at, strict=True)]:
                name = name.replace(f"{{{field}}}", str(value))
            result[name] = array
    return result


def _step(step: dict[str, Any], arrays: dict[tuple[int, tuple[int, ...]], Array], names: int) -> Any:
    match step:
        case {"trim": {"axis": 0, "size": rows}}:
            return {key: array[:rows] for key, array in arrays.items()}
        case {"pad": {"axis": 0, "size": rows}}:
            return {key: padded(array, rows) for key, array in arrays.items()}
        case {"transpose": [a, b]}:
            return {key: array.swapaxes(a, b) for key, array in arrays.items()}
        case {"rows": {"to": order, "head_dim": head_dim, **how}}:
            parts, axis = how.get("parts", range(names)), how.get("axis", 0)
            return {
                (part, at): rotary(array.swapaxes(0, axis), head_dim, order).swapaxes(0, axis)
                if part in parts
                else array
                for (part, at), array in arrays.items()
            }
        case {"stack": axis}:
            groups: Any = defaultdict(list)
            for (part, at), array in sorted(arrays.items(), key=lambda item: item[0]):
                groups[part, at[:-1]].append(array)
            return {key: np.stack(all_, axis) for key, all_ in groups.items()}
        case {"unstack": axis}:
            return {
                (part, (*at, e)): array.take(e, axis)
                for (part, at), array in arrays.items()
                for e in range(array.shape[axis])
            }
        case {"concat": how}:
            axis, groups = (how, 1) if isinstance(how, int) else (how["axis"], how.get("groups", 1))
            by: Any = defaultdict(list)
            for (_, at), array in sorted(arrays.items(), key=lambda item: item[0]):
                by[at].append(array)
            return {(0, at): interleaved(all_, axis, groups) for at, all_ in by.items()}
        case {"split": how}:
            how = {"axis": how} if isinstance(how, int) else how
            parts = how.get("parts", [1] * names)
            return {
                (part, at): piece
                for (_, at), array in arrays.items()
                for part, piece in enumerate(separated(array, how["axis"], parts, how.get("groups", 1)))
            }
    raise AssertionError(step)


def padded(array: Array, rows: int) -> Array:
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])


def rotary(array: Array, d: int, order: str) -> Array:
    """Neighbours become halves, or the other way round."""
    rest = array.shape[1:]
    shape = (-1, d // 2, 2, *rest) if order == "halves" else (-1, 2, d // 2, *rest)
    return array.reshape(shape).swapaxes(1, 2).reshape(array.shape)


def interleaved(arrays: list[Array], axis: int, groups: int) -> Array:
    """One group of each array after the other."""
    pieces = [np.split(array, groups, axis) for array in arrays]
    return np.concatenate([piece[group] for group in range(groups) for piece in pieces], axis)


def separated(array: Array, axis: int, ratio: list[int], groups: int) -> list[Array]:
    blocks = np.split(array, groups, axis)
    cuts = np.cumsum(ratio)[:-1] * (blocks[0].shape[axis] // sum(ratio))
    parts = [np.split(block, cuts, axis) for block in blocks]
    return [np.concatenate([part[k] for part in parts], axis) for k in range(len(ratio))]


# --- random models ----------------------------------------------------------------------------------------------------


class RandomModel:
    """A random model under the names of transformers, and what is known of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.next = 1
        self.state: State = {}
        self.head_dim = rng.choice([2, 4])
        self.groups = rng.choice([1, 2, 4])
        self.heads = self.groups * rng.choice([1, 1, 2])
        self.hidden = rng.choice([8, 12, 16, self.heads * self.head_dim])
        self.positions, self.is_permuted = rng.random() < 0.3, rng.random() < 0.7
        self.experts_first = rng.random() < 0.3
        self.axis, self.by_groups = rng.choice([0, 0, 0, 1]), rng.random() < 0.5
        layers, experts = rng.choice([1, 2, 3]), rng.choice([0, 0, 3, 4, 8])
        inner, words_ = rng.choice([8, 12, 16, 24, 32]), rng.choice([20, 24, 32])
        bias, gated, norms = rng.random() < 0.3, rng.random() < 0.8, rng.random() < 0.3
        self.add("model.embed_tokens.weight", words_, self.hidden)
        if self.positions:
            self.add("model.embed_positions.weight", 10, self.hidden)
        towers = ["model.encoder.layers", "model.decoder.layers"] if rng.random() < 0.15 else ["model.layers"]
        dense = rng.choice([0, 1]) if layers > 1 else 0
        for tower in towers:
            for n in range(layers):
                at = f"{tower}.{n}"
                attentions = ["self_attn"] + (["encoder_attn"] if "decoder" in tower else [])
                for attention in attentions:
                    for one, rows in (("q", self.heads), ("k", self.groups), ("v", self.groups)):
                        self.linear(f"{at}.{attention}.{one}_proj", rows * self.head_dim, self.hidden, bias)
                    self.linear(f"{at}.{attention}.o_proj", self.hidden, self.heads * self.head_dim, bias)
                if norms:
                    self.add(f"{at}.self_attn.q_norm.weight", self.head_dim)
                    self.add(f"{at}.self_attn.k_norm.weight", self.head_dim)
                self.add(f"{at}.input_layernorm.weight", self.hidden)
                self.add(f"{at}.post_attention_layernorm.weight", self.hidden)
                mlps = [f"{at}.mlp"]
                if experts and n >= dense:
                    mlps = [f"{at}.mlp.experts.{e}" for e in range(experts)]
                    self.add(f"{at}.mlp.gate.weight", experts, self.hidden)
                for mlp in mlps:
                    if gated:
                        self.linear(f"{mlp}.gate_proj", inner, self.hidden, False)
                    self.linear(f"{mlp}.up_proj", inner, self.hidden, bias and not experts)
                    self.linear(f"{mlp}.down_proj", self.hidden, inner, bias and not experts)
        self.add("model.norm.weight", self.hidden)
        if rng.random() < 0.7:
            self.add("lm_head.weight", words_, self.hidden)

    def add(self, name: str, *shape: int) -> None:
        size = int(np.prod(shape))
        self.state[name] = np.arange(self.next, self.next + size).reshape(shape)
        self.next += size

    def linear(self, name: str, rows: int, columns: int, bias: bool) -> None:
        self.add(f"{name}.weight", rows, columns)
        if bias:
            self.add(f"{name}.bias", rows)


Operation = Callable[["Side"], None]


class Side:
    """A state dict to which operations are applied. `rows` is whether queries and keys are in the order of halves."""

    def __init__(self, model: RandomModel, rng: random.Random) -> None:
        self.model, self.rng, self.state = model, rng, dict(model.state)
        self.halves = True
        self.log: list[str] = []
        self.fused: dict[str, str] = {}
        self.transposed: set[str] = set()

    def operate(self, *others: Operation) -> None:
        operation = self.rng.choice([*_OPERATIONS, *others])
        before = dict(self.state)
        operation(self)
        if len(self.state) == len(before) and all(self.state.get(n) is a for n, a in before.items()):
            return
        self.log.append(operation.__name__)

    def words(self, *pairs: tuple[str, str]) -> None:
        """Replace whole keys of names."""
        table = dict(pairs)
        state = {".".join(table.get(key, key) for key in name.split(".")): a for name, a in self.state.items()}
        if len(state) == len(self.state):
            self.state = state

    def words_of_names(self) -> list[str]:
        found = {key for name in self.state for key in name.split(".")}
        return sorted(key for key in found if not key.isdigit() and key not in ("weight", "bias"))

    def fresh(self) -> str:
        return "".join(self.rng.choice("bcdfghjlmz") for _ in range(5))

    def replace(self, old: list[str], new: State) -> None:
        place = next(iter(old))
        state: State = {}
        for name, array in self.state.items():
            if name == place:
                state |= new
            if name not in old:
                state[name] = array
        self.state = state


def prefix(side: Side) -> None:
    if side.rng.random() < 0.5:
        side.state = {name.removeprefix("model."): array for name, array in side.state.items()}
    else:
        text = side.rng.choice(["module.", "base.", "transformer."])
        side.state = {text + name: array for name, array in side.state.items()}


def lists(side: Side) -> None:
    side.words(("layers", side.rng.choice(["h", "blocks", "layer", side.fresh()])))


def parts(side: Side) -> None:
    pairs = [("self_attn", "attention"), ("self_attn", "attn"), ("mlp", "feed_forward"), ("mlp", "ffn")]
    side.words(side.rng.choice(pairs))


def meta(side: Side) -> None:
    """The names of Meta's attention; the rows of a rotary embedding may be others."""
    if not any(".q_proj." in name for name in side.state) or any(
        key.endswith("_attn") for key in side.words_of_names() if key != "self_attn"
    ):
        return
    if not side.model.positions and side.model.is_permuted:
        for name, array in side.state.items():
            one = next((key for key in ("q_proj", "k_proj") if f".{key}." in name), None)
            heads = side.model.heads if one == "q_proj" else side.model.groups
            if one and array.shape[0] != heads * side.model.head_dim:
                return  # transposed or stacked before
        side.state = {
            name: rotary(array, side.model.head_dim, "neighbours")
            if ".q_proj." in name or ".k_proj." in name
            else array
            for name, array in side.state.items()
        }
        side.halves = False
    side.words(("q_proj", "wq"), ("k_proj", "wk"), ("v_proj", "wv"), ("o_proj", "wo"))


def synonyms(side: Side) -> None:
    rows = [
        (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")),
        (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")),
        (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")),
        (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm")),
        (("embed_tokens", "wte"), ("embed_positions", "wpe")),
        (("embed_tokens", "tok_embeddings"), ("lm_head", "output")),
        (("norm", "ln_f"),),
    ]
    row = side.rng.choice(rows)
    table = side.words_of_names()
    if row[0][0] == "gate_proj" and not {"gate_proj", "up_proj", "down_proj"} <= {*table}:
        return
    side.words(*row)


def nonsense(side: Side) -> None:
    side.words((side.rng.choice(side.words_of_names()), side.fresh()))


def kernel(side: Side) -> None:
    key = side.rng.choice(["kernel", "gamma"])
    state = {re.sub(r"\.weight$", f".{key}", name): array for name, array in side.state.items()}
    side.state = state


def stack_experts(side: Side) -> None:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in side.state:
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", name):
            groups[f"{match[1]}.{match[2]}"].append(name)
    bare, axis = side.rng.random() < 0.6, side.model.axis
    if axis == 1:  # one that shapes tell from 0
        shapes = {side.state[names[0]].shape for names in groups.values()}
        if all(len(names) == side.state[names[0]].shape[0] for names in groups.values()) or not shapes:
            return
    for name, names in groups.items():
        new = re.sub(r"\.(weight|kernel|gamma)$", "", name) if bare else name
        side.replace(names, {new: np.stack([side.state[each] for each in names], axis)})


def stack_layers(side: Side) -> None:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in side.state:
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
        if len(numbers) == 1:
            groups[re.sub(r"\.\d+\.", ".", name, count=1)].append(name)
    for name, names in groups.items():
        arrays = [side.state[each] for each in names]
        if (
            len(names) > 1
            and len({array.shape for array in arrays}) == 1
            and [re.findall(r"\d+", each)[-1] for each in names] == [str(i) for i in range(len(names))]
            and name not in side.state
        ):
            side.replace(names, {name: np.stack(arrays)})


def stack_layers_and_experts(side: Side) -> None:
    """One tensor of the experts of all layers, by layers or by experts first."""
    groups: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for name in side.state:
        if match := re.fullmatch(r"(.*?)\.(\d+)\.(.*\.experts)\.(\d+)\.(.*)", name):
            groups[f"{match[1]}.{match[3]}.{match[5]}"][int(match[2]), int(match[4])] = name
    for name, names in groups.items():
        layers, experts = (max(column) + 1 for column in zip(*names, strict=True))
        if len(names) != layers * experts or layers < 2:
            return  # some layers have none
        one = np.array([[side.state[names[n, e]] for e in range(experts)] for n in range(layers)])
        side.replace([*names.values()], {name: one.swapaxes(0, 1) if side.model.experts_first else one})


def fuse_gate_up(side: Side) -> None:
    for name in [n for n in side.state if ".gate_proj." in n]:
        other = name.replace(".gate_proj.", ".up_proj.")
        if other not in side.state or name.endswith("bias") or other.replace("weight", "bias") in side.state:
            continue
        word = side.fused.setdefault("gate_up", side.rng.choice(["gate_up_proj", "gate_up_proj", "w13", side.fresh()]))
        arrays = [side.state[name], side.state[other]]
        transposed = side.transposed & {"gate_proj", "up_proj"}
        if len(transposed) == 1:
            return
        axis = arrays[0].ndim - (1 if transposed else 2)
        if (arrays[0].ndim > 2 and side.model.axis) or (transposed and arrays[0].shape[-1] * 2 == arrays[0].shape[-2]):
            return
        side.replace([name, other], {name.replace("gate_proj", word): np.concatenate(arrays, axis)})


def fuse_qkv(side: Side) -> None:
    q, k, v = ("q_proj", "k_proj", "v_proj") if any(".q_proj." in n for n in side.state) else ("wq", "wk", "wv")
    if side.transposed & {q, k, v}:
        return
    by_groups = side.model.by_groups if side.rng.random() < 0.5 else side.rng.random() < 0.5
    word = side.rng.choice(
        [
            *(["qkv"] if by_groups == side.model.by_groups else []),
            side.fresh(),
            *([] if not side.halves else ["linear_qkv"] if by_groups else ["qkv_proj", "c_attn"]),
        ]
    )
    for name in [n for n in side.state if f".{q}." in n]:
        names = [name, name.replace(f".{q}.", f".{k}."), name.replace(f".{q}.", f".{v}.")]
        if not all(each in side.state for each in names):
            return
        arrays = [side.state[each] for each in names]
        if arrays[0].ndim != (1 if name.endswith("bias") else 2):
            return
        rows = (side.model.heads * side.model.head_dim, *(side.model.groups * side.model.head_dim,) * 2)
        if any(array.shape[0] != n for array, n in zip(arrays, rows, strict=True)):
            return
        one = interleaved(arrays, 0, side.model.groups if by_groups else 1)
        side.replace(names, {name.replace(f".{q}.", f".{word}."): one})


def transpose(side: Side, *, unseen: bool = False) -> None:
    """The weights of all modules of one name, of which some shape shows it; or those of one that are all square."""
    shapes: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    stem = {name: re.sub(r"\.(weight|kernel|gamma)$", "", name) for name in side.state}
    for name, array in side.state.items():
        key = [key for key in stem[name].split(".") if not key.isdigit()][-1]
        shapes[key].append(array.shape)
    possible = [
        key
        for key, all_ in shapes.items()
        if all(len(shape) in (2, 3) or len(shape) < 2 for shape in all_)
        and any(len({*shape}) == len(shape) > 1 for shape in all_) is not unseen
        and not key.startswith(("embed", "wte", "wpe", "tok"))
    ]
    if not possible:
        return
    # The parts of what some library fuses lie the same way.
    chosen = {side.rng.choice(possible)} if unseen or side.rng.random() < 0.6 else {*possible}
    for together in (
        ("q_proj", "k_proj", "v_proj"),
        ("wq", "wk", "wv"),
        ("query", "key", "value"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
    ):
        chosen |= {*together} if chosen & {*together} else set()
    for name in [*side.state]:
        key = [key for key in stem[name].split(".") if not key.isdigit()][-1]
        array = side.state[name]
        if key in chosen and array.ndim > 1 and not name.endswith("bias") and "norm" not in name and "ln_" not in name:
            side.state[name] = array.swapaxes(-1, -2)
    side.transposed ^= chosen


def transpose_unseen(side: Side) -> None:
    """What no name and no shape shows."""
    transpose(side, unseen=True)


def pad(side: Side) -> None:
    rows = None
    for name, array in [*side.state.items()]:
        if re.search(r"(^|\.)(embed_tokens|wte|tok_embeddings|lm_head|output)\.", name) and array.ndim == 2:
            rows = rows or len(array) + side.rng.choice([1, 4, 8])
            if array.shape[1] == side.model.hidden and len(array) < rows:
                side.state[name] = padded(array, rows)


_OPERATIONS = [
    prefix,
    lists,
    parts,
    meta,
    synonyms,
    synonyms,
    nonsense,
    kernel,
    stack_experts,
    stack_experts,
    stack_layers,
    stack_layers_and_experts,
    fuse_gate_up,
    fuse_gate_up,
    fuse_qkv,
    fuse_qkv,
    transpose,
    pad,
]


def random_case(seed: int, *others: Operation) -> tuple[RandomModel, Side, Side]:
    """Return a model, and two state dicts of it to which up to five operations were applied in all, also these."""
    rng = random.Random(seed)
    model = RandomModel(rng)
    sides = (Side(model, rng), Side(model, rng))
    for _ in range(rng.randint(1, 5)):
        rng.choice(sides).operate(*others)
    return model, *sides
