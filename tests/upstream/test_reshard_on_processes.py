"""`ckpttool reshard` on several processes: the result of one process, and one message when something goes wrong. Those
that torchrun itself starts import torch each, so most are forked."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from support import warm_python
from support.paths import ROOT
from support.torchrun import forked_launcher
from support.upstream_readers import path_of

import ckpttool

SOURCE = Path(path_of("dcp/fsdp2_w4"))
SECONDS = 300  # for importing torch in every process, on a machine with other things to do
# The three ways in which people start it.
WAYS = {
    "from a checkout": ["ckpttool"],
    "as a module": ["-m", "ckpttool"],
    "the program": ["--no-python", str(Path(sys.executable).with_name("ckpttool"))],
}
PROGRAM = str(ROOT / "ckpttool")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def start(processes: int, *words: object, way: str = "", **environment: str) -> subprocess.Popen[str]:
    command = (
        [*TORCHRUN, "--nproc-per-node", str(processes), *WAYS[way]]
        if way
        else [*forked_launcher(), str(processes), PROGRAM]
    )
    command += map(str, words)
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(running: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """The exit code, stdout, and what we say on stderr: all that torchrun says is longer, or indented."""
    try:
        out, err = running.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        running.terminate()
        out, err = running.communicate()
        raise AssertionError(f"it hangs:\n{out}\n{err}") from None
    said = [line for line in err.splitlines() if line.startswith(("error: ", "hint: ", "bug: ", "terminated"))]
    return running.returncode, out, said


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.iterdir()):
        yield path.name, path.read_bytes()


@pytest.mark.parametrize(
    ("way", "processes"),
    [
        ("from a checkout", 2),
        pytest.param("as a module", 4, marks=pytest.mark.long),
        pytest.param("the program", 3, marks=pytest.mark.long),
    ],
)
def test_the_result_is_that_of_one_process(tmp_path: Path, way: str, processes: int) -> None:
    flags = ["--to-mesh", "replicate=2,shard=3"]
    code, out, said = ended(start(processes, "reshard", SOURCE, tmp_path / "out", *flags, way=way))
    assert (code, said) == (0, [])
    assert out.startswith("wrote ") and out.count("wrote ") == 1 and f"{processes} processes" in out
    ckpttool.reshard(SOURCE, tmp_path / "alone", to_mesh="replicate=2,shard=3")
    assert list(files(tmp_path / "out")) == list(files(tmp_path / "alone"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere rank 0 does all of it")
def test_a_conversion_is_that_of_one_process(tmp_path: Path) -> None:
    words = ["convert", SOURCE, tmp_path / "out", "--to", "safetensors"]
    for _ in range(2):
        code, out, said = ended(start(2, *words, "--overwrite"))
        assert (code, said) == (0, []) and out.count("wrote ") == 1 and "2 of torchrun" in out
        assert left(tmp_path) == ["out"]
    ckpttool.convert(SOURCE, tmp_path / "alone", to="safetensors")
    assert list(files(tmp_path / "out")) == list(files(tmp_path / "alone"))
    code, _, said = ended(start(2, *words))
    assert code and said[0] == f"error: `{tmp_path / 'out'}` exists" and len(said) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what the parent of a process is")
def test_what_a_rank_calls_is_a_command_of_its_own(tmp_path: Path) -> None:
    """A script may call a command on one rank: nobody else takes part, and it is not silent."""
    script = tmp_path / "train.py"
    command = [sys.executable, PROGRAM, "convert", str(SOURCE), str(tmp_path / "out.pt")]
    script.write_text(
        f"import os, subprocess\nif os.environ['RANK'] == '1':\n    subprocess.run({command}, check=True)\n"
    )
    # The ranks of torchrun have their variables from the start; forked ones do not.
    command = [*TORCHRUN, "--nproc-per-node", "2", str(script)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    code, out, said = ended(running)
    assert (code, said) == (0, []) and out.startswith("wrote ") and (tmp_path / "out.pt").is_file()


@pytest.mark.long
def test_processes_that_copy_bytes_need_no_torch(tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "torch.py"
    absent.parent.mkdir()
    absent.write_text("raise ImportError('there is no torch')\n")
    WAYS["without torch"] = ["--no-python", "env", f"PYTHONPATH={absent.parent}", sys.executable, "-m", "ckpttool"]
    code, out, said = ended(start(2, "reshard", SOURCE, tmp_path / "out", "--to-world", 3, way="without torch"))
    assert (code, said) == (0, []) and "2 processes" in out
    ckpttool.reshard(SOURCE, tmp_path / "alone", to_world=3)
    assert list(files(tmp_path / "out")) == list(files(tmp_path / "alone"))


def test_one_process_speaks_of_what_all_find_wrong(tmp_path: Path) -> None:
    code, out, said = ended(start(2, "reshard", SOURCE, tmp_path / "out", "--to-mesh", "pp=2"))
    assert code and not out
    assert said[0] == "error: `--to-mesh pp=2`: there is no mesh dimension `pp`" and len(said) == 2
    assert left(tmp_path) == []


@pytest.mark.long
def test_one_process_speaks_of_a_flag_that_is_none(tmp_path: Path) -> None:
    code, _, said = ended(start(3, "reshard", SOURCE, tmp_path / "out", "--to-wrold", "2"))
    assert code
    assert said == ["error: `ckpttool reshard` has no option `--to-wrold`", "hint: did you mean `--to-world`?"]


def test_rank_0_says_what_another_rank_ran_into(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    break_a_bit(source, "model.embed.weight", "__3_0.distcp")
    code, out, said = ended(start(2, "reshard", source, tmp_path / "out", "--to-world", "4"))
    assert code and not out
    assert len([line for line in said if line.startswith("error: ")]) == 1 and "CRC" in said[0]
    assert left(tmp_path) == ["source"]


def break_a_bit(folder: Path, tensor: str, file: str) -> None:
    """In the elements that one file has of a tensor: their CRC is another one then."""
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    [info] = [at for index, at in stored.items() if index.fqn == tensor and at.relative_path == file]
    data = bytearray((folder / file).read_bytes())
    item = bytes(data[info.offset : info.offset + info.length])
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        elements = archive.read("archive/data/0")
    data[info.offset + item.index(elements)] ^= 1
    (folder / file).write_bytes(data)


# What a process does in the place of `ckpttool`, to be the one that fails.
FAILING = """
import os, signal, sys
from ckpttool.transfer import processes
from ckpttool.__main__ import main
from ckpttool.errors import StorageError
how, rank = sys.argv.pop(1), os.environ["RANK"]
fill = processes.transfer
def failing(*arguments, **options):
    if how == "dies":
        processes._LEAVE = 0.5  # nobody reads what rank 0 would say
    if rank == os.environ["FAILING"]:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise StorageError("the disk of this node is full", hint="make room")
        if how == "is wrong":
            raise ValueError("a mistake of ours")
    return fill(*arguments, **options)
processes.transfer = failing
main()
"""


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("dies", []),
        pytest.param("raises", ["error: the disk of this node is full", "hint: make room"], marks=pytest.mark.long),
        pytest.param("is wrong", ["bug: "], marks=pytest.mark.long),
    ],
)
def test_a_rank_that_fails_takes_all_with_it(tmp_path: Path, how: str, expected: list[str], rank: int) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    out = tmp_path / "there" / "out"
    launcher = forked_launcher() if (how, rank) == ("dies", 1) else [*TORCHRUN, "--nproc-per-node"]
    command = [*launcher, 2, script, how, "reshard", SOURCE, out, "--to-world", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAILING": str(rank)}
    running = subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    code, printed, said = ended(running)
    assert code and not printed
    assert not out.exists()
    if how == "dies" and rank:
        assert said == ["terminated, nothing was written"]
    elif how == "dies":
        assert said == []  # who would have spoken is dead; torchrun says so
    else:
        assert len([line for line in said if not line.startswith("hint")]) == 1
        assert said[0].startswith(expected[0])
    if not (how == "dies" and rank == 0):
        assert not out.parent.exists()


def started_otherwise(tmp_path: Path, words: list[object], of_rank_1: list[object]) -> tuple[int, str, list[str]]:
    script = tmp_path / "otherwise.py"
    script.write_text(
        "import json, os, sys\nfrom ckpttool.__main__ import main\n"
        "sys.argv[1:] = json.loads(sys.argv[1])[os.environ['RANK'] == '1']\nmain()\n"
    )
    both = json.dumps([[*map(str, words)], [*map(str, of_rank_1)]])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [*forked_launcher(), "2", str(script), both]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return ended(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))


def test_ranks_with_other_arguments_or_another_source_do_nothing(tmp_path: Path) -> None:
    command, other = ["reshard", SOURCE, tmp_path / "out", "--to-world"], tmp_path / "other"
    code, out, said = started_otherwise(tmp_path, [*command, 2], [*command, 3])
    assert code and not out
    assert said == [
        "error: rank 1 was started with `--to-world 3`, and rank 0 with `--to-world 2`",
        "hint: start all ranks with the same arguments",
    ]
    shutil.copytree(SOURCE, other)
    (other / "__3_0.distcp").write_bytes((other / "__3_0.distcp").read_bytes()[:-1] + b"x")
    code, out, said = started_otherwise(tmp_path, [*command, 2], ["reshard", other, *command[2:], 2])
    assert code and not out
    assert said[0].startswith("error: rank 1 sees another checkpoint at `") and said[0].endswith(
        "`__3_0.distcp` differs"
    )
    assert left(tmp_path) == ["other", "otherwise.py"]


DYING = """
import os, signal
from ckpttool.transfer import processes
from ckpttool.__main__ import main
processes._BEAT, processes._DEAD_AFTER, processes._LEAVE = 0.25, 2.0, 0.5
imported = processes._SharedWork.exchange
def dying(self, name, value):
    if os.environ["RANK"] == "1" and name == "imported":
        os.kill(os.getpid(), signal.SIGKILL)
    return imported(self, name, value)
processes._SharedWork.exchange = dying
main()
"""


def test_a_rank_that_dies_before_the_group_is_made_is_missed(tmp_path: Path) -> None:
    """On another node no torchrun of this one sees it, and a collective would wait for it for half an hour."""
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [*warm_python.python(), str(script), "reshard", str(SOURCE), str(tmp_path / "out"), "--to-world", "2"]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, "--engine", "mesh"], env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    code, out, said = ended(ranks[0])
    ranks[1].communicate(timeout=SECONDS)
    assert (code, out, said[0]) == (7, "", "error: no heartbeat from rank 1 for 2 s")
    assert left(tmp_path) == ["dying.py"]


@pytest.mark.long
def test_a_signal_to_torchrun_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time\nfrom ckpttool.transfer import processes\nfrom ckpttool.__main__ import main\n"
                      "processes.transfer = lambda *arguments, **options: time.sleep(600)\nmain()\n")  # fmt: skip
    out = tmp_path / "there" / "out"
    command = [*TORCHRUN, "--nproc-per-node", "2", script, "reshard", SOURCE, out, "--to-world", "2"]
    running = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and not list(tmp_path.glob("there/.out.partial-*/new/*/__*")):
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    code, _, said = ended(running)
    assert code
    assert said == ["terminated, nothing was written"]
    assert not out.parent.exists()


EARLY = """
import os, signal, sys
class Signals:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.linalg" and "torch" in sys.modules:
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Signals())
from ckpttool.__main__ import main
main()
"""


def test_a_signal_while_torch_is_imported_is_not_lost(tmp_path: Path) -> None:
    """torch takes an error in what it imports itself for a machine without numpy, and goes on."""
    script = tmp_path / "early.py"
    script.write_text(EARLY)
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(script), "reshard", str(SOURCE), str(tmp_path / "out"), "--to-world", "2"],
        env={**os.environ, **ranks}, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "terminated, nothing was written\n")
