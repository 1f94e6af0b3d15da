"""The hook that is put into the process of a script: what it sees, and that the script trains as without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from ckpttool.resume import observe as inject
from ckpttool.resume.observe.site import keep
from ckpttool.resume.observe.site.state import digest, joined, plain
from ckpttool.resume.observe.site.variables import Variables
from ckpttool.resume.steps import changed_by_saves

SCRIPT = str(Path(__file__).with_name("run_hook.py"))


def start(words: list[str], folder: Path, **how: object) -> inject.Hooked:
    """Start a program with the hook; `folder` gets what it writes."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, **inject.environment(str(folder), **how)}  # type: ignore[arg-type]
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return inject.read(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hooked")


@pytest.fixture(scope="module")
def seen(folder: Path) -> tuple[inject.Hooked, list[str]]:
    hooked = start([SCRIPT, str(folder / "out")], folder / "hook", observe=True)
    return hooked, (folder / "out").read_text().splitlines()


def test_each_step_is_seen(folder: Path, seen: tuple[inject.Hooked, list[str]]) -> None:
    hooked, lines = seen
    assert not hooked.failures and hooked.processes == 1
    assert hooked.count == 9  # three steps of two optimizers, and of the one that steps them
    assert [*inject.taken(str(folder / "hook")).values()] == [9]
    assert "torch.manual_seed(0 + rank)" in hooked.switches
    # The optimizer that steps two others is not a third.
    steps = hooked.steps[0]
    assert [(one.step, one.optimizer) for one in steps] == [
        (n, name) for n in (1, 2, 3) for name in ("AdamW 2 0", "SGD 2 0")
    ]
    assert [one.lr for one in steps] == [[0.25], [0.5], [0.125], [0.5], [0.0625], [0.5]]
    body = steps[::2]
    assert len({one.batch for one in body}) == 3 and all(len(one.fetched) == 1 for one in body)
    assert len({one.parameters for one in body}) == len({one.rng["torch"] for one in body}) == 3
    assert {len({one.rng[kind] for one in body}) for kind in ("python", "numpy")} == {3}
    assert all(one.gradient_norm and one.loss for one in body) and len(lines) == 3


@pytest.mark.long
def test_a_script_trains_as_without_the_hook(seen: tuple[inject.Hooked, list[str]], tmp_path: Path) -> None:
    plain = start([SCRIPT, str(tmp_path / "out")], tmp_path / "hook", seed=None)
    assert not plain.processes and not plain.steps
    assert (tmp_path / "out").read_text().splitlines() == seen[1]


def test_a_sitecustomize_that_was_there_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = __file__\n")
    (tmp_path / "torch.py").write_text("__version__ = 'none'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Looked for first, and imported later, as transformers does.
    code = (
        "import importlib.util, os, sys; assert os.environ['SEEN'] == sys.modules['sitecustomize'].__file__\n"
        "assert importlib.util.find_spec('torch') and importlib.util.find_spec('absent') is None\n"
        "import torch; assert 'exec_module' not in vars(torch.__spec__.loader)"
    )
    hooked = start(["-c", code], tmp_path / "hook", observe=True)
    # A torch that is another program is not broken either: what could not be done is told.
    assert hooked.processes == 1 and hooked.switches == ["random.seed(0 + rank)"]
    assert any("torch.manual_seed" in one for one in hooked.failures)
    assert any("watch optimizers" in one for one in hooked.failures), hooked.failures


def test_what_a_save_changes_is_seen(tmp_path: Path) -> None:
    """Numbers that it draws, and weights that it rounds in place; not what changes after each step, too."""
    code = (
        "import random, sys, torch; m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters())\n"
        "for n in range(1, 9):\n"
        "  m(torch.ones(2, 2) * n).sum().backward(); o.step(); random.random()\n"
        "  if n % 2 == 0:\n"
        "    torch.rand(1); m.weight.data.copy_(m.weight.bfloat16())\n"
        "    torch.save(m.state_dict(), f'{sys.argv[1]}/{n}.pt')"
    )
    (tmp_path / "out").mkdir()
    folders = str(tmp_path / "out"), str(tmp_path / "kept")
    steps = start(["-c", code, folders[0]], tmp_path / "hook", observe=True, keep=folders).steps[0]
    assert changed_by_saves(steps) == ["torch", "weights"]
    assert [one.between["saved"] for one in steps if one.between] == [False, True] * 3 + [False]
    assert changed_by_saves(steps[:4]) == [], "one save shows nothing"


def test_a_disk_that_is_full_costs_the_copy_and_not_the_record_of_a_step(tmp_path: Path) -> None:
    code = (
        "import sys, torch; m = torch.nn.Linear(2, 2); o = torch.optim.SGD(m.parameters())\n"
        "for n in range(1, 4):\n"
        "  m(torch.ones(2, 2) * n).sum().backward(); o.step(); torch.save(m.state_dict(), f'{sys.argv[1]}/{n}.pt')"
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "file").touch()  # nothing can be written below it
    folders = str(tmp_path / "out"), str(tmp_path / "file" / "kept")
    hooked = start(["-c", code, folders[0]], tmp_path / "hook", observe=True, keep=folders)
    assert [*hooked.states] == [2, 3] and any(one.startswith("keep: ") for one in hooked.failures), hooked.failures


def test_a_line_is_one_write(tmp_path: Path) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **inject.environment(str(tmp_path))}
    words = [sys.executable, "-c", "print('step', 4, 'loss', 2.5); print('step', 5)"]
    with one, other:
        subprocess.run(words, env=environment, stdout=other, check=True, timeout=300)
        assert [one.recv(100), one.recv(100)] == [b"step 4 loss 2.5\n", b"step 5\n"]


def test_a_run_that_resumes_lists_directories_backwards_and_walks_them(tmp_path: Path) -> None:
    (tmp_path / "data" / "inner").mkdir(parents=True)
    for name in "abc":
        (tmp_path / "data" / name).touch()
    code = (
        "import glob, os, pathlib, shutil, sys; os.chdir(sys.argv[1])\n"
        "entries = os.scandir('data'); first = next(entries).name; entries.close(); assert not [*entries]\n"
        "with os.scandir('data') as entries: names = [one.name for one in entries]\n"
        "walked = [sorted(files) for _, _, files in os.walk('data')]\n"
        "assert first == names[0] and names == os.listdir('data') and walked == [['a', 'b', 'c'], []], names\n"
        "assert len(glob.glob('data/**', recursive=True)) == 5 == len([*pathlib.Path('data').rglob('*')]) + 1\n"
        "shutil.copytree('data', 'copy'); shutil.rmtree('copy')\n"
        "open(sys.argv[2], 'w').write(' '.join(names))"
    )
    listed = {}
    for is_resumed in (False, True):
        out = tmp_path / str(is_resumed)
        start(["-c", code, str(tmp_path), str(out)], tmp_path / f"hook {is_resumed}", is_backwards=is_resumed)
        listed[is_resumed] = out.read_text().split()
    assert listed[True] == listed[False][::-1] and len(listed[True]) == 4


def test_what_the_user_has_set_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PYTHONHASHSEED", "7"), ("PYTHONPATH", "/mine")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    variables = inject.environment(str(tmp_path))
    assert variables["PYTHONHASHSEED"] == "7" and variables["PYTHONPATH"] == os.pathsep.join((inject.SITE, "/mine"))
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert inject.environment(str(tmp_path), seed=None) == {}
    monkeypatch.delenv("PYTHONHASHSEED")
    one, other = (inject.environment(str(tmp_path), seed=seed) for seed in (1, 2))
    assert one["PYTHONHASHSEED"] != other["PYTHONHASHSEED"]
    unseeded = inject.environment(str(tmp_path), seed=None, observe=True)
    assert unseeded.keys() == {"PYTHONPATH", "CKPTTOOL_HOOK"}


def test_a_line_that_was_cut_is_left_out(tmp_path: Path, seen: tuple[inject.Hooked, list[str]]) -> None:
    import dataclasses
    import json

    line = json.dumps({"step": dataclasses.asdict(seen[0].steps[0][0])})
    (tmp_path / "hook.7.jsonl").write_text(f"{line}\n{line[: len(line) // 2]}")
    assert inject.read(str(tmp_path)).steps == {0: seen[0].steps[0][:1]}


def test_programs_of_one_command_are_told_apart(tmp_path: Path, seen: tuple[inject.Hooked, list[str]]) -> None:
    """As in `sh -c "python train.py; python average.py"`, whose last one takes steps, too."""
    import dataclasses
    import json

    step = dataclasses.asdict(seen[0].steps[0][0])
    for process, program, count in ((7, "train.py", 5), (8, "train.py", 3), (9, "average.py", 4)):
        lines = {"did": [], "program": program}, {"event": program, "at": 1}, {"step": {**step, "step": process}}
        (tmp_path / f"hook.{process}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        (tmp_path / f"count.{process}").write_bytes(b"a" * count)
    for asked, own, count in (("", "train.py", 5), ("average.py", "average.py", 4), ("resume.py", "train.py", 5)):
        hooked = inject.read(str(tmp_path), asked)
        assert (hooked.program, hooked.count) == (own, count)
        assert {event for event, _ in hooked.events} == {own}
        assert {one.step for one in hooked.steps[0]} <= ({7, 8} if own == "train.py" else {9})
    # That which saves is the one that is verified, and not one before it that takes more steps.
    assert inject.read(str(tmp_path), "", {"9"}).program == "average.py"
    # While they run, by what each process has done.
    assert inject.taken(str(tmp_path)) == {"7": 5, "8": 3, "9": 4}
    assert inject.events(str(tmp_path), {"9"}) == [("average.py", 1)]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_compiled_model(tmp_path: Path, backend: str) -> None:
    code = (
        "import torch; torch.manual_seed(0); m = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2), "
        f"torch.nn.Linear(2, 1)), fullgraph=True, backend={backend!r}); o = torch.optim.SGD(m.parameters())\n"
        "for n in range(3): m(torch.ones(2, 2) * n).sum().backward(); o.step()"
    )
    steps = start(["-c", code], tmp_path / "hook", observe=True).steps[0]
    assert [one.step for one in steps] == [1, 2, 3] and len({one.batch for one in steps}) == 3


def test_schedulers_of_one_class_are_named_by_their_optimizers(tmp_path: Path) -> None:
    """Also where a script that resumes makes them in another order."""
    code = (
        "import sys, torch; from torch.optim.lr_scheduler import StepLR; torch.manual_seed(0)\n"
        "m = torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2)\n"
        "o = [torch.optim.SGD(one.parameters(), 0.5) for one in m]\n"
        "s = {at: StepLR(o[at], 10 * (at + 1)) for at in map(int, sys.argv[1:])}\n"
        "m[0](torch.ones(2)).sum().backward(); m[1](torch.ones(2), torch.ones(2)).sum().backward()\n"
        "o[0].step(), o[1].step()"
    )
    values = []
    for order in ("01", "10"):
        hooked = start(["-c", code, *order], tmp_path / order, observe=True, states=[1])
        (found,) = hooked.states[1].values
        values.append({key: value for key, value in found.items() if key.endswith(".step_size")})
    assert values[0] == values[1] and {*values[0].values()} == {10, 20}


@pytest.mark.long
def test_a_compiled_step_of_an_optimizer_is_observed_as_any_other(tmp_path: Path) -> None:
    code = (
        "import logging, sys, torch; logging.disable(); torch.manual_seed(0)\n"
        "m = torch.nn.Linear(4, 4); o = torch.optim.Adam(m.parameters(), 0.5)\n"
        "step = torch.compile(lambda: o.step(), backend='eager') if sys.argv[1:] else o.step\n"
        "for n in range(3): m(torch.ones(2, 4) * n).sum().backward(); step(); o.zero_grad()"
    )
    plain, compiled = (
        start(["-W", "ignore", "-c", code, *words], tmp_path / "".join(["hook", *words]), observe=True, states=[1, 3])
        for words in ([], ["compiled"])
    )
    assert not compiled.failures and {*compiled.states} == {*plain.states} == {1, 3}
    assert [one.step for one in compiled.steps[0]] == [1, 2, 3] and len({one.batch for one in compiled.steps[0]}) == 3


def test_what_was_saved_is_kept_before_it_is_written_over(tmp_path: Path) -> None:
    failed: list[str] = []
    out, kept = tmp_path / "out", tmp_path / "kept"
    out.mkdir()
    keeper = keep.Keeper(str(out), str(kept), lambda what, error: failed.append(what))
    # torch's own writer opens the file by itself, which no audit event tells of.
    torch = SimpleNamespace(save=lambda text, path: Path(path).write_text(text), serialization=SimpleNamespace())
    keeper.watch(torch)
    for text in ("1", "2", "3"):
        torch.save(text, out / "ckpt.pt")
        torch.save(text, tmp_path / "elsewhere.pt")
    (tmp_path / "new.pt").write_text("4")
    for event in (("os.rename", (str(tmp_path / "new.pt"), str(out / "ckpt.pt"), -1, -1)), ("os.remove", ("no", -1))):
        keeper.audit(*event)
    keeper.audit("open", (str(out / "ckpt.pt"), "rb", os.O_RDONLY))
    keeper.audit("open", (3, "wb", os.O_WRONLY))
    texts = []
    for number, snapshot in enumerate(keep.snapshots(str(kept))):
        keep.restore(snapshot, str(tmp_path / f"{number}"))
        texts.append((tmp_path / f"{number}" / "ckpt.pt").read_text())
    assert texts == ["1", "2", "3"] and keep.moment(keep.snapshots(str(kept))[0]) is None
    # A copy that cannot be made does not end the script.
    keeper._folder = str(out / "ckpt.pt" / "no")
    (out / "ckpt.pt").write_text("4")
    torch.save("5", str(out / "ckpt.pt"))
    assert failed == ["a copy of what was saved"] and (out / "ckpt.pt").read_text() == "5"


def test_a_directory_is_kept_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links, folders, and logs that only grow, which alone are no save; a large file has two names until it is written
    into."""
    monkeypatch.setattr(keep, "_LARGE", 4)
    out, kept = tmp_path / "out", tmp_path / "kept"
    (out / "step-1").mkdir(parents=True)
    keeper = keep.Keeper(str(out), str(kept))
    assert keeper.keep(1)  # there is a folder now
    assert not keeper.keep(2)
    (out / "step-1" / "model.pt").write_text("weights")
    (out / "latest").symlink_to("step-1")
    (out / "log").write_text("1\n")
    assert keeper.keep(3) >= len("weights1\n")
    for step in range(4, 6):
        with open(out / "log", "a") as log:
            log.write(f"{step}\n")
        assert not keeper.keep(step)
    before = os.stat(out / "step-1" / "model.pt")
    assert before.st_nlink == 2
    keeper.audit("open", (str(out / "step-1" / "model.pt"), "r+b", os.O_RDWR))
    with open(out / "step-1" / "model.pt", "r+") as stream:
        stream.write("W")
    assert keeper.keep(6)
    _, third, _, last = keep.snapshots(str(kept))
    assert (keep.moment(third), keep.moment(last)) == (3, 6)
    for number, (snapshot, text, log_of) in enumerate([(third, "weights", "1\n"), (last, "Weights", "1\n4\n5\n")]):
        was = tmp_path / f"was {number}"
        keep.restore(snapshot, str(was))
        assert (was / "latest" / "model.pt").read_text() == text and os.readlink(was / "latest") == "step-1"
        assert (was / "log").read_text() == log_of
    assert os.stat(tmp_path / "was 0" / "step-1" / "model.pt").st_mtime_ns == before.st_mtime_ns
    # Another writer than Python has written over a file that has two names.
    [version] = [one for one in (kept / "versions").iterdir() if one.read_text() == "Weights"]
    version.write_text("nothing")
    with pytest.raises(ValueError, match="step-1/model"):
        keep.restore(last, str(tmp_path / "no"))


def test_what_a_script_keeps_is_looked_at_without_a_call_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Shuffled(list[int]):
        def __iter__(self) -> Iterator[int]:
            calls.append("iterated")
            return super().__iter__()

    class Lazy(dict[str, int]):
        def __iter__(self) -> Iterator[str]:
            calls.append("keys")
            return super().__iter__()

        def __getitem__(self, key: str) -> int:
            calls.append(key)
            return super().__getitem__(key)

    class Source:
        def item(self) -> int:
            calls.append("item")
            return len(calls)

        def __getattr__(self, name: str) -> object:
            calls.append(name)
            raise AttributeError(name)

    class Proxy:
        """As of a request, outside of which it is nothing."""

        @property
        def __class__(self) -> type:
            calls.append("class")
            raise RuntimeError("there is no request")

        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            calls.append("dict")
            raise RuntimeError("there is no request")

    class Share(float):
        def __repr__(self) -> str:
            calls.append("repr")
            raise RuntimeError("it has no text")

    class Counters:
        __slots__ = ("best", "step")

        def __init__(self) -> None:
            self.step = 7

    loop: list[object] = []
    loop.append(loop)
    gone = weakref.proxy(Source())
    kept = {"order": Shuffled([3, 1]), "all": [Shuffled([2])], "lazy": Lazy(seen=4), "sources": [Source()]}
    kept |= {"proxy": Proxy(), "proxies": [Proxy()], "counters": Counters(), "share": Share(0.5)}
    monkeypatch.setattr(sys.modules["__main__"], "kept", {"gone": gone, "loop": loop, **kept}, raising=False)
    found = Variables(torch, ()).find((), {}, ())["variables"]
    names = ("order", "all", "lazy.seen", "sources", "counters.step", "share")
    assert {name: found[f"kept.{name}"] for name in names} == {
        "order": [3, 1],
        "all": [[2]],
        "lazy.seen": 4,
        "sources": ["Source"],
        "counters.step": 7,
        "share": 0.5,
    }
    assert calls == []


def test_sparse_tensors_have_digests() -> None:
    places, values = torch.tensor([[0, 1], [1, 2]]), torch.tensor([1.0, 2.0])
    coo = torch.sparse_coo_tensor(places, values, (3, 3)).coalesce()
    other = torch.sparse_coo_tensor(places.flip(1), values, (3, 3)).coalesce()
    for was, now in ((coo, other), (coo.to_sparse_csr(), other.to_sparse_csr())):
        records = [digest(torch, one, rounded=False) for one in (was, was.clone(), now)]
        assert "unseen" not in records[0], records[0]
        assert records[0] == records[1] and records[0]["sha256"] != records[2]["sha256"]


class Scaled(torch.Tensor):
    """Codes inside, and a scale that is a number."""

    codes: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> Scaled:  # noqa: PYI034
        one: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape)  # type: ignore[attr-defined]
        one.codes, one.scale = codes, scale
        return one

    def __tensor_flatten__(self) -> tuple[list[str], tuple[float]]:
        return ["codes"], (self.scale,)

    @classmethod
    def __torch_dispatch__(
        cls, function: object, types: object, args: tuple[Any, ...], kwargs: object = None
    ) -> Scaled:
        assert function is torch.ops.aten.detach.default
        return cls(args[0].codes, args[0].scale)


def test_a_scale_that_is_no_tensor_is_in_the_digest_of_a_wrapper() -> None:
    codes = torch.ones(3, dtype=torch.int8)
    was, again, now = (digest(torch, Scaled(codes, scale)) for scale in (0.5, 0.5, 1.0))
    assert "unseen" not in was and was == again and was["sha256"] != now["sha256"]


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_without_an_address_is_not_read() -> None:
    masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    assert digest(torch, masked)["unseen"] == "ValueError"  # its address is 0


def test_arrays_are_plain_values() -> None:
    values = [numpy.array([0.5, 1.0]), numpy.array([]), {"table": numpy.arange(2)}, numpy.float64(2)]
    assert [*map(plain, values)] == [[0.5, 1.0], [], {"table": [0, 1]}, 2.0]


def test_many_small_tensors_are_looked_at_as_few() -> None:
    small = [torch.full((2, 2), float(one)) for one in range(5_000)]
    halves, large = torch.ones(3, dtype=torch.bfloat16), torch.arange(1 << 13)
    every = [*joined(torch, [*small[:100], halves, large, *small[100:]])]
    first, second, third, fourth = every
    assert first is large and torch.equal(third, halves)
    assert torch.equal(torch.cat([second, fourth]), torch.cat([one.reshape(-1) for one in small]))


def test_many_values_take_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {str(one): {str(other): {"x": other} for other in range(50)} for one in range(1_000)}
    monkeypatch.setattr(sys.modules["__main__"], "many", many, raising=False)
    began = time.process_time()
    Variables(torch, ()).find((), {}, ())
    assert time.process_time() - began < 5  # a minute if a set is made anew for each of the 50,000


def test_many_items_take_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {str(one): [*range(4_000)] for one in range(2_000)}
    monkeypatch.setattr(sys.modules["__main__"], "many", many, raising=False)
    began = time.process_time()
    Variables(torch, ()).find((), {}, ())
    assert time.process_time() - began < 10  # twice that if the file of the class of each of the 8,000,000 is looked up
