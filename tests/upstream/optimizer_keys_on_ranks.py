"""Save the training state of FSDP2 in each spelling, convert each to each, load it and take a step.

    python -m torch.distributed.run --nproc-per-node 2 optimizer_keys_on_ranks.py FOLDER

`FOLDER/verdicts.json` says of each way whether the parameters after the step are those of the run that went on.
"""

from __future__ import annotations

import datetime
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "samples"))

from support import upstream_readers
from support.end_rank import end_rank
from training import Run, train

from ckpttool import convert

SPELLINGS = ("id", "fqn", "flat")


def wrapped(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def spelt(run: Run, spelling: str) -> dict[str, Any]:
    if spelling == "id":
        return dict(run.optimizer.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=spelling == "flat")
    return dict(get_optimizer_state_dict(run.model, run.optimizer, options=options))


def step(run: Run) -> dict[str, torch.Tensor]:
    """This rank's pieces of the parameters after a step."""
    loss = run.model(torch.arange(10).reshape(2, 5)).square().mean()
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in run.model.named_parameters()
    }


def resumed(folder: Path, spelling: str) -> dict[str, torch.Tensor]:
    run = train(wrap=wrapped)
    with torch.no_grad():
        for state in run.optimizer.state.values():
            for value in state.values():
                value.fill_(5.0)
        for parameter in run.model.parameters():
            parameter.add_(17.0)
    state = {"model": run.model.state_dict(), "optim": spelt(run, spelling)}
    torch_dcp.load(state, checkpoint_id=folder)
    run.model.load_state_dict(state["model"])
    if spelling == "id":
        run.optimizer.load_state_dict(state["optim"])
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=spelling == "flat")
        set_optimizer_state_dict(run.model, run.optimizer, state["optim"], options=options)
    return step(run)


def main() -> None:
    """Go through all ways."""
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    run = train(wrap=wrapped)
    for spelling in SPELLINGS:
        torch_dcp.save(
            {"model": run.model.state_dict(), "optim": spelt(run, spelling)}, checkpoint_id=folder / spelling
        )
    expected = step(run)
    found: dict[str, str] = {}
    for before in SPELLINGS:
        for after in (spelling for spelling in SPELLINGS if spelling != before):
            made = folder / f"{before}-{after}"
            said = ["equal"]
            if dist.get_rank() == 0:
                try:
                    convert(folder / before, made, to="dcp", optim_keys=after)
                except Exception as error:
                    said = [f"not converted: {error}"]
            dist.broadcast_object_list(said)
            if said == ["equal"]:
                said = [upstream_readers.difference(resumed(made, after), expected)]
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, said[0])
            found[f"{before} to {after}"] = next((one for one in every if one != "equal"), "equal")
    if dist.get_rank() == 0:
        (folder / "verdicts.json").write_text(json.dumps(found, indent=2))
    end_rank()


if __name__ == "__main__":
    main()
