"""Whether a checkpoint is of the model that a recipe builds: names, shapes, and what is trained.

The model is built by one process: on the meta device, which takes no memory, or where that does not work on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpttool.catalogue.boxes import Ints
from ckpttool.catalogue.entries import Catalogue, Tensor
from ckpttool.catalogue.parts import kind_of_key
from ckpttool.errors import CkptError, UsageError
from ckpttool.layout import select as layout
from ckpttool.layout.optimizer import names as naming
from ckpttool.layout.optimizer import parse as found
from ckpttool.operations.verify_resume import recipe as recipes
from ckpttool.operations.verify_resume.audit.checks import Checks, named
from ckpttool.text import plural


def look(path: str, catalogue: Catalogue) -> Checks:
    """Compare the checkpoint with the model of the recipe at `path`. Raises UsageError when the recipe does not run."""
    recipe = recipes.load(path)
    checks = Checks()
    with _alone(recipe, catalogue.world_size) as mesh:
        state, device = _build(recipe, mesh)
        wanted, trained = _named_shapes(state["model"])
        groups = len(state["optimizer"].param_groups)
        others = {name for name in state if name not in ("model", "optimizer")}
    there = _shapes(catalogue)
    if not there:
        return checks
    _compare(wanted, there, device, checks)
    _compare_optimizer(trained, groups, catalogue, checks)
    kinds = {entry.part.kind for entry in catalogue.entries.values()}
    keys = {str(key) for entry in catalogue.entries.values() for key in entry.path[:2]}
    for name in sorted(others):
        if name not in keys and kind_of_key(name) not in kinds:
            checks.differs("recipe", f"its `{name}` has no state here", [name])
    return checks


@contextmanager
def _alone(recipe: recipes.Recipe, world: int) -> Iterator[Any]:
    """A process group of this process, and the recipe's mesh with every dimension of size 1."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    names = _dimensions(recipe, world)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    finally:
        if ours:
            dist.destroy_process_group()


def _dimensions(recipe: recipes.Recipe, world: int) -> tuple[str, ...]:
    try:
        return tuple(recipes.dimensions(recipe, world))
    except UsageError:
        if world != 1:
            raise
    # A file that was merged from many ranks says nothing of them; the names do not depend on how many there are.
    for ranks in (2, 4, 8, 16):
        try:
            return tuple(recipes.dimensions(recipe, ranks))
        except UsageError:
            continue
    return tuple(recipes.dimensions(recipe, world))


def _build(recipe: recipes.Recipe, mesh: Any) -> tuple[dict[str, Any], str]:
    import torch
    from torch.overrides import TorchFunctionMode

    from ckpttool.training import devices

    moves = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, getattr(torch.Tensor, devices.kind()))

    class Staying(TorchFunctionMode):  # type: ignore[misc] # torch is not looked into
        """`model.to(device)` leaves on the meta device what is there."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in moves and args[0].is_meta:
                args = tuple("meta" if isinstance(arg, (str, int, torch.device)) else arg for arg in args[:2])
                kwargs = {name: value for name, value in (kwargs or {}).items() if name == "dtype"}
                func = torch.Tensor.to
                args = args if args[1:] else (*args, "meta")
            return func(*args, **(kwargs or {}))

    try:
        with torch.device("meta"), Staying():
            return recipes.built(recipe, mesh), "meta"
    except CkptError:
        # FSDP1 needs storage, DDP sends weights about, and data are no use without values.
        return recipes.built(recipe, mesh), "cpu"


def _named_shapes(model: Any) -> tuple[dict[str, tuple[Ints, str]], set[str]]:
    """Shape and dtype of everything in the model's state, and the names of what is trained, tied ones once."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(model)
    shapes = {
        layout.strip_wrappers(name): (tuple(v.shape), str(v.dtype).removeprefix("torch."))
        for name, v in state.items() if hasattr(v, "shape")
    }  # fmt: skip
    return shapes, {layout.strip_wrappers(name) for name, p in model.named_parameters() if p.requires_grad}


def _shapes(catalogue: Catalogue) -> dict[str, tuple[Ints, str]]:
    models = layout.models(catalogue)
    return {
        layout.strip_wrappers(entry.fqn): (entry.shape, entry.dtype.name)
        for entry in (models[0][1] if models else ())
        if isinstance(entry, Tensor)
    }


def _compare(
    wanted: dict[str, tuple[Ints, str]], there: dict[str, tuple[Ints, str]], device: str, checks: Checks
) -> None:
    missing = sorted(set(wanted) - set(there))
    extra = sorted(set(there) - set(wanted))
    shapes = [name for name in wanted if name in there and wanted[name][0] != there[name][0]]
    dtypes = [name for name in wanted if name in there and wanted[name][1] != there[name][1]]
    if missing:
        checks.fails("recipe", f"its model has {named(missing, 'tensor')}, and the checkpoint has not", missing)
    if extra:
        checks.fails("recipe", f"the checkpoint has {named(extra, 'tensor')}, and its model has not", extra)
    if shapes:
        name = shapes[0]
        checks.fails(
            "recipe", f"{named(shapes, 'tensor')} of another shape: {list(there[name][0])}, and the model has "
            f"{list(wanted[name][0])}", shapes,
        )  # fmt: skip
    if dtypes:
        name = dtypes[0]
        checks.differs(
            "recipe", f"{named(dtypes, 'tensor')} of another dtype: {there[name][1]}, and the model has "
            f"{wanted[name][1]}", dtypes,
        )  # fmt: skip
    if not (missing or extra or shapes or dtypes):
        where = "on the meta device" if device == "meta" else "on the CPU"
        checks.ok("recipe", f"its model, built {where}, has these {plural(len(wanted), 'tensor')}, of these shapes")


def _compare_optimizer(trained: set[str], groups: int, catalogue: Catalogue, checks: Checks) -> None:
    try:
        optimizers = found.optimizers(catalogue)
        if len(optimizers) != 1:
            return
        (optimizer,) = optimizers
        names = naming.name_ids(optimizers, catalogue)[0] if optimizer.spelling == "id" else {}
    except CkptError:
        return  # said already
    keys = {layout.strip_wrappers(str(names.get(key, key))) for key in optimizer.params}
    lost = sorted(trained - keys)
    if lost:
        checks.fails("recipe", f"{named(lost)} of its model in no group of the optimizer", lost)
    if optimizer.spelling != "flat" and groups != len(optimizer.groups):
        checks.fails(
            "recipe", f"its optimizer has {plural(groups, 'group')}, and the checkpoint {len(optimizer.groups)}"
        )
