"""The roofline against a hand-made table of lower bounds, and its own laws."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refuses
from support.tables import data_beside

from engines.cost.roofline import H200, L40S, RTX4090, Calibration, Roofline, StepWork
from engines.errors import UserError
from engines.models.shape import DREAM_7B, LLADA_8B, MIXTRAL_8X7B
from repro.families.cost import save_calibration

DATA = data_beside(__file__, "roofline")

CARDS = (RTX4090, L40S, H200)
BLOCK = 32


def refresh(length: int, logit_rows: int = BLOCK, n: int = 1, retention: float = 0.5) -> StepWork:
    return StepWork(
        query_rows=n * length,
        attention_pairs=n * length * length,
        logit_rows=n * logit_rows,
        kv_read_rows=0,
        kv_written_rows=n * int(retention * (length - BLOCK)),
        num_sequences=n,
    )


def reuse(length: int, n: int = 1, retention: float = 0.5) -> StepWork:
    keys = int(retention * (length - BLOCK)) + BLOCK
    return StepWork(
        query_rows=n * BLOCK,
        attention_pairs=n * BLOCK * keys,
        logit_rows=n * BLOCK,
        kv_read_rows=n * keys,
        kv_written_rows=n * BLOCK,
        num_sequences=n,
    )


def lower_bound_bytes(roofline: Roofline, work: StepWork) -> int:
    """The traffic behind ``lower_bound_s``."""
    return sum(moved for _, moved in roofline.loads(work, logit_passes=1))


def printed(work: StepWork) -> list[tuple[str, str]]:
    """Milliseconds and bound on each card, as a table prints them."""
    cells = []
    for card in CARDS:
        roofline = Roofline(LLADA_8B, card)
        seconds = roofline.lower_bound_s(work)
        by_memory = seconds == lower_bound_bytes(roofline, work) / card.bandwidth
        cells.append((f"{seconds * 1e3:.1f}", "M" if by_memory else "C"))
    return cells


def flops(work: StepWork) -> int:
    return sum(flops for flops, _ in Roofline(LLADA_8B, L40S).loads(work))


@pytest.mark.parametrize(("length", "tera", "ms"), DATA["refresh_lower_bounds"])
def test_refresh_lower_bounds(length, tera, ms):
    work = refresh(length)
    assert f"{flops(work) / 1e12:.2f}" == tera
    assert printed(work) == [(cell, "C") for cell in ms]


@pytest.mark.parametrize(("length", "n", "tera", "giga", "cells"), DATA["reuse_lower_bounds"])
def test_reuse_lower_bounds(length, n, tera, giga, cells):
    work = reuse(length, n)
    digits = len(tera.split(".")[1])
    assert f"{flops(work) / 1e12:.{digits}f}" == tera
    assert f"{lower_bound_bytes(Roofline(LLADA_8B, L40S), work) / 1e9:.1f}" == giga
    assert [(cell[:-1], cell[-1]) for cell in cells.split()] == printed(work)


WORKS = st.builds(
    StepWork,
    query_rows=st.integers(1, 16384),
    attention_pairs=st.integers(0, 10**8),
    logit_rows=st.integers(0, 4096),
    kv_read_rows=st.integers(0, 10**5),
    kv_written_rows=st.integers(0, 10**4),
    num_sequences=st.integers(1, 256),
    prompts=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 2000)), max_size=3),
    decoding=st.integers(0, 64),
    context=st.integers(0, 10**6),
    padding=st.tuples(st.integers(0, 3), st.integers(1, 64)),
    logit_chunks=st.integers(1, 8),
    copied_logit_bytes=st.integers(0, 10**9),
    **{name: st.just(0) for name in StepWork._fields if name.startswith("extra_")},
    new_layout=st.integers(0, 1),
    builds=st.integers(0, 1),
)
ROOFLINES = st.builds(Roofline, st.sampled_from([LLADA_8B, DREAM_7B, MIXTRAL_8X7B]), st.sampled_from(CARDS))


@given(ROOFLINES, WORKS)
def test_no_step_beats_the_lower_bound(roofline, work):
    cost = roofline.step_time(work)
    assert cost.total_s >= roofline.lower_bound_s(work) * (1 - 1e-12)
    assert cost.total_s == cost.linear_s + cost.attention_s + cost.logits_s + cost.overhead_s


@given(ROOFLINES, WORKS, st.floats(0.05, 1), st.floats(0.05, 1), st.floats(0.05, 1), st.floats(0, 0.1))
def test_each_constant_slows_only_what_it_names(roofline, work, matmul, attention, bandwidth, overhead):
    ideal = roofline.step_time(work)

    def cost(**changes):
        calibration = replace(roofline.calibration, **changes)
        return Roofline(roofline.shape, roofline.gpu, calibration).step_time(work)

    assert cost(step_overhead_s=overhead).total_s == pytest.approx(ideal.total_s + overhead)
    by_matmul = cost(matmul_efficiency=matmul)
    assert by_matmul.attention_s == ideal.attention_s
    assert by_matmul.linear_s >= ideal.linear_s
    assert by_matmul.logits_s >= ideal.logits_s
    by_attention = cost(attention_efficiency=attention)
    assert (by_attention.linear_s, by_attention.logits_s) == (ideal.linear_s, ideal.logits_s)
    everything = cost(matmul_efficiency=bandwidth, attention_efficiency=bandwidth, bandwidth_efficiency=bandwidth)
    assert everything.total_s == pytest.approx(ideal.total_s / bandwidth)


def test_calibration_round_trip(tmp_path):
    calibration = Calibration(
        gpu="l40s",
        matmul_efficiency=0.5,
        attention_efficiency=0.25,
        bandwidth_efficiency=0.75,
        step_overhead_s=0.02,
        fitted_on=("table4/Burst/dLLM-Serve",),
        note="one cell",
    )
    path = tmp_path / "fits" / "l40s.json"
    save_calibration(calibration, path)
    assert Calibration.load(path) == calibration
    assert [file.name for file in path.parent.iterdir()] == ["l40s.json"]
    none = Calibration.datasheet(L40S)
    assert (none.fitted_on, none.text) == ((), none.note)
    assert "uncalibrated" in none.note


@pytest.mark.parametrize(("change", "message"), DATA["bad_calibrations_are_refused"])
def test_bad_calibrations_are_refused(tmp_path, change, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**asdict(Calibration.datasheet(L40S)), **change}))
    with pytest.raises(UserError, match=message):
        Calibration.load(path)


def test_calibration_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Calibration.load(tmp_path / "none.json")
    path = tmp_path / "bad.json"
    for text, message in (("{", "is not JSON"), ("[]", "must be one JSON object"), ('{"gpu": "l40s"}', "lacks")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            Calibration.load(path)
    with refuses("gpu='l40s'"):  # of another card
        Roofline(LLADA_8B, RTX4090, Calibration.datasheet(L40S))
