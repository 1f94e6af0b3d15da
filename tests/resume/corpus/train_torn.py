"""A save in a thread, of copies, or of what training goes on to change.

python train_torn.py --out OUT [--resume PATH]
"""

import copy
import os
import threading
import time

import torch
from tiny import Net, Shuffled, arguments, fault, loss_of, read, seed_all, write

args = arguments()
os.makedirs(args.out, exist_ok=True)
seed_all()
model, data, step = Net(dropout=0.0), Shuffled(), 0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if args.resume:
    s = read(args.resume)
    model.load_state_dict(s["model"])
    optimizer.load_state_dict(s["optimizer"])
    data.load_state_dict(s["data"])
    step = s["step"]
thread = None
while step < args.steps:
    x, y = data.next()
    loss = loss_of(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 3 == 0 and thread is not None:
        thread.join()
        thread = None
    if step % 2 == 0:
        if thread is not None:
            thread.join()
        weights, moments = model.state_dict(), optimizer.state_dict()
        model_state = weights if fault("torn weights") else copy.deepcopy(weights)
        optimizer_state = moments if fault("torn moments") else copy.deepcopy(moments)
        saved = {"model": model_state, "optimizer": optimizer_state, "data": data.state_dict(), "step": step}

        def later(saved=saved, path=f"{args.out}/torn-{step}.pt"):
            time.sleep(0.2 * fault("torn weights", "torn moments"))
            write(saved, path)

        thread = threading.Thread(target=later)
        thread.start()
if thread is not None:
    thread.join()
