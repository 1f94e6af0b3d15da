"""The JSON Schemas of docs/reference/schemas, and what every command prints with `--json`, checked against them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import json_schemas
from support.cli import FULL, run
from support.damage import flipped_copy
from support.paths import CHECKPOINTS, ROOT

SHARDED, SINGLE = str(CHECKPOINTS / "dcp/hsdp_w4/ckpt"), str(CHECKPOINTS / "safetensors/single/ckpt.safetensors")
NORM = "model.norm.weight"


@pytest.mark.parametrize("command", json_schemas.DOCUMENTS)
def test_the_schemas_are_current(command: str, request: pytest.FixtureRequest) -> None:
    file, current = json_schemas.FOLDER / f"{command}.json", json_schemas.made(command)
    if request.config.getoption("--accept"):
        file.write_text(current)
    assert file.read_text() == current, "run `pytest tests/cli/test_json_schemas.py --accept`"


def test_everything_in_a_schema_is_described_and_closed() -> None:
    names = set()
    for document in map(json.loads, map(json_schemas.made, json_schemas.DOCUMENTS)):
        names |= set(document["properties"])
        assert document["additionalProperties"] is False
        for one in [document, *document.get("$defs", {}).values()]:
            # Of an error there are other fields, which depend on it.
            assert one["additionalProperties"] is (document["$id"] == "error.json" and one is not document)
            assert one["description"] and all(field["description"] for field in one["properties"].values())
    assert {"exit_code", "world_size", "payload_bytes", "file_bytes"} <= names
    assert not names & {"world", "says", "whole", "same", "disk", "free", "memory", "asked", "bytes"}


def test_what_is_not_of_a_schema_is_found() -> None:
    document = json.loads(run("formats", "--json").stdout)
    for wrong in ({"surprise": 1}, {"exit_code": "0"}, {"schema": "ckpttool/formats/1"}):
        with pytest.raises(AssertionError):
            json_schemas.check(json.dumps(document | wrong))


# `run` checks what it gets of every command that is called with `--json`, in this and in all other tests.


@pytest.mark.sweep(2)
@pytest.mark.parametrize("folder", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_inspect(folder: str) -> None:
    below = {"other": "*", "deepspeed": "*/saved"}
    paths = list((CHECKPOINTS / folder).glob(below.get(folder, "*/ckpt*")))
    assert paths
    for path in paths:
        done = run("inspect", str(path), "--json")
        assert done.exit_code == json.loads(done.stdout)["exit_code"], path


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (["show", SHARDED, NORM], 0),
        (["show", str(CHECKPOINTS / "dcp/dtypes/ckpt"), "model.a.bfloat16"], 2),
        (["convert", SHARDED, "OUT/a.pt"], 0),
        (["convert", SHARDED, "OUT/a.safetensors", "--only", "model", "--dtype", "bfloat16", "-n"], 0),
        (["convert", FULL, "OUT/ranks", "--to", "fsdp1", "--to-world", "2"], 0),
        (["reshard", SHARDED, "OUT/b", "--to-mesh", "shard=2,tp=2"], 0),
        (["export", SINGLE, "OUT/c", "--no-card"], 0),
        (["diff", SHARDED, FULL], 1),
        (["diff", SHARDED, SHARDED, "--rtol", "1e-3"], 0),
        (["diff", FULL, str(CHECKPOINTS / "torch/dtypes/ckpt.pt")], 1),
        (["verify", SHARDED, "--values", "--write-manifest", "OUT/m.json"], 0),
        (["verify", SINGLE], 0),
        (["verify", "DAMAGED"], 4),
        (["verify", SHARDED, "--against", FULL], 1),
        (["verify-resume", "audit", SHARDED], 0),
        (["verify-resume", "audit", SINGLE, "--no-values"], 1),
        (["verify-resume", "audit", str(CHECKPOINTS / "run/lightning_w2/ckpt")], None),
        (["clean", "OUT"], 0),
        (["samples", "OUT/s"], 0),
        (["formats"], 0),
        *(([command, "nothing"], 2) for command in ("convert", "reshard", "export", "repair", "diff", "show")),
        *(([command, "nothing"], 3) for command in ("inspect", "verify")),
        (["convert", SHARDED, FULL], 6),
        (["convert", FULL, "OUT/l.safetensors"], 5),
        (["repair", SHARDED, "OUT/r"], 0),
        (["verify-resume", "trial", "--recipe", "nothing.py"], 2),
    ],
    ids=lambda value: " ".join(value).replace(str(CHECKPOINTS), "") if isinstance(value, list) else None,
)
def test_each_command(words: list[str], exit_code: int | None, tmp_path: Path) -> None:
    damaged = flipped_copy(Path(SHARDED), "model.embed.weight", tmp_path) if "DAMAGED" in words else ""
    words = [word.replace("OUT", str(tmp_path)).replace("DAMAGED", str(damaged)) for word in words]
    done = run(*words, "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == said["exit_code"] and exit_code in (None, said["exit_code"]), done.stdout[:500]
    if "error" not in said:
        assert said["verdict"] and said["message"]


def test_the_page_names_every_schema() -> None:
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    for command in json_schemas.DOCUMENTS:
        assert f"## ckpttool/{command}/2\n\n[JSON Schema](schemas/{command}.json)" in page
