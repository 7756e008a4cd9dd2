"""Session traces: AMPD's Table 1 by construction, real files, and what Figure 8 says about the unit of a length."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import data_beside

from engines.errors import UserError
from repro.workloads import sessions
from repro.workloads.draws import ArrivalConfig
from repro.workloads.recorded import read_sessions

REFUSED = data_beside(__file__, "refused")

PAPER = Path(__file__).parents[3] / "results" / "paper"
POISSON = ArrivalConfig(kind="poisson", rate=2.0)
REAL_DATA = os.environ.get("REPRO_DATA_DIR")


def table_1() -> dict[str, dict[str, float]]:
    with (PAPER / "ampd" / "table1.csv").open(encoding="utf-8") as file:
        return {
            row["trace"]: {key: float(value) for key, value in row.items() if key != "trace"}
            for row in csv.DictReader(file)
        }


def workload(trace: str, **change: object) -> object:
    return sessions.build_sessions(
        sessions.SessionWorkloadConfig(**{"trace": trace, "num_sessions": 99, "seed": 1, "arrivals": POISSON, **change})
    )


@pytest.mark.parametrize("trace", ["ToolBench", "GAIA", "HotpotQA", "DuReader"])
def test_cards_hold_table_1(trace):
    card, row = sessions.load_session_card(trace), table_1()[trace]
    assert card.rounds.mean == row["avg_rounds"]
    assert card.lengths.prefill_tokens == row["avg_prefill_length"]
    assert card.lengths.decode_tokens == row["avg_decode_length"]
    assert card.num_gpus == row["gpus"]
    assert card.roles["rounds.mean"] == card.roles["lengths.prefill_tokens"] == "stated"


@pytest.mark.parametrize("trace", sessions.known_session_cards())
@pytest.mark.parametrize("num", [1, 99, 400])
@pytest.mark.parametrize("seed", [0, 7])
def test_every_sample_meets_the_means_of_table_1(trace, num, seed):
    """To the nearest whole token of the sample, whatever the seed."""
    card = sessions.load_session_card(trace)
    built = workload(trace, num_sessions=num, seed=seed)
    assert len(built.sessions) == num
    rounds = sum(len(each.rounds) for each in built.sessions)
    # Rounds are whole too: 1 + what is left of the mean.
    assert rounds == num + round((card.rounds.mean - 1) * num)
    assert sum(each.prefill_tokens for each in built.sessions) == round(card.lengths.prefill_tokens * num)
    assert sum(each.decode_tokens for each in built.sessions) == round(card.lengths.decode_tokens * num)
    assert built.provenance.means["prefill_tokens"] == pytest.approx(card.lengths.prefill_tokens, abs=0.5 / num + 1e-9)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 500)), min_size=1, max_size=8), st.integers(0, 10))
def test_apportioned_numbers_sum_and_stay_near_their_share(groups, seed):
    sizes, totals = (np.array(column) for column in zip(*groups, strict=True))
    weight = np.random.default_rng(seed).exponential(size=int(sizes.sum())) + 0.01
    found = sessions.apportion(weight, totals, sizes)
    start = 0
    for size, total in groups:
        part, share = found[start : start + size], weight[start : start + size]
        assert part.sum() == total
        assert (np.abs(part - total * share / share.sum()) < 1 + 1e-9).all()
        start += size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *REFUSED["sessions_of_ours"],
        (f'{{"rounds": [[1, {"9" * 400}]]}}', "tokens 1 to 2147483647"),
        (f'{{"rounds": [[1, {"9" * 5000}]]}}', "with a number too long"),
        (f'{{"rounds": [[1, 1, {"9" * 400}]]}}', "seconds 0 to 1000000"),
        (f'{{"rounds": [[1, 1]], "arrival_s": {"9" * 400}}}', "expected seconds, 0 to 1e"),
        ("[" * 100_000, "nested too deeply"),
        ('{"rounds": ' + "[" * 100_000, "nested too deeply"),
    ],
    ids=lambda text: text[:40],
)
def test_malformed_lines_are_refused_by_name(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"rounds": [[1, 1]]}\n' + line + "\n")
    with pytest.raises(UserError, match=message) as refused:
        read_sessions(path, "sessions_jsonl")
    assert str(refused.value).startswith("bad.jsonl line 2: ")
    assert len(str(refused.value)) < 300
    assert str(refused.value).encode().count(b"\n") == 0


@pytest.mark.parametrize(("kind", "record", "message"), REFUSED["published_sessions"])
def test_records_of_another_make_are_refused(tmp_path, kind, record, message):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=message):
        read_sessions(path, kind)


def test_a_list_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"deep\.json row 1 cannot be read as JSON"):
        read_sessions(path, "hotpotqa_distractor")


def test_nothing_is_drawn_for_sessions_that_are_served_as_they_are(tmp_path):
    """A session of 10,000 rounds has more of them than Table 1 has tokens."""
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"rounds": [[2, 1]] * 10_000}))
    config = sessions.SessionWorkloadConfig(
        trace="gaia", num_sessions=1, seed=1, arrivals=POISSON, source="local", trace_path=str(path), meets_totals=False
    )
    assert sessions.build_sessions(config).sessions[0].context_tokens == 30_000
    with pytest.raises(UserError, match="fewer than the 10000 rounds"):
        sessions.build_sessions(replace(config, meets_totals=True))
    with pytest.raises(UserError, match="counted='per_round' has no effect on recorded sessions"):
        sessions.build_sessions(replace(config, counted="per_round"))


def test_files_that_are_missing_empty_or_damaged_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    with pytest.raises(UserError, match="does not exist"):
        read_sessions(tmp_path / "none.jsonl", "sessions_jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="has no session"):
        read_sessions(tmp_path / "empty.jsonl", "sessions_jsonl")
    (tmp_path / "broken.json.gz").write_bytes(b"not gzip")
    with pytest.raises(UserError, match="is unreadable"):
        read_sessions(tmp_path / "broken.json.gz", "hotpotqa_distractor")
    with pytest.raises(UserError, match="no file for dataset 'toolbench' in any data directory"):
        workload("toolbench", source="local")


@pytest.mark.skipif(REAL_DATA is None, reason="needs ToolBench, HotpotQA and DuReader in REPRO_DATA_DIR")
@pytest.mark.parametrize(
    ("trace", "rounds", "prefill"), [("toolbench", 4.0, 2000), ("hotpotqa", 3.0, 1491), ("dureader", 3.0, 1860)]
)
def test_real_files_have_the_shape_their_cards_say(trace, rounds, prefill):
    built = workload(trace, num_sessions=300, source="local", meets_totals=False)
    assert built.provenance.means["rounds"] == pytest.approx(rounds, rel=0.1)
    assert built.provenance.means["prefill_tokens"] == pytest.approx(prefill, rel=0.1)
    scaled = workload(trace, num_sessions=300, source="local")
    assert scaled.provenance.means["prefill_tokens"] == pytest.approx(
        sessions.load_session_card(trace).lengths.prefill_tokens, abs=0.01
    )


@pytest.mark.parametrize(("change", "message"), REFUSED["sessions"])
def test_nonsense_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        workload(**{"trace": "gaia", **change})


def test_times_of_no_file_are_refused():
    with pytest.raises(UserError, match="needs a local file with an arrival_s"):
        workload("gaia", arrivals=ArrivalConfig(kind="trace"))
