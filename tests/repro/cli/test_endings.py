"""What a command's last line says, in words of nobody's library."""

import errno
import json
import resource
import subprocess
import sys

import pytest
import torch
from support.command import refused, repro
from support.tables import data_beside

from engines.errors import RunError, UserError
from repro.cli.main import ending_of

CASES = data_beside(__file__, "cases")


def raised(make: object) -> Exception:
    try:
        make()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("kind", [UserError, RunError, ValueError])
def test_what_a_library_says_is_said_plainly(kind):
    number = raised(lambda: int("9" * 5000))
    line = ending_of(kind(f"f.json: {number}")).line
    assert line is not None
    assert "f.json: a number has too many digits" in line
    text = UnicodeDecodeError("utf-8-sig", b"\xff", 0, 1, "invalid start byte")
    for said in (ending_of(text).line, ending_of(kind(f"f.json: {text}")).line):
        assert said is not None
        assert "utf-8-sig" not in said
        assert "UTF-8" in said


def test_measured_runs_are_not_promised_alone():
    """One of a comparison that was interrupted is made again, with the others."""
    line = ending_of(KeyboardInterrupt()).line
    assert line == (
        "interrupted: finished runs are kept, measured ones where all of their comparison is finished; the same command "
        "continues"
    )


def test_a_fault_of_a_module_of_the_users_own_is_not_this_programs(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text("def fails():\n    raise GeneratorExit('no')\n")
    own: dict[str, object] = {"__name__": "mine"}
    exec(compile(source.read_text(), str(source), "exec"), own)
    try:
        own["fails"]()
    except GeneratorExit as error:
        line = ending_of(error).line
    assert line == f"error: line 2 of {source} fails (GeneratorExit: no): correct it"
    for ours in (lambda: ending_of(None).line, lambda: json.loads("{")):
        assert "a fault of this program" in str(ending_of(raised(ours)).line)


UNGUARDED = """
import repro
from repro.runs.cell import Cell
cells = [
    Cell(system="dllm-serve", dataset="osc", platform="rtx4090", executor="roofline", rate=0.5, seed=seed,
         knobs=(("num_prompts", 2),))
    for seed in range(4)
]
print(len(repro.sweep(cells, result_dir="runs", jobs=2)))
"""


def test_a_script_that_sweeps_unguarded_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == (
        "engines.errors.RunError: a process of this machine ended before its first run (it was killed, or ran the script again that "
        'had started it: put what sweeps under if __name__ == "__main__":, or give jobs=1): nothing is left to make the other runs, '
        "run the command again"
    )
    assert len(lines) < 30, "the stack of the one error"


def chained(first: Exception, last: Exception) -> Exception:
    def fails() -> None:
        try:
            raise first
        except Exception:
            raise last  # noqa: B904 - as a library that does not say from what

    return raised(fails)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object", name="torch._C"),
        RuntimeError("could not create a primitive"),
        RuntimeError("could not execute a primitive"),
        RuntimeError("could not create a memory object"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("unable to mmap 2900576 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        chained(MemoryError(), AttributeError("partially initialized module 'torch' has no attribute 'float32'")),
    ],
    ids=lambda error: str(error)[:30],
)
def test_a_lack_of_memory_is_said_as_that_and_is_no_fault_of_the_input(error):
    ending = ending_of(error)
    assert ending.code == 1
    assert "out of memory" in str(ending.line)
    assert "pip install" not in str(ending.line)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libgomp.so.1: cannot allocate memory in static TLS block", name="torch._C"),
        ImportError("No module named 'lm_eval'", name="lm_eval"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory cells"),
        UserError("memory_limit=1 is out of memory's range"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_what_is_no_lack_of_memory_is_not_said_to_be_one(error):
    assert "ask for less" not in str(ending_of(error).line)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space that is heeded")
def test_a_command_without_room_for_its_libraries_says_so():
    """300 MB of address space hold Python, and torch does not fit."""
    done = subprocess.run(
        [sys.executable, "-m", "repro", "generate", "--prompt", "hi"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 * 10**8, 3 * 10**8)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "out of memory" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("line", "gone"), CASES["imports of what is gone"])
def test_a_name_of_ours_that_is_gone_is_said_of_the_plug_in(line, gone, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "outdated", raising=False)
    (tmp_path / "outdated.py").write_text(f"import os\n{line}\n")
    told = refused(repro("bench", "--system", "outdated:Mine", "--dry-run"), "outdated.py", gone, "line 2")
    assert "pip install" not in told


@pytest.mark.parametrize("called", ["evaluate('mini-gsm', {})", "main()"])
def test_without_lm_eval_one_sentence_names_the_extra(called):
    program = f"""import sys; sys.modules["lm_eval"] = None; sys.argv[1:] = ["run", "--tasks", "mini_gsm"]
from repro.lm_eval.run import evaluate, main
{called}"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert done.returncode == (2 if called == "main()" else 1)
    assert last.startswith("error: ") == (called == "main()")
    assert "pip install 'dllm-serve-repro[eval]'" in last


@pytest.mark.parametrize("text", ["none\0.png", "half\udc80.png"])
def test_an_argument_that_is_no_text_is_refused(text):
    refused(repro("bench", "--plot", text), "argument ", "is not UTF-8 text")
