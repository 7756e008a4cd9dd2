"""The answers of several sites: whatever the number of processes they are the same, and so are errors."""

import json
import pickle
import sys
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from types import ModuleType
from unittest.mock import Mock

import pytest

from engines.errors import RunError
from repro.capacity import answers
from repro.capacity.answers import Answer, Search
from repro.capacity.question import Question, parse_sizes
from repro.capacity.sites import LASTING, Site
from repro.runs.pool import worker_processes

SYSTEMS_OF_MINE = """
from dataclasses import replace
from repro.families.cluster.ampd import VLLM_SIM, build_vllm

class Nowhere:
    def __init__(self, answer, patience):
        self.answer, self.left = answer, patience

    def bind(self, decodes, now):
        self.left -= 1
        return self.answer if self.left < 0 else decodes[0].worker_id

def bound(binder, *given):
    cluster = build_vllm(*given)
    return replace(cluster, policies=replace(cluster.policies, make_binder=binder))

# A lambda, which no process can send to another.
OWN = replace(VLLM_SIM, name="mine_of_capacity:OWN", title="own", build=lambda *given: build_vllm(*given))
LATE = replace(
    VLLM_SIM, name="mine_of_capacity:LATE", title="late", build=lambda *given: bound(lambda: Nowhere(-7, 30), *given)
)
SOON = replace(
    VLLM_SIM, name="mine_of_capacity:SOON", title="soon", build=lambda *given: bound(lambda: Nowhere(-1, 0), *given)
)
"""


@pytest.fixture(scope="module", autouse=True)
def mine(tmp_path_factory):
    """A module of systems, and two processes that know it and stay from one test to the next."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine_of_capacity.py").write_text(SYSTEMS_OF_MINE)
    with pytest.MonkeyPatch.context() as patch, worker_processes(2) as pool:
        patch.syspath_prepend(folder)
        patch.setattr(answers, "worker_processes", lambda _: nullcontext(pool))
        yield "mine_of_capacity"
    sys.modules.pop("mine_of_capacity", None)


@pytest.fixture
def ask(tmp_path):
    own = tmp_path / "mine.jsonl"
    own.write_text("".join(json.dumps({"rounds": [[800 + 50 * n, 60], [300, 40]]}) + "\n" for n in range(12)))

    def asked(
        systems: list[str], num_processes: int | None, *, rate: float | None = None, num_prompts: int | None = 40
    ) -> tuple[list[Answer], int]:
        """With how many were heard of."""
        question = Question(
            systems=systems,
            platforms=["h200"],
            workload=str(own),
            dataset=None,
            slo="ttft:p95:2000 itl:p95:50",
            knobs={"scheduling": "chunked", "max_num_batched_tokens": 2048, "balance": "sessions"},
            num_prompts=num_prompts,
            num_seeds=2,
        )
        sizes, heard = parse_sizes("2..4"), list[None]()
        search = Search(question=question, sizes=sizes, rate=rate, resolution=0.2)
        found = search.answers(question.sites(sizes), lambda: heard.append(None), num_processes)
        return found, len(heard)

    return asked


def told(found: list[Answer]) -> list[object]:
    return [
        (*(getattr(each, name) for name in vars(each) if name != "site"), each.site.title, each.site.cell)
        for each in found
    ]


@pytest.mark.parametrize("rate", [None, 4.0])
def test_answers_do_not_hang_on_the_number_of_processes(rate, ask, mine):
    systems = ["dynamo-sim", "vllm-sim", f"{mine}:OWN"]
    found, heard = ask(systems, 1, rate=rate)
    assert len(found) == heard == (3 if rate else 5)
    # OWN is vLLM by another name, and stands behind it.
    titles = [each.site.title for each in found]
    assert titles.index("vLLM") < titles.index("own")
    others, heard = ask(systems, 2, rate=rate)
    assert told(others) == told(found)
    assert heard == len(found)


def test_the_error_of_the_first_site_is_raised_whichever_comes_first(ask, mine):
    said = []
    for num_processes in (1, 2):
        with pytest.raises(RunError) as error:
            ask([f"{mine}:LATE", f"{mine}:SOON"], num_processes)
        said.append(str(error.value))
    assert said == ["binder Nowhere binds a session to -7, which is no decode worker"] * 2


def test_the_error_of_a_site_behind_others_is_raised_where_they_have_none(ask, mine):
    with pytest.raises(RunError, match="to -1, which is no decode worker"):
        ask(["vllm-sim", f"{mine}:SOON"], 2)


def test_a_site_is_sent_without_what_it_can_find_again(ask):
    site = ask(["vllm-sim"], 1)[0][0].site
    sent = pickle.dumps(site)
    assert len(sent) < 2000
    assert pickle.loads(sent) == site


@pytest.fixture
def no_workers(monkeypatch):
    monkeypatch.setattr(answers, "usable_cores", lambda: 2)
    monkeypatch.setattr(answers, "worker_processes", lambda _: pytest.fail("a process was started"))


@pytest.mark.usefixtures("no_workers")
def test_a_system_in_no_file_and_little_work_take_no_other_process(ask, monkeypatch):
    notebook = ModuleType("cells_of_capacity")
    exec(SYSTEMS_OF_MINE.replace("mine_of_capacity", notebook.__name__), vars(notebook))
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    monkeypatch.setattr(answers, "FEW_SESSIONS", 0)
    found, _ = ask(["vllm-sim", "cells_of_capacity:OWN"], None)
    assert {each.site.title for each in found} == {"vLLM", "own"}
    monkeypatch.undo()
    assert len(ask(["vllm-sim"], None, rate=4.0)[0]) == 1
    assert len(ask(["vllm-sim", "continuum-sim"], None, rate=4.0)[0]) == 2


def test_a_process_that_is_lost_is_said(ask, monkeypatch):
    monkeypatch.setattr(answers, "worker_processes", Mock(side_effect=BrokenProcessPool))
    with pytest.raises(RunError, match="a process of this machine ended"):
        ask(["vllm-sim", "continuum-sim"], 2)


@pytest.mark.usefixtures("no_workers")
def test_two_sites_take_two_processes_by_default(ask):
    with pytest.raises(pytest.fail.Exception, match="a process was started"):
        ask(["vllm-sim", "continuum-sim"], None, num_prompts=None)


@pytest.mark.parametrize(
    ("asked", "stays", "runs"),
    [(None, 1.9, [1000, 3072]), (None, 2.0, [1000]), (1000, 1.9, [1000]), (None, None, [1000])],
)
def test_the_rate_of_a_burst_is_sought_again_with_the_most_requests(asked, stays, runs, monkeypatch):
    seen = []

    def found(site, *given):
        seen.append(site)
        return Mock(at=None if stays is None else Mock(stays=stays), rate=None)

    monkeypatch.setattr(answers, "largest_rate", found)
    site = Mock(most_prompts=3072, sized_for=lambda gpus, rate, num_prompts: num_prompts or 1000)
    search = Search(question=Mock(num_prompts=asked), sizes=Mock(), rate=None, resolution=0.2)
    search._answers_of(site, [(8,)])
    assert seen == runs
    seen.clear()
    site.most_prompts = 1000
    search._answers_of(site, [(8,)])
    assert seen == [1000]


def test_arrivals_last_at_the_rates_of_64_gpus():
    site = Mock(rounds_per_prompt=1, alone_s=9.0, objectives=[Mock(fewest=20)], num_seeds=3)
    assert Site._num_prompts(site, 400.0) >= LASTING * 400.0 * site.alone_s
