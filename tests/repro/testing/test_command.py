"""``repro conformance``: a table of properties, an exit code, JSON; bad input in one sentence."""

import builtins
import json
import subprocess
import sys

import pytest
from support.command import refused, repro, table_of
from support.forks import repro_in_a_process

LIFO, PHASE = "support.broken:NewestFirst", "engines.dllm.scheduling.scheduler:PhaseScheduler"
FEW = ("--examples", "3")


def test_a_table_of_what_passes():
    result = repro("conformance", PHASE, *FEW)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == f"{PHASE}, a scheduler"
    assert max(map(len, lines)) <= 80
    rows = [[*row.values()] for row in table_of(result.out)[:7]]
    assert {(verdict, examples) for _, verdict, examples, *_ in rows} == {("pass", "3")}
    assert lines[-1].startswith("7 of 7 properties pass; examples by hypothesis 6.")


def test_a_failure_ends_with_1_and_its_sentence(monkeypatch):
    monkeypatch.setattr("repro.testing.examples.drawn_by", lambda: "numpy")  # it makes no example smaller
    monkeypatch.setenv("COLUMNS", "80")
    result = repro("conformance", LIFO, "--examples", "20", "--seed", "1")
    assert (result.code, result.err) == (1, "")
    assert max(map(len, result.out.splitlines())) <= 80
    said = " ".join(result.out.split())
    assert "FAIL no starvation: request " in said
    assert "6 of 7 properties pass" in said


def test_nothing_is_left_in_the_folder(tmp_path):
    assert repro_in_a_process(tmp_path, "conformance", PHASE, *FEW).code == 0
    assert [*tmp_path.iterdir()] == []


def test_json_says_the_same(monkeypatch):
    monkeypatch.setattr("repro.testing.examples.drawn_by", lambda: "numpy")
    result = repro("conformance", "engines.policies.batching:OneByOne", *FEW, "--json")
    found = json.loads(result.out)
    assert (result.code, found["kind"], found["passed"]) == (0, "batcher", True)
    verdicts = {each["property"]: (each["verdict"], each["examples"], each["why"]) for each in found["properties"]}
    assert verdicts.pop("cap") == ("skip", 0, "it takes and has no max_num_batched_tokens")
    assert set(verdicts.values()) == {("pass", 3, None)}
    failed = json.loads(repro("conformance", LIFO, "--examples", "15", "--json").out)
    assert not failed["passed"]
    assert [each["why"][:15] for each in failed["properties"] if each["verdict"] == "FAIL"] == ["no starvation: "]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("engines.dllm.scheduling.lookahead:LookaheadScheduler", "scheduler"),
        ("engines.dllm.scheduling.phase:DelayedCache", "refresh-rule"),
        ("engines.policies.routing:RemoteOnly", "router"),
        ("engines.policies.instances:LeastTokens", "router"),
        ("engines.policies.batching:ONE_BY_ONE", "batcher"),
        ("support.making:made_scheduler", "scheduler"),
        ("support.making:PARTLY", "batcher"),
    ],
)
def test_the_kind_is_found(name, kind):
    assert json.loads(repro("conformance", name, "--examples", "1", "--json").out)["kind"] == kind


def test_a_queue_is_the_batcher_s():
    one = "engines.policies.batching:OneByOne"
    result = repro("conformance", one, "--queue", "baselines.ar.vllm:InFlightFirst", "--examples", "30")
    assert result.code == 1
    assert "FAIL no starvation: " in result.out
    refused(repro("conformance", PHASE, "--queue", one), "has no effect with a scheduler: leave it out")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mine"], "name='mine'"),
        (["nowhere:Mine"], "name='nowhere:Mine'"),
        (["support.broken:Nobody"], "has no 'Nobody'"),
        (["support.making:unsaid"], "says by no method which kind of plug-in it is: add --kind"),
        (["support.making:unsaid", "--kind", "router"], "is no router, it has no route() and no pick()"),
        ([PHASE, "--kind", "scheduling"], "kind='scheduling'"),
        ([PHASE, "--examples", "0"], "examples=0"),
        ([PHASE, "--seed", "-1"], "seed=-1"),
        (["engines.laps.ours:Reserve"], "policy Reserve fails (TypeError: "),
        (["engines.dllm.scheduling.scheduler:Scheduler"], "no scheduler is made of config, pool, rule and exact_steps"),
        (["engines.dllm.scheduling.scheduler:KvPool", "--kind", "scheduler"], "no scheduler is made of config"),
    ],
)
def test_bad_input_is_refused(arguments, says):
    refused(repro("conformance", *arguments), says)


def test_without_hypothesis_examples_are_numpy_s(monkeypatch):
    imported = builtins.__import__

    def no_hypothesis(name, *given, **named):
        if name == "hypothesis":
            raise ImportError(name)
        return imported(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", no_hypothesis)
    outputs = [repro("conformance", LIFO, "--examples", "15", "--seed", seed).out for seed in ("4", "4", "5")]
    assert outputs[0].splitlines()[-1] == "6 of 7 properties pass; examples by numpy, seed 4."
    assert outputs[0] == outputs[1]
    assert outputs[0].splitlines()[-2] != outputs[2].splitlines()[-2]


def test_the_suite_loads_no_torch():
    code = "import sys, repro.testing.named; print([n for n in ('torch', 'pandas', 'hypothesis') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
