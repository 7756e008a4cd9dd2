"""Simulations that follow a measured run in which a model decided how steps went."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.refusals import refuses
from support.tables import data_beside

import repro
from engines.dllm.config import GenerationConfig, Phase
from engines.dllm.plan import Request
from engines.dllm.simulated import BlockSteps, Replayed, redraw
from engines.errors import UserError
from repro.families.dllm.record import BLOCKS, STEPS
from repro.files import forget
from repro.runs.cell import BASIS
from repro.runs.record import REQUESTS
from repro.runs.store import StoredRun

DATA = data_beside(__file__, "replay")

LENGTHS = {"gen_length": 32, "block_length": 16, "num_prompts": 5}
WAYS = DATA["ways"]
SCHEDULE = ("num_refresh", "num_reuse", "query_tokens", "committed_tokens", "num_running", "num_finished")


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mine")


@pytest.fixture(scope="module", params=WAYS)
def measured(mine: Path, request: pytest.FixtureRequest) -> StoredRun:
    knobs = {**LENGTHS, "steps": 32, "max_num_batched_tokens": 400, **WAYS[request.param]}
    return repro.run("dllm-serve", "osc", result_dir=mine / "runs", **knobs)


def replayed(measured: StoredRun, mine: Path, **other: object) -> StoredRun:
    given = {"num_prompts": 5, "max_num_batched_tokens": 400, "replay": str(measured.file), **other}
    return repro.run("dllm-serve", "osc", platform="l40s", result_dir=mine / "simulated", **given)


def test_it_runs_the_same_steps(measured, mine):
    simulated = replayed(measured, mine)
    ours, theirs = simulated.table(STEPS), measured.table(STEPS)
    for name in SCHEDULE:
        assert ours[name] == theirs[name], name
    assert simulated.table(BLOCKS) == measured.table(BLOCKS)
    assert simulated.record.requests["output_len"] == measured.record.requests["output_len"]
    assert simulated.obtained == "composed"


def test_another_scheduler_runs_what_is_due_in_other_steps(measured, mine):
    ours = replayed(measured, mine, scheduler="request").table(STEPS)
    theirs = measured.table(STEPS)
    for name in ("num_refresh", "committed_tokens", "num_finished"):
        assert sum(ours[name]) == sum(theirs[name])
    assert len(ours["step"]) > len(theirs["step"])


def test_a_replay_is_another_run_where_what_it_follows_is(measured, mine, tmp_path):
    first, place = replayed(measured, mine), tmp_path / "run.jsonl.gz"
    place.write_bytes(measured.file.read_bytes())
    as_it_was = replayed(measured, mine, replay=str(place))
    other = repro.run("dllm-serve", "osc", result_dir=mine / "runs", **LENGTHS, steps=32, threshold=0.5)
    place.write_bytes(other.file.read_bytes())
    forget()
    assert as_it_was.cell.knob_values[BASIS] == first.cell.knob_values[BASIS]
    assert replayed(measured, mine, replay=str(place)).cell.knob_values[BASIS] != first.cell.knob_values[BASIS]


def test_other_requests_than_the_run_s_are_refused(measured, mine):
    with pytest.raises(UserError, match="ask for others"):
        replayed(measured, mine, block_length=8, steps=32)
    asked = {"platform": "l40s", "num_prompts": 5, "result_dir": mine, "replay": str(measured.file)}
    with refuses("dataset='burst'"):
        repro.run("dllm-serve", "burst", **asked)
    with refuses("seed=1"):
        repro.run("dllm-serve", "osc", seed=1, **asked)
    with refuses("system='llada'"):
        repro.run("llada", "osc", reading="policy", **asked)
    with pytest.raises(UserError, match=r"none\.gz' does not exist"):
        replayed(measured, mine, replay=str(mine / "none.gz"))
    with refuses("replay_drawn=true"):
        repro.run("dllm-serve", "osc", platform="l40s", result_dir=mine, num_prompts=2, replay_drawn=True)


def test_the_first_of_the_requests_can_be_followed_alone(measured, mine):
    run = replayed(measured, mine, num_prompts=2)
    ours, theirs = run.table(BLOCKS), measured.table(BLOCKS)
    assert set(ours["request_id"]) == {0, 1}
    assert [ours[name] for name in ours] == [theirs[name][: len(ours["block"])] for name in ours]
    told, whole = (each.manifest["facts"]["dataset"] for each in (run, measured))
    lengths = run.table(REQUESTS)["prompt_len"]
    assert told["lengths"]["n"] == 2
    assert (told["lengths"]["mean"], told["lengths"]["max"]) == (sum(lengths) / 2, max(lengths))
    assert "the first 2 of these 5 requests" in told["description"]
    assert [told[name] for name in ("source", "location", "seed", "length_scale")] == [
        whole[name] for name in ("source", "location", "seed", "length_scale")
    ]
    assert told["checksum"] != whole["checksum"]
    with refuses("num_prompts=6"):
        replayed(measured, mine, num_prompts=6)


def test_a_run_whose_steps_are_fixed_beforehand_needs_no_replay(mine):
    run = repro.run("dllm-serve", "osc", result_dir=mine / "runs", **LENGTHS, steps=32)
    with pytest.raises(UserError, match="says nothing of its steps, which its settings fix beforehand"):
        repro.run("dllm-serve", "osc", platform="l40s", result_dir=mine, **LENGTHS, steps=32, replay=str(run.file))


def test_blocks_are_drawn_as_often_as_they_were_measured():
    """Two kinds of block, one in four: a closed form for the share, and for steps a block."""
    fast = BlockSteps((Phase.BUILD,), (4,))
    slow = BlockSteps((Phase.BUILD, Phase.REUSE, Phase.REUSE), (2, 1, 1))
    generation = GenerationConfig(gen_length=40, block_length=4, steps=40)
    requests = [Request(request_id=i, prompt_len=9, generation=generation) for i in range(400)]
    found = redraw([(fast, slow), (slow, slow)], requests, seed=3)
    blocks = [block for path in found.paths.values() for block in path]
    share = sum(block == fast for block in blocks) / len(blocks)
    assert len(blocks) == 4000
    assert share == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 4000))
    again = redraw([(fast, slow), (slow, slow)], requests[7:9], seed=3)
    assert again.paths == {i: found.paths[i] for i in (7, 8)}  # whoever else asks
    assert redraw([(fast, slow), (slow, slow)], requests, seed=4) != found
    with pytest.raises(UserError, match="no block of 8 tokens, only of 4"):
        redraw([(fast,)], [Request(request_id=0, prompt_len=1, generation=GenerationConfig(block_length=8))], seed=0)


def test_drawn_blocks_price_other_requests(measured, mine):
    simulated = replayed(
        measured, mine, replay_drawn=True, num_prompts=40, gen_length=64, steps=64, max_num_batched_tokens=4000
    )
    ours = simulated.table(BLOCKS)
    theirs = measured.table(BLOCKS)
    assert len(ours["block"]) == 40 * 4
    assert as_asked(ours) <= as_asked(theirs)


def as_asked(blocks: Mapping[str, Sequence[str]]) -> set[tuple[str, str]]:
    """Phases as a rule gives them, and commits: where a block stands says which Refresh is partial."""
    return {(p.replace("p", "b"), c) for p, c in zip(blocks["phases"], blocks["committed"], strict=True)}


def test_a_path_that_does_not_fit_is_refused():
    request = Request(request_id=1, prompt_len=4, generation=GenerationConfig(gen_length=8, block_length=4, steps=8))
    whole = BlockSteps((Phase.BUILD,), (4,))
    Replayed(paths={1: (whole, whole)}).check(request)
    Replayed(paths={1: (whole._replace(stop=2),)}).check(request)
    for path in ((whole,), (whole, BlockSteps((Phase.BUILD,), (3,)))):
        with pytest.raises(UserError, match="ask for others"):
            Replayed(paths={1: path}).check(request)
    with pytest.raises(UserError, match="no request 1"):
        Replayed(paths={}).check(request)
