"""The compiled core and the Python that it stands for: the same runs of prefill instances, to the last bit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, get_args
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.ar.sglang import PdConfig, Routing, SglangConfig, graphs_only, sglang, vllm_pd
from engines.cluster import core as cluster_core
from engines.cluster.sessions import ClosedLoop, OpenLoop, Round, Session
from engines.compiled import CompilerError, load_library
from engines.cost.roofline import gpu
from engines.laps import core
from engines.laps.batching import (
    ClassRule,
    Graphs,
    Joins,
    LongDispatch,
    TemporalConfig,
    WaitConfig,
    WaitRule,
    shapes_of,
)
from engines.laps.cluster import OpenTurns, PrefillCluster, PrefillConstants, PrefillCost, PrefillRun, Turn, cost_of
from engines.laps.latency import StepModel
from engines.laps.ours import OnTimeConfig, ReserveConfig, StepSize
from engines.laps.system import (
    ControllerConfig,
    Form,
    LapsConfig,
    Pooling,
    PrefillSystem,
    Spatial,
    edf,
    laps,
    moore_hodgson,
    on_time,
    reserve,
    srpt,
)
from engines.models.shape import model_shape

try:
    load_library(core.LIBRARY)
except CompilerError as error:
    pytest.skip(f"no core: {error}", allow_module_level=True)

GRAPHS = get_args(Graphs)


@pytest.fixture(autouse=True, scope="module")
def any_length() -> Iterator[None]:
    with patch.object(cluster_core, "LONG", 0):
        yield


def cost(kappa: float = 0.0) -> PrefillCost:
    return cost_of(model_shape("Qwen2.5-7B"), gpu("h200"), PrefillConstants(kappa=kappa), "sglang")


@cache
def model(graphs: Graphs) -> StepModel:
    return StepModel.profile(cost(), shapes_of(graphs))


slos = st.sampled_from([0.05, 0.4, None])
sizes = {"backlog_share": st.sampled_from([0.0, 0.15, 2.0]), "misjudged": st.sampled_from([0.0, 0.5])}
temporal = st.builds(
    TemporalConfig,
    chunk_tokens=st.sampled_from([100, 2048]),
    long_dispatch=st.sampled_from(get_args(LongDispatch)),
    class_rule=st.sampled_from(get_args(ClassRule)),
    max_long_wait_s=st.sampled_from([0.0, 0.05, 1.0]),
    short_tokens=st.sampled_from([64, 8192]),
    joins=st.sampled_from(get_args(Joins)),
    while_waiting=st.sampled_from(["long", "idle"]),
)


KINDS = ("sglang", "vllm-pd", "graphs-only", "srpt", "edf", "moore-hodgson", "reserve", "on-time", "laps")
agings = st.sampled_from([0.05, 5.0])


@st.composite
def systems(draw: st.DrawFn, kind: str, num: int, cache_kind: str) -> PrefillSystem:
    graphs, slo_s = draw(st.sampled_from(GRAPHS)), draw(slos)
    pd = {
        "routing": draw(st.sampled_from(get_args(Routing))),
        "max_num_batched_tokens": draw(st.sampled_from([64, 4096])),
    }
    if kind == "sglang":
        return sglang(SglangConfig(prefill_graphs=draw(st.booleans()), **pd), model("ladder"))
    if kind == "vllm-pd":
        return vllm_pd(PdConfig(**pd))
    if kind == "graphs-only":
        return graphs_only(model(graphs), graphs=graphs) if graphs != "none" else sglang()
    size = StepSize(**{name: draw(each) for name, each in sizes.items()})
    if kind in ("srpt", "edf"):
        return {"srpt": srpt, "edf": edf}[kind](model(graphs), size, graphs=graphs)
    if kind == "moore-hodgson":
        return moore_hodgson(model(graphs), size, slo_s=slo_s, graphs=graphs)
    if kind == "reserve":
        config = ReserveConfig(slo_s=slo_s, share=draw(st.sampled_from([0.1, 0.5])), aging=draw(agings), **vars(size))
        return reserve(model(graphs), config, graphs=graphs)
    if kind == "on-time":
        own: dict[str, Any] = {name: draw(each) for name, each in sizes.items()} | {"aging": draw(agings)}
        own |= {"share": draw(st.sampled_from([0.125, 1.0])), "haste": draw(st.sampled_from([0.0, 0.8]))}
        return on_time(model(graphs), OnTimeConfig(slo_s=slo_s, patience=0.5, **own), graphs=graphs)
    form, pooling = draw(st.sampled_from(get_args(Form))), draw(st.sampled_from(get_args(Pooling)))
    controller = ControllerConfig(form=form, period_s=0.1, cooldown_s=0.2, tau=0.1, window_s=0.2)
    spatial = (
        Spatial(num_short=draw(st.integers(1, num - 1)), controller=controller, pooling=pooling) if num > 1 else None
    )
    if spatial is not None and cache_kind == "instance":
        spatial = replace(spatial, pooling="each")
    wait = WaitConfig(wait=draw(st.sampled_from(get_args(WaitRule))), min_window_s=draw(st.sampled_from([0.0, 2e-3])))
    config = LapsConfig(slo_s=slo_s, graphs=graphs, wait=wait, temporal=draw(temporal), spatial=spatial)
    return laps(model(graphs), config)


rounds = st.builds(
    Round, st.sampled_from([1, 7, 60, 200, 255, 900, 5000]), st.sampled_from([1, 50]), st.sampled_from([0.0, 0.1])
)


@st.composite
def streams(draw: st.DrawFn) -> Any:
    """Many turns at once, as policies differ in what they do about a queue."""
    kind, pace_s = draw(st.integers(0, 2)), draw(st.sampled_from([0.0, 0.01, 0.1]))
    drawn = draw(
        st.lists(st.lists(rounds, min_size=1, max_size=3), min_size=draw(st.sampled_from([1, 20])), max_size=30)
    )
    if kind == 0:
        turns = [Turn(i * pace_s, i // 2, i % 2, 40 * i, each[0][0], 30 * i) for i, each in enumerate(drawn)]
        return OpenTurns(turns=turns)
    sessions = tuple(Session(i, i * pace_s, tuple(each)) for i, each in enumerate(drawn))
    if kind == 1:
        return OpenLoop(sessions=sessions)
    return ClosedLoop(sessions=sessions, num_clients=draw(st.sampled_from([1, 8, 40])), think_s=pace_s)


def plain(run: PrefillRun) -> str:
    names = "requests", "steps", "moves", "instances"
    tables = {name: {column: list(values) for column, values in getattr(run, name).items()} for name in names}
    return repr((tables, run.facts))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_runs_are_those_of_python_to_the_last_bit(kind: str, data: st.DataObject) -> None:
    num, cache_kind = data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from(["shared", "instance"]))
    cluster = PrefillCluster(
        system=data.draw(systems(kind, num, cache_kind)),
        cost=cost(data.draw(st.sampled_from([0.0, 0.3]))),
        num_instances=num,
        slo_s=data.draw(slos),
        cache=cache_kind,
        reprefills_answer=data.draw(st.booleans()),
    )
    arrivals, until_s = [data.draw(streams()), data.draw(streams())], data.draw(st.sampled_from([0.3, 100.0]))
    compiled = cluster._compiled(arrivals, until_s)
    assert compiled is not None
    with patch.object(PrefillCluster, "_compiled", lambda *_: None):
        assert plain(compiled) == plain(cluster.simulate(arrivals, until_s=until_s))
