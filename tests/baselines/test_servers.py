"""Servers are stopped whatever happens to those who started them.

The policy in a real engine decides as on the simulated instance; here the engine is a loop that takes a millisecond a token.

The tiny checkpoint is one that this project's own engine loads, and the same every time.

A worker of known times, on a clock that stands still between its deeds.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dynamo_stand_in import Context
from support.mock_openai import MockOpenAI, mock_server
from support.prefill import TokenCost, turns
from support.processes import ends
from support.tables import data_beside
from support.virtual_time import run_virtually

from baselines.servers import process
from baselines.servers.admission import Admission, AdmissionConfig
from baselines.servers.dynamo_worker import KnownTimes
from baselines.servers.launch import MAX_MODEL_LEN, tiny_config, write_tiny
from baselines.servers.process import WARDEN, Address, Command, free_port, running
from engines.errors import RunError, UserError
from engines.laps.cluster import PrefillCluster
from engines.machine import SETTLED
from engines.models.loader import load_causal
from engines.models.qwen2_config import read_causal_config
from repro.paths import REPO

DATA = data_beside(__file__, "servers")

PATH = {"PYTHONPATH": os.pathsep.join((str(REPO), str(REPO / "tests")))}


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a fake server writes who it is and who its child is."""
    path = tmp_path / "pids"
    monkeypatch.setenv("FAKE_SERVER_PIDS", str(path))
    return path


def all_of(pids: Path) -> list[int]:
    return [int(word) for line in pids.read_text().splitlines() for word in line.split()[:2]]


@contextmanager
def fake(folder: Path, how: str, *, within_s: float = 60.0, paths: tuple[str, ...] = ("/health",)) -> Iterator[str]:
    port = free_port()
    command = Command(
        name="fake",
        arguments=(sys.executable, "-m", "support.fake_server", "--port", str(port)),
        environment={**PATH, "FAKE_SERVER": how},
    )
    url = f"http://127.0.0.1:{port}"
    with running("fake", [command], Address(url=url, model="served", paths=paths), folder=folder, within_s=within_s):
        yield url


def test_a_server_and_its_children_end_with_the_body(tmp_path, pids):
    with fake(tmp_path, "serve"):
        assert not any(ends(pid, 0) for pid in all_of(pids))
    assert all(ends(pid) for pid in all_of(pids))


def test_a_server_that_ignores_signals_is_killed(tmp_path, pids, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    with fake(tmp_path, "deaf"):
        pass
    assert all(ends(pid) for pid in all_of(pids))


def test_ctrl_c_stops_it(tmp_path, pids):
    with pytest.raises(KeyboardInterrupt), fake(tmp_path, "serve"):
        raise KeyboardInterrupt
    assert all(ends(pid) for pid in all_of(pids))


def test_a_server_that_ends_at_once_says_why(tmp_path):
    with (
        pytest.raises(
            RunError, match=r"fake ended while starting \(exit code 1\): ValueError: there is no such model; all"
        ),
        fake(tmp_path, "fail"),
    ):
        pass
    assert "no such model" in (tmp_path / "fake.log").read_text()


def test_a_server_that_never_answers_is_given_up(tmp_path, pids):
    with (
        pytest.raises(
            RunError,
            match=r"fake is not ready after start_timeout_s=0.5, it does not answer \(.*refused\): nothing; all",
        ),
        fake(tmp_path, "silent", within_s=0.5),
    ):
        pass
    assert not pids.exists() or all(ends(pid) for pid in all_of(pids))


def test_one_that_does_not_list_the_model_or_says_no_is_not_ready(tmp_path):
    with fake(tmp_path, "serve") as url:
        assert Address(url=url, model="served").missing() is None
        assert Address(url=url, model="other").missing() == "it lists no model 'other'"
        assert Address(url=url, model="served", paths=("/nothing",)).missing() == "it does not answer (status 404)"
        assert Address(url=url, model="served", num_workers=1).missing() == ("it does not answer as such servers do"), (
            "it lists no workers"
        )
    assert "refused" in str(Address(url=url, model="served").missing())
    raw = {"get /health": lambda: [b"HTTP/1.1 307 X\r\nLocation: http://other.example/health\r\n\r\n"]}
    with mock_server(MockOpenAI(raw=raw)) as url:
        said = Address(url=url, model="mock", paths=("/health",)).missing()
    assert said == "it does not answer (status 307, a redirect to the host 'other.example', which is not followed)"


def test_it_is_ready_once_every_worker_is_there():
    listed = [[(1, "generate"), (1, "flush")], [(1, "generate"), (2, "flush")], [(1, "generate"), (2, "generate")]]
    said = [{"instances": [{"instance_id": i, "endpoint": name} for i, name in each]} for each in listed]
    with mock_server(MockOpenAI(health=lambda: said.pop(0))) as url:
        address = Address(url=url, model="mock", num_workers=2)
        waits = [address.missing() for _ in listed]
    assert waits == ["1 of 2 workers are there", "1 of 2 workers are there", None]


def test_no_server_outlives_who_started_it(tmp_path, pids):
    """Not even one that was killed, and could tell nobody."""
    server = (sys.executable, "-m", "support.fake_server")
    warden = [sys.executable, "-I", "-S", str(WARDEN), "20", "--", *server]
    program = f"import subprocess; subprocess.Popen({warden!r}, stdin=subprocess.PIPE); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, env={**os.environ, **PATH, "FAKE_SERVER": "silent"}
    )
    while not pids.exists() or not pids.read_text().endswith("\n"):
        assert parent.poll() is None
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert all(ends(pid) for pid in all_of(pids))


def test_a_server_starts_without_what_we_set_for_ourselves(tmp_path, pids, monkeypatch):
    """A limit that keeps our rows independent of their company would slow a rival down; a user's own limit is passed on."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv(SETTLED, "PYTORCH_ALLOC_CONF")
    with fake(tmp_path, "serve"):
        its = Path(f"/proc/{all_of(pids)[0]}/environ").read_text(encoding="utf-8", errors="replace").split("\0")
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in its
    assert not any(each.startswith(("PYTORCH_ALLOC_CONF=", f"{SETTLED}=")) for each in its)


ROOM = 10**9
SPEED = {"base_ms": 0.0, "request_us": 0.0, "token_us": 1000.0}
CONFIGS = {
    "laps": AdmissionConfig(policy="laps", boundary=64, chunk_tokens=128, window_ms=0.0, **SPEED),
    "reserve": AdmissionConfig(policy="reserve", slo_ms=2000.0, **SPEED),
}


def served(config: AdmissionConfig, arrivals: Sequence[tuple[float, int]]) -> list[tuple[str, ...]]:
    """Who is admitted in each step that admits anybody, by an engine that asks when it is free."""
    admission = Admission(config)
    left = {str(i): tokens for i, (_, tokens) in enumerate(arrivals)}
    coming = list(enumerate(arrivals))
    order: list[tuple[str, ...]] = []
    computed: dict[str, int] = {}
    now = 0.0
    while coming or left:
        while coming and coming[0][1][0] <= now:
            number, (arrival_s, tokens) = coming.pop(0)
            admission.arrive(str(number), tokens, arrival_s)
        plan = admission.step(now, computed, ROOM, 16)
        order += [plan.admitted] if plan.admitted else []
        if not plan.shares:
            assert coming, "somebody waits, and nothing happens"
            now = coming[0][1][0]
            continue
        for name, share in plan.shares.items():
            computed[name] = computed.get(name, 0) + share
            if computed[name] == left[name]:
                del left[name], computed[name]
        now += sum(plan.shares.values()) * 1e-3
    return order


def simulated(config: AdmissionConfig, arrivals: Sequence[tuple[float, int]]) -> list[set[str]]:
    run = PrefillCluster(system=config.system, cost=TokenCost(), boundary=config.boundary).simulate(turns(*arrivals))
    steps: dict[float, set[str]] = {}
    for number, started_s in enumerate(run.requests["started_s"]):
        steps.setdefault(float(started_s), set()).add(str(number))
    return [steps[time] for time in sorted(steps)]


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(1, 400)), min_size=1, max_size=20, unique_by=lambda pair: pair[0]
)


@pytest.mark.parametrize("name", CONFIGS)
@given(drawn=ARRIVALS)
@settings(max_examples=60, deadline=None)
def test_the_order_is_that_of_the_simulated_instance(name, drawn):
    config = CONFIGS[name]
    # Steps take whole milliseconds and no two arrivals share a fraction of one: no step ends at one's arrival.
    arrivals = [((at + i / 32) * 1e-3, tokens) for i, (at, tokens) in enumerate(sorted(drawn))]
    order = served(config, arrivals)
    assert sorted((name for step in order for name in step), key=int) == [str(i) for i in range(len(arrivals))]
    assert simulated(config, arrivals) == [{*step} for step in order]


def test_laps_takes_short_prompts_before_a_long_one_and_reserve_the_shortest_first():
    waiting = [(0.0, 400), (0.0, 300), (0.0, 10), (0.0, 20)]
    assert served(CONFIGS["laps"], waiting) == [("2", "3"), ("0",), ("1",)]
    assert served(CONFIGS["reserve"], waiting)[0][:2] == ("2", "3")


def test_who_leaves_is_not_admitted():
    admission = Admission(CONFIGS["laps"])
    for name, tokens in (("a", 10), ("b", 20), ("c", 200)):
        admission.arrive(name, tokens, 0.0)
    admission.leave("a")
    admission.leave("nobody")
    assert admission.step(0.1, {}, ROOM, 16).admitted == ("b",)
    assert admission.step(0.2, {"b": 20}, ROOM, 16) == (("c",), {"c": 128})
    admission.leave("c")
    assert admission.step(0.3, {}, ROOM, 16) == ((), {})


def test_k_v_that_is_not_there_is_not_planned_for():
    admission = Admission(CONFIGS["laps"])
    for name in ("a", "b"):
        admission.arrive(name, 31, 0.0)
    assert admission.step(0.0, {}, 48, 16).admitted == ("a",), "two blocks each, a token of the answer included"
    assert "b" in admission


@pytest.mark.parametrize(("text", "policy", "sentence"), DATA["settings"])
def test_settings_are_refused_in_a_sentence(text, policy, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        AdmissionConfig.parse(text, policy=policy)


def test_it_is_a_qwen2_of_the_same_bytes_every_time(tmp_path):
    first, second = write_tiny(tmp_path / "a"), write_tiny(tmp_path / "b")
    names = {path.name for path in first.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    other = write_tiny(tmp_path / "c", seed=1)
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_the_engine_here_loads_it(tmp_path):
    """Which refuses a checkpoint that lacks a tensor, or has one too many."""
    folder = write_tiny(tmp_path / "model")
    config = read_causal_config(folder)
    assert (config.max_sequence_length, config.vocab_size) == (MAX_MODEL_LEN, tiny_config().vocab_size)
    network = load_causal(str(folder))
    assert sum(parameter.numel() for parameter in network.parameters()) == 566_400


TIMES = {"prefill_s": 0.25, "decode_s": 1.0}


async def answer(
    worker: KnownTimes, prompt_len: int, *, at_s: float = 0.0, leaves_s: float | None = None, num_tokens: int = 3
) -> list[float]:
    """When each token came."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(at_s)
    context, came_s = Context(), []
    if leaves_s is not None:
        loop.call_later(leaves_s - at_s, context.stop)
    request: dict[str, Any] = {"token_ids": [1] * prompt_len, "stop_conditions": {"max_tokens": num_tokens}}
    said = [each async for each in _stamped(worker.generate(request, context), came_s)]
    if leaves_s is None:
        assert [each["finish_reason"] for each in said] == [None] * (num_tokens - 1) + ["length"]
    return came_s


async def _stamped(answer: Any, came_s: list[float]) -> Any:
    async for each in answer:
        came_s.append(asyncio.get_running_loop().time())
        yield each


async def together(*asked: dict[str, Any]) -> list[list[float]]:
    worker = KnownTimes(**TIMES)
    return await asyncio.gather(*(answer(worker, 8, **each) for each in asked))


def test_prompts_take_turns_and_answers_do_not():
    assert run_virtually(together({}, {}, {"at_s": 5.0})) == [[2, 3, 4], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("leaves_s", "got", "next_s"),
    DATA["leaving_clients"],
    ids=["in its prompt", "later in its prompt", "in its answer", "later in its answer"],
)
def test_a_client_that_leaves_takes_no_more_time(leaves_s, got, next_s):
    first, second = run_virtually(together({"leaves_s": leaves_s}, {}))
    assert (first, second[0]) == (got, next_s)


def test_a_client_that_leaves_while_it_waits_takes_none():
    assert run_virtually(together({}, {"leaves_s": 1.0}, {})) == [[2, 3, 4], [], [4, 5, 6]]
