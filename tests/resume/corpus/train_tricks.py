"""What people add to a loop: a gradient scaler, accumulation over micro batches, clipping by history, a curriculum.

python train_tricks.py --trick scaler|accumulation|autoclip|curriculum --out OUT [--resume PATH]
"""

import os

import torch
from tiny import Net, Shuffled, arguments, fault, load_model, load_optimizer, loss_of, read, seed_all, write

args = arguments("--trick")
os.makedirs(args.out, exist_ok=True)
seed_all()
model = Net(dropout=0.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=args.trick == "scaler")
data = Shuffled()
step, micro, norms, tokens, temperature, stage = 0, 0, [], 0, 1.0, 1

if args.resume:
    state = read(args.resume)
    load_model(model, state["model"])
    load_optimizer(optimizer, state["optimizer"])
    data.load_state_dict(state["data"])
    step = state["step"]
    if args.trick == "scaler" and not fault("scaler"):
        if fault("growth tracker"):
            state["scaler"]["_growth_tracker"] = 0
        scaler.load_state_dict(state["scaler"])
    if args.trick == "accumulation":
        micro = 0 if fault("micro step") else state["micro"]
        for parameter, gradient in zip(model.parameters(), state["gradients"], strict=True):
            parameter.grad = None if fault("gradients") else gradient
    norms = [] if fault("history of norms") else state["norms"]
    tokens = 0 if fault("tokens") else state["tokens"]
    temperature = 1.0 if fault("temperature") else state["temperature"]
    stage = 1 if fault("stage") else state["stage"]

while step < args.steps:
    x, y = data.next()
    if args.trick == "curriculum":
        x = x * (torch.arange(6) < 2 + stage)
    loss = loss_of(model, x, y)
    scaler.scale(loss / temperature).backward()
    step, micro, tokens = step + 1, micro + 1, tokens + x.numel()
    if args.trick != "accumulation" or micro == 3:
        scaler.unscale_(optimizer)
        if args.trick == "autoclip":  # to the median of what was seen
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            norms.append(norm.item())
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), sorted(norms)[len(norms) // 2], norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        micro = 0
    if args.trick == "curriculum":
        temperature, stage = 0.95 * temperature, 1 + step // 4
    print(f"step {step}: loss {loss.item():.6f}")
    if step % 2 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data.state_dict()}
        state |= {"step": step, "micro": micro, "norms": norms, "tokens": tokens, "temperature": temperature}
        state |= {"stage": stage, "scaler": scaler.state_dict(), "gradients": [p.grad for p in model.parameters()]}
        write(state, f"{args.out}/iter-{step}.pt")
