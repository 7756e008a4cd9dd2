"""What a command's last line says, in words of nobody's library."""

import json
import subprocess
import sys

import pytest

from engines.errors import RunError, UserError
from repro.cli.endings import ending_of


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
        "engines.errors.UserError: the script was run again by a process that its sweep had started: put what sweeps under "
        'if __name__ == "__main__":, or give jobs=1'
    )
    assert len(lines) < 30, "the stack of the one error"
