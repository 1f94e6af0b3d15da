"""safetensors, read and written: against what safetensors, huggingface_hub, transformers and torch write and read."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub.serialization._base import split_state_dict_into_shards_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from same import assert_same, raw_bytes
from support.paths import CHECKPOINTS
from support.upstream_samples import reference
from torch import nn

import ckpttool
from ckpttool.catalogue import parts
from ckpttool.catalogue import validation as faults
from ckpttool.catalogue.aliases import find_aliases
from ckpttool.catalogue.dtypes import DTYPES
from ckpttool.catalogue.entries import Catalogue, Part, Tensor
from ckpttool.catalogue.protocols import Sink, SinkOptions
from ckpttool.errors import CorruptError, LossError, ReadError
from ckpttool.formats import torchsave
from ckpttool.formats.safetensors import FORMAT, model_files, sharding
from ckpttool.formats.safetensors.sharding import split
from ckpttool.layout import rechunk as chunking
from ckpttool.layout import select as layout
from ckpttool.serialization import safetensors_library
from ckpttool.storage.stores import locate

State = dict[str, torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore")


def sample(name: str) -> Path:
    return next((CHECKPOINTS / name).glob("ckpt*"))


def read(path: Path) -> Catalogue:
    assert FORMAT.recognise(locate(str(path)))
    source = FORMAT.open(locate(str(path)))
    source.close()
    faults.validate(source.catalogue)
    return source.catalogue


# Payloads, moved without any of our own code --------------------------------------------------------------------------


def values(catalogue: Catalogue, tensor: Tensor) -> bytes:
    """The row-major elements of a tensor, its chunks put together by numpy."""
    unit = np.dtype(f"V{tensor.dtype.itemsize}")
    whole = np.empty(tensor.shape, unit)
    for offsets, sizes, extent in tensor.chunks:
        assert extent.plain
        with open(catalogue.files[extent.file].location, "rb") as stream:
            stream.seek(extent.offset)
            data = stream.read(extent.nbytes)
        place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        whole[place] = np.frombuffer(data, unit).reshape(sizes)
    return whole.tobytes()


def check(catalogue: Catalogue, state: State, *, also: tuple[str, ...] = ()) -> None:
    """Every tensor of `state`, under its name as one key, and nothing else but the names in `also`."""
    assert {t.path for t in catalogue.tensors} == {(name,) for name in (*state, *also)}
    for name, expected in state.items():
        tensor = catalogue.tensor((name,))
        assert (f"torch.{tensor.dtype}", tensor.shape) == (str(expected.dtype), tuple(expected.shape))
        assert values(catalogue, tensor) == raw_bytes(expected), name


def lay(state: Any, folder: Path) -> Catalogue:
    """What `convert` would hand to `create` for a torch.save file of this state."""
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "state.pt")
    source = torchsave.FORMAT.open(locate(str(folder / "state.pt")))
    parts.assign(source.catalogue)
    source.close()
    return chunking.whole(layout.start(source.catalogue))


def fill(sink: Sink, folder: Path) -> None:
    """Copy each payload from the torch.save file, whose tensors have to be contiguous."""
    crcs = {}
    with open(folder / "state.pt", "rb") as source:
        for tensor in sink.catalogue.tensors:
            if tensor.alias is not None or not tensor.numel:
                continue
            ((_, _, to),) = tensor.chunks
            assert tensor.origin is not None
            ((_, _, place),) = tensor.origin.chunks
            assert place.plain
            source.seek(place.offset)
            with open(sink.catalogue.files[to.file].location, "r+b") as stream:
                stream.seek(to.offset)
                stream.write(data := source.read(place.nbytes))
                crcs[to.file, to.offset] = zlib.crc32(data)
                assert stream.tell() == to.offset + to.nbytes
    sink.finish(crcs)


def write(state: Any, path: Path, folder: Path, **options: Any) -> Catalogue:
    laid = lay(state, folder)
    assert FORMAT.create is not None
    assert FORMAT.losses is not None
    assert FORMAT.losses(laid, str(path)) == []
    sink = FORMAT.create(locate(str(path)), laid, SinkOptions(**options))
    faults.validate(sink.catalogue)
    fill(sink, folder)
    return sink.catalogue


def without_checksums(metadata: dict[str, str]) -> dict[str, str]:
    """What a header says without the key that ckpttool adds."""
    assert metadata.pop("ckpttool.crc32").startswith("1:")
    return metadata


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    n = int(np.prod(shape)) * size
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (n,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def some_state() -> State:
    return {
        "b.weight": random((4, 3), seed=1),
        "a.weight": random((5, 3), torch.bfloat16, seed=2),
        "a.bias": random((5,), torch.bfloat16, seed=3),
        "steps": torch.tensor(7),
        "mask": random((2, 2), torch.bool, seed=4),
        "empty": torch.empty(3, 0),
    }


class Tied(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(3))


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["safetensors/single", "hf/sharded_w2", "hf/consolidated_w2", "hf/llama", "hf/gpt2"])
def test_samples(name: str) -> None:
    check(read(sample(name)), reference(name))


def test_sample_with_an_index() -> None:
    catalogue = read(sample("safetensors/indexed"))
    check(catalogue, reference("safetensors/indexed"), also=("lm_head.weight",))
    assert list(find_aliases(catalogue.tensors)) == [("lm_head.weight",)]
    assert len(catalogue.files) == 4
    assert catalogue.facts["layout"] == "indexed"
    index = json.loads((sample("safetensors/indexed") / "model.safetensors.index.json").read_text())
    assert [t.name for t in catalogue.tensors] == [*index["weight_map"], "lm_head.weight"]


def test_one_file(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    safetensors.torch.save_file(some_state(), path, {"format": "pt", "step": "3"})
    catalogue = read(path)
    check(catalogue, some_state())
    assert catalogue.facts["metadata"] == {"format": "pt", "step": "3"}
    assert {t.part for t in catalogue.tensors} == {Part("model")}
    assert [(f.name, f.size, f.rank) for f in catalogue.files] == [("anything", path.stat().st_size, None)]


def test_link_that_a_person_names(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "here").mkdir()
    safetensors.torch.save_file(some_state(), tmp_path / "blobs" / "1234")
    (tmp_path / "here" / "model.safetensors").symlink_to(tmp_path / "blobs" / "1234")
    check(read(tmp_path / "here" / "model.safetensors"), some_state())


def test_save_model_ties(tmp_path: Path) -> None:
    model = Tied()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"), {"note": "x"})
    catalogue = read(tmp_path)
    check(catalogue, dict(model.state_dict()))
    assert len(find_aliases(catalogue.tensors)) == 1
    assert catalogue.facts["metadata"] == {"note": "x"}


@pytest.mark.parametrize("most", [10**9, 90])
def test_huggingface_hub(tmp_path: Path, most: int) -> None:
    model = Tied()
    huggingface_hub.save_torch_state_dict(model.state_dict(), tmp_path, max_shard_size=most, metadata={"step": "3"})
    catalogue = read(tmp_path)
    check(catalogue, dict(model.state_dict()))
    assert len(find_aliases(catalogue.tensors)) == 1
    assert catalogue.facts["metadata"] == {"format": "pt", "step": "3"}
    assert (len(catalogue.files) > 1) == (most == 90)


@pytest.mark.parametrize("name", ["hf/llama", "hf/gpt2"])
def test_transformers_in_several_files(tmp_path: Path, name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(sample(name))
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    catalogue = read(tmp_path)
    check(catalogue, reference(name))
    assert len(catalogue.files) > 1
    # A file of the index, named by itself, is itself.
    name = catalogue.files[1].name
    check(read(tmp_path / name), safetensors.torch.load_file(tmp_path / name))
    check(read(tmp_path / "model.safetensors.index.json"), reference(model.config.model_type.join(("hf/", ""))))


@pytest.mark.parametrize("text", ["[1", "[]", '{"model_type": NaN}', '"x"'])
def test_bad_config_is_no_obstacle(tmp_path: Path, text: str) -> None:
    safetensors.torch.save_file(some_state(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    check(read(tmp_path), some_state())
    assert "model_type" not in ckpttool.inspect(tmp_path).facts


def test_torch_writer_of_whole_tensors(tmp_path: Path) -> None:
    state = {k: v for k, v in some_state().items() if v.numel()}
    index = {k: 1 + i % 2 for i, k in enumerate(state)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path), index), no_dist=True)
    catalogue = read(tmp_path)
    check(catalogue, state)
    assert catalogue.facts["layout"] == "indexed"


def test_pieces_of_ranks() -> None:
    catalogue = read(sample("hf/sharded_w2"))
    assert catalogue.world_size == 2
    assert sorted({f.rank for f in catalogue.files}, key=str) == [0, 1]
    assert any(len(t.chunks) == 2 and t.chunks[1].offsets[0] for t in catalogue.tensors)
    assert any("that the last one is missing" in str(w) for w in catalogue.warnings)
    assert "DCP_VERSION" not in catalogue.facts["metadata"]


@pytest.mark.parametrize("number", range(4))
def test_pieces_of_ranks_without_one_file(tmp_path: Path, number: int) -> None:
    source = tmp_path / "source"
    shutil.copytree(sample("hf/sharded_w2"), source)
    missing = sorted(source.iterdir())[number]
    missing.unlink()
    with pytest.raises(CorruptError) as caught:
        ckpttool.convert(str(source), str(tmp_path / "out"), to="dcp")
    if missing.name.startswith("shard-00002"):
        assert missing.name in str(caught.value)
        # One without tensors says that there were none.
        safetensors.torch.save_file({}, missing)
        assert read(source).world_size == 2


def test_pieces_beside_the_files_that_they_were_joined_to(tmp_path: Path) -> None:
    shutil.copytree(sample("hf/consolidated_w2"), tmp_path, dirs_exist_ok=True)
    (told,) = read(tmp_path).warnings
    assert (told.kind, told.text) == (
        "superseded-file",
        "`sharded/` is not read: it has the pieces of the same 16 tensors",
    )
    piece = sorted((tmp_path / "sharded").iterdir())[0]
    with safetensors.safe_open(piece, "pt") as opened:
        metadata = opened.metadata()
    state = {name: tensor.half() for name, tensor in safetensors.torch.load_file(piece).items()}
    safetensors.torch.save_file(state, piece, metadata)
    with pytest.raises(CorruptError, match=r"sharded` has pieces of `|is float16|is float32"):
        read(tmp_path)


def test_pieces_of_two_stages(tmp_path: Path) -> None:
    """Ranks of a pipeline have no files of each other's stages; two of the second share one tensor."""
    for rank, (number, name) in enumerate([(1, "a"), (2, "b"), (2, "b")]):
        info = {name: {"saved_offsets": [2 * (rank // 2)]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        path = tmp_path / f"shard-{rank + 1:05d}-model-{number:05d}-of-00002.safetensors"
        safetensors.torch.save_file({name: torch.arange(2.0) + rank}, path, metadata)
    check(read(tmp_path), {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([1.0, 2.0, 2.0, 3.0])})


def test_consolidated_files_before_pieces(tmp_path: Path) -> None:
    whole = sample("hf/consolidated_w2")
    assert all(len(t.chunks) == 1 for t in read(whole).tensors)
    shutil.copytree(whole / "sharded", tmp_path / "sharded")
    catalogue = read(tmp_path)
    check(catalogue, reference("hf/consolidated_w2"))
    assert any(len(t.chunks) == 2 for t in catalogue.tensors)


def test_whole_tensors_beside_pieces(tmp_path: Path) -> None:
    pieces(tmp_path)
    safetensors.torch.save_file(some_state(), tmp_path / "model.safetensors")
    with pytest.raises(ReadError, match=r"has pieces of tensors, .*, beside whole ones, `model\.safetensors`"):
        read(tmp_path)


def test_state_whose_state_file_is_gone(tmp_path: Path) -> None:
    """The model is still the model."""
    write(training_state(), tmp_path / "out", tmp_path / "from")
    (tmp_path / "out" / "ckpttool.json").unlink()
    catalogue = read(tmp_path / "out")
    check(catalogue, {k: v for k, v in read_back(tmp_path / "from").items() if isinstance(v, torch.Tensor)})
    others = {path.name for path in (tmp_path / "out").glob("*.safetensors")} - {"model.safetensors"}
    assert {*catalogue.facts["unused"]} == others and "model-ema.safetensors" in others


def read_back(folder: Path) -> Any:
    return torch.load(folder / "state.pt", weights_only=False)["model"]


def test_zeros_of_the_consolidation(tmp_path: Path) -> None:
    state = {"w": torch.randn(4), "scale": torch.tensor(7.5)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert any("0-d tensors as zeros" in str(w) for w in read(tmp_path).warnings)
    check(read(tmp_path / "sharded"), state)


def pieces(folder: Path, count: int = 2) -> torch.Tensor:
    """Files as ranks write them, by the writer itself: one rank's plan at a time."""
    whole = torch.arange(4.0 * count).reshape(2 * count, 2)
    for rank in range(count):
        info = {"w": {"saved_offsets": [2 * rank, 0]}}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file({"w": whole[2 * rank : 2 * rank + 2].clone()}, folder / name, metadata)
    return whole


def test_one_rank_by_itself(tmp_path: Path) -> None:
    whole = pieces(tmp_path)
    check(read(tmp_path), {"w": whole})
    first = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    with pytest.raises(ReadError, match="one rank's pieces") as caught:
        read(first)
    assert str(tmp_path) in str(caught.value.hint)
    # The second alone has a hole where the first was.
    first.unlink()
    with pytest.raises(CorruptError, match=r"`w` .*not covered exactly: 4 of 8 elements"):
        read(tmp_path)


def test_rank_that_had_nothing_to_write(tmp_path: Path) -> None:
    whole = pieces(tmp_path)
    os.rename(
        tmp_path / "shard-00002-model-00001-of-00001.safetensors",
        tmp_path / "shard-00003-model-00001-of-00001.safetensors",
    )
    catalogue = read(tmp_path)
    check(catalogue, {"w": whole})
    assert catalogue.world_size == 3
    assert any("2 ranks, but the last of them is rank 2" in str(w) for w in catalogue.warnings)


def test_number_that_no_rank_has(tmp_path: Path) -> None:
    pieces(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace("of-00001", "of-00002")))
    with pytest.raises(CorruptError, match="no file is number 2 of 2"):
        read(tmp_path)


@pytest.mark.parametrize("other", [torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2)])
def test_pieces_of_two_tensors(tmp_path: Path, other: torch.Tensor) -> None:
    pieces(tmp_path)
    info = json.dumps({"w": {"saved_offsets": [0] * other.ndim}})
    name = "shard-00003-model-00001-of-00001.safetensors"
    safetensors.torch.save_file({"w": other}, tmp_path / name, {"DCP_SHARDING_INFO": info})
    with pytest.raises(CorruptError, match=r"`w` is float32 \[2, 2\] in `shard-00001.*, but .* in `shard-00003"):
        read(tmp_path)


# Directories that contradict themselves -------------------------------------------------------------------------------


def indexed(folder: Path) -> dict[str, Any]:
    """Three files and their index, which is given back to be changed."""
    state = {name: random((3,), seed=i) for i, name in enumerate("abcdef")}
    huggingface_hub.save_torch_state_dict(state, folder, max_shard_size=24)
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    return index


def put_index(folder: Path, index: Any, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(index if isinstance(index, str) else json.dumps(index))


def test_index_names_the_wrong_file(tmp_path: Path) -> None:
    index = indexed(tmp_path)
    index["weight_map"]["a"] = index["weight_map"]["f"]
    put_index(tmp_path, index)
    with pytest.raises(CorruptError, match=r"`a` is in `model-00003.*, but it is in `model-00001"):
        read(tmp_path)


def test_two_ranks_that_wrote_the_same_file(tmp_path: Path) -> None:
    """What `HuggingFaceStorageWriter` leaves when all ranks call it without `save_distributed`."""
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    files = dict.fromkeys("ab", "model-00001-of-00001.safetensors")
    put_index(tmp_path, {"metadata": {"total_size": 16}, "weight_map": files})
    with pytest.raises(CorruptError, match="tensor `b` is in") as caught:
        read(tmp_path)
    assert "two ranks wrote the same file" in str(caught.value.hint)


def test_tensor_that_the_index_forgot(tmp_path: Path) -> None:
    index = indexed(tmp_path)
    del index["weight_map"]["b"]
    put_index(tmp_path, index)
    catalogue = read(tmp_path)
    assert ("b",) in catalogue.entries
    assert any("tensors in the files that `" in str(w) and "`b`" in str(w) for w in catalogue.warnings)


def test_name_in_two_files_of_the_index(tmp_path: Path) -> None:
    indexed(tmp_path)
    path = tmp_path / "model-00003-of-00003.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(path) | {"a": torch.zeros(3)}, path)
    with pytest.raises(CorruptError, match=r"tensor `a` is in `model-00001.* and in `model-00003"):
        read(tmp_path)


def test_files_beside_the_index(tmp_path: Path) -> None:
    indexed(tmp_path)
    safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    catalogue = read(tmp_path)
    assert len(list(catalogue.tensors)) == 6
    assert catalogue.facts["unused"] == ["consolidated.safetensors"]


def test_files_of_torch_beside_the_weights_are_told(tmp_path: Path) -> None:
    """A script may have saved its optimizer there, which a conversion of the directory leaves out."""
    safetensors.torch.save_file(some_state(), tmp_path / "model.safetensors")
    (tmp_path / "README.md").touch()
    assert read(tmp_path).warnings == []
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    (told,) = read(tmp_path).warnings
    assert (told.kind, told.text) == ("unlisted-file", "ignored, not safetensors: `optimizer.pt`")


def test_single_file_before_the_index(tmp_path: Path) -> None:
    """As transformers does."""
    indexed(tmp_path)
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    catalogue = read(tmp_path)
    check(catalogue, {"w": torch.ones(3)})
    assert any("`model.safetensors.index.json` is left aside" in str(w) for w in catalogue.warnings)
    assert len(catalogue.facts["unused"]) == 3


def test_two_indexes(tmp_path: Path) -> None:
    index = indexed(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    put_index(tmp_path, index, "one.safetensors.index.json")
    assert len(list(read(tmp_path).tensors)) == 6
    put_index(tmp_path, index, "two.safetensors.index.json")
    with pytest.raises(ReadError, match=r"has 2 indexes, `one.*`two"):
        read(tmp_path)
    assert len(list(read(tmp_path / "two.safetensors.index.json").tensors)) == 6


def test_several_files_without_an_index(tmp_path: Path) -> None:
    indexed(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    catalogue = read(tmp_path)
    assert sorted(t.name for t in catalogue.tensors) == list("abcdef")
    assert any("there is no index: 3 files" in str(w) for w in catalogue.warnings)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"model-00002-of-00003.safetensors` is not there"):
        read(tmp_path)


def test_two_checkpoints_in_one_directory(tmp_path: Path) -> None:
    for name in ("one", "two"):
        safetensors.torch.save_file({"w": torch.zeros(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CorruptError, match=r"tensor `w` is in `one.safetensors` and in `two.safetensors`"):
        read(tmp_path)


def test_remark_that_is_no_tie(tmp_path: Path) -> None:
    metadata = {"format": "pt", "a": "b", "note": "zzz", "total_size": "b"}
    safetensors.torch.save_file({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "x.safetensors", metadata)
    catalogue = read(tmp_path)
    check(catalogue, {"a": torch.zeros(1), "b": torch.ones(1)})
    assert catalogue.facts["metadata"] == metadata


# Recognising ----------------------------------------------------------------------------------------------------------


def test_recognise(tmp_path: Path) -> None:
    def put(name: str, data: bytes) -> str:
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    whole = safetensors.torch.save({"w": torch.zeros(3)})
    assert FORMAT.recognise(locate(put("noname", whole)))
    assert FORMAT.recognise(locate(put("cut", whole[:20])))
    assert FORMAT.recognise(locate(put("empty.safetensors", b"")))
    assert FORMAT.recognise(locate(put("long.safetensors", b"\xff" * 8 + b"{")))
    assert not FORMAT.recognise(locate(put("empty.bin", b"")))
    assert not FORMAT.recognise(locate(put("zip.safetensors", b"PK\3\4" + b"x" * 20)))
    assert not FORMAT.recognise(locate(put("text.json", b'{"a": 1, "b": 2}')))
    assert not FORMAT.recognise(locate(str(tmp_path / "nowhere")))
    assert not FORMAT.recognise(locate("/dev/null"))
    (tmp_path / "folder" / "sharded").mkdir(parents=True)
    assert not FORMAT.recognise(locate(str(tmp_path / "folder")))
    (tmp_path / "folder" / "ckpttool.json").write_text('{"schema": "ckpttool/inspect/2"}')
    assert not FORMAT.recognise(locate(str(tmp_path / "folder")))
    (tmp_path / "folder" / "ckpttool.json").write_text('{"schema": "ckpttool/state/1"}')
    assert FORMAT.recognise(locate(str(tmp_path / "folder")))


# Writing a model ------------------------------------------------------------------------------------------------------


def every_dtype() -> State:
    names = [d.name for d in DTYPES.values() if d.safetensors and hasattr(torch, d.name)]
    return {f"dtype.{n}": random((3, 4), getattr(torch, n), seed=i) for i, n in enumerate(names)} | some_state()


def test_one_file_as_safetensors_writes_it(tmp_path: Path) -> None:
    state = every_dtype()
    safetensors.torch.save_file(state, tmp_path / "theirs", {"format": "pt"})
    made = write(state, tmp_path / "ours.safetensors", tmp_path / "from", bare=True)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert_same(safetensors.torch.load_file(tmp_path / "ours.safetensors"), state)
    assert made.facts["layout"] == "one file"
    check(read(tmp_path / "ours.safetensors"), state)


def test_staging_name_of_one_file(tmp_path: Path) -> None:
    write(some_state(), tmp_path / ".x.safetensors.partial-1", tmp_path / "from", one_file=True)
    assert_same(safetensors.torch.load_file(tmp_path / ".x.safetensors.partial-1"), some_state())


def test_one_file_is_never_split(tmp_path: Path) -> None:
    write(some_state(), tmp_path / "x.safetensors", tmp_path / "from", max_shard_size=10)
    assert_same(safetensors.torch.load_file(tmp_path / "x.safetensors"), some_state())


@pytest.mark.parametrize("most", [None, 10**6, 60, 31, 1])
def test_directory_as_huggingface_hub_writes_it(tmp_path: Path, most: int | None) -> None:
    state = every_dtype()
    (tmp_path / "theirs").mkdir()
    size: dict[str, Any] = {} if most is None else {"max_shard_size": most}
    huggingface_hub.save_torch_state_dict(dict(state), tmp_path / "theirs", **size)
    write(state, tmp_path / "ours", tmp_path / "from", bare=True, **size)
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    check(read(tmp_path / "ours"), state)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 25))
def test_split_as_huggingface_hub(sizes: list[int], most: int) -> None:
    table = {str(i): n for i, n in enumerate(sizes)}
    theirs = split_state_dict_into_shards_factory(
        table, get_storage_size=lambda n: n, filename_pattern="model{suffix}.safetensors", max_shard_size=most
    )
    groups = split(table.items(), most)
    assert dict(zip(sharding.file_names("model", len(groups)), groups, strict=True)) == theirs.filename_to_tensors


def test_default_size_is_that_of_huggingface_hub() -> None:
    from huggingface_hub.serialization._base import MAX_SHARD_SIZE, parse_size_to_int

    assert parse_size_to_int(MAX_SHARD_SIZE) == sharding.MAX_SHARD_SIZE


@pytest.mark.parametrize("most", [10**9, 90])
@pytest.mark.parametrize("target", ["x.safetensors", "x"])
def test_ties(tmp_path: Path, target: str, most: int) -> None:
    """Written once under the first name; `load_model`, and we, find the other."""
    model = Tied()
    made = write(model.state_dict(), tmp_path / target, tmp_path / "from", max_shard_size=most)
    assert made.tensor(("head.weight",)).alias == ("embed.weight",)
    paths = [tmp_path / target] if target.endswith("safetensors") else sorted((tmp_path / target).glob("*.safetensors"))
    stored = {name for path in paths for name in safetensors.torch.load_file(path)}
    assert stored == {"embed.weight", "scale"}
    again = read(tmp_path / target)
    check(again, dict(model.state_dict()))
    assert find_aliases(again.tensors) == {("head.weight",): ("embed.weight",)}
    if len(paths) == 1:
        other = Tied()
        safetensors.torch.load_model(other, str(paths[0]))
        assert torch.equal(other.head.weight, model.head.weight)


def test_tie_whose_name_metadata_has_already(tmp_path: Path) -> None:
    w = torch.randn(3)
    write({"w": w, "format": w}, tmp_path / "x.safetensors", tmp_path / "from")
    assert_same(safetensors.torch.load_file(tmp_path / "x.safetensors"), {"w": w, "format": w})
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert without_checksums(file.metadata()) == {"format": "pt"}


@pytest.mark.parametrize("name", ["hf/llama", "hf/gpt2"])
@pytest.mark.parametrize("most", [None, 2000])
def test_from_pretrained(tmp_path: Path, name: str, most: int | None) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(sample(name))
    write(model.state_dict(), tmp_path / "out", tmp_path / "from", max_shard_size=most)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > (1 if most else 0)
    shutil.copy(sample(name) / "config.json", tmp_path / "out")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("most", [None, 40])
def test_torch_reads_the_directory(tmp_path: Path, most: int | None) -> None:
    state = {k: v for k, v in some_state().items() if v.numel()}
    write(state, tmp_path / "out", tmp_path / "from", max_shard_size=most)
    found = {k: torch.empty_like(v) for k, v in state.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "out")), no_dist=True)
    assert_same(found, state)


def test_pieces_become_whole(tmp_path: Path) -> None:
    ckpttool.convert(str(sample("hf/sharded_w2")), str(tmp_path / "x.safetensors"))
    assert_same(safetensors.torch.load_file(tmp_path / "x.safetensors"), reference("hf/sharded_w2"))


def test_names_below_the_root_of_the_model(tmp_path: Path) -> None:
    state = {"model": {"block": {0: {"w": torch.ones(2)}}, "a.b": torch.zeros(3)}}
    made = write(state, tmp_path / "x.safetensors", tmp_path / "from")
    assert_same(
        safetensors.torch.load_file(tmp_path / "x.safetensors"), {"a.b": torch.zeros(3), "block.0.w": torch.ones(2)}
    )
    # What was created is called what the reader will call it.
    assert list(made.entries) == [("block.0.w",), ("a.b",)]
    assert set(read(tmp_path / "x.safetensors").entries) == set(made.entries)


def test_metadata_of_the_source_is_kept(tmp_path: Path) -> None:
    safetensors.torch.save_file(some_state(), tmp_path / "a.safetensors", {"format": "np", "step": "3"})
    for target in ("b.safetensors", "c.safetensors"):
        ckpttool.convert(str(tmp_path / "a.safetensors"), str(tmp_path / target))
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert without_checksums(file.metadata()) == {"format": "pt", "step": "3"}
    ckpttool.convert(str(tmp_path / "a.safetensors"), str(tmp_path / "d"), to="safetensors", max_shard_size=40)
    assert json.loads((tmp_path / "d/model.safetensors.index.json").read_text())["metadata"]["step"] == "3"
    with safetensors.safe_open(next((tmp_path / "d").glob("*.safetensors")), "pt") as file:
        assert without_checksums(file.metadata()) == {"format": "pt", "ckpttool.index": "model.safetensors.index.json"}


def test_remark_that_would_become_a_tie(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"best": "v", "step": "3"})
    ckpttool.convert(str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), rename=["w=v"])
    check(read(tmp_path / "b.safetensors"), {"v": torch.ones(2)})
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert without_checksums(file.metadata()) == {"format": "pt", "step": "3"}


# What cannot be written -----------------------------------------------------------------------------------------------


def lost_of(state: Any, path: str, folder: Path) -> dict[str, str]:
    assert FORMAT.losses is not None
    return {loss.name: loss.why for loss in FORMAT.losses(lay(state, folder), path)}


def test_two_names_that_become_one(tmp_path: Path) -> None:
    state = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}
    assert "['a', 'b'] and ['a.b']" in lost_of(state, "x.safetensors", tmp_path)["a.b"]
    with pytest.raises(LossError, match=r"tensors `a`/`b` and `a.b` would both be called `a.b`"):
        FORMAT.create(locate(str(tmp_path / "out")), lay(state, tmp_path), SinkOptions())  # type: ignore[misc]
    assert not (tmp_path / "out").exists()


def test_dtypes_that_safetensors_does_not_have(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2), "z": torch.zeros(2, dtype=torch.complex128), "__metadata__": torch.zeros(1)}
    lost = lost_of(state, "x.safetensors", tmp_path)
    assert lost.keys() == {"z", "__metadata__"}
    assert "no dtype complex128" in lost["z"]
    assert lost_of(state, "folder", tmp_path) == lost
    with pytest.raises(LossError, match="`__metadata__` float32"):
        FORMAT.create(locate(str(tmp_path / "out.safetensors")), lay(state, tmp_path), SinkOptions())  # type: ignore[misc]
    assert not (tmp_path / "out.safetensors").exists()


def test_state_into_one_file(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "model": {"w": torch.zeros(2), "z": torch.zeros(1, dtype=torch.complex128), "e": {"_extra_state": 3}},
        "optimizer": {"state": {0: torch.ones(1)}, "param_groups": []},
        "n": 1,
    }
    lost = lost_of(state, "x.safetensors", tmp_path)
    assert set(lost) == {"model.z", "model.e._extra_state", "optimizer.state.0", "optimizer.param_groups", "n"}
    with pytest.raises(LossError, match="one safetensors file holds the tensors of one model"):
        FORMAT.create(locate(str(tmp_path / "x.safetensors")), lay(state, tmp_path), SinkOptions())  # type: ignore[misc]
    assert lost_of(state, "folder", tmp_path) == {}


def test_two_models_into_one_file(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(2)}, "ema": {"w": torch.zeros(2)}}
    assert set(lost_of(state, "x.safetensors", tmp_path)) == {"model.w", "ema.w"}


def test_value_that_json_cannot_hold(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    state = {"model": {"w": torch.zeros(2)}, "loop": loop, "fine": 1}
    lost = lost_of(state, "folder", tmp_path)
    assert set(lost) == {"loop"}
    assert "holds itself" in lost["loop"]
    with pytest.raises(LossError, match="`loop` cannot be written"):
        FORMAT.create(locate(str(tmp_path / "out")), lay(state, tmp_path), SinkOptions())  # type: ignore[misc]
    assert not (tmp_path / "out").exists()


# A whole training state -----------------------------------------------------------------------------------------------


def training_state() -> dict[str, Any]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = model.state_dict()
    weights["head._extra_state"] = {"fp8": (1, 2)}
    return {
        "model": weights,
        "ema": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "master": {"scale": weights["scale"]},
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict(),
        "rng": {"torch": torch.get_rng_state(), "python": (3, (1, 2, 3), None)},
        "args": Namespace(lr=1e-3, betas=(0.9, 0.999), dtype=torch.bfloat16, size=torch.Size((2, 3))),
        "odd": [float("nan"), -0.0, 2**80, b"\0\xff", {1: "a", (2, 3): {4}}, "\ud800", {"$tuple": 1}, frozenset((1,))],
        "empty": {"dict": {}, "list": [], "ordered": OrderedDict(), "tensor": torch.empty(0, 3)},
        "pair": (torch.ones(2), torch.tensor(3, dtype=torch.int16)),
        "shared": {"z": torch.randn(3, dtype=torch.complex128), "h": random((2,), torch.complex32)},
        "\ud800": {"w": torch.ones(1), "f4": random((1,), torch.float4_e2m1fn_x2).reshape(())},
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.ones(1),
        "step": 17,
    }


def back_to_torch(path: Path, out: Path) -> Any:
    ckpttool.convert(str(path), str(out), to="torch")
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("most", [None, 200, 1])
def test_state_comes_back_exactly(tmp_path: Path, most: int | None) -> None:
    state = training_state()
    made = write(state, tmp_path / "out", tmp_path / "from", max_shard_size=most)
    again = read(tmp_path / "out")
    assert list(again.entries) == list(made.entries)
    assert again.containers == made.containers
    assert find_aliases(again.tensors) == find_aliases(made.tensors)
    back = back_to_torch(tmp_path / "out", tmp_path / "back.pt")
    assert_same(back, state)
    assert [*back, *back["model"]] == [*state, *state["model"]]
    assert back["model"]._metadata == state["model"]._metadata
    assert back["model"]["head.weight"].data_ptr() == back["model"]["embed.weight"].data_ptr()
    assert back["master"]["scale"].data_ptr() == back["model"]["scale"].data_ptr()
    assert again.facts["layout"] == "training state"


def test_files_of_a_state(tmp_path: Path) -> None:
    state = training_state()
    write(state, tmp_path / "out", tmp_path / "from")
    stored = {p.stem: safetensors.torch.load_file(p) for p in (tmp_path / "out").glob("*.safetensors")}
    assert set(files_of(tmp_path / "out")) == {f"{s}.safetensors" for s in stored} | {"ckpttool.json"}
    assert set(stored) >= {"model", "model-ema", "optimizer", "rng", "other"}
    weights = {k: v for k, v in state["model"].items() if isinstance(v, torch.Tensor)}
    del weights["head.weight"]
    assert_same(stored["model"], weights)
    assert stored["optimizer"].keys() == {f"state.{i}.{k}" for i in (0, 1) for k in ("step", "exp_avg", "exp_avg_sq")}
    # What safetensors has no dtype for lies there as bytes; a name that is taken gets a number.
    z = stored["other"]["shared.z"]
    assert (z.dtype, z.shape) == (torch.uint8, (48,))
    assert raw_bytes(z) == raw_bytes(state["shared"]["z"])
    assert {"a.b", "a.b#2", "__metadata__#2", r"\ud800.w"} <= stored["other"].keys()
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        metadata = {"format": "pt", "ckpttool.state": "ckpttool.json", "head.weight": "embed.weight"}
        assert without_checksums(file.metadata()) == metadata


def test_model_of_a_state_from_pretrained(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(sample("hf/llama"))
    state = {"step": 3, "optimizer": {"master": model.state_dict()["model.norm.weight"]}, "model": model.state_dict()}
    write(state, tmp_path / "out", tmp_path / "from", max_shard_size=1000)
    shutil.copy(sample("hf/llama") / "config.json", tmp_path / "out")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(back_to_torch(tmp_path / "out", tmp_path / "back.pt"), state)


def test_state_of_values_alone(tmp_path: Path) -> None:
    write({"step": 3, "lr": 0.1}, tmp_path / "out", tmp_path / "from")
    assert set(files_of(tmp_path / "out")) == {"ckpttool.json"}
    assert back_to_torch(tmp_path / "out", tmp_path / "back.pt") == {"step": 3, "lr": 0.1}


def test_model_after_another_model(tmp_path: Path) -> None:
    state = {"ema": {"w": torch.zeros(2)}, "model": {"w": torch.ones(2)}, "step": 1}
    write(state, tmp_path / "out", tmp_path / "from")
    assert_same(safetensors.torch.load_file(tmp_path / "out/model.safetensors"), {"w": torch.ones(2)})
    assert_same(safetensors.torch.load_file(tmp_path / "out/model-ema.safetensors"), {"w": torch.zeros(2)})


def test_model_with_extra_state_is_a_state(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "_extra_state": {"a": (1,)}}
    write(state, tmp_path / "out", tmp_path / "from")
    assert_same(safetensors.torch.load_file(tmp_path / "out/model.safetensors"), {"w": torch.ones(2)})
    assert_same(back_to_torch(tmp_path / "out", tmp_path / "back.pt"), state)


def test_tensors_that_are_no_model(tmp_path: Path) -> None:
    state = {"rng": {"torch": torch.get_rng_state()}}
    write(state, tmp_path / "out", tmp_path / "from")
    assert set(files_of(tmp_path / "out")) == {"ckpttool.json", "rng.safetensors"}
    assert_same(back_to_torch(tmp_path / "out", tmp_path / "back.pt"), state)


def test_state_file_is_for_people(tmp_path: Path) -> None:
    write({"model": {"w": torch.ones(2)}, "betas": (0.9, 0.95)}, tmp_path / "out", tmp_path / "from")
    lines = (tmp_path / "out/ckpttool.json").read_text().splitlines()
    assert '  {"path": ["model", "w"], "file": "model.safetensors", "name": "w"},' in lines
    assert '  {"path": ["betas"], "value": {"$tuple": [0.9, 0.95]}}' in lines


def test_state_file_comes_last(tmp_path: Path) -> None:
    laid = lay(training_state(), tmp_path)
    sink = FORMAT.create(locate(str(tmp_path / "out")), laid, SinkOptions())  # type: ignore[misc]
    assert "ckpttool.json" not in files_of(tmp_path / "out")
    sizes = {f.name: f.size for f in sink.catalogue.files}
    assert {name: len(data) for name, data in files_of(tmp_path / "out").items()} == sizes
    sink.finish({(t.chunks.file[0], t.chunks.offset[0]): 0 for t in sink.catalogue.tensors})
    assert "ckpttool.json" in files_of(tmp_path / "out")


# State files that lie -------------------------------------------------------------------------------------------------


@pytest.fixture
def state_folder(tmp_path: Path) -> Path:
    state = {"model": {"w": torch.ones(2)}, "z": torch.zeros(2, dtype=torch.complex128), "pair": (torch.ones(1),)}
    write(state, tmp_path / "out", tmp_path / "from")
    return tmp_path / "out"


def changed(folder: Path, change: Any) -> None:
    path = folder / "ckpttool.json"
    state = json.loads(path.read_text())
    state.pop("crc32", None)  # which would find any change
    change(state, {tuple(map(str, e["path"])): e for e in state["entries"]})
    path.write_text(json.dumps(state))


def lies() -> Iterator[tuple[str, Any, str]]:
    w, z = ("model", "w"), ("z",)
    yield "no file", lambda s, e: e[w].update(file="other2.safetensors"), "is not there"
    yield "outside", lambda s, e: e[w].update(file="../x.safetensors"), "outside the checkpoint"
    yield (
        "no tensor",
        lambda s, e: e[w].update(name="v"),
        "tensor `v` is in `model.safetensors`, which does not have it",
    )
    yield "neither", lambda s, e: e[w].pop("file"), "neither a value nor a tensor"
    yield "no shape", lambda s, e: e[z].pop("shape"), "its shape is None"
    yield "bad shape", lambda s, e: e[z].update(shape=[-2]), "its shape is"
    yield "other shape", lambda s, e: e[z].update(shape=[3]), r"not the 48 bytes of a complex128 \[3\]"
    yield "dtype", lambda s, e: e[z].update(dtype="float99"), "unknown dtype `float99`"
    yield "not raw", lambda s, e: e[w].update(dtype="complex128", shape=[1]), "is float32"
    yield "not bytes", lambda s, e: e[w].update(dtype="int8", shape=[2]), r"float32 \[2\], not the 2 bytes of a int8"
    yield "twice", lambda s, e: s["entries"].append(e[w]), "two entries are called `model.w`"
    yield "path", lambda s, e: e[w].update(path="model"), "is not a path"
    yield "unhashable", lambda s, e: e[w].update(path=[["model"]]), "is not a path"
    yield "entries", lambda s, e: s.update(entries={}), "`entries` is not a list"
    yield "entry", lambda s, e: s["entries"].append(3), "`entries` is not a list of objects"
    yield "containers", lambda s, e: s.pop("containers"), "`containers` is not a list"
    yield "container", lambda s, e: s["containers"].append({"path": [], "kind": "x"}), "an unknown container"
    yield (
        "attributes",
        lambda s, e: s["containers"].append({"path": [], "kind": "OrderedDict", "attributes": {"items": 3}}),
        "an unknown container",
    )
    yield "value", lambda s, e: e[("pair",)].update(value={"$x": 1}), r"ckpttool.json`: `pair`: `\$x` is not a kind"
    yield "link", lambda s, e: e[("pair",)].update(value={"$tensor": ["q"]}), "`pair` needs the tensor `q`"


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, m, id=n) for n, c, m in lies()])
def test_state_file_that_lies(state_folder: Path, change: Any, message: str) -> None:
    changed(state_folder, change)
    with pytest.raises(CorruptError, match=message):
        read(state_folder)


def test_state_file_of_a_later_version(state_folder: Path) -> None:
    changed(state_folder, lambda s, e: s.update(schema="ckpttool/state/2"))
    with pytest.raises(ReadError, match="ckpttool/state/2") as caught:
        read(state_folder)
    assert "update" in str(caught.value.hint)


def test_state_with_a_tensor_too_many(state_folder: Path) -> None:
    changed(state_folder, lambda s, e: s["entries"].remove(e[("z",)]))
    with pytest.raises(CorruptError, match=r"ckpttool\.json`: does not name all tensors of its files: `z`"):
        read(state_folder)


def test_bare_storage_of_an_object(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "odd": [torch.arange(3.0).storage()]}
    write(state, tmp_path / "out", tmp_path / "from")
    assert b'"$storage": ["odd", 0' in files_of(tmp_path / "out")["ckpttool.json"]
    assert_same(back_to_torch(tmp_path / "out", tmp_path / "back.pt"), state)


class _Listed(list[str]):
    """A list of names, which may not be searched for each name."""

    def __contains__(self, name: object) -> bool:
        raise AssertionError("a list is searched once for each name")


def test_the_missing_one_of_very_many(tmp_path: Path) -> None:
    names = _Listed(sharding.file_names("model", 99_999)[:-1])
    with pytest.raises(CorruptError, match=r"model-99999-of-99999\.safetensors` is not there"):
        model_files._open_listed(locate(str(tmp_path)), names)


def test_a_training_state_without_its_state_file(tmp_path: Path) -> None:
    """What it had beside tensors is lost: half of what is sent to a store, or a file that was not copied."""
    state = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "lr": 0.1}}
    torch.save(state, tmp_path / "state.pt")
    ckpttool.convert(tmp_path / "state.pt", tmp_path / "state", to="safetensors")
    (tmp_path / "state" / "ckpttool.json").unlink()
    with pytest.raises(CorruptError, match=r"`ckpttool\.json` is missing"):
        ckpttool.convert(tmp_path / "state", tmp_path / "out.pt")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "state" / "model.safetensors", tmp_path / "alone")
    for source, options in (
        (tmp_path / "state", {"only": ["model"]}),
        (tmp_path / "state" / "model.safetensors", {}),
        (tmp_path / "alone", {}),
    ):
        ckpttool.convert(source, tmp_path / "out.pt", overwrite=True, **options)
        loaded = torch.load(tmp_path / "out.pt", weights_only=True)
        assert loaded.get("model", loaded)["w"].tolist() == [1, 1, 1]
        assert any("a part of a training state" in str(warning) for warning in ckpttool.inspect(source).warnings)
    assert "lacks" not in str(ckpttool.inspect(tmp_path / "alone"))


@pytest.mark.parametrize("beside", [(), ("optimizer.pt",)], ids=["alone", "in a step directory"])
def test_files_of_a_model_without_their_index(tmp_path: Path, beside: tuple[str, ...]) -> None:
    """What only the index has is lost: half of what is sent to a store, or a file that was not copied."""
    weights = {"a": torch.ones(8), "b": torch.ones(8) * 2}
    out = (tmp_path / f"{n}.pt" for n in count())
    for name, state in (("tied", {**weights, "c": weights["a"]}), ("apart", weights), ("root", {"net": weights})):
        folder = tmp_path / name
        torch.save(state, tmp_path / "state.pt")
        ckpttool.convert(tmp_path / "state.pt", folder, to="safetensors", max_shard_size=40)
        assert_same(back_to_torch(folder, next(out)), state)
        (folder / "model.safetensors.index.json").unlink()
        for other in beside:
            torch.save({"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}, folder / other)
        if name == "apart":
            loaded = back_to_torch(folder, next(out))
            assert_same(loaded["model"] if beside else loaded, state)
            continue
        with pytest.raises(CorruptError, match=r"model\.safetensors\.index\.json` is missing, which has what"):
            ckpttool.convert(folder, path := next(out))
        assert not path.exists()
        one = folder / "model-00001-of-00002.safetensors"
        assert_same(back_to_torch(one, next(out)), {"a": weights["a"]})
        assert any("a part of a model" in str(warning) for warning in ckpttool.inspect(one).warnings)


@pytest.mark.parametrize(
    "names", [("unet/model", "vae/model"), ("model_a", "model_b"), ("model_1", "model_2")], ids=lambda names: names[0]
)
def test_models_of_several_training_states_are_no_damaged_one(names: tuple[str, str], tmp_path: Path) -> None:
    weights = torch.randn(2, 16, 8)
    for own, name in zip(weights, names, strict=True):
        state = {"model": {"w": own.clone()}, "optimizer": {"lr": 0.1}, "step": 1}
        torch.save(state, tmp_path / "state.pt")
        ckpttool.convert(tmp_path / "state.pt", tmp_path / "state", to="safetensors", overwrite=True)
        target = tmp_path / "models" / f"{name}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "state" / "model.safetensors", target)
    ckpttool.convert(tmp_path / "models", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(torch.stack([loaded[name.partition("/")[0]]["w"] for name in names]), weights)
    assert any(
        "a part of a training state" in str(warning) for warning in ckpttool.inspect(tmp_path / "models").warnings
    )


@pytest.mark.parametrize("data", [b"\x08", b"\xff" * 8, b"\xff\xff\xff\x7f\0\0\0\0{}"])
def test_the_library_says_what_is_wrong_with_any_file(
    data: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if its header says that it is large, for which memory is made free first."""
    freed: list[bool] = []
    give_back = safetensors_library._return_free_memory
    monkeypatch.setattr(safetensors_library, "_return_free_memory", lambda: freed.append(True) or give_back())
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert safetensors_library.refusal(locate(str(path))) is not None
    safetensors.torch.save_file({f"weight.{i:08}": torch.zeros(1) for i in range(20_000)}, path)
    freed.clear()
    assert safetensors_library.refusal(locate(str(path))) is None and freed
