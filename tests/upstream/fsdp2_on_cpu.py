"""Starts PyTorch's FSDP2 example on CPUs: `fsdp2_on_cpu.py EXAMPLE --steps N [--keep-rng] WORD...`.

The example asks for two accelerators, and takes its own way for CPUs once it has been told that there are two. It
trains 10 steps at each start: with `--steps 20` it trains to step 20, less what the checkpoint that it loads has, by
that one constant. `reset_parameters` of its model forgets its layers, which are then whatever was in memory: they are
reset, too. With `--keep-rng`, the random state is saved at the end of a start and set again at the next, which the
example does not do.
"""

import argparse
import glob
import os
import sys
from typing import Any

import torch

parser = argparse.ArgumentParser()
parser.add_argument("example")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--keep-rng", action="store_true")
args, words = parser.parse_known_args()

answers = iter([True])
torch.accelerator.is_available = lambda: next(answers, False)
torch.accelerator.device_count = lambda: 2
init_process_group = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend, device_id: init_process_group(backend)  # type: ignore[assignment]

sys.argv = [args.example, *words]
sys.path.insert(0, os.path.dirname(args.example))
import checkpoint  # type: ignore[import-not-found]  # noqa: E402  # of the example
import model  # type: ignore[import-not-found]  # noqa: E402

reset, save, load_optim = (
    model.Transformer.reset_parameters,
    checkpoint.Checkpointer.save,
    checkpoint.Checkpointer.load_optim,
)


def reset_all(transformer: Any) -> None:
    reset(transformer)
    for layer in transformer.layers:
        layer.reset_parameters()


def save_rng(self: Any, *rest: Any) -> None:
    torch.save(torch.get_rng_state(), f"rng{torch.distributed.get_rank()}.pt")
    save(self, *rest)


def load_rng(self: Any, *rest: Any) -> None:
    load_optim(self, *rest)
    torch.set_rng_state(torch.load(f"rng{torch.distributed.get_rank()}.pt"))


model.Transformer.reset_parameters = reset_all
if args.keep_rng:
    checkpoint.Checkpointer.save, checkpoint.Checkpointer.load_optim = save_rng, load_rng

saved = glob.glob(f"checkpoints/{'dcp_api' if '--dcp-api' in words else 'dtensor_api'}/*/optim_state_dict.pt")
done = 0
if saved:
    state = torch.load(max(saved), weights_only=True)["state"]
    done = int(next(iter(state.values()))["step"])
with open(args.example, encoding="utf-8") as stream:
    source = stream.read()
assert source.count("range(10)") == 1
source = source.replace("range(10)", f"range({args.steps - done})")
exec(compile(source, args.example, "exec"), {"__name__": "__main__", "__file__": args.example})
