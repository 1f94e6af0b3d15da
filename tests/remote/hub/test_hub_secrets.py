"""What leaves the machine with a model: what it needs, and no key, token or file that merely lies there."""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.cli import run
from support.hub_server import Hub

import ckpttool
from ckpttool.errors import UsageError
from ckpttool.operations import secrets

ALNUM = string.ascii_letters + string.digits


def text(chance: random.Random, n: int, letters: str = ALNUM) -> str:
    return "".join(chance.choices(letters, k=n))


def tokens(chance: random.Random) -> dict[str, str]:
    """One of each kind, as its issuer makes them."""

    def digits(n: int) -> str:
        return text(chance, n, string.digits)

    body = "\n".join(text(chance, 64, ALNUM + "+/") for _ in range(12))
    account = {
        "type": "service_account",
        "project_id": "p",
        "private_key": f"-----BEGIN PRIVATE KEY-----\n{body}\n",
        "client_email": "x@p.iam.gserviceaccount.com",
    }
    return {
        "hugging face": f"hf_{text(chance, 34, string.ascii_letters)}",
        "openai": f"sk-proj-aA1{text(chance, 20)}T3BlbkFJ{text(chance, 20)}",
        "openai, old": f"sk-{text(chance, 20)}T3BlbkFJ{text(chance, 20)}1",
        "anthropic": f"sk-ant-api03-aA1{text(chance, 90, ALNUM + '-_')}AA",
        "github": f"ghp_{text(chance, 36)}",
        "github, fine-grained": f"github_pat_{text(chance, 22)}_{text(chance, 59)}",
        "aws": f"AKIA{text(chance, 16, 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567')}",
        "aws, secret": f"aws_secret_access_key = a1{text(chance, 38, ALNUM + '/+')}",
        "slack": f"xoxb-{digits(12)}-{digits(13)}-{text(chance, 24)}",
        "google": f"AIza{text(chance, 35, ALNUM)}",
        "rsa": f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\n{body}\n-----END RSA PRIVATE KEY-----",
        "openssh": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{body}\n-----END OPENSSH PRIVATE KEY-----",
        "service account": json.dumps(account, indent=1),
        "gitlab": f"glpat-{text(chance, 20)}",
        "npm": f"npm_{text(chance, 36)}",
        "wandb": f'"WANDB_API_KEY": "a1{text(chance, 38, "0123456789abcdef")}"',
        "netrc": f"machine api.wandb.ai\n  login user\n  password {text(chance, 40, '0123456789abcdef')}",
        "address": f"https://me:{text(chance, 20)}@git.example.org/x.git",
    }


def core(token: str) -> bytes:
    """What of a planted secret must never be seen: its longest line, less than which is no use."""
    return max(token.split("\n"), key=len)[-30:].encode()


def model(folder: Path) -> Path:
    """A directory with a model, and code that it names."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.ones(3, 4), "b": torch.zeros(4)}, folder / "model.safetensors")
    auto_map = {"AutoModel": "modeling_own.Own", "AutoConfig": "configuration_own.OwnConfig"}
    for name, contents in {
        "config.json": json.dumps({"model_type": "own", "auto_map": auto_map}),
        "tokenizer.json": "{ }",
        "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["tokenization_own.Slow", null]}}',
        "modeling_own.py": "from .layers_own import Layer\nfrom torch import nn\n",
        "layers_own.py": "x = 1\n",
        "configuration_own.py": "",
        "tokenization_own.py": "",
        "LICENSE": "mine",
        "merges.txt": "a b",
        "chat_template.jinja": "{{ x }}",
        "generation_config.json": "{}",
    }.items():
        (folder / name).write_text(contents)
    return folder


NEEDED = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "modeling_own.py",
    "layers_own.py",
    "configuration_own.py",
    "tokenization_own.py",
    "LICENSE",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
}
PRESENT = (
    ".env",
    "credentials.json",
    "service_account.json",
    "hf_token.txt",
    "train.py",
    "id_rsa",
    "key.pem",
    "notes.md",
    ".netrc",
    "wandb/settings.json",
    ".git/config",
    ".aws/credentials",
    "train_config.json",
    "LICENSE.key",
    "token",
    "text_encoder/hf_token.txt",
    "secrets.yaml",
    "run_args.json",
    "results.txt",
    "unet/credentials.json",
)


@pytest.mark.parametrize("attempt", range(20))
def test_secrets_that_lie_about_stay_where_they_are(hub: Hub, tmp_path: Path, attempt: int) -> None:
    """In `--assets`, beside SRC and in the folders of a pipeline; over a new repository, with all the usual names."""
    chance = random.Random(attempt)
    folder = model(tmp_path / "run")
    planted = tokens(chance)
    names = chance.sample(PRESENT, 12) + [f"{text(chance, 6)}.{kind}" for kind in ("json", "txt", "md", "py", "pem")]
    names.append(f"{planted['hugging face']}.json")  # in a name
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x\n" + chance.choice(list(planted.values())) + "\n")
    options: dict[str, Any] = {"assets": folder} if attempt % 2 else {}
    seen: list[list[str]] = []
    made = ckpttool.export(folder, "hf://me/model", announce=lambda plan: seen.append(list(plan.assets)), **options)
    assert set(made.assets) == NEEDED and seen == [made.assets]
    assert set(hub.files("me/model")) == NEEDED | {"model.safetensors", "README.md"}
    assert hub.repos["me/model"].private
    received = hub.received()
    assert b"layers_own" in received
    for kind, token in planted.items():
        assert core(token) not in received, kind


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", tokens(random.Random(0)))
def test_a_secret_in_what_the_model_needs_stops_it(hub: Hub, tmp_path: Path, kind: str) -> None:
    chance = random.Random(kind)
    folder, token = model(tmp_path / "run"), tokens(chance)[kind]
    name = chance.choice(["README.md", "layers_own.py", "chat_template.jinja", "LICENSE", "merges.txt"])
    where = f"{(folder / name).read_text() if (folder / name).exists() else ''}\n# first\n{token}\n"
    (folder / name).write_text(where)
    for flags in ((), ("--dry-run",), ("--json",), ("--assets", folder)):
        done = run("export", folder, "hf://me/model", *flags)
        assert done.exit_code == UsageError.exit_code, done.output
        assert f"`{name}` line" in done.output + done.stderr and "nothing is sent" in done.output + done.stderr
        assert core(token) not in (done.output + done.stderr).encode()
    assert not hub.repos and core(token) not in hub.received()
    # A local directory is the user's own, and is told.
    assert any(f"`{name}` line" in note for note in ckpttool.export(folder, tmp_path / "out").notes)
    done = run("export", folder, "hf://me/model", "--not-secret", name)
    assert done.exit_code == 0 and hub.files("me/model")[name] == where.encode()


def test_secrets_that_are_included_by_a_pattern(hub: Hub, tmp_path: Path) -> None:
    folder, token = model(tmp_path / "run"), f"hf_{text(random.Random(1), 34, string.ascii_letters)}"
    (folder / "credentials.json").write_text('{"password": "hunter2"}')
    (folder / ".env").write_text("A=hunter2")
    (folder / "notes.md").write_text("fine")
    (folder / "docs").mkdir()
    (folder / "docs" / "more.md").write_text(f"use {token}\n".replace("\n", "\r\n"), encoding="utf-16")
    for pattern, said in {
        "*.json": "`credentials.json`: the name is that of a secret",
        ".env": "`.env`: the name",
        "docs/*": "`docs/more.md` line 1: looks like a Hugging Face token",
    }.items():
        done = run("export", folder, "hf://me/model", "--include", pattern)
        assert done.exit_code == UsageError.exit_code and said in done.stderr, done.stderr
    assert not hub.repos and b"hunter2" not in hub.received()
    done = run("export", folder, "hf://me/model", "--include", "*.md")
    assert done.exit_code == 0
    assert hub.files("me/model")["notes.md"] == b"fine" and "docs/more.md" not in hub.files("me/model")
    for pattern, said in {"*.safetensors": "has weights", "*.rst": "no file of"}.items():
        done = run("export", folder, "hf://me/model", "--include", pattern)
        assert done.exit_code == UsageError.exit_code and said in done.stderr
    done = run("export", folder, "hf://me/model", "--commit-message", f"with {token}")
    assert done.exit_code == UsageError.exit_code and token not in done.stderr


def test_what_is_no_secret(hub: Hub, tmp_path: Path) -> None:
    """Placeholders, examples of documentation, code and vocabularies."""
    folder = model(tmp_path / "run")
    chance = random.Random(0)
    # As many random pieces as a real vocabulary has, and all sequences that begin like a token.
    pieces = {text(chance, chance.randint(1, 16)): i for i in range(100_000)} | {"hf_": -1, "sk-": -2, "AKIA": -3}
    (folder / "vocab.json").write_text(json.dumps(pieces))
    (folder / "README.md").write_text(
        "login with `hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx`, AKIAIOSFODNN7EXAMPLE\n"
        "or sk-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n"
        "`-----BEGIN PRIVATE KEY-----` begins a key. See https://user:password@example.org, http://x:${TOKEN}@host.\n"
        "from_pretrained(x, use_auth_token=True, hub_token=os.environ['HF_TOKEN'],\n"
        "api_key=settings.api_key_of_server1)\n"
        "risk-neutral-pricing-with-a-very-long-slug-2024 ghp_ hf_transfer xoxb- model sha256 " + "a1" * 32 + "\n"
    )
    done = run("export", folder, "hf://me/model")
    assert done.exit_code == 0, done.stderr
    assert "vocab.json" in hub.files("me/model")


def test_what_is_sent_is_listed_before_it_is(hub: Hub, tmp_path: Path) -> None:
    folder = model(tmp_path / "run")
    done = run("export", folder, "hf://me/model", "--dry-run")
    assert all(name in done.stdout for name in NEEDED) and "would be created, private" in done.stdout
    hub.fail("POST", "/preupload/", status=403)
    done = run("export", folder, "hf://me/model")
    assert done.exit_code == 8
    assert done.stderr.startswith("sending 11 files beside the weights: ") and all(n in done.stderr for n in NEEDED)
    hub.faults.clear()
    assert run("export", folder, "hf://me/model", "--private", "--public").exit_code == UsageError.exit_code
    done = run("export", folder, "hf://me/other", "--public")
    assert done.exit_code == 0 and "created, public" in done.stdout and not hub.repos["me/other"].private


def test_every_file_that_transformers_writes_is_an_asset() -> None:
    """By the constants of the installed transformers."""
    import re

    transformers = pytest.importorskip("transformers")
    from ckpttool.models import asset_names

    names = set()
    for path in Path(transformers.__file__).parent.rglob("tokenization_*.py"):
        for found in re.findall(r"VOCAB_FILES_NAMES\s*=\s*\{([^}]*)\}", path.read_text()):
            names |= set(re.findall(r':\s*"([^"]+)"', found))
    for path in Path(transformers.__file__).parent.rglob("configuration_*.py"):
        for found in re.findall(r"^ *(?:[A-Z_, ]+_NAME|extra_config_files\b.*?) = (.*)", path.read_text(), re.M):
            names |= set(re.findall(r'"([\w.]+)"', found))
    names |= {value for key, value in vars(transformers.utils).items() if re.fullmatch(r"[A-Z_]+_NAME", key)}
    weights = re.compile(r".*\.(safetensors|bin|h5|msgpack)(\.index\.json)?")
    others = {name for name in names if isinstance(name, str) and "." in name and not weights.fullmatch(name)}
    assert len(others) > 30
    assert {name for name in others if not asset_names._NAMES.fullmatch(name)} == set()


def states(token: str) -> list[dict[str, Any]]:
    """Training states with a token where scripts leave one."""
    wrapped = {"path": {"to": ["list", ("tuple", {"of": token})]}}
    return [
        {"hyper_parameters": {"hub": token, "lr": 0.1}},
        {"args": argparse.Namespace(report_to="wandb", login=token)},
        {"config": wrapped, "log": ["a", "b", f"text before it\n{token}\nand after"]},
        {"config": {f"\n{token}": 1}},  # a line of .netrc begins one
        {"blob": token.encode(), "config": wrapped},
    ]


def sent(hub: Hub, token: str) -> bool:
    """Whether a token is in anything that the server keeps."""
    large = [path.read_bytes() for path in hub.store.iterdir()]
    small = [f.data or b"" for repo in hub.repos.values() for c in repo.commits.values() for f in c.files.values()]
    return any(core(token) in data for data in [*large, *small])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", tokens(random.Random(0)))
def test_a_secret_in_a_state_is_not_sent(hub: Hub, tmp_path: Path, kind: str) -> None:
    token = tokens(random.Random(kind))[kind]
    for number, state in enumerate(states(token)):
        path = tmp_path / f"{number}.pt"
        torch.save({"model": {"w": torch.ones(3, 4)}, **state}, path)
        for words in (("convert", path, "hf://me/run/x.pt"), ("reshard", path, "hf://me/run/x", "--to-world", "2")):
            done = run(*words, "--json")
            error = json.loads(done.stdout)["error"]
            assert done.exit_code == UsageError.exit_code and "nothing is sent" in error["message"], (number, words)
            assert core(token).decode() not in done.output and not hub.repos
    assert not any(one.method == "PUT" for one in hub.seen)
    # The model goes, and everything where the user says that it is none, or to a directory.
    assert run("convert", tmp_path / "1.pt", "hf://me/run/model.pt", "--only", "model").exit_code == 0
    name = json.loads(run("convert", tmp_path / "0.pt", "hf://me/run/y.pt", "--json").stdout)["error"]["found"][0]
    name = name.split("`")[1]
    assert name == "hyper_parameters.hub"
    assert run("convert", tmp_path / "0.pt", "hf://me/run/y.pt", "--not-secret", name).exit_code == 0
    assert sent(hub, token)
    assert run("reshard", tmp_path / "0.pt", "hf://me/run/z", "--to-world", "1", "--not-secret", name).exit_code == 0
    assert run("convert", tmp_path / "0.pt", tmp_path / "y.pt", "--to", "torch").exit_code == 0


def test_what_is_no_secret_of_a_state(hub: Hub, tmp_path: Path) -> None:
    run_id = "5f3d2c1b0a99887766554433221100ffeeddccbb"
    hyper_parameters = {"token": "your-token-here", "run": run_id, "api_key": None, "tokens": 12345, "key": "a" * 40}
    shared = ["x" * 1000]
    for _ in range(40):
        shared = [shared, shared]  # 2**40 mentions
    torch.save({"model": {"w": torch.ones(3)}, "hyper_parameters": hyper_parameters, "log": shared}, tmp_path / "a.pt")
    torch.save({"model": {"w": torch.ones(3)}, "hyper_parameters": hyper_parameters}, tmp_path / "b.pt")
    assert not secrets.in_catalogue(ckpttool.inspect(tmp_path / "a.pt"))
    assert run("convert", tmp_path / "b.pt", "hf://me/run/b.pt").exit_code == 0
    done = run("convert", tmp_path / "b.pt", "hf://me/run/c.pt", "--not-secret", "hyper_parameters.kye")
    assert done.exit_code == UsageError.exit_code and "hyper_parameters.key" in done.output
    assert run("convert", tmp_path / "b.pt", tmp_path / "c.pt", "--not-secret", "x").exit_code == UsageError.exit_code


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_secret_in_the_metadata_of_safetensors(hub: Hub, tmp_path: Path, command: str) -> None:
    token = tokens(random.Random(1))["github"]
    folder = model(tmp_path / "run")
    save_file({"w": torch.ones(3, 4)}, folder / "model.safetensors", {"note": f"made with {token}", "format": "pt"})
    done = run(command, folder, "hf://me/model", *(("--to", "safetensors") if command == "convert" else ()))
    assert not sent(hub, token)
    assert done.exit_code == (UsageError.exit_code if command == "convert" else 0), done.output
