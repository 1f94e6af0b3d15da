"""The whole command against the test Hub: over LFS and over Xet, killed, and what transformers loads of it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import ModelCard, constants
from safetensors.torch import load, load_file, save, save_file
from support import warm_python
from support.hub_server import WRITER, Handler, Hub, stall
from support.paths import CHECKPOINTS, ROOT
from typer.testing import CliRunner

import ckpttool
from ckpttool.cli.app import application
from ckpttool.errors import OverwriteError, RemoteError, UsageError

SAMPLE = CHECKPOINTS / "dcp/single" / "ckpt"


def environment(hub: Hub, folder: Path) -> dict[str, str]:
    """That of a program that speaks to the test Hub, over LFS."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "CKPTTOOL_", "TRANSFORMERS_"))}
    return {
        **kept, "HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1", "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip


def run(*words: str) -> str:
    """`ckpttool words...` in this process."""
    done = CliRunner().invoke(application(), list(words))
    assert done.exit_code == 0, (done.output, done.exception)
    assert WRITER not in done.output
    return done.output


LOAD = """
import sys, torch, transformers
model, loading = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(loading.values()), loading
given = torch.load(sys.argv[2])["model"]
for name, tensor in model.state_dict().items():
    assert torch.equal(tensor, given[name]), name
print("equal")
"""


def test_from_pretrained_takes_what_was_exported(hub: Hub, tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.save({"model": transformers.LlamaForCausalLM(config).state_dict(), "step": 10}, tmp_path / "ckpt.pt")
    config.save_pretrained(tmp_path / "assets")
    model = str(tmp_path / "ckpt.pt")
    said = run(
        "export", model, "hf://me/model", "--assets", str(tmp_path / "assets"), "--max-shard-size", "100KB",
        "--private", "--keep", "old*", "--commit-message", "the final weights",
    )  # fmt: skip
    assert f"{hub.url}/me/model/commit/" in said
    assert hub.history("me/model") == ["the final weights", "initial commit"] and hub.repos["me/model"].private
    assert len([name for name in hub.files("me/model") if name.endswith(".safetensors")]) > 2
    loaded = subprocess.run(
        [*warm_python.python(), "-c", LOAD, "me/model", model],
        env=environment(hub, tmp_path), text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert loaded.stdout == "equal\n", loaded.stderr
    # And back, to what a trainer reads.
    run("convert", "hf://me/model", str(tmp_path / "dcp"), "--to", "dcp", "--to-world", "8")
    run("convert", str(tmp_path / "dcp"), str(tmp_path / "back.safetensors"))
    given = torch.load(model)["model"]
    back = load_file(tmp_path / "back.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in given.items())


def test_the_token_of_an_option(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.make("org/base", {"config.json": b"{}"}, private=True)
    words = ("export", str(SAMPLE), "hf://me/model", "--assets", "hf://org/base")
    assert CliRunner().invoke(application(), [*words]).exit_code == RemoteError.exit_code
    run("export", str(SAMPLE), "hf://me/model", "--assets", "hf://org/base", "--token", WRITER)
    assert "config.json" in hub.files("me/model") and os.environ["HF_TOKEN"] == "hf_wrong"
    assert CliRunner().invoke(application(), [*words, "--token", ""]).exit_code == UsageError.exit_code


def test_the_tag_of_an_option(hub: Hub, tmp_path: Path) -> None:
    words = ("export", str(SAMPLE), "hf://me/model", "--tag")
    for wrong in (("a b",), ("-v",), ("v..1",), ("v1.lock",), ("",), ("v1", "--create-pr")):
        done = CliRunner().invoke(application(), [*words, *wrong])
        assert done.exit_code == UsageError.exit_code and "--tag" in done.stderr and not hub.repos, wrong
    assert CliRunner().invoke(application(), ["export", str(SAMPLE), str(tmp_path / "x"), "--tag", "v1"]).exit_code == 2
    assert json.loads(run(*words, "v1.0", "--dry-run", "--json"))["sent"]["tag"] == "v1.0" and not hub.repos
    assert "v1.0" in run(*words, "v1.0") and set(hub.repos["me/model"].tags) == {"v1.0"}
    before = hub.history("me/model")
    done = CliRunner().invoke(application(), [*words, "v1.0", "--dtype", "float16"])
    assert done.exit_code == OverwriteError.exit_code and hub.history("me/model") == before
    # What the tag names is read again.
    assert "model.safetensors" in run("inspect", "hf://me/model@v1.0", "--json")


def test_a_card_that_somebody_wrote_stays(hub: Hub, tmp_path: Path) -> None:
    hub.make("me/model", {"README.md": b"---\ntags: [mine]\n---\n# Mine\n"})
    run("export", str(SAMPLE), "hf://me/model", "--create-pr", "--stage", str(tmp_path / "stage"))
    there = hub.files("me/model", "refs/pr/1")
    assert there["README.md"].endswith(b"# Mine\n")
    assert there["model.safetensors"] == (tmp_path / "stage" / "model.safetensors").read_bytes()
    # What is there is what a directory would have been.
    run("export", str(SAMPLE), str(tmp_path / "out"))
    assert there["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()


BESIDE = {"config.json": b'{"model_type": "own", "dtype": "float32"}', "tokenizer.json": b"{ }", "notes.bin": b"no"}


@pytest.mark.parametrize("below", ["", "step-3/"])
def test_what_lies_beside_the_weights_comes_along(hub: Hub, tmp_path: Path, below: str) -> None:
    weights = save({"w": torch.ones(3, 4)}, {"format": "pt"})
    hub.make("org/base", {below + name: data for name, data in {**BESIDE, "model.safetensors": weights}.items()})
    said = run("export", f"hf://org/base/{below}".rstrip("/"), str(tmp_path / "out"), "--dtype", "bfloat16")
    assert f"2 files are taken from `hf://org/base/{below}".rstrip("/") + "`" in said
    check_assets(tmp_path / "out")


def test_assets_may_lie_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.make("org/base", {**BESIDE, "model.safetensors": b"x" * 300_000})
    save_file({"w": torch.ones(3, 4)}, tmp_path / "x.safetensors")
    words = ("export", str(tmp_path / "x.safetensors"))
    run(*words, str(tmp_path / "out"), "--assets", "hf://org/base", "--dtype", "bfloat16")
    check_assets(tmp_path / "out")
    assert not hub.asked("GET", "/cdn/"), "its weights stay there"
    run(*words, "hf://me/model", "--assets", "hf://org/base", "--dtype", "bfloat16")
    there = hub.files("me/model")
    assert there == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} | {"README.md": there["README.md"]}
    assert os.listdir(tmp_path / "tmp") == []
    done = CliRunner().invoke(
        application(), [*words, str(tmp_path / "other"), "--assets", "hf://org/base/tokenizer.json"]
    )
    assert done.exit_code == UsageError.exit_code
    assert "`--assets hf://org/base/tokenizer.json` is not a directory" in done.stderr


def test_cards_of_others_and_of_ones_own(hub: Hub, tmp_path: Path) -> None:
    model = {"config.json": b"{}", "model.safetensors": save({"w": torch.ones(3)}), "README.md": b"# The base\n"}
    hub.make("org/base", model)
    save_file({"w": torch.zeros(3)}, tmp_path / "x.safetensors")
    words = ("export", str(tmp_path / "x.safetensors"), "hf://me/model", "--assets")
    said = " ".join(run(*words, "hf://org/base").split())
    assert "`README.md` of `hf://org/base` is not copied: it is about the model there" in said
    assert b"The base" not in hub.files("me/model")["README.md"]
    # What somebody has written since, the card of the source included, gives way only to a card that is named.
    hub.commit("me/model", {"README.md": b"# Mine\n"})
    run("export", "hf://org/base", "hf://me/model")
    assert hub.files("me/model")["README.md"] == b"# Mine\n"
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "README.md").write_text("# New\n")
    run(*words, str(tmp_path / "assets"))
    assert hub.files("me/model")["README.md"] == b"# New\n"


def test_the_header_of_a_card_is_one_that_the_hub_reads(hub: Hub, tmp_path: Path) -> None:
    config = b'{"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}'
    card = b"---\r\nlicense: other\r\nlicense_name: 'own-1.0'\r\nlicense_link: https://me:secret@host/x\r\n"
    card += b"x: y\r\n---\r\n# B\r\n"
    files = {"config.json": config, "model.safetensors": save({"w": torch.ones(3)})}
    hub.make("org/base", {**files, "README.md": card.replace(b"me:secret@", b"")})
    hub.make("org/secret", {**files, "README.md": card})
    save_file({"w": torch.zeros(3)}, tmp_path / "x.safetensors")
    run("export", str(tmp_path / "x.safetensors"), "hf://me/model", "--assets", "hf://org/base@main")
    data = ModelCard(hub.files("me/model")["README.md"].decode()).data.to_dict()
    assert data == {
        "library_name": "transformers",
        "base_model": "org/base",
        "license": "other",
        "license_name": "own-1.0",
        "license_link": "https://host/x",
        "pipeline_tag": "text-generation",
        "tags": ["ckpttool"],
    }
    run("export", str(tmp_path / "x.safetensors"), str(tmp_path / "out"), "--assets", "hf://org/secret")
    assert "secret@" not in (tmp_path / "out" / "README.md").read_text()
    # Without a base there is less to say.
    run("export", str(tmp_path / "x.safetensors"), "hf://me/bare")
    data = ModelCard(hub.files("me/bare")["README.md"].decode()).data.to_dict()
    assert data == {"library_name": "safetensors", "tags": ["ckpttool"]}


def test_assets_that_rot_on_the_way(hub: Hub, tmp_path: Path) -> None:
    hub.make("org/base", {**BESIDE, "tokenizer.model": b"t" * 300_000})
    there = hub.repos["org/base"]
    large = there.commits[there.refs["main"]].files["tokenizer.model"]
    (hub.store / str(large.sha256)).write_bytes(b"u" * 300_000)
    with pytest.raises(RemoteError, match=r"`hf://org/base/tokenizer\.model`: the downloaded file is not"):
        ckpttool.export(SAMPLE, tmp_path / "out", assets="hf://org/base")
    assert not (tmp_path / "out").exists() and os.listdir(tmp_path / "tmp") == []


def check_assets(out: Path) -> None:
    """Those of `BESIDE` that are assets, with the dtype that was written."""
    assert (out / "config.json").read_bytes() == BESIDE["config.json"].replace(b"float32", b"bfloat16")
    assert (out / "tokenizer.json").read_bytes() == BESIDE["tokenizer.json"]
    assert not (out / "notes.bin").exists()


def test_flags_that_make_no_sense(hub: Hub, tmp_path: Path) -> None:
    for dst, flags in (
        ("hf://me/model", {"check": True}), ("hf://me/model", {"overwrite": True}),
        (str(tmp_path / "out"), {"private": True}), (str(tmp_path / "out"), {"stage": "x"}),
    ):  # fmt: skip
        with pytest.raises(UsageError) as raised:
            ckpttool.export(SAMPLE, dst, **flags)
        assert raised.value.hint
    assert not hub.seen


@pytest.mark.long
def test_the_directory_that_hf_download_prints(hub: Hub, tmp_path: Path) -> None:
    """Of a repository that comes over Xet; then the same repository, without the Hub."""
    hub.cas = True
    model = {f"model-0000{i}-of-00002.safetensors": save({f"w{i}": torch.randn(300, 300)}) for i in (1, 2)}
    index = {"metadata": {}, "weight_map": {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
    hub.make("org/name", {**model, "config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()})
    given = {name: tensor for data in model.values() for name, tensor in load(data).items()}
    variables = environment(hub, tmp_path)
    del variables["HF_HUB_DISABLE_XET"]

    def out(*words: str, **more: str) -> str:
        done = subprocess.run([*words], env=variables | more, text=True, capture_output=True, timeout=300)
        assert done.returncode == 0, (done.stdout, done.stderr)
        return done.stdout

    ckpt = (sys.executable, "-m", "ckpttool")
    path = out(str(Path(sys.executable).with_name("hf")), "download", "org/name", "--quiet").split()[-1]
    assert hub.asked("GET", "/xorb/") and not hub.asked("GET", "/cdn/")
    shard = Path(path, "model-00001-of-00002.safetensors")
    assert shard.is_symlink() and "models--org--name" not in str(shard.resolve())
    for source, more in ((path, {}), ("hf://org/name", {}), ("hf://org/name", {"HF_HUB_OFFLINE": "1"})):
        hub.seen.clear()
        inspected = json.loads(out(*ckpt, "inspect", source, "--json", **more))
        assert {tensor["name"] for tensor in inspected["tensors"]} == given.keys()
        out(*ckpt, "convert", source, str(tmp_path / "out.safetensors"), "--overwrite", **more)
        written = load_file(tmp_path / "out.safetensors")
        assert written.keys() == given.keys() and all(torch.equal(written[name], given[name]) for name in given)
        assert bool(hub.seen) == (source != path and not more) and not hub.asked("GET", "/xorb/|/cdn/")


def over_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    # Retries that do not take minutes.
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "100ms")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)


def test_over_xet(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over_xet(monkeypatch)
    save_file({"w": torch.randn(400, 400)}, tmp_path / "x.safetensors")
    words = ("export", str(tmp_path / "x.safetensors"), "hf://me/model")
    out = run(*words)
    assert "2 new" in out and re.search(r"files +2 files, 64\d kB", out)
    assert hub.asked("GET", "/xet-write-token/") and not hub.asked("PUT", "/lfs/")
    stored = sum(p.stat().st_size for p in hub.xet.rglob("*") if p.is_file())
    assert stored > 400_000, "its bytes are in the store"
    history = hub.history("me/model")
    assert "none: nothing is different" in run(*words)
    assert hub.history("me/model") == history == ["Upload with ckpttool", "initial commit"]


@pytest.mark.parametrize("status", [401, 403, 404, 503])
def test_xet_refuses(hub: Hub, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    over_xet(monkeypatch)
    hub.fail("GET", "/xet-write-token/", status=status)
    with pytest.raises(RemoteError, match=str(status)) as raised:
        ckpttool.export(SAMPLE, "hf://me/model")
    assert raised.value.hint and "127.0.0.1" not in raised.value.message
    assert hub.history("me/model") == ["initial commit"]


# Killed ---------------------------------------------------------------------------------------------------------------


def start(hub: Hub, folder: Path, *words: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "ckpttool", *words]
    return subprocess.Popen(
        program, env=environment(hub, folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> None:
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, (out, err)
    assert WRITER not in out + err


def slowly(handler: Handler) -> bool:
    time.sleep(0.15)
    return False


def kill_and_run_again(hub: Hub, folder: Path, times: int, seed: int, job: str = "export") -> None:
    """Kill an export or a conversion after a random number of its requests, or a moment later, and run it again."""
    chance = random.Random(seed)
    src = folder / "big.safetensors"
    killed = 0
    for i in range(times):
        torch.manual_seed(100 * seed + i)
        made = {f"layers.{j}.weight": torch.randn(128, 512) for j in range(12)}
        save_file(made, src, {"format": "pt"})
        repo = f"me/killed{i}"
        words = {
            "export": ("export", str(src), f"hf://{repo}", "--max-shard-size", "600KB"),
            "convert": ("convert", str(src), f"hf://{repo}/step-1", "--to", "dcp", "--to-world", "6"),
        }[job]
        hub.fail("PUT", "/lfs/", act=slowly)
        process = start(hub, folder, *words)
        # Both make some 50 requests.
        last = len(hub.seen) + chance.randint(0, 50)
        while len(hub.seen) < last and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if repo in hub.repos and len(hub.history(repo)) == 1:
            assert hub.files(repo) == {}, "nothing is visible before the commit"
        hub.faults.clear()
        is_there = repo in hub.repos and len(hub.history(repo)) == 2
        # Killed after the commit, a conversion has only to be told that it is there.
        finish(start(hub, folder, *words), 6 if is_there and job == "convert" else 0)
        # What is there is whole, and nothing is left to do.
        if job == "export":
            check_whole(hub, repo, made)
            assert len(hub.files(repo)) == 6 + 2
        else:
            check_whole_dcp(hub, repo, made, folder / f"dcp{i}")
        assert list((folder / "tmp").iterdir()) == []
    assert killed > times / 2, "most of them were in the middle of it"


def check_whole(hub: Hub, repo: str, made: dict[str, Any]) -> None:
    assert hub.history(repo) == ["Upload with ckpttool", "initial commit"]
    there = hub.files(repo)
    index = json.loads(there["model.safetensors.index.json"])["weight_map"]
    assert {name for name in there if name.endswith(".safetensors")} == set(index.values())
    found: dict[str, torch.Tensor] = {}
    for file in set(index.values()):
        found |= load(there[file])
    assert found.keys() == made.keys() and all(torch.equal(found[key], made[key]) for key in made)


def check_whole_dcp(hub: Hub, repo: str, made: dict[str, Any], folder: Path) -> None:
    """torch loads it, and each file is there once."""
    assert hub.history(repo) == ["Upload with ckpttool", "initial commit"]
    there = hub.files(repo)
    assert len(there) == 6 + 2 and all(name.startswith("step-1/") for name in there)
    folder.mkdir()
    for name, data in there.items():
        (folder / name.rpartition("/")[2]).write_bytes(data)
    found = {name: torch.empty_like(tensor) for name, tensor in made.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in made.items())


def test_killed_and_run_again(hub: Hub, tmp_path: Path) -> None:
    kill_and_run_again(hub, tmp_path, 3, seed=6)


@pytest.mark.long
@pytest.mark.parametrize("job", ["export", "convert"])
def test_killed_at_twenty_moments_and_run_again(hub: Hub, tmp_path: Path, job: str) -> None:
    kill_and_run_again(hub, tmp_path, 20, 7, job)


@pytest.mark.parametrize("job", ["export", "inspect"])
def test_what_a_killed_run_left_in_the_temporary_directory_is_removed(hub: Hub, tmp_path: Path, job: str) -> None:
    """By the next run, but not while the first one lives."""
    save_file({"w": torch.zeros(300, 300)}, tmp_path / "x.safetensors")
    model = {"model.safetensors": (tmp_path / "x.safetensors").read_bytes()}
    hub.make("org/name", model)
    hub.make("org/other", model)
    hub.fail("PUT", "/lfs/", act=stall)
    # What holds the header has been read by then.
    hub.fail("GET", "/cdn/.*n=second", act=stall)
    header = json.dumps({"w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).ljust(100_000).encode()
    hub.make("org/long", {"second.safetensors": len(header).to_bytes(8, "little") + header})
    hub.faults[-1].skip = 1
    words = {
        # What is cast is written before it is sent.
        "export": ("export", str(tmp_path / "x.safetensors"), "hf://me/model", "--dtype", "bfloat16"),
        "inspect": ("inspect", "hf://org/long"),
    }
    process = start(hub, tmp_path, *words[job])
    try:
        while hub.failed < 1 and process.poll() is None:
            time.sleep(0.01)
        (left,) = (tmp_path / "tmp").iterdir()
        assert sum(path.stat().st_size for path in left.rglob("*")) >= 90_000
        run("inspect", "hf://org/name")
        assert list((tmp_path / "tmp").iterdir()) == [left], "that run has not ended"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL and left.exists()
        run("inspect", "hf://org/other")
        assert list((tmp_path / "tmp").iterdir()) == []
    finally:
        process.kill()
        process.communicate()


def test_a_conversion_that_is_killed_on_the_way(hub: Hub, tmp_path: Path) -> None:
    """There is no commit, and the next run removes what it left and sends all."""
    hub.fail("POST", "/commit/", act=stall)
    words = ("convert", str(SAMPLE), "hf://me/run/step-1", "--to", "dcp")
    process = start(hub, tmp_path, *words)
    try:
        while hub.failed < 1 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL and list((tmp_path / "tmp").rglob(".metadata"))
    finally:
        process.kill()
        process.communicate()
    assert hub.history("me/run") == ["initial commit"] and hub.files("me/run") == {}
    hub.faults.clear()
    run(*words)
    assert hub.history("me/run") == ["Upload with ckpttool", "initial commit"]
    assert "step-1/.metadata" in hub.files("me/run") and list((tmp_path / "tmp").iterdir()) == []
