"""How a command resumes and where it writes, from its script alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpttool.analysis.script import Script
from ckpttool.errors import UsageError
from ckpttool.fleet import ways
from ckpttool.resume.runs import run

PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--out')\n"


def script(folder: Path, text: str, **modules: str) -> str:
    for name, more in modules.items():
        (folder / f"{name}.py").write_text(more)
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (PARSER + "parser.add_argument('-r', '--resume', default='')", "... --resume {checkpoint}"),
        (PARSER + "parser.add_argument('--resume', action='store_true')", "... --resume"),
        (PARSER + "parser.add_argument('--resume-epoch', type=int)", "... --resume-epoch {step}"),
        (PARSER + "parser.add_argument('--load-checkpoint')", "... --load-checkpoint {checkpoint}"),
        # What counts, saves, or turns something off resumes nothing.
        (PARSER + "parser.add_argument('--checkpoint-every')\nparser.add_argument('--no-resume')", "..."),
        ("import click\n@click.option('-r', '--resume-from')\ndef main(): ...", "... --resume-from {checkpoint}"),
        ("import typer\ndef main(out: str, resume_path: str = ''): ...", "... --resume-path {checkpoint}"),
        ("import fire\ndef train(out, resume_path=None): ...", "... --resume_path {checkpoint}"),
        ("import os\nx = os.environ.get('RESUME_FROM')", "env RESUME_FROM={checkpoint} ..."),
        ("from own import parse", "... --resume_from {checkpoint}"),
        ("from transformers import HfArgumentParser, TrainingArguments", "... --resume_from_checkpoint {checkpoint}"),
        ("init_from = 'scratch'\nconfig = {key: globals()[key] for key in keys}", "... --init_from={checkpoint}"),
        ("import tyro\n@dataclass\nclass A:\n    resume_from: str | None = None", "... --resume-from {checkpoint}"),
        ("raise SystemExit('it is not run')", "..."),
        ("not python(", "..."),
    ],
)
def test_the_option_is_read_from_the_script(text: str, shown: str, tmp_path: Path) -> None:
    command = ["python", script(tmp_path, text, own="parser.add_argument('--resume_from')"), "--out", "OUT"]
    assert ways.find(Script(command), command, "OUT").shown() == shown


def test_an_option_that_the_command_has_is_not_given_again(tmp_path: Path) -> None:
    command = ["python", script(tmp_path, PARSER + "parser.add_argument('--resume')"), "--out", "OUT", "--resume=auto"]
    assert ways.find(Script(command), command, "OUT").shown() == "..."


def test_two_options_that_fit_alike_are_a_question(tmp_path: Path) -> None:
    text = PARSER + "parser.add_argument('--resume')\nparser.add_argument('--resume-from')"
    command = ["python", script(tmp_path, text), "--out", "OUT"]
    with pytest.raises(
        UsageError, match=r"`... --resume {checkpoint}` \(train.py line 4\) and `... --resume-from {checkpoint}`"
    ) as one:
        ways.find(Script(command), command, "OUT")
    assert "... --resume-from {checkpoint}" in (one.value.hint or "")


def test_the_output_directory_is_the_value_of_its_option_or_asked_for(tmp_path: Path) -> None:
    path = script(tmp_path, PARSER)
    assert ways.output(Script(["python", path]), ["python", path, "--out", "runs/x"], "OUT") == "runs/x"
    with pytest.raises(UsageError, match=r"its script has `... --out OUT` \(train.py line 3\)") as one:
        ways.output(Script(["python", path]), ["python", path], "OUT")
    assert f"`python {path} --out OUT`" in (one.value.hint or "")
    path = script(tmp_path, "import os\nos.makedirs('runs/exp', exist_ok=True)")
    with pytest.raises(UsageError, match="its script has `runs/exp`") as one:
        ways.output(Script(["python", path]), ["python", path], "OUT")
    assert one.value.hint == "`--out runs/exp` before the `--`"


TRAIN = """
import argparse, os, numpy
from safetensors.numpy import load_file, save_file
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args, step, folder = parser.parse_args(), 0, "runs/fixed"
weight = numpy.zeros(2)
os.makedirs(folder, exist_ok=True)
if args.resume and LOADS:
    path = args.resume if args.resume != "auto" else "absent"
    step, weight = int(path.rpartition("_")[2].split(".")[0]), load_file(path)["weight"]
while step < 4:
    step, weight = step + 1, weight + step + 1
    print(f"step {step}: loss {weight[0]}")
    save_file({"weight": weight}, f"{folder}/m_{step}.safetensors")
"""


@pytest.mark.parametrize("loads", [True, False])
def test_a_script_with_a_folder_of_its_own_needs_one_option(
    loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, script(tmp_path, TRAIN.replace("LOADS", str(loads)))]
    report = run(command, out="runs/fixed", timeout=60.0, inject_switches=False)
    assert report.verdict == ("same" if loads else "failed"), report.message
    assert not (tmp_path / "runs" / "fixed").exists()
    if loads:
        assert report.resumed_with == "... --resume {checkpoint}: train.py line 5"
    else:
        # Each value was tried, and a wrong one is never a success.
        assert all(f"with `... --resume {value}`" in report.message for value in ("{checkpoint}", "auto", "{out}"))
    (tmp_path / "runs" / "fixed").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        run(command, out="runs/fixed")


def test_what_a_value_that_does_not_resume_leaves_is_no_cause(tmp_path: Path) -> None:
    """The script knows `auto` alone, and begins at its start with a path."""
    text = TRAIN.replace('folder = parser.parse_args(), 0, "runs/fixed"', "folder = parser.parse_args(), 0, None")
    text = text.replace("args, step", 'parser.add_argument("--out")\nargs, step')
    text = text.replace("os.makedirs", "folder = args.out\nos.makedirs").replace("LOADS", 'args.resume == "auto"')
    text = text.replace('path = args.resume if args.resume != "auto" else "absent"', "path = newest(folder)")
    text = text.replace(
        "weight = numpy",
        "newest = lambda folder: max(os.path.join(folder, name) for name in os.listdir(folder))\nweight = numpy",
    )
    command = [sys.executable, script(tmp_path, text), "--out", "OUT"]
    report = run(command, timeout=60.0, inject_switches=False)
    assert report.verdict == "same" and "--resume auto" in report.resumed_with, report.message
    assert not report.causes and report.cause is None
