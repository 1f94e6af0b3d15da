"""The user's recipe: what is wrong with one is said with its name and line, and the one that `init` writes trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import warm_python
from support.paths import ROOT
from typer.testing import CliRunner, Result

from ckpttool.analysis.audit import recipe as recipes
from ckpttool.cli.app import application
from ckpttool.errors import OverwriteError, StorageError, UsageError
from ckpttool.resume.worker import setup

STEP = "def step(state, i):\n    return 0.0\n"
PLAIN = "import torch\ndef build(mesh):\n    return {}\n" + STEP


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(application(), list(words))


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("def bild(mesh):\n    pass\n" + STEP, "has no function `build`", "did you mean `bild`"),
        ("def build(mesh):\n    pass\n", "has no function `step`", "init"),
        ("def build():\n    pass\n" + STEP, "`build` cannot be called as `build(mesh)`", "def build(mesh):"),
        (
            "def build(mesh):\n    pass\ndef step(state):\n    pass\n",
            "cannot be called as `step(state, i)`",
            "def step",
        ),
        ("build = 3\n" + STEP, "`build` is int, not a function", "init"),
        ("import nowhere_at_all\n", "does not run at line 1: ModuleNotFoundError", None),
        ("x = 1\ny = (\n", "does not run at line 2: SyntaxError", None),
        ("mesh = 4\ndef build(mesh):\n    pass\n" + STEP, "`mesh` is int", "init"),
    ],
)
def test_what_is_no_recipe(tmp_path: Path, text: str, says: str, hint: str | None) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        recipes.load_recipe(path)
    assert caught.value.message.startswith(f"`{path}`: ")
    assert says in caught.value.message
    assert hint is None or hint in str(caught.value.hint)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such recipe"):
        recipes.load_recipe(tmp_path / "mine.py")
    (tmp_path / "mine.txt").write_text(PLAIN)
    with pytest.raises(UsageError, match=r"the suffix `\.py`"):
        recipes.load_recipe(tmp_path / "mine.txt")


def test_a_recipe_imports_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_a_recipe.py").write_text("LOSS = 4.5\n")
    path = written(
        tmp_path, PLAIN.replace("import torch", "import beside_a_recipe").replace("0.0", "beside_a_recipe.LOSS")
    )
    assert recipes.load_recipe(path).step({}, 0) == 4.5


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", None),
        ("return {'replicate': 2, 'shard': world // 2}", None),
        ("return 3", "`mesh(4)` is 3, not a dict of dimensions"),
        ("return {'dp': world}", "`mesh(4)` has an unknown dimension `dp`"),
        ("return {'shard': 2.0, 'tp': 2}", "the size of `shard` is 2.0"),
        ("return {'shard': 2, 'tp': 1}", "`mesh(4)` is shard=2,tp=1, which has 2 ranks"),
        ("return {'shard': world // 0}", "`mesh(4)` fails at line 7: ZeroDivisionError"),
    ],
)
def test_the_mesh_of_a_recipe(tmp_path: Path, body: str, says: str | None) -> None:
    recipe = recipes.load_recipe(written(tmp_path, PLAIN + (f"def mesh(world):\n    {body}\n" if body else "")))
    if says is None:
        assert recipes.recipe_mesh(recipe, 4).size == ({"replicate": 2, "shard": 2} if body else {"shard": 4})
        return
    with pytest.raises(UsageError) as caught:
        recipes.recipe_mesh(recipe, 4)
    assert says in caught.value.message


MODEL = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
GOOD = {"model": MODEL, "optimizer": OPTIMIZER}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (GOOD | {"noise": torch.Generator(), "scheduler": torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)}, None),
        ((MODEL, OPTIMIZER), "`build(mesh)` returned tuple, not a dict"),
        ({"model": MODEL, "optim": OPTIMIZER}, "has no `optimizer`"),
        ({"model": OPTIMIZER, "optimizer": OPTIMIZER}, "`model` is SGD, not a torch.nn.Module"),
        (GOOD | {"epoch": 3}, "`epoch` is int, which has no state to save"),
    ],
)
def test_what_build_returns(made: Any, says: str | None) -> None:
    recipe = recipes.Recipe("mine.py", lambda mesh: made, lambda state, i: 0.0)
    if says is None:
        assert recipes.build_state(recipe, None) is made
        return
    with pytest.raises(UsageError) as caught:
        recipes.build_state(recipe, None)
    assert says in caught.value.message


def test_a_build_that_fails_says_where(tmp_path: Path) -> None:
    recipe = recipes.load_recipe(written(tmp_path, "def build(mesh):\n    x = 1\n    raise KeyError('w')\n" + STEP))
    with pytest.raises(UsageError, match=r"`build\(mesh\)` fails at line 3: KeyError: 'w'"):
        recipes.build_state(recipe, None)


# init -----------------------------------------------------------------------------------------------------------------


def test_init_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("verify-resume", "init").exit_code == 0
    before = (tmp_path / "recipe.py").read_text()
    assert (run("verify-resume", "init", "-q").exit_code, run("verify-resume", "init", "mine.py", "-q").stdout) == (
        OverwriteError.exit_code,
        "mine.py\n",
    )
    assert (tmp_path / "recipe.py").read_text() == before
    assert (tmp_path / "mine.py").read_text() == before.replace("recipe.py", "mine.py")
    assert run("verify-resume", "init", "mine.txt").exit_code == UsageError.exit_code
    assert run("verify-resume", "init", str(tmp_path / "nowhere" / "mine.py")).exit_code == StorageError.exit_code


TRAIN = """
import sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from ckpttool.analysis.audit import recipe as recipes

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
recipe = recipes.load_recipe(sys.argv[1])
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=recipes.recipe_mesh(recipe, 1).names)
state = recipes.build_state(recipe, mesh)
losses = [float(recipe.step(state, i)) for i in range(4)]
assert state["scheduler"].last_epoch == 4 and losses[0] != losses[1], losses
"""


SAMPLES = ("recipe_fsdp2.py", "recipe_fsdp1.py", "recipe_ddp.py", "recipe_transformers.py")


@pytest.mark.parametrize("name", ["init", *(pytest.param(name, marks=pytest.mark.long) for name in SAMPLES)])
def test_recipes_run_as_they_are(tmp_path: Path, name: str) -> None:
    path = ROOT / "samples" / name
    if name == "init":
        path = tmp_path / "recipe.py"
        recipes.write_template(path)
    words = [*warm_python.python(), "-c", TRAIN, str(path)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr


class Devices:
    """What torch has for the devices of a kind, two of which this process sees."""

    def __init__(self) -> None:
        self.states = [torch.full((16,), number, dtype=torch.uint8) for number in range(2)]
        self.is_initialized, self.device_count, self.current_device = (lambda: True), (lambda: 2), (lambda: 1)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [one.clone() for one in self.states]

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


def test_the_generators_of_all_devices_are_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Devices()
    monkeypatch.setattr(setup.devices, "kind", lambda: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: here)
    saved, before = setup.captured({}), here.get_rng_state_all()
    here.states = [torch.zeros_like(one) for one in before]
    assert setup.restore(saved, {}) == [] and all(map(torch.equal, here.states, before))
    # By the names of others, of one device or of more than this process sees.
    third = torch.full((16,), 3, dtype=torch.uint8)
    others = {"random_state": saved["python"], "numpy_random_seed": saved["numpy"], "cpu": saved["torch"]}
    assert setup.restore({**others, "torch_cuda_manual_seed": [*before, third]}, {}) == []
    assert setup.restore({**others, "cuda": third}, {}) == [] and all(map(torch.equal, here.states, [before[0], third]))
    assert setup.restore({"numpy": saved["numpy"]}, {}) == ["python", "torch", "cuda"]
