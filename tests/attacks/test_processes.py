"""What becomes of processes, signals, streams and disks: nothing is left, and one line says what happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command import refused, repro
from support.processes import ends

from engines.machine import usable_cores
from repro.cli.main import Ending, _print_ending, _sigterm_as_interrupt
from repro.files import replace_text
from repro.paths import REPO

POOL = """
import time
from pathlib import Path
from repro.runs.pool import worker_processes

def work(i):
    Path(__file__).with_name(f"working{i}").touch()
    time.sleep(600)

if __name__ == "__main__":
    with worker_processes(2) as pool:
        working = [pool.submit(work, i) for i in range(2)]
        print("started", flush=True)
        for each in working:
            each.result()
"""


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found.add(int(path.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("after_start", [False, True], ids=["while they start", "while they work"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_workers_end_with_their_parent(number, after_start, tmp_path):
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    parent = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    wanted = 3  # two workers, and the tracker of their semaphores
    while len(workers := children_of(parent.pid)) < wanted:
        time.sleep(0.01)
    while after_start and len(list(tmp_path.glob("working*"))) < 2:
        time.sleep(0.01)
    parent.send_signal(number)
    parent.wait(30)
    assert all(ends(pid, within_s=30) for pid in workers)


SPAWNING = """
import multiprocessing.util as util, os, signal, sys

if __name__ == "__main__":
    from repro.runs.pool import local_process
    from repro.runs.pool import Packing
    from repro.runs.provenance import GitState

    def interrupt(number, frame):
        print("ended", file=sys.stderr, flush=True)
        raise KeyboardInterrupt

    signal.signal(int(sys.argv[1]), interrupt)
    spawn, children = util.spawnv_passfds, []

    def spawned(path, args, fds):
        # The tracker of semaphores is one too.
        pid = spawn(path, args, fds)
        if any("spawn_main" in str(word) for word in args):
            children.append(pid)
            os.kill(os.getpid(), int(sys.argv[1]))
        return pid

    util.spawnv_passfds = spawned
    packing = Packing(git=GitState(commit=None, dirty=None), command=())
    try:
        with local_process(packing) as process:
            from support.fake_system import fake_cell
            from repro.runs.experiment import prepare
            process.submit(prepare(fake_cell(seed=0)))
            print("went on", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    # What the child has to say it says before it is gone.
    for pid in children:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_while_a_worker_starts_is_heard_once_it_has(number, tmp_path):
    """A child that had not been told what it is would say so in a traceback, after the last line of its parent."""
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    env = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"}
    done = subprocess.run(
        [sys.executable, script, str(int(number))], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "ended\n")


def call(*arguments: str, **how: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "repro", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def test_sigterm_ends_as_an_interrupt_does(tmp_path):
    results = tmp_path / "results"
    process = call("bench", "--num-prompts", "60", "--result-dir", str(results), "--json")
    # It takes the lock of a run just before it makes it.
    while not list(results.glob(".locks/*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("terminated: finished runs are kept")
    assert not list(results.glob("*.gz"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.skipif(usable_cores() < 2, reason="searches sites one after the other")
@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(signal.SIGINT, 130, "interrupted: "), (None, 1, "error: a process of this machine ended (it was killed")],
    ids=["SIGINT", "a worker is killed"],
)
def test_a_search_of_a_capacity_leaves_no_process(number, code, says):
    process = call("capacity", "--workload", "gaia", "--slo", "ttft:p95:2000", "--gpus", "64", stdout=subprocess.PIPE)
    wanted = 3  # two workers, and the tracker of their semaphores
    while len(workers := children_of(process.pid)) < wanted and process.poll() is None:
        time.sleep(0.01)
    if number is None:
        for pid in workers:
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                break
    else:
        process.send_signal(number)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (code, ""), said
    outlook, ending = said.splitlines()
    assert outlook.startswith("search: ")
    assert ending.startswith(says)
    assert all(ends(pid, within_s=30) for pid in workers)


def test_an_interrupt_while_code_is_made_ends_with_its_code(tmp_path):
    (tmp_path / "made.py").write_text(
        "import sys, repro.cli\n"
        "cli = sys.modules['repro.cli.main']\n"
        "def command(_):\n"
        "    exec('raise KeyboardInterrupt')\n"
        "cli._run_command = command\n"
        "cli.main()\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-m", "made"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.partition(":")[0]) == (130, "interrupted")


def test_streams():
    with open("/dev/full", "w") as full:
        process = call("list", stdout=full)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said.count("\n")) == (1, 1), said
        assert "No space left on device" in said
    reader, writer = os.pipe()
    os.close(reader)
    process = call("list", stdout=writer)
    os.close(writer)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.count("\n")) == (1, 1), said
    assert "closed it before all was written" in said


def test_a_help_that_nobody_gets_is_no_success(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert _print_ending(Ending(code=0, help="x" * 10_000)) == 1
        monkeypatch.undo()
    assert "No space left on device" in capsys.readouterr().err


def test_an_ascii_locale():
    env = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-m", "repro", "list"], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    """Text files of more than a few bytes no longer fit."""
    write = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        write(self, content[:5])
        raise OSError(28, os.strerror(28), str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    result = repro("bench", "--platform", "rtx4090", "--num-prompts", 2, "--result-dir", tmp_path)
    assert result.code == 1
    assert "could not be stored" in result.err.splitlines()[-1]
    assert "No space left on device" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space"):
        replace_text(tmp_path / "x.csv", "a,b\n")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_written_through_a_link_of_its_temporary_name(tmp_path, monkeypatch):
    target = tmp_path / "target"
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f".x.csv.partial-{bytes(8).hex()}").symlink_to(target)
    replace_text(tmp_path / "x.csv", "a,b\n")
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
    assert not (tmp_path / "x.csv").is_symlink()
    (tmp_path / "y").touch()
    assert (tmp_path / "x.csv").stat().st_mode == (tmp_path / "y").stat().st_mode


def test_a_missing_device_is_said_before_any_work(tmp_path, monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    from repro.families.dllm import system as system_module

    monkeypatch.setattr(system_module, "requests_of", lambda *_: pytest.fail("requests were looked at"))
    refused(repro("bench", "--device", "cuda", "--result-dir", tmp_path), "device='cuda'", "use --device cpu")
    monkeypatch.setattr(system_module, "task_of", lambda *_: pytest.fail("requests were looked at"))
    refused(
        repro("figure", "fig3", "--result-dir", tmp_path),
        "runs behind fig3 are missing (first: dllm-serve_livebench_cpu-tiny_torch",
    )


def test_weights_that_are_not_finite(tmp_path):
    from safetensors.torch import save_file
    from support.tiny_models import GQA

    GQA.write(tmp_path)
    weights = GQA.weights()
    save_file({name: tensor * float("nan") for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    result = repro(
        "generate", "--model", tmp_path, "--prompt-ids", tmp_path / "ids.json", "--gen-length", 8, "--block-length", 4
    )
    refused(result, "logits were not finite", code=1)


def test_a_second_sigterm_does_not_cut_the_ending_off():
    """``timeout`` sends one to the process, and one to its group."""
    with _sigterm_as_interrupt() as received:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM, signal.SIGTERM]
