"""Checks that a checkpoint fits the model of a recipe: names, shapes, dtypes and trained parameters.

One process builds the model: on the meta device, which takes no memory, or else on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ckpttool.analysis.audit.checks import Checks, named, trained_model
from ckpttool.analysis.audit.recipe import Recipe, build_state, load_recipe, recipe_mesh
from ckpttool.analysis.audit.uncovered import check_uncovered
from ckpttool.catalogue.entries import Catalogue
from ckpttool.catalogue.parts import kind_of_key
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout.optimizer import names_of_ids
from ckpttool.layout.optimizer.parse import optimizers
from ckpttool.layout.rename import strip_wrappers
from ckpttool.text import plural

_Kind = tuple[list[int], str]  # shape and dtype


def check_model(path: str, catalogue: Catalogue, checks: Checks) -> None:
    """Compare the checkpoint with the model of the recipe at `path`. Raises UsageError if the recipe does not run."""
    recipe = load_recipe(path)
    with _one_process(recipe, catalogue.world_size) as mesh:
        state, device = _build(recipe, mesh)
        expected, trained = _named_shapes(state["model"])
    actual = {name: (list(tensor.shape), tensor.dtype.name) for name, tensor in trained_model(catalogue).items()}
    if not actual:
        return
    _compare(expected, actual, device, checks)
    _compare_optimizer(trained, len(state["optimizer"].param_groups), catalogue, checks)
    kinds = {entry.part.kind for entry in catalogue.entries.values()}
    keys = {str(key) for entry in catalogue.entries.values() for key in entry.path[:2]}
    for name in sorted(state.keys() - {"model", "optimizer"} - keys):
        if kind_of_key(name) not in kinds:
            checks.differs("recipe", f"`{name}` of the recipe has no state in the checkpoint", [name])
    check_uncovered(state, getattr(recipe.build, "__globals__", {}), checks)


@contextmanager
def _one_process(recipe: Recipe, world: int) -> Iterator[Any]:
    """Yield the recipe's mesh with every dimension of size 1, over a process group of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    names = _dimensions(recipe, world)
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    finally:
        if own_group:
            dist.destroy_process_group()


def _dimensions(recipe: Recipe, world: int) -> tuple[str, ...]:
    # A file merged from many ranks does not tell how many; names do not depend on it.
    for ranks in (1, 2, 4, 8, 16) if world == 1 else ():
        with suppress(UsageError):
            return recipe_mesh(recipe, ranks).names
    return recipe_mesh(recipe, world).names


def _build(recipe: Recipe, mesh: Any) -> tuple[dict[str, Any], str]:
    import torch
    from torch.overrides import TorchFunctionMode

    from ckpttool.training import devices

    moves = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, getattr(torch.Tensor, devices.kind()))

    class Staying(TorchFunctionMode):  # type: ignore[misc] # torch is not looked into
        """Has `model.to(device)` leave tensors on the meta device."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in moves and args[0].is_meta:
                args = tuple("meta" if isinstance(arg, (str, int, torch.device)) else arg for arg in args[:2])
                kwargs = {name: value for name, value in (kwargs or {}).items() if name == "dtype"}
                func = torch.Tensor.to
                args = args if args[1:] else (*args, "meta")
            return func(*args, **(kwargs or {}))

    try:
        with torch.device("meta"), Staying():
            return build_state(recipe, mesh), "meta"
    except CkptError:
        # FSDP1 needs storage, DDP broadcasts weights, and data need values.
        return build_state(recipe, mesh), "cpu"


def _named_shapes(model: Any) -> tuple[dict[str, _Kind], set[str]]:
    """Return shape and dtype of everything in the state dict, and the names of trained parameters, tied ones once."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(model)
    tensors = {strip_wrappers(name): value for name, value in state.items() if hasattr(value, "shape")}
    shapes = {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in tensors.items()}
    return shapes, {strip_wrappers(name) for name, p in model.named_parameters() if p.requires_grad}


def _compare(expected: dict[str, _Kind], actual: dict[str, _Kind], device: str, checks: Checks) -> None:
    before = checks.faults
    if missing := sorted(expected.keys() - actual.keys()):
        checks.fails("recipe", f"{named(missing, 'tensor')} of the recipe's model not in the checkpoint", missing)
    if extra := sorted(actual.keys() - expected.keys()):
        checks.fails("recipe", f"{named(extra, 'tensor')} of the checkpoint not in the recipe's model", extra)
    both = [name for name in expected if name in actual]
    for i, (what, add) in enumerate((("shape", checks.fails), ("dtype", checks.differs))):
        if names := [name for name in both if expected[name][i] != actual[name][i]]:
            found, wanted = actual[names[0]][i], expected[names[0]][i]
            message = f"{named(names, 'tensor')} of another {what}: {found}, and the model has {wanted}"
            add("recipe", message, names)
    if checks.faults == before:
        where = "on the meta device" if device == "meta" else "on the CPU"
        same = f"the same {plural(len(expected), 'tensor')} and shapes"
        checks.ok("recipe", f"the recipe's model, built {where}, has {same}")


def _compare_optimizer(trained: set[str], groups: int, catalogue: Catalogue, checks: Checks) -> None:
    try:
        parsed = optimizers(catalogue)
        if len(parsed) != 1:
            return
        optimizer = parsed[0]
        names = names_of_ids.name_ids(parsed, catalogue)[0] if optimizer.spelling == "id" else {}
    except CkptError:
        return  # reported by the check of the optimizer
    keys = {strip_wrappers(str(names.get(key, key))) for key in optimizer.params}
    if lost := sorted(trained - keys):
        checks.fails("recipe", f"{named(lost)} of the recipe's model in no group of the optimizer", lost)
    if optimizer.spelling != "flat" and groups != len(optimizer.groups):
        message = f"the recipe's optimizer has {plural(groups, 'group')}, and the checkpoint {len(optimizer.groups)}"
        checks.fails("recipe", message)
