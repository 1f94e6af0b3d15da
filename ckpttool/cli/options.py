"""Each option and argument of the commands, once: its type, its flags, its help text, its section and its completion.

    def verify(path: Checkpoint, *, shapes: Shapes = None, threads: Threads = None, ...) -> None:

A command's signature is made of these names, in the order of its `--help`. One whose text or section is another there
is `Annotated[Only, Reworded(...)]`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from ckpttool.cli import completion
from ckpttool.cli.parsing import Reworded, argument, option

Text = str | None
Number = int | None
Float = float | None
Many = list[str]

# The sections of `--help`.
SELECTION, TENSORS, NAMES, REFERENCE, VALUES = "Selection", "Tensors", "Names", "Reference", "Values"
COMPARISON, FORMAT, LAYOUT, HUB = "Comparison", "Format", "Layout", "Hugging Face Hub"
TRAINING, RESUMING, RUNS, COMPARED = "Training", "Resuming", "Runs", "What is compared"
EXECUTION, OUTPUT = "Execution", "Output"

# fmt: off

# Arguments ------------------------------------------------------------------------------------------------------------

Checkpoint = Annotated[str, argument("PATH",
    "A checkpoint: a file, a directory, a run directory, or a quoted pattern of rank files.")]
Source = Annotated[str, argument("SRC", "The checkpoint to read. It is never changed.")]
Destination = Annotated[str, argument("DST",
    "The file or directory to write, with missing parents, or hf://org/name/path.")]
ExportDestination = Annotated[Destination, Reworded("The directory to write, or hf://org/name on the Hub.")]
ReshardDestination = Annotated[Destination, Reworded(
    "The directory to write, with missing parents, or hf://org/name/path.")]
RepairDestination = Annotated[Destination, Reworded("The directory to write, with missing parents.")]
SamplesDestination = Annotated[Destination, Reworded("The directory to write.")]
TensorName = Annotated[str, argument("TENSOR",
    "Dotted name of a tensor, as in `inspect --tensors`, or of a value, such as `step`.",
    complete=completion.tensor_names)]
Elements = Annotated[Text, argument("[ELEMENTS]",
    "A slice to show instead of the first values: '[0:4, :8]'.")]
Run = Annotated[str, argument("RUN", "The directory of a run, local or in a bucket.")]
Directory = Annotated[str, argument("DIR", "The directory that runs wrote to, `TMPDIR`, or a folder of a bucket.")]
A = Annotated[str, argument("A", "A checkpoint of any format.")]
B = Annotated[str, argument("B", "The checkpoint to compare it with, of any format.")]
ReportSteps = Annotated[Many, argument("[STEP]...", "Steps of a run to show side by side, as with --steps.")]
TrialCheckpoints = Annotated[Many, argument("[CKPT]...",
    "Checkpoints to resume from; each run is compared with the first.")]
TrainingCommand = Annotated[Many, argument("-- COMMAND...",
    "The training command, with OUT or {out} for its output directory.")]
BatchCommand = Annotated[Many, argument("COMMAND RUN... DST [OPTION]...",
    "convert, export, verify or stats; runs, quoted patterns or checkpoints; a destination with {step} or {name}; and "
    "the options of that command, which may contain them too.")]
RecipeToWrite = Annotated[str, argument("FILE", "The file to write. An existing one is not replaced.")]

# What is read ---------------------------------------------------------------------------------------------------------

Only = Annotated[Many, option("--only PART", SELECTION,
    "Only this part of the state: model, optimizer, scheduler, ... or a top-level key. Repeatable.",
    complete=completion.parts)]
OnlyModel = Annotated[Only, Reworded("Which model, if there are two.")]
OnlyWithoutKey = Annotated[Only, Reworded(
    "Include only this part (model, optimizer, ...; or its key), and strip its key from names. Repeatable.")]
Drop = Annotated[Many, option("--drop PART", SELECTION, "Exclude this part. Repeatable.", complete=completion.parts)]
Tensors = Annotated[Many, option("--tensors GLOB", SELECTION,
    "Include only tensors whose dotted name matches; `*` also matches dots, `re:` starts a regular expression. "
    "Repeatable.", complete=completion.tensor_names)]
ListedTensors = Annotated[Tensors, Reworded(
    "List only tensors whose dotted name matches; `*` also matches dots, `re:` starts a regular expression. "
    "Repeatable.", TENSORS)]
Exclude = Annotated[Many, option("--exclude GLOB", SELECTION,
    "Exclude matching tensors. Repeatable.", complete=completion.tensor_names)]
Shapes = Annotated[Text, option("--shapes FROM", SELECTION,
    "Parameter names, shapes and order (a checkpoint or JSON); needed for FSDP1 flat parameters and integer-keyed "
    "optimizers.")]
Steps = Annotated[Text, option("--steps STEPS", SELECTION,
    "Show all complete checkpoints of a run (all) or some (500,1000 or 500..900) side by side.")]
ListedSteps = Annotated[Steps, Reworded(
    "List only some steps of a run (500,1000 or 500..900 or all), and show the newest of them.")]
StepsOfBatch = Annotated[Steps, Reworded(
    "Process only these steps of a run: 500,1000 or 500..900.")]
ModelFrom = Annotated[Text, option("--model-from PATH", SELECTION, "Read the model from another checkpoint.")]
OptimFrom = Annotated[Text, option("--optim-from PATH", SELECTION, "Read the optimizer from another checkpoint.")]
Take = Annotated[Text, option("--take TREE", SELECTION,
    "Export this tree instead of the model: ema, or its full key.")]
Merge = Annotated[Many, option("--merge DIR", SELECTION,
    "Directory of another node with files of the same save. Repeatable.")]
LikeStep = Annotated[Text, option("--like OTHER", SELECTION,
    "Rebuild a missing `.metadata` from that of another step of the same run.")]
Depth = Annotated[int, option("--depth N", SELECTION,
    "Levels of the module tree to show, not counting `model` and lists of layers.", least=1)]
ListedDtypes = Annotated[Many, option("--dtype DTYPE", TENSORS, "List only tensors of this dtype. Repeatable.")]
MinSize = Annotated[Text, option("--min-size SIZE", TENSORS,
    "List only tensors of at least this size: 100MB, 1GiB, ...")]
Where = Annotated[Text, option("--where CONDITION", TENSORS,
    "List only tensors that meet this condition: 'numel > 1e6 and ranks > 1 and name != \"*.bias\"'.")]
SortKey = Annotated[Literal["name", "size", "dtype", "order"] | None, option("--sort KEY", TENSORS,
    "Sort the list by name, size (largest first), dtype, or order (as saved).")]
Top = Annotated[Number, option("--top N", TENSORS,
    "List only the first N tensors, or the N largest without --sort.", least=1)]
WhereStatistics = Annotated[Text, option("--where CONDITION", SELECTION,
    "List tensors that meet this condition: 'nan > 0 or absmax > 1e4'.")]
Spectral = Annotated[bool, option("--spectral", SELECTION,
    "Also estimate the stable rank and largest singular value of matrices.")]

# Names ----------------------------------------------------------------------------------------------------------------

Rename = Annotated[Many, option("--rename OLD=NEW", NAMES,
    "Rename OLD to NEW; `*` captures; @FILE reads rules. Repeatable.")]
RenameInA = Annotated[Rename, Reworded("Rename OLD in A to NEW, as in convert; @FILE reads rules. Repeatable.")]
StripWrappers = Annotated[bool, option("--strip-wrappers", NAMES,
    "Remove `module.`, `_orig_mod.`, `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` from names.")]
StripPrefix = Annotated[Text, option("--strip-prefix P", NAMES, "Remove this prefix from the names of the model.")]
KeyMap = Annotated[Text, option("--map --key-map NAME", NAMES,
    "Key map for the model's parameters: a name, a .json file, or none. Default: the one that fits.")]
KeyMapToApply = Annotated[KeyMap, Reworded(
    "Apply a key map to the model and its optimizer: a name, a .json file, or none. With --like, to the model; "
    "default: the one that fits.")]
LikeRun = Annotated[Text, option("--like FROM", NAMES,
    "Give the model the names, dtypes and ranks of this checkpoint of a run.")]
ExportedNames = Annotated[Literal["released", "memory"], option("--names WHICH", NAMES,
    "Names as in released files, or as in memory in transformers.")]

# References -----------------------------------------------------------------------------------------------------------

LikeModel = Annotated[Text, option("--like FROM", REFERENCE,
    "Names, order, dtypes, files and config of this model: a directory, hf://org/name, ...")]
FillFrom = Annotated[Text, option("--fill-from FROM", REFERENCE, "Take missing tensors from this model.")]
Fill = Annotated[Many, option("--fill GLOB", REFERENCE,
    "Restrict --fill-from to matching tensors; they replace existing ones. Repeatable.")]
AgainstModel = Annotated[str, option("--against OTHER", REFERENCE,
    "A released model (a directory, a file, hf://org/name), or its config.json.")]
CompareContent = Annotated[bool, option("--content", REFERENCE,
    "Also compare samples of the values: a fine-tune is close to its base.")]
LikeReference = Annotated[str, option("--like REF", REFERENCE,
    "A released model (a directory, a file, hf://org/name), or its config.json.")]
ReferenceHeadDim = Annotated[Number, option("--head-dim N", REFERENCE,
    "Rows of an attention head. Default: from the config of REF.", least=1)]
MatchContent = Annotated[bool, option("--content", VALUES,
    "Resolve ambiguous names by samples of the values: a fine-tune is close to REF.")]

# Comparison -----------------------------------------------------------------------------------------------------------

Rtol = Annotated[Float, option("--rtol R", COMPARISON, "Relative tolerance of elements, relative to B.")]
Atol = Annotated[Float, option("--atol A", COMPARISON, "Absolute tolerance of elements.")]
Ulp = Annotated[Number, option("--ulp N", COMPARISON, "Tolerance in ULPs.", least=0)]
IgnoreDtype = Annotated[bool, option("--ignore-dtype", COMPARISON,
    "Do not count a different dtype as a difference if the values are equal.")]
Sharded = Annotated[bool, option("--sharding", COMPARISON, "Count a different sharding as a difference.")]
Against = Annotated[Text, option("--against OTHER", COMPARISON, "Compare with a checkpoint that should be equal.")]
AgainstManifest = Annotated[Text, option("--manifest FILE", COMPARISON,
    "Compare with a manifest: SHA-256 of each file and tensor.")]
WriteManifest = Annotated[Text, option("--write-manifest FILE", COMPARISON, "Write a manifest if nothing is damaged.")]
CheckValues = Annotated[bool, option("--values", COMPARISON, "Check every element: NaN, infinite, all zero, denormal.")]

# Format and layout ----------------------------------------------------------------------------------------------------

To = Annotated[Text, option("--to FORMAT", FORMAT,
    "torch, dcp, safetensors or fsdp1. Default: from the suffix of DST.", complete=completion.formats)]
ToSharded = Annotated[To, Reworded("dcp or fsdp1. Default: the format of SRC; dcp for a single file.")]
Producer = Annotated[Text, option("--producer NAME", FORMAT,
    "Write the directory layout that a framework resumes from: accelerate, torchtitan, verl, trainer or deepspeed; "
    "`same` writes the same files as SRC, a path those of another checkpoint. Replaces --to.",
    complete=completion.producers)]
Dtype = Annotated[Many, option("--dtype [PATTERN=]DTYPE", FORMAT,
    "Cast floating-point tensors: bfloat16, or 'norm*=float32' for some. Repeatable; the first match applies.",
    complete=completion.dtypes)]
DtypeStrict = Annotated[bool, option("--dtype-strict", FORMAT,
    "Also cast tensors that the model's library keeps in float32, such as router biases.")]
MaxShardSize = Annotated[Text, option("--max-shard-size SIZE", FORMAT,
    "Split into files of at most this size: 5GB, 512MiB, ...")]
MaxExportShardSize = Annotated[MaxShardSize, Reworded(
    "Split into files of at most this size: 512MiB, ... Default: 5GB.")]
ToWorld = Annotated[Number, option("--to-world N", FORMAT, "Shard the tensors for N ranks (dcp and fsdp1 only).")]
TensorClass = Annotated[Text, option("--tensor-class CLASS", FORMAT,
    "Class of sharded tensors: sharded_tensor or dtensor (fsdp1 only).")]
OptimKeys = Annotated[Text, option("--optim-keys KEYS", FORMAT,
    "Optimizer key style: fqn (parameter names), id (integers) or flat (dotted keys).")]
OptimRoot = Annotated[Text, option("--optim-root KEY", FORMAT, "Store the optimizer under this key.")]
Assets = Annotated[Text, option("--assets DIR", FORMAT,
    "Directory or Hub repository with config, tokenizer and code. Default: beside the weights.")]
Include = Annotated[Many, option("--include GLOB", FORMAT,
    "Also copy files that are not assets by name: 'docs/*.md'. Repeatable.")]
HeadDim = Annotated[Number, option("--head-dim N", FORMAT, "Size of an attention head, if no config has it.", least=2)]
ConfigStrict = Annotated[bool, option("/--no-strict", FORMAT, "Export even if tensors do not match config.json.")]
Card = Annotated[bool, option("/--no-card", FORMAT, "Write no model card.")]
ToRanks = Annotated[Number, option("--to-world N", LAYOUT, "Shard for N ranks, as FSDP does.")]
ToMesh = Annotated[Text, option("--to-mesh MESH", LAYOUT, "Shard for a mesh: shard=4,tp=2 or replicate=2,shard=4.")]
LikeSharding = Annotated[Text, option("--like OTHER", LAYOUT, "Use the sharding and ranks of another checkpoint.")]
Placements = Annotated[Many, option("--placements GLOB=DIM:N", LAYOUT,
    "Shard matching parameters over mesh dimension DIM along tensor dimension N: 'layers.*.wq.weight=tp:0' is "
    "Shard(0) over tp; @FILE reads rules. Repeatable.")]
Shard = Annotated[Many, option("--shard GLOB", LAYOUT, "Treat matching tensors as parameters: shard them. Repeatable.")]
Replicate = Annotated[Many, option("--replicate GLOB", LAYOUT,
    "Treat matching tensors as buffers: replicate them. Repeatable.")]
Rng = Annotated[str, option("--rng POLICY", LAYOUT, "RNG states of the ranks: keep, rank0 or drop.")]
Dataloader = Annotated[str, option("--dataloader POLICY", LAYOUT, "Data loader states of the ranks: keep or drop.")]

# The Hub --------------------------------------------------------------------------------------------------------------

Public = Annotated[bool, option("--public", HUB, "Make a newly created repository public. Default: private.")]
Private = Annotated[bool, option("--private", HUB, "Refuse a public repository.")]
Keep = Annotated[Many, option("--keep GLOB", HUB, "Do not remove these weights of an earlier export. Repeatable.")]
CreatePr = Annotated[bool, option("--create-pr", HUB, "Open a pull request instead of changing the branch.")]
Tag = Annotated[Text, option("--tag NAME", HUB, "Tag the commit with a name that does not exist yet.")]
CommitMessage = Annotated[Text, option("--commit-message TEXT", HUB, "Commit message.")]
Token = Annotated[Text, option("--token TOKEN", HUB,
    "Hub token. Prefer HF_TOKEN: command-line arguments are visible to other users.")]
Stage = Annotated[Text, option("--stage DIR", HUB,
    "Directory for files of DST before they are uploaded. Default: TMPDIR.")]
InStore = Annotated[str, option("--in-store POLICY", HUB,
    "Let the object store of SRC and DST copy the bytes that stay as they are: auto or never.")]
StageUploads = Annotated[Stage, Reworded(
    "Staging directory for uploads, which is kept. Default: up to three temporary files.")]
NotSecret = Annotated[Many, option("--not-secret NAME", HUB,
    "Send the value NAME although it seems to contain a key or token. Repeatable.")]
NotSecretFiles = Annotated[Many, option("--not-secret FILE", FORMAT,
    "Send FILE although it seems to contain a key or token. Repeatable.")]

# Execution ------------------------------------------------------------------------------------------------------------

Overwrite = Annotated[bool, option("--overwrite", EXECUTION,
    "Replace DST. The old one is kept until the new one is complete.")]
Resume = Annotated[bool, option("--resume", EXECUTION,
    "Continue an interrupted run: verify and keep what it copied. Keep the copies if this run is interrupted.")]
DryRun = Annotated[bool, option("--dry-run -n", EXECUTION, "Show the plan and write nothing.")]
DryRunOfRuns = Annotated[DryRun, Reworded("Show the commands and the cost, and run nothing.")]
Check = Annotated[bool, option("--check", EXECUTION, "Verify DST against SRC before committing it.")]
Manifest = Annotated[Text, option("--manifest FILE", EXECUTION,
    "Also write a manifest of DST: SHA-256 of each file and tensor.")]
NoManifest = Annotated[bool, option("--no-manifest", EXECUTION, "Omit the manifest of a DCP directory.")]
Cache = Annotated[bool, option("/--no-cache", EXECUTION, "Read all values again, and cache nothing.")]
Threads = Annotated[Number, option("--threads -j N", EXECUTION, "Number of threads that read and write.", least=1)]
MaxMemory = Annotated[Text, option("--max-memory SIZE", EXECUTION, "Limit the buffers: 2GB, 512MiB, ...")]
Jobs = Annotated[int, option("--jobs -j N", EXECUTION, "Number of checkpoints to process at once.", least=1)]
New = Annotated[bool, option("--new", EXECUTION, "Skip checkpoints whose destination exists.")]
Watch = Annotated[Float, option("--watch SECONDS", EXECUTION,
    "Follow a live run: process checkpoints as they become complete, until there is no new one for SECONDS.")]
ShardOfBatch = Annotated[Text, option("--shard I/N", EXECUTION,
    "Process share I of N, from 0 to N-1. Default: the index in a Slurm array or an indexed Kubernetes Job, else "
    "everything.")]
Engine = Annotated[Text, option("--engine ENGINE", EXECUTION,
    "bytes copies files, and is the default; mesh, under torchrun with one process per rank, loads into torch and "
    "saves by DCP.")]
KeepLast = Annotated[Number, option("--keep-last N", SELECTION,
    "Keep the N newest complete checkpoints as they are. Default with --keep-every: 1.", least=1)]
KeepEvery = Annotated[Number, option("--keep-every M", SELECTION, "Keep steps that are multiples of M.", least=1)]
DropPart = Annotated[Drop, Reworded(
    "Remove this part from the checkpoints that --keep-every keeps; without --keep-every, from all others. "
    "Repeatable.")]
Yes = Annotated[bool, option("--yes", EXECUTION,
    "Remove what your finished runs left. Default: only list it.")]
YesPrune = Annotated[Yes, Reworded("Carry it out. Default: only show the plan.")]

# Output ---------------------------------------------------------------------------------------------------------------

AsJson = Annotated[bool, option("--json", OUTPUT, "Print one JSON object, also for an error.")]
AsCsv = Annotated[bool, option("--csv", OUTPUT, "Print the list as comma-separated values, one line for each tensor.")]
StatisticsAsCsv = Annotated[bool, option("--csv", OUTPUT, "Print one line of comma-separated values for each tensor.")]
DifferencesAsCsv = Annotated[bool, option("--csv", OUTPUT,
    "Print the differences as comma-separated values, one line for each tensor.")]
SortDifference = Annotated[Literal["l2", "abs", "rel", "ulp", "cosine", "differing", "name"] | None, option(
    "--sort KEY", OUTPUT,
    "List tensors whose values differ by l2 (||B-A||/||A||, the default), abs, rel, ulp, cosine, differing, or name.")]
TopDifferences = Annotated[Number, option("--top N", OUTPUT,
    "List only the N tensors whose values differ most.", least=1)]
AsMarkdown = Annotated[bool, option("--md", OUTPUT, "Print the list as a Markdown table.")]
Html = Annotated[Text, option("--html FILE", OUTPUT, "Also write the result as an HTML page that opens offline.")]
DiffHtml = Annotated[Html, Reworded("Also write an HTML page: a report with the statistics of B minus A.")]
VerifyHtml = Annotated[Html, Reworded("Also write the findings as an HTML page.")]
ReshardHtml = Annotated[Html, Reworded("Also write the sharding before and after as an HTML page.")]
ResumeHtml = Annotated[Html, Reworded("Also write the report as an HTML page.")]
Strict = Annotated[bool, option("--strict", OUTPUT,
    "Exit with code 4 if the checkpoint is damaged. Default: only report it.")]
Each = Annotated[bool, option("--each", OUTPUT, "List each tensor, not groups.")]
SortStatistic = Annotated[Text, option("--sort STAT", OUTPUT,
    "List each tensor, the largest STAT first: rms, absmax, kurtosis, ...")]
FailOn = Annotated[Text, option("--fail-on CONDITION", OUTPUT,
    "Exit with code 1 if any tensor meets this condition: 'nan > 0'.")]
ReportFile = Annotated[str, option("--output -o FILE", OUTPUT, "The HTML file to write.")]
KeyMapFile = Annotated[Text, option("--output -o FILE", OUTPUT, "Write the key map to this file.")]
Replace = Annotated[bool, option("--overwrite", OUTPUT, "Replace FILE.")]
Quiet = Annotated[bool, option("--quiet -q", OUTPUT, "Print only bare values, and no progress.")]
Verbose = Annotated[bool, option("--verbose -v", OUTPUT, "Full output; tracebacks for internal errors.")]
Junit = Annotated[Text, option("--junit FILE", OUTPUT, "Also write JUnit XML, with one failure for each cause.")]
KeepRuns = Annotated[Text, option("--keep DIR", OUTPUT,
    "Keep the checkpoints and the output of the runs in this directory.")]
KeepFiles = Annotated[Text, option("--keep DIR", OUTPUT, "Keep the files of the runs in this directory.")]

# verify-resume audit and trial ----------------------------------------------------------------------------------------

Recipe = Annotated[Text, option("--recipe FILE", EXECUTION,
    "Build the model of this recipe, and compare its names and shapes.")]
Values = Annotated[bool | None, option("--values/--no-values", EXECUTION,
    "Check weights and moments for NaN, infinities and negative moments. Default: up to 1 GiB.")]
TrialRecipe = Annotated[str, option("--recipe FILE", TRAINING, "Python file that builds and trains a model.")]
World = Annotated[Number, option("--world N", TRAINING, "Train on N ranks. Default: 2.", least=1)]
Mesh = Annotated[Text, option("--mesh MESH", TRAINING, "Train on a mesh: shard=2,tp=2 or replicate=2,shard=2.")]
StepsBefore = Annotated[int, option("--steps N", TRAINING, "Steps to train before the save.", least=1)]
StepsAfter = Annotated[int, option("--more N", TRAINING, "Steps to train after the save.", least=1)]
Device = Annotated[Text, option("--device DEVICE", TRAINING, "cpu, cuda, xpu, ...")]
Deterministic = Annotated[bool, option("/--no-deterministic", TRAINING, "Allow nondeterministic operations in torch.")]
TrialVia = Annotated[Text, option("--via ROUTE", RESUMING,
    "Convert or reshard the save before resuming (comma-separated steps): safetensors, dcp, torch, fsdp1, reshard:N.")]
TrialToWorld = Annotated[Number, option("--to-world N", RESUMING, "Resume on N ranks.")]
TrialToMesh = Annotated[Text, option("--to-mesh MESH", RESUMING, "Resume on a mesh.")]
FirstStep = Annotated[Number, option("--first-step I", RESUMING,
    "The step to resume at, if CKPT does not contain one.", least=0)]
Gradients = Annotated[bool, option("/--no-gradients", EXECUTION,
    "Do not compare the gradients with those of one rank.")]
TimeLimit = Annotated[int, option("--time-limit SECONDS", EXECUTION,
    "Time limit for each phase and step of a rank.", least=1)]

# verify-resume run ----------------------------------------------------------------------------------------------------

Preset = Annotated[Text, option("--preset NAME", RUNS,
    "Fill in the other options for a framework, and add its flags to COMMAND unless given: trainer, "
    "accelerate, lightning, torchtitan, nanogpt or torchtune.")]
At = Annotated[Number, option("--at K", RUNS,
    "The step that B resumes from. Default: one that A saves within an epoch; 4 with a preset.", least=1)]
Until = Annotated[Number, option("--until N", RUNS,
    "The last step to compare. Default: when an epoch has ended and two steps were saved; 8 with a preset.",
    least=2)]
Stop = Annotated[Text, option("--stop HOW", RUNS,
    "How B begins: copy, from a copy of A's output when A saved step K; or B trains to step K and is stopped by "
    "sigkill, sigterm, or max-steps=FLAG, the command's own flag for its number of steps. Default: copy.")]
ResumeWith = Annotated[Text, option("--resume-with COMMAND", RUNS,
    "The command that resumes, quoted: '... --resume {checkpoint}', where ... is COMMAND; {weights} are its "
    "weights files. Default: detected in the script, else COMMAND itself.")]
RunWorld = Annotated[Number, option("--world N", RUNS, "The value of {world} in COMMAND.", least=1)]
RunToWorld = Annotated[Number, option("--to-world M", RUNS,
    "Resume B with {world} M, and compare it with a run (control) resharded by torch's DCP.", least=1)]
RunVia = Annotated[str, option("--via ROUTE", RUNS,
    "Convert B's checkpoint before it resumes (comma-separated steps): safetensors, dcp, torch, fsdp1, reshard:N.")]
RunCheckpoints = Annotated[Text, option("--checkpoints PATTERN", COMPARED,
    "The checkpoints: 'OUT/step-{step}'; without {step}, 'OUT/*', whose steps are read from their contents, or one "
    "that is rewritten; {step-1} counts from 0, and ` + ` adds a file of the newest. Default: detected in A's output.")]
Out = Annotated[str, option("--out WORD", COMPARED,
    "The word that stands for the output directory, like {out}; or the folder that COMMAND always writes to.")]
Loss = Annotated[Text, option("--loss REGEX", COMPARED,
    "The losses in the output: a regular expression with a group for the step and one for the loss. Or files: "
    "json:FILE[:KEY], csv:, text:, tensorboard:, trainer:; none. Default: lines such as `step 4: loss 2.71`.")]
Inject = Annotated[bool, option("/--no-inject", EXECUTION,
    "Leave torch's settings alone: no deterministic switches, no seeds.")]
Observe = Annotated[bool | None, option("--observe/--no-observe", EXECUTION,
    "Compare each step of each rank: batch, loss, gradient norm, lr, parameters and, with --observe, RNG states.")]
WithControls = Annotated[bool | None, option("--control/--no-control", EXECUTION,
    "Resume once more from a save of B, then repeatedly without one part of the state, and check that each of these "
    "differs. Default with --junit.")]
Cross = Annotated[Many, option("--cross EVENT", COMPARED,
    "Require this event in the compared steps, or prove nothing: epoch (its end), evaluation, learning-rate (a "
    "change) or accumulation. Repeatable.")]
SeedEnv = Annotated[Many, option("--seed-env NAME[=VALUE]", EXECUTION,
    "Set this variable to a seed, the same in all runs. Repeatable.")]
Timeout = Annotated[int, option("--timeout SECONDS", EXECUTION, "Time limit for each run.", least=1)]
MaxDisk = Annotated[Text, option("--max-disk SIZE", EXECUTION, "Limit for the checkpoints of all runs: 50GB, ...")]

# ckpttool itself ------------------------------------------------------------------------------------------------------

Version = Annotated[bool, option("--version", "", "Print the version and exit.", at_once=completion.print_version)]
InstallCompletion = Annotated[Text, option("--install-completion [SHELL]", "",
    "Install completion (bash, zsh, fish).", at_once=completion.install)]
ShowCompletion = Annotated[Text, option("--show-completion [SHELL]", "",
    "Print the completion script.", at_once=completion.show)]
