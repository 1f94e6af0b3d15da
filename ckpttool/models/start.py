"""The model of a training checkpoint that starts from released weights: under the names, and with the dtypes, that the
checkpoint of a run has. The reverse of `export --like`.

    released     model.layers.0.mlp.experts.0.gate_proj.weight, ...          bfloat16
    of the run   model.model.layers.0.mlp.experts.gate_up_proj               float32
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpttool.catalogue.entries import Catalogue, Path, above
from ckpttool.errors import CkptError, CorruptError, LossError
from ckpttool.layout.move import derived, rebuilt
from ckpttool.layout.selection import Selection
from ckpttool.layout.views import Viewed
from ckpttool.models import architecture, assets, like, select_model, ties
from ckpttool.models import reference as references

NO_OPTIMIZER = "the model alone: there is no optimizer state yet, and the optimizer of the run starts afresh"


def model(
    viewed: Viewed,
    src: str,
    run: references.Reference,
    selection: Selection,
    key_map: str | None,
    notes: list[str],
    *,
    dtypes: bool,
) -> Catalogue:
    """Return the model of a released checkpoint as the run has it; with `dtypes`, also the dtypes. What is done to the
    names is noted.

    Raises CorruptError for tensors that are missing or have another shape, LossError for those that the run does not
    have, UsageError for dtypes that no cast makes.
    """
    source = viewed.catalogue
    beside = assets.collect(None, source)
    same = partial(ties.same_bytes, viewed)
    planned = select_model.renamed(select_model.model_of(source, selection.only), selection)
    planned, _ = like.mapped(planned, viewed, run, key_map, beside.config, beside.head_dim, notes)
    planned = ties.by_names(planned, beside.ties_words, same, [])
    found = _fitted(planned, run, src, beside.config)
    fitted = like.cast(found.catalogue, run) if dtypes else found.catalogue
    stored = {name: tensor.origin or tensor for name, tensor in run.tensors.items()}
    tensors = []
    for tensor in fitted.tensors:
        own = stored[tensor.name]
        alias = stored[str(tensor.alias[0])].path if tensor.alias is not None else None
        tensors.append(derived(tensor, path=own.path, part=own.part, alias=alias))
    around = {path for tensor in tensors for path in above(tensor.path)}
    assert run.source is not None
    containers = {path: one for path, one in run.source.catalogue.containers.items() if path in around}
    result = rebuilt(fitted, tensors, containers)
    result.warnings = []
    return result


def _fitted(planned: Catalogue, run: references.Reference, src: str, config: Mapping[str, Any] | None) -> like.Fitted:
    """Return the tensors as the run has them. Which the model ties is what the values of the run say, or transformers,
    which takes seconds."""
    tied: dict[str, str] = {}
    refusal: CkptError | None = None
    for more in (dict[str, str], partial(_tied, run), partial(_tied_by_config, config)):
        known = len(tied)
        tied |= more()
        if refusal is None or len(tied) > known:
            try:
                return like.fitted(planned, run, None, src, tied)
            except (CorruptError, LossError) as error:
                refusal = error
    assert refusal is not None
    raise refusal


def _tied_by_config(config: Mapping[str, Any] | None) -> Mapping[str, str]:
    expected = architecture.expected(config) if config is not None else ""
    return {} if isinstance(expected, str) else expected.tied


def read(viewed: Viewed, planned: Catalogue) -> frozenset[Path]:
    """Return the paths of the tensors of the source that a model is made of."""
    return frozenset(one.path for tensor in planned.tensors for one in viewed.stored(tensor.origin or tensor))


def _tied(run: references.Reference) -> dict[str, str]:
    """Return the names of the run's model that have the bytes of another, with that name."""
    if run.source is None:
        return {}
    model = rebuilt(run.source.catalogue, run.tensors.values(), {})
    model = ties.by_names(model, None, partial(ties.same_bytes, run.source), [])
    return {tensor.name: str(tensor.alias[0]) for tensor in model.tensors if tensor.alias is not None}
