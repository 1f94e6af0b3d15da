"""Components of a checkpoint directory: the terms in which each framework's layout is described. Pure but for listings.

Pattern(r"random_states_(?P<rank>\\d+)\\.pkl", "rng", "per rank")     one object per rank   -> ("rng", "rank3")
Pattern(r"pytorch_model_fsdp_(?P<i>\\d+)/", "model", key="model")   a DCP directory       -> ("model",), ("model_1",)
Pattern(r"model_world_size_(?P<world>\\d+)_rank_(?P<rank>\\d+)\\.pt", "model", "rank files")   all ranks' files as one
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckpttool.catalogue import parts
from ckpttool.catalogue.dtypes import Dtype
from ckpttool.catalogue.entries import Catalogue, Path
from ckpttool.catalogue.warning import Warning
from ckpttool.errors import CkptError, CorruptError
from ckpttool.serialization.directory import Directory
from ckpttool.storage.stores import escape
from ckpttool.text import rank_ranges, some

if TYPE_CHECKING:
    from ckpttool.catalogue.protocols import OpenOptions, Source
    from ckpttool.producers.arrange import LayoutBuilder
    from ckpttool.producers.writer import OutputLayout


Kind = Literal["single", "per rank", "rank files", "shard", "json", "asset", "ignored"]
"""`rank files` are opened as one set, files `per rank` each by itself; a `shard` is one of several files of a part."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A kind of file or folder (`/` at the end) and what it contains: `Pattern(r"optimizer\\.bin", "optimizer")`.

    The group `rank` is a rank, `world` the world size, `i` the number of one of several models or optimizers. `key` is
    a key around everything in the component, which is not repeated. An empty `root` leaves the keys as they are. Other
    groups of the pattern can be used in `root`: `custom_{n}`; of a shard, `count` is how many there are. Beside a file
    called `unless`, one that matches is ignored.
    """

    pattern: str
    root: str = ""
    kind: Kind = "single"
    key: str = ""
    shapes_from: str = ""
    unless: str = ""


@dataclass(frozen=True, slots=True)
class Component:
    """What is opened, and its root in the catalogue: `Component("optimizer_0/", ("optimizer",), "optimizer")`.

    `name` may have a `*` for the ranks; `files` are all names that it stands for. `rank` is that of a file of one rank.
    `shapes_from` is another component, an optimizer whose moments have the shapes of the parameters. `glob` is the
    pattern of rank files of several parts. Of files that nothing but their names says to be those of ranks, `by_name`,
    each rank may have what is its own. A `spare` one is the same part in another format if it has the same names and
    shapes, and a part of its own if not.
    """

    name: str
    root: Path = ()
    key: str = ""
    files: tuple[str, ...] = ()
    rank: int | None = None
    shapes_from: str = ""
    kind: Kind = "single"
    glob: str = ""
    by_name: bool = False
    spare: bool = False

    @property
    def pattern(self) -> str:
        """The glob pattern of the files of all ranks, below the directory."""
        before, star, after = self.name.partition("*")
        return self.glob or f"{escape(before)}{star}{escape(after)}"


class Mounted(NamedTuple):
    """A component as it was opened: `Mounted(component, "optimizer.pt", "torch")`. `files` are those of ranks or
    shards, `copies` those that hold the same as the one that was read; one that `is_copied` is written as a `template`
    says. Of an asset, `format` is "asset" and `copies` where it lies."""

    component: Component
    name: str
    format: str
    layout: str | None = None
    file_count: int = 1
    files: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    is_copied: bool = False

    @property
    def root(self) -> Path:
        return self.component.root

    @property
    def digits(self) -> int:
        """The least digits of the number of a rank in the names of its files."""
        around = len(self.name) - 1
        return min((len(name) - around for name in self.files), default=1) if "*" in self.name else 1


@dataclass(slots=True)
class Layout:
    """The components of a directory. `missing` are reasons why the checkpoint is not complete, `absent` the parts that
    no file of the framework holds, `unreadable` the errors of files that are neither components nor assets."""

    components: list[Component] = field(default_factory=list)
    assets: list[str] = field(default_factory=list)
    warnings: list[Warning] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unreadable: dict[str, CkptError] = field(default_factory=dict)

    def merge(self, other: Layout, folder: str) -> None:
        """Add the layout of a folder of the directory."""

        def below(name: str) -> str:
            return f"{folder}/{name}" if name else ""

        for c in other.components:
            moved = replace(c, name=f"{folder}/{c.name}", files=tuple(map(below, c.files)))
            self.components.append(replace(moved, shapes_from=below(c.shapes_from), glob=below(c.glob)))
        self.assets += map(below, other.assets)
        self.unknown += map(below, other.unknown)
        self.warnings += other.warnings
        self.absent += other.absent
        self.unreadable |= {below(name): error for name, error in other.unreadable.items()}
        self.missing += [f"`{folder}/`: {text}" for text in other.missing]


@dataclass(frozen=True, slots=True)
class WritableLayout:
    """A layout that a framework resumes from: `WritableLayout("accelerate:sharded", "fqn", build, chunked=True)`.

    `keys` is how the framework keys optimizer state; `ordered` says that parameter ids always follow the order of the
    model. `chunked`, `even` and `splits` are those of `Format`; `tensor_class` is the default class of sharded tensors.
    `open` opens such a directory; None for one of the table of producers.
    """

    name: str
    keys: str
    build: Callable[[LayoutBuilder], OutputLayout]
    chunked: bool = False
    even: bool = False
    splits: bool = False
    ordered: bool = False
    tensor_class: str = "sharded_tensor"
    open: Callable[[Directory, OpenOptions], Source] | None = None

    @property
    def framework(self) -> str:
        """The name without the variant."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Producer:
    """A framework: `Producer("accelerate", (r"optimizer\\.bin",), patterns)`.

    A directory is of the framework when its own name matches `folder`, a name in it each of `marks`, and `applies`
    agrees, which looks at the listing and at small JSON files only. Its components are those of `patterns`, and with
    `whole` the directory itself; `adjust` changes them, `expected` are roots that a complete save always has.
    `confirm` checks the opened catalogue where a plain directory of the format has the same files; without it the
    producer is not named. `writes` are the layouts that the framework resumes from; `choose(source, to_world)` picks
    one of several. `checkpoint_folders` is the pattern of the checkpoints beside a final model.
    """

    name: str
    marks: tuple[str, ...]
    patterns: tuple[Pattern, ...]
    expected: tuple[str, ...] = ()
    folder: str = ".*"
    whole: bool = False
    applies: Callable[[Directory], bool] | None = None
    adjust: Callable[[Directory, Layout], None] | None = None
    confirm: Callable[[Catalogue], bool] | None = None
    writes: tuple[WritableLayout, ...] = ()
    choose: Callable[[Catalogue, int | None], WritableLayout] | None = None
    checkpoint_folders: str = ""

    @property
    def is_model(self) -> bool:
        """Whether it writes a model alone, whose folder in a run needs a step in its name."""
        return self.name == "transformers"

    def recognise(self, directory: Directory) -> bool:
        """Return whether the framework left this directory."""
        if not re.fullmatch(self.folder, directory.name, re.DOTALL) or not all(map(directory.has, self.marks)):
            return False
        return self.applies is None or self.applies(directory)

    def layout(self, directory: Directory) -> Layout:
        """Return the components of a directory."""
        layout = match_components(directory, self.patterns, self.expected)
        if self.whole:
            layout.components.insert(0, Component(""))
        if self.adjust is not None:
            self.adjust(directory, layout)
        return layout


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that is in no source: `Constant(("train_state", "step"), int32, b"...")`."""

    path: Path
    dtype: Dtype
    data: bytes


# Files that several frameworks have -----------------------------------------------------------------------------------

# What libraries write beside the weights of a model.
ASSET_NAMES = (
    r"(config|generation_config|added_tokens|special_tokens_map|chat_template|adapter_config|quantization_config"
    r"|[a-z_]*processor_config|[a-z_]*tokenizer_config|tokenizer|vocab|modules|preprocessor)\.json"
    r"|vocab\.txt|merges\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)
# Of a Git repository around the files, not of the model.
REPOSITORY = Pattern(r"\.git(/|attributes|ignore|keep|modules)", kind="ignored")
VARIANT = re.compile(r"(.*/)?[^/.]+\.[a-z0-9_]+\.(safetensors|bin)")
# The weights in the older format of transformers, where `model.safetensors` is there too, in another dtype
# (`model.fp16.safetensors`), or as their authors keep them (Mistral, Llama); for transformers, of verl.
OTHER_FORMAT = re.compile(
    rf"{VARIANT.pattern}|(.*/)?(pytorch_model[^/]*\.bin|huggingface/[^/]*\.safetensors(\.index\.json)?"
    r"|consolidated[^/]*\.(safetensors|pth))"
)
# Beside a model these are not state, whatever they are called.
TEXTS = Pattern(r".*\.(json|ya?ml|txt)", kind="asset")
# Of DCP, with or without its index.
DCP_FILE = r"\.metadata|__\d+\.metadata|.*\.distcp"
WHOLE = rf"{DCP_FILE}|ckpttool\.json"  # of a directory that is one checkpoint, whatever else lies in it
DCP_FILES = Pattern(rf"{DCP_FILE}|\.metadata\.tmp|__\d+\.metadata\.tmp|\.metadata\.bck", kind="ignored")

# Of the weights of a model of transformers.
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def deepest(path: Path, roots: Container[Path]) -> Path | None:
    """Return the longest root that is above a path, or is it; None without one."""
    return next((path[:n] for n in range(len(path), -1, -1) if path[:n] in roots), None)


# Matching -------------------------------------------------------------------------------------------------------------


def match_components(
    directory: Directory, patterns: Iterable[Pattern], expected: Sequence[str] = (), root: Path = ()
) -> Layout:
    """Match each name with the first pattern that fits; other names are `unknown`. `expected` are roots that a complete
    save of the framework always has; those that lack are `absent`."""
    layout = Layout()
    remaining = dict.fromkeys(directory.names)
    for pattern in patterns:
        matches = [m for m in directory.matching(pattern.pattern) if m.string in remaining]
        for match in matches:
            del remaining[match.string]
        if pattern.unless in directory:
            continue
        if pattern.kind == "asset":
            layout.assets += [m.string for m in matches]
        elif pattern.kind == "rank files":
            _add_rank_files(layout, pattern, matches, root)
        elif pattern.kind != "ignored":
            layout.components += [_component(pattern, m, root) for m in sorted(matches, key=_number)]
            if pattern.kind == "per rank" and matches:
                check_ranks(layout, matches)
            if pattern.kind == "shard" and matches:
                count = matches[0].groupdict().get("count")
                check_shards(layout, matches[0].string.partition("-")[0], len(matches), count)
    for index in filter(directory.__contains__, INDEXES):
        check_index(layout, directory, index)
    layout.unknown += remaining
    _drop_duplicates(layout, root)
    present = {c.root[len(root)] for c in layout.components if len(c.root) > len(root)}
    if any(c.root == root for c in layout.components):
        present |= {"model", "optimizer"}  # that has its own keys
    layout.absent = [name for name in expected if name not in present]
    return layout


def _drop_duplicates(layout: Layout, root: Path) -> None:
    """Mark the second of two components of the same part, such as `pytorch_model.bin` beside `model.safetensors`."""
    first_of: dict[Path, Component] = {}
    for i, component in enumerate(layout.components):
        first = first_of.setdefault(component.root, component)
        if first is not component and component.root != root and not (first.kind == component.kind == "shard"):
            other = (*root, component.name.rstrip("/").rpartition("/")[2])
            layout.components[i] = replace(component, root=other, spare=True)


def _number(match: re.Match[str]) -> tuple[int, int]:
    groups = match.groupdict()
    return int((groups.get("i") or "0").strip("_")), int(groups.get("rank") or "0")


def _component(pattern: Pattern, match: re.Match[str], above: Path) -> Component:
    index, rank = _number(match)
    root = above
    if pattern.root:
        first, *rest = pattern.root.format_map(match.groupdict()).split("/")
        root = (*above, f"{first}_{index}" if index else first, *rest)
    shapes_from = pattern.shapes_from.replace("{i}", str(index))
    component = Component(match.string, root, pattern.key, (match.string,), None, shapes_from, pattern.kind)
    is_per_rank = pattern.kind == "per rank"
    return replace(component, root=(*root, parts.rank_key(rank)), rank=rank) if is_per_rank else component


def _add_rank_files(layout: Layout, pattern: Pattern, matches: Iterable[re.Match[str]], above: Path) -> None:
    """Add files that differ only in their rank as one component."""
    for name, of_rank in rank_sets(matches).items():
        component = _component(pattern, of_rank[0], above)
        layout.components.append(replace(component, name=name, files=check_ranks(layout, of_rank)))


def rank_sets(matches: Iterable[re.Match[str]]) -> dict[str, list[re.Match[str]]]:
    """Return the matches of names that differ only in their group `rank`, by the name with a `*` and in the order of
    their ranks."""
    sets: dict[str, list[re.Match[str]]] = {}
    for match in matches:
        begin, end = match.span("rank")
        sets.setdefault(f"{match.string[:begin]}*{match.string[end:]}", []).append(match)
    return {name: sorted(of_rank, key=_number) for name, of_rank in sets.items()}


def check_ranks(layout: Layout, of_rank: Sequence[re.Match[str]]) -> tuple[str, ...]:
    """Add the ranks to `missing` that have no file, by the world size if the names have it, and return the files. Ranks
    count from 0."""
    files, present = tuple(match.string for match in of_rank), [int(match["rank"]) for match in of_rank]
    world_size = next((int(m["world"]) for m in of_rank if m.groupdict().get("world")), None)
    count = world_size if world_size is not None else max(present) + 1
    absent = sorted(set(range(count)) - set(present)) if world_size is None or count <= 1 << 20 else []
    if absent:
        layout.missing.append(f"the file of {rank_ranges(absent)} of {count} is missing beside {some(files, 1)}")
    return files


def weight_map(directory: Directory, index: str) -> dict[str, Any]:
    """Return the files that an index in a directory names, by the names of the tensors; empty for one below it. Raises
    ReadError, or CorruptError for a file that is no index."""
    value = directory.json(index) if index in directory else {"weight_map": {}}
    files = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(files, dict):
        raise CorruptError(f"`{directory.at(index)}`: no index, as it has no `weight_map`", file=directory.at(index))
    return files


def check_index(layout: Layout, directory: Directory, index: str) -> list[str]:
    """Add the files that an index names and that are not there to `missing`, and return the others."""
    try:
        named = sorted({*map(str, weight_map(directory, index).values())})
    except CkptError as error:
        if all(component.name != index for component in layout.components):  # which is opened, and then says it
            layout.unreadable[index] = error
        return []
    absent = [name for name in named if name not in directory]
    texts = [f"`{name}` is missing, but `{index}` names it" for name in absent[:3]]
    layout.missing += [text for text in texts if text not in layout.missing]  # a row's own are said already
    return [name for name in named if name not in absent]


def check_shards(layout: Layout, stem: str, present: int, count: str | None) -> None:
    """Add to `missing` how many files of a model are not there that was split into `count`, if that is known."""
    if count is not None and present != int(count):
        layout.missing.append(f"{int(count) - present} of {int(count)} files `{stem}-*` are missing")
