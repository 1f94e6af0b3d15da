"""The rules of docs/explanation/design.md that a reader of the code could break without noticing."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.paths import ROOT
from support.upstream_samples import path_of

from ckpttool.cli.app import COMMANDS

PACKAGE = ROOT / "ckpttool"

# From the bottom to the top: a module imports its own folder and the rows above its own, never one beside or below.
LAYERS: list[set[str]] = [
    {"errors", "version"},
    {"text"},
    {"storage"},
    {"remote"},
    {"catalogue"},
    {"layout", "serialization"},
    {"flat"},
    {"formats", "transfer"},
    {"producers"},
    {"models"},
    {"training"},
    {"analysis"},
    {"reports"},
    {"operations"},
    {"fleet"},
    {"resume"},
    {""},
    {"cli"},
    {"__main__"},
]
PURE = {"errors", "text", "catalogue", "layout"}
# Arrows that go down, and are wanted from these modules alone.
ONLY = {
    ("flat", "layout"): {"flat.fsdp1_optimizer", "flat.fsdp1_units", "flat.local_state"},
    ("training", "formats.dcp"): {
        "training.reshard_engine.engine",
        "training.reshard_engine.meta_model",
        "training.save",
    },
}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of ours by its name without `ckpttool.`; the package itself is ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix("__init__").rstrip(".")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def layer_of(name: str) -> str:
    """The folder or module at the top of the package that a module belongs to."""
    return name.partition(".")[0]


def walk(node: ast.AST, *, typing: bool, functions: bool) -> Iterator[ast.AST]:
    """`ast.walk`, but for what is for type checkers only and for what runs only when a function is called."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not typing and isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        if not isinstance(child, ast.FunctionDef) or functions:
            yield from walk(child, typing=typing, functions=functions)


SITE = "ckpttool.resume.observe.site"


@cache
def imported(tree: ast.AST, *, typing: bool = True, functions: bool = True) -> frozenset[str]:
    """Full names of the modules that are imported in a tree: anywhere, or where `walk` goes."""
    names: set[str] = set()
    for node in walk(tree, typing=typing, functions=functions):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Modules of the hook alone import each other so: they run where nothing of ckpttool can be imported.
            base = f"{SITE}.{node.module}" if node.level else node.module or ""
            assert not node.level or base.removeprefix("ckpttool.") in modules(), "a relative import"
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                names.add(
                    inner if inner.removeprefix("ckpttool.") in modules() and base.startswith("ckpttool") else base
                )
    return frozenset(names)


def ours(tree: ast.AST, **where: bool) -> set[str]:
    found = {name for name in imported(tree, **where) if name.partition(".")[0] == "ckpttool"}
    return {name.removeprefix("ckpttool").removeprefix(".") for name in found}


def foreign(tree: ast.AST, **where: bool) -> set[str]:
    return {name.partition(".")[0] for name in imported(tree, **where)} - {"ckpttool", "__future__"}


AT_IMPORT = {"typing": False, "functions": False}


@cache
def calls(tree: ast.AST) -> set[str]:
    """What is called, as it is written: `print`, `pickle.load`."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


TOP_LEVEL = {
    *(
        "ckpttool",
        "docs",
        "samples",
        "tests",
        ".ci",
        ".github",
        ".gitattributes",
        ".gitignore",
        "Makefile",
        "Dockerfile",
    ),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "pyproject.toml", "constraints.txt"),
    *("mkdocs.yml", ".pre-commit-config.yaml"),
}


def test_imports_go_down() -> None:
    for name, tree in modules().items():
        layer = layer_of(name)
        below = set().union(*LAYERS[: next(i for i, row in enumerate(LAYERS) if layer in row)])
        beyond = {used for used in ours(tree) if layer_of(used) not in {layer, *below}}
        assert not beyond, f"{name} imports {sorted(beyond)}"


def test_every_layer_is_there() -> None:
    assert set().union(*LAYERS) == {layer_of(name) for name in modules()}


def test_the_root_is_small() -> None:
    assert len([entry for entry in PACKAGE.iterdir() if entry.name != "__pycache__"]) <= 23


def test_the_top_level_is_what_every_project_has() -> None:
    """Two files that an experiment had left were committed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of Git")
    names = {name.partition("/")[0] for name in listed.stdout.splitlines()}
    assert names <= TOP_LEVEL, names - TOP_LEVEL


def test_no_folder_is_too_large() -> None:
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[path.relative_to(PACKAGE).parts[0]] += len(path.read_text(encoding="utf-8").splitlines())
    assert not {name: n for name, n in lines.items() if n > 8000}


# What several commands need, and no command by itself.
SHARED = {"arguments", "manifest", "publish", "secrets", "write", "written"}


def test_a_command_does_not_import_another() -> None:
    arrows: dict[str, set[str]] = {}
    for name, tree in modules().items():
        if name.startswith("operations."):
            command = name.split(".")[1]
            used = {one.split(".")[1] for one in ours(tree) if one.startswith("operations.")}
            arrows.setdefault(command, set()).update(used - {command} - SHARED)
    # `report` shows what two others find; `repair` looks at what it has written.
    assert {command: used for command, used in arrows.items() if used} == {
        "repair": {"verify"},
        "report": {"inspect", "stats"},
    }


def test_a_format_does_not_import_another() -> None:
    for name in modules():
        if name.startswith("formats.") and name != "formats.detect":
            others = {".".join(used.split(".")[:2]) for used in ours(modules()[name]) if used.startswith("formats.")}
            assert others - {"formats.detect"} <= {".".join(name.split(".")[:2])}, name


@pytest.mark.parametrize("arrow", ONLY)
def test_few_modules_import_that(arrow: tuple[str, str]) -> None:
    above, below = arrow
    users = {
        name for name, tree in modules().items()
        if layer_of(name) == above and any(f"{used}.".startswith(f"{below}.") for used in ours(tree))
    }  # fmt: skip
    assert users == ONLY[arrow]


def test_no_module_needs_itself() -> None:
    graph = {name: ours(tree, typing=False) for name, tree in modules().items()}
    done: set[str] = set()

    def follow(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for used in graph[name]:
                follow(used, (*above, name))
            done.add(name)

    for name in graph:
        follow(name, ())


def test_the_pure_modules_do_no_io() -> None:
    files = {"os", "io", "pathlib", "threading", "torch", "numpy", "subprocess", "shutil"}
    for name, tree in modules().items():
        if layer_of(name) in PURE:
            assert not foreign(tree) & files and "open" not in calls(tree), name


def test_the_lower_layers_need_the_standard_library_only() -> None:
    for name, tree in modules().items():
        if layer_of(name) in PURE or name == "storage.files":
            assert foreign(tree, typing=False) <= sys.stdlib_module_names, name


def test_torch_and_numpy_are_imported_when_they_are_needed() -> None:
    libraries = {"torch", "numpy", "safetensors", "zstandard", "huggingface_hub", "obstore", "fsspec"}
    for name, tree in modules().items():
        if not name.startswith(("training", "remote.hub", "remote.cloud", "resume.worker")):  # imported on use
            assert not foreign(tree, **AT_IMPORT) & libraries, name


def test_one_module_computes_crcs() -> None:
    assert {name for name, tree in modules().items() if "isal" in foreign(tree)} == {"storage.crc"}
    # What a server and numpy compress is decompressed by zlib, too.
    assert {name for name, tree in modules().items() if "zlib" in foreign(tree)} == {
        "formats.numpy_files.reader",
        "storage.crc",
        "remote.hub.answers",
    }


def test_torch_is_needed_for_values_only() -> None:
    users = {name for name, tree in modules().items() if "torch" in foreign(tree) and layer_of(name) != "training"}
    assert {name for name in users if not name.startswith(("resume", "analysis.audit"))} == {
        "models.architecture_process",
        "operations.open",
        "transfer.processes",
    }


def test_one_package_speaks_to_the_hub() -> None:
    users = {name for name, tree in modules().items() if "huggingface_hub" in foreign(tree)}
    assert users and all(f"{name}.".startswith("remote.hub.") for name in users)


def test_one_package_speaks_to_object_stores() -> None:
    users = {name for name, tree in modules().items() if "obstore" in foreign(tree)}
    assert users and all(f"{name}.".startswith("remote.cloud.") for name in users)
    # An extra, which a checkpoint of this machine does not need.
    for name, tree in modules().items():
        if not f"{name}.".startswith("remote.cloud."):
            assert not any(one.startswith("remote.cloud") for one in ours(tree, typing=False)), name


# Commands that start programs of their own and exchange files with them, and modules that ask the system what it has.
WITH_OWN_FILES = (
    "reports.terminal",
    "resume.checkpoints",
    "fleet.commands",
    "fleet.guard",
    "resume.job",
    "resume.launch",
    "analysis.differences.files",
    "analysis.logged",
    "analysis.losses",
    "resume.observe",
    "fleet.run_patterns",
    "fleet.process",
    "fleet.route",
    "analysis.audit.recipe",
    "resume.runs",
    "analysis.script",
    "resume.starts",
    "resume.states",
    "resume.trial",
    "fleet.ways",
    "resume.ways",
    "resume.worker",
    "training.devices",
    "training.reshard_engine.engine",
)
# A path may be a value of a state dict; nothing is opened there.
WITH_PATHS_AS_VALUES = {"training.known_objects"}
FILE_MODULES = {"os", "io", "pathlib", "shutil", "glob", "tempfile", "mmap"}
NO_FILES = {"os.PathLike", "os._exit", "os.cpu_count", "os.environ", "os.fspath", "os.getppid"}
USERS = {
    "formats",
    "transfer",
    "producers",
    "models",
    "training",
    "analysis",
    "reports",
    "operations",
    "fleet",
    "resume",
}


def test_storage_is_the_one_door_to_a_checkpoints_files() -> None:
    for name, tree in modules().items():
        if layer_of(name) not in USERS or name.startswith(WITH_OWN_FILES):
            continue
        assert "open" not in calls(tree), f"{name} calls `open`: `locate(path).open()` knows where the bytes are"
        closed = FILE_MODULES - ({"pathlib"} if name in WITH_PATHS_AS_VALUES else set())
        assert foreign(tree) & closed <= {"os"}, name
        for node in ast.walk(tree):
            assert not isinstance(node, ast.ImportFrom) or node.module not in closed, f"{name}: {ast.unparse(node)}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in FILE_MODULES:
                assert ast.unparse(node) in NO_FILES, f"{name}: {ast.unparse(node)}"


def test_one_door_from_a_catalogue_to_values() -> None:
    """`Source.resolve` says where elements lie, of tensors that are whole; `lookup` also of others, to report on them.
    `Pool` reads files of the versions that were opened, and nobody makes arrays of what is not filled."""
    defined = {
        (node.name, name)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("resolve", "require")
    }
    assert {name for what, name in defined if what == "resolve"} == {"catalogue.protocols"}
    assert {name for what, name in defined if what == "require"} == {
        "catalogue.protocols",
        "catalogue.validation",
        "errors",
        "layout.views",
        "analysis.saved_state",
        "producers.combined",
    }
    looking = {name for name, tree in modules().items() if any(call.endswith(".lookup") for call in calls(tree))}
    assert {name for name in looking if layer_of(name) not in ("catalogue", "producers", "layout")} == {
        "analysis.describe.copies",
        "operations.verify.payloads",
        "analysis.saved_state",
    }
    reading = {
        name
        for name, tree in modules().items()
        if layer_of(name) in ("transfer", "models", "training", "analysis", "reports", "operations", "fleet", "resume")
        and any(call.endswith((".read_into", ".read_rows", ".read_counted", "pool.read")) for call in calls(tree))
    }
    assert reading == {
        "operations.repair",
        "operations.verify.payloads",
        "training.read",
        "transfer.agreement",
        "transfer.assemble",
        "transfer.execute",
        "transfer.file_digest",
        "transfer.read",
    }


def test_only_the_cli_talks() -> None:
    talking = {"print", "input", "sys.stdout.write", "sys.stderr.write", "sys.exit", "exit"}
    for name, tree in modules().items():
        # In its newer releases typer has a click of its own, which is nobody else's business.
        unwanted = {"click"} if name == "cli.parsing" else {"click", "typer"}
        if layer_of(name) != "cli":
            unwanted |= {"argparse", "textual"}
            unwanted |= set() if name == "reports.terminal" else {"rich", "tabulate"}  # it writes to a given stream
        assert not foreign(tree) & unwanted, name
        if layer_of(name) != "cli" and name not in ("__main__", "training.exit_on_error"):  # one ends scripts of others
            assert not calls(tree) & talking, name


RUNNING = {"pickle.load", "pickle.loads", "torch.load", "torch.jit.load", "eval", "exec", "__import__"}


def test_nothing_of_a_checkpoint_is_run() -> None:
    for name, tree in modules().items():
        # The gradients of a run of a trial, which it has saved itself.
        allowed = {"torch.load"} if name == "resume.worker.gradients" else set()
        assert not calls(tree) & RUNNING - allowed, name
        # The package imports its own modules when they are asked for, and so do stores, formats, commands and hooks.
        own = name in ("", "storage.stores", "catalogue.protocols", "cli.app", "resume.observe.site.sitecustomize")
        unwanted = {"find_class", "system", "popen"} | (set() if own else {"import_module"})
        assert not {call for call in calls(tree) if call.rpartition(".")[2] in unwanted}, name
        running = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
        # Our own `architecture_process`, which needs torch; a training command that the user gave.
        running |= set() if name in ("models.architecture", "fleet.process", "fleet.guard") else {"subprocess"}
        running |= set() if name == "serialization.unpickler" else {"pickle"}
        assert not foreign(tree) & running, name


def test_one_package_draws_a_screen() -> None:
    users = {name for name, tree in modules().items() if "textual" in foreign(tree)}
    assert users and all(name.startswith("cli.browser.") for name in users)
    # An extra: it is imported when `browse` is run.
    importing = {name for name, tree in modules().items() if any(one.startswith("cli.browser") for one in ours(tree))}
    assert {name for name in importing if not name.startswith("cli.browser")} == {"cli.browse"}
    assert not any(one.startswith("cli.browser") for one in ours(modules()["cli.browse"], **AT_IMPORT))


def test_one_module_renders_templates() -> None:
    users = {name for name, tree in modules().items() if foreign(tree) & {"jinja2", "markupsafe"}}
    assert users == {"reports.templates"}


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    # `torchrun ckpttool` puts this directory on `sys.path`.
    assert not {name for name in modules() if "." not in name} & set(sys.stdlib_module_names)


def test_what_is_public_is_documented() -> None:
    for name, tree in modules().items():
        assert ast.get_docstring(tree), f"{name} has no docstring"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"


def test_the_design_page_names_every_package() -> None:
    page = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
    packages = {name for name in modules() if any(other.startswith(f"{name}.") for other in modules() if name)}
    assert not {name for name in packages if f"`{name.replace('.', '/')}/`" not in page}


RUN = """
import sys
from ckpttool.__main__ import main
sys.argv = ["ckpttool", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    print("exit", stop.code or 0, file=sys.stderr)
print("torch" in sys.modules, file=sys.stderr)
"""
SOURCES = ("torch/full", "dcp/fsdp2_w4", "safetensors/indexed", "torch/layouts")
TARGETS = ("dcp", "safetensors", "torch")


def test_a_command_is_described_alone() -> None:
    code = RUN.replace('"torch" in sys.modules', 'sorted(n for n in sys.modules if n.startswith("ckpttool.cli."))')
    done = subprocess.run([sys.executable, "-c", code, "formats"], capture_output=True, text=True, check=True)
    assert "ckpttool.cli.formats" in done.stderr
    others = {name.replace("-", "_") for name in COMMANDS} - {"formats"}
    assert not {f"'ckpttool.cli.{module}'" for module in others if f"'ckpttool.cli.{module}'" in done.stderr}


@pytest.mark.parametrize(
    ("name", "to"),
    [
        pytest.param(name, to, marks=[pytest.mark.long] * (i != j))
        for i, name in enumerate(SOURCES)
        for j, to in enumerate(TARGETS)
    ],
)
def test_torch_is_not_imported_to_convert(tmp_path: Path, name: str, to: str) -> None:
    words = ["convert", path_of(name), str(tmp_path / "out"), "--to", to, "--check"]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("False\n"), done.stderr
    assert (tmp_path / "out").exists()


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports each by its name alone, and leaves out the second with an error only where both are collected."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, beside in itertools.pairwise(names) if name == beside]


def test_importing_the_library_imports_little() -> None:
    code = "import sys, ckpttool; print(sorted({'torch', 'numpy', 'typer', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


SEARCHES = {"startswith", "endswith", "match", "fullmatch", "search", "findall", "find", "index", "split", "partition"}


def test_warnings_are_chosen_by_kind() -> None:
    """No code looks for words in the text of a warning or the message of an error."""
    for name, tree in modules().items():
        for node in ast.walk(tree) if layer_of(name) not in ("cli", "errors") else ():
            searched: list[ast.expr] = []
            if isinstance(node, ast.Compare) and any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
                searched = node.comparators
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES:
                searched = [node.func.value, *node.args]
            for part in {ast.unparse(inner) for one in searched for inner in ast.walk(one)}:
                assert not part.endswith((".text", ".message")) and part != "str(warning)", f"{name}: {part}"


def test_what_is_found_is_one_class() -> None:
    """`resume` has a difference between two runs of a script, which is in neither checkpoint."""
    classes = {
        (node.name, name)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Finding") and layer_of(name) != "resume"
    }
    assert classes == {("Finding", "catalogue.findings")}


def test_commands_answer_in_one_frame() -> None:
    users = {name for name, tree in modules().items() if layer_of(name) == "cli" and "answer" in calls(tree)}
    assert users == {"cli.answer"}


def test_a_class_name_is_of_one_class() -> None:
    """One name for one thing, and no class is named as another: a reader who searches for it finds it."""
    defined: dict[str, set[str]] = {}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, set()).add(name)
    shared = {name: sorted(where) for name, where in defined.items() if len(where) > 1}
    assert not shared, "name them after what they are of"
