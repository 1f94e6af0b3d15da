"""docs/reference/cli.md says what the commands take, every option is explained and every option is tried."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_reference import GENERATED, by_hand, commands, generated, options
from support.paths import ROOT

import ckpttool

PAGE = ROOT / "docs" / "reference" / "cli.md"
COMMANDS = [name for name in commands() if name != "ckpttool"]


def test_the_page_is_what_the_commands_say(request: pytest.FixtureRequest) -> None:
    said = PAGE.read_text()
    now = generated(said)
    if request.config.getoption("--accept"):
        PAGE.write_text(now)
    assert now == said, "run `pytest tests/cli/test_cli_reference.py --accept`"


def test_every_command_has_its_place_on_the_page() -> None:
    assert [m[1] for m in GENERATED.finditer(PAGE.read_text())] == list(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_names_a_heading_of_the_page(name: str) -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE.read_text(), re.MULTILINE)
    assert name.removeprefix("ckpttool ") in headings


@pytest.mark.parametrize("name", ["convert", "reshard", "export", "diff", "verify", "repair"])
def test_an_option_is_an_argument_of_the_library(name: str) -> None:
    """Each that is not about printing, with the same default."""
    parameters = dict(inspect.signature(getattr(ckpttool, name)).parameters)
    # Callbacks, of which the command shows what they say; and that all processes of torchrun call the command.
    parameters = {key: value for key, value in parameters.items() if key not in ("progress", "announce", "shared")}
    of_printing = ("as_json", "quiet", "verbose", "sort", "top", "as_csv", "as_md")
    options = {option.name: option.default for option in commands()[f"ckpttool {name}"].params}
    options = {key: default for key, default in options.items() if key not in of_printing}
    if "no_manifest" in options:
        assert options.pop("no_manifest") is False
        options.setdefault("manifest", parameters["manifest"].default)
    assert set(options) == set(parameters)
    for key, default in options.items():
        if parameters[key].default not in (inspect.Parameter.empty, None, ()):
            assert default == parameters[key].default


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "ckpttool verify-resume"])
def test_a_command_is_a_function_whose_signature_is_its_options(name: str) -> None:
    """Each is one of `cli/options.py`, where it is declared once."""
    signature = inspect.signature(commands()[name].callback).parameters.values()
    assert [p for p in signature if not re.match(r"(Annotated\[)?options\.\w+", str(p.annotation))] == []
    assert [p for p in signature if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)] == []
    # Flags and defaults are said once: a name is that of one option.
    opts = [spelling for option in options(commands()[name]) for spelling in (*option.opts, *option.secondary_opts)]
    assert len(opts) == len(set(opts))


def spellings(name: str) -> list[tuple[str, ...]]:
    return [tuple(option.opts or option.secondary_opts) for option in options(commands()[name])]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name: str) -> None:
    """In words that a person wrote, not only in the generated table."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", "\n".join(by_hand(page.read_text()) for page in pages)))
    assert [found for found in spellings(name) if not words & set(found)] == []


def test_every_option_that_a_message_names_exists() -> None:
    """Not every hint is printed in some test; an option that has another name must not stay in one."""
    known = {word for command in commands().values() for option in options(command) for word in option.opts}
    known |= {word for command in commands().values() for option in options(command) for word in option.secondary_opts}
    known |= {"--help"}
    of_others = {"--nproc-per-node", "--output_dir", "--ckpt-resume"}
    named: dict[str, str] = {}
    of_frameworks = {ROOT / "ckpttool" / one for one in ("cli/presets.py", "analysis/script.py")}
    for path in sorted({*(ROOT / "ckpttool").rglob("*.py")} - of_frameworks):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", node.value), path.name)
    assert {word: name for word, name in named.items() if word not in known | of_others} == {}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_tried(name: str) -> None:
    """Each in some test or transcript, on a command line that calls this command."""
    command = name.removeprefix("ckpttool ").split()
    n = len(command)
    tried = {
        word.partition("=")[0]
        for line in command_lines() if command in (line[:n], line[1 : n + 1])
        for word in line
    }  # fmt: skip
    tried |= {word[:2] for word in tried if re.fullmatch(r"-[a-z]\d+", word)}
    assert [found for found in spellings(name) if not tried & set(found)] == []


@functools.cache
def command_lines() -> list[list[str]]:
    return list(_command_lines())


def _command_lines() -> Iterator[list[str]]:
    for path in ROOT.glob("tests/**/transcripts/*.txt"):
        for line in path.read_text().splitlines():
            if line.startswith("% ckpttool "):
                yield shlex.split(line[2:])
    for path in ROOT.glob("tests/**/test_*.py"):
        if path != Path(__file__):
            yield from _written_in(ast.parse(path.read_text()))


def _written_in(tree: ast.AST) -> Iterator[list[str]]:
    """The words of each call, list and tuple, in their order: `run("show", path, *"--json -q".split())`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Call, ast.List, ast.Tuple)):
            children = node.args if isinstance(node, ast.Call) else node.elts
            strings = (child.value for child in children if isinstance(child, ast.Constant))
            yield [word for text in strings if isinstance(text, str) for word in text.split()]
