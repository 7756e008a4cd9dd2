"""A plug-in that breaks a property fails by its name, in one sentence that says where."""

import csv
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support import broken, liars
from support.judged import judged

from engines.dllm.scheduling import KvPool, PhaseScheduler, Scheduler
from engines.errors import UserError
from repro.testing import Ahead, check_batcher, check_refresh_rule, check_router, check_scheduler, properties
from repro.testing.properties import verdicts
from repro.testing.schedulers import REFRESH_RULE, SCHEDULER, Refreshing, Scheduling

MODULES = {"broken": broken, "liars": liars}
with Path(__file__).with_name("broken.csv").open(encoding="utf-8", newline="") as file:
    BROKEN = [tuple(row.values()) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("kind", "plug_in", "name", "says"), BROKEN)
def test_it_fails_by_the_name_of_the_property(kind, plug_in, name, says):
    module, _, made = plug_in.partition(".")
    found = judged(kind, name, getattr(MODULES[module], made))
    assert found.failure is not None
    assert re.search(f"^{name}: .*(?:{says})", found.failure), found.failure
    assert "\n" not in found.failure
    assert found.examples >= 1


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (broken.Overdraws, {"cap"}),
        (broken.Leaks, {"cancellation"}),
        (broken.NewestFirst, {"no starvation"}),
        (broken.Reads, {"independence of executors"}),
    ],
)
def test_nothing_else_fails(make, alone, monkeypatch):
    monkeypatch.setattr(properties, "MOST_SHORTER", 0)
    assert {each.name for each in verdicts(SCHEDULER, Scheduling(make=make), examples=12) if each.failure} == alone


@pytest.mark.parametrize(
    ("check", "make", "name"),
    [
        (check_scheduler, broken.Forgets, "conservation"),
        (check_scheduler, broken.NewestFirst, "no starvation"),
        (check_refresh_rule, broken.OfTheBatch, "independence of the batch"),
        (check_router, broken.ByName, "independence of ids"),
        (check_batcher, broken.Lifo, "no starvation"),
    ],
)
def test_a_check_raises_the_sentence(check, make, name, monkeypatch):
    monkeypatch.setattr(properties, "MOST_SHORTER", 10)
    with pytest.raises(AssertionError, match=f"^{name}: "):
        check(make, examples=25)
    check(make, without=[name], examples=1)


def test_a_price_bounds_the_longest_wait():
    """No more than 64 are ever there, in as little as one place."""

    def stated(ahead: Ahead) -> float:
        assert ahead.step == 1
        return 64 * ahead.longest

    newest = partial(judged, "scheduler", "no starvation", broken.NewestFirst, examples=20)
    assert newest(longest_wait=stated)[2:] == (None, None)
    failure = newest(longest_wait=lambda ahead: ahead.work + ahead.longest).failure
    assert failure is not None
    assert failure.endswith("is the most by its longest_wait")


@pytest.mark.parametrize(("kind", "make"), [("scheduler", broken.Places), ("batcher", broken.Budgeted)])
def test_a_price_is_that_of_the_sizes_it_was_made_with(kind, make):
    assert judged(kind, "no starvation", make, examples=20).failure is None
    assert make.sizes > {make.first}


def test_a_price_without_a_bound_is_told():
    """Its own method says so."""
    found = judged("scheduler", "no starvation", broken.Patience)
    assert found.examples == 0
    assert found.skipped == "its longest_wait is infinite: a request may wait for ever"


def test_what_only_a_model_gives_is_not_judged():
    found = list(verdicts(REFRESH_RULE, Refreshing(make=broken.Confident)))
    assert {each.skipped for each in found} == {"it needs confidences, which a model gives"}


@pytest.mark.parametrize(
    ("check", "make", "names"),
    [
        (check_scheduler, Scheduler, "scheduler"),
        (check_scheduler, KvPool, "scheduler"),
        (check_scheduler, object, "scheduler"),
        (check_refresh_rule, object, "refresh rule"),
        (check_router, object, "router"),
        (check_batcher, object, "batching policy"),
        (partial(check_scheduler, without=["speed"]), PhaseScheduler, "without"),
    ],
)
def test_what_is_no_plug_in_of_the_kind_is_refused(check, make, names):
    with pytest.raises(UserError, match=names):
        check(make, examples=1)


def test_the_seed_decides_the_examples(monkeypatch):
    def failure(seed: int) -> str:
        with pytest.raises(AssertionError, match="no starvation: ") as caught:
            check_scheduler(broken.NewestFirst, examples=15, seed=seed)
        return str(caught.value)

    monkeypatch.setattr(properties, "MOST_SHORTER", 0)
    assert failure(4) == failure(4) != failure(5)


def test_the_checks_load_no_torch():
    code = "import sys, repro.testing; print([n for n in ('torch', 'pandas', 'hypothesis') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_nothing_is_left_in_the_folder(tmp_path, monkeypatch):
    """Hypothesis keeps no examples."""
    monkeypatch.chdir(tmp_path)
    check_scheduler(PhaseScheduler, examples=2)
    assert [*tmp_path.iterdir()] == []
