"""`ckpttool inspect`: what it prints, in which order, and its exit code."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt
from safetensors.torch import save_file
from support.cli import run
from support.paths import CHECKPOINTS
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from ckpttool.text import csv_cell

DCP = CHECKPOINTS / "dcp" / "hsdp_w4" / "ckpt"


def section(text: str, title: str) -> list[str]:
    """The lines of a section, without its heading."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split("  ")[0] == title)
    end = next((i for i in range(start + 1, len(lines)) if not lines[i]), len(lines))
    return lines[start + 1 : end]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    shutil.copytree(DCP, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__1_0.distcp").unlink()
    return tmp_path / "ckpt"


def test_damage_comes_first(damaged: Path) -> None:
    result = run("inspect", str(damaged))
    lines = result.stdout.splitlines()
    assert lines[2].startswith("! damaged: `__1_0.distcp` is missing")
    assert "damaged" not in "".join(lines[3:])
    assert any(line.endswith(" in 3 files, 1 missing") for line in lines)
    assert result.exit_code == 0


@pytest.mark.parametrize("words", [[], ["--json"], ["-q"], ["--tensors", "*"]])
def test_strict_ends_with_4_if_something_is_damaged(damaged: Path, words: list[str]) -> None:
    for path, expected in ((damaged, 4), (DCP, 0)):
        result = run("inspect", str(path), "--strict", *words)
        assert result.exit_code == expected
        assert run("inspect", str(path), *words).exit_code == 0
        if words == ["--json"]:
            document = json.loads(result.stdout)
            assert (document["exit_code"], document["verdict"] == "damaged") == (expected, expected == 4)


def trained(path: Path, **scheduling: Any) -> torch.optim.Optimizer:
    model = nn.Linear(8, 8)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.25, betas=(0.9, 0.95))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict()}
    torch.save(state, path)
    return optimizer


def test_defaults_are_one_line_and_internal_fields_one_number(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    optimizer = trained(path)
    text = run("inspect", str(path)).stdout
    *rows, last = section(text, "hyper-parameters")
    assert [row.split()[0] for row in rows[1:]] == ["parameters", "lr", "betas", "weight_decay", "initial_lr"]
    defaults = {**torch.optim.AdamW([nn.Parameter(torch.ones(1))]).defaults}
    folded = [item for item in defaults.items() if item[0] not in ("lr", "betas", "weight_decay")]
    assert last == "  defaults: " + ", ".join(f"{name}={value}" for name, value in folded)
    objects = section(text, "objects")
    internal = [key for key in torch.optim.lr_scheduler.StepLR(optimizer, 5).state_dict() if key.startswith("_")]
    assert objects[-1] == f"  {len(internal) - 1} internal fields of the scheduler, shown by -v"
    assert [line.split()[0] for line in objects if "._" in line] == ["lr_scheduler._last_lr"]
    verbose = run("inspect", str(path), "-v").stdout
    assert all(f"lr_scheduler.{key}" in verbose for key in internal)
    assert {row.split()[0] for row in section(verbose, "hyper-parameters")} >= {*defaults}


def test_the_state_of_the_optimizer_is_told_by_kind(tmp_path: Path) -> None:
    trained(tmp_path / "a.pt")
    _, *rows = section(run("inspect", str(tmp_path / "a.pt")).stdout, "optimizer state")
    assert [row.split() for row in rows] == [
        ["step", "float32", "2", "2", "8", "B"],
        ["exp_avg", "float32", "2", "72", "288", "B"],
        ["exp_avg_sq", "float32", "2", "72", "288", "B"],
    ]


@pytest.mark.parametrize("name", ["dcp/flat_optim_w2", "run/torchtitan_w2", "dcp/hsdp_w4"])
def test_groups_are_called_by_number_everywhere(name: str) -> None:
    header, parameters, *_ = section(run("inspect", str(CHECKPOINTS / name / "ckpt")).stdout, "hyper-parameters")
    assert header.split() == ["group", "0", "group", "1"]
    assert parameters.split()[0] == "parameters"


def test_tensors_select_objects_too_in_json() -> None:
    document = json.loads(run("inspect", str(DCP), "--json", "--tensors", "optim.*").stdout)
    assert {entry["part"] for entry in (*document["tensors"], *document["objects"])} == {"optimizer"}
    assert document["objects"]


def test_a_dtype_that_all_rows_share_is_in_the_heading(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.bfloat16) for _ in range(3)))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    text = run("inspect", str(tmp_path / "a.pt")).stdout
    assert "model  bfloat16" in text.splitlines()
    assert "dtype" not in section(text, "model")[0].split()
    model[1].float()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    text = run("inspect", str(tmp_path / "a.pt")).stdout
    assert "dtype" in section(text, "model")[0].split()


def test_closed_modules_say_how_to_open_them() -> None:
    *_, last = section(run("inspect", str(DCP), "--depth", "1").stdout, "model")
    assert last == "  1 module collapsed (--depth 3 expands)"
    assert "closed" not in run("inspect", str(DCP), "--depth", "3").stdout


def listed(path: Path, *words: str) -> list[str]:
    """The names that `-q` lists, which are those of `--json` and of the table too."""
    names = run("inspect", str(path), "-q", *words).stdout.split()
    document = json.loads(run("inspect", str(path), "--json", *words).stdout)
    assert [tensor["name"] for tensor in document["tensors"]] == names
    table = section(run("inspect", str(path), *words).stdout, "tensors")
    assert [line.split()[0] for line in table if not line.startswith("    ")][: len(names)] == names
    return names


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, torch.Tensor]:
    state = {f"layers.{i}.w": torch.ones(i + 1, 100, dtype=torch.bfloat16) for i in sorted(range(12), key=str)}
    state |= {"norm": torch.ones(64), "count": torch.ones(3, dtype=torch.int64)}
    torch.save(state, tmp_path / "a.pt")
    return state


def test_tensors_are_selected_and_sorted(mixed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    layers = [f"layers.{i}.w" for i in range(12)]
    assert listed(path, "--tensors", "*") == list(mixed)
    assert listed(path, "--sort", "name") == ["count", *layers, "norm"]
    by_size = sorted(mixed, key=lambda name: -mixed[name].nbytes)
    assert listed(path, "--sort", "size") == by_size
    assert listed(path, "--top", "4") == by_size[:4]
    assert listed(path, "--top", "4", "--sort", "name") == ["count", *layers[:3]]
    assert listed(path, "--sort", "dtype") == [*layers, "norm", "count"]
    assert listed(path, "--dtype", "float32", "--dtype", "torch.int64") == ["norm", "count"]
    assert set(listed(path, "--min-size", "1kB")) == {name for name, t in mixed.items() if t.nbytes >= 1000}
    assert listed(path, "--tensors", "layers.*", "--min-size", "1kB", "--top", "1") == ["layers.11.w"]
    nbytes = sum(mixed[name].nbytes for name in layers)
    for words in (
        ["inspect", path, "--min-size", "1kB", "-q"],
        ["inspect", path, "--sort", "name", "--top", "3", "-q"],
    ):
        assert run(*map(str, words)).stdout.count("\n") in (3, 8)
    assert f"tensors  12 of 14, {nbytes / 1000:.1f} kB" in run("inspect", str(path), "--dtype", "bf16").stdout


def test_conditions_select(mixed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    wide = [name for name, value in mixed.items() if value.ndim == 2 and value.numel() > 500]
    assert listed(path, "--where", "ndim == 2 and 500 < numel") == wide
    assert listed(path, "--where", "not (dtype == 'bfloat16')") == ["norm", "count"]
    assert listed(path, "--where", "name != 'layers.*' and nbytes < 100") == ["count"]
    assert listed(path, "--where", "'layers.1?.w' == name", "--top", "1") == ["layers.11.w"]
    assert listed(path, "--sort", "order") == list(mixed)


def test_conditions_on_shards_are_those_of_torchs_index() -> None:
    places = FileSystemReader(DCP).read_metadata().storage_data
    files: dict[str, list[str]] = {}
    for index, info in places.items():
        files.setdefault(index.fqn, []).append(info.relative_path)
    rows = list(csv.DictReader(io.StringIO(run("inspect", str(DCP), "--csv").stdout)))
    assert len(rows) > 40
    for row in rows:
        # One rank writes what all four have.
        ranks = 4 if row["placement"] == "Replicate x4" else len({*files[row["name"]]})
        assert (int(row["shards"]), int(row["ranks"])) == (len(files[row["name"]]), ranks)
    assert {row["placement"] for row in rows} >= {"Replicate x4", "Shard(0) x2"}
    expected = {name for name, paths in files.items() if len(paths) > 1}
    assert expected == {*run("inspect", str(DCP), "-q", "--where", "shards > 1").stdout.split()}


HOSTILE = {
    'a "b", c': torch.ones(2, 3),
    "p|q `r` \\": torch.ones(()),
    "<script>alert(1)</script>": torch.ones(4, dtype=torch.float16),
    "*x* _y_ ``": torch.ones(0, 3, dtype=torch.int64),
    "line\nfeed": torch.ones(1),
}


@pytest.fixture
def hostile(tmp_path: Path) -> str:
    torch.save(HOSTILE, tmp_path / "x.pt")
    return str(tmp_path / "x.pt")


def cells(name: str, value: torch.Tensor) -> list[str]:
    shape = "x".join(map(str, value.shape))
    return [
        *(name, "model", str(value.dtype).removeprefix("torch."), shape),
        *(str(value.ndim), str(value.numel()), str(value.nbytes), "1", "1", ""),
    ]


def test_csv(hostile: str) -> None:
    header, *rows = csv.reader(io.StringIO(run("inspect", hostile, "--csv").stdout))
    assert header[:5] == ["name", "part", "dtype", "shape", "ndim"]
    assert rows == [cells(csv_cell(name), value) for name, value in HOSTILE.items()]
    assert all(cell.isprintable() for row in rows for cell in row)
    assert run("inspect", hostile, "--csv", "--top", "1").stdout.splitlines()[1].startswith('"a ""b"", c",model')


def test_markdown(hostile: str) -> None:
    """Read by the parser of GitHub's dialect: cells are the text itself, whatever markup it looks like."""
    text = run("inspect", hostile, "--md").stdout
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    found = ["".join(part.content for part in token.children or []) for token in tokens if token.type == "inline"]
    expected = [cells(name.replace("\n", "\\n"), value) for name, value in HOSTILE.items()]
    assert found[10:] == [cell for row in expected for cell in row]
    assert not any(part.type == "html_inline" for token in tokens for part in token.children or [])


def test_what_does_not_select_is_said(mixed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    for words, said in (
        (["--dtype", "bfloat61"], "did you mean `bfloat16`"),
        (["--min-size", "much"], "is not a size"),
        (["--sort", "age"], "age"),
        (["--top", "0"], "0"),
        (["--where", "nume > 3"], "did you mean `numel`"),
        (["--where", "name > 'a'"], "is not a condition"),
        (["--where", "numel == 'a'"], "is not a condition"),
        (["--where", "name == 3"], "is not a condition"),
    ):
        result = run("inspect", path, *words)
        assert result.exit_code == 2 and said in result.stderr
    for words in (["--dtype", "float64"], ["--dtype", "float64", "--tensors", "norm"]):
        assert "tensors  0 of 14, 0 B" in run("inspect", path, *words).stdout


def test_objects_alone_may_match_in_json() -> None:
    document = json.loads(run("inspect", str(DCP), "--json", "--tensors", "*.lr").stdout)
    assert not document["tensors"]
    assert {entry["name"].rpartition(".")[2] for entry in document["objects"]} == {"lr"}
    assert run("inspect", str(DCP), "--tensors", "*.lr").exit_code == 2


def test_a_tree_of_very_many_lines_is_cut_and_says_so(tmp_path: Path) -> None:
    """A small header can name very many tensors, each with a line of its own."""
    path = str(tmp_path / "a.safetensors")
    save_file({f"{n:04}_w": torch.zeros(1) for n in range(2100)}, path)
    lines = section(run("inspect", path).stdout, "model")
    assert len(lines) == 1 + 2000 + 1 and lines[-2].split()[0] == "1999_w"
    assert lines[-1] == "  100 more, shown by -v"
    assert len(section(run("inspect", path, "-v").stdout, "model")) == 1 + 2100


def test_some_steps_of_a_run_by_an_option() -> None:
    result = run("inspect", str(CHECKPOINTS / "run/trainer/ckpt"), "--steps", "2", "--json")
    assert result.exit_code == 0 and [one["step"] for one in json.loads(result.stdout)["run"]] == [2]
    result = run("inspect", str(CHECKPOINTS / "run/trainer/ckpt"), "--steps", "3")
    assert result.exit_code == 2 and "has no complete checkpoint of step 3" in result.stderr
