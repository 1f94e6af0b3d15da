"""The fields of the document of `inspect --json`, from which its tables and its JSON Schema are generated."""

from __future__ import annotations

from typing import Any, TypedDict

from ckpttool.analysis.describe.optimizers import StateFigures
from ckpttool.analysis.describe.summary import PartFigures
from ckpttool.catalogue.boxes import Ints


class FileEntry(TypedDict):
    """A file of the checkpoint."""

    path: str  #: path below the checkpoint
    nbytes: int  #: its size
    rank: int | None  #: rank that wrote it; null if it does not belong to a rank


class OptimizerFigures(TypedDict):
    """An optimizer."""

    root: str  #: its key
    name: str | None  #: its class in torch.optim; null where several fit
    state: list[StateFigures]  #: its state


class CheckpointEntry(TypedDict):
    """A checkpoint of a run."""

    name: str  #: its name
    path: str  #: its path
    step: int | None  #: step it was saved at, if its name says so
    file_bytes: int  #: bytes of its files
    producer: str | None  #: the framework that wrote it
    format: str | None  #: its format
    complete: bool  #: whether the save has ended
    why_not: str | None  #: reason why it is not complete, for people
    taken: bool  #: whether it is the one that the rest of the document describes


class ComponentEntry(TypedDict):
    """A checkpoint within a run directory."""

    path: str  #: its path there; `*` stands for the rank
    root: str  #: key of the part that it is; empty for the root
    format: str  #: its format
    layout: str | None  #: its layout
    file_count: int  #: number of its files


class ShardEntry(TypedDict):
    """Where a shard of a tensor is."""

    offsets: Ints  #: its first element in each dimension
    sizes: Ints  #: its elements in each dimension
    file: str  #: its file
    rank: int | None  #: rank that wrote it; null if the file does not belong to a rank


class TensorEntry(TypedDict):
    """A tensor."""

    name: str  #: dotted name
    path: list[str | int]  #: its keys: strings and integers unchanged, other keys as text
    part: str  #: kind of part
    dtype: str  #: dtype, as torch calls it
    shape: Ints  #: shape
    nbytes: int  #: bytes
    placements: tuple[str, ...] | None  #: `Shard(DIM)` or `Replicate` for each dimension of `mesh`; null if unknown
    mesh: Ints | None  #: sizes of the mesh, by the DTensor or else by the shards, without replicas; null if unknown
    chunks: list[ShardEntry]  #: its shards


class ObjectEntry(TypedDict):
    """A value that is not a tensor."""

    name: str  #: dotted name
    path: list[str | int]  #: its keys, as those of a tensor
    part: str  #: kind of part
    type: str  #: `int`, `tuple`, `argparse.Namespace`, ...; `unread` if `value` is the reason why it was not read
    value: Any  #: numbers, strings, lists and dicts unchanged; anything else as a line of text


class Recognised(TypedDict):
    """What a checkpoint of another tool is."""

    name: str  #: the tool and its kind of checkpoint
    title: str  #: the name with the version
    version: str | None  #: its version, if known
    parallelism: str | None  #: how it is sharded, for people
    parameters: int | None  #: number of the model's parameters, however they are stored; null if unknown
    details: dict[str, str | int]  #: other facts
    can: list[str]  #: what ckpttool does with it, for people
    cannot: list[str]  #: what it does not do, for people


class CheckpointFacts(TypedDict, total=False):
    """What a format or a run directory records; each field may be missing."""

    layout: str  #: layout of the format, for people
    partitions: str  #: of DeepSpeed: which elements each rank has, and their padding, for people
    writer: str  #: what wrote it
    torch: str  #: version of torch that wrote it
    protocol: int  #: pickle protocol
    metadata: Any  #: `__metadata__` of safetensors
    model_type: str  #: of a `config.json`
    architectures: list[Any]  #: of a `config.json`
    num_hidden_layers: int  #: of a `config.json`
    tie_word_embeddings: bool  #: of a `config.json`
    producer: str  #: the framework that wrote a run directory
    recognised: Recognised  #: what a checkpoint of another tool is
    assets: list[str]  #: files of a run directory that are not part of the state
    mounted: list[ComponentEntry]  #: components of a run directory
    run: list[CheckpointEntry]  #: checkpoints of a run, if `path` is one


class Document(CheckpointFacts):
    """What `inspect --json` prints."""

    schema: str  #: `ckpttool/inspect/2`
    exit_code: int  #: exit code of the command
    verdict: str  #: `damaged`, or `readable` if the index shows no damage; `ckpttool verify` reads the files
    message: str  #: what the checkpoint is, for people
    path: str  #: path, as it was typed
    format: str  #: a name listed by `ckpttool formats`
    world_size: int  #: number of ranks that wrote it; 1 if unknown
    step: int | float | None  #: step it was saved at, if known
    epoch: int | None  #: epoch, if a counter or its name says so
    parameters: int | None  #: number of the model's parameters, without buffers, EMA and ties; null without a model
    dtypes: list[str]  #: dtypes of the parameters, that of most bytes first
    architecture: str | None  #: class of the model, from a `config.json` beside the checkpoint
    layers: int | None  #: number of layers, by the config or by the names; null if unknown
    optimizers: list[OptimizerFigures]  #: the optimizers
    parts: list[PartFigures]  #: the parts
    payload_bytes: int  #: bytes of values, tied ones counted once
    file_bytes: int  #: bytes of `files`, which do not include a `.metadata` or a JSON index
    bytes_per_rank: list[int] | None  #: bytes of the files of each rank; null for one rank, and if a file is missing
    files: list[FileEntry]  #: the files
    tensors: list[TensorEntry]  #: tensors that the options select, as they were saved or in the order of `--sort`
    objects: list[ObjectEntry]  #: all other entries that match `--tensors`; none with `--dtype`, `--min-size`, `--top`
    warnings: list[str]  #: for people
