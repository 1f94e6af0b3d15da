"""`ckpttool diff` as it is typed: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli import run
from support.paths import CHECKPOINTS

from ckpttool.analysis.differences.elements import Difference
from ckpttool.analysis.differences.results import Diff, Side, TensorDifference
from ckpttool.reports.differences import _values
from ckpttool.reports.terminal import Terminal

DCP = CHECKPOINTS / "dcp/fsdp2_w4" / "ckpt"


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    one = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "c": torch.ones(2)}, "lr": 0.1}
    other = {
        "model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4).bfloat16(), "d": torch.ones(2)},
        "lr": math.inf,
    }
    other["model"]["a"][1, 1] = math.nan  # type: ignore[index]
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(one, paths[0])
    torch.save(other, paths[1])
    return paths


def test_the_same() -> None:
    done = run("diff", DCP, DCP, "--threads", 1)
    assert done.exit_code == 0 and "are the same" in done.stdout and done.stderr == ""
    assert run("diff", DCP, DCP, "-q").stdout == ""
    assert "optimizer (optim)" in run("diff", DCP, DCP, "--verbose").stdout
    assert run("diff", DCP, CHECKPOINTS / "dcp/fsdp2_w2" / "ckpt", "--quiet").exit_code in (0, 1)


def test_what_differs(two: tuple[Path, Path]) -> None:
    done = run("diff", *two)
    assert done.exit_code == 1 and "differ" in done.stdout.splitlines()[0]
    for words in (
        "only in A",
        "only in B",
        "layout",
        "values",
        "objects",
        "1 of 6",
        "[1, 1]",
        "bfloat16",
        "nan",
        "inf",
    ):
        assert words in done.stdout, done.stdout
    quiet = run("diff", *two, "-q")
    assert quiet.stdout.splitlines() == ["- model.c", "+ model.d", "! model.a", "! model.b", "! lr"]
    assert quiet.exit_code == 1


def test_json(two: tuple[Path, Path]) -> None:
    done = run("diff", *two, "--json")
    said: dict[str, Any] = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (
        done.exit_code == said["exit_code"] == 1
        and said["schema"] == "ckpttool/diff/2"
        and said["verdict"] == "differs"
    )
    assert [one["name"] for one in said["only_a"] + said["only_b"]] == ["model.c", "model.d"]
    first, second = said["tensors"]
    assert (first["name"], first["kinds"], first["index"]) == ("model.a", ["values"], [1, 1])
    assert first["values"]["values"] == [4.0, "nan"] and first["values"]["nans"] == 1
    assert (second["kinds"], second["dtypes"]) == (["dtype"], ["float32", "bfloat16"])
    assert said["objects"] == [{"name": "lr", "part": "other", "at": "", "a": 0.1, "b": "inf"}]
    assert said["total"]["differing"] == 1 and "sums" not in said["parts"][0]
    wrong = run("diff", two[0], two[1].parent / "none", "--json")
    assert wrong.exit_code == 3 and json.loads(wrong.stdout)["error"]["kind"] == "cannot read"


def test_options(two: tuple[Path, Path]) -> None:
    a, b = two
    done = run("diff", a, b, "--only", "model", "--rename", "c=d", "--exclude", "a", "--ignore-dtype")
    assert done.exit_code == 0, done.stdout
    assert run("diff", a, b, "--drop", "model", "--atol", "1").exit_code == 1
    done = run("diff", a, b, "--tensors", "model.b", "--exclude", "lr", "--ulp", "1", "--rtol", "1e-3")
    assert done.exit_code == 1 and "dtype" in done.stdout and "\nvalues" not in done.stdout
    assert run("diff", a, b, "--sharding", "--strip-wrappers").exit_code == 1
    assert run("diff", a, a, "--sharding", "--strip-wrappers", "--shapes", a).exit_code == 0
    assert run("diff", DCP, DCP, "--strip-prefix", "layers").exit_code in (0, 2)
    for words in (("--rtol", "much"), ("--atol", "-1"), ("--ulp", "-3"), ("--only", "optimiser")):
        done = run("diff", a, b, *words)
        assert done.exit_code == 2 and done.stderr.startswith("error: "), done.stderr


def test_a_tolerance_is_said(two: tuple[Path, Path]) -> None:
    done = run("diff", *two, "--atol", "0.5", "--rtol", "1e-5")
    assert "by rtol 1e-05, atol 0.5" in done.stdout and "beyond" in done.stdout


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    torch.save({"model": {"w.a": torch.ones(2)}, "optim": {"state": {}, "param_groups": []}}, tmp_path / "a.pt")
    torch.save({"w.a": torch.ones(2)}, tmp_path / "b.pt")
    done = run("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert "hint: " in done.stderr and "--only model" in done.stderr


def test_long_lists_are_cut(tmp_path: Path) -> None:
    torch.save({f"w{i}": torch.full((2,), i) for i in range(30)}, tmp_path / "a.pt")
    torch.save({f"w{i}": torch.full((2,), i + 1) for i in range(30)}, tmp_path / "b.pt")
    done, whole = (run("diff", tmp_path / "a.pt", tmp_path / "b.pt", *words) for words in ((), ("-v",)))
    assert "10 more, shown by -v" in done.stdout and "w29 " not in done.stdout
    assert "w29 " in whole.stdout and "more, shown" not in whole.stdout


def test_what_a_name_can_do_to_a_terminal(tmp_path: Path) -> None:
    torch.save({"w\x1b[31m": torch.ones(2), "lr": "\x1b]0;x\x07"}, tmp_path / "a.pt")
    torch.save({"w\x1b[31m": torch.zeros(2), "lr": "y"}, tmp_path / "b.pt")
    for words in ((), ("-q",), ("-v",)):
        assert "\x1b" not in run("diff", tmp_path / "a.pt", tmp_path / "b.pt", *words).stdout


def test_torch_is_not_imported(two: tuple[Path, Path]) -> None:
    code = (
        "import sys\nfrom ckpttool.__main__ import main\nsys.argv = ['ckpttool', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    print(stop.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, "diff", *map(str, two)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr.splitlines()[-1] == "1 False", done.stderr


def _printed(result: Any, columns: int | None, verbose: bool = False) -> str:
    """What a terminal of so many columns shows of the values, or a pipe if there are none."""
    stream = io.StringIO()
    terminal = Terminal(stream, verbose)
    terminal.width = columns
    terminal.blocks([_values(result, result.ranked(), is_list=verbose)])
    return stream.getvalue()


def _names_shown(text: str) -> list[str]:
    """The first column of a table of values, each name with its lines put together."""
    names: list[str] = []
    for line in text.splitlines()[3:]:
        name = line[2:].split("  ")[0].strip()
        if re.search(r"\s0\.25\b", line):
            names.append(name)
        else:
            names[-1] += name
    return names


@given(
    columns=st.integers(60, 200),
    modules=st.lists(st.text("abcdefgh_", min_size=1, max_size=90), min_size=1, max_size=3, unique=True),
    layers=st.lists(st.integers(0, 120), min_size=1, max_size=4, unique=True),
)
@settings(max_examples=60)
def test_names_never_become_alike(columns: int, modules: list[str], layers: list[int]) -> None:
    values = Difference("float32", numel=16_777_216, differing=16_777_215, values=(0.123456, -0.123457), relative=0.5)
    values.relative_distance = 0.25
    names = [f"model.layers.{layer}.mlp.{module}_proj.weight" for layer in layers for module in modules]
    tensors = [
        TensorDifference(name, "model", ["values"], ("float32",) * 2, ((4096, 4096),) * 2, values, [4095, 4095])
        for name in names
    ]
    result = Diff(Side("a"), Side("b"), tensors=tensors)
    text = _printed(result, columns, verbose=True)
    shown = _names_shown(text)
    within = match[1] + "." if (match := re.search(r", in (\S+)$", text.splitlines()[1])) else ""
    assert all(len(line) <= columns for line in text.splitlines()[2:])
    assert sorted(within + name for name in shown) == sorted(names)


def test_rows_are_sorted_and_layers_folded(tmp_path: Path) -> None:
    one = {f"layers.{i}.up.weight": torch.ones(4) for i in range(12)} | {"head": torch.ones(4), "same": torch.ones(2)}
    other = {name: tensor * 1.01 if name != "same" else tensor for name, tensor in one.items()}
    other["head"] = one["head"] * 3
    for name, state in (("a.pt", one), ("b.pt", other)):
        torch.save(state, tmp_path / name)
    lines = run("diff", tmp_path / "a.pt", tmp_path / "b.pt").stdout.splitlines()
    assert any(
        line.endswith("13 of 14 tensors, all in the part model; largest relative L2 distance 2 in head")
        for line in lines
    )
    assert [line.split()[0] for line in lines[-2:]] == ["head", "layers.0-11.up.weight"] and "x12" in lines[-1]
    verbose = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "-v").stdout.splitlines()
    assert [line.split()[0] for line in verbose[-12:]] == [f"layers.{i}.up.weight" for i in range(12)]


def test_new_nans_are_said(two: tuple[Path, Path]) -> None:
    one, other = two
    assert "1 new NaN in B" in run("diff", one, other).stdout
    assert "new NaN" not in run("diff", other, one).stdout
    document = json.loads(run("diff", other, one, "--json").stdout)
    assert [t["values"]["new_nans"] for t in document["tensors"] if t["name"].endswith("a")] == [0]


def test_lists_are_in_the_order_of_the_layers(tmp_path: Path) -> None:
    layers = {f"layers.{i}.weight": torch.ones(2) for i in sorted(range(12), key=str)}
    torch.save({"head": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"head": torch.ones(2), **layers}, tmp_path / "b.pt")
    _, _, rows = run("diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")).stdout.partition("only in B")
    names = [line.split()[0] for line in rows.splitlines() if "layers" in line]
    assert names == [f"layers.{i}.weight" for i in range(12)]


@pytest.fixture
def steps(tmp_path: Path) -> tuple[Path, Path]:
    """Two steps: in each tensor a sign changes, so that the largest relative difference is 2 in all."""
    a = {f"layers.{i}.w": torch.tensor([1.0, 2.0, -1e-6]) for i in range(3)} | {"head.weight": torch.ones(3)}
    b = {name: value * (1 + 0.1 * i) for i, (name, value) in enumerate(a.items())}
    for value in b.values():
        value[2] = 1e-6
    for name, state in (("a.pt", a), ("b.pt", b)):
        torch.save(
            {"model": state, "optimizer": {"state": {"layers.0.w": {"exp_avg": state["layers.0.w"]}}}}, tmp_path / name
        )
    return tmp_path / "a.pt", tmp_path / "b.pt"


def test_what_one_side_lacks_is_not_counted_as_compared(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "s": 1, "t": 2}, tmp_path / "a.pt")
    torch.save({"a": torch.zeros(2), "b": torch.ones(2), "d": torch.ones(3), "s": 3}, tmp_path / "b.pt")
    said = run("diff", tmp_path / "a.pt", tmp_path / "b.pt").stdout
    assert "1 of 2 tensors and 1 of 1 object" in said
    assert "compared  3 names, 16 B of values, bitwise; 2 only in A; 1 only in B\n" in said


def test_what_changed_most_comes_first(steps: tuple[Path, Path]) -> None:
    document = json.loads(run("diff", *steps, "--json").stdout)
    a, b = (torch.load(path, weights_only=True)["model"] for path in steps)
    expected = {name: ((b[name] - a[name]).double().norm() / a[name].double().norm()).item() for name in a}
    for tensor in document["tensors"]:
        name = tensor["name"].removeprefix("model.")
        if name in expected:
            assert tensor["values"]["relative_distance"] == pytest.approx(expected[name], rel=1e-6)
    lines = run("diff", *steps).stdout.split("\n\n")
    assert f"largest relative L2 distance is {expected['head.weight']:.3g} in model.head.weight" in lines[0]
    modules = next(text for text in lines if text.startswith("modules")).splitlines()
    assert [line.split()[0] for line in modules[2:]] == ["head", "layers.2", "layers.1", "layers.0"]
    values = next(text for text in lines if text.startswith("values of model")).splitlines()
    assert [line.split()[0] for line in values[2:]] == ["model.head.weight", "model.layers.0-2.w"]
    module = {(one["name"], one["moment"]): one for one in document["modules"]}
    assert module["layers.2", ""]["relative_distance"] == pytest.approx(expected["layers.2.w"])
    assert module["layers.0", "exp_avg"]["tensor_count"] == 1


def test_a_new_nan_comes_first_and_is_not_the_largest_distance(tmp_path: Path) -> None:
    a = {"x": torch.ones(4), "y": torch.ones(4)}
    torch.save({"model": a}, tmp_path / "a.pt")
    torch.save({"model": {"x": torch.tensor([1.0, 1.0, 1.0, torch.nan]), "y": a["y"] * 2}}, tmp_path / "b.pt")
    text = run("diff", tmp_path / "a.pt", tmp_path / "b.pt").stdout
    assert "1 new NaN in B; largest relative L2 distance 1 in model.y" in text
    values = next(part for part in text.split("\n\n") if part.startswith("values")).splitlines()
    assert values[0].endswith("2, new NaN, then largest rel L2 first")
    assert [line.split()[0] for line in values[2:]] == ["model.x", "model.y"]


def test_lists_are_sorted_and_cut(steps: tuple[Path, Path]) -> None:
    def names(*words: object) -> list[str]:
        return [line.split(",")[0] for line in run("diff", *steps, *words, "--csv").stdout.splitlines()[1:]]

    assert names("--top", 2) == ["model.head.weight", "model.layers.2.w"]
    assert names("--sort", "abs", "--top", 1) == ["model.head.weight"]
    assert names("--sort", "name", "--only", "model") == ["head.weight", *(f"layers.{i}.w" for i in range(3))]
    for key in ("l2", "abs", "rel", "ulp", "cosine", "differing", "name"):
        assert len(names("--sort", key)) == 5
    head, rule, first = run("diff", *steps, "--top", 1, "--md").stdout.splitlines()
    assert head.startswith("| name | part | differs |") and "`model.head.weight`" in first and set(rule) <= set("|-: ")
    assert "modules" not in run("diff", *steps, "--sort", "ulp").stdout
    assert run("diff", *steps, "--sort", "size").exit_code == 2


def test_a_list_has_all_that_differs(two: tuple[Path, Path]) -> None:
    lines = [line.split(",") for line in run("diff", *two, "--csv").stdout.splitlines()]
    found = {line[0]: line[2] for line in lines[1:]}
    expected = {"model.a": "values", "model.b": "dtype", "model.c": "only in A", "model.d": "only in B", "lr": "object"}
    assert found == expected and {len(line) for line in lines} == {len(lines[0])}


def test_the_heat_map_of_the_page_is_of_relative_distances(steps: tuple[Path, Path], tmp_path: Path) -> None:
    run("diff", *steps, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    document = json.loads(text.partition('id="document">')[2].partition("</script>")[0])
    assert document["listed"][0] == "relative L2 distance"
    assert len({*document["tensors"]["values"]["relative L2 distance"]}) == 4


def test_an_optimizer_is_compared_by_its_moments(tmp_path: Path) -> None:
    """Its step counters are larger than all of them; and what it numbers is named, or said to be a number."""
    states = []
    for steps in (2, 4):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        states.append({"model": model.state_dict(), "optim": optimizer.state_dict()})
    paths = [tmp_path / "2.pt", tmp_path / "4.pt"]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    document = json.loads(run("diff", *map(str, paths), "--json").stdout)
    moments = [
        torch.cat([one[key].flatten() for one in state["optim"]["state"].values() for key in ("exp_avg", "exp_avg_sq")])
        for state in states
    ]
    expected = float((moments[1] - moments[0]).double().norm() / moments[0].double().norm())
    (part,) = (one for one in document["parts"] if one["part"] == "optimizer (optim)")
    assert part["relative_distance"] == pytest.approx(expected) and part["equal"] == 0 < 1 < part["differing"]
    assert {one["name"] for one in document["modules"]} == {"0", "1"}
    assert "in the model, the largest relative L2 distance is" in document["message"]
    for path, state in zip(paths, states, strict=True):
        torch.save(state["optim"], path)
    said = run("diff", *map(str, paths)).stdout
    assert "  parameter 3 " in said and "; largest relative L2 distance " in said
