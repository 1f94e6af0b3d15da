"""Makes `samples/checkpoints/deepspeed`: real runs of DeepSpeed 0.19.8 on CPUs with gloo, and what they are read as.

    python samples/generators/deepspeed_runs.py [NAME ...]     all, or some of them

Each is a directory with `saved`, what `engine.save_checkpoint` left, and `expected.pt`: the weights by DeepSpeed's own
`zero_to_fp32`, and the moments: of ZeRO 3 as the live optimizer of the run gave them, of ZeRO 1 and 2 by DeepSpeed's
own `ds_to_universal`. For fp16 the check of the device is turned off.
DeepSpeed is not among the requirements of the project: `DS_BUILD_OPS=0 pip install deepspeed==0.19.8`, in an
environment of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "checkpoints" / "deepspeed"
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}
ZERO3 = {"stage3_param_persistence_threshold": 0}
# World size, `zero_optimization` and the rest of the configuration.
RUNS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero0_fp32_w2": (2, {"stage": 0}, {}),
    "zero0_fp16_w2": (2, {"stage": 0}, FP16),
    "zero0_fp16_fused_w2": (2, {"stage": 0}, FP16),
    "zero1_w2": (2, {"stage": 1}, BF16),
    "zero1_elastic_w2": (2, {"stage": 1, "elastic_checkpoint": True}, BF16),
    "zero1_bf16_optimizer_w3": (3, {"stage": 1}, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero2_w3": (3, {"stage": 2}, BF16),
    "zero2_round_robin_w3": (3, {"stage": 2, "round_robin_gradients": True}, BF16),
    "zero2_fp16_w3": (3, {"stage": 2}, FP16),
    "zero2_fp32_w2": (2, {"stage": 2}, {}),
    "zero3_w3": (3, {"stage": 3, "sub_group_size": 40, **ZERO3}, BF16),
    "zero3_hpz_w4": (4, {"stage": 3, "zero_hpz_partition_size": 2, **ZERO3}, BF16),
    "zero3_fp32_w2": (2, {"stage": 3, **ZERO3}, {}),
    "zero3_fp16_w2": (2, {"stage": 3}, FP16),
}


def model_class() -> Any:
    import torch
    from torch import nn

    class Model(nn.Module):
        """Tied and frozen parameters, odd sizes, a parameter smaller than the world, buffers."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 5)
            self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
            self.norm = nn.LayerNorm(5)
            self.scale = nn.Parameter(torch.ones(1))
            self.frozen = nn.Parameter(torch.arange(5.0) / 8, requires_grad=False)
            self.head = nn.Linear(5, 13, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("seen", torch.tensor([3, 4]))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(ids) + self.frozen
            hidden = self.down(torch.relu(self.up(hidden))) * self.scale
            return self.head(self.norm(hidden))

    return Model


def groups_of(model: Any) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    is_matrix = [len(getattr(p, "ds_shape", p.shape)) > 1 for p in trained]
    matrices = [p for p, one in zip(trained, is_matrix, strict=True) if one]
    vectors = [p for p, one in zip(trained, is_matrix, strict=True) if not one]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-3}]


def configuration(zero: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
        **rest,
    }


def start(zero: dict[str, Any], rest: dict[str, Any], *, fused: bool = False) -> Any:
    """Return an engine over a new model, the same on all ranks."""
    import deepspeed
    import torch

    # The CPU has no fp16 for DeepSpeed, but torch has it there.
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda self: True
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=configuration(zero, rest), enabled=zero["stage"] == 3):
        model = model_class()()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3)
    if fused:  # as DeepSpeed's own is on a GPU: all parameters of a group in one flat tensor
        deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW
    return deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(zero, rest))[0]


def train(engine: Any, steps: range) -> None:
    import torch

    for step in steps:
        ids = torch.randint(0, 13, (2, 4), generator=torch.Generator().manual_seed(100 * step + engine.global_rank))
        loss = torch.nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()


def live_moments(engine: Any) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter as the live optimizer of ZeRO 3 has it, whole."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found: dict[str, dict[str, Any]] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            kinds = ("exp_avg", "exp_avg_sq")
            found[name] = {kind: safe_get_full_optimizer_state(parameter, kind).clone() for kind in kinds}
    return found


def flat_state(engine: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the float32 weights, and the state, of each parameter as the live optimizer of fp16 without ZeRO has them:
    those of a group in one flat tensor, in the order of the parameters that it was given."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    masters: dict[str, Any] = {}
    moments: dict[str, dict[str, Any]] = {}
    optimizer = engine.optimizer
    for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
        at = 0
        for parameter in group:
            own = slice(at, at + parameter.numel())
            at += parameter.numel()
            name, state = names[id(parameter)], optimizer.optimizer.state[flat]
            masters[name] = flat.detach()[own].view(parameter.shape).clone()
            moments[name] = {kind: state[kind][own].view(parameter.shape).clone() for kind in ("exp_avg", "exp_avg_sq")}
    return masters, moments


def universal_moments(step: Path) -> dict[str, dict[str, Any]]:
    """Return the state of each parameter as `ds_to_universal` gives it."""
    import torch

    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        convert_to_universal(step, Path(folder) / "universal")
        for file in (Path(folder) / "universal" / "zero").glob("*/exp_avg*.pt"):
            value = torch.load(file, weights_only=False)
            found.setdefault(file.parent.name, {})[file.stem] = value["param"]
    return found


def convert_to_universal(step: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    options = ["--input_folder", str(step), "--output_folder", str(folder)]
    subprocess.run([*command, *options], check=True, env=environment)


def run_on_rank(name: str) -> None:
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    _, zero, rest = RUNS[name]
    engine = start(zero, rest, fused="fused" in name)
    train(engine, range(2))
    folder = HERE / name / "saved"
    state = {"iteration": 2, "rng": torch.random.get_rng_state()[:16] + engine.global_rank}
    engine.save_checkpoint(str(folder), client_state=state)
    moments = live_moments(engine) if zero["stage"] == 3 else {}
    masters: dict[str, Any] = {}
    if "fused" in name:
        masters, moments = flat_state(engine)
    torch.distributed.barrier()
    if engine.global_rank == 0:
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / script).unlink(missing_ok=True)
        # Neither reads an elastic checkpoint; and of round-robin gradients the mappings are those of another order.
        if zero["stage"] in (1, 2) and "elastic" not in name and "round_robin" not in name:
            moments = universal_moments(folder / "global_step2")
        expected: dict[str, Any] = {"moments": moments}
        if zero["stage"] and "bf16_optimizer" not in name:  # which `zero_to_fp32` does not read
            expected["weights"] = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        if masters:
            expected["weights"] = masters
        torch.save(expected, folder.parent / "expected.pt")


def run_trainer(name: str) -> None:
    """The Trainer of transformers with ZeRO 3."""
    import torch
    import transformers

    saved = HERE / name / "saved"
    config: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **BF16}
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
    steps = {"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    arguments = transformers.TrainingArguments(
        str(saved), use_cpu=True, bf16=True, deepspeed=config, report_to=[], **steps
    )
    sizes = {"hidden_size": 8, "intermediate_size": 13, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=29, max_position_embeddings=16, tie_word_embeddings=True, **sizes)
    )
    rows = [torch.arange(i, i + 6) % 29 for i in range(12)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    finish(trainer.model_wrapped, saved / "checkpoint-2", live_moments(trainer.model_wrapped))


def run_accelerate(name: str) -> None:
    """`save_state` of accelerate with ZeRO 2."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(cpu=True)  # of which DeepSpeed is told nothing: accelerate would take it for DDP
    config = configuration({"stage": 2}, BF16) | {"gradient_accumulation_steps": 1}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(0)
    model = model_class()()
    rows = torch.randint(0, 13, (8, 4), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    engine, _, loader = accelerator.prepare(model, torch.optim.AdamW(groups_of(model), lr=1e-3), loader)
    for ids in loader:
        # It steps, too.
        accelerator.backward(torch.nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten()))
    saved = HERE / name / "saved"
    accelerator.save_state(str(saved))
    finish(engine, saved, None)


def run_experts(name: str) -> None:
    """Four experts on two of four ranks each, with ZeRO 2."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 5), nn.Linear(5, 13)
            self.moe = MoE(hidden_size=5, expert=nn.Linear(5, 5), num_experts=4, ep_size=2, k=1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.moe(self.embed(ids))[0])

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration({"stage": 2}, BF16))[0]
    train(engine, range(2))
    folder = HERE / name / "saved"
    engine.save_checkpoint(str(folder))
    if engine.global_rank == 0:
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / script).unlink(missing_ok=True)


def run_pipeline(name: str) -> None:
    """A `PipelineModule` of two stages, with tied and frozen parameters, a layer without any, and buffers."""
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.frozen = nn.Linear(5, 5), nn.Parameter(torch.arange(5.0) / 8, requires_grad=False)
            self.register_buffer("seen", torch.tensor([3, 4]))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.up(hidden)) + self.frozen

    def head(module: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, module.weight)

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    tied = TiedLayerSpec("embed", nn.Embedding, 13, 5), TiedLayerSpec("embed", nn.Embedding, 13, 5, forward_fn=head)
    layers = [tied[0], LayerSpec(Block), nn.ReLU(), LayerSpec(Block), LayerSpec(nn.LayerNorm, 5), tied[1]]
    loss = lambda out, ids: nn.functional.cross_entropy(out.float().flatten(0, 1), ids.flatten())  # noqa: E731
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    stage = int(name[len("pipeline_zero")])
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    config = configuration({"stage": stage}, BF16 if stage else {})
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    rows = [torch.randint(0, 13, (2, 4), generator=torch.Generator().manual_seed(i)) for i in range(8)]
    batches = iter([(row, row) for row in rows])
    for _ in range(2):
        engine.train_batch(batches)
    folder = HERE / name / "saved"
    engine.save_checkpoint(str(folder), client_state={"iteration": 2})
    live: dict[str, dict[str, Any]] = {"module": dict(engine.module.state_dict()), "weights": {}, "moments": {}}
    for parameter, value in engine.module.named_parameters() if stage else ():
        if value.requires_grad:
            live["weights"][parameter] = safe_get_full_fp32_param(value).clone()
            kinds = ("exp_avg", "exp_avg_sq")
            live["moments"][parameter] = {k: safe_get_full_optimizer_state(value, k).clone() for k in kinds}
    stages: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(stages, live)
    if engine.global_rank == 0:
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / script).unlink(missing_ok=True)
        expected = {key: {k: v for one in stages for k, v in one[key].items()} for key in live}
        torch.save(expected, folder.parent / "expected.pt")


def finish(engine: Any, folder: Path, moments: dict[str, dict[str, Any]] | None) -> None:
    """Write what DeepSpeed's own tools make of what was saved."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / script).unlink(missing_ok=True)
        tag = (folder / "latest").read_text()
        expected = {"weights": get_fp32_state_dict_from_zero_checkpoint(str(folder))}
        expected["moments"] = moments if moments is not None else universal_moments(folder / tag)
        torch.save(expected, next(p for p in folder.parents if p.parent == HERE) / "expected.pt")


def make_universal(name: str) -> None:
    """What `ds_to_universal` makes of the run that a sample is named after."""
    run = HERE / name.removeprefix("universal_")
    convert_to_universal(run / "saved" / "global_step2", HERE / name / "saved" / "global_step2_universal")
    (HERE / name / "saved" / "latest_universal").write_text("global_step2_universal")
    shutil.copy(run / "expected.pt", HERE / name)


UNIVERSAL = ("universal_zero3_w3",)
FRAMEWORKS = {
    "trainer_zero3_w2": run_trainer,
    "accelerate_zero2_w2": run_accelerate,
    "experts_zero2_w4": run_experts,
    "pipeline_zero1_w4": run_pipeline,
    "pipeline_zero0_w2": run_pipeline,
}


def main(names: list[str]) -> None:
    for name in names or [*RUNS, *FRAMEWORKS, *UNIVERSAL]:
        shutil.rmtree(HERE / name, ignore_errors=True)
        if name in UNIVERSAL:
            make_universal(name)
            continue
        world = RUNS[name][0] if name in RUNS else int(name[-1])
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "DEEPSPEED_RUN": name}
        subprocess.run([*launcher, __file__], check=True, env=environment)


if __name__ == "__main__":
    if "RANK" in os.environ:
        chosen = os.environ["DEEPSPEED_RUN"]
        FRAMEWORKS.get(chosen, run_on_rank)(chosen)
    else:
        main(sys.argv[1:])
