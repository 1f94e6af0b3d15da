"""The command `ckpttool export`: what it prints, its exit codes, and every option once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cli import run

from ckpttool.errors import CorruptError, LossError, OverwriteError, UsageError
from ckpttool.models import architecture as expected


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A training state with two models of a layer each."""
    model = {"net.layers.0.w": torch.randn(4, 6), "net.layers.1.w": torch.randn(4, 6), "net.extra": torch.ones(3)}
    torch.save({"model": model, "network": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_every_option_does_what_it_says(source: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "own", "dtype": "float32"}')
    (tmp_path / "map.json").write_text('{"rules": [{"from": "blocks.{n}.w", "to": "h.{n}.w", "rows": "halves"}]}')
    out = tmp_path / "out"
    words = [
        "export", source, out, "--only", "model", "--exclude", "*.extra", "--strip-prefix", "net",
        "--rename", "layers=blocks", "--map", tmp_path / "map.json", "--head-dim", "4", "--names", "released",
        "--dtype", "bfloat16", "--dtype-strict", "--max-shard-size", "50B",
        "--assets", tmp_path / "base", "--no-strict", "--no-card", "--threads", "2", "--max-memory", "100MB", "--check",
    ]  # fmt: skip
    done = run("export", *words[1:], "--dry-run", "-v")
    assert done.exit_code == 0, done.output
    assert not out.exists()
    assert "would write" in done.stdout
    assert "key map" in done.stdout
    done = run(*words)
    assert done.exit_code == 0, done.output
    state = torch.load(source)["model"]
    found = load_file(out / "model-00002-of-00002.safetensors")
    assert torch.equal(found["h.1.w"], state["net.layers.1.w"][[0, 2, 1, 3]].to(torch.bfloat16))
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    assert run("export", *words[1:]).exit_code == OverwriteError.exit_code
    listed = tmp_path / "sums.json"
    told = json.loads(run("export", *words[1:], "--overwrite", "--json", "--manifest", listed).stdout)
    assert set(json.loads(listed.read_text())["files"]) == {p.name for p in out.iterdir()}
    assert told["schema"] == "ckpttool/export/2"
    assert (told["key_map"], told["parameters"]) == (str(tmp_path / "map.json"), {"bfloat16": 48})
    assert told["not_compared"] == "the config names no architecture"
    done = run("export", *words[1:], "--overwrite", "-q")
    assert (done.exit_code, done.stdout) == (0, "")


def test_flat_files_have_shapes_from_elsewhere(source: Path, tmp_path: Path) -> None:
    # What has no flat tensors has no use for them, and is exported all the same.
    done = run("export", source, tmp_path / "out", "--only", "network", "--shapes", source)
    assert done.exit_code == UsageError.exit_code
    assert "has 2 models" in done.stderr


def test_each_mistake_has_its_code_and_a_hint(source: Path, tmp_path: Path) -> None:
    done = run("export", source, tmp_path / "out")
    assert done.exit_code == UsageError.exit_code
    assert "hint: pass `--only model`" in done.stderr
    torch.save({"w": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "complex.pt")
    assert run("export", tmp_path / "complex.pt", tmp_path / "out").exit_code == LossError.exit_code
    (tmp_path / "cut.pt").write_bytes(source.read_bytes()[:-40])
    assert run("export", tmp_path / "cut.pt", tmp_path / "out").exit_code == CorruptError.exit_code
    assert run("export", tmp_path / "none.pt", tmp_path / "out").exit_code == 3
    assert not (tmp_path / "out").exists()


# What the config says -------------------------------------------------------------------------------------------------


MODEL = expected.Expected(
    "OwnModel", "5.0", {"m.a": (2, 3), "m.b": (3,), "head": (2, 3)}, {"m.a": (2, 3), "m.b": (3,)}, {"head": "m.a"},
    "m", ["^skip"], ["^old"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "missing", "unexpected", "misshapen"),
    [
        ({"m.a": (2, 3), "m.b": (3,)}, [], [], []),
        ({"m.a": (2, 3), "m.b": (3,), "old.x": (1,)}, [], [], []),
        ({"head": (2, 3), "m.b": (3,)}, [], [], []),
        ({"m.a": (2, 3), "head": (2, 3), "m.b": (3,)}, [], [], []),
        ({"a": (2, 3), "b": (3,)}, [], [], []),
        ({"m.a": (2, 3)}, ["m.b"], [], []),
        ({"m.a": (2, 3), "m.b": (3,), "x": (1,)}, [], ["x"], []),
        ({"m.a": (3, 2), "m.b": (3,)}, [], [], ["m.a"]),
    ],
)
def test_what_differs_from_the_config(
    found: dict[str, tuple[int, ...]], missing: list[str], unexpected: list[str], misshapen: list[str]
) -> None:
    compared = expected.compare(found, MODEL)
    assert (compared.missing, compared.unexpected) == (missing, unexpected)
    assert [name for name, _, _ in compared.misshapen] == misshapen


@pytest.mark.parametrize("names", [("m.a", "m.b"), ("head", "m.b")])
def test_a_prefix_of_all_names_is_known(names: tuple[str, str]) -> None:
    found = {f"net.{names[0]}": (2, 3), f"net.{names[1]}": (3,)}
    compared = expected.compare(found, MODEL)
    assert (compared.differs, compared.prefix) == (False, "-net.")
    # With other tensors beside them, it is left to who knows what these are.
    found["loss.w"] = (1,)
    compared = expected.compare(found, MODEL)
    assert compared.differs and not compared.prefix
    assert "--strip-prefix net" in (expected.refusal(compared, found, MODEL, "config.json").hint or "")


def test_a_prefix_does_not_make_two_names_one() -> None:
    found = {"net.m.a": (2, 3), "net.m.b": (3,), "m.b": (3,)}
    assert expected.compare(found, MODEL).differs


def test_a_model_that_is_not_the_configs_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"architectures": ["OwnModel"]}')
    monkeypatch.setattr(expected, "expected", lambda config, dtype: MODEL)
    words = ["export", source, tmp_path / "out", "--only", "model", "--assets", tmp_path / "base"]
    done = run("export", *words[1:])
    assert done.exit_code == CorruptError.exit_code
    assert "2 missing: `m.a`, `m.b`; 3 unexpected: `net.layers.0.w`" in done.stderr
    assert not (tmp_path / "out").exists()
    done = run("export", *words[1:], "--no-strict", "--json")
    assert done.exit_code == 0
    assert "2 missing" in json.loads(done.stdout)["not_compared"]


def test_what_cannot_be_compared_is_said_at_once() -> None:
    for config, why in (
        ({"auto_map": {"AutoModel": "x.Y"}}, "code of its own"),
        ({"model_type": "x"}, "names no architecture"),
    ):
        assert why in str(expected.expected(config))
