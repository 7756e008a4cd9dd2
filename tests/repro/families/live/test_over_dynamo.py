"""Live workers behind Dynamo's frontend: the real one where it is installed, and a stand-in of its interface everywhere."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from support.cells import a_cell
from support.dynamo_stand_in import write_dynamo
from support.live import HandFleet, needs_redis
from support.processes import ends

from baselines.servers.environment import FOLDER_VARIABLE, environments_of
from engines.ampd.live.coordinator import random_prompts
from engines.ampd.live.decisions import replay
from engines.ampd.live.fleet import Fleet
from engines.ampd.live.intake import Deciding, Limits
from engines.ampd.live.record import answers, collect
from engines.ampd.live.store import RedisServer, Store
from engines.ampd.live.worker import WorkerSpec
from engines.ampd.performance import PerformanceModel
from engines.ampd.policies import AdaptiveRouter
from engines.cluster.record import observe
from engines.cluster.sessions import Round, Session
from engines.errors import RunError, UserError
from engines.models.qwen2_config import tiny_causal
from engines.policies.routing import LeastKvMemory
from engines.policies.views import PrefillQueue, Slo
from repro.families.live.over_dynamo import Direct, OverDynamo, body_of, seen_by_client
from repro.runs.cell import Cell
from repro.runs.system import SYSTEMS

pytest.importorskip("aiohttp", reason="needs the extra http: aiohttp is not installed")

PREFIX = "{run}"
ROLES = {0: "decode", 1: "prefill"}
CONFIG = tiny_causal(d_model=32, n_layers=2)
PROMPTS = random_prompts(CONFIG.vocab_size, 0)
SESSIONS = [
    Session(number, 0.02 * number, (Round(30 + number, 5, 0.01), Round(9, 1, 0.0), Round(4, 3))) for number in range(3)
]
NUM_TURNS = 9


def router() -> AdaptiveRouter:
    """The first prefill finds an empty window and goes away; after it no TTFT is short enough, and prefills stay."""
    model = PerformanceModel(prefill={}, decode={}, transfer={}, decode_context=1)
    return AdaptiveRouter(model, Slo(ttft_s=1e-9, itl_s=1e3))


def deciding(url: str) -> Deciding:
    where = {"url": url, "prefix": PREFIX, "window_s": 1e3, "lease_s": 600.0}
    return Deciding(binder=LeastKvMemory(), router=router(), estimator=None, **where)


def over_dynamo(**changes: Any) -> OverDynamo:
    limits = Limits(**{"vocab_size": CONFIG.vocab_size, "max_len": 2048, **changes})
    return OverDynamo(limits=limits, tokenizer=None)


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of runs that fail are kept: here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Dynamo's environment is a stand-in's, below the test's folder; where its processes write who they are."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "environments"))
    monkeypatch.setenv("FAKE_SERVER_PIDS", str(tmp_path / "pids"))
    write_dynamo(environments_of("dynamo")["cpu"])
    return tmp_path / "pids"


def are_gone(pids: Path) -> bool:
    found = [int(line) for line in pids.read_text().split()]
    return len(found) == 2 and all(map(ends, found))


def left(pids: Path) -> list[Path]:
    return list(pids.parent.glob("repro-ampd-dynamo-*"))


@needs_redis
def test_sessions_over_http_are_rounds_of_the_coordinator(redis, pids):
    store = Store.connect(redis.url, PREFIX)
    with HandFleet(redis.url, PREFIX) as fleet:
        served = over_dynamo().serve(deciding(redis.url), SESSIONS, PROMPTS, store, fleet)
    run = collect(store, SESSIONS, served.began, ROLES, {}, since=served.mark)
    assert run.sessions["status"] == ["ok"] * len(SESSIONS)
    assert (run.rounds["history"][:3], run.rounds["prefill_tokens"][:3]) == ([0, 35, 45], [30, 9, 4])
    log = [line for line in store.log()[served.mark.decision :] if line != "+{}"]  # hands do not say why
    found = replay(log, binder=LeastKvMemory(), router=router(), make_queue=lambda worker: PrefillQueue())
    assert found.mismatches == []
    assert (found.decisions["bind"], found.decisions["route"]) == (len(SESSIONS) + 1, NUM_TURNS + 1), "and one warms up"
    assert True in run.tasks["is_local"]
    assert served.exchanges is not None
    at_client, facts = seen_by_client(served.exchanges, run, store)
    seen, inside = observe(at_client), observe(run)
    assert (seen.ttft_s > inside.ttft_s).all(), "HTTP takes time"
    assert (seen.e2el_s > inside.e2el_s).all()
    assert facts["added"]["ttft_s"]["mean"] == pytest.approx(float((seen.ttft_s - inside.ttft_s).mean()))
    assert min(served.lags_s) >= 0
    assert are_gone(pids)
    assert not left(pids), "logs are of no use"


@needs_redis
def test_a_request_that_is_refused_fails_the_run_with_its_sentence(redis, pids):
    store = Store.connect(redis.url, PREFIX)
    with HandFleet(redis.url, PREFIX) as fleet, pytest.raises(RunError) as caught:
        over_dynamo(max_len=48).serve(deciding(redis.url), SESSIONS, PROMPTS, store, fleet)
    said = r"3 of 9 requests failed, the first with: in the stream: prompt of \d+ tokens and max_tokens=3 are more than the 48 a"
    assert re.match(said, str(caught.value))
    assert are_gone(pids)
    assert len(left(pids)) == 1, "what was said is kept"


@needs_redis
@pytest.mark.parametrize("error", [KeyboardInterrupt, RunError])
def test_ctrl_c_and_a_worker_s_failure_stop_everything(error, redis, pids, monkeypatch):
    store = Store.connect(redis.url, PREFIX)
    with HandFleet(redis.url, PREFIX) as fleet:

        def fail() -> None:
            raise error

        monkeypatch.setattr(fleet, "check", fail)
        with pytest.raises(error):
            over_dynamo().serve(deciding(redis.url), SESSIONS, PROMPTS, store, fleet)
    assert are_gone(pids)


def cell(**knobs: Any) -> Cell:
    return a_cell("ampd-live", dataset="toolbench", rate=1.0, **knobs)


@needs_redis
def test_an_environment_that_is_missing_is_said_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    deployment, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2, frontend="dynamo"))
    with pytest.raises(UserError, match=r"dynamo is not installed in .*: run 'repro install dynamo"):
        deployment.check_machine()


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer\.json, which frontend='dynamo' reads"):
        SYSTEMS.get("ampd-live").prepare(cell(frontend="dynamo", model=str(tmp_path)))


def test_what_dynamo_is_is_part_of_what_is_behind_the_numbers(pids):
    over, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2, frontend="dynamo"))
    direct, _ = SYSTEMS.get("ampd-live").prepare(cell(num_prompts=2))
    assert over.basis.startswith(direct.basis)
    assert over.basis != direct.basis


@pytest.fixture
def live(redis: RedisServer) -> Iterator[tuple[Store, Fleet]]:
    store = Store.connect(redis.url, PREFIX)
    store.call("create", 1e3)
    where = {"url": redis.url, "prefix": PREFIX, "model": CONFIG, "make_queue": PrefillQueue, "lease_s": 30.0}
    sizes = {"num_tokens": 16000, "max_len": 2048, "num_slots": 64}
    specs = [WorkerSpec(worker_id=worker, role=role, **where, **sizes) for worker, role in ROLES.items()]
    with Fleet(specs, store, start_s=600.0) as fleet:
        yield store, fleet


def needs_dynamo() -> None:
    if environments_of("dynamo")["cpu"].packages is None:
        pytest.skip(
            f"dynamo is not installed in {environments_of('dynamo')['cpu'].folder}: 'repro install dynamo --device cpu'"
        )


@needs_redis
def test_a_client_that_leaves_frees_its_rows(request, redis, tmp_path):
    needs_dynamo()
    store, fleet = request.getfixturevalue("live")

    def wait_for(kind: str, number: int, field: str, wanted: str) -> None:
        until = time.monotonic() + 60.0
        while (found := store.fields(kind, number))[field] != wanted:
            assert time.monotonic() < until, f"{kind} {number}: {found}"
            time.sleep(0.01)

    with over_dynamo()._started(deciding(redis.url), tmp_path) as (url, _):
        body = json.dumps(body_of(PROMPTS(SESSIONS[0], 0).tolist(), 1900))
        client = HTTPConnection(url.removeprefix("http://"), timeout=60)
        headers = {"Content-Type": "application/json", "x-dynamo-session-id": "5"}
        client.request("POST", "/v1/completions", body, headers)
        answer = client.getresponse()
        assert answer.readline().startswith(b"data:")
        # The answer must not end before the frontend, which may be slow, knows that nobody waits for it.
        os.kill(fleet.pid(0), signal.SIGSTOP)
        try:
            assert store.fields("session", 5)["state"] == "decoding"
            client.close()
            answer.close()
            wait_for("session", 5, "state", "left")
        finally:
            os.kill(fleet.pid(0), signal.SIGCONT)
        wait_for("worker", 0, "kv_tokens", "0")


@needs_redis
def test_behind_dynamo_s_frontend_answers_are_those_of_the_same_sessions_without_it(request, redis):
    needs_dynamo()
    store, fleet = request.getfixturevalue("live")
    same = [replace(each, session_id=each.session_id + 100) for each in SESSIONS]

    def prompts(session: Session, number: int) -> Any:
        return PROMPTS(replace(session, session_id=session.session_id % 100), number)

    over = over_dynamo().serve(deciding(redis.url), SESSIONS, prompts, store, fleet)
    run = collect(store, SESSIONS, over.began, ROLES, {}, since=over.mark)
    log = store.log()[over.mark.decision :]
    direct = Direct().serve(deciding(redis.url), same, prompts, store, fleet)
    assert {*run.tasks["is_local"]} == {False, True}
    for logged in (log, store.log()[direct.mark.decision :]):
        found = replay(logged, binder=LeastKvMemory(), router=router(), make_queue=lambda worker: PrefillQueue())
        assert (found.mismatches, found.decisions["route"] - NUM_TURNS) == ([], int(logged is log))
    expected = engine_answers(prompts)
    for sessions in (SESSIONS, same):
        assert [answers(store, each) for each in sessions] == expected
    assert over.client is not None
    over.client.saw(run, store)  # which compares the tokens the client got
    others = [replace(each, session_id=each.session_id + 200) for each in SESSIONS]
    with pytest.raises(RunError, match=r"in the stream: prompt of .* and max_tokens=3 are more than the 48"):
        over_dynamo(max_len=48).serve(deciding(redis.url), others, prompts, store, fleet)


def engine_answers(prompts: Callable[[Session, int], Any]) -> list[list[list[int]]]:
    from support.causal import session_answers

    from engines.ar.torch.executor import PagedExecutor
    from engines.models.loader import load_causal

    executor = PagedExecutor(load_causal(CONFIG, weights="random", seed=0), num_slots=8, max_len=2048, num_tokens=4096)
    return [session_answers(executor, each, prompts) for each in SESSIONS]
