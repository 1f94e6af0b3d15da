"""FSDP1's flat parameters, rebuilt from what real runs saved, against what torch gathered in the same runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from same import assert_same
from support import warm_python
from support.checkpoints import within
from support.hang import no_hang
from support.paths import CHECKPOINTS
from support.torchrun import Once
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpttool
from ckpttool.catalogue import boxes
from ckpttool.catalogue import flatten as nesting
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Extent, Tensor
from ckpttool.catalogue.protocols import NO_HINTS, OpenOptions
from ckpttool.catalogue.validation import validate
from ckpttool.errors import CkptError, CorruptError, UsageError
from ckpttool.flat import fsdp1_optimizer, fsdp1_parameters, fsdp1_units
from ckpttool.flat.pieces import Parameter, Rebuilt
from ckpttool.formats.rankfiles import FORMAT
from ckpttool.layout.optimizer import names_of_ids as model_names
from ckpttool.serialization import dtensor as sharded
from ckpttool.serialization import torch_zip as torchzip
from ckpttool.serialization.torch_pickle import TensorRef
from ckpttool.storage import files
from ckpttool.storage.stores import locate

HERE = Path(__file__).resolve().parent


ORIG = ["orig", "orig_one_unit", "orig_groups", "orig_names", "orig_frozen", "orig_dtypes", "orig_ignored",
        "orig_momentum"]  # fmt: skip
FLAT = ["flat", "flat_one_unit", "flat_untied", "flat_groups", "flat_names", "flat_dtypes", "flat_ignored",
        "flat_momentum"]  # fmt: skip
MESH = ["orig_mesh", "flat_mesh", "flat_mesh_nested"]
WORLDS = [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def ran(once: Once) -> Callable[..., Path]:
    """The folder of all cases for a number of ranks, or of `HYBRID`."""

    def run(world: int, *which: str) -> Path:
        def make(folder: Path) -> None:
            command = [*warm_python.python(), str(HERE / "save_flat_on_ranks.py"), str(folder), str(world), *which]
            result = subprocess.run(command, capture_output=True, text=True, timeout=900)
            assert result.returncode == 0, result.stderr[-4000:]

        return once("-".join(("flat", str(world), *which)), make)

    return run


class Opened:
    """The files of all ranks: their trees, and where the tensors in them are."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._pool = files.Pool()
        self._archives = [self._archive(path) for path in paths]
        self.trees = [sharded.replace(torchzip.load_tree(archive)) for archive in self._archives]

    def _archive(self, path: Path) -> torchzip.Archive:
        read = lambda offset, nbytes: self._pool.read(str(path), offset, nbytes)  # noqa: E731
        return torchzip.open_archive(read, 0, path.stat().st_size, name=path.name)

    def place(self, rank: int, ref: TensorRef) -> Extent:
        return self._archives[rank].extent(ref)._replace(file=rank)

    def part(self, key: str) -> list[Any]:
        return [tree[key] for tree in self.trees]

    def read(self, extent: Extent, like: torch.Tensor) -> torch.Tensor:
        data = self._pool.read(str(self.paths[extent.file]), extent.offset, extent.nbytes)
        return torch.frombuffer(bytearray(data), dtype=like.dtype)

    def filled(self, value: Any) -> Any:
        """A tree with the elements in place of where they are."""
        if isinstance(value, (Rebuilt, Tensor)):
            return self._tensor(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.filled, value))
        if isinstance(value, dict):
            return {key: self.filled(item) for key, item in value.items()}
        return value

    def _tensor(self, value: Rebuilt | Tensor) -> torch.Tensor:
        made = torch.zeros(value.shape, dtype=getattr(torch, value.dtype.name))
        assert boxes.tiling_fault(value.shape, value.chunks.offsets, value.chunks.sizes) is None
        for chunk in value.chunks:
            assert chunk.extent.plain and chunk.extent.nbytes == prod(chunk.sizes) * made.element_size()
            made[within((chunk.offsets, chunk.sizes))] = self.read(chunk.extent, made).reshape(chunk.sizes)
        for _, extent in value.copies if isinstance(value, Rebuilt) else ():
            assert torch.equal(self.read(extent, made).reshape(value.shape), made)
        return made


def opened(folder: Path) -> Opened:
    return Opened(sorted(folder.glob("rank*.pt")))


def reference(folder: Path) -> dict[str, Any]:
    whole = torch.load(folder / "reference.pt", weights_only=False)
    return {"model": dict(whole["model"]), "optim": whole["optim"]}


def shapes_of(whole: Mapping[str, Any]) -> OpenOptions:
    return OpenOptions({name: tuple(tensor.shape) for name, tensor in whole["model"].items()})


def rebuilt(folder: Path, options: OpenOptions | None = None) -> tuple[Opened, fsdp1_parameters.ModelParameters]:
    ranks = opened(folder)
    return ranks, fsdp1_parameters.model(ranks.part("model"), ranks.place, options or shapes_of(reference(folder)))


def clean(tree: Any) -> Any:
    """Tensors without what torch hung on them; they are compared by value."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: clean(value) for key, value in tree.items()}
    return [clean(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", ORIG + FLAT)
def test_parameters_are_those_that_torch_gathered(ran: Callable[[int], Path], case: str, world: int) -> None:
    folder = ran(world) / case
    whole = reference(folder)
    ranks, model = rebuilt(folder)
    assert fsdp1_parameters.is_flat(ranks.part("model"))
    found = ranks.filled(model.tensors)
    ignored = {"layers.0.gate", "layers.1.up.weight", "norm.bias"} if case.endswith("ignored") else set()
    assert set(model.whole) == {"seen", "rates"} | ignored
    assert_same(found, clean({k: v for k, v in whole["model"].items() if k not in model.whole}))
    assert (model.tensors["head.weight"].chunks.offset == model.tensors["embed.weight"].chunks.offset) == (
        case != "flat_untied"
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", ORIG + FLAT)
def test_optimizers_are_those_that_torch_gathered(ran: Callable[[int], Path], case: str, world: int) -> None:
    folder = ran(world) / case
    ranks, model = rebuilt(folder)
    assert fsdp1_optimizer.is_raw(ranks.part("optim"), beside_flat=True)
    assert fsdp1_optimizer.is_raw(ranks.part("optim")) == (not case.endswith("ignored"))
    found = ranks.filled(fsdp1_optimizer.optimizer(ranks.part("optim"), ranks.place, model.counted))
    assert_same(found, clean(reference(folder)["optim"]))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", MESH)
def test_raw_optimizer_beside_a_model_by_name(ran: Callable[[int], Path], case: str, world: int) -> None:
    """What verl saves: which modules are units is in no file."""
    folder = ran(world) / case
    ranks, whole = opened(folder), reference(folder)
    assert not fsdp1_parameters.is_flat(ranks.part("model"))
    found = ranks.filled(fsdp1_optimizer.optimizer(ranks.part("optim"), ranks.place, named_of(ranks)))
    assert_same(found, clean(whole["optim"]))


@pytest.mark.parametrize("case", ["orig_hybrid", "flat_hybrid"])
@pytest.mark.parametrize("replica", [(0, 1), (2, 3)])
def test_each_replica_is_enough(ran: Callable[..., Path], case: str, replica: tuple[int, int]) -> None:
    folder = ran(4, "hybrid") / case
    ranks, whole = opened(folder), reference(folder)
    found = fsdp1_optimizer.optimizer(ranks.part("optim"), ranks.place, named_of(ranks), replica)
    assert_same(ranks.filled(found), clean(whole["optim"]))
    files_used = {chunk.extent.file for state in found["state"].values() for chunk in state["exp_avg"].chunks}
    assert files_used == set(replica)


def named_of(ranks: Opened) -> list[Parameter]:
    named = fsdp1_optimizer.named(ranks.part("model"), ranks.place)
    # Copies were saved of the shared parameter; it is the bytes that tell.
    assert [p.name for p in named if p.again] == ["head.weight"]
    assert [p.name for p in named if not p.certain] == ["rates"]
    return named


@pytest.mark.parametrize("name", ["rank/fsdp1_local_w2", "rank/fsdp1_flat_w2", "rank/fsdp1_local_w3",
                                  "rank/fsdp1_flat_w3", "rank/fsdp1_local_w4", "rank/fsdp1_flat_w4"])  # fmt: skip
def test_samples(name: str) -> None:
    whole = torch.load(CHECKPOINTS / name / "reference.pt", weights_only=False)
    ranks = Opened(sorted((CHECKPOINTS / name / "ckpt").glob("*rank*")))
    model = fsdp1_parameters.model(ranks.part("model"), ranks.place, shapes_of(whole))
    assert_same(ranks.filled(model.tensors), clean({k: v for k, v in whole["model"].items() if k not in model.whole}))
    if "optim" in whole:
        found = ranks.filled(fsdp1_optimizer.optimizer(ranks.part("optim"), ranks.place, model.counted))
        assert_same(found, clean(whole["optim"]))


@pytest.mark.parametrize("name", ["rank/verl_fsdp1_w1", "rank/verl_fsdp1_w2", "rank/verl_fsdp1_orig_w2"])
def test_samples_of_verl(name: str) -> None:
    folder = CHECKPOINTS / name
    whole = torch.load(folder / "reference.pt", weights_only=False)
    model, optim = (Opened(sorted((folder / "ckpt").glob(f"{part}_world*"))) for part in ("model", "optim"))
    counted = fsdp1_optimizer.named(model.trees, model.place)
    assert_same(optim.filled(fsdp1_optimizer.optimizer(optim.trees, optim.place, counted)), clean(whole["optim"]))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", ["orig", "orig_ignored", "orig_mesh", "flat_dtypes", "flat_ignored", "flat_mesh"])
def test_the_files_of_all_ranks_are_one_checkpoint(ran: Callable[[int], Path], case: str, world: int) -> None:
    folder = ran(world) / case
    whole, ranks = reference(folder), opened(folder)
    options = NO_HINTS if case.endswith("mesh") else shapes_of(whole)
    with closing(FORMAT.open(locate(str(folder / "rank*.pt")), options)) as source:
        validate(source.catalogue)
        found = nesting.unflatten(source.catalogue, lambda e: e if isinstance(e, Tensor) else e.value)
        assert [file.name for file in source.catalogue.files] == [path.name for path in ranks.paths]
    assert_same(ranks.filled({"model": dict(found["model"]), "optim": found["optim"]}), clean(whole))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("case", ["flat_copies", "flat_mesh_groups", "orig_mesh_frozen"])
def test_a_raw_optimizer_is_cut_by_the_names_beside_it(ran: Callable[[int], Path], case: str, world: int) -> None:
    """`NO_SHARD`, flat parameters in two groups, and a first rank that has no state."""
    folder = ran(world) / case
    whole, ranks = reference(folder), opened(folder)
    with closing(FORMAT.open(locate(str(folder / "rank*.pt")), NO_HINTS)) as source:
        validate(source.catalogue)
        found = nesting.unflatten(source.catalogue, lambda e: e if isinstance(e, Tensor) else e.value)
    assert_same(ranks.filled(found["optim"]), clean(whole["optim"]))


# DCP directories of LOCAL_STATE_DICT ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", ORIG + FLAT)
def test_a_dcp_directory_is_restored(ran: Callable[[int], Path], tmp_path: Path, case: str, world: int) -> None:
    """Of the pieces under the names of parameters, DCP has one rank's; the flat parameter has all."""
    folder, out = ran(world) / case, tmp_path / "whole.pt"
    ckpttool.convert(folder / "dcp", out, to="torch", shapes=str(folder / "reference.pt"))
    found = torch.load(out, weights_only=True)
    assert_same(found, {"model": clean(reference(folder)["model"]), "step": 2})
    report = ckpttool.verify(folder / "dcp", shapes=str(folder / "reference.pt"))
    assert (report.verdict, report.exit_code, report.unchecked_bytes) == ("whole", 0, 0)
    flat_bytes = 4 * sum(
        tensor.numel() for tensor in clean(reference(folder)["model"]).values() if tensor.dtype.is_floating_point
    )
    assert report.checked_bytes > flat_bytes / 2


@pytest.mark.parametrize("case", ["orig", "flat"])
def test_flat_parameters_are_not_the_model(ran: Callable[[int], Path], tmp_path: Path, case: str) -> None:
    folder = ran(3) / case
    out, dcp = tmp_path / "out", str(folder / "dcp")
    one = tmp_path / "one.pt"
    dcp_to_torch_save(dcp, one)
    calls: list[Callable[[str], object]] = [
        lambda path: ckpttool.convert(path, out, to="dcp"),
        lambda path: ckpttool.convert(path, out, to="safetensors", only="model"),
        lambda path: ckpttool.export(path, out),
        lambda path: ckpttool.reshard(path, out, to_world=2),
        lambda path: ckpttool.stats(path),
        lambda path: ckpttool.load(path, torch.nn.Linear(1, 1)),
        lambda path: ckpttool.diff(path, folder / "reference.pt"),
    ]
    for path in (dcp, str(one)):
        for call in calls:
            with pytest.raises(UsageError, match="flat parameters of FSDP1") as caught:
                call(path)
            assert caught.value.facts["needs"] == "--shapes" and not out.exists()
        assert "flat parameters of FSDP1" in "".join(map(str, ckpttool.inspect(path).warnings))
        report = ckpttool.verify(path)
        assert report.verdict == "unread" and "--shapes" in report.message


@pytest.mark.parametrize("case", ["orig", "flat"])
def test_a_raw_optimizer_in_dcp_is_lost(ran: Callable[[int], Path], tmp_path: Path, case: str) -> None:
    """DCP has the state of one rank under the number of each parameter."""
    folder = ran(3) / case
    shapes, out = str(folder / "reference.pt"), tmp_path / "out.pt"
    with pytest.raises(CorruptError, match="`optim` is the raw state of an optimizer over flat parameters"):
        ckpttool.convert(folder / "dcp_raw", out, to="torch", shapes=shapes)
    ckpttool.convert(folder / "dcp_raw", out, to="torch", shapes=shapes, drop="optim")
    assert_same(torch.load(out, weights_only=True)["model"], clean(reference(folder)["model"]))


def test_shapes_of_another_model_do_not_fit_a_dcp_directory(ran: Callable[[int], Path], tmp_path: Path) -> None:
    shapes = {name: list(shape) for name, shape in (shapes_of(reference(ran(3) / "orig")).shapes or {}).items()}
    for case, name, shape, message in [
        ("orig", "layers.0.up.weight", [11, 8], "elements, and its 3 parameters need"),
        ("flat", "layers.0.up.weight", [11, 8], "has 89 elements, and its 3 parameters need 100"),
        ("orig", "layers.0.up.weight", None, "no shape for 1 parameters of the files: `layers.0.up.weight`"),
    ]:
        other = {key: size for key, size in shapes.items() if key != name or shape}
        (tmp_path / "shapes.json").write_text(json.dumps(other | ({name: shape} if shape else {})))
        with pytest.raises(CorruptError, match=message):
            ckpttool.convert(ran(3) / case / "dcp", tmp_path / "out", to="dcp", shapes=str(tmp_path / "shapes.json"))


# What cannot be, or cannot be known -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rank/fsdp1_local_w2", "rank/fsdp1_flat_w2"])
def test_without_shapes_the_files_are_named(name: str) -> None:
    ranks = sampled(name)
    with pytest.raises(UsageError, match=r"rank0.pt.*rank1.pt.*LOCAL_STATE_DICT.*not the shapes") as caught:
        fsdp1_parameters.model(ranks.part("model"), ranks.place, OpenOptions(), [path.name for path in ranks.paths])
    assert caught.value.hint is not None and "--shapes FROM" in caught.value.hint


def test_the_files_are_not_at_fault_when_shapes_are_not_given(tmp_path: Path) -> None:
    path = CHECKPOINTS / "rank/fsdp1_local_w2" / "ckpt"
    for operation in (
        lambda: ckpttool.diff(path, path),
        lambda: ckpttool.convert(path, tmp_path / "whole.pt"),
        lambda: ckpttool.show(path, "model.embed.weight"),
    ):
        with pytest.raises(UsageError, match="not the shapes") as caught:
            operation()
        assert caught.value.exit_code == 2 and str(path) in caught.value.message
    report = ckpttool.verify(path)
    assert report.whole and report.exit_code == 3  # nothing is damaged, but the tensors were not read


def sampled(name: str) -> Opened:
    return Opened(sorted((CHECKPOINTS / name / "ckpt").glob("rank*.pt")))


def shapes(name: str, **changes: tuple[int, ...] | None) -> OpenOptions:
    """The shapes of a sample's model, some of them changed or left out; `__` stands for a dot."""
    whole = torch.load(CHECKPOINTS / name / "reference.pt", weights_only=False)["model"]
    made = {key: tuple(tensor.shape) for key, tensor in whole.items()}
    for key, shape in changes.items():
        if shape is None:
            del made[key.replace("__", ".")]
        else:
            made[key.replace("__", ".")] = shape
    return OpenOptions(made)


def refused(name: str, options: OpenOptions, error: type[CkptError] = CorruptError) -> CkptError:
    ranks = sampled(name)
    with pytest.raises(error) as caught:
        fsdp1_parameters.model(ranks.part("model"), ranks.place, options)
    assert caught.value.hint
    return caught.value


def test_a_parameter_without_a_shape_is_named() -> None:
    error = refused("rank/fsdp1_local_w2", shapes("rank/fsdp1_local_w2", norm__weight=None))
    assert "no shape for 1 parameters" in error.message and "`norm.weight`" in error.message


def test_one_shape_is_enough_for_a_shared_parameter() -> None:
    ranks = sampled("rank/fsdp1_local_w2")
    options = shapes("rank/fsdp1_local_w2", embed__weight=None)
    tensors = fsdp1_parameters.model(ranks.part("model"), ranks.place, options).tensors
    assert list(tensors["embed.weight"].chunks) == list(tensors["lm_head.weight"].chunks)


def test_even_pieces_of_a_parameter_are_no_buffers() -> None:
    ranks = sampled("rank/fsdp1_local_w2")
    first, second = ranks.part("model")
    for name in ("embed.weight", "lm_head.weight"):
        first[name] = replace(first[name], shape=second[name].shape)
    options = shapes("rank/fsdp1_local_w2", embed__weight=None, lm_head__weight=None)
    with pytest.raises(CorruptError, match=r"no shape for 2 parameters of the files: `embed.weight`, `lm_head.weight`"):
        fsdp1_parameters.model([first, second], ranks.place, options)


def test_flat_parameters_and_pieces_of_different_saves_are_refused() -> None:
    ranks = sampled("rank/fsdp1_local_w2")
    trees = ranks.part("model")
    for tree in trees:
        tree["layers.0._flat_param"] = tree["_flat_param"]
    with pytest.raises(CorruptError, match=r"`layers.0`: the pieces .* 399 elements, the flat parameter 212"):
        fsdp1_parameters.model(trees, ranks.place, shapes("rank/fsdp1_local_w2"))


def test_a_shape_of_another_size_is_refused() -> None:
    error = refused("rank/fsdp1_local_w2", shapes("rank/fsdp1_local_w2", layers__0__qkv__weight=(20, 7)))
    assert "`layers.0.qkv.weight`" in error.message and "147" in error.message and "140" in error.message


@pytest.mark.parametrize("wrong", [(20, 7), (22, 7)])
def test_a_unit_of_another_size_is_refused(wrong: tuple[int, ...]) -> None:
    error = refused("rank/fsdp1_flat_w2", shapes("rank/fsdp1_flat_w2", layers__1__qkv__weight=wrong))
    assert "`layers.1`" in error.message and error.facts["expected"] - error.facts["found"] == (wrong[0] - 21) * 7


def test_names_of_another_model_are_refused() -> None:
    options = shapes("rank/fsdp1_flat_w2")
    assert options.shapes is not None
    prefixed = OpenOptions({f"model.{name}": shape for name, shape in options.shapes.items()})
    error = refused("rank/fsdp1_flat_w2", prefixed)
    assert "of the root" in error.message and "`model.embed.weight`" in error.message
    error = refused("rank/fsdp1_flat_w2", OpenOptions({"embed.weight": (29, 7), "norm.weight": (7,)}))
    assert error.message == "the shapes name no parameter of `layers.0`, whose flat parameter has 399 elements"


def test_a_flat_parameter_needs_the_order_of_the_model() -> None:
    options = shapes("rank/fsdp1_flat_w2")
    assert options.shapes is not None
    error = refused("rank/fsdp1_flat_w2", OpenOptions(dict(sorted(options.shapes.items())), ordered=False), UsageError)
    assert "not in that of the model" in error.message and "JSON" in str(error.hint)
    ranks = sampled("rank/fsdp1_local_w2")
    by_name = fsdp1_parameters.model(ranks.part("model"), ranks.place, OpenOptions(options.shapes, ordered=False))
    assert len(by_name.tensors) == 17


@pytest.mark.parametrize("name", ["rank/fsdp1_flat_w2", "hf/gpt2", "hf/llama", "dcp/hsdp_w4"])
def test_the_order_of_a_model_is_told(name: str) -> None:
    state = torch.load(CHECKPOINTS / name / "reference.pt", weights_only=False)
    names = list(state.get("model", state))
    assert model_names.is_model_order(names)
    assert not model_names.is_model_order(sorted(names))
    # DCP lists what all ranks have by the rank that saved it.
    assert not model_names.is_model_order([*names[::2], *names[1::2]])


def test_a_missing_rank_is_a_hole() -> None:
    for name in ("rank/fsdp1_local_w2", "rank/fsdp1_flat_w2"):
        ranks = sampled(name)
        with pytest.raises(CorruptError, match="are in no chunk") as caught:
            fsdp1_parameters.model(ranks.part("model")[:1], ranks.place, shapes(name))
        assert "rank's file is missing" in str(caught.value.hint)


def test_ranks_that_disagree_are_named() -> None:
    ranks = sampled("rank/fsdp1_local_w2")
    first, second = ranks.part("model")
    del second["norm.weight"]
    with pytest.raises(CorruptError, match=r"rank 0 and rank 1 do not have the same entries: `norm.weight`"):
        fsdp1_parameters.model([first, second], ranks.place, shapes("rank/fsdp1_local_w2"))
    optim = ranks.part("optim")
    optim[1]["param_groups"][0]["lr"] = 7.0
    counted = rebuilt_sample("rank/fsdp1_local_w2").counted
    with pytest.raises(CorruptError, match="`param_groups` are others on rank 1 than on rank 0: `lr`"):
        fsdp1_optimizer.optimizer(optim, ranks.place, counted)


def rebuilt_sample(name: str) -> fsdp1_parameters.ModelParameters:
    ranks = sampled(name)
    return fsdp1_parameters.model(ranks.part("model"), ranks.place, shapes(name))


def test_an_optimizer_of_another_model_is_refused() -> None:
    ranks = sampled("rank/fsdp1_local_w2")
    optim = ranks.part("optim")
    counted = [c for c in rebuilt_sample("rank/fsdp1_local_w2").counted if c.name != "layers.0.up.bias"]
    with pytest.raises(CorruptError, match=r"16 parameters or units, does not follow.* 15 of the model"):
        fsdp1_optimizer.optimizer(optim, ranks.place, counted)


def test_state_that_is_not_elementwise_is_refused() -> None:
    ranks = sampled("rank/fsdp1_local_w2")
    optim = ranks.part("optim")
    optim[0]["state"][4]["row_var"] = optim[0]["state"][2]["exp_avg"]
    with pytest.raises(CorruptError, match=r"state 4 of rank 0 is not of one size.*`exp_avg` \[46\].*`row_var` \[7\]"):
        fsdp1_optimizer.optimizer(optim, ranks.place, rebuilt_sample("rank/fsdp1_local_w2").counted)


def test_state_that_one_rank_lacks_is_refused() -> None:
    ranks = sampled("rank/fsdp1_local_w2")
    optim = ranks.part("optim")
    del optim[1]["state"][0]["exp_avg"]
    with pytest.raises(CorruptError, match="`exp_avg` of 0 is there on rank 0, but not on rank 1"):
        fsdp1_optimizer.optimizer(optim, ranks.place, rebuilt_sample("rank/fsdp1_local_w2").counted)


def test_state_of_a_unit_that_one_rank_lacks_is_refused(ran: Callable[[int], Path]) -> None:
    ranks, model = rebuilt(ran(3) / "flat_names")
    optim = ranks.part("optim")
    del optim[1]["state"][1]
    with pytest.raises(CorruptError, match=r"`exp_avg` of 1 has 150 elements on all ranks, but .* need 224"):
        fsdp1_optimizer.optimizer(optim, ranks.place, model.counted)


@pytest.mark.parametrize("world", WORLDS)
def test_which_of_two_like_units_was_frozen_is_not_guessed(ran: Callable[[int], Path], world: int) -> None:
    ranks, model = rebuilt(ran(world) / "flat_frozen")
    with pytest.raises(UsageError, match=r"fit in more ways than one: .*`layers.1") as caught:
        fsdp1_optimizer.optimizer(ranks.part("optim"), ranks.place, model.counted)
    assert "FSDP.optim_state_dict" in str(caught.value.hint)


# Shared parameters of flat units, by sizes alone ----------------------------------------------------------------------


def shared(numel: int, given: dict[str, tuple[int, ...]]) -> dict[str, str]:
    unit = fsdp1_parameters._Flat("", DTYPES["float32"], numel, ())
    return {name: first for name, first in fsdp1_parameters._ties(unit, given).items() if name != first}


def test_shared_parameters_are_told_by_what_is_missing() -> None:
    assert shared(210, {"embed": (29, 7), "norm": (7,), "head": (29, 7)}) == {"head": "embed"}
    assert shared(413, {"embed": (29, 7), "norm": (7,), "head": (29, 7)}) == {}
    # Two layers that are one: everything that comes again is missing.
    layers = {"0.w": (3, 5), "0.b": (5,), "1.w": (3, 5), "1.b": (5,)}
    assert shared(20, layers) == {"1.w": "0.w", "1.b": "0.b"}


@pytest.mark.parametrize(
    ("numel", "given"),
    [
        (20, {"q": (2, 5), "k": (2, 5), "v": (2, 5)}),  # k or v, of q
        (209, {"embed": (29, 7), "norm": (7,), "head": (29, 7)}),
        (203, {"embed": (29, 7), "head": (7, 29)}),  # the same size, another shape
        (30, {"a": (10,), "b": (10,), "c": (5, 2), "d": (5, 2)}),  # b or d
    ],
)
def test_shared_parameters_are_not_guessed(numel: int, given: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(CorruptError) as caught:
        shared(numel, given)
    assert "leave all but one of the names" in str(caught.value.hint)


# Units by sizes alone -------------------------------------------------------------------------------------------------


def llm(layers: int) -> list[Parameter]:
    """Names and shapes as transformers has them."""
    found = [("model.embed_tokens.weight", (97, 8))]
    for i in range(layers):
        base = f"model.layers.{i}"
        found += [(f"{base}.self_attn.{x}_proj.weight", (8, 8)) for x in "qkvo"]
        found += [(f"{base}.mlp.{x}_proj.weight", (24, 8)) for x in ("gate", "up")]
        found += [(f"{base}.mlp.down_proj.weight", (8, 24)), (f"{base}.input_layernorm.weight", (8,))]
        found += [(f"{base}.post_attention_layernorm.weight", (8,))]
    return [Parameter(*one) for one in [*found, ("model.norm.weight", (8,)), ("lm_head.weight", (97, 8))]]


def steps(parameters: list[Parameter], units: list[str], world: int) -> list[int]:
    """What FSDP1 would have on each rank for these units, the first of which is the root."""
    owned = dict.fromkeys(units, 0)
    for parameter in parameters:
        owner = max((u for u in units if not u or parameter.name.startswith(f"{u}.")), key=len)
        owned[owner] += prod(parameter.shape)
    return [-(-numel // world) for numel in owned.values() if numel]


@pytest.mark.parametrize("world", [2, 8])
def test_the_layers_of_a_large_model_are_found(world: int) -> None:
    parameters = llm(80)
    layers = [f"model.layers.{i}" for i in range(80)]
    with no_hang():
        found = fsdp1_units.derive(parameters, [steps(parameters, ["", *layers], world)], world)
    assert [[unit.name for unit in units] for units in found] == [["", *layers]]
    assert {p.name for p in found[0][0].parameters} == {p.name for p in parameters if "layers" not in p.name}


def test_embeddings_and_layers_within_layers_are_found() -> None:
    parameters = llm(3)
    units = ["", "model.embed_tokens"]
    for i in range(3):
        units += [f"model.layers.{i}", f"model.layers.{i}.mlp"]
    found = fsdp1_units.derive(parameters, [steps(parameters, [*units, "lm_head"], 4)], 4)
    assert [[unit.name for unit in answer] for answer in found] == [[*units, "lm_head"]]


def test_units_that_fit_in_two_ways_are_both_said() -> None:
    parameters = [Parameter("a.w", (4, 2)), Parameter("b.w", (2, 4)), Parameter("c.w", (8, 1))]
    found = fsdp1_units.derive(parameters, [[8, 4]], 2)
    assert len(found) == 2
    assert fsdp1_units.derive(parameters, [[8, 5]], 2) == []
    assert fsdp1_units.derive(parameters, [[12]], 2) != []
    assert fsdp1_units.derive(parameters, [[12, 4]], 2) == []
