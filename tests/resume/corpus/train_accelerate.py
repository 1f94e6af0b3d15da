"""accelerate: `save_state`, an object of one's own that is registered, and `skip_first_batches`.

python train_accelerate.py --out OUT [--resume PATH]
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from tiny import BATCH, Net, arguments, fault, loss_of, samples
from torch.utils.data import DataLoader, TensorDataset

args = arguments()
set_seed(42)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7))
net = Net(dropout=0.0)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
# Without a generator of its own, each `iter(loader)` draws a number of torch's, and more after a resume than before.
generator = None if fault("no generator") else torch.Generator().manual_seed(0)
loader = DataLoader(TensorDataset(*samples()), BATCH, shuffle=True, generator=generator)
model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)


class Run:
    """An average of weights, and the step."""

    def __init__(self):
        self.step, self.average, self.best = 0, [p.detach().clone() for p in net.parameters()], 1e9

    def state_dict(self):
        return {"step": self.step, "polyak": self.average, "best": self.best}

    def load_state_dict(self, state):
        self.step = state["step"]
        if not fault("average"):
            self.average = state["polyak"]
        if not fault("best"):
            self.best = state["best"]


run = Run()
accelerator.register_for_checkpointing(run)
if args.resume:
    before = {key: value.clone() for key, value in net.state_dict().items()}
    accelerator.load_state(args.resume)
    if fault("weights"):
        net.load_state_dict(before)
    if fault("optimizer"):
        optimizer.optimizer.state.clear()
    if fault("scheduler"):
        scheduler.scheduler.last_epoch = 0
epoch, skipped = divmod(run.step, 6)
while run.step < args.steps:
    loader.set_epoch(0 if fault("set_epoch") and args.resume else epoch)
    skipped = 0 if fault("data") else skipped
    for x, y in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        loss = loss_of(model, x, y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        run.step += 1
        run.best = min(run.best, 100 + loss.item() * run.step)
        for one, parameter in zip(run.average, net.parameters(), strict=True):
            one.mul_(0.9).add_(0.1 * parameter.detach())
        print(f"step {run.step}: loss {loss.item():.6f}")
        if run.step % 2 == 0:
            accelerator.save_state(f"{args.out}/step_{run.step}")
        if run.step == args.steps:
            break
    epoch, skipped = epoch + 1, 0
