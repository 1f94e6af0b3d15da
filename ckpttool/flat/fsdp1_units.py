"""Which modules FSDP1 wrapped, when only the sizes of the flat parameters are known. Pure.

    parameters   embed.weight 203   layers.0.up.weight 77   layers.0.up.bias 11   layers.1.up.weight 77 ...
    ids          0: 105 on each of 2 ranks   1: 44   2: 44
    units        the root, layers.0, layers.1

As verl saves FSDP1. A unit is a module, less the units inside it; ids run through the modules as the model does, outer
before inner. FSDP wraps by class or by size, so modules that are alike are wrapped alike: every choice for the kinds of
modules is looked at that fits the sizes, each of which is `ceil(elements / ranks)`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from math import prod

from ckpttool.catalogue.boxes import Ints
from ckpttool.errors import UsageError
from ckpttool.flat.pieces import Parameter, Unit
from ckpttool.layout.optimizer.names_of_ids import ways

_MAX_VISITS = 2_000_000

Kind = tuple[tuple[str, Ints], ...]
"""What is in a module: relative names and shapes."""


class _Module:
    """A module of the model: its own parameters, and the modules in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.own: list[Parameter] = []
        self.inner: dict[str, _Module] = {}
        self.kind: Kind = ()

    def put(self, parameter: Parameter) -> None:
        module = self
        for key in parameter.name.split(".")[:-1]:
            module = module.inner.setdefault(key, _Module(f"{module.name}.{key}".lstrip(".")))
        module.own.append(parameter)

    def finished(self) -> _Module:
        """Return the module with its kind. One that is only around another one is that one: they hold the same."""
        self.inner = {key: module.finished() for key, module in self.inner.items()}
        if len(self.inner) == 1 and not self.own:
            return next(iter(self.inner.values()))
        below = [p for module in self.inner.values() for p in module.below()]
        self.kind = tuple((p.name[len(self.name) :].lstrip("."), p.shape) for p in (*self.own, *below))
        return self

    def below(self) -> list[Parameter]:
        return [*self.own, *(p for module in self.inner.values() for p in module.below())]


class _Unasked(Exception):
    """A kind of module comes up of which nobody said yet whether it is wrapped."""


class _Unfit(Exception):
    """Under these choices the sizes are not those of the ids."""


def _units(
    root: _Module,
    wrapped: Mapping[Kind, bool],
    steps: Sequence[Collection[int | None]],
    world: int,
    visits: Iterator[int],
) -> list[Unit]:
    """Return the units under one choice of the kinds that are wrapped, which is followed through the model as far as it
    goes. `steps` are the sizes that each may have. Raises _Unasked or _Unfit."""
    units: list[Unit] = []

    def visit(module: _Module) -> list[Parameter]:
        """Return the parameters that are left to the unit around."""
        if next(visits) > _MAX_VISITS:
            message = f"the optimizer has {len(steps)} flat parameters, and there are too many ways to choose modules"
            hint = "save the optimizer with `FSDP.optim_state_dict`, which names the parameters"
            raise UsageError(f"{message} of those sizes", hint=hint)
        if module.kind not in wrapped:
            raise _Unasked(module.kind)
        i, is_unit = len(units), wrapped[module.kind]
        if is_unit:
            if i == len(steps):
                raise _Unfit
            units.append(Unit(module.name, (), ()))
        parameters = [*module.own, *(parameter for inner in module.inner.values() for parameter in visit(inner))]
        if not is_unit:
            return parameters
        step = -(-sum(prod(p.shape) for p in parameters) // world)
        # A unit without anything of its own has no flat parameter: it is as if it were not wrapped.
        if not step or (step not in steps[i] and None not in steps[i]):
            raise _Unfit
        units[i] = Unit(module.name, tuple(parameters), (step,) * world)
        return []

    if visit(root) or len(units) != len(steps):
        raise _Unfit
    return units


def derive(
    parameters: Sequence[Parameter], groups: Sequence[Sequence[int | None]], world: int
) -> list[tuple[Unit, ...]]:
    """Return the units that fit ids of these sizes on each of `world` ranks, in the order of the ids: none, the one
    answer, or two of several. The ids of each group follow the model; `None` is the size of an id that has no state."""
    root = _Module("")
    for parameter in parameters:
        root.put(parameter)
    root = root.finished()
    answers: dict[tuple[tuple[Parameter, ...], ...], tuple[Unit, ...]] = {}
    choices: list[dict[Kind, bool]] = [{}]
    visits = count()
    ids = [*chain.from_iterable(groups)]
    steps = [{step} for step in ids] if len(groups) == 1 else [set(ids)] * len(ids)
    wanted = [[None if step is None else (step,) for step in group] for group in groups]
    while choices and len(answers) < 2:
        wrapped = choices.pop()
        try:
            units = _units(root, wrapped, steps, world, visits)
            rows = [*chain.from_iterable(ways(wanted, [unit.held[:1] for unit in units]) or ())]
            for end in (0, -1):
                answer = tuple(units[row[end]] for row in rows)
                if len(answer) == len(ids):
                    answers.setdefault(tuple(unit.parameters for unit in answer), answer)
        except _Unasked as asked:
            choices += [{**wrapped, asked.args[0]: choice} for choice in (False, True)]
        except _Unfit:
            pass
    return list(answers.values())
