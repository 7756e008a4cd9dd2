"""Equal tuning: every system's search is of the same size and on seeds of its own, and a tuned run is that of what it chose."""

from collections import Counter
from dataclasses import replace

import pytest
from support.cells import a_cell
from support.refusals import refuses

from engines.errors import UserError
from repro.families.cluster.laps_record import PREFILL, score
from repro.runs import tuning
from repro.runs.cell import Cell, Scalar
from repro.runs.experiment import check_device, prepare
from repro.runs.record import RunRecord
from repro.runs.system import SYSTEMS, TuneKnobs, free_of, settings_of
from repro.runs.tuning import CANDIDATES, TRIALS, TUNING_SEED, candidates, successive_halving

TUNABLE = [name for name in SYSTEMS if free_of(name)]
PREFILL_SYSTEMS = [name for name in TUNABLE if SYSTEMS.get(name).family is PREFILL]


def cell(system: str, rate: float | None = 60.0, **knobs: Scalar) -> Cell:
    given = {"num_prompts": 120, "transient": True, **knobs}
    return a_cell(system, dataset="lmsys-chat-1m", platform="h200", executor="roofline", rate=rate, **given)


@pytest.mark.parametrize("num", [2, 4, 8, 16])
def test_a_search_has_as_many_trials_however_many_candidates(num):
    seen: list[tuple[int, int]] = []

    def trial(candidate: int, sample: int) -> tuple[float, ...]:
        seen.append((candidate, sample))
        return (float(candidate != num - 2), 0.0)

    assert successive_halving(range(num), trial) == num - 2
    assert len(seen) == len(set(seen)) == TRIALS
    shared = Counter(candidate for candidate, _ in seen)
    # The winner and the last that was dropped met every sample there was.
    assert shared.most_common(2)[0][1] == shared.most_common(2)[1][1] == 1 + max(sample for _, sample in seen)


def test_half_are_dropped_by_the_mean_so_far_and_equals_by_their_place():
    rounds: dict[int, list[int]] = {}

    def trial(candidate: int, sample: int) -> tuple[float, ...]:
        rounds.setdefault(sample, []).append(candidate)
        # 3 is best on the first sample alone.
        return (-1.0 if (candidate, sample) == (3, 0) else float(candidate % 4), 0.0)

    assert successive_halving(range(16), trial) == 0
    assert [rounds[sample] for sample in (0, 1, 3)] == [[*range(16)], [0, 1, 3, 4, 5, 8, 9, 12], [0, 4, 8, 12]]
    assert successive_halving("ab", lambda which, sample: (1.0, 0.0)) == "a"
    assert successive_halving("ab", lambda which, sample: (1.0, float(which == "a"))) == "b"


def test_what_a_cell_sets_or_what_has_no_effect_in_it_is_not_free():
    assert candidates(cell("sglang-pd"))[0] == ()
    assert {dict(each).get("max_num_batched_tokens") for each in candidates(cell("sglang-pd"))} == {
        *(None, 2048, 4096, 16384)
    }
    for instances, expected in ((1, False), (8, True)):
        tried = candidates(cell("laps", num_instances=instances))
        assert len(tried) == CANDIDATES
        assert any("num_short" in dict(each) for each in tried) is expected
    held = candidates(cell("laps", chunk_tokens=4096, wait="guarded"))
    assert all({"chunk_tokens", "wait", "max_window_s"}.isdisjoint(dict(each)) for each in held)
    assert len(held) == 2


@pytest.mark.parametrize("system", PREFILL_SYSTEMS)
def test_whatever_a_table_says_can_be_set_and_changes_a_run(system):
    """On one instance, on eight, or on one that falls behind for long."""
    asked_for = (
        cell(system, 80.0),
        cell(system, 600.0, num_instances=8, num_prompts=900),
        cell(system, 110.0, num_prompts=900),
    )
    for each in free_of(system):
        for asked in asked_for:
            plain = prepare(asked).run()
            settings = [dict(setting) for setting in each.among(asked)]
            possible = [setting for setting in settings if tuning.is_possible(asked, tuple(setting.items()))]
            changed = [
                prepare(Cell.from_dict({**asked.to_dict(), "knobs": {**asked.knob_values, **setting}})).run()
                for setting in possible
            ]
            if len(possible) == len(settings) and any(run.tables != plain.tables for run in changed):
                break
        else:
            pytest.fail(f"{system}: {each.what} changes nothing")


def test_a_tuned_run_is_that_of_what_its_search_chose(monkeypatch):
    seeds = []
    prepared = SYSTEMS.get("laps").__class__.prepare

    def noted(self, asked, part=None):
        seeds.append(asked.seed)
        return prepared(self, asked, part)

    monkeypatch.setattr(SYSTEMS.get("laps").__class__, "prepare", noted)
    tuned = cell("laps", 80.0, tune="search", wait="off")
    experiment = prepare(tuned)
    record = experiment.run()
    told = record.facts["tuned"]
    assert told["trials"] == TRIALS
    assert told["chosen"]
    trials = [seed for seed in seeds if seed >= TUNING_SEED]
    assert len(trials) == TRIALS
    by_hand = Cell.from_dict(
        {
            **cell("laps", 80.0, wait="off").to_dict(),
            "knobs": {**dict(cell("laps", 80.0, wait="off").knobs), **told["chosen"]},
        }
    )
    assert prepare(by_hand).run().tables == record.tables
    # The seeds of a cell share a search.
    seeds.clear()
    assert prepare(tuned.with_seed(5)).run().facts["tuned"] == told
    assert not [seed for seed in seeds if seed >= TUNING_SEED]


def test_a_search_is_no_worse_than_the_defaults_where_they_are_poor():
    """7B at nine tenths: LAPS's wait of a second is beyond the objective."""
    late = {
        tune: score(prepare(cell("laps", 150.0, model="Qwen2.5-7B", num_prompts=1000, tune=tune)).run())[0]
        for tune in ("off", "search")
    }
    assert late["search"] < 0.6 * late["off"]


@pytest.mark.parametrize(("turns", "instances", "tried"), [(15_000, 1, 3000), (15_000, 8, 15_000), (2000, 1, 2000)])
def test_trials_of_long_runs_are_short_ones(turns, instances, tried):
    own = cell("sglang-pd", num_prompts=turns, num_instances=instances)
    assert PREFILL.trial(own).requested["num_prompts"] == tried
    assert PREFILL.trial(own).without("num_prompts") == own.without("num_prompts")


def test_off_is_as_printed_and_a_stored_run_knows_what_was_searched():
    plain, off, search = (prepare(cell("sglang-pd", **own)) for own in ({}, {"tune": "off"}, {"tune": "search"}))
    assert off.run().tables == plain.run().tables
    assert len({each.cell.key for each in (plain, off, search)}) == 3
    assert search.deployment.basis != plain.deployment.basis


def test_baselines_of_diffusion_llms_are_tuned_alike():
    """Batches that hold their own longest request serve Burst faster than one size for all; on dLLM-Serve's engine there is none, and
    what is free of dLLM-Serve is free of them."""

    def run(**knobs: Scalar) -> RunRecord:
        return prepare(
            a_cell(
                "fast-dllm", dataset="burst", platform="l40s", executor="roofline", rate=None, num_prompts=12, **knobs
            )
        ).run()

    check_device(a_cell("fast-dllm", dataset="burst", platform="l40s", executor="roofline", rate=None, tune="search"))
    tuned = run(tune="search")
    assert tuned.facts["tuned"] == {"chosen": {"batch_rule": "batch"}, "candidates": 4, "trials": TRIALS}
    assert tuned.tables == run(batch_rule="batch").tables
    held = run(tune="search", reading="policy")
    assert held.facts["tuned"] == {
        "chosen": {},
        "candidates": 4,
        "trials": TRIALS,
    }  # 12 requests are fewer than any allows
    packed = a_cell("fast-dllm", dataset="burst", platform="l40s", executor="roofline", rate=None, reading="policy")
    assert candidates(packed) == candidates(replace(packed, system="dllm-serve", knobs=()))


def test_a_search_is_refused_where_there_is_none():
    with pytest.raises(UserError, match="declares no free knobs"):
        prepare(cell("laps-graphs-only", tune="search"))
    with refuses("tune='best'"):
        prepare(cell("laps", tune="best"))
    measured = a_cell("laps", dataset="lmsys-chat-1m", platform="cpu-tiny", executor="torch", rate=None, tune="search")
    with pytest.raises(UserError, match="simulated"):
        prepare(measured)


@pytest.mark.parametrize("system", TUNABLE)
def test_a_system_with_free_knobs_can_be_tuned(system):
    assert TuneKnobs in settings_of(system)
    assert SYSTEMS.get(system).family.score is not None
