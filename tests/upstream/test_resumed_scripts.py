"""`verify-resume run` with scripts that nobody here wrote, unchanged, with small models and data of our own.

The scripts are in checkouts of transformers, accelerate, nanoGPT, torchtitan and PyTorch's examples in the folder that
CKPTTOOL_SCRIPTS names; CKPTTOOL_SCRIPTS_PYTHON is a Python that has what they import. torchtune has its scripts in its
package; CKPTTOOL_TORCHTUNE_PYTHON is a Python that has it, with torchao 0.13, and is the former by default.
docs/explanation/what-resumes.md has the findings.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool.cli.presets import fill
from ckpttool.resume.results import RunReport
from ckpttool.resume.runs import run

CHECKOUTS = Path(os.environ.get("CKPTTOOL_SCRIPTS", "/nowhere"))
PYTHON = os.environ.get("CKPTTOOL_SCRIPTS_PYTHON", sys.executable)
TORCHTUNE = os.environ.get("CKPTTOOL_TORCHTUNE_PYTHON", PYTHON)
FSDP2 = str(Path(__file__).with_name("fsdp2_on_cpu.py"))
TITAN = str(Path(__file__).with_name("titan_on_cpu.py"))
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NAMES = {
    "clm": "transformers/examples/pytorch/language-modeling/run_clm.py",
    "nlp": "accelerate/examples/complete_nlp_example.py",
    "checkpointing": "accelerate/examples/by_feature/checkpointing.py",
    "nanogpt": "nanoGPT/train.py",
    "titan": "torchtitan/torchtitan/train.py",
    "fsdp2": "examples/distributed/FSDP2/example.py",
}


def script(name: str) -> str:
    """The path of a script; the test is skipped where there is no checkout."""
    path = CHECKOUTS / NAMES[name]
    if not path.is_file():
        pytest.skip(f"no `{path}`: CKPTTOOL_SCRIPTS names a folder with checkouts")
    return str(path)


def verified(preset: str, *words: str, python: str = PYTHON, **options: Any) -> RunReport:
    """The report of a script, observed in each step."""
    command, filled = fill(preset, [python, *words], {"observe": True, "timeout": 600.0, **options})
    return run(command, **filled)


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def sentences(rows: int, words: int) -> list[str]:
    """Lines of words that no model can guess."""
    draw = random.Random(0)
    return [" ".join(f"w{draw.randrange(80)}" for _ in range(words)) for _ in range(rows)]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer and the configuration of a GPT-2, from which the commands are started."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    lines = sentences(400, 20)
    (tmp_path / "train.txt").write_text("\n".join(lines))
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(lines, trainers.WordLevelTrainer(special_tokens=special))
    names = dict(zip(("unk_token", "pad_token", "cls_token", "sep_token"), special, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)
    fast.save_pretrained(tmp_path / "gpt2")
    ids = {"bos_token_id": 2, "eos_token_id": 3}
    GPT2Config(vocab_size=len(fast), n_embd=32, n_layer=2, n_head=2, n_positions=64, **ids).save_pretrained(
        tmp_path / "gpt2"
    )
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "2"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


FSDP = ["--fsdp", "full_shard", "--fsdp_config", '{"version": 2}']


@pytest.mark.parametrize(
    ("ranks", "more"), [(1, []), (2, ["--ddp_backend", "gloo"]), (2, ["--ddp_backend", "gloo", *FSDP])]
)
def test_the_trainer_resumes_exactly(small: Path, ranks: int, more: list[str]) -> None:
    data = ["--train_file", "train.txt", "--validation_file", "train.txt", "--block_size", "32"]
    model = ["--config_name", "gpt2", "--tokenizer_name", "gpt2", "--per_device_train_batch_size", "4"]
    launcher = torchrun(ranks) if ranks > 1 else []
    report = verified(
        "trainer", *launcher, script("clm"), *model, *data, "--do_train", "--use_cpu", "--output_dir", "OUT", *more
    )
    assert report.verdict == "same", report.findings
    assert len([one for one in report.compared if one.what == "loss" and one.equal]) == 1


@pytest.fixture
def glue(small: Path) -> Path:
    """The folder with a small BERT and data like MRPC's, too."""
    pytest.importorskip("datasets")
    from datasets import Dataset
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(small / "gpt2")
    tokenizer.save_pretrained(small / "bert-base-cased")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    BertForSequenceClassification(config).save_pretrained(small / "bert-base-cased")
    glue = small / "nyu-mll" / "glue"
    for split, rows in (("train", 192), ("validation", 32)):
        pairs = zip(sentences(rows, 6), sentences(rows, 5), strict=True)
        made = [{"sentence1": a, "sentence2": b, "label": i % 2, "idx": i} for i, (a, b) in enumerate(pairs)]
        Dataset.from_list(made).to_parquet(str(glue / "mrpc" / f"{split}-0.parquet"))
    files = [{"split": split, "path": f"mrpc/{split}-*.parquet"} for split in ("train", "validation")]
    configs = {"configs": [{"config_name": "mrpc", "data_files": files}]}
    (glue / "README.md").write_text(f"---\n{json.dumps(configs)}\n---\n")
    metric = small / "glue" / "glue.py"
    metric.parent.mkdir()
    metric.write_text(METRIC)
    return small


@pytest.mark.parametrize("name", ["nlp", "checkpointing"])
def test_accelerate_shuffles_the_rest_of_an_epoch_again(glue: Path, name: str) -> None:
    report = verified("accelerate", script(name), "--cpu", "--output_dir", "OUT", until=7)
    assert report.verdict == "differs" and report.first_step == 5
    assert "the batch of rank 0 in step 5 is another" in report.message, report.findings


def test_accelerate_draws_a_number_more_on_two_ranks(glue: Path) -> None:
    report = verified("accelerate", *torchrun(2), script("nlp"), "--cpu", "--output_dir", "OUT", until=6)
    assert report.verdict == "differs" and report.first_step == 5
    assert any(row.what == "observed: next batch" and row.equal for row in report.compared), report.compared
    assert "the RNG state of rank 0, 1" in report.message


METRIC = """
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        kinds = {name: datasets.Value("int64") for name in ("predictions", "references")}
        features = datasets.Features(kinds)
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": 0.0, "f1": 0.0}
"""


def test_nanogpt_restarts_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    import numpy as np

    checkout = Path(script("nanogpt")).parent
    for name in ("train.py", "model.py", "configurator.py"):  # it looks for its data beside the script
        shutil.copy(checkout / name, tmp_path)
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    for name, count in (("train", 20000), ("val", 2000)):
        np.random.RandomState(0).randint(0, 64, count).astype(np.uint16).tofile(tmp_path / f"data/tiny/{name}.bin")
    monkeypatch.chdir(tmp_path)
    sizes = "--block_size=32 --batch_size=4 --n_layer=2 --n_head=2 --n_embd=32 --dropout=0.1 --warmup_iters=2"
    how = "--dataset=tiny --device=cpu --dtype=float32 --compile=False --eval_iters=20 --gradient_accumulation_steps=2"
    report = verified("nanogpt", "train.py", *sizes.split(), *how.split())
    assert report.verdict == "differs" and "the data restarted" in report.message


LIGHTNING = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

if __name__ == "__main__":
    LightningCLI(DemoModel, BoringDataModule)
"""


def test_lightning_restarts_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "main.py").write_text(LIGHTNING)
    monkeypatch.chdir(tmp_path)
    report = verified("lightning", "main.py", "fit", "--trainer.accelerator", "cpu")
    assert report.verdict == "differs" and "the data restarted" in report.message


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchtitan_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    checkout = Path(script("titan")).parents[1]
    (tmp_path / "tests" / "assets" / "c4_test").mkdir(parents=True)
    rows = [json.dumps({"text": line, "timestamp": "", "url": ""}) for line in sentences(400, 300)]
    (tmp_path / "tests" / "assets" / "c4_test" / "data.json").write_text("\n".join(rows))
    (tmp_path / "tests" / "assets" / "tokenizer").symlink_to(checkout / "tests" / "assets" / "tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(checkout), os.environ.get("PYTHONPATH", ""))))
    sizes = "--training.num_tokens_per_microbatch_per_dp_rank 256 --training.max_context_length 128"
    words = ["--module", "llama3", "--config", "llama3_debugmodel", *sizes.split()]
    # The default asks FSDP2 for what torch 2.13 has not.
    words += ["--parallelism.spmd_backend", "partial_dtensor"] if ranks > 1 else []
    report = verified("torchtitan", *torchrun(ranks), TITAN, *words)
    assert report.verdict == "same", report.findings


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small llama2, its data and its configurations, from which `tune` is started."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    made = [TORCHTUNE, str(Path(__file__).with_name("torchtune_model.py"))]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    if "No module named" in done.stderr:
        pytest.skip(f"{done.stderr.splitlines()[-1]}: CKPTTOOL_TORCHTUNE_PYTHON names a Python that has it")
    assert not done.returncode, done.stderr
    return tmp_path


def tuned(recipe: str, config: str, *words: str, **options: Any) -> RunReport:
    """The report of a recipe for one device, stopped after the first of three epochs."""
    start = ["-m", "torchtune._cli.tune", "run", recipe, "--config", config, *words]
    return verified("torchtune", *start, python=TORCHTUNE, **{"at": 1, "until": 3, "observe": False, **options})


def test_torchtune_resumes_a_full_finetuning_exactly(tune: Path) -> None:
    report = tuned("full_finetune_single_device", "full.yaml")
    assert report.verdict == "same", report.findings
    assert {row.what for row in report.compared} == {
        *(f"step 2: {part}" for part in ("model", "optimizer", "dataloader", "progress", "other")),
        "step 3: model",
        "loss",
    }
    words = ["max_steps_per_epoch=null", "checkpointer.safe_serialization=False"]
    whole = tuned("full_finetune_single_device", "full.yaml", *words)
    assert whole.verdict == "same", whole.findings
    assert {"step 2: model", "step 3: model"} <= {row.what for row in whole.compared}


def test_torchtune_saves_no_random_state(tune: Path) -> None:
    report = tuned("full_finetune_single_device", "full.yaml", "seed=1", observe=True)
    # Its data loader draws a number at each epoch, and nobody uses it.
    assert [one.kind for one in report.findings] == ["RNG state differs"]
    assert all(row.equal for row in report.compared if row.what != "observed: RNG state")
    report = tuned(*LORA, "save_adapter_weights_only=True", "seed=1", "model.lora_dropout=0.1", observe=True)
    assert report.verdict == "differs" and "the RNG state of rank 0 was not restored" in report.message


def test_torchtune_resumes_a_full_finetuning_on_two_ranks_exactly(tune: Path) -> None:
    wrapper = str(Path(__file__).with_name("torchtune_on_cpu.py"))
    words = [*torchrun(2), wrapper, "full_finetune_distributed", "--config", "full.yaml", "seed=1"]
    report = verified("torchtune", *words, python=TORCHTUNE, at=2, until=4, observe=False)
    assert report.verdict == "same", report.findings


def copied(recipe: str, name: str, text: str, other: str) -> None:
    """Copy a recipe as its user would, and change one line of it."""
    words = [TORCHTUNE, "-m", "torchtune._cli.tune", "cp", recipe, f"{name}.py"]
    subprocess.run(words, capture_output=True, check=True)
    source = Path(f"{name}.py").read_text()
    assert source.count(text) == 1
    Path(f"{name}.py").write_text(source.replace(text, other))


LORA = ("lora_finetune_single_device", "lora.yaml")


def test_torchtune_begins_the_schedule_of_lora_again(tune: Path) -> None:
    report = tuned(*LORA, "save_adapter_weights_only=True", "max_steps_per_epoch=null")
    assert report.verdict == "differs" and "the learning rate of parameter group 0 was not restored" in report.message
    # Fewer steps than an epoch has take the line that sets the step.
    assert tuned(*LORA, "save_adapter_weights_only=True").verdict == "same"


def test_torchtune_changes_what_it_trains_when_it_saves_merged_weights_on_a_cpu(tune: Path) -> None:
    # After the first step, whose learning rate is zero, there is nothing to merge.
    report = tuned(*LORA, at=2, until=4)
    assert (report.verdict, report.first_step) == ("differs", 3), report.message
    copied(LORA[0], "merged", "k: v.cpu()", "k: v.cpu().clone()")
    assert tuned("merged", "lora.yaml", at=2, until=4).verdict == "same"


def test_a_recipe_of_torchtune_that_forgets_the_optimizer(tune: Path) -> None:
    copied("full_finetune_single_device", "forgets", "optimizer.load_state_dict(opt_state_dict)", "pass")
    config = json.loads((tune / "full.yaml").read_text())
    del config["lr_scheduler"]
    config["checkpointer"]["checkpoint_files"] = ["model-00001-of-00001.safetensors"]
    (tune / "constant.yaml").write_text(json.dumps(config))
    report = tuned("forgets", "constant.yaml")
    assert (report.verdict, report.first_step) == ("differs", 2) and "optimizer" in report.message, report.message


def fsdp2(*more: str) -> RunReport:
    """The report of PyTorch's FSDP2 example: A trains 20 steps at once, B starts twice as it is."""
    command = [*torchrun(2), FSDP2, script("fsdp2"), "--steps", "20", *more]
    where, stop = "OUT/checkpoints/*_api/*", "max-steps=--steps"
    given: dict[str, Any] = {"at": 10, "until": 20, "checkpoints": where, "stop": stop, "timeout": 300.0}
    return run(["env", "-C", "OUT", PYTHON, *command], observe=True, **given)


@pytest.mark.parametrize("api", [["--dcp-api"], []])
def test_pytorchs_example_loads_all_that_it_saves(api: list[str]) -> None:
    report = fsdp2("--keep-rng", *api)
    assert report.verdict == "same", report.findings
    assert [[saved.step for saved in run.checkpoints] for run in report.runs] == [[20], [20], [10, 20]]


def test_pytorchs_example_saves_no_random_state() -> None:
    report = fsdp2("--dcp-api")
    assert (report.verdict, report.first_step) == ("differs", 11)
    assert "the batch of rank 0 in step 11 is another" in report.message
