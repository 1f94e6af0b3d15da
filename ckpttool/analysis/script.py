"""Reads the script of a command, and the modules beside it that it imports: its options and variables, and where it
writes. Nothing is imported or run.

argparse, click and typer         add_argument("--resume"), @click.option("--resume"), typer.Option(..., "--resume")
absl, hydra, LightningCLI         DEFINE_string("resume", ...), keys of the file that `config_name` names, `--ckpt_path`
HfArgumentParser, simple_parsing  the fields of dataclasses, and those of TrainingArguments; with tyro `--resume-from`
fire and typer without names      the arguments of the function that is called
os.environ                        $RESUME_FROM
globals(), as nanoGPT has them    `--init_from=resume` for the variable `init_from = "scratch"` of the module
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_MOST = 64  # modules that are read
_RESUME = re.compile(r"(?!no_|not_|save)(.*_)?(auto_?)?(resum(e|ing)|restore|continue|restart)(_.*)?")
_LOAD = re.compile(r"(load|init|start)(_from|_dir|_path)?|((load|from|start|initial)_)?(checkpoint|ckpt)(_path|_file)?")
_OUT = re.compile(
    r"(default_root|((model|base)_)?(out|output|save|saving|run|work|exp|experiment|result|checkpoint|ckpt|dump)s?)"
    r"(_?(dir|path|folder|root|directory))?"
)
_COUNTS = re.compile(
    r".*_(every|interval|freq|frequency|steps?|epochs?|iters?|num|keep|name|limit|total|best|n|rate|lr)"
)
_LOADS = re.compile(r"(load|restore)(_(state|state_dict|file|checkpoint|model|from_checkpoint))?|read_state_dict")
_FINDS = re.compile(
    r"glob|iglob|rglob|listdir|scandir|iterdir|exists|isfile|is_file|.*(last|latest|newest)_(checkpoint|ckpt)"
)
_NUMBERS = re.compile(r".*_(epoch|step|iter|iteration)")
_WRITES = ("makedirs", "mkdir", "Path", "save", "save_pretrained", "save_state", "save_checkpoint")
_DATACLASSES = {"HfArgumentParser", "simple_parsing", "tyro", "draccus", "pyrallis", "jsonargparse"}
_LAUNCHERS = re.compile(r"(torch\.distributed|accelerate|deepspeed|coverage|cProfile)(\..*)?")
_NEWEST = ("auto", "latest", "last", "resume")


@dataclass(slots=True)
class ScriptOption:
    """An option of a script, `--resume`; of hydra `resume=`, a variable of the environment `$RESUME`."""

    word: str
    kind: str  # `path`, `flag`, `number`, or `off`
    where: str  # `train.py line 12`
    name: str
    values: list[str] = field(default_factory=list)  # that it is one of, or is compared with

    def words(self, command: Sequence[str], value: str = "") -> list[str]:
        """Return a command with this option, whose value is the checkpoint or its step if it is no other."""
        value = value or ("{step}" if self.kind == "number" else "{checkpoint}")
        if self.word.startswith("$"):
            return ["env", f"{self.word[1:]}={value}", *command]
        if self.word.endswith("="):
            return [*command, f"{self.word}{value}"]
        return [*command, self.word, *([value] if self.kind != "flag" else [])]

    @property
    def newest(self) -> str | None:
        """The value that stands for the newest checkpoint, if it has one."""
        return next((value for value in _NEWEST if value in self.values), None)


class Script:
    """What was read of the script of a command; nothing if that is no file of Python."""

    def __init__(self, command: Sequence[str]) -> None:
        self.files: list[str] = []
        self.options: list[ScriptOption] = []
        self.folders: list[str] = []  # constants that it writes to
        self.calls: set[str] = set()
        path, self._root = _path_of(command)
        self._imported: set[str] = set()
        trees: dict[str, ast.Module] = {}
        waiting = [path] if path else []
        while waiting and len(trees) < _MOST:
            path = waiting.pop(0)
            if path not in self.files:
                self.files.append(path)
                with suppress(OSError, SyntaxError, ValueError), open(path, "rb") as stream:
                    trees[path] = ast.parse(stream.read())
                    waiting += self._imports(path, trees[path])
        for path, tree in trees.items():
            self._read(path, tree)
        if "globals" in self.calls:
            self._read_variables(self.files[0], trees[self.files[0]])
        compared = [one for tree in trees.values() for node in ast.walk(tree) for one in _compared(node)]
        for option in self.options:
            option.values += [value for name, value in compared if name == option.name]

    @property
    def finds_checkpoint(self) -> bool:
        """Whether it loads something, and looks for what is there."""
        return all(any(map(pattern.fullmatch, self.calls)) for pattern in (_LOADS, _FINDS))

    def of(self, kind: str) -> list[ScriptOption]:
        """Return the options that `resume`, by what they are called, that `load` something, or for the `out`put."""
        pattern = {"resume": _RESUME, "load": _LOAD, "out": _OUT}[kind]
        named = [one for one in self.options if pattern.fullmatch(one.name)]
        fitting = [one for one in named if one.kind in ("path", *["flag"] * (kind == "resume"))]
        fitting = [one for one in fitting if not _COUNTS.fullmatch(one.name)]
        of_step = [one for one in named if one.kind == "number" and _NUMBERS.fullmatch(one.name) and kind == "resume"]
        return fitting or of_step

    # reading ----------------------------------------------------------------------------------------------------------

    def _imports(self, path: str, tree: ast.Module) -> list[str]:
        """Return the modules that lie beside a module, or in packages there, and are imported."""
        found: list[str] = []
        for node in ast.walk(tree):
            names, folder = [], self._root
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                self._imported.update(name.partition(".")[0] for name in names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                names = [base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)]
                self._imported.update(base.split(".")[:1], (alias.name for alias in node.names))
                for level in range(node.level):
                    folder = os.path.dirname(folder if level else path)
            for stem in (os.path.join(folder, *name.split(".")) for name in names if name):
                found += [one for one in (f"{stem}.py", os.path.join(stem, "__init__.py")) if os.path.isfile(one)]
        return found

    def _add(self, word: str, kind: str, where: str, dest: str = "", values: Sequence[str] = ()) -> None:
        name = (dest or word.strip("-$=")).replace("-", "_").rpartition(".")[2].lower()
        if all(one.word != word for one in self.options):
            self.options.append(ScriptOption(word, kind, where, name, [*values]))

    def _read(self, path: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            where = f"{os.path.basename(path)} line {getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.Call):
                self._read_call(path, node, where)
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "environ"):
                for name in _texts([node.slice]):
                    self._add(f"${name}", "path", where)
            elif isinstance(node, ast.ClassDef) and self._imported & _DATACLASSES:
                fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                is_parsed = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
                self._add_arguments([(one.target, one.annotation) for one in fields if is_parsed], where)
            elif isinstance(node, ast.FunctionDef) and self._imported & {"fire", "typer"} and path == self.files[0]:
                arguments = [*node.args.args, *node.args.kwonlyargs]
                plain = [one for one in arguments if "--" not in ast.unparse(one)]
                self._add_arguments([(ast.Name(one.arg), one.annotation) for one in plain], where)
        if {"HfArgumentParser", "TrainingArguments"} <= self._imported:
            for word in ("--resume_from_checkpoint", "--output_dir"):
                self._add(word, "path", "TrainingArguments")

    def _add_arguments(self, arguments: Sequence[tuple[ast.expr, ast.expr | None]], where: str) -> None:
        dash = "-" if self._imported & {"tyro", "typer"} else "_"
        for target, annotation in arguments:
            of = ast.unparse(annotation) if annotation is not None else ""
            kind = (
                "flag"
                if "bool" in of and "str" not in of
                else "number"
                if re.search(r"\b(int|float)\b", of)
                else "path"
            )
            self._add(f"--{ast.unparse(target).replace('_', dash)}", kind, where)

    def _read_call(self, path: str, node: ast.Call, where: str) -> None:
        called = ast.unparse(node.func)
        leaf, texts = called.rpartition(".")[2], _texts(node.args)
        given = {one.arg: one.value for one in node.keywords if one.arg}
        flags = [text.partition("/")[0] for text in texts if text.startswith("-")]
        if leaf in ("add_argument", "option", "Option") and flags:
            dest = "".join(_texts([given["dest"]])) if "dest" in given else ""
            choices = given.get("choices")
            values = _texts(choices.elts) if isinstance(choices, ast.List | ast.Tuple) else []
            self._add(max(flags, key=len), _kind(given), where, dest, values)
        elif leaf.startswith("DEFINE_") and texts:
            kinds = {"bool": "flag", "boolean": "flag", "integer": "number", "float": "number"}
            self._add(f"--{texts[0]}", kinds.get(leaf.removeprefix("DEFINE_"), "path"), where)
        elif (leaf == "getenv" or called.endswith("environ.get")) and texts:
            self._add(f"${texts[0]}", "path", where)
        elif leaf == "LightningCLI":
            self._add("--ckpt_path", "path", where, "resume")
            self._add("--trainer.default_root_dir", "path", where)
        elif called == "hydra.main":
            self._read_config(path, given)
        elif leaf in _WRITES:
            self.folders += [text.rpartition("/")[0] if leaf == "save" else text for text in texts[-1:]]
        self.calls.add(leaf)

    def _read_variables(self, path: str, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.Assign) and _texts([node.value]):
                where = f"{os.path.basename(path)} line {node.lineno}"
                for name in [one.id for one in node.targets if isinstance(one, ast.Name)]:
                    self._add(f"--{name}=", "path", where)

    def _read_config(self, path: str, given: Mapping[str, ast.expr]) -> None:
        folder, name = ("".join(_texts([given[one]])) if one in given else "" for one in ("config_path", "config_name"))
        file = os.path.join(os.path.dirname(path), folder, name.removesuffix(".yaml") + ".yaml")
        with suppress(OSError), open(file, encoding="utf-8", errors="replace") as stream:
            above: list[tuple[int, str]] = []
            for number, line in enumerate(stream, 1):
                if match := re.match(r"( *)(\w+): *([^#\n]*)", line):
                    above = [one for one in above if one[0] < len(match[1])] + [(len(match[1]), match[2])]
                    kind = "flag" if match[3].strip() in ("true", "false") else "path"
                    key = ".".join(key for _, key in above)
                    self._add(f"{key}=", kind, f"{os.path.basename(file)} line {number}")
        self._add("hydra.run.dir=", "path", os.path.basename(path), "output_dir")


def _path_of(command: Sequence[str]) -> tuple[str, str]:
    """Return the script of a command, and the folder from which it imports; empty if it has none."""
    for before, word in zip(("", *command), command, strict=False):
        if before == "-m" and not _LAUNCHERS.fullmatch(word):
            stem = os.path.join(*word.split("."))
            found = [one for one in (f"{stem}.py", os.path.join(stem, "__main__.py")) if os.path.isfile(one)]
            return (found[0], "") if found else ("", "")
        if word.endswith(".py") and os.path.isfile(word):
            return word, os.path.dirname(word)
    return "", ""


def _texts(nodes: Sequence[ast.expr]) -> list[str]:
    return [one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def _kind(given: Mapping[str, ast.expr]) -> str:
    """Return the kind of an option by the arguments of its declaration."""
    action, of = (ast.unparse(given[one]).strip("'\"") if one in given else "" for one in ("action", "type"))
    if action == "store_false":
        return "off"
    is_flag = "is_flag" in given or of == "bool" or action == "store_true" or action.endswith("BooleanOptionalAction")
    return "flag" if is_flag else "number" if of in ("int", "float") else "path"


def _compared(node: ast.AST) -> list[tuple[str, str]]:
    """Return the name of an option and the values that it is compared with."""
    if not isinstance(node, ast.Compare):
        return []
    sides = [node.left, *node.comparators]
    names = [ast.unparse(one).rpartition(".")[2].lower() for one in sides if isinstance(one, ast.Attribute | ast.Name)]
    lists = [one.elts for one in sides if isinstance(one, ast.Tuple | ast.List | ast.Set)]
    return [(name, value) for name in names for value in _texts([*sides, *(one for each in lists for one in each)])]
