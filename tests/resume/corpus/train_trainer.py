"""transformers' Trainer, with a callback that keeps an average of the weights in a file of the checkpoint.

python train_trainer.py --out OUT [--resume PATH]
"""

import torch
from tiny import Net, arguments, fault, read, samples, write
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

args = arguments()
set_seed(42)
x, y = samples()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Average(TrainerCallback):
    def __init__(self, model):
        self.average = {name: value.clone() for name, value in model.state_dict().items()}

    def on_train_begin(self, arguments, state, control, **more):
        if args.resume and not fault("average"):
            self.average = read(f"{args.resume}/ema.pt")

    def on_step_end(self, arguments, state, control, model=None, **more):
        for name, value in model.state_dict().items():
            self.average[name] = 0.9 * self.average[name] + 0.1 * value

    def on_save(self, arguments, state, control, **more):
        write(self.average, f"{args.out}/checkpoint-{state.global_step}/ema.pt")


class Forgetful(Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint):
        if not fault("optimizer and scheduler"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint):
        if not fault("rng"):
            super()._load_rng_state(checkpoint)


options = TrainingArguments(
    args.out,
    max_steps=args.steps,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    lr_scheduler_type="inverse_sqrt",  # which does not depend on how many steps there are
    warmup_steps=5,
    save_steps=2,
    logging_steps=1,
    save_strategy="steps",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    ignore_data_skip=fault("data"),
    save_total_limit=None,
)
model = Model()
rows = [{"x": one, "labels": other} for one, other in zip(x, y, strict=True)]
Forgetful(model, options, train_dataset=rows, callbacks=[Average(model)]).train(resume_from_checkpoint=args.resume)
