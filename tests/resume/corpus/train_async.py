"""`async_save` of DCP, of which the last two are kept; a link to the newest that was written.

python train_async.py --out OUT [--resume PATH]
"""

import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import Net, Shuffled, arguments, fault, loss_of, seed_all
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

args = arguments()
os.makedirs(args.out, exist_ok=True)
dist.init_process_group("gloo", init_method=f"file://{args.out}/../store{os.getpid()}", rank=0, world_size=1)
seed_all()
model, data = Net(), Shuffled()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)


class App:
    step = 0

    def state_dict(self):
        m, o = get_state_dict(model, optimizer)
        return {
            "model": m,
            "optim": o,
            "sched": scheduler.state_dict(),
            "data": data.state_dict(),
            "step": self.step,
            "torch": torch.get_rng_state(),
        }

    def load_state_dict(self, s):
        if fault("scheduler"):
            pass
        else:
            scheduler.load_state_dict(s["sched"])
        o = s["optim"]
        if fault("moments"):
            for one in o["state"].values():
                one["exp_avg"].zero_()
        if fault("weight"):
            s["model"]["mid.bias"].zero_()
        set_state_dict(model, optimizer, model_state_dict=s["model"], optim_state_dict=o)
        data.load_state_dict(s["data"])
        self.step = s["step"]
        if not fault("torch rng"):
            torch.set_rng_state(s["torch"])


app, future = App(), None
if args.resume:
    path = os.path.realpath(os.path.join(args.out, "latest")) if args.resume == "latest" else args.resume
    dcp.load({"app": app}, checkpoint_id=path)


def finish():
    """Wait for the last save, name it, and remove the one before the last two."""
    if future is None:
        return
    future.result()
    if os.path.lexists(f"{args.out}/latest"):
        os.unlink(f"{args.out}/latest")
    os.symlink(f"step-{saved}", f"{args.out}/latest")
    shutil.rmtree(f"{args.out}/step-{saved - 4}", ignore_errors=True)


while app.step < args.steps:
    x, y = data.next()
    loss = loss_of(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    app.step += 1
    print(f"step {app.step}: loss {loss.item():.6f}")
    if app.step % 2 == 0:
        finish()
        saved = app.step
        future = dcp.async_save({"app": app}, checkpoint_id=f"{args.out}/step-{saved}")
finish()
dist.destroy_process_group()
