"""An error names options of the command line there, and arguments in Python: in its message and in its hint."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli import run
from support.cli_reference import commands
from support.paths import ROOT

import ckpttool
from ckpttool.cli.parsing import Option
from ckpttool.errors import SWITCHES, OverwriteError, UsageError, as_arguments

FUNCTIONS = [
    getattr(ckpttool, name) for name in ("open", *ckpttool.__all__) if inspect.isfunction(getattr(ckpttool, name))
]
METHODS = [
    function
    for name in ckpttool.__all__
    if inspect.isclass(getattr(ckpttool, name))
    for _, function in inspect.getmembers(getattr(ckpttool, name), inspect.isfunction)
]
OPTIONS = {
    (name, flag): option
    for name, command in commands().items()
    for option in command.params
    for flag in (*option.opts, *option.secondary_opts)
    if isinstance(option, Option) and flag.startswith("--")
}
# Options of other programs, and what only a terminal or a page shows.
_OF_OTHERS = {"presets.py", "script.py", "description.py", "formats.py"}
_COMMAND = r"(?:`|^)(?:ckpttool|torchrun|convert|reshard|python) [^`]*"


def test_a_hint_names_options_as_the_command_line_does_and_arguments_in_python(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt")
    with pytest.raises(OverwriteError) as caught:
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert str(caught.value).endswith("hint: pass `overwrite=True` to replace it")
    said = run("convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")).stderr
    assert said.endswith("hint: pass `--overwrite` to replace it\n")


@pytest.mark.parametrize(
    ("words", "arguments", "option", "argument"),
    [
        (["--tensors", "x"], {"tensors": ["x"]}, "`--tensors x` matches", '`tensors="x"` matches'),
        (["--dtype", "int3"], {"dtype": ["int3"]}, "`--dtype int3`", '`dtype="int3"`'),
        (["--max-memory", "1"], {"max_memory": "1"}, "`--max-memory 1` is less", "`max_memory=1` is less"),
        (["--rename", "w"], {"rename": ["w"]}, "`--rename w` is not", '`rename="w"` is not'),
        (
            ["--to", "torch", "--to-world", "2"],
            {"to": "torch", "to_world": 2},
            "`--to-world` cannot be used with `--to torch`",
            '`to_world` cannot be used with `to="torch"`',
        ),
    ],
)
def test_a_message_names_options_as_the_command_line_does_and_arguments_in_python(
    words: list[str], arguments: dict[str, Any], option: str, argument: str, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", **arguments)
    assert argument in str(caught.value).partition("\n")[0]
    said = " ".join(run("convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), *words).stderr.split())
    assert option in said


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ("`--overwrite`", "`overwrite=True`"),
        ("`--no-strict`", "`strict=False`"),
        ("`--max-memory`", "`max_memory`"),
        ("`--to dcp`", '`to="dcp"`'),
        ("`--to-world 2`", "`to_world=2`"),
        ("`--ulp -3`", "`ulp=-3`"),
        ("`--max-memory `", '`max_memory=""`'),
        ("`--shapes FROM`", "`shapes=FROM`"),
        ("`--rename OLD=NEW`", '`rename="OLD=NEW"`'),
        ("`--exclude '*.x'`", "`exclude='*.x'`"),
        ("`--like /a b/c.pt`: has", '`like="/a b/c.pt"`: has'),
        ("`--only model --tensors x`", '`only="model", tensors="x"`'),
        ("`--resume-with '... --resume {checkpoint}'`", "`resume_with='... --resume {checkpoint}'`"),
        ("`ckpttool verify --values x`", "`ckpttool verify --values x`"),
        ("`--values`", "`check_values=True`"),
        ("`--trainer.max_steps`, `--x=3`, `---`", "`--trainer.max_steps`, `--x=3`, `---`"),
    ],
)
def test_options_as_arguments(option: str, argument: str) -> None:
    assert str(UsageError(option, hint=f"use {option}")) == f"{argument}\nhint: use {argument}"


def test_every_switch_of_a_function_is_known() -> None:
    parameters = [parameter for function in FUNCTIONS for parameter in inspect.signature(function).parameters.values()]
    assert {p.name for p in parameters if p.default is False} <= SWITCHES


def test_every_option_of_a_function_becomes_its_argument() -> None:
    functions: dict[str, Callable[..., Any]] = {f"ckpttool {function.__name__}": function for function in FUNCTIONS}
    wrong = []
    for (name, flag), option in OPTIONS.items():
        parameters = inspect.signature(functions[name]).parameters if name in functions else {}
        if option.name in parameters:
            is_switch = isinstance(parameters[option.name].default, bool) or flag.startswith("--no-")
            argument, _, value = as_arguments(f"`{flag}`").strip("`").partition("=")
            if argument != option.name or is_switch != (value in ("True", "False")):
                wrong.append((name, flag, option.name))
    assert wrong == []


# Every text in the package --------------------------------------------------------------------------------------------


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and texts of strings that are not docstrings; what is filled in is `X`."""
    is_part = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    is_part |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(p.value if isinstance(p, ast.Constant) else "X" for p in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in is_part:
            yield node.lineno, node.value


def untranslated(text: str, arguments: set[str]) -> list[str]:
    """The options in a text of which Python would not name the argument."""
    text = f"`{text}`" if text.startswith("--") else text  # it is put between backticks elsewhere
    text = re.sub(_COMMAND, "", text)
    quoted = (re.sub(r"'[^']*'", "", quoted) for quoted in re.findall(r"`(--[a-z][^`]*)`", text))
    named = (name for options in quoted for name in re.findall(r"--[a-z-]+", options))
    unknown = [name for name in named if as_arguments(f"`{name}`").strip("`").partition("=")[0] not in arguments]
    return unknown + re.findall(r"--[a-z][\w-]*", re.sub(r"='[^']*'", "", as_arguments(text)))


def test_every_text_names_options_that_become_arguments() -> None:
    arguments = {name for function in (*FUNCTIONS, *METHODS) for name in inspect.signature(function).parameters}
    arguments |= {str(option.name) for option in OPTIONS.values()}  # of commands that are not functions
    paths = sorted((ROOT / "ckpttool").rglob("*.py"))
    files = [path for path in paths if "cli" not in path.parts and path.name not in _OF_OTHERS]
    contents = ((path, content) for path in files if "`--" in (content := path.read_text()) or '"--' in content)
    found = [
        (str(path.relative_to(ROOT)), line, text, names)
        for path, content in contents
        for line, text in texts(ast.parse(content))
        if "--" in text and (names := untranslated(text, arguments))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["pass --shapes", "`--form X`: no", "`--trainer.x 3`", "give `--shapes=X`", "use `x --shapes`"]
)
def test_a_text_that_names_no_argument_is_found(text: str) -> None:
    assert untranslated(text, {"shapes"})
    assert not untranslated("`--shapes X`: `ckpttool convert X --like Y`", {"shapes"})
