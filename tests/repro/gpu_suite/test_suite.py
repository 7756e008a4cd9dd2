"""How the GPU suite keeps to its budget, goes on where it stopped, and loses nothing when it is ended anywhere."""

import json
import signal
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.cells import a_cell
from support.fake_system import NAME, deployed, fake_cell
from support.forks import forks
from support.stored_runs import contents
from support.suite_cases import AT, NUM_JOBS, PLACES, make_jobs, make_suite, run_ended, run_killed
from support.tables import data_beside

from engines.errors import UserError
from repro.gpu_suite.suite import ARCHIVE, MARGIN, README, STATE, Job, Suite, write_summary
from repro.runs.experiment import prepare
from repro.runs.record import RunRecord
from repro.runs.store import SUFFIX, Store

CASES = data_beside(__file__, "cases")

OTHER = NAME.replace("FAKE", "OTHER")


@dataclass
class Clock:
    time: float = 0.0
    log: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        return self.time

    def job(
        self,
        name: str,
        *,
        takes: float = 10,
        estimate: float = 10,
        system: str = NAME,
        error: Callable[[], BaseException | None] = lambda: None,
        after: Callable[[RunRecord], RunRecord] | None = None,
    ) -> Job:
        """Its run moves the clock, then raises or serves."""

        def before() -> None:
            self.log.append(name)
            self.time += takes
            if (raised := error()) is not None:
                raise raised

        cell = fake_cell(seed=ord(name), system=system, executor="torch")
        experiment = deployed(prepare(cell), before=before, after=after)
        return Job(stage="stage", experiment=experiment, estimate_s=estimate)

    def suite(self, jobs: Sequence[Job], root: Path, **more: Any) -> Suite:
        values = {
            "platform": "h200",
            "command": "go on",
            "on_line": lambda _: None,
            "on_done": write_summary,
            "git": AT,
            **more,
        }
        return Suite(jobs=jobs, root=root, now=self, **values)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def state_of(root: Path, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / STATE).read_text())["jobs"][job.name]
    return found


# ---- order, budget, estimates -------------------------------------------------------------------


def test_what_does_not_fit_is_left_for_the_next_call(clock, tmp_path):
    jobs = [clock.job(name) for name in "abcd"]
    first = clock.suite(jobs, tmp_path).run(35)
    # Those of its kind have taken as long as estimated.
    assert (clock.log, first.left, first.failed) == (["a", "b", "c"], (jobs[3].name,), ())
    assert first.left_s == pytest.approx(10 * MARGIN)
    assert first.stopped == f"{jobs[3].name} is expected to take 12 s and 5 s are left"
    second = clock.suite(jobs, tmp_path).run(35)
    assert (clock.log, second.left, second.ran) == (["a", "b", "c", "d"], (), 1)
    third = clock.suite(jobs, tmp_path).run(35)
    assert (third.stopped, third.ran) == ("everything is done", 0)
    assert clock.log == ["a", "b", "c", "d"]


def test_a_job_that_does_not_fit_is_skipped_and_those_behind_it_are_not(clock, tmp_path):
    jobs = [clock.job("a", estimate=500), clock.job("b"), clock.job("c", estimate=400), clock.job("d")]
    outcome = clock.suite(jobs, tmp_path).run(100)
    assert (clock.log, outcome.left) == (["b", "d"], (jobs[0].name, jobs[2].name))
    assert outcome.stopped == f"{jobs[0].name} is expected to take 500 s and 100 s are left, and 1 more"
    assert outcome.left_s == pytest.approx(900 * MARGIN)


def test_the_budget_counts_from_the_start_of_the_call(clock, tmp_path):
    began = clock()
    clock.time = 20.0
    assert clock.suite([clock.job("a")], tmp_path).run(25, began=began).ran == 0
    assert clock.suite([clock.job("a")], tmp_path).run(25).ran == 1


def test_finished_jobs_of_the_kind_correct_the_estimate(clock, tmp_path):
    slow, alike = clock.job("a", takes=30), clock.job("b", estimate=20)
    other, waits = clock.job("c", system=OTHER), clock.job("d", system=OTHER)
    suite = clock.suite([slow, alike, other, waits], tmp_path)
    assert [suite.expected_s(job) for job in suite.jobs] == [10, 20, 10, 10]
    suite.run(40)
    assert clock.log == ["a", "c"]
    assert suite.expected_s(alike) == pytest.approx(20 * 3 * MARGIN)
    assert suite.expected_s(waits) == pytest.approx(10 * MARGIN)
    # As far off as the worst of them, and known to the next call.
    suite.run(1000)
    again = clock.suite([slow, alike, other, waits, later := clock.job("e")], tmp_path)
    assert again.expected_s(later) == pytest.approx(10 * 3 * MARGIN)


def test_a_job_says_what_it_took(clock, tmp_path):
    job = clock.job("a", takes=12.345)
    clock.suite([job], tmp_path).run(100)
    found = state_of(tmp_path, job)
    assert {name: found[name] for name in ("stage", "status", "attempts", "estimate_s", "elapsed_s")} == {
        "stage": "stage",
        "status": "done",
        "attempts": 0,
        "estimate_s": 10,
        "elapsed_s": 12.35,
    }
    assert found["note"].endswith(" tok/s")
    assert found["finished_utc"].endswith("Z")


# ---- failures -----------------------------------------------------------------------------------


def test_a_failed_job_does_not_stop_the_others_and_comes_last_next_time(clock, tmp_path):
    broken = [True]
    jobs = [
        clock.job("a", error=lambda: UserError("3 of 4 differ") if broken[0] else None),
        clock.job("b"),
        clock.job("c", error=lambda: RuntimeError("boom\nat length") if broken[0] else None),
    ]
    outcome = clock.suite(jobs, tmp_path).run(1000)
    assert (clock.log, outcome.left) == (["a", "b", "c"], ())
    assert outcome.failed == (jobs[0].name, jobs[2].name)
    assert outcome.stopped == "every job was tried"
    assert state_of(tmp_path, jobs[0])["note"] == "3 of 4 differ"
    assert state_of(tmp_path, jobs[2])["note"] == "RuntimeError: boom at length"
    page = (tmp_path / README).read_text()
    assert "- stage: failed, 3 of 4 differ" in page
    assert "| stage | 1 | 2 | 0 | 30 |" in page
    broken[0] = False
    jobs.append(clock.job("d"))
    assert clock.suite(jobs, tmp_path).run(1000).failed == ()
    assert clock.log[3:] == ["d", "a", "c"]
    assert state_of(tmp_path, jobs[0])["status"] == "done"


def test_a_run_that_may_not_be_used_has_failed_and_is_kept(clock, tmp_path):
    job = clock.job("a", after=lambda record: record.with_columns("requests", request_id=[0] * 30))
    outcome = clock.suite([job], tmp_path).run(100)
    assert outcome.failed == (job.name,)
    assert state_of(tmp_path, job)["note"].startswith("29 request ids are repeated")
    again = clock.suite([job, clock.job("b")], tmp_path)
    assert not again.stored(job).validity.valid
    assert again.run(100).ran == 2
    assert clock.log == ["a", "b", "a"]


def test_a_lost_device_ends_the_call(clock, tmp_path):
    jobs = [clock.job("a", error=lambda: RuntimeError("CUDA error: an illegal memory access")), clock.job("b")]
    outcome = clock.suite(jobs, tmp_path).run(100)
    assert (clock.log, outcome.failed, outcome.left) == (["a"], (jobs[0].name,), (jobs[1].name,))
    assert "the same command goes on in a new one" in outcome.stopped


@pytest.mark.parametrize(("name", "goes_on"), [("TOLD", False), ("TOLD_APART", True)])
def test_a_device_lost_in_another_process_is_there_in_this_one(clock, tmp_path, name, goes_on):
    cell = a_cell(
        f"support.fake_checks:{name}", dataset="none", finds="CUDA error: an illegal memory access, which", fails=True
    )
    jobs = [Job(stage="checks", experiment=prepare(cell), estimate_s=1), clock.job("a")]
    outcome = clock.suite(jobs, tmp_path).run(100)
    assert outcome.failed == (jobs[0].name,)
    assert (clock.log == ["a"]) == goes_on


def test_a_job_over_its_time_is_stopped_and_does_not_lose_the_call(clock, tmp_path):
    slow = [40.0]
    first, endless, other = clock.job("a"), clock.job("b"), clock.job("c")
    endless = replace(
        endless, experiment=deployed(endless.experiment, before=lambda: setattr(clock, "time", clock.time + slow[0]))
    )
    outcome = clock.suite([first, endless, other], tmp_path, export=tmp_path / "export").run(45)
    assert (outcome.ran, outcome.failed, outcome.left) == (2, (endless.name,), (other.name,))
    assert state_of(tmp_path, endless)["note"] == "OverTimeError: not over after 35 s, with 1 of 30 requests"
    assert outcome.stopped == f"{other.name} is expected to take 12 s and 0 s are left"
    assert stored_in(tmp_path / "export" / ARCHIVE, tmp_path.name) == {first.name}
    # It comes back last, with twice the time.
    slow[0] = 5.0
    suite = clock.suite([first, endless, other], tmp_path)
    assert suite.expected_s(endless) == pytest.approx(2 * 10 * MARGIN)
    assert suite.run(100).left == ()
    assert clock.log == ["a", "c"]
    assert state_of(tmp_path, endless)["attempts"] == 0


def test_a_check_is_given_the_time_that_is_left(clock, tmp_path):
    cell = a_cell("support.fake_checks:TOLD", dataset="none")
    jobs = [clock.job("a"), Job(stage="checks", experiment=prepare(cell), estimate_s=20)]
    suite = clock.suite(jobs, tmp_path)
    assert suite.run(45).ran == 2
    run = suite.stored(jobs[1])
    assert run is not None
    assert run.facts["limit_s"] == 35
    assert state_of(tmp_path, jobs[1])["note"] == "nothing"


# ---- state --------------------------------------------------------------------------------------


def test_a_job_cut_off_is_expected_to_take_twice_as_long(clock, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        clock.suite([clock.job("a", error=KeyboardInterrupt)], tmp_path).run(100)
    job = clock.job("a")
    assert (state_of(tmp_path, job)["status"], state_of(tmp_path, job)["attempts"]) == ("started", 1)
    again = clock.suite([job], tmp_path)
    assert again.expected_s(job) == 20
    refused = again.run(15)
    assert (refused.ran, refused.left) == (0, (job.name,))
    assert refused.stopped == f"{job.name} is expected to take 20 s and 15 s are left"
    assert again.run(25).left == ()


def test_a_folder_holds_one_platform(clock, tmp_path):
    clock.suite([clock.job("a")], tmp_path).run(100)
    with pytest.raises(UserError, match="holds the suite of platform h200: give another folder"):
        clock.suite([], tmp_path, platform="l40s")


@pytest.mark.parametrize("damage", [*CASES["states"], "[" * 100_000], ids=lambda text: text[:80])
def test_state_that_cannot_be_read_is_refused(clock, tmp_path, damage):
    (tmp_path / STATE).write_text(damage)
    with pytest.raises(UserError, match=r"suite\.json cannot be read .*: delete it, stored runs are kept"):
        clock.suite([], tmp_path)


def test_stored_runs_say_what_is_done_and_state_does_not(clock, tmp_path):
    jobs = [clock.job(name) for name in "ab"]
    clock.suite(jobs, tmp_path).run(100)
    (tmp_path / STATE).unlink()
    assert clock.suite(jobs, tmp_path).run(100).stopped == "everything is done"
    Store(tmp_path / "runs").file(jobs[0].experiment.cell).write_bytes(b"")
    assert clock.suite(jobs, tmp_path).run(100).ran == 1
    assert clock.log == ["a", "b", "a"]


# ---- ended anywhere -----------------------------------------------------------------------------


def stored_in(archive: Path, root: str) -> set[str]:
    """Names of the runs in it; the archive is read to its end."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile():
                tar.extractfile(member).read()
        found = {parts[2] for name in tar.getnames() if (parts := Path(name).parts)[:2] == (root, "runs") and parts[2:]}
        return {name.removesuffix(SUFFIX) for name in found}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("whole")
    assert make_suite(make_jobs(), root).run(1000.0).ran == NUM_JOBS
    return contents(root / "suite" / "runs")


def interrupt(root: Path, at: int, place: str) -> None:
    # A shell's background job is started with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_ended(root, at, place, partial(signal.raise_signal, signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)


def kill(root: Path, at: int, place: str) -> None:
    killed = forks().Process(target=run_killed, args=(root, at, place))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL


ENDS = [
    (at, place, end)
    for at in range(NUM_JOBS)
    for n, place in enumerate(PLACES)
    # Both ends at the first job; at later ones in turn.
    for end in ((interrupt, kill) if at == 0 else ((interrupt, kill)[(at + n) % 2],))
]


@pytest.mark.parametrize(("at", "place", "end"), ENDS)
def test_ended_at_any_job_it_loses_nothing_and_goes_on(tmp_path, expected, at, place, end):
    end(tmp_path, at, place)
    jobs = make_jobs()
    done = jobs[:at] if place == "run" else jobs[: at + 1]
    runs = Store(tmp_path / "suite" / "runs")
    assert [runs.find(job.experiment).run is not None for job in jobs] == [job in done for job in jobs]
    stored = contents(runs.root)
    assert stored.items() <= expected.items()

    # The archive is that of the job before, and whole.
    archive = tmp_path / "export" / ARCHIVE
    assert [path for path in archive.parent.iterdir() if not path.name.startswith(".")] == [archive]
    assert stored_in(archive, "suite") == {job.name for job in jobs[:at]}
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "copy")
    copy = Store(tmp_path / "copy" / "suite" / "runs")
    assert all(copy.find(job.experiment).run is not None for job in jobs[:at])
    assert contents(copy.root).items() <= stored.items()
    state = json.loads((tmp_path / "copy" / "suite" / STATE).read_text())["jobs"]
    assert [state[job.name]["status"] for job in jobs] == ["done"] * at + ["new"] * (NUM_JOBS - at)
    assert f"Left: {NUM_JOBS - at} jobs" in (tmp_path / "copy" / "suite" / README).read_text()

    # The copy goes on just as well as the folder.
    for root in (tmp_path, tmp_path / "copy"):
        suite = make_suite(jobs, root)
        left = [job for job in jobs if suite.stored(job) is None]
        outcome = suite.run(1000.0)
        assert (outcome.ran, outcome.failed, outcome.left) == (len(left), (), ())
        assert contents(root / "suite" / "runs") == expected
        assert stored_in(root / "export" / ARCHIVE, "suite") == {job.name for job in jobs}
        assert make_suite(jobs, root).run(1000.0).stopped == "everything is done"


def test_only_the_stages_asked_for_are_run_and_the_others_are_known(clock, tmp_path):
    jobs = [clock.job("a"), replace(clock.job("b"), stage="other")]
    suite = clock.suite(jobs, tmp_path, stages=frozenset({"other"}))
    outcome = suite.run(100)
    assert (clock.log, outcome.left, outcome.stopped) == (["b"], (), "everything is done")
    page = (tmp_path / README).read_text()
    assert "| stage | 0 | 0 | 1 | 0 |" in page
    assert "Left: 0 jobs" in page
    assert clock.suite(jobs, tmp_path).run(100).ran == 1


def test_the_archive_leaves_out_what_is_half_written(tmp_path):
    root = tmp_path / "suite"
    (root / "runs" / ".half.partial-1").mkdir(parents=True)
    (root / "runs" / ".half.partial-1" / "cell.json").write_text("{}")
    make_suite(make_jobs()[:1], tmp_path).run(1000.0)
    with tarfile.open(tmp_path / "export" / ARCHIVE) as tar:
        names = tar.getnames()
    assert {"suite/suite.json", "suite/README.md"} <= set(names)
    assert not [name for name in names if ".half" in name]
