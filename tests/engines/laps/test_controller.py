"""Algorithm 2 by hand, on pools of fluid, and in a run whose load changes."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prefill import chat, h200_14b, summarise
from support.refusals import refuses

from engines.errors import UserError
from engines.laps.batching import WaitConfig
from engines.laps.cluster import OpenTurns, PrefillCluster, PrefillRun, Turn
from engines.laps.system import ControllerConfig, LapsConfig, Pooling, PressureController, Signals, Spatial, laps

COST, MODEL = h200_14b()
N = 8


def pool(*utilisation: float, backlog_s: float = 0.0) -> list[Signals]:
    return [Signals(backlog_s, 0.0, each) for each in utilisation]


def test_algorithm_2_by_hand():
    control = PressureController(ControllerConfig(tau=0.3, cooldown_s=5.0, n_min=2, gamma=1.0, window_s=0.0))
    steps = [
        (0.0, pool(0.5, 0.5, 0.5), pool(0.5, 0.5, 0.5), None),  # balanced
        (1.0, pool(0.8, 0.8, 0.8), pool(0.65, 0.65, 0.65), None),  # 0.8 < 1.3 x 0.65: hysteresis
        (1.5, pool(0.9, 0.9, 0.9), pool(0.5, 0.5, 0.5), None),  # 0.9 x 3/4 < 0.5 x 3/2: it would come back
        (2.0, pool(0.9, 0.9, 0.9), pool(0.4, 0.4, 0.4), "short"),
        (6.9, pool(0.2, 0.2, 0.2, 0.2), pool(0.9, 0.9), None),  # cool-down
        (7.0, pool(0.9, 0.9, 0.9, 0.9), pool(0.2, 0.2), None),  # the long pool is at n_min
        (7.0, pool(0.2, 0.2, 0.2, 0.2), pool(0.9, 0.9), "long"),
        (12.0, pool(0.2, 0.2), pool(0.9, 0.9, 0.9, 0.9), None),  # the short pool is at n_min
    ]
    for now, shorts, longs, expected in steps:
        assert control.decide(shorts, longs, now).grows == expected, now


def test_a_move_after_which_both_pools_are_alike_is_made():
    control = PressureController(ControllerConfig(gamma=1.0, window_s=0.0))
    assert control.decide(pool(1.0), pool(0.25, 0.25), 0.0).grows == "short"


def test_nothing_moves_before_an_average_is_whole():
    """Nor after a move, which begins new ones; until then it is the mean."""
    config = ControllerConfig(tau=0.3, cooldown_s=0.0, gamma=1.0, window_s=3.0)
    control = PressureController(config)
    found = [control.decide(pool(0.9, 0.9, now / 5), pool(0.1, 0.1, 0.1), float(now)) for now in range(6)]
    assert [each.grows for each in found] == [None, None, "short"] * 2
    config = ControllerConfig(gamma=1.0, window_s=3.0)
    control = PressureController(config)
    found = [control.decide(pool(each), pool(0.1), 0.0).short_pressure for each in (0.9, 0.3)]
    assert found == pytest.approx([0.9, 0.6])


def test_printed_both_pools_exceed_each_other_when_calm():
    """-0.45 > 1.3 x -0.50, and -0.50 > 1.3 x -0.45: the first branch wins every time."""
    for shorts, longs in ((pool(0.9, 0.9), pool(1.0, 1.0)), (pool(1.0, 1.0), pool(0.9, 0.9))):
        control = PressureController(ControllerConfig(form="printed", tau=0.3, gamma=0.5))
        assert control.decide(shorts, longs, 0.0).grows == "short"
        mended = PressureController(ControllerConfig(tau=0.3, gamma=0.5))
        assert mended.decide(shorts, longs, 0.0).grows is None


signals = st.builds(Signals, st.floats(0, 10), st.floats(0, 1), st.floats(0, 1))


@given(
    rounds=st.lists(st.tuples(st.lists(signals, min_size=N, max_size=N), st.floats(0, 20)), max_size=40),
    n_min=st.integers(1, 3),
    form=st.sampled_from(["printed", "mended"]),
    start=st.integers(3, 5),
)
def test_whatever_the_signals_no_pool_falls_below_n_min_and_moves_keep_apart(rounds, n_min, form, start):
    control = PressureController(ControllerConfig(form=form, n_min=n_min, cooldown_s=5.0))
    num_short, now, last = start, 0.0, -10.0
    for each, gap in rounds:
        now += gap
        grows = control.decide(each[:num_short], each[num_short:], now).grows
        if grows is None:
            continue
        num_short += 1 if grows == "short" else -1
        assert n_min <= num_short <= N - n_min
        assert now - last >= 5.0
        last = now


def fluid(control: PressureController, num_short: int, loads: list[tuple[float, float]]) -> list[int]:
    """Pools fed ``loads`` (short, long), in instances' worth of work a second: n_s after every second."""
    backlog = [0.0, 0.0]
    history = []
    for now, load in enumerate(loads):
        sizes = (num_short, N - num_short)
        pools = []
        for index, (size, offered) in enumerate(zip(sizes, load, strict=True)):
            work = backlog[index] + offered
            backlog[index] = max(0.0, work - size)
            wait_s = backlog[index] / size
            pools.append([Signals(wait_s, float(wait_s > 0.4), min(1.0, work / size))] * size)
        grows = control.decide(pools[0], pools[1], float(now)).grows
        num_short += {"short": 1, "long": -1, None: 0}[grows]
        history.append(num_short)
    return history


@settings(max_examples=30)
@given(short=st.floats(0.4, 3.4), total=st.floats(1.0, 6.0), start=st.integers(1, 7))
def test_mended_settles_under_constant_load_and_keeps_up_with_it(short, total, start):
    long = max(total - short, 0.4)
    history = fluid(PressureController(ControllerConfig()), start, [(short, long)] * 600)
    settled = history[240:]
    moves = sum(before != after for before, after in pairwise(settled))
    assert moves <= 6  # one a minute
    assert settled[-1] >= short
    assert N - settled[-1] >= long


def spatial(config: ControllerConfig | None, num_short: int, pooling: Pooling = "global") -> LapsConfig:
    return LapsConfig(
        wait=WaitConfig(wait="off"), spatial=Spatial(num_short=num_short, controller=config, pooling=pooling)
    )


def simulate(config: LapsConfig, arrivals: OpenTurns, until_s: float) -> PrefillRun:
    return PrefillCluster(system=laps(MODEL, config), cost=COST, num_instances=N).simulate(arrivals, until_s=until_s)


@pytest.mark.parametrize("pooling", ["global", "each"])
def test_a_run_under_constant_load_moves_at_most_once_a_minute(pooling):
    arrivals = chat(200.0, 60.0, seed=6)
    mended = simulate(spatial(ControllerConfig(), 3, pooling), arrivals, 60.0)
    printed = simulate(spatial(ControllerConfig(form="printed", tau=0.3), 3, pooling), arrivals, 35.0)
    assert len(mended.moves["time_s"]) <= 1
    assert len(printed.moves["time_s"]) >= 6
    assert all(1 <= num <= N - 1 for num in printed.moves["num_short"])


def test_a_run_follows_a_load_step():
    """Long requests come to hold nearly all of the work: the short pool shrinks and stays, and violations fall below static's."""
    before, after = chat(200.0, 20.0, seed=6, long_share=0.2), chat(200.0, 40.0, seed=7, long_share=0.57)
    turns = [*before.turns, *(turn._replace(arrival_s=turn.arrival_s + 20.0) for turn in after.turns)]
    arrivals = OpenTurns(turns=turns)
    moving = simulate(spatial(ControllerConfig(), 4), arrivals, 60.0)
    static = simulate(spatial(None, 4), arrivals, 60.0)
    assert set(moving.moves["to"]) == {"long"}
    assert moving.moves["time_s"][-1] < 50.0
    assert moving.instances["pool"].count("short") == moving.moves["num_short"][-1] < 4
    assert summarise(moving, 20.0).violation_rate < 0.5 * summarise(static, 20.0).violation_rate


@pytest.mark.parametrize("pooling", ["global", "each"])
def test_migrations_lose_no_request(pooling):
    """Half-second bursts of one class, then of the other, send instances back and forth with work in hand."""
    turns: list[Turn] = []
    for burst in range(10):
        each = chat(150.0, 0.5, seed=burst, long_share=burst % 2).turns
        turns += [turn._replace(arrival_s=turn.arrival_s + burst * 0.5, session_id=len(turns)) for turn in each]
    config = ControllerConfig(tau=0.0, period_s=0.05, cooldown_s=0.05, window_s=0.0)
    run = simulate(spatial(config, 4, pooling), OpenTurns(turns=turns), 20.0)
    assert set(run.moves["to"]) == {"short", "long"}
    assert len(run.moves["time_s"]) > 20
    assert None not in run.requests["finished_s"]
    assert sum(run.steps["tokens"]) == sum(run.requests["tokens"])
    assert sum(run.steps["num_finished"]) == len(run.requests["request_id"])


def test_bad_configurations_are_refused():
    with pytest.raises(UserError, match="give an end"):
        simulate(spatial(ControllerConfig(), 3), chat(1.0, 1.0, seed=0), float("inf"))
    with refuses("num_short=8"):
        simulate(spatial(None, 8), chat(1.0, 1.0, seed=0), 1.0)
