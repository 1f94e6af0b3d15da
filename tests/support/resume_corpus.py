"""Training scripts in many styles, the faults planted in them, and what `verify-resume run` has to say of each.

A fault is the value of FAULT in the environment of a script: the one thing that it then forgets or spoils. Each has
what the verdict has to be, and a regular expression for every cause that may be named.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpttool.errors import CkptError
from ckpttool.resume.compare import NOT_DETERMINED
from ckpttool.resume.runs import run
from support.paths import ROOT

SCRIPTS = ROOT / "tests" / "resume" / "corpus"
RIGHT = ("right", "named")
ALONE = ("order of a set",)  # what a fork has as its parent: the seed of hashes
WRONG = ("false pass", "false alarm", "wrong cause")


@dataclass(frozen=True, slots=True)
class Fault:
    """`cause` is what has to be named; `also` what may stand beside it, since it is lost with it. `expects` is the
    verdict: "differs"; "refused", by an error; or "told" if the fault does not show in the steps of `window`, so that
    they may be the same: the report then has to say `cause`. `switch` is what FAULT is, if it is not the name."""

    name: str
    what: str
    cause: str
    also: str = ""
    expects: str = "differs"
    switch: str = ""
    window: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """A way to train and to save: its command, where its checkpoints are, and how it resumes. With `worlds`, it trains
    on some ranks and resumes on others."""

    name: str
    style: str
    words: tuple[str, ...]
    checkpoints: str | None
    faults: tuple[Fault, ...]
    resume: str | None = "... --resume {checkpoint}"
    at: int = 8
    until: int = 14
    launcher: tuple[str, ...] = (sys.executable,)
    needs: str = "torch"
    expects: str = "same"
    is_long: bool = False
    worlds: tuple[int, int] | None = None

    @property
    def command(self) -> list[str]:
        file, *rest = self.words
        return [*self.launcher, str(SCRIPTS / file), *rest]

    def resumed(self, out: Path, checkpoint: Path) -> list[str]:
        """The words of the command that resumes."""
        words = shlex.split(self.resume) if self.resume is not None else ["..."]
        at = words.index("...") if "..." in words else None
        words = words if at is None else [*words[:at], *self.command, *words[at + 1 :]]
        return [word.replace("OUT", str(out)).replace("{checkpoint}", str(checkpoint)) for word in words]


@dataclass(slots=True)
class Outcome:
    """What was said of a script with a fault, or without one, and how right that is."""

    script: str
    fault: str
    verdict: str
    message: str
    cause: str | None = None
    notes: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    grade: str = ""


def verify(script: Script, fault: Fault | None = None, *, is_forked: bool = False, **more: Any) -> Outcome:
    """Return what `verify-resume run` says of a script. The variables of this process are what the script has. With
    `is_forked` its runs are forked, unless it needs a start of its own."""
    os.environ |= {"FAULT": switch_of(fault), "OMP_NUM_THREADS": "1"}
    at, until = window_of(script, fault)
    around: Any = nullcontext()
    if is_forked and script.needs == "torch" and switch_of(fault) not in ALONE and until >= script.until:
        from support.forked_command import forked

        around = forked(str(SCRIPTS))
    given = {"at": at, "until": until, "checkpoints": script.checkpoints, "resume_with": script.resume, **more}
    given |= dict(zip(("world", "to_world"), script.worlds or (), strict=False))
    began = time.monotonic()
    outcome = Outcome(script.name, fault.name if fault is not None else "", "error", "")
    try:
        with around:
            report = run(script.command, timeout=240.0, **given)
        outcome.verdict, outcome.message, outcome.cause = report.verdict, report.message, report.cause
        outcome.notes, outcome.findings = report.notes, [one.message for one in report.findings[:6]]
    except CkptError as error:
        outcome.message = f"{error.message} ({error.hint})" if error.hint else error.message
    finally:
        del os.environ["FAULT"]
    outcome.seconds, outcome.grade = time.monotonic() - began, graded(script, fault, outcome)
    return outcome


def switch_of(fault: Fault | None) -> str:
    """Return the value of FAULT."""
    return "" if fault is None else fault.switch or fault.name


def window_of(script: Script, fault: Fault | None) -> tuple[int, int]:
    """Return the step of the stop, and the last one."""
    return fault.window if fault is not None and fault.window is not None else (script.at, script.until)


def graded(script: Script, fault: Fault | None, outcome: Outcome) -> str:
    """Return how right a report is.

    right        the cause is named, and no other; or the verdict is the one that is expected
    named        no cause is told, but the sentence of the verdict names what differs
    vague        that it differs is told, and no more
    not possible, wrong cause, false pass, false alarm
    """
    verdict, message = outcome.verdict, outcome.message
    if (fault or script).expects == "refused":
        is_refused = verdict == "error" and "same files for every run" in message
        return "right" if is_refused else "false pass" if verdict == "same" else "not possible"
    if fault is None:
        return {script.expects: "right", "differs": "false alarm"}.get(verdict, "not possible")
    if verdict in ("error", "failed", "nondeterministic"):
        return "not possible"
    if fault.expects == "told":
        is_told = verdict == "unproven" or re.search(fault.cause, " ".join([message, *outcome.notes]))
        return "right" if is_told else "false pass" if verdict == "same" else "false alarm"
    if verdict == "same":
        return "false pass"
    cause = outcome.cause or NOT_DETERMINED
    parts = [] if cause.startswith(NOT_DETERMINED) else cause.split("; ")
    allowed = f"{fault.cause}|{fault.also}" if fault.also else fault.cause
    if any(not re.search(allowed, part) for part in parts):
        return "wrong cause"
    if parts:
        return "right" if re.search(fault.cause, cause) else "wrong cause"
    return "named" if re.search(fault.cause, message) else "vague"


_LOST = r"weights of the model were not restored.*(as they were built)?"
GENERIC = {
    one.name: one
    for one in (
        Fault("weights", "weights not loaded", _LOST, "buffer"),
        Fault("prefix", "names with a prefix, `strict=False`", _LOST, "buffer"),
        Fault("one weight", "one element of one weight doubled", r"mid\.weight"),
        Fault("weights rounded", "weights rounded to bfloat16", r"weights of the model.*rounded to bfloat16"),
        Fault("buffer", "a buffer not loaded", r"buffer.*seen"),
        Fault("optimizer", "optimizer not loaded", r"optimizer was not loaded", r"learning rate"),
        Fault("moments", "moments zeroed", r"moments of the optimizer.*zero"),
        Fault("second moments", "second moments zeroed", r"moments of the optimizer.*exp_avg_sq.*zero"),
        Fault("step counters", "step counters zeroed", r"step counters"),
        Fault("moments rounded", "moments rounded to bfloat16", r"moments of the optimizer.*rounded to bfloat16"),
        Fault("moments swapped", "moments of two parameters swapped", r"moments of .* and .* are swapped"),
        Fault("moments of a group", "moments of one group zeroed", r"moments of .*group 1.*zero"),
        Fault("one state", "state of one parameter lost", r"loaded in part|has no state"),
        Fault("lr", "learning rate of a group reset", r"learning rate of parameter group 0"),
        Fault("betas", "betas of a group reset", r"`betas` of parameter group 0"),
        Fault("weight decay", "weight decay of a group changed", r"`weight_decay` of parameter group"),
        Fault("scheduler", "scheduler not loaded", r"scheduler was not restored", r"learning rate"),
        Fault("rng", "no RNG state restored", r"RNG state.*(torch|numpy|python)"),
        Fault("torch rng", "torch's RNG not restored", r"RNG state.*torch"),
        Fault("numpy rng", "numpy's RNG not restored", r"RNG state.*numpy"),
        Fault("python rng", "Python's RNG not restored", r"RNG state.*python"),
        Fault("rng drawn", "a random number drawn after the RNG was restored", r"RNG.*torch"),
        Fault("data", "data starts over", r"\bdata\b|batch"),
        Fault("one batch on", "one batch skipped", r"\bdata\b|batch"),
        Fault("epoch of the data", "data order of the first epoch used again", r"\bdata\b|batch"),
        Fault("tokens", "the count of tokens not loaded", r"tokens"),
        Fault("best", "best loss not loaded", r"`?best`?"),
        Fault("step off by one", "one step skipped", r"\bstep\b|progress|scheduler"),
        Fault("eval mode", "training continues in eval mode", r"eval|training.mode|dropout"),
    )
}


def of(names: str, *own: Fault) -> tuple[Fault, ...]:
    """Return faults by their names, and those of the script alone."""
    return (*(GENERIC[name.strip()] for name in names.split(",") if name.strip()), *own)


def _within(switch: str, what: str) -> Fault:
    """Return a fault that shows when the next epoch begins, in a window that lies within the first."""
    told = r"end of an epoch|epoch's end|epoch.*not crossed"
    return Fault(
        f"{switch} (first epoch)", f"{what}; the window ends before the epoch", told, "", "told", switch, (2, 4)
    )


def _saves(style: str, text: str, checkpoints: str | None, faults: tuple[Fault, ...], **more: Any) -> Script:
    words = ("train_saves.py", "--style", style, "--out", "OUT")
    return Script(style, text, words, checkpoints, faults, **more)


MORE: tuple[tuple[str, str, str, str, Any], ...] = (
    *(
        ("wrappers", name, "OUT/w_{step}.pt", what, faults)
        for name, what, faults in (
            (
                "sharp groups",
                "an optimizer that wraps another one and shares its groups, with a radius in them",
                (
                    ("rho of the groups", "the radius reset", r"`rho` of parameter group 0"),
                    ("groups of the base", "the other optimizer keeps its groups", r"parameter group 0"),
                    ("momentum of the base", "the momentum of the other optimizer lost", r"optimizer.*no state"),
                ),
            ),
            (
                "sharp scalar",
                "a radius that is an attribute of the optimizer",
                (
                    ("radius", "the radius reset", r"rho"),
                    ("radius not saved", "the radius in no checkpoint", r"reinitialised: `SGD.rho`"),
                ),
            ),
            (
                "counted",
                "the numbers that were drawn are counted beside the states of generators",
                (
                    ("draws", "the count of numbers drawn reset", r"draws"),
                    ("late draws", "a count in a tuple with a state reset", r"reinitialised: `loop.late`"),
                ),
            ),
            (
                "named",
                "a model whose methods name only a part of it",
                (
                    ("unnamed layer", "a layer that it does not name not loaded", r"norm\.weight"),
                    ("unnamed weight", "a weight that it does not name not loaded", r"up\.weight"),
                    ("unnamed buffer", "a buffer that it does not name not loaded", r"buffer.*shift"),
                ),
            ),
            (
                "queue",
                "a queue that gets the keys of a batch before the forward pass",
                (
                    ("queue of keys", "the queue begins anew", r"queue"),
                    ("one old key", "one key of the queue negated", r"queue"),
                    ("pointer of keys", "the place in the queue reset", r"`other\.at`"),
                    ("temperature of keys", "a temperature reset", r"temperature"),
                ),
            ),
            (
                "losses",
                "a loss that is a module, with a number, a tensor and a buffer that no state dict has",
                (
                    ("mean of the loss", "an attribute of a module reset", r"loss\.mean"),
                    ("spread of the loss", "a tensor that is no buffer reset", r"loss\.spread"),
                    ("center of the loss", "a buffer that is not persistent reset", r"Criterion\.center"),
                ),
            ),
            (
                "progressive",
                "dropout that grows and a layer that fades in",
                (
                    ("dropout from now", "dropout grows from the resume on", r"reinitialised: `Dropout.p`"),
                    ("fade", "how far a layer has faded in reset", r"fade"),
                ),
            ),
            (
                "closures",
                "a running norm in a closure",
                (
                    ("norm of a closure", "the running norm reset", r"clip\.norm"),
                    ("count of a closure", "its count reset", r"clip\.seen"),
                ),
            ),
            (
                "classes",
                "state of a class, and not of an instance",
                (
                    ("seen of a class", "a count of a class reset", r"shared\.seen"),
                    ("bias of a class", "a mean of a class reset", r"shared\.bias"),
                    ("history of a class", "a history of a class lost", r"shared\.history"),
                ),
            ),
            (
                "attributes",
                "an optimizer that counts its steps in an attribute",
                (
                    ("calls", "the count reset", r"calls"),
                    ("calls not saved", "the count in no checkpoint", r"reinitialised: .*`Counting.calls`"),
                ),
            ),
            ("pruned", "masks of weights, of more of them as it goes on", (("share", "the share reset", r"share"),)),
            (
                "swapped",
                "an average that is saved in the place of the weights",
                (
                    ("trained on the average", "training goes on from the average", r"weights of the model"),
                    ("average of the live", "the average begins at the weights", r"model\.up\.weight"),
                ),
            ),
            (
                "order",
                "weights of one shape, in groups that the script sorts",
                (
                    ("order of the groups", "the groups in another order", r"moments of .* are swapped"),
                    ("weights reversed", "one group in another order", r"moments of .* are swapped"),
                ),
            ),
            (
                "closure",
                "a step that is given its forward pass, and an average",
                (
                    ("average beside a closure", "the average begins at the weights", r"average"),
                    ("moments", "moments zeroed", r"moments of the optimizer.*zero"),
                    ("one batch on", "one batch skipped", r"\bdata\b|batch"),
                ),
            ),
            (
                "quantized",
                "moments in codes of 8 bits, which torch loads as 32",
                (
                    ("codes", "the codes zeroed", r"\(codes\): they are zero"),
                    ("scales", "the scales doubled", r"\(scale\)"),
                    ("steps in Python", "the count of steps reset", r"`optimizer\._steps`|steps"),
                ),
            ),
            (
                "layouts",
                "a parameter and a buffer of a sparse layout",
                (
                    ("links", "a sparse parameter doubled", r"model\.links|Graph\.links"),
                    ("graph", "a sparse buffer doubled", r"buffer.*graph"),
                ),
            ),
            (
                "players",
                "a list of objects, each with a generator",
                (("generator of a player", "one generator not restored", r"players\.1\.generator"),),
            ),
            (
                "mode",
                "autocast from a step on",
                (
                    ("autocast", "autocast off again", r"half"),
                    ("autocast not saved", "autocast off again, and in no checkpoint", r"reinitialised: `loop.half`"),
                ),
            ),
        )
    ),
    *(
        ("streams", name, "OUT/s-{step}.pt", what, faults)
        for name, what, faults in (
            (
                "augmented",
                "noise of a generator of the data set",
                (("generator of the noise", "NumPy's generator not restored", r"noise\.generator"),),
            ),
            (
                "order file",
                "the order of an epoch in a file",
                (
                    ("order written anew", "the file written anew", r"\bdata\b|batch"),
                    ("position in the file", "the position in the file reset", r"\bdata\b|batch"),
                ),
            ),
            (
                "sharded workers",
                "workers that read shards in turn from an offset",
                (
                    ("offset of the workers", "the workers start over", r"the data restarted"),
                    ("seed of the workers", "another seed of the workers", r"epoch_seed"),
                ),
            ),
            (
                "mixture",
                "sources that are drawn by their losses, each with a cursor",
                (
                    ("cursors", "the cursors reset", r"cursors"),
                    ("weights of sources", "the weights of the sources reset", r"weights\.web"),
                    ("generator of the mixture", "the generator of the sources not restored", r"generator"),
                ),
            ),
            (
                "prefetched",
                "a batch that is fetched ahead",
                (("fetched ahead", "the batch that was fetched ahead left out", r"\bdata\b|batch"),),
            ),
            (
                "by loss",
                "samples that are drawn by their last losses",
                (
                    ("losses of samples", "the losses of samples reset", r"source/losses"),
                    ("ages of samples", "the ages of samples reset", r"source.ages"),
                    ("generator of a sampler", "the generator of a sampler not restored", r"sampler\.generator"),
                ),
            ),
            (
                "growing samples",
                "samples of more columns and larger batches",
                (
                    ("size of the samples", "the size of a batch reset", r"source\.size"),
                    ("columns", "the number of columns reset", r"source\.columns"),
                    ("steps of a stage", "the steps of a stage reset", r"source\.since"),
                ),
            ),
            (
                "seeds",
                "a seed for each step, of a counter that is text",
                (("counter as text", "the counter reset", r"\bdata\b|batch"),),
            ),
        )
    ),
    *(
        ("ends", name, checkpoints or "OUT/f{step}.pt", what, faults)
        for name, checkpoints, what, faults in (
            (
                "facts",
                "",
                "times, hosts, an id of the run, words and variables in each checkpoint",
                (("lengths", "a list of numbers lost", r"lengths"),),
            ),
            (
                "patience",
                "",
                "stops when a mean of scores is not better",
                (
                    ("best score", "the best score reset", r"`other\.best`"),
                    ("bad evaluations", "the count of evaluations reset", r"`other\.bad`"),
                    ("scores", "scores lost", r"scores"),
                ),
            ),
            (
                "top",
                "OUT/last-{step}.pt",
                "a table of the best checkpoints, which alone are kept",
                (
                    ("table", "the table lost", r"table"),
                    ("scores of the table", "the scores in the table reset", r"table"),
                ),
            ),
            (
                "logs",
                "",
                "a log that grows, and a summary of it",
                (
                    ("total of the summary", "a sum reset", r"total"),
                    ("log written anew", "the log before the resume lost", r"summary"),
                ),
            ),
            (
                "schedules",
                "",
                "a cycle, and a warm-up of the loss that the script counts",
                (
                    ("length of the cycle", "a longer cycle", r"scheduler.*total_steps", r"learning rate|betas"),
                    ("steps of the scheduler by hand", "one step too few", r"scheduler", r"learning rate|betas"),
                    ("warm-up", "the warm-up begins anew", r"warm"),
                ),
            ),
            (
                "evaluated",
                "",
                "evaluations that draw numbers",
                (
                    ("evaluated at the resume", "an evaluation more", r"RNG state.*torch", r"seen"),
                    ("first evaluation", "the first evaluation lost", r"seen"),
                ),
            ),
            (
                "newest",
                "OUT/turn-*.pt",
                "two places in turns, of which the newest is found",
                (
                    ("the older turn", "the older place is taken", r"did not resume from step"),
                    ("step of the other turn", "one step left out", r"\bstep\b"),
                ),
            ),
            (
                "lora",
                "OUT/adapter_{step}.pt",
                "only what was added to a base is saved",
                (
                    ("norm beside the addition", "a norm of the base not loaded", r"norm\.weight"),
                    ("count of samples", "a buffer of the base not loaded", r"buffer.*seen"),
                    ("base drawn anew", "a weight of the base drawn anew", r"up\.weight"),
                    ("half of the addition", "half of the addition not loaded", r"ParameterDict\.b"),
                    ("scaling", "the scale of the addition reset", r"scaling"),
                ),
            ),
            (
                "functional weights",
                "",
                "weights in a dict, and an update of one's own",
                (
                    ("velocity of one", "one momentum zeroed", r"velocity"),
                    ("rate of one's own", "the learning rate reset", r"rate"),
                ),
            ),
        )
    ),
)
"""Scripts that keep state in many places: the file, the name, the checkpoints, what it does, and its faults."""
_AUTO = "... --resume auto"
_STEP = "OUT/ckpt-{step}.pt"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
_TORCHRUN_OF = tuple("{world}" if word == "2" else word for word in _TORCHRUN)
CORPUS = (
    _saves(
        "one file",
        "a single `ckpt.pt`, overwritten by each save",
        "OUT/ckpt.pt",
        of("optimizer, moments, scheduler, torch rng, one weight, best"),
        resume="... --resume OUT/ckpt.pt",
    ),
    _saves(
        "parts",
        "`checkpoint-N/` with `model.pt`, `optimizer.pt`, `scheduler.pt`, `rng.pt`, `trainer_state.json`",
        "OUT/checkpoint-{step}",
        of("weights, prefix, second moments, scheduler, numpy rng, data, best"),
    ),
    _saves(
        "safetensors",
        "`step_N/` with `model.safetensors`, `optimizer.pt`, `rng.pt`, `state.json`",
        "OUT/step_{step}",
        of("weights, optimizer, moments swapped, python rng, data"),
    ),
    _saves(
        "pickled module",
        "whole module, optimizer and scheduler pickled",
        _STEP,
        of("weights, optimizer, step counters, betas"),
    ),
    _saves(
        "tag file",
        "`latest` names the newest `global_stepN/`, `--resume auto`",
        "OUT/global_step{step}",
        of(
            "one state, moments rounded",
            Fault(
                "stale tag",
                "`latest` names an older step",
                r"another checkpoint|did not resume from step",
                expects="told",
            ),
        ),
        resume=_AUTO,
    ),
    _saves(
        "thread",
        "saved by a thread while training continues",
        _STEP,
        of(
            "moments of a group, lr",
            Fault(
                "saved too late",
                "the save contains a later step",
                r"weights of the model|moments|optimizer|the same weights|is as it was saved",
                r"step counters|buffer|the data is off by -",
            ),
        ),
    ),
    _saves(
        "link",
        "`latest.pt` is a link to the newest `ckpt-N.pt`",
        _STEP,
        of("rng, weight decay, epoch of the data"),
        resume="... --resume OUT/latest.pt",
    ),
    _saves(
        "rotation",
        "only the newest `ckpt-N.pt` is kept, `--resume auto`",
        _STEP,
        of("buffer, one batch on, optimizer"),
        resume=_AUTO,
    ),
    _saves(
        "dated folders",
        "each start writes to a folder named after the time, `--resume auto`",
        "OUT/*/ckpt-{step}.pt",
        of(
            "rng drawn, eval mode, weights rounded",
            Fault(
                "sorted by name",
                "step 8 taken for newer than step 10",
                r"another checkpoint|did not resume from step",
                expects="told",
            ),
        ),
        resume=_AUTO,
        at=10,
    ),
    Script(
        "environment",
        "configured by environment variables",
        ("train_saves.py", "--style", "environment"),
        _STEP,
        of("step off by one, scheduler, optimizer"),
        launcher=("env", "RUN_DIR=OUT", "STEPS=14", sys.executable),
        resume="env RUN_DIR=OUT STEPS=14 RESUME_FROM={checkpoint} "
        f"{sys.executable} {SCRIPTS / 'train_saves.py'} --style environment",
    ),
    Script(
        "YAML",
        "configured by a YAML file, the step in the name of a folder",
        ("train_saves.py", "--style", "yaml", "--config", str(SCRIPTS / "config.yaml"), "--out", "OUT"),
        _STEP,
        of("lr, data, numpy rng"),
    ),
    Script(
        "one folder",
        "writes to a fixed folder, whatever OUT is",
        ("train_saves.py", "--style", "fixed", "--out", "/nowhere", "--log", "OUT"),
        "/nowhere/ckpt-{step}.pt",
        (Fault("optimizer", "optimizer not loaded", r"same files for every run", expects="refused"),),
        expects="refused",
    ),
    *(
        Script(
            name,
            style,
            ("train_epochs.py", "--schedule", schedule, "--out", "OUT"),
            "OUT/epoch_{step}.pt",
            faults,
            at=2,
            until=4,
        )
        for name, style, schedule, faults in (
            (
                "epochs",
                "`epoch_N.pt`; SGD, BatchNorm, `set_epoch`, StepLR once per epoch",
                "step",
                of(
                    "optimizer, moments of a group, scheduler",
                    Fault("batch statistics", "BatchNorm's statistics not loaded", r"buffers? .*running"),
                    Fault("batches counted", "BatchNorm's count not loaded", r"num_batches_tracked"),
                    Fault("set_epoch", "`set_epoch` not called after the resume", r"\bdata\b|batch"),
                    Fault("epoch", "the epoch number not loaded", r"epoch|\bdata\b|not resume|step", "batch"),
                    Fault("classifier", "the last layer not loaded", r"weights of the model.*3\.(weight|bias)"),
                ),
            ),
            (
                "early stopping",
                "`epoch_N.pt`; ReduceLROnPlateau, best metric, patience, history of metrics",
                "plateau",
                of(
                    "scheduler, best",
                    Fault("patience", "the count of bad epochs not loaded", r"waited"),
                    Fault("history", "the history of metrics not loaded", r"history"),
                    Fault("moments", "momentum zeroed", r"moments of the optimizer.*momentum_buffer.*zero"),
                ),
            ),
        )
    ),
    Script(
        "GAN",
        "two models, two optimizers, fixed noise",
        ("train_gan.py", "--out", "OUT"),
        "OUT/gan_{step}.pt",
        of(
            "torch rng",
            Fault("generator", "the generator not loaded", r"weights.*built"),
            Fault("critic", "the critic not loaded", r"weights.*built"),
            Fault("optimizer of the generator", "its optimizer not loaded", r"optimizer.*(not loaded|no state)"),
            Fault("optimizer of the critic", "its optimizer not loaded", r"optimizer.*(not loaded|no state)"),
            Fault("moments of the critic", "first moments of one optimizer zeroed", r"moments.*exp_avg.*zero"),
            Fault("rate of the other", "one optimizer gets the learning rate of the other", r"learning rate"),
            Fault("fixed noise", "the fixed noise drawn again", r"fixed_noise|pictures"),
            Fault("penalty", "a running loss weight not loaded", r"drift"),
        ),
    ),
    *(
        Script(name, style, ("train_average.py", "--average", average, "--out", "OUT"), "OUT/step_{step}.pt", faults)
        for name, style, average, faults in (
            (
                "shadow",
                "weight average in a dict called `shadow`",
                "shadow",
                of(
                    "optimizer",
                    Fault("average", "average starts from the current weights", r"shadow"),
                    Fault("average of the start", "average starts from the initial weights", r"shadow"),
                    Fault("updates", "update count of the decay not loaded", r"updates"),
                    Fault("average rounded", "the average rounded to bfloat16", r"shadow"),
                ),
            ),
            (
                "teacher",
                "a mean teacher, used in the loss",
                "teacher",
                of(
                    "moments",
                    Fault("average", "the teacher starts as the student", r"teacher|no optimizer trains|mean"),
                    Fault("one weight of the average", "one element of the teacher doubled", r"mid\.weight"),
                    Fault("updates", "update count of the decay not loaded", r"teacher\.n\b|updates"),
                ),
            ),
            (
                "SWA",
                "torch's AveragedModel and SWALR, called `polyak`",
                "swa",
                of(
                    "scheduler",
                    Fault(
                        "average",
                        "average starts from the current weights",
                        r"polyak|AveragedModel|no optimizer trains",
                    ),
                    Fault("models averaged", "`n_averaged` reset", r"n_averaged"),
                ),
            ),
            (
                "average beside",
                "`ema_N.pt` beside `step_N.pt`",
                "file",
                of(
                    "data",
                    Fault("average", "average starts from the current weights", r"avg|ema_"),
                    Fault("updates", "update count of the decay not loaded", r"updates"),
                ),
            ),
        )
    ),
    Script(
        "MoCo",
        "a key encoder, a queue of keys and its pointer",
        ("train_moco.py", "--out", "OUT"),
        "OUT/moco-{step}.pth",
        of(
            "optimizer, torch rng",
            Fault("queue", "the queue starts with its initial values", r"queue"),
            Fault("one key", "one key of the queue negated", r"queue"),
            Fault("pointer", "the queue pointer reset", r"queue_ptr|queue"),
            Fault("key encoder", "the key encoder starts as the query encoder", r"no optimizer trains|encoder_k"),
        ),
    ),
    Script(
        "actor-critic",
        "replay buffer, target network, an environment with numpy's generator",
        ("train_rl.py", "--out", "OUT"),
        "OUT/agent_{step}.pt",
        of(
            "torch rng",
            Fault("replay buffer", "the replay buffer starts empty", r"replay|\bdata\b|batch", r"RNG"),
            Fault("replay position", "the position in the replay buffer reset", r"replay_at|replay|\bdata\b|batch"),
            Fault("epsilon", "exploration reset", r"epsilon"),
            Fault("environment", "the environment's generator seeded again", r"environment|\bdata\b|batch"),
            Fault("observation", "the environment starts over", r"observation|\bdata\b|batch"),
            Fault("returns", "the last returns not loaded", r"returns"),
            Fault("target network", "the target network starts as the critic", r"no optimizer trains|critic_target"),
            Fault("optimizer of the actor", "its optimizer not loaded", r"optimizer.*(not loaded|no state)"),
        ),
    ),
    *(
        Script(name, style, ("train_tricks.py", "--trick", trick, "--out", "OUT"), "OUT/iter-{step}.pt", faults)
        for name, style, trick, faults in (
            (
                "GradScaler",
                "torch's GradScaler on the CPU",
                "scaler",
                of(
                    "step counters",
                    Fault("scaler", "the scaler not loaded", r"grad scaler was not restored"),
                    Fault("growth tracker", "the scaler's growth tracker reset", r"grad scaler.*growth_tracker"),
                ),
            ),
            (
                "accumulation",
                "three micro-batches per step, saved within a step",
                "accumulation",
                of(
                    "data",
                    Fault("gradients", "accumulated gradients not restored", r"gradients?"),
                    Fault("micro step", "micro-batch count reset", r"micro"),
                    Fault("optimizer", "optimizer not loaded", r"optimizer was not loaded|no state"),
                ),
            ),
            (
                "AutoClip",
                "clips to the median of previous gradient norms",
                "autoclip",
                of("second moments", Fault("history of norms", "previous gradient norms not loaded", r"norms")),
            ),
            (
                "curriculum",
                "a temperature, a stage and a token count",
                "curriculum",
                of(
                    "one weight, betas",
                    Fault("temperature", "the temperature reset", r"temperature"),
                    Fault("stage", "the curriculum starts over", r"stage|\bdata\b|batch"),
                    Fault("tokens", "the count of tokens reset", r"tokens"),
                ),
            ),
        )
    ),
    *(
        Script(name, style, ("train_loader.py", "--loader", loader, "--out", "OUT"), "OUT/s{step}/ckpt.pt", faults)
        for name, style, loader, faults in (
            (
                "workers",
                "DataLoader with two workers and a generator; a resume skips batches",
                "workers",
                of(
                    "torch rng, data, one batch on",
                    Fault("generator", "the loader's generator not restored", r"generator|\bdata\b|batch"),
                    GENERIC["scheduler"],
                    _within("generator", "the loader's generator not restored"),
                    _within("scheduler", "a scheduler that steps once in an epoch not loaded"),
                ),
            ),
            (
                "stream",
                "IterableDataset with a shuffle buffer",
                "stream",
                of(
                    "data, optimizer",
                    Fault("shuffle buffer", "the shuffle buffer starts empty", r"\bdata\b|batch"),
                    Fault("generator", "the stream's generator not restored", r"generator|\bdata\b|batch"),
                    Fault(
                        "iterator after the RNG", "`iter(DataLoader)` called after the RNG was restored", r"RNG.*torch"
                    ),
                ),
            ),
            (
                "stateful loader",
                "a loader with `state_dict`, shuffled with torch's generator",
                "stateful",
                of(
                    "one batch on",
                    Fault("order", "the rest of the epoch shuffled again", r"\bdata\b|batch"),
                    Fault("torch rng", "torch's RNG not restored", r"RNG state.*torch"),
                    Fault("epochs counted", "the count of epochs reset", r"epochs"),
                ),
            ),
        )
    ),
    *(
        Script(
            name,
            style,
            ("train_optimizers.py", "--optimizer", optimizer, "--out", "OUT"),
            "OUT/state-{step}.bin",
            faults,
        )
        for name, style, optimizer, faults in (
            (
                "one cycle",
                "OneCycleLR with cycled momentum",
                "onecycle",
                of(
                    "scheduler",
                    Fault(
                        "steps that remain",
                        "a new cycle over the remaining steps",
                        r"scheduler",
                        r"learning rate|moment",
                    ),
                    Fault("moments", "momentum zeroed", r"moments of the optimizer.*momentum_buffer.*zero"),
                    Fault("momentum of the cycle", "`momentum` of the group changed", r"`momentum` of parameter group"),
                ),
            ),
            (
                "LBFGS",
                "LBFGS with a closure",
                "lbfgs",
                of(
                    "data, one weight",
                    Fault("history of LBFGS", "LBFGS history lost", r"optimizer.*(not loaded|no state|in part)"),
                    Fault("last gradient", "previous gradient of LBFGS negated", r"prev_flat_grad"),
                ),
            ),
            (
                "sparse",
                "SparseAdam for embeddings, AdamW for the rest",
                "sparse",
                of(
                    "data",
                    Fault("optimizer 0", "SparseAdam not loaded", r"optimizer.*(not loaded|no state|in part)"),
                    Fault("optimizer 1", "AdamW not loaded", r"optimizer.*(not loaded|no state|in part)"),
                ),
            ),
            (
                "masters",
                "a tied bfloat16 model with float32 master weights",
                "masters",
                of(
                    "second moments",
                    Fault(
                        "masters from the model",
                        "master weights copied from the rounded weights",
                        r"weights.*(rounded|masters)",
                    ),
                    Fault("untied head", "the tied head becomes a separate tensor", r"tied"),
                ),
            ),
            (
                "own optimizer",
                "a custom optimizer with slow weights and a counter",
                "own",
                of(
                    "buffer",
                    Fault("slow weights", "slow weights lost", r"slow|optimizer.*(not loaded|no state|in part)"),
                    Fault("count of the optimizer", "counter of the custom optimizer reset", r"\bk\b"),
                ),
            ),
            (
                "functional",
                "no optimizer object: momentum in a dict, manual updates",
                "functional",
                of("weights", Fault("velocity", "the momentum not loaded", r"velocity")),
            ),
        )
    ),
    Script(
        "files of a set",
        "the file list is a sorted set, shuffled with Python's RNG; augmentation with numpy's",
        ("train_files.py", "--out", "OUT"),
        "OUT/{step}.ckpt",
        of(
            "optimizer",
            Fault("order of a set", "the set not sorted", r"\bdata\b|batch"),
            Fault("python rng", "Python's RNG not restored", r"RNG state.*python|order"),
            Fault("augmentation", "numpy's generator seeded again", r"augmentation|\bdata\b|batch"),
            Fault("order", "the rest of the epoch shuffled again", r"order|\bdata\b|batch", r"RNG.*python"),
            Fault("one optimizer value", "one element of RMSprop's `square_avg` changed", r"square_avg"),
        ),
    ),
    *(
        Script(
            name,
            style,
            ("train_ranks.py", "--wrap", wrap, "--out", "OUT"),
            "OUT/step-{step}",
            faults,
            launcher=_TORCHRUN,
            is_long=True,
        )
        for name, style, wrap, faults in (
            (
                "DDP",
                "2 ranks, `rng_rankN.pt` for each, DistributedSampler",
                "ddp",
                of(
                    "optimizer, data",
                    Fault("rng of rank 1", "the RNG of rank 1 not restored", r"RNG state of rank 1"),
                    Fault("rng of rank 0 on all", "all ranks get the RNG of rank 0", r"RNG state.*rank 1"),
                    Fault("set_epoch", "`set_epoch` not called after the resume", r"\bdata\b|batch"),
                    _within("set_epoch", "`set_epoch` not called after the resume"),
                    Fault(
                        "data of rank 1",
                        "the data of rank 1 starts over",
                        r"data of rank 1|rank 1.*batch|batch.*rank 1",
                    ),
                    Fault("tokens", "the count of tokens not loaded", r"tokens"),
                ),
            ),
            (
                "FSDP2",
                "2 ranks, DCP, a `Stateful` with tokens and random states",
                "fsdp2",
                of(
                    "rng, moments, one weight",
                    Fault("tokens", "token count of the `Stateful` not loaded", r"tokens"),
                    Fault(
                        "moments not in the list",
                        "the optimizer left out of the load",
                        r"optimizer.*(not loaded|no state)|moments.*zero",
                        "step counters",
                    ),
                ),
            ),
            (
                "FSDP1",
                "2 ranks, one full file from rank 0",
                "fsdp1",
                of(
                    "optimizer, tokens",
                    Fault("rng of rank 1", "the RNG of rank 1 not restored", r"RNG state of rank 1"),
                    Fault("one moment for both", "second moments also saved as the first ones", r"moments"),
                ),
            ),
        )
    ),
    Script(
        "accelerate",
        "`save_state`, a custom object in `custom_checkpoint_0.pkl`",
        ("train_accelerate.py", "--out", "OUT"),
        "OUT/step_{step}",
        of(
            "weights, optimizer, scheduler, data, best",
            Fault("set_epoch", "`set_epoch` not called after the resume", r"\bdata\b|batch"),
            _within("set_epoch", "`set_epoch` not called after the resume"),
            Fault("average", "the average not loaded", r"polyak|custom_checkpoint"),
            Fault("no generator", "`iter(loader)` draws one more number after a resume", r"RNG.*torch|random_states"),
        ),
        needs="accelerate",
        is_long=True,
    ),
    Script(
        "Trainer",
        "transformers' Trainer with a callback that adds `ema.pt` to its checkpoints",
        ("train_trainer.py", "--out", "OUT"),
        None,
        of(
            "rng, data",
            Fault(
                "optimizer and scheduler",
                "optimizer and scheduler not loaded",
                r"optimizer was not loaded",
                r"scheduler|learning rate",
            ),
            Fault("average", "the callback's average not loaded", r"ema"),
        ),
        needs="transformers",
        is_long=True,
    ),
    Script(
        "hidden state",
        "a model keeps a hidden state and a bank; a forward pass before the restore creates a lazy layer",
        ("train_hidden.py", "--out", "OUT"),
        "OUT/hidden-{step}.pt",
        (
            Fault("hidden state", "the hidden state begins at zero", r"hidden"),
            Fault("bank", "the bank begins at the first batch", r"bank"),
            Fault("spectral vectors", "the vectors of spectral norm drawn anew", r"buffers.*_u"),
            Fault("gain", "the gain of weight norm not loaded", r"weights of the model.*original0"),
            Fault("product of momentum", "NAdam's product of momenta reset", r"mu_product"),
        ),
    ),
    Script(
        "stages",
        "a part is frozen until it has a group of its own; weights of losses follow from a history in a deque",
        ("train_stages.py", "--out", "OUT"),
        "OUT/stage_{step}.pt",
        (
            Fault("group", "the group that was added is not there", r"group 1.*missing|loaded in part"),
            Fault("momentum of the group", "its momentum lost", r"loaded in part"),
            Fault("frozen", "the part is frozen again", r"frozen"),
            Fault("history", "the history of losses not loaded", r"history"),
            Fault("weights of losses", "the weights of the losses reset", r"`other\.weights`"),
            Fault("scale", "the scale of the loss reset", r"scale"),
            Fault("best", "best loss so far not loaded", r"best"),
            Fault("best weights", "the best weights not loaded", r"best_state"),
        ),
    ),
    *(
        Script(
            f"phases{kept}{where}",
            f"an optimizer and a scheduler for each phase{kept}{where}",
            ("train_phases.py", "--out", "OUT", *(["--keeps", "1"] if kept else [])),
            "OUT/phase_{step}.pt",
            of("weights, data, torch rng" if where else "weights, moments, optimizer, step counters, scheduler, data"),
            at=6 if where else 8,
        )
        for kept in ("", ", kept")
        for where in ("", ", at their end")
    ),
    Script(
        "odd places",
        "averages at the parameters, in the optimizer, in an array; schedulers in a scheduler",
        ("train_aside.py", "--out", "OUT"),
        "OUT/model-{step}.pt",
        (
            Fault("means", "the averages at the parameters begin at the weights", r"means"),
            Fault("trace", "an average in the optimizer's state zeroed", r"trace.*zero"),
            Fault("average", "the array begins at the weights", r"average"),
            Fault("max_exp_avg_sq", "the largest second moments zeroed", r"max_exp_avg_sq.*zero"),
            Fault("scheduler", "the schedulers begin again", r"scheduler", r"learning rate"),
            Fault("inner scheduler", "the restarts begin again", r"scheduler.*T_cur"),
            Fault("one step of the scheduler", "the scheduler steps once too often", r"scheduler|learning rate"),
            Fault("decay", "the scheduler of an optimizer without steps not loaded", r"scheduler"),
        ),
    ),
    Script(
        "unused",
        "the best weights and a teacher, which the steps that are compared overwrite",
        ("train_unused.py", "--out", "OUT"),
        "OUT/at-{step}.pt",
        tuple(
            Fault(name, what, rf"not loaded.*{cause}", expects="told")
            for name, what, cause in (
                ("best", "best loss so far not loaded, and beaten before the next save", r"\bbest`"),
                ("best weights", "best weights not loaded, and replaced before the next save", r"best_state"),
                ("teacher", "the teacher not loaded, and replaced before it is used", r"teacher"),
            )
        ),
    ),
    Script(
        "generators",
        "generators of one's own: numpy's `Generator`, `random.Random`, torch's for mixup and for the sampler",
        ("train_generators.py", "--out", "OUT"),
        "OUT/g_{step}.pt",
        tuple(
            Fault(name, what, cause)
            for name, what, cause in (
                ("noise", "numpy's `Generator` not restored", r"^[^`]*generator `noise`[^`]*$"),
                ("chooser", "`random.Random` not restored", r"^[^`]*generator `chooser`[^`]*$"),
                ("mixup", "the generator of mixup not restored", r"^[^`]*generator `mix`[^`]*$"),
                ("order", "the generator of the sampler not restored", r"^[^`]*`order`[^`]*$"),
                (
                    "noise drawn",
                    "a number drawn from numpy's `Generator` after it was restored",
                    r"^[^`]*generator `noise`[^`]*$",
                ),
                (
                    "chooser drawn",
                    "a number drawn from `random.Random` after it was restored",
                    r"^[^`]*generator `chooser`[^`]*$",
                ),
                ("seen", "the position in the epoch not loaded", r"\bdata\b|batch"),
            )
        ),
    ),
    Script(
        "warm-up",
        "an average whose decay warms up, schedulers per step and on a plateau, early stopping, a history",
        ("train_warmup.py", "--out", "OUT"),
        "OUT/w_{step}.pt",
        of(
            "scheduler, best",
            Fault(
                "scheduler after", "a scheduler made after the load, set to the step alone", r"scheduler|learning rate"
            ),
            Fault("plateau", "the scheduler on a plateau not loaded", r"scheduler", r"learning rate"),
            Fault("bad epochs of the plateau", "its count of bad epochs reset", r"num_bad_epochs"),
            Fault("best of the plateau", "its best metric reset", r"scheduler.*best"),
            Fault("warm-up of the average", "the count of the average's decay reset", r"ema\.n\b"),
            Fault("average", "the average starts from the initial weights", r"ema\.w"),
            Fault("history", "the history of losses not loaded", r"history"),
            Fault("patience", "the count of steps without a better loss reset", r"\bbad\b"),
        ),
    ),
    Script(
        "compiled",
        "`torch.compile`, recomputed activations with dropout, fused AdamW with `amsgrad`, OneCycleLR",
        ("train_compiled.py", "--compile", "1", "--out", "OUT"),
        "OUT/c_{step}.pt",
        of(
            "scheduler, torch rng, step counters",
            Fault("compiled prefix", "names with another prefix, `strict=False`", _LOST, "buffer"),
            Fault("scale", "a buffer that each step changes not loaded", r"buffer.*scale"),
            Fault("largest moments", "the largest second moments zeroed", r"max_exp_avg_sq.*zero"),
            Fault("fused", "`eps` of a group reset", r"`eps` of parameter group 0"),
        ),
        is_long=True,
    ),
    Script(
        "within a window",
        "saved in the middle of an accumulation, with its gradients; recomputed activations",
        ("train_compiled.py", "--accumulate", "3", "--out", "OUT"),
        "OUT/c_{step}.pt",
        of(
            "torch rng",
            Fault("gradients", "the gradients so far not loaded", r"grads"),
            Fault("place in the window", "the window begins again", r"micro"),
        ),
    ),
    Script(
        "turns",
        "three optimizers that step in turns: with a Kahan sum in bfloat16, RMSprop, LBFGS",
        ("train_turns.py", "--out", "OUT"),
        "OUT/t{step}.pt",
        (
            Fault("compensation", "what rounding lost is zeroed", r"moments of the optimizer.*\(c\).*zero"),
            Fault("momentum in bf16", "momentum in bfloat16 zeroed", r"moments of the optimizer.*\(m\).*zero"),
            Fault("mean of the squares", "RMSprop's mean gradient zeroed", r"grad_avg.*zero"),
            Fault("last direction", "the last direction of LBFGS negated", r"moments.*\bd\b"),
            Fault("optimizer of the loss weights", "LBFGS not loaded", r"optimizer.*(not loaded|in part)"),
            Fault("loss weights", "learned weights of losses not loaded", r"weights of the model.*built"),
            Fault("turn", "whose turn it is not loaded", r"\bturn\b|batch"),
        ),
    ),
    Script(
        "twins",
        "two models alike, each with an optimizer of its own, that are trained in turns",
        ("train_twins.py", "--out", "OUT"),
        "OUT/tw{step}.pt",
        (Fault("moments of one", "first moments of one of two optimizers zeroed", r"moments.*exp_avg.*zero"),),
        at=9,
        until=12,
    ),
    Script(
        "observers",
        "`AveragedModel` with `update_bn`, observers of a quantisation, a curriculum, a sampler with buckets",
        ("train_observers.py", "--out", "OUT"),
        "OUT/swa-{step}.pt",
        (
            Fault("buckets", "the samples in the buckets lost", r"bucket|\bdata\b|batch"),
            Fault("rng of the buckets", "the generator of the buckets not restored", r"\bdata\b|batch"),
            Fault("statistics", "BatchNorm's statistics not loaded", r"buffers?.*running"),
            Fault("observer", "the least value that an observer saw not loaded", r"buffer.*obs\.low"),
            Fault("observer switched on", "an observer switched on again", r"buffer.*obs\.on"),
            Fault("average", "the average not loaded", r"AveragedModel"),
            Fault("count of the average", "`n_averaged` reset", r"n_averaged"),
            Fault("rate of the average", "SWALR not loaded", r"scheduler"),
            Fault("length", "the length of the curriculum reset", r"length"),
            Fault("successes", "steps at this length reset", r"successes"),
            Fault(
                "statistics of the average",
                "BatchNorm's statistics of the average not loaded, and overwritten by its next update",
                r"not loaded.*running_mean",
                expects="told",
            ),
        ),
    ),
    Script(
        "priorities",
        "a replay buffer with priorities, running statistics in arrays, returns of several steps",
        ("train_replay.py", "--out", "OUT"),
        "OUT/r{step}.pt",
        (
            Fault("target", "the target network starts as the other", r"no optimizer trains"),
            Fault("numpy generator", "numpy's `Generator` not restored", r"\bdata\b|batch"),
            Fault("norm", "the running statistics reset", r"\bdata\b|batch|norm"),
            Fault("count of the norm", "the count of the running statistics reset", r"\bdata\b|batch|norm"),
            Fault("most of the memory", "the oldest of the memory lost", r"memory"),
            Fault("priorities", "the priorities not loaded", r"priorities"),
            Fault("beta", "the exponent of the priorities reset", r"beta"),
            Fault("n-step", "the last steps of the environment lost", r"nstep"),
            Fault("state of the world", "the environment starts over", r"other\.state"),
            Fault("total", "the steps of the environment not counted on", r"total"),
        ),
    ),
    Script(
        "schedule-free",
        "a schedule-free optimizer, which saves other weights than it trains; counters of the script",
        ("train_schedule_free.py", "--out", "OUT"),
        "OUT/u_{step}.pt",
        (
            Fault("z", "its own sequence of weights zeroed", r"\(z\).*zero"),
            Fault("weight sum", "its sum of weights reset", r"weight_sum"),
            Fault("k", "its count of steps reset", r"`k` of parameter group 0"),
            Fault(
                "mode of the optimizer", "it trains the weights that it saves", r"weights of the model are as .* saved"
            ),
            Fault(
                "patience not saved",
                "the patience of early stopping in no checkpoint, and without effect yet",
                r"reinitialised.*`waited`",
                expects="told",
            ),
            Fault(
                "tokens not saved", "the tokens seen in no checkpoint", r"reinitialised.*`seen_tokens`", expects="told"
            ),
        ),
    ),
    Script(
        "async",
        "DCP's `async_save`, the last two are kept, `latest` is a link to the newest that was written",
        ("train_async.py", "--out", "OUT"),
        "OUT/step-{step}",
        of(
            "scheduler",
            Fault("moments", "first moments zeroed", r"moments of the optimizer.*exp_avg.*zero"),
            Fault("weight", "a bias zeroed", r"weights of the model.*mid\.bias"),
            Fault("torch rng", "torch's RNG not restored", r"RNG state.*torch", r"app/torch"),
        ),
        resume="... --resume latest",
    ),
    Script(
        "persistent workers",
        "workers that live on between epochs, and draw from the number of the epoch; ExponentialLR per epoch",
        ("train_persistent.py", "--out", "OUT"),
        "OUT/p{step}.pt",
        (
            Fault("sums", "Adagrad's sums zeroed", r"moments of the optimizer.*sum"),
            Fault("scheduler of epochs", "the scheduler of epochs not loaded", r"scheduler"),
            Fault("position", "the epoch starts over", r"\bdata\b|batch"),
            Fault("epoch of the sampler", "the sampler has the first epoch again", r"\bdata\b|batch"),
            Fault("epoch of the workers", "the workers have the first epoch again", r"\bdata\b|batch"),
        ),
    ),
    Script(
        "state of ranks",
        "2 ranks, each with a curriculum and numpy's `Generator`; an average on rank 0",
        ("train_rank_state.py", "--out", "OUT"),
        "OUT/at-{step}",
        (
            Fault("average", "the average on rank 0 not loaded", r"ema"),
            Fault("file of rank 0 on all", "all ranks read the file of rank 0", r"rank 1"),
            Fault("generator of rank 1", "the generator of rank 1 not restored", r"data of rank 1"),
            Fault("torch rng of rank 1", "torch's RNG of rank 1 not restored", r"RNG state of rank 1"),
            Fault("level of rank 1", "the curriculum of rank 1 reset", r"\blevel` was not restored on rank 1"),
        ),
        launcher=_TORCHRUN,
        is_long=True,
    ),
    *(
        Script(
            f"{wrap} from {worlds[0]} to {worlds[1]} ranks, a batch of {share}",
            f"{wrap.upper()} that resumes on another number of ranks; samples are counted "
            f"{'over all' if share == 'all' else 'on each'}, each rank has its random state",
            ("train_worlds.py", "--wrap", wrap, "--share", share, "--out", "OUT"),
            "OUT/at-{step}",
            (
                *(
                    (
                        Fault("data", "data starts over", r"the data restarted", r"seen"),
                        Fault("one batch on", "one batch skipped", r"the data is off by \+", r"seen"),
                    )
                    if share != "own"
                    else ()
                ),
                Fault("rng", "no RNG state restored", r"RNG state of rank [01, ]+ .*torch", r"the data restarted"),
                *(
                    (
                        Fault("rng of rank 1", "torch's RNG of rank 1 not restored", r"RNG state of rank 1 .*torch"),
                        Fault("rng of rank 0 on all", "all ranks get the RNG of rank 0", r"rank 1 has the RNG.*rank 0"),
                    )
                    if worlds[1] > 1
                    else ()
                ),
                (
                    Fault("moments", "first moments zeroed", r"moments of the optimizer.*zero")
                    if wrap == "fsdp2"
                    else Fault("optimizer", "optimizer not loaded", r"optimizer was not loaded", r"learning rate")
                ),
                Fault("scheduler", "scheduler not loaded", r"scheduler was not restored", r"learning rate"),
                Fault("best", "best loss not loaded", r"best` was not restored"),
                Fault("average", "the running mean of losses not loaded", r"loss_ema` was not restored"),
                *(
                    (Fault("ranks of the save", "shared among as many ranks as saved", r"samples", expects="told"),)
                    if share == "all"
                    else (Fault("as many ranks", "the place follows from other ranks", r"data is off by", r"seen"),)
                    if worlds[1] > worlds[0] and share == "each"
                    else ()
                ),
            ),
            launcher=_TORCHRUN_OF,
            is_long=True,
            worlds=worlds,
        )
        for wrap, share, worlds in (
            ("ddp", "all", (2, 3)),
            ("ddp", "each", (2, 1)),
            ("fsdp2", "all", (3, 2)),
            ("fsdp2", "each", (2, 3)),
            ("ddp", "own", (2, 3)),
            ("fsdp2", "own", (2, 1)),
        )
    ),
    *(
        Script(
            name,
            f"2 ranks of DDP with BatchNorm, {how}",
            ("train_statistics.py", "--of", of_which, "--out", "OUT"),
            "OUT/at-{step}",
            (*faults, GENERIC["optimizer"]),
            launcher=_TORCHRUN,
            is_long=True,
        )
        for name, of_which, how, faults in (
            (
                "statistics of ranks",
                "each",
                "each with a file of its statistics",
                (
                    Fault(
                        "statistics of rank 1",
                        "the statistics of rank 0 alone are saved",
                        r"running_mean.*of rank 1",
                        expects="told",
                    ),
                ),
            ),
            ("statistics of rank 0", "first", "whose statistics rank 0 broadcasts", ()),
        )
    ),
    Script(
        "optimizers of ranks",
        "2 ranks of DDP, the first of which trains a probe with an optimizer of its own",
        ("train_helpers.py", "--out", "OUT"),
        "OUT/at-{step}.pt",
        (
            *of("moments, one weight"),
            Fault("moments of rank 1", "the optimizer not loaded on rank 1", r"optimizer.*on rank 1.*have no state"),
            Fault("momentum of the probe", "the momentum of the probe lost", r"has no state|not loaded|in part"),
        ),
        launcher=_TORCHRUN,
        is_long=True,
    ),
    *(
        Script(
            name,
            what,
            ("train_people.py", "--style", style, "--out", "OUT"),
            checkpoints,
            faults,
            launcher=_TORCHRUN if worlds is None else _TORCHRUN_OF if worlds else (sys.executable,),
            is_long=worlds != (),
            worlds=worlds or None,
        )
        for name, style, what, checkpoints, worlds, faults in (
            (
                "JSON of ranks",
                "json",
                "DCP of the model and its optimizer, all else in JSON of each rank",
                "OUT/{step}",
                None,
                (
                    Fault("position of rank 1", "the data of rank 1 start over", r"(data|batch) of rank 1"),
                    Fault("last", "the count of a schedule of one's own lost", r"learning rate|`.*last`"),
                    Fault("second moments", "second moments zeroed", r"moments.*exp_avg_sq.*zero"),
                ),
            ),
            (
                "owners",
                "owners",
                "each rank updates parameters of its own by two optimizers",
                "OUT/model_{step}.pt",
                None,
                (
                    Fault("smooth", "the running mean of losses lost", r"smooth"),
                    Fault("second optimizer of rank 1", "it is not loaded", r"rank 1.*no state|not loaded on rank 1"),
                ),
            ),
            (
                "points",
                "points",
                "points that are split as they train, with their moments",
                "OUT/chkpnt{step}.pth",
                (),
                (
                    Fault("sums", "the sums of gradients begin anew", r"not loaded.*sums", expects="told"),
                    Fault("moments", "moments zeroed", r"moments of the optimizer.*zero"),
                    Fault("rng of the split", "torch's RNG not restored", r"RNG.*torch"),
                ),
            ),
            (
                "flat numbers",
                "flat",
                "numbers at the root of the file, an average in float64, a sampler with a state",
                "OUT/checkpoint-{step}.pt",
                (),
                (
                    Fault("average", "the average begins at the weights", r"model_avg|average"),
                    Fault("sampler", "the sampler starts over", r"\bdata\b|batch"),
                    Fault("lr_scale", "the scale of the loss reset", r"lr_scale"),
                ),
            ),
            (
                "loaders of ranks",
                "loaders",
                "a file of the loader for each rank, dealt anew to more ranks",
                "OUT/step_{step}_ckp",
                (2, 3),
                (
                    Fault("files of the same ranks", "ranks read the files of as many", r"samples", expects="told"),
                    Fault("a shard", "a shard of the data starts over", r"samples", expects="told"),
                    GENERIC["optimizer"],
                ),
            ),
        )
    ),
    *(
        Script(
            f"values of ranks, {wrap}",
            f"2 ranks with a queue, a mean, counters and generators of their own, {how}",
            ("train_rank_values.py", "--wrap", wrap, "--out", "OUT"),
            "OUT/at-{step}",
            (
                *(
                    Fault(f"{name} of rank 1", what, cause, r"RNG state of rank 1" if name == "file" else "")
                    for name, what, cause in (
                        ("mean", "the running mean of rank 1 reset", r"mean` was not restored on rank 1"),
                        ("skipped", "a counter of rank 1 reset", r"skipped` was not restored on rank 1"),
                        ("best", "the best loss of rank 1 not loaded", r"best` was not restored on rank 1"),
                        ("queue", "the queue of rank 1 begins anew", r"batch of rank 1"),
                        ("place", "the place of rank 1 in the data reset", r"(batch|data) of rank 1"),
                        ("noise", "the generator of rank 1 not restored", r"batch of rank 1"),
                        ("torch", "torch's RNG of rank 1 not restored", r"RNG state of rank 1 differs \(torch"),
                        ("file", "nothing of its own restored on rank 1", r"data of rank 1 restarted"),
                        ("moments", "first moments zeroed on rank 1", r"moments.*on rank 1 \(exp_avg\).*zero"),
                        ("scheduler", "the scheduler not loaded on rank 1", r"scheduler was not restored on rank 1"),
                        ("rate", "the learning rate reset on rank 1", r"learning rate.*on rank 1"),
                        ("buffer", "a buffer of rank 1 zeroed", r"buffer.*on rank 1"),
                        ("mode", "rank 1 trains in eval mode", r"model was not restored on rank 1.*mode"),
                    )
                ),
                Fault(
                    "of rank 0 on all",
                    "all ranks get what rank 0 kept",
                    r"rank 1 has the batch of rank 0",
                    r"RNG.*rank 1",
                ),
            ),
            launcher=_TORCHRUN,
            is_long=True,
        )
        for wrap, how in (
            ("plain", "in one file that rank 0 gathers"),
            ("ddp", "in a file of each rank"),
            ("fsdp2", "in DCP's directory"),
        )
    ),
    *(
        Script(style, what, ("train_habits.py", "--style", style, "--out", "OUT"), "OUT/h_{step}.pt", faults)
        for style, what, faults in (
            (
                "sam",
                "two passes for each step, the first as far as a mean of losses says",
                of(
                    "data",
                    Fault("level", "the mean of losses reset", r"level"),
                    Fault("rho", "how far the first pass goes reset", r"rho"),
                    Fault("moments", "momentum zeroed", r"moments of the optimizer.*momentum_buffer.*zero"),
                ),
            ),
            (
                "lookahead",
                "slow weights beside the optimizer",
                of(
                    "second moments",
                    Fault("slow weights", "the slow weights begin at the initial ones", r"slow"),
                    Fault("count", "the count of steps since they were met reset", r"\bcount\b"),
                ),
            ),
            (
                "tokens",
                "a learning rate that warms up by tokens, a batch that grows",
                of(
                    "one batch on",
                    Fault("tokens", "the count of tokens reset", r"tokens|learning rate"),
                    Fault("batch size", "the size of the batch reset", r"size|batch"),
                ),
            ),
            (
                "memmap",
                "a replay buffer in a file that is mapped into memory",
                of(
                    "optimizer",
                    Fault("replay", "the replay buffer starts empty", r"replay|batch"),
                    Fault("at", "its position reset", r"\bat\b|batch"),
                ),
            ),
            (
                "unfreeze",
                "a part is frozen until a step, and a layer of it in eval mode",
                of(
                    "buffer",
                    Fault("frozen", "the part is frozen again", r"frozen"),
                    Fault("mode of a layer", "the layer is in eval mode again", r"mode"),
                ),
            ),
            (
                "buffers",
                "a buffer that is not persistent, a generator that a module holds",
                of(
                    "one weight",
                    Fault("scale", "the buffer begins anew", r"buffer.*scale"),
                    Fault("noise of a module", "the generator of the module not restored", r"noise"),
                ),
            ),
            (
                "growing",
                "a module is added at a step",
                of(
                    "moments of a group",
                    Fault("names of the addition", "its weights under other names, `strict=False`", r"weights.*extra"),
                    Fault("stale parameters", "made anew after the optimizer was loaded", r"extra"),
                ),
            ),
            (
                "swallowed",
                "an error where it loads is a warning",
                (Fault("error", "only the weights are loaded", r"optimizer was not loaded", r"RNG|data|batch"),),
            ),
            (
                "best",
                "the best weights and their loss",
                (
                    Fault("best weights", "the best weights are those that were saved", r"of_best"),
                    Fault("resumed from the best", "training goes on from the best weights", r"weights", r"buffer"),
                ),
            ),
            (
                "norms",
                "clips at a running norm of the gradients",
                (
                    Fault("running norm", "the running norm reset", r"norm"),
                    Fault("steps left out", "a count reset", r"left_out"),
                ),
            ),
            (
                "scaled",
                "a grad scaler that grows, a learning rate that restarts",
                (
                    Fault("growth interval", "the interval of its growth is another", r"grad scaler.*growth_interval"),
                    Fault("restarts", "the restarts begin again", r"scheduler.*T_"),
                ),
            ),
            (
                "offloaded",
                "moments that lie aside between the steps",
                of(
                    "step counters",
                    Fault("offloaded", "what lay aside is not taken back", r"optimizer was not loaded"),
                ),
            ),
        )
    ),
    Script(
        "torn",
        "a save in a thread, of copies",
        ("train_torn.py", "--out", "OUT"),
        "OUT/torn-{step}.pt",
        tuple(
            Fault(name, what, r"as (it|they) (was|were) saved", r"buffer|the data is off by -")
            for name, what in (
                ("torn weights", "the saved weights are of a later step than the rest"),
                ("torn moments", "the saved optimizer is of a later step than the rest"),
            )
        ),
    ),
    Script(
        "lazy",
        "lazy parameters, parameters and groups that are added at a step, a part that is frozen, lambdas with a state",
        ("train_lazy.py", "--out", "OUT"),
        "OUT/lazy.{step}.pt",
        (
            Fault("an expert", "a parameter that was added not loaded", r"experts\.e1"),
            Fault("lazy layer", "a lazy layer not loaded", r"b\.weight"),
            Fault("state of an expert", "moments of a parameter that was added lost", r"has no state"),
            Fault("rate of an expert", "learning rate of a group that was added reset", r"rate of parameter group 3"),
            Fault("lambda", "the state of a scheduler's lambda not loaded", r"scheduler.*lr_lambdas", r"learning rate"),
            Fault("frozen", "a frozen part trains again", r"frozen"),
            Fault("base rates", "a base rate of the scheduler changed", r"scheduler.*base_lrs"),
        ),
    ),
    Script(
        "packing",
        "documents packed into sequences that grow, a shuffle buffer, a loss weight in a closure, counts in tensors",
        ("train_packing.py", "--out", "OUT"),
        "OUT/pack-{step}.pt",
        (
            Fault("rest of a document", "what was left of a document lost", r"\brest\b|\bdata\b|batch"),
            Fault("shuffle buffer", "the shuffle buffer lost", r"buffer.*document"),
            Fault("order of the buffer", "the generator of the buffer not restored", r"generator `source.order`"),
            Fault("weight of the loss", "the weight of the loss in a closure reset", r"`other\.weight`.*1\.0 and not"),
            Fault("length of sequences", "the sequences begin short again", r"\blength\b"),
            Fault("tokens", "the count of tokens reset", r"`numbers/tokens`|numbers\.tokens"),
            Fault("one step on", "one step skipped", r"numbers.step"),
        ),
    ),
    Script(
        "mixing",
        "mixup and masks from generators of their own, smoothed targets, warm restarts",
        ("train_mixing.py", "--out", "OUT"),
        "OUT/mix-{step}.pt",
        (
            Fault("place since the restart", "the place since a warm restart reset", r"scheduler.*T_cur"),
            Fault("generator of mixup", "the generator of mixup not restored", r"generator `mix`"),
            Fault("generator of masks", "the generator of masks not restored", r"generator `mask`"),
            Fault("smoothing", "how smooth the targets are reset", r"smoothing"),
            Fault("momentum of BatchNorm", "the momentum of BatchNorm changed", r"\bmomentum\b.*0\.01 and not 0\.1"),
            Fault("nesterov", "Nesterov's momentum switched off", r"`nesterov` of parameter group 0"),
        ),
        at=6,
        until=12,
    ),
    *(
        Script(
            name,
            what,
            (f"train_{file}.py", "--style", name.replace(" ", ""), "--out", "OUT"),
            checkpoints,
            tuple(Fault(*fault) for fault in faults),
            resume="..." if name == "newest" else "... --resume {checkpoint}",
        )
        for file, name, checkpoints, what, faults in MORE
    ),
)
BY_NAME = {script.name: script for script in CORPUS}
