"""The rules of docs/explanation/design.md that a reader of the code could break without noticing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from originals import path_of

from ckpttool.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ckpttool"

GEOMETRY = {"errors", "dtypes", "boxes", "crc", "version", "escapes", "wording"}
DATA = GEOMETRY | {"catalogue", "contract", "aliases", "faults"}
PURE = {"patterns", "parts", "ranks", "meshes", "layout", "chunking", "placing", "policies", "optimkeys", "plan"}
CONCRETE = {"formats.dcp", "formats.safetensors", "formats.torchsave", "formats.rankfiles"}
MOVING = {"gather", "checksums", "journal", "staging", "transfer", "workers"}

# What the modules of each group may import of ours.
LAYERS: list[tuple[set[str], set[str]]] = [
    ({"errors", "version", "escapes", "boxes", "crc", "formats.strangers"}, set()),
    ({"dtypes", "wording"}, {"errors"}),
    ({"catalogue"}, GEOMETRY),
    ({"aliases", "faults"}, GEOMETRY | {"catalogue"}),
    ({"contract"}, {"catalogue", "boxes"}),
    (PURE, DATA | PURE | {"containers"}),
    ({"mirrors"}, {"errors"}),
    ({"files"}, {"errors", "mirrors"}),
    ({"nesting"}, DATA | {"containers"}),
    ({"containers"}, DATA | {"containers", "nesting", "files", "mirrors"}),
    ({"formats.rankfiles"}, DATA | {"containers", "nesting", "files", "mirrors", "parts", "ranks", "optimkeys"}),
    (CONCRETE, DATA | {"containers", "nesting", "files", "mirrors", "parts", "ranks"}),
    ({"formats"}, {"contract", "errors", "files", "mirrors", "formats.strangers", "wording"} | CONCRETE),
    (MOVING, DATA | MOVING | {"plan", "files", "mirrors"}),
    ({"mounting"}, DATA | PURE | {"nesting"}),
    ({"producers"}, DATA | PURE | {"producers", "formats", "mounting", "nesting", "files", "mirrors", "containers"}),
    ({"opening"}, DATA | {"producers", "mounting", "files", "mirrors", "parts", "containers", "optimkeys"}),
    ({"hub"}, {"hub", "errors", "files", "version", "exporting"}),
    ({"figures"}, DATA | MOVING | {"plan", "files"}),
    ({"checkpoint"}, DATA | MOVING | {"opening", "files"}),
    ({"sharing"}, DATA | MOVING | {"files"}),
    ({"rereading"}, DATA | PURE | MOVING | {"containers"}),
    (
        {"making"},
        DATA
        | PURE
        | MOVING
        | {"files", "formats", "mirrors", "opening", "mounting", "producers", "rereading", "sharing"},
    ),
    (
        {"conversion"},
        DATA
        | PURE
        | MOVING
        | {"rulefiles", "files", "formats", "opening", "making", "manifests", "producers", "containers"},
    ),
    (
        {"engines"},
        DATA | PURE | MOVING | {"files", "making", "mesh", "rereading", "sharing"},
    ),
    (
        {"resharding"},
        DATA
        | PURE
        | MOVING
        | {"rulefiles", "files", "formats", "opening", "making", "manifests", "engines", "sharing"},
    ),
    (
        {"exporting"},
        DATA
        | PURE
        | MOVING
        | {
            "containers",
            "exporting",
            "files",
            "formats",
            "formats.safetensors",
            "making",
            "manifests",
            "mirrors",
            "opening",
            "producers",
            "rereading",
            "rulefiles",
        },
    ),
    ({"rulefiles"}, {"errors", "files", "patterns"}),
    ({"folders"}, {"files"}),
    ({"elements"}, DATA | MOVING | {"plan", "files"}),
    ({"manifests"}, DATA | MOVING | {"containers", "elements", "files", "folders", "mirrors", "opening", "workers"}),
    (
        {"verifying"},
        DATA
        | PURE
        | MOVING
        | {"verifying", "containers", "elements", "files", "folders", "manifests", "mirrors", "opening", "workers"},
    ),
    (
        {"repairing"},
        DATA | MOVING | {"files", "folders", "formats.dcp", "manifests", "mirrors", "verifying", "workers"},
    ),
    (
        {"diffing"},
        DATA | PURE | MOVING | {"diffing", "differences", "containers", "files", "opening", "rulefiles"},
    ),
    ({"looking"}, DATA | {"figures", "opening"}),
    (
        {"verbs"},
        {"conversion", "diffing", "exporting", "figures", "looking", "making", "repairing", "resharding", "verifying"},
    ),
    ({"summary"}, DATA | {"summary", "containers"}),
    (
        {"mesh"},
        DATA | PURE | MOVING | {"mesh", "files", "mirrors", "opening", "containers", "nesting", "formats.dcp"},
    ),
    ({"differences"}, {"boxes", "dtypes"}),
    (
        {"resume"},
        DATA
        | PURE
        | MOVING
        | {
            "differences",
            "resume",
            "mesh",
            "files",
            "formats",
            "opening",
            "containers",
            "figures",
            "verbs",
            "elements",
        },
    ),
    ({"report"}, {"report", "escapes", "wording"}),
    (
        {"cli"},
        DATA
        | {
            "cli",
            "diffing",
            "summary",
            "report",
            "resume",
            "verbs",
            "formats",
            "producers",
            "patterns",
            "figures",
            "sharing",
        }
        | {"hub", "verifying"},
    ),
    ({""}, {"verbs", "checkpoint", "mesh", "errors", "version"}),
    ({"__main__"}, {"cli"}),
]


def modules() -> dict[str, ast.Module]:
    """Every module of ours by its name without `ckpttool.`; the package itself is ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix("__init__").rstrip(".")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


MODULES = modules()
every = pytest.mark.parametrize("name", MODULES)


def layer_of(name: str) -> str:
    """`cli`, `summary`, `containers` and each format are one layer; a format never imports another."""
    first, _, rest = name.partition(".")
    if first == "formats" and rest:
        return f"formats.{rest.partition('.')[0]}"
    return (
        first
        if first
        in (
            "cli",
            "summary",
            "containers",
            "producers",
            "optimkeys",
            "mesh",
            "resume",
            "hub",
            "exporting",
            "report",
            "verifying",
            "diffing",
        )
        else name
    )


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of the modules that are imported anywhere in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner.removeprefix("ckpttool.") in MODULES and base.startswith("ckpttool") else base


def ours(tree: ast.AST) -> set[str]:
    found = {name for name in imported(tree) if name.partition(".")[0] == "ckpttool"}
    return {name.removeprefix("ckpttool").removeprefix(".") for name in found}


def foreign(tree: ast.AST) -> set[str]:
    return {name.partition(".")[0] for name in imported(tree)} - {"ckpttool", "__future__"}


def at_import(tree: ast.Module) -> ast.Module:
    """What runs when a module is imported: no function bodies, nothing for type checkers only."""

    class Stripped(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return None
            return self.generic_visit(node)

    copied = ast.parse(ast.unparse(tree))
    Stripped().visit(copied)
    return copied


def calls(tree: ast.AST) -> set[str]:
    """What is called, as it is written: `print`, `pickle.load`."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


@every
def test_imports_go_down(name: str) -> None:
    layer = layer_of(name)
    allowed = [may for group, may in LAYERS if layer in group]
    assert allowed, f"say in LAYERS what {name} may import, and in docs/explanation/design.md what it is"
    beyond = {layer_of(used) for used in ours(MODULES[name])} - allowed[0] - {layer}
    assert not beyond, f"{name} imports {sorted(beyond)}"


def test_every_layer_is_there() -> None:
    assert {module for group, _ in LAYERS for module in group} == {layer_of(name) for name in MODULES}


def test_no_module_needs_itself() -> None:
    graph = {name: ours(at_import(tree)) for name, tree in MODULES.items()}
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for used in graph[name]:
                walk(used, (*above, name))
            done.add(name)

    for name in graph:
        walk(name, ())


@pytest.mark.parametrize("name", sorted((DATA | PURE) - {"version"}))
def test_the_pure_modules_do_no_io(name: str) -> None:
    assert not foreign(MODULES[name]) & {"os", "io", "pathlib", "threading", "torch", "numpy", "subprocess", "shutil"}
    assert "open" not in calls(MODULES[name])


@pytest.mark.parametrize("name", ["errors", "dtypes", "boxes", "catalogue", "contract", "files", *sorted(PURE)])
def test_the_lower_layers_need_the_standard_library_only(name: str) -> None:
    assert foreign(MODULES[name]) <= sys.stdlib_module_names


@every
def test_torch_and_numpy_are_imported_when_they_are_needed(name: str) -> None:
    if layer_of(name) not in ("mesh", "hub") and not name.startswith(
        "resume.worker"
    ):  # themselves imported when they are needed
        assert not foreign(at_import(MODULES[name])) & {"torch", "numpy", "safetensors", "zstandard", "huggingface_hub"}


def test_one_module_computes_crcs() -> None:
    assert {name for name, tree in MODULES.items() if "isal" in foreign(tree)} == {"crc"}
    assert {name for name, tree in MODULES.items() if "zlib" in foreign(tree)} == {"crc"}


def test_torch_is_needed_for_values_only() -> None:
    users = {layer_of(name) for name, tree in MODULES.items() if "torch" in foreign(tree)} - {"mesh", "resume"}
    assert users == {"transfer", "checkpoint", "figures", "sharing", "engines", "exporting"}


def test_one_package_speaks_to_the_hub() -> None:
    assert {layer_of(name) for name, tree in MODULES.items() if "huggingface_hub" in foreign(tree)} <= {"hub"}


@every
def test_only_the_cli_talks(name: str) -> None:
    if layer_of(name) != "cli":
        assert not foreign(MODULES[name]) & {"typer", "click", "rich", "tabulate", "argparse"}
    if layer_of(name) != "cli" and name != "mesh.ending":  # which ends the scripts of others
        assert not calls(MODULES[name]) & {"print", "input", "sys.stdout.write", "sys.stderr.write", "sys.exit", "exit"}


@every
def test_nothing_of_a_checkpoint_is_run(name: str) -> None:
    tree = MODULES[name]
    called = calls(tree)
    assert not called & {"pickle.load", "pickle.loads", "torch.load", "torch.jit.load", "eval", "exec", "__import__"}
    # The package itself imports its own modules when they are asked for, and so do stores and commands.
    own = name in ("", "verbs", "mirrors", "cli.app")
    unwanted = {"find_class", "system", "popen"} | (set() if own else {"import_module"})
    assert not {c for c in called if c.rpartition(".")[2] in unwanted}
    assert not foreign(tree) & {"marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
    if name != "exporting.expected":  # starts our own `exporting.metamodel`, which needs torch, in a process of its own
        assert "subprocess" not in foreign(tree)
    if name != "containers.pickles":
        assert "pickle" not in foreign(tree)


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    # `torchrun ckpttool` puts this directory on `sys.path`.
    assert not {name for name in MODULES if "." not in name} & set(sys.stdlib_module_names)


@every
def test_what_is_public_is_documented(name: str) -> None:
    tree = MODULES[name]
    assert ast.get_docstring(tree), f"{name} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"


def test_the_design_page_names_every_module() -> None:
    page = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
    missing = {layer_of(n).partition(".")[0] for n in MODULES if n} - {"__main__", "version"}
    assert not {name for name in missing if not any(f"`{name}{end}`" in page for end in ("", "/", "/x"))}


RUN = """
import sys
from ckpttool.cli.app import main
sys.argv = ["ckpttool", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    print("exit", stop.code or 0, file=sys.stderr)
print("torch" in sys.modules, file=sys.stderr)
"""
SOURCES = ("torch_full", "torch_layouts", "dcp_fsdp2_w4", "safetensors_indexed")


@pytest.mark.parametrize("words", [["--help"], ["formats"], *(["inspect", path_of(name)] for name in SOURCES)])
def test_torch_is_not_imported_to_look(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("False\n"), done.stderr


def test_a_command_is_described_alone() -> None:
    code = RUN.replace('"torch" in sys.modules', 'sorted(n for n in sys.modules if n.startswith("ckpttool.cli."))')
    done = subprocess.run([sys.executable, "-c", code, "formats"], capture_output=True, text=True, check=True)
    assert "ckpttool.cli.formats" in done.stderr
    others = {command.module for command in COMMANDS.values()} - {"formats"}
    assert not {f"'ckpttool.cli.{module}'" for module in others if f"'ckpttool.cli.{module}'" in done.stderr}


@pytest.mark.parametrize("to", ["torch", "dcp", "safetensors"])
@pytest.mark.parametrize("name", SOURCES)
def test_torch_is_not_imported_to_convert(tmp_path: Path, name: str, to: str) -> None:
    words = ["convert", path_of(name), str(tmp_path / "out"), "--to", to, "--check"]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=True)
    assert done.stderr.endswith("False\n"), done.stderr
    assert (tmp_path / "out").exists()


def test_importing_the_library_imports_little() -> None:
    code = "import sys, ckpttool; print(sorted({'torch', 'numpy', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
