"""Mistakes in what is typed: what is said makes the next command right, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import transformers
from support.cli import FULL, environment, run, spawn
from support.paths import CHECKPOINTS

import ckpttool
from ckpttool.errors import UsageError

MISTAKES = {
    "convert full.pt o.pt --rename model.embed": "hint: write OLD=NEW, such as `--rename 'model.*=*'`",
    "convert full.pt o.pt --strip-prefix module.": "hint: names in the model begin with `tokens_seen`, ",
    "convert full.pt o --to safetensors --max-shard-size 5": "hint: write a unit: `--max-shard-size 5GB`",
    "convert full.pt o --producer hf": "hint: `ckpttool export` writes a model for transformers and vLLM",
    "convert full.pt o --to gguf": "hint: `convert_hf_to_gguf.py` of llama.cpp makes one",
    "convert full.pt o.distcp": "hint: a DCP checkpoint is a directory: name that",
    "convert full.pt o.pt --force": "hint: did you mean `--overwrite`?",
    "convert full.pt o.pt --bf16": "hint: did you mean `--dtype bfloat16`?",
    "convert full.pt o.pt --weights-only": "hint: did you mean `--only model`?",
    "convert full.pt o --format dcp": "hint: did you mean `--to`?",
    "convert full.pt o --world-size 4": "hint: did you mean `--to-world`?",
    "convert full.pt --output o.pt": "hint: what is written is the last argument: `ckpttool convert SRC DST`",
    "reshard full.pt o 4": "hint: did you mean `--to-world 4`?",
    "diff full.pt full.pt --tolerance 1e-3": "hint: did you mean `--rtol` or `--atol`?",
    "report full.pt page.html": "hint: `-o page.html` writes the page to that file",
    "show full.pt": "hint: `ckpttool inspect full.pt --tensors '*'` lists the tensors",
    "inspect full.pt --filter x": "hint: did you mean `--tensors`?",
    # Commands and options of other tools.
    "merge-weights full.pt o": "hint: did you mean `convert SRC DST --to safetensors --only model`?",
    "dcp_to_torch full.pt o.pt": "hint: did you mean `convert SRC out.pt`?",
    "torch_to_dcp full.pt o": "hint: did you mean `convert SRC DST --to dcp`?",
    "zero_to_fp32 full.pt o": "hint: did you mean `convert SRC DST --to safetensors --only model`?",
    "ds_to_universal full.pt o": "hint: did you mean `convert SRC DST --producer deepspeed:universal`?",
    "convert full.pt o --weights 16bit": "hint: did you mean `--dtype bfloat16`?",
    "quantize full.pt o": "hint: quantize what `ckpttool export` writes",
    "convert full.pt o --to-dcp": "hint: did you mean `--to dcp`?",
    "convert full.pt o --safe_serialization": "hint: did you mean `--to safetensors`?",
    "convert full.pt o --max_shard_size 5GB": "hint: did you mean `--max-shard-size`?",
    "convert full.pt --outfile o": "hint: what is written is the last argument: `ckpttool convert SRC DST`",
    "convert -i full.pt o": "hint: what is read is the first argument: `ckpttool convert SRC DST`",
    "convert full.pt o --revision main": "hint: the revision is part of the address: `hf://org/name@REVISION`",
    "convert full.pt o --step 500": "hint: name the directory of the step, such as `run7/step-500`",
    "export full.pt --push-to-hub org/name": "hint: `hf://org/name` as DST writes to the Hub",
    "stats full.pt --html o.html": "hint: `ckpttool report` writes the statistics of a checkpoint as one HTML file",
    "inspect full.pt --only model": "hint: did you mean `--tensors`?",
    "inspect full.pt --csv --md": "error: `--csv` and `--md` exclude each other",
    "convert full.pt o.pt --exclude optim": "hint: a pattern matches whole names: did you mean `'optim.*'`?",
    "inspect -full.pt": "hint: write `./-full.pt`",
    "inspect FULL.PT": "hint: did you mean `full.pt`?",
    "convert full.pt o --to DCP": "hint: did you mean `dcp`?",
    "convert full.pt o.safetensor": "hint: did you mean `o.safetensors`? Else pass `--to dcp`",
    "convert full.pt D:\\o.pt": "hint: drives of Windows are elsewhere here: in WSL, it is `/mnt/d/o.pt`",
    "convert full.pt runs o --to dcp": "hint: `ckpttool convert SRC DST` is all; ",
    "batch convert full.pt o/{stp}": "hint: `{step}` and `{name}` are filled in",
    "verify-resume python3 train.py": "hint: the command to run goes after `run --`: `ckpttool verify-resume run -- ",
    "inspect full.pt --map-location cpu": "hint: leave it out: no device is used",
    "clean . --force": "hint: did you mean `--yes`?",
    "convert full.pt o --overwrite=yes": "hint: write `--overwrite` alone",
    "verify full.pt --against": "hint: write `--against OTHER`",
    # Words too few, too many, and in another order.
    "convert full.pt": "hint: `ckpttool convert full.pt DST`; `ckpttool convert --help`",
    "check full.pt": "hint: `ckpttool check full.pt --against OTHER`;",
    "convert full.pt safetensors o": "hint: did you mean `--to safetensors`?",
    "show model.embed.weight full.pt": "hint: the checkpoint comes first, then the name of the tensor",
    "convert full.pt o \u2014to dcp": "hint: `\u2014to` begins with a dash that is not a hyphen: write `--to`",
    "reshard full.pt o --to-mesh shard=2 tp=2": "did you mean `--to-mesh shard=2,tp=2`?",
    "convert full.pt o.pt --rename model.* net.*": "did you mean `--rename 'model.*=net.*'`?",
    "convert full.pt o.pt --rename model.(.*)=net.\\1": "hint: a rule is not a regular expression: `*` captures",
    "inspect full.pt --tensors full.pt step.tar": "hint: `--tensors` takes one word; in quotes, `--tensors '*.tar'`",
    "convert full.pt step.tar o.pt": "was it a pattern?",
    # Files, directories and addresses.
    "convert full.pt runs --to dcp": "hint: name a new destination, such as `runs/NAME`",
    "convert full.pt o.h5": "hint: no such file is written: name it `o.pt` or `o.safetensors`",
    "convert full.pt o --producer runs/step-1": "error: `--producer runs/step-1`: no such checkpoint",
    "report full.pt -o page.pdf": "hint: name it `page.html`; a browser prints it to PDF",
    "inspect full.pt --html page.json": "hint: name it `page.html`",
    "export full.pt o --assets Qwen/Qwen3-0.6B": "or on the Hub `hf://Qwen/Qwen3-0.6B`",
    "inspect runs/latest": "hint: `runs` alone stands for the newest checkpoint in it",
    "inspect elsewhere/runs/step-2": "hint: did you mean `runs/step-2`?",
    "inspect $RUNS/run7": "hint: no shell has expanded the `$RUNS`: write `/data/run7`",
    "inspect ${RUNS}/run7": "hint: no shell has expanded the `${RUNS}`: write `/data/run7`",
    "inspect hf//org/name": "hint: write `hf://org/name`",
    "inspect s3:/bucket/run": "hint: write `s3://bucket/run`",
    "convert runs/step-2 runs/step-2": "error: `runs/step-2` is the source, or is inside it",
    "convert full.pt o.safetensors.index.json": "name it `o.pt` or `o.safetensors`",
    "samples full.pt": "error: `full.pt` exists and is not a directory",
    "samples full.pt --overwrite": "hint: name a new directory",
    "samples runs --overwrite": "hint: name a new directory",
    "inspect huggingface.co/org/name": "hint: write `hf://org/name`",
    "inspect git@hf.co:org/name.git": "hint: write `hf://org/name`",
    "inspect https://huggingface.co/org/name/blob/main/a.safetensors": "hint: write `hf://org/name@main/a.safetensors`",
    "inspect https://huggingface.co/org/name/tree/v2?x=1": "hint: write `hf://org/name@v2`",
    # Values.
    "convert full.pt o.pt --max-memory 2": "hint: write a unit and leave room for buffers: `--max-memory 2GB`",
    "convert full.pt o.pt --only model,optim": "hint: one at a time: repeat the option, as in `--only model ",
    "convert full.pt o.pt --only model.layers": "hint: a name inside a part is for `--tensors 'model.layers.*'`",
    "convert full.pt o --to deepspeed": "hint: `--producer deepspeed` writes the directory that it resumes from",
    "convert full.pt o --to tensorflow": "hint: the formats are `dcp`, `safetensors`, `fsdp1`, `torch`",
    "export full.pt o --take ema": "no tree `ema` with the names of the model, and no other tree has them",
    "show full.pt step [0]": "hint: `ckpttool show full.pt step` shows its value",
    "inspect full.pt --dtype F32": "hint: did you mean `fp32`, `float32`?",
    "inspect full.pt --where dtype=float32": "hint: compare columns by `==`,",
    "stats full.pt --tensors model.nrom*": "error: no tensor matches `model.nrom*`",
    # Words in an order, in quotes or in a syntax of something else.
    "stats full.pt --fail-on nan": "hint: compare it with a number, in quotes: `--fail-on 'nan > 0'`",
    "stats full.pt --where layer==3": """hint: a layer is a text, in quotes of its own: `--where 'layer == "3"'`""",
    "inspect full.pt --where dtype!=float32": """`--where 'dtype != "float32"'`""",
    "inspect full.pt --tensors layers.0*": "hint: a pattern matches whole names: did you mean `'*.layers.0*'`?",
    "stats full.pt --tensors layers.0": "hint: a pattern matches whole names: did you mean `'*.layers.0.*'`?",
    "convert full.pt o.pt --exclude exp_avg": "hint: a pattern matches whole names: did you mean `'*.exp_avg'`?",
    "show full.pt model.embed.weight [0:2, :4]": "hint: a slice is one word: in quotes, `'[0:2, :4]'`",
    'show full.pt model["embed.weight"]': "hint: did you mean `model.embed.weight`?",
    'show full.pt model["layers"][0]["qkv"]["weight"]': "hint: did you mean `model.layers.0.qkv.weight`?",
    "match full.pt step.tar": "hint: `ckpttool match full.pt --like step.tar`;",
    "check full.pt step.tar": "hint: `ckpttool check full.pt --against step.tar`;",
    "inspect s3:bucket/run": "hint: write `s3://bucket/run`",
    "inspect gcs://bucket/run": "hint: write `gs://bucket/run`",
    "inspect s3a://bucket/run": "hint: write `s3://bucket/run`",
    "convert full.pt o.pt --dtype model.*:bfloat16": "hint: did you mean `--dtype 'model.*=bfloat16'`?",
    "batch verify runs o/{step}.json --watch 60": "hint: options of batch come first: `ckpttool batch --watch ...",
    "batch convert runs o/{name} --to torhc": "hint: did you mean `torch`?",
    "batch convert full.pt o/{step}": "error: `full.pt` has no known step, but the destination contains `{step}`",
    "prune full.pt": "error: `full.pt`: not a run",
    "repair runs o --merge full.pt": "hint: `--merge` takes the directory of another node",
    "verify-resume --recipe recipe.py": "or `ckpttool verify-resume trial ... --recipe`?",
    "convert full.pt -only model o.pt": "hint: did you mean `--only`?",
    "verify full.pt step.tar": "hint: did you mean `--against step.tar`?",
    "prune runs --keep 2": "hint: did you mean `--keep-last`?",
    "prune runs --older-than 7d": "hint: did you mean `--keep-last`?",
    "reshard full.pt o --to-mesh 4": "hint: write `--to-world 4`",
    "verify-resume train.py": "goes after `run --`: `ckpttool verify-resume run -- python train.py --out OUT`",
    "convert runs o.pt --steps 2": "hint: name the directory of the step, such as `run7/step-500`",
    # A value without its option, an option of another command, a syntax of something else.
    "convert full.pt o.pt model": "hint: did you mean `--only model`?",
    "convert full.pt o.pt bf16": "hint: did you mean `--dtype bf16`?",
    "stats runs 2": "hint: did you mean `--steps 2`?",
    "inspect runs step-2": "hint: did you mean `runs/step-2`?",
    "convert full.pt . --to dcp": "hint: name a new destination, such as `./NAME`",
    "convert full.pt o.pt --dtype int8": "hint: `--dtype` casts to float64, ",
    "convert full.pt o.pt --tensors model\\.layers\\..*": "for a regular expression, write `'re:model\\.layers\\..*'`",
    "convert full.pt o.pt --exclude exp_avg$": "hint: for a regular expression, write `'re:.*(exp_avg$).*'`",
    "convert full.pt o.pt --tensors model.layers.{0,1}.*": "hint: braces do not expand in a pattern: repeat the option",
    "convert full.pt o.pt --rename layers=blocks": "whole names: did you mean `--rename '*.layers.*=*.blocks.*'`?",
    "verify full.pt --fix": "hint: `ckpttool repair SRC DST` writes a repaired copy",
    "export full.pt o --to dcp": "hint: `ckpttool convert` and `ckpttool reshard` have that option",
    "batch runs convert o/{step}": "hint: the command comes first: `ckpttool batch convert runs 'o/{step}'`",
    "stats full.pt --top 5": "hint: `--sort STAT` lists each tensor, the largest first",
    "prune runs --keep-last 1 --dry-run": "hint: leave it out: without `--yes`, only the plan is shown",
    "verify-resume check full.pt": "hint: did you mean `ckpttool verify-resume audit`?",
    "verify full.pt --top 5": "hint: `ckpttool inspect` and `ckpttool diff` have that option",
    "batch": "hint: `ckpttool batch convert RUN 'out/{step}' --to dcp`",
    "export full.pt o --only optimizer": "hint: `ckpttool convert SRC DST --only optimizer` writes it",
    "convert full.pt o.pt --only embed.weight": "a name inside a part is for `--tensors '*.embed.weight*'`",
    "show full.pt layers.*.qkv": "hint: a pattern matches whole names: did you mean `'*.layers.*.qkv.*'`?",
    "show full.pt model.embed.weight 0:4 :8": "hint: a slice is one word: in quotes, `'[0:4, :8]'`",
    "show full.pt model.embed.weight --head 5": "hint: a slice is the last argument: ",
    "verify-resume run --world 2 -- python train.py --out OUT": "error: `--world` needs `{world}` in the command",
    "verify-resume run --checkpoints OUT/{n} -- python train.py OUT": "hint: `{step}` stands for the step",
    "verify-resume run": "hint: `ckpttool verify-resume run -- python train.py --out OUT`",
    "verify-resume run --at 8 --until 4 -- python train.py OUT": "`--at`, and `--until` must be later",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_by_what_to_type(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("RUNS", "/data")
    shutil.copy(CHECKPOINTS / "torch/full/ckpt.pt", "full.pt")
    with tarfile.open("step.tar", "w") as archive:
        archive.add("full.pt")
    (tmp_path / "runs/step-2").mkdir(parents=True)
    if "-full.pt" in words:
        os.rename("full.pt", "-full.pt")
    done = run(*words.split())
    Path("-full.pt").exists() and os.rename("-full.pt", "full.pt")
    assert done.exit_code in (2, 3, 6) and MISTAKES[words] in done.stderr, done.stderr
    assert sorted(os.listdir()) == ["full.pt", "runs", "step.tar"] and os.listdir("runs") == ["step-2"]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22ea\nsize 132\n"
# What `joblib.dump({"w": array}, file)` begins with.
JOBLIB = (
    b"\x80\x04\x95\xda\0\0\0\0\0\0\0}\x94(\x8c\x01w\x94\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper"
    b"\x94\x93\x94)\x81\x94}\x94" + bytes(range(256))
)
# Files and directories that are no checkpoints: what is in them, and what is said.
OTHERS: dict[str, tuple[dict[str, bytes], str]] = {
    "an empty file": ({"a.safetensors": b""}, "error: `a.safetensors` is empty\n"),
    "a page of errors": (
        {"a.safetensors": b'{"error": "not found"}'},
        "a JSON document\nhint: the download was refused",
    ),
    "Parquet": ({"a": b"PAR1\x15\x04"}, "a Parquet file, as data sets are\n"),
    "SQLite": ({"a.pt": b"SQLite format 3\0"}, "an SQLite database\n"),
    "JPEG": ({"a": b"\xff\xd8\xff\xe0"}, "`a`: a picture\n"),
    "Flax": (
        {"flax_model.msgpack": b"\x81\xa6params\x80"},
        "a msgpack file, as Flax writes, judging by its first bytes\n",
    ),
    "joblib": (
        {"a.pkl": JOBLIB},
        "a pickle of joblib, with arrays among its opcodes\nhint: load it with `joblib.load`, and save",
    ),
    "joblib, compressed": (
        {"a.joblib": zlib.compress(JOBLIB, 3)},
        "compressed with zlib, as joblib does\nhint: load it with",
    ),
    "gpg": (
        {"a.pt.gpg": b"\x85\x01\x0c\x03\xff\xfe"},
        "encrypted, judging by its name\nhint: decrypt it, then name what",
    ),
    "openssl": ({"a.pt": b"Salted__\xff\xfe\x00\x01"}, "encrypted by openssl\nhint: decrypt it, then name what"),
    "a pointer in place of weights": (
        {"t/model.safetensors": POINTER, "t/config.json": b"{}"},
        "`t/model.safetensors`: a pointer of git LFS, not the file itself\nhint: fetch the file: `git lfs pull`\n",
    ),
    "TensorBoard": (
        {"logs/events.out.tfevents.1.host": b"\x18" + bytes(20) + b"brain.Event:2"},
        "(events.out.tfevents.1.host), but TensorBoard's events\nhint: they have losses, not weights",
    ),
    "a script": ({"train.py": b"import torch\n"}, "a Python script\nhint: name the checkpoint that it writes\n"),
    "a tokenizer": ({"t/tokenizer.json": b"{}"}, "hint: its weights are somewhere else, or missing\n"),
    "half a download": (
        {"t/config.json": b"{}", "t/.cache/huggingface/download/a.incomplete": b"x"},
        "hint: a download has not ended: run it again\n",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_no_checkpoint(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files, said = OTHERS[what]
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    done = run("inspect", next(iter(files)).partition("/")[0])
    assert done.exit_code in (3, 4) and said in done.stderr, done.stderr


def test_a_config_in_place_of_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the weights it is about them; by itself it is no download that was refused."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINTS / "hf/llama/ckpt", "llama")
    assert "hint: it is next to the weights: name the directory, `llama`" in run("inspect", "llama/config.json").stderr
    os.remove("llama/model.safetensors")
    assert "hint: it has no weights: name the checkpoint" in run("inspect", "llama/config.json").stderr


def test_the_file_that_names_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINTS / "other/deepspeed_zero3_w2", "run")
    newest = Path("run/latest").read_text().strip()
    done = run("inspect", "run/latest")
    assert done.stderr == f"error: `run/latest`: a text that names `{newest}`\nhint: name that: `run/{newest}`\n"
    assert run("inspect", f"run/{newest}").exit_code == 0


def test_a_pattern_that_the_shell_has_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hint says is the pattern that was typed, and reads the files of all ranks."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CHECKPOINTS / "rank/fsdp1_w4/ckpt", "rank")
    words = sorted(str(path) for path in Path("rank").glob("*.pt"))
    said = run("convert", *words, "o.pt").stderr
    assert "In quotes, `'rank/*.pt'`" in said and "name the directory, `rank`" in said
    assert run("convert", "rank/*.pt", "o.pt").exit_code == 0


def test_a_file_without_tensors_says_so_first(tmp_path: Path) -> None:
    for state, says in (({}, "  empty: no tensors and no objects"), ({"step": "x"}, "  no tensors, 1 object")):
        torch.save(state, tmp_path / "a.pt")
        assert run("inspect", str(tmp_path / "a.pt")).stdout.splitlines()[1] == says


def test_a_link_upwards_is_not_looked_into(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.ones(2), "step": step}, tmp_path / f"step_{step}.pt")
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/up").symlink_to("..")
    said = run("inspect", str(tmp_path / "runs")).stderr
    assert "contains no checkpoint of a known format (a, up)" in said


def test_an_archive_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("IMG_1.jpg", b"\xff\xd8")
    said = run("inspect", str(tmp_path / "photos.zip")).stderr
    assert "photos.zip`: contains no checkpoint of a known format (IMG_1.jpg)\nhint: detected by" in said


def test_a_model_of_keras(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", b"\x89HDF\r\n\x1a\n")
    said = run("inspect", str(tmp_path / "m.keras")).stderr
    assert "a Keras model, judging by its file names\nhint: it is not a PyTorch checkpoint" in said


def test_one_file_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a checkpoint, but not the model."""
    monkeypatch.chdir(tmp_path)
    config = transformers.AutoConfig.from_pretrained(CHECKPOINTS / "hf/llama/ckpt")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained("model", max_shard_size="2KB")
    name = min(path.name for path in Path("model").glob("*.safetensors"))
    said = "files: name the directory, `model`, for the whole model"
    for words in (["convert", f"model/{name}", "o.pt"], ["verify", f"model/{name}"], ["inspect", f"model/{name}"]):
        done = run(*words)
        assert done.exit_code == 0 and said in done.stdout + done.stderr, words
    assert "for the whole model" not in run("inspect", "model").stdout


def test_the_config_of_another_model(tmp_path: Path) -> None:
    done = run("export", FULL, str(tmp_path / "o"), "--assets", str(CHECKPOINTS / "hf/gpt2/ckpt"))
    assert done.exit_code == 4 and "hint: is the config this model's?" in done.stderr, done.stderr
    assert not any(tmp_path.iterdir())


def test_a_compressed_archive_in_a_directory(tmp_path: Path) -> None:
    """As of a run that was downloaded, alone and beside a replay buffer."""
    (folder := tmp_path / "agent").mkdir()
    with zipfile.ZipFile(folder / "model.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(CHECKPOINTS / "torch/full/ckpt.pt", "policy.pth")
    hint = "hint: unpack the archive, and name the directory that it is unpacked to"
    said = run("inspect", str(folder)).stderr
    assert f"model.zip/policy.pth`: compressed in an archive\n{hint}" in said
    torch.save({"a": torch.ones(2)}, folder / "replay.pt")
    done = run("convert", str(folder), str(tmp_path / "out.pt"))
    assert done.exit_code == 3 and f"compressed in an archive\n{hint}" in done.stderr, done.stderr


def test_an_empty_word_is_a_variable_that_is_not_set() -> None:
    for words in (["inspect", ""], ["convert", FULL, ""], ["inspect", FULL, "--html", ""]):
        done = run(*words)
        assert done.exit_code == 2 and "hint: is a variable of the shell not set?" in done.stderr


def test_mistakes_in_python(tmp_path: Path) -> None:
    model, path = torch.nn.Linear(2, 2), CHECKPOINTS / "torch/full/ckpt.pt"
    for call, said in (
        (lambda: ckpttool.load(model, path), "`load` takes the path first"),
        (lambda: ckpttool.save(model, tmp_path / "x"), "`save` takes the path first"),
        (lambda: ckpttool.load_into({"model": model}, path), "`load_into` takes the path first"),
        (lambda: ckpttool.load(path, {"model": model}), "`load` fills a `torch.nn.Module`, and this is a dict"),
        (lambda: ckpttool.save(tmp_path / "x", {}), "`save` takes a `torch.nn.Module`, and this is a dict"),
        (lambda: ckpttool.save(tmp_path / "x.pt", model), "hint: name it `"),
        (lambda: ckpttool.save(tmp_path / "x", model, a=1, log=path.open("rb")), "`log` cannot be pickled: "),
        (
            lambda: ckpttool.load(CHECKPOINTS / "torch/model/ckpt.pt", model, torch.optim.SGD(model.parameters())),
            "no op",
        ),
        (lambda: ckpttool.load_into(path, model), "hint: `ckpttool.load(path, model)` fills a model"),
        (lambda: ckpttool.convert({}, tmp_path / "x"), "hint: save it first, by `torch.save` or `ckpttool.save`"),
        (lambda: ckpttool.open([path]), "hint: pass one path, or a pattern of the files of one step"),
        (lambda: ckpttool.open(path.open("rb")), "hint: pass the path of the file"),
        (
            lambda: ckpttool.convert(path, tmp_path / "x", only=[None]),
            "names and patterns are of type `str`, not `None",
        ),
        (lambda: ckpttool.convert(path, tmp_path / "x", drop=None), "names and patterns are of type `str`, not `None"),
        (lambda: ckpttool.inspect(os.fsencode(path)), "a path is a `str` or a `pathlib.Path`, not `bytes`"),
        (
            lambda: ckpttool.convert(path, tmp_path / "x", to="dcp", to_world="4"),
            "a number of ranks is an `int`, not `str`",
        ),
        (lambda: ckpttool.reshard(path, tmp_path / "x", to_mesh={"tp": 2}), "a mesh is a `str`"),
        (lambda: ckpttool.diff(path, path, rtol="1e-3"), "a tolerance is a number, not `str`"),
        (lambda: ckpttool.prune(tmp_path, keep_last="2"), "how many is an `int`, not `str`"),
        (lambda: ckpttool.prune(tmp_path, keep_last=-1), "is not a whole number from 1"),
        (lambda: ckpttool.prune(tmp_path, keep_every=0), "is not a whole number from 1"),
        (lambda: ckpttool.convert(path, tmp_path / "x", to="safetensors", max_shard_size=0), "is less than one byte"),
    ):
        with pytest.raises(UsageError) as raised:
            call()  # type: ignore[no-untyped-call]
        assert said in str(raised.value)
    with ckpttool.open(path) as ckpt:
        for index in (None, [0, 1], "a", 1.5):
            with pytest.raises(TypeError, match="an index is an integer or a slice"):
                ckpt["model.embed.weight"][index]
        with pytest.raises(TypeError, match="a name is a string"):
            ckpt[0]
        with pytest.raises(AttributeError, match=r"no attribute `model`: `\[\"model\"\]` is what has this name"):
            ckpt.model  # noqa: B018
        with pytest.raises(AttributeError, match=r"no attribute `to`: `.state_dict\(\)` reads it"):
            ckpt["model"].to("cuda")
        with pytest.raises(AttributeError, match=r"no attribute `mean`: `.torch\(\)` or `.numpy\(\)` reads it first"):
            ckpt["model.embed.weight"].mean()
    with pytest.raises(AttributeError, match="`safe_open`: did you mean `open`"):
        ckpttool.safe_open  # noqa: B018
    assert list(tmp_path.iterdir()) == []


def test_one_step_of_a_run_by_its_number(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.ones(2), "step": step}, tmp_path / f"step_{step}.pt")
    assert [one["step"] for one in ckpttool.inspect(tmp_path, steps=1).facts["run"]] == [1]


def test_steps_with_a_dash_between(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.ones(2), "step": step}, tmp_path / f"step_{step}.pt")
    said = run("stats", str(tmp_path), "--steps", "1-2").stderr
    assert said.endswith("hint: a range is written `1..2`; the complete ones are 1, 2\n")
    assert run("stats", str(tmp_path), "--steps", "1..2").exit_code == 0


def test_quotes_around_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FULL, "full.pt")
    assert "hint: `ckpttool convert full.pt o.pt`;" in run("convert", "full.pt o.pt").stderr
    said = run("convert", "full.pt", "o.pt --only model").stderr
    assert said.endswith("hint: the quotes include an option: end them after `o.pt`\n")
    assert os.listdir() == ["full.pt"]


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    """In place of a manifest, of shapes, and of a model."""
    dcp, flat = str(CHECKPOINTS / "dcp/fsdp2_w4/ckpt"), str(CHECKPOINTS / "rank/fsdp1_local_w2/ckpt")
    said = run("verify", dcp, "--manifest", f"{dcp}/.metadata").stderr
    assert "is not a manifest, which is JSON\nhint: `--write-manifest` writes one\n" in said
    config = CHECKPOINTS / "hf/llama/ckpt/config.json"
    said = run("convert", flat, str(tmp_path / "o.pt"), "--shapes", str(config)).stderr
    assert f"`{config}`: a config, which does not list the shapes of the parameters\nhint: name a checkpoint" in said
    state = torch.load(FULL, weights_only=False)["optim"]
    torch.save(state, tmp_path / "optim.pt")
    said = run("convert", str(tmp_path / "optim.pt"), str(tmp_path / "o.safetensors")).stderr
    assert "hint: a directory as DST keeps everything" in said and "--only model" not in said


def test_a_rank_that_the_world_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that something else has left: the command ended in 0, and had done nothing."""
    left = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    converted = spawn("convert", FULL, str(tmp_path / "a.pt"), env=environment(**left))
    assert converted.wait() == 0 and (tmp_path / "a.pt").exists()
    said = run("reshard", str(CHECKPOINTS / "dcp/fsdp2_w4/ckpt"), str(tmp_path / "o"), "--to-world", "2", env=left)
    assert (said.exit_code, said.stderr) == (
        2,
        "error: `RANK=2` is not one of the ranks of `WORLD_SIZE=2`\n"
        "hint: without torchrun, unset RANK, WORLD_SIZE and LOCAL_RANK\n",
    )


def test_an_error_of_a_run_names_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many, the one that was taken: its directory is what the next command is about."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        shutil.copytree(CHECKPOINTS / "dcp/fsdp2_w2/ckpt", f"run/step-{step}")
    spoilt = max(Path("run/step-2").glob("*.distcp"), key=lambda one: one.stat().st_size)
    os.truncate(spoilt, 100)
    for words in (
        "convert run o.pt",
        "reshard run o --to-world 1",
        "export run o",
        "stats run",
        "diff run run/step-1",
        "diff run/step-1 run",
        "show run model.embed.weight",
    ):
        done = run(*words.split())
        assert done.exit_code == 4 and "run/step-2" in done.stderr.splitlines()[0], done.stderr
    assert os.listdir() == ["run"]


def test_a_name_with_brackets_in_place_of_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a[0].w": torch.ones(3), "b": torch.ones(2)}, "m.pt")
    for words in (["inspect", "m.pt"], ["stats", "m.pt"], ["convert", "m.pt", "o.pt"]):
        assert "for that name, write `'a[[]0].w'`" in run(*words, "--tensors", "a[0].w").stderr
        assert run(*words, "--tensors", "a[[]0].w").exit_code == 0


def test_a_script_in_place_of_the_command_that_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import sys\n")
    for word, hint in (
        ("train.py", "hint: it is a Python file: `python train.py`\n"),
        ("python train.py", "hint: a command is several words: leave out the quotes around it\n"),
        ("trian.py", "no such file or directory\n"),
    ):
        done = run("verify-resume", "run", "--", word, "--out", "OUT")
        assert done.exit_code == 2 and done.stderr.endswith(hint), done.stderr
    assert os.listdir() == ["train.py"]


def test_a_file_that_may_not_be_so_large(tmp_path: Path) -> None:
    out = tmp_path / "o.pt"
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -f 8; exec "$@"', "sh", sys.executable, "-m", "ckpttool", "convert", FULL, str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7 and "hint: the file system or `ulimit -f` allows no larger file" in done.stderr
    assert not any(tmp_path.iterdir())
