import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.records import record_of, requests_table, stats
from support.tables import data_beside

from engines.errors import UserError
from repro.families.block.system import BLOCK
from repro.families.cluster.ampd import PLANNING
from repro.families.cluster.ampd_record import AR
from repro.families.cluster.laps_record import PREFILL
from repro.families.dllm.record import DLLM
from repro.families.http.record import HTTP
from repro.families.live.system import LIVE
from repro.runs.family import METRICS, Family, column, distribution, family_in, goodput, is_ok, request_times
from repro.runs.record import REQUEST_COLUMNS, RunRecord

ANY = Family(name="any")


def test_one_request():
    summary = ANY.summarize(record_of(requests_table((2.0, 2.0, 3.0, 6.0, 32, "ok"))))
    assert summary["throughput_tok_s"] == 8.0
    assert summary["e2el_s"] == stats(1, 4.0, None, 4.0, 4.0, None)


def test_a_window_of_no_length_has_no_rate():
    summary = ANY.summarize(record_of(requests_table((2.0, 2.0, 2.0, 2.0, 32, "ok"))))
    assert summary["window_s"] is summary["throughput_tok_s"] is summary["request_throughput"] is None


def test_a_failed_request_has_no_latency_even_with_stamps():
    record = record_of(requests_table((0.0, 0.0, 1.0, None, 8, "failed"), (0.0, 0.0, 2.0, 3.0, 8, "ok")))
    assert request_times(record, "ttft_s").tolist() == [2.0]


def test_a_stamp_nobody_saw_meets_no_limit():
    slos = {"seen": {"e2el_s": 3.0}, "unseen": {"ttft_s": 100.0}}
    found = goodput(record_of(requests_table((0.0, None, None, 3.0, 8, "ok"))).with_manifest(slos=slos))
    assert (found["seen"]["num_good"], found["unseen"]["num_good"]) == (1, 0)


def test_percentiles_appear_with_enough_samples_and_interpolate():
    def shown(n: int) -> list[str]:
        return [k for k, v in distribution(list(range(n))).items() if k.startswith("p") and v is not None]

    assert [shown(n) for n in (1, 2, 9, 10)] == [[], ["p50"], ["p50"], ["p50", "p90"]]
    assert [len(shown(n)) for n in (19, 20, 99, 100)] == [2, 3, 3, 4]
    # 0..100: the q-th order statistic is q itself. 0..99: between the 99th and the 100th.
    assert [distribution(list(range(101)))[f"p{q}"] for q in (50, 90, 95, 99)] == [50.0, 90.0, 95.0, 99.0]
    assert distribution(list(range(100)))["p99"] == pytest.approx(98.01)


def test_ties_at_a_percentile_edge():
    # 100 values: p99 lies between the 99th and the 100th, equal here, so the outlier below must not matter.
    values = [1.0] * 98 + [5.0] * 2
    summary = distribution(values)
    assert summary["p99"] == 5.0
    assert summary["p95"] == 1.0
    assert distribution([1.0] * 99 + [5.0])["p99"] == pytest.approx(1.04)
    alike = distribution([2.0] * 100)
    assert alike == stats(100, 2.0, 0.0, 2.0, 2.0, 2.0) | dict.fromkeys(("p90", "p95", "p99"), 2.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=150))
def test_distribution_is_ordered(values):
    summary = distribution(values)
    known = [summary[k] for k in ("min", "p50", "p90", "p95", "p99", "max") if summary[k] is not None]
    assert known == sorted(known)
    assert summary["span"] == max(values) - min(values)
    json.dumps(summary, allow_nan=False)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="finite"):
        distribution([1.0, float("nan")])


FAMILIES = (DLLM, BLOCK, HTTP, AR, PREFILL, PLANNING, LIVE)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
def test_every_metric_is_documented_once(family):
    """Live workers have a goodput of their own in place of the harness's."""
    metrics = METRICS + family.metrics
    names = [metric.name for metric in metrics if metric.unit != "1/s"]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.formula and metric.undefined for metric in metrics)
    assert {each.metric for each in family.shown if not each.is_predicted} <= {metric.name for metric in metrics}


HEADS = {
    "columns": "family,table,name,kind,null,meaning",
    "metrics": "family,name,unit,formula,undefined,fact",
    "summary": "family,title,metric,stat,scale,share,predicted",
}
ROWS = {
    "columns": "mine,requests,cost,float,null,what it cost",
    "metrics": "mine,cost,EUR,what it cost,never,",
    "summary": "mine,cost,cost,,,,",
}


@pytest.mark.parametrize(
    ("file", "row", "reason"), data_beside(__file__, "metrics")["a_row_that_describes_nothing_is_refused"]
)
def test_a_row_that_describes_nothing_is_refused(file, row, reason, tmp_path):
    for name, head in HEADS.items():
        (tmp_path / f"{name}.csv").write_text("\n".join((head, row if name == file else ROWS[name])))
    with pytest.raises(ValueError, match=reason):
        family_in(tmp_path, "mine", {"cost": len})


@pytest.mark.parametrize("limits", [{}, {"ttft": 1.0}, {"e2el_s": 0.0}, {"e2el_s": float("nan")}])
def test_bad_slo_is_refused(limits):
    with pytest.raises(UserError, match="slo 'x'"):
        goodput(record_of(requests_table((0.0, 1.0, 2.0, 3.0, 8, "ok"))).with_manifest(slos={"x": limits}))


def test_metrics_of_every_run_need_no_table_but_its_requests():
    table = requests_table((0.0, 1.0, 2.0, 4.0, 8, "ok"), (1.0, None, None, None, 8, "failed"))
    record = RunRecord(tables={"requests": {column.name: table[column.name] for column in REQUEST_COLUMNS}})
    assert ANY.summarize(record).keys() == {metric.name for metric in METRICS}
    assert ANY.summarize(record)["throughput_tok_s"] == 2.0


def test_a_column_is_made_once_and_again_for_a_record_with_another():
    record = record_of(requests_table((0.0, 0.0, 1.0, 2.0, 8, "ok"), (1.0, 1.0, 2.0, 4.0, 8, "ok")))
    assert column(record, "arrival_s") is column(record, "arrival_s")
    assert is_ok(record) is is_ok(record)
    for array in (column(record, "finished_s"), is_ok(record)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    other = record.with_columns("requests", arrival_s=[0.0, 3.0], status=["ok", "failed"])
    assert column(other, "arrival_s").tolist() == [0.0, 3.0]
    assert is_ok(other).tolist() == [True, False]
    assert column(record, "arrival_s").tolist() == [0.0, 1.0]
