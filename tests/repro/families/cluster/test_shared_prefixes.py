"""Requests that say which tokens they share: what workers spare of them, and what systems say that do not."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cells import a_cell, ran
from support.command import refused, repro
from support.tables import data_beside

from engines.cluster.sessions import Prefix
from engines.errors import UserError
from repro.cli.trace import facts_of
from repro.families.cluster.ampd_record import AR
from repro.workloads.knobs import named_after
from repro.workloads.rounds import RecordedRound, TracedSession, TraceFile
from repro.workloads.table import read_trace

DATA = data_beside(__file__, "shared_prefixes")

NUM = 12
SHARED = 1024 / 2048


def written(path: Path, *, num_shared: int = 2, **more: object) -> str:
    """Requests of four blocks of 512 tokens, the first ``num_shared`` of which all have, with time between them."""
    rows = [
        {
            "timestamp": 20_000 * n,
            "input_length": 2048,
            "output_length": 20,
            "hash_ids": [*range(num_shared), *range(10 + 4 * n, 14 + 4 * n - num_shared)],
            **more,
        }
        for n in range(NUM)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def served(workload: str, system: str, *, seed: int = 0, rate: float | None = None, platform: str = "h20x32", **knobs):
    deployment = "TP8x2" if system in ("vllm-sim", "continuum-sim") else "P:TP4x2 D:TP4x1"
    given = {"deployment": deployment, "workload": workload, "arrivals": "trace", **knobs}
    return ran(a_cell(system, named_after(workload), platform, "roofline", rate=rate, seed=seed, **given))


@pytest.mark.parametrize(("system", "knobs", "num_caches"), DATA["what_a_worker_has_is_spared"])
def test_what_a_worker_has_is_spared(system, knobs, num_caches, tmp_path):
    _, record = served(written(tmp_path / "t.jsonl"), system, **knobs)
    facts = record.facts["prefix_cache"]
    assert facts["prompt_tokens"] == 2048 * NUM
    assert facts["reuse"] == pytest.approx(SHARED * (NUM - num_caches) / NUM)
    assert facts["possible_reuse"] == pytest.approx(SHARED * (NUM - 1) / NUM)
    assert facts["evicted_tokens"] == 0
    if system == "dynamo-sim":
        # Its one decode worker gets what it does not have.
        assert sum(record.tables["transfers"]["tokens"]) == 2048 + 1024 * (NUM - 1)
    assert "hash_ids not used" not in record.manifest["dataset"]["description"]


@pytest.mark.parametrize("platform", ["h20x32", "h200"])  # The second takes time before its queues.
@pytest.mark.parametrize(("system", "knobs"), DATA["workers_share_what_comes_at_once"])
def test_workers_share_what_comes_at_once(system, knobs, platform, tmp_path):
    knobs = {"arrivals": "burst", "prefix_cache": False, "model": "Qwen3-32B", "num_gpus": 12, **knobs}
    _, record = served(written(tmp_path / "t.jsonl"), system, platform=platform, **knobs)
    assert sorted(record.requests["worker_id"]) == [0] * 6 + [1] * 6


@pytest.mark.parametrize("system", ["ampd", "continuum-sim", "vllm-sim", "dynamo-sim"])
def test_prompts_that_count_as_their_own_say_so(system, tmp_path):
    knobs = {"prefix_cache": False} if system in ("vllm-sim", "dynamo-sim") else {}
    shared = written(tmp_path / "t.jsonl")
    _, record = served(shared, system, **knobs)
    assert record.facts["prefix_cache"]["is_used"] is False
    # Who switched it off knows.
    assert bool(record.facts.get("warnings")) == (not knobs)
    assert "hash_ids not used" in record.manifest["dataset"]["description"]
    assert sum(record.tables["tasks"]["computed_tokens"]) == 2048 * NUM


def test_prompts_without_common_blocks_are_served_as_without_names(tmp_path):
    files = [written(tmp_path / "a.jsonl", num_shared=0), written(tmp_path / "b.jsonl", num_shared=0, hash_ids=None)]
    both = [served(each, "vllm-sim", deployment="TP8x1")[1] for each in files]
    assert both[0].facts["prefix_cache"]["reuse"] == 0
    assert "prefix_cache" not in both[1].facts
    assert both[0].requests == both[1].requests


def test_system_prompts_are_shared_by_those_that_draw_them():
    def run(system, **knobs):
        deployment = "TP8x1" if system == "vllm-sim" else "P:TP4x1 D:TP4x1"
        return ran(
            a_cell(system, "dureader", "h20x32", "roofline", rate=0.2, num_prompts=12, deployment=deployment, **knobs)
        )[1]

    bare, one, many = run("vllm-sim"), *(run("vllm-sim", system_prompts=num, system_tokens=1600) for num in (1, 10**6))
    assert sum(one.requests["prompt_len"]) == sum(bare.requests["prompt_len"]) + 12 * 1600
    reuse = one.facts["prefix_cache"]
    assert reuse["cached_tokens"] == many.facts["prefix_cache"]["cached_tokens"] + 11 * 1600
    assert run("ampd", system_prompts=1).facts["prefix_cache"]["is_used"] is False


def test_a_file_s_facts_are_its_own(tmp_path):
    path = written(tmp_path / "t.jsonl")
    found = json.loads(repro("trace", path, "--cache-blocks", "3", "--json").out)
    assert (found["num_sessions"], found["times"]["span_s"], found["times"]["unit"]) == (NUM, 220.0, "ms")
    assert (found["prompt_len"]["mean"], found["gen_length"]["max"]) == (2048, 20)
    reuse = found["reuse"]
    assert (reuse["block_tokens"], reuse["num_blocks"], reuse["num_distinct"]) == (512, 4 * NUM, 2 * NUM + 2)
    assert reuse["endless"]["of_blocks"] == reuse["caches"][0]["of_blocks"] == pytest.approx(SHARED * (NUM - 1) / NUM)
    assert "reuse, endless" in repro("trace", path).out
    assert found["remarks"] == []


def test_a_file_that_is_not_sorted_says_so(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = Path(written(path)).read_text().splitlines(keepends=True)
    path.write_text("".join(reversed(rows)))
    assert "--sort" in repro("trace", path).out
    assert "rows sorted" in repro("trace", path, "--sort").out


def test_times_of_no_unit_are_left_out_and_say_so(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("timestamp,prompt_len,gen_length\n1,2,3\n9,3,4\n")
    assert "say which with --time-unit" in repro("trace", path).out
    assert "window" in repro("trace", path, "--time-unit", "s").out


def test_a_slow_rate_keeps_its_digits(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_len,gen_length\n0,2,3\n86400,3,4\n")
    assert "1.157e-05" in repro("trace", path).out


def test_blocks_that_do_not_fit_the_lengths_say_so(tmp_path):
    path = written(tmp_path / "t.jsonl", hash_ids=[1])
    refused(repro("trace", path, "--cache-blocks", "3"), "cache_blocks=[3]", "blocks of 512 tokens")


class Hundreds:
    """Requests whose blocks no engine has."""

    def sessions(self, seed: int) -> Iterator[TracedSession]:
        yield TracedSession((RecordedRound(200, 5),), 0.0, prefix=Prefix(100, ((0, 1),)))


def test_a_size_of_blocks_that_fits_is_named():
    own = f"{__name__}:Hundreds"
    with pytest.raises(UserError, match=r"block_size=16 must divide 100.*use 100$"):
        served(own, "vllm-sim")
    assert served(own, "vllm-sim", block_size=100)[1].facts["prefix_cache"]["block_size"] == 100


@pytest.mark.skipif("REPRO_DATA_DIR" not in os.environ, reason="needs the published files in REPRO_DATA_DIR")
def test_mooncake_s_conversations_repeat_a_third():
    path = Path(os.environ["REPRO_DATA_DIR"]) / "mooncake" / "conversation_trace.jsonl.gz"
    trace = read_trace(TraceFile(where=str(path)))
    assert all(each.prefix.rounds[0][0] == 0 for each in trace.sessions)
    reuse = facts_of(trace, (1000, 10_000, 50_000))["reuse"]
    assert (reuse["num_blocks"], reuse["endless"]["of_tokens"]) == (288_500, pytest.approx(0.374, abs=5e-4))
    shares = [reuse["endless"]["of_blocks"], *(each["of_blocks"] for each in reuse["caches"])]
    assert shares == pytest.approx([0.366, 0.045, 0.211, 0.355], abs=1e-3)


def test_an_answer_is_part_of_what_the_next_round_finds(tmp_path):
    """Qwen-Bailian's second prompt holds the first and its answer: of 70 tokens 48 are whole blocks of 16 of these."""
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 10, "hash_ids": [7, 8, 9]}\n'
        '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 9.5, "input_length": 70, "output_length": 5, "hash_ids": [7, 8, 3, 4, 5]}\n'
    )
    _, record = served(str(path), "vllm-sim", deployment="TP8x1")
    assert record.tables["tasks"]["computed_tokens"] == [40, 70 - 48]
    assert record.facts["prefix_cache"]["possible_reuse"] == 48 / 110
    # The file itself has no names of the answer's blocks.
    assert facts_of(read_trace(TraceFile(where=str(path))), (9,))["reuse"]["endless"]["of_tokens"] == 32 / 110


@pytest.mark.parametrize(
    ("system", "knobs"),
    [("vllm-sim", {"deployment": "TP8x1"}), ("dynamo-sim", {}), ("dynamo-sim", {"history_read": "own-cache"})],
)
def test_without_a_prefix_cache_every_round_computes_its_whole_prompt(system, knobs):
    computed = {}
    for has_cache in (True, False):
        given = {"deployment": "P:TP4x1 D:TP4x1", "num_prompts": 8, "prefix_cache": has_cache, **knobs}
        tasks = ran(a_cell(system, "dureader", "h20x32", "roofline", rate=0.2, **given))[1].tables["tasks"]
        computed[has_cache] = sum(tasks["computed_tokens"])
    assert computed[False] == sum(tasks["history"]) + sum(tasks["tokens"]) > computed[True]


class Asks:
    """A workload of one's own, whose requests have blocks in common."""

    size = 16

    def sessions(self, seed: int) -> Iterator[TracedSession]:
        for number in range(3):
            prefix = Prefix(self.size, ((5, 5, number),))
            yield TracedSession((RecordedRound(48, 9),), arrival_s=9.0 * number, prefix=prefix)


def test_sessions_of_one_s_own_say_what_they_share(monkeypatch):
    where = f"{__name__}:Asks"
    _, record = served(where, "vllm-sim", deployment="TP8x1")
    assert record.tables["tasks"]["computed_tokens"] == [48, 16, 16]
    monkeypatch.setattr(Asks, "size", 32)
    with pytest.raises(UserError, match=r"session 1: prefix=Prefix\(block_tokens=32"):
        served(where, "vllm-sim", seed=7)


def test_rows_that_come_again_share_nothing_with_the_first(tmp_path):
    """Of 30 requests of a file of 12 the first of every 12 find nothing."""
    shared = written(tmp_path / "t.jsonl")
    _, record = served(shared, "vllm-sim", deployment="TP8x1", arrivals="constant", rate=0.05, num_prompts=30)
    assert record.tables["tasks"]["computed_tokens"].count(2048) == 3


@pytest.mark.skipif("REPRO_DATA_DIR" not in os.environ, reason="needs the published files in REPRO_DATA_DIR")
def test_routing_by_dynamo_s_cost_gains_what_its_own_replay_gains():
    """Dynamo 1.5.1's replay of these requests: reuse 5.9 % and 9.0 %, mean TTFT 0.19 times, and 0.53 times without caches."""
    path = str(Path(os.environ["REPRO_DATA_DIR"]) / "mooncake" / "conversation_trace.jsonl.gz")
    knobs = {"model": "Qwen3-32B", "deployment": "TP2x4", "num_prompts": 2000, "platform": "h200x32", "transient": True}
    knobs |= {"scheduling": "chunked", "max_num_batched_tokens": 8192}
    reuse, ttft_s = {}, {}
    for balance in ("round-robin", "kv-aware"):
        for has_cache in (True, False):
            sized = {"block_size": 64} if has_cache else {}
            _, record = served(path, "vllm-sim", balance=balance, prefix_cache=has_cache, **sized, **knobs)
            reuse[balance, has_cache] = record.facts["prefix_cache"].get("reuse")
            ttft_s[balance, has_cache] = AR.summarize(record)["ttft_rounds_s"]["mean"]
    assert (reuse["round-robin", True], reuse["kv-aware", True]) == pytest.approx((0.059, 0.090), abs=0.01)
    for has_cache, theirs in ((True, 0.19), (False, 0.53)):
        assert ttft_s["kv-aware", has_cache] / ttft_s["round-robin", has_cache] == pytest.approx(theirs, abs=0.1)


def test_names_that_fit_no_blocks_are_left_out_and_counted(tmp_path):
    assert read_trace(TraceFile(where=written(tmp_path / "t.jsonl", input_length=700))).remarks == (
        f"hash_ids of {NUM} sessions left out: they are not those of blocks of 512 tokens",
    )
    with pytest.raises(UserError, match="hash_ids"):
        read_trace(TraceFile(where=written(tmp_path / "u.jsonl", hash_ids="none")))
    said = "arrival_ms=timestamp,prompt_len=input_length,gen_length=output_length,hash_ids=hash_ids"
    trace = read_trace(TraceFile(where=written(tmp_path / "v.jsonl", input_length=1999), columns=said))
    assert {each.prefix.block_tokens for each in trace.sessions} == {512}


def test_a_table_has_its_lists_as_text(tmp_path):
    lines = ["timestamp,input_length,output_length,hash_ids", '0,1024,5,"[7, 8]"', '9000,1100,5,"[7, 9, 10]"']
    (path := tmp_path / "t.csv").write_text("\n".join(lines))
    assert [each.prefix.rounds for each in read_trace(TraceFile(where=str(path))).sessions] == [((0, 1),), ((0, 2, 3),)]


def test_a_worker_may_have_more_tokens_than_a_prompt(tmp_path):
    """Eight GPUs hold millions."""
    path = written(tmp_path / "t.jsonl")
    assert (
        served(path, "vllm-sim", deployment="TP8x1", kv_tokens=4_000_000)[1].facts["prefix_cache"]["evicted_tokens"]
        == 0
    )
    with pytest.raises(UserError, match="kv_tokens=2000000000"):
        served(path, "vllm-sim", kv_tokens=2 * 10**9)
