"""The GPU suite: what it would run, how it keeps to its budget and goes on, and the whole of it small on this CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.errors import UserError
from repro.gpu_suite.jobs import Job, JobFailedError, all_jobs, expected_cell_s, scale_of
from repro.gpu_suite.suite import MARGIN, Suite
from repro.paths import REPO
from repro.systems.platforms import GB


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def job(
    name: str,
    clock: Clock,
    log: list[str],
    *,
    takes: float = 10,
    estimate: float = 10,
    kind: str | None = None,
    needs: Sequence[str] = (),
    error: Callable[[], Exception | BaseException | None] = lambda: None,
) -> Job:
    def run(limit_s: float) -> dict[str, Any]:
        log.append(name)
        clock.time += takes
        if (raised := error()) is not None:
            raise raised
        return {"note": f"{name} ran"}

    return Job(stage="stage", name=name, kind=kind or name, estimate_s=estimate, run=run, needs=tuple(needs))


def suite(jobs: Sequence[Job], root: Path, clock: Clock, platform: str = "h200") -> Suite:
    return Suite(jobs=jobs, root=root, platform=platform, command="go on", on_line=lambda _: None, now=clock)


def test_it_stops_before_a_job_that_does_not_fit_and_goes_on_there(tmp_path: Path) -> None:
    clock, log = Clock(), []  # type: ignore[var-annotated]
    jobs = [job(name, clock, log) for name in "abcd"]
    first = suite(jobs, tmp_path, clock).run(35)
    assert (log, first.left, first.failed, first.left_s) == (["a", "b", "c"], ("d",), (), 10)
    assert first.stopped == "d is expected to take 10 s and 5 s are left"
    second = suite(jobs, tmp_path, clock).run(35)
    assert (log, second.left, second.ran) == (["a", "b", "c", "d"], (), 1)
    assert suite(jobs, tmp_path, clock).run(35).stopped == "everything is done"
    assert log == ["a", "b", "c", "d"]


def test_the_budget_counts_from_the_start_of_the_call(tmp_path: Path) -> None:
    clock, log = Clock(), []  # type: ignore[var-annotated]
    began = clock()
    clock.time = 20.0
    assert suite([job("a", clock, log)], tmp_path, clock).run(25, began=began).ran == 0


def test_finished_jobs_of_the_kind_correct_the_estimate(tmp_path: Path) -> None:
    clock, log = Clock(), []  # type: ignore[var-annotated]
    jobs = [job("a", clock, log, takes=30, kind="k"), job("b", clock, log, estimate=20, kind="k"), job("c", clock, log)]
    run = suite(jobs, tmp_path, clock)
    run.run(40)
    assert log == ["a", "c"]
    assert run.expected_s(jobs[1]) == pytest.approx(20 * 3 * MARGIN)
    assert run.expected_s(jobs[2]) == pytest.approx(10 * MARGIN)


def test_a_failed_job_does_not_stop_the_others_and_is_tried_last(tmp_path: Path) -> None:
    clock, log, broken = Clock(), [], [True]  # type: ignore[var-annotated]
    failing = job("a", clock, log, error=lambda: JobFailedError("3 of 4 differ", {"cases": 4}) if broken[0] else None)
    jobs = [
        failing,
        job("b", clock, log),
        job("c", clock, log, error=lambda: RuntimeError("boom") if broken[0] else None),
    ]
    outcome = suite(jobs, tmp_path, clock).run(100)
    assert (log, outcome.failed, outcome.left) == (["a", "b", "c"], ("a", "c"), ())
    stored = json.loads((tmp_path / "a.json").read_text())
    assert (stored["ok"], stored["reason"], stored["cases"]) == (False, "3 of 4 differ", 4)
    assert "a: failed, 3 of 4 differ" in (tmp_path / "README.md").read_text()
    broken[0] = False
    jobs.append(job("d", clock, log))
    assert suite(jobs, tmp_path, clock).run(100).failed == ()
    assert log[3:] == ["d", "a", "c"]


def test_a_job_cut_off_is_expected_to_take_twice_as_long(tmp_path: Path) -> None:
    clock, log = Clock(), []  # type: ignore[var-annotated]
    with pytest.raises(KeyboardInterrupt):
        suite([job("a", clock, log, error=KeyboardInterrupt)], tmp_path, clock).run(100)
    jobs = [job("a", clock, log)]
    again = suite(jobs, tmp_path, clock)
    assert again.expected_s(jobs[0]) == 20
    refused = again.run(15)
    assert refused.ran == 0
    assert refused.stopped == "a is expected to take 20 s: it needs a --budget of that"
    assert again.run(25).left == ()


def test_a_job_too_long_for_any_call_does_not_keep_the_others(tmp_path: Path) -> None:
    clock, log = Clock(), []  # type: ignore[var-annotated]
    outcome = suite([job("a", clock, log, estimate=500), job("b", clock, log)], tmp_path, clock).run(100)
    assert (log, outcome.left) == (["b"], ("a",))


def test_a_drawing_waits_for_its_runs(tmp_path: Path) -> None:
    clock, log, broken = Clock(), [], [True]  # type: ignore[var-annotated]
    cell = job("a", clock, log, error=lambda: RuntimeError("x") if broken[0] else None)
    jobs = [cell, job("draw", clock, log, needs=("a",))]
    assert suite(jobs, tmp_path, clock).run(100).left == ("draw",)
    broken[0] = False
    suite(jobs, tmp_path, clock).run(100)
    assert suite(jobs, tmp_path, clock).run(100).left == ()
    assert log == ["a", "a", "draw"]


def test_a_lost_device_ends_the_call(tmp_path: Path) -> None:
    clock, log = Clock(), []  # type: ignore[var-annotated]
    jobs = [
        job("a", clock, log, error=lambda: RuntimeError("CUDA error: an illegal memory access")),
        job("b", clock, log),
    ]
    outcome = suite(jobs, tmp_path, clock).run(100)
    assert (log, outcome.failed, outcome.left) == (["a"], ("a",), ("b",))


def test_state_says_where_it_was_measured(tmp_path: Path) -> None:
    clock, log = Clock(), []  # type: ignore[var-annotated]
    suite([job("a", clock, log)], tmp_path, clock).run(100)
    state = json.loads((tmp_path / "suite.json").read_text())
    assert state["jobs"]["a"]["status"] == "done"
    assert {"git", "gpu", "libraries", "finished_utc"} <= state["provenance"].keys()
    assert "provenance" in json.loads((tmp_path / "a.json").read_text())
    with pytest.raises(UserError, match="holds the suite of platform h200"):
        suite([], tmp_path, clock, platform="l40s")


# ---- what would be measured on a card -----------------------------------------------------------


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    return all_jobs(scale_of("h200"), tmp_path_factory.mktemp("h200"))


def test_stages_come_in_order_of_worth(h200: list[Job]) -> None:
    stages = list(dict.fromkeys(job.stage for job in h200))
    assert stages == ["tests", "goldens", "agreement", "throughput", "profile", "growth", "benchmarks", "figures"]
    assert len({job.name for job in h200}) == len(h200)


def test_every_cell_is_measured_with_random_weights_in_minutes(h200: list[Job]) -> None:
    cells = [job for job in h200 if job.cell is not None]
    for each in cells:
        assert each.cell is not None
        assert (each.cell.executor, each.cell.platform) == ("torch", "h200")
        assert each.cell.knob_values["weights"] == "random"
        assert 10 < each.estimate_s < 120


def test_saturation_covers_systems_data_sets_and_memory(h200: list[Job]) -> None:
    found = {
        (job.cell.system, job.cell.dataset, job.cell.knob_values.get("memory_bytes"))
        for job in h200
        if job.stage == "throughput" and job.cell is not None
    }
    systems = ("dllm-serve", "fast-dllm", "sparse-dllm", "dllm-cache")
    assert found == {(s, d, m) for s in systems for d in ("osc", "burst") for m in (24 * GB, 48 * GB, None)}
    assert all(job.cell.rate is None for job in h200 if job.stage == "throughput" and job.cell is not None)
    profiled = [job.cell for job in h200 if job.stage == "profile" and job.cell is not None]
    assert {(cell.system, cell.knob_values["profile_every"]) for cell in profiled} == {("dllm-serve", 7)}


def test_drawings_come_after_their_runs(h200: list[Job]) -> None:
    place = {job.name: i for i, job in enumerate(h200)}
    drawn = [job for job in h200 if job.kind == "draw"]
    assert {job.name for job in drawn} == {
        f"draw-{n}" for n in ("growth", "fig3", "fig4", "fig5", "table4", "fig7", "fig8")
    }
    assert all(place[name] < place[job.name] for job in drawn for name in job.needs)


def test_a_smaller_card_has_no_limit_above_itself(tmp_path: Path) -> None:
    assert [limit for limit, _ in scale_of("rtx4090").limits] == [24 * GB]
    assert [limit for limit, _ in scale_of("l40s").limits] == [48 * GB, 24 * GB]


def test_estimates_grow_with_the_work(h200: list[Job]) -> None:
    growing = [
        job for job in h200 if job.stage == "growth" and job.cell is not None and "max_num_seqs" in job.cell.knob_values
    ]
    estimates = [job.estimate_s for job in growing]
    assert estimates == sorted(estimates)
    assert growing[0].cell is not None
    assert expected_cell_s(growing[0].cell) == estimates[0]


# ---- the whole of it, small ---------------------------------------------------------------------


def repro(*arguments: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "repro", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO), "REPRO_COMMIT": "abcdef0"},
    )


def test_small_suite_from_end_to_end(tmp_path: Path) -> None:
    root = tmp_path / "suite"
    command = ("gpu-suite", "--platform", "cpu-tiny", "--result-dir", str(root), "--budget", "300", "--json")
    done = repro(*command)
    outcome = json.loads(done.stdout)
    # A busy machine submits requests late, and the run says so and is INVALID: no fault of the suite.
    late = [line for line in done.stderr.splitlines() if ": failed in" in line and "ms late by the harness" in line]
    assert len(outcome["failed"]) == len(late), done.stderr[-3000:]
    assert (done.returncode, outcome["left"]) == (1 if late else 0, [])
    goldens = json.loads((root / "goldens.json").read_text())
    assert goldens["passed"] == goldens["cases"] == 18
    agreement = json.loads((root / "agreement-tiny.json").read_text())
    assert 0 < agreement["share"] <= 1
    assert agreement["n"] == 2 * 64
    assert "does not exist" in json.loads((root / "benchmark-nosuch.json").read_text())["note"]
    assert (root / "figures" / "table4-cpu-tiny.csv").is_file()
    summary = (root / "README.md").read_text()
    assert "| osc | all | dllm-serve |" in summary
    assert "Left: 0 jobs" in summary
    assert json.loads(repro(*command).stdout)["ran"] == 0 or late


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["table", "json"])
def test_dry_run_lists_everything_anywhere_and_leaves_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = repro("gpu-suite", "--platform", "cpu-tiny", "--dry-run", "--result-dir", str(tmp_path / "none"), *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "none").exists()
    if arguments:
        jobs = json.loads(done.stdout)["jobs"]
        assert {each["status"] for each in jobs} == {"new"}
        assert "goldens" in {each["name"] for each in jobs}
    else:
        assert "goldens" in done.stdout


def test_without_a_card_it_says_what_is_missing(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    done = repro("gpu-suite", "--result-dir", str(tmp_path / "none"))
    assert done.returncode == 0
    assert "not run, torch sees no CUDA device" in done.stdout
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--budget", "0"), "budget=0 must be a positive number"),
        (("--platform", "cpu-tiny", "--stage", "nosuch", "--dry-run"), "stage='nosuch' is unknown: use one of goldens"),
        (("--platform", "nosuch"), "platform='nosuch' is unknown"),
    ],
)
def test_refusals(arguments: tuple[str, ...], says: str) -> None:
    done = repro("gpu-suite", *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_one_stage_alone(tmp_path: Path) -> None:
    done = repro("gpu-suite", "--platform", "cpu-tiny", "--stage", "agreement", "--result-dir", str(tmp_path), "--json")
    assert json.loads(done.stdout)["ran"] == 1, done.stderr
