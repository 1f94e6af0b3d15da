"""Whether names come in the order in which a model walks its modules, or merely sorted. Pure.

embed.w, layers.0.q.w, layers.0.k.w, norm.w      as a model walks them
embed.w, layers.0.k.w, layers.0.q.w, norm.w      sorted, as safetensors does
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ckpttool.catalogue.entries import Catalogue, Tensor


def is_model_order(names: Sequence[str]) -> bool:
    """Whether names come as a model walks them, and are not just sorted, which nothing but chance tells from it: what
    came from safetensors is. Pure."""
    return walks(names) and (len(names) < 3 or list(names) != sorted(names))


def walks(names: Sequence[str]) -> bool:
    """Whether the names of a module come in one run, its own before those of modules in it. DCP without key paths
    lists tensors by the rank that saved them. Pure."""
    done: set[str] = set()
    nested: set[str] = set()
    around: list[str] = []
    for name in names:
        keys = name.split(".")[:-1]
        modules = [".".join(keys[: i + 1]) for i in range(len(keys))]
        done |= set(around) - set(modules)
        if done & set(modules) or (modules[-1] if modules else "") in nested:
            return False
        nested |= {"", *modules[:-1]} if modules else set()
        around = modules
    return True


def is_sorted(source: Catalogue, tensors: Sequence[Tensor], names: Sequence[str]) -> bool:
    """Whether these tensors of a model may be sorted by name: each file of safetensors is. Pure."""
    return any(map(is_safetensors(source), tensors)) or is_by_name(tensors, names)


def is_by_name(tensors: Sequence[Tensor], names: Sequence[str]) -> bool:
    """Whether tensors are in the order of their names, those of each dtype apart, as safetensors has them. Pure."""
    apart: dict[str, list[str]] = defaultdict(list)
    for tensor, name in zip(tensors, names, strict=True):
        apart[tensor.dtype.name].append(name)
    return all(one == sorted(one) for one in apart.values())


def is_safetensors(source: Catalogue) -> Callable[[Tensor], bool]:
    """What tells whether a tensor is in a safetensors file. Pure."""
    return lambda t: (
        bool(len(t.chunks) and source.files) and source.files[t.chunks.file[0]].name.endswith(".safetensors")
    )


def hint_of_order(source: Catalogue) -> str:
    """Where the order may come from. Pure."""
    listed = '`json.dump([[name, list(p.shape)] for name, p in model.named_parameters()], open("order.json", "w"))`'
    tried = source.facts.get("shapes without order")
    if tried is not None:
        return f"`--shapes {tried}` is not in the order of a model either; pass the file that {listed} makes"
    return (
        "pass `--shapes FROM`, a torch.save file or DCP directory that has the model's order, or the JSON file that "
        f"{listed} makes"
    )
