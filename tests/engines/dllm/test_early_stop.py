"""``stop_at_eos``: a request ends at its first finished block that holds a stop token, and nothing else changes."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine_runs import Recorder, rows_of, steps_of
from support.quiet_machine import submitted_in_time
from support.refusals import refuses
from support.tiny_models import GQA, LOUD, MHA, TinyModel, network, prompt_of, request_on
from typer.testing import CliRunner

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor
from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.cost.roofline import Roofline, gpu
from engines.dllm.config import DelayedCache, EngineConfig, GenerationConfig, NoCache, SparsityConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.plan import Request, StepOutcome, StepPlan, StepRecord
from engines.dllm.scheduling import SCHEDULERS, KvPool, PhaseScheduler, Scheduler
from engines.dllm.simulated import RooflineExecutor
from engines.errors import UserError
from engines.models.chat import stop_token_ids
from engines.models.checkpoint import TINY_DIR, read_config
from engines.models.shape import ModelShape
from repro.cli.main import app
from repro.families.cost import load_calibration
from repro.families.dllm.record import DLLM, drive_engine
from repro.families.dllm.system import method
from repro.runs.family import served_per_second
from repro.runs.step_driver import WallClock
from repro.tasks.mini import GENERATORS

Ids = tuple[int, ...]
Stop = tuple[Ids, int | None]
"""Generated ids, and how many of them up to and including the first stop token; None where none ended it."""
MAX_TOTAL = 40


def stopped_by_hand(ids: Ids, generation: GenerationConfig, stop_ids: frozenset[int], eos: int) -> Stop:
    """What early stopping makes of the ids of the whole generation."""
    for end in range(generation.block_length, generation.gen_length + generation.block_length, generation.block_length):
        places = [place for place, token in enumerate(ids[:end]) if token in stop_ids]
        if places:
            return ids[:end] + (eos,) * (generation.gen_length - min(end, generation.gen_length)), places[0] + 1
    return ids, None


def drive(engine: Engine, arrivals: Sequence[tuple[int, Request]]) -> tuple[dict[int, Stop], list[StepRecord]]:
    """``arrivals`` are (engine step, request). Rows and slots must all be free in the end."""
    outputs, records = {}, []
    for record in steps_of(engine, arrivals):
        records.append(record)
        lengths = dict(record.done.stopped)
        assert lengths.keys() <= set(record.done.finished)
        for request_id in record.done.finished:
            ids = engine.take_output(request_id)
            assert ids is not None
            outputs[request_id] = ids, lengths.get(request_id)
    assert engine.scheduler.pool.used_rows == 0
    return outputs, records


class Watched(Recorder):
    def execute(self, plan: StepPlan) -> StepOutcome:
        """A stop is reported of blocks alone that have nothing left to commit, and lies in them."""
        outcome = super().execute(plan)
        done = {i.request_id: i for i, n in zip(plan.items, outcome.committed, strict=True) if n >= i.masks_left}
        assert all(done[i].block_start <= place < done[i].block_end for i, place in outcome.stops.items())
        return outcome


def serve(model: TinyModel, config: EngineConfig, kv_rows: int, stop_ids: frozenset[int]) -> Engine:
    scheduler = SCHEDULERS[config.scheduler](config, KvPool(kv_rows), DelayedCache(delay=config.sparsity.refresh_delay))
    return Engine(scheduler, Watched(packed_executor(network(model), config, kv_rows, stop_ids=stop_ids)))


@lru_cache(maxsize=4096)
def whole(model: TinyModel, request: Request, sparsity: SparsityConfig) -> Ids:
    """The ids of the whole generation, alone."""
    request = replace(request, request_id=0, generation=replace(request.generation, stop_at_eos=False))
    config = EngineConfig(max_num_seqs=1, max_model_len=MAX_TOTAL, sparsity=sparsity)
    engine = serve(model, config, rows_of(request, sparsity), frozenset({0}))
    return drive(engine, [(0, request)])[0][0][0]


@st.composite
def stop_sets(draw: st.DrawFn, model: TinyModel) -> frozenset[int]:
    """So many ids that about every third, tenth, ... request meets one early."""
    return frozenset(range(draw(st.integers(0, 3)), model.mask_id, draw(st.sampled_from((4, 12, 40)))))


@st.composite
def requests(draw: st.DrawFn, model: TinyModel, request_id: int, *, is_parallel: bool = True) -> Request:
    gen, block = draw(st.integers(1, 16)), draw(st.integers(1, 6))
    num_blocks = -(-gen // block)
    prompt_len = draw(st.integers(1, MAX_TOTAL - gen))
    rules: list[dict[str, float]] = [{}, {}, {"threshold": 0.3}, {"threshold": 0.9}, {"factor": 1.0}]
    generation = GenerationConfig(
        gen_length=gen,
        block_length=block,
        steps=draw(st.integers(num_blocks, max(num_blocks, gen + 3))),
        temperature=draw(st.sampled_from((0.0, 0.0, 1.0))),
        seed=draw(st.integers(0, 3)),
        stop_at_eos=draw(st.sampled_from((True, True, False))),
        **(draw(st.sampled_from(rules)) if is_parallel else {}),
    )
    prompt_ids = prompt_of(model, draw(st.integers(0, 99)), prompt_len)
    return Request(request_id=request_id, prompt_len=prompt_len, prompt_ids=prompt_ids, generation=generation)


# ---- dLLM-Serve ---------------------------------------------------------------------------------


@st.composite
def mixes(draw: st.DrawFn) -> tuple[TinyModel, EngineConfig, int, frozenset[int], list[tuple[int, Request]]]:
    model = draw(st.sampled_from((MHA, GQA, LOUD)))
    scheduler = draw(st.sampled_from(sorted(SCHEDULERS)))
    sparsity = SparsityConfig(
        selection=draw(st.sampled_from(("head", "head", "uniform", "dense"))),
        retention_ratio=draw(st.sampled_from((0.2, 0.5, 1.0))),
        refresh_delay=draw(st.sampled_from((0, 1))),
    )
    arrivals = [
        (draw(st.integers(0, 10)), draw(requests(model, i, is_parallel=scheduler != "lookahead")))
        for i in range(draw(st.integers(1, 6)))
    ]
    longest = max(request.total_len for _, request in arrivals)
    largest = max(rows_of(request, sparsity) for _, request in arrivals)
    config = EngineConfig(
        max_num_batched_tokens=longest + draw(st.sampled_from((0, 7, 40, 400))),
        max_num_logits=draw(st.sampled_from((2, 5, 64))),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=MAX_TOTAL,
        scheduler=scheduler,
        sparsity=sparsity,
    )
    return model, config, largest + draw(st.sampled_from((0, 3, 30, 300))), draw(stop_sets(model)), arrivals


@settings(max_examples=15)
@given(mixes())
def test_stopping_only_cuts_and_company_changes_nothing(mix):
    """Every finished block is that of the whole generation, whoever else runs and stops or does not."""
    model, config, kv_rows, stop_ids, arrivals = mix
    outputs, _ = drive(serve(model, config, kv_rows, stop_ids), arrivals)
    for _, request in arrivals:
        expected: Stop = whole(model, replace(request, request_id=0), config.sparsity), None
        if request.generation.stop_at_eos:
            expected = stopped_by_hand(expected[0], request.generation, stop_ids, model.config.eos_token_id)
            event("stopped" if expected[1] is not None else "ran to the end")
        assert outputs[request.request_id] == expected, request


def test_the_models_own_end_of_text_is_the_default():
    """Found in the ids of these seeds; no id is named to the executor."""
    generation = GenerationConfig(gen_length=32, block_length=4, steps=32, temperature=3.0)
    sparsity, eos = SparsityConfig(), LOUD.config.eos_token_id
    config = EngineConfig(max_num_seqs=1, max_model_len=96)
    for seed in (1, 14):
        plain = request_on(LOUD, 0, 9, replace(generation, seed=seed), seed=seed)
        request = replace(plain, generation=replace(plain.generation, stop_at_eos=True))
        found = []
        for asked in (plain, request):
            rows = rows_of(asked, sparsity)
            executor = packed_executor(network(LOUD), config, rows)
            found.append(drive(Engine(PhaseScheduler(config, KvPool(rows), DelayedCache()), executor), [(0, asked)]))
        (((ids, _),), records), ((stopped,), early) = ((list(out.values()), steps) for out, steps in found)
        assert stopped == stopped_by_hand(ids, generation, frozenset({eos}), eos)
        assert len(early) < len(records)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("rule", [{}, {"threshold": 0.5}, {"factor": 1.0}], ids=str)
def test_a_stop_frees_rows_and_slot_in_its_step(delay, rule):
    """The next request, for which there was no room, enters at the very next step."""
    sparsity = SparsityConfig(selection="head", refresh_delay=delay)
    generation = GenerationConfig(gen_length=20, block_length=4, steps=20, temperature=1.0, stop_at_eos=True, **rule)
    pair = [request_on(GQA, i, 12, generation) for i in (0, 1)]
    first = whole(GQA, pair[0], sparsity)
    start = next(start for start in (4, 8, 12) if set(first[start : start + 4]) - set(first[:start]))
    stop_ids, end = frozenset(set(first[start : start + 4]) - set(first[:start])), start + 4
    config = EngineConfig(max_num_seqs=1, max_model_len=MAX_TOTAL, sparsity=sparsity)
    outputs, records = drive(
        serve(GQA, config, rows_of(pair[0], sparsity), stop_ids), [(0, request) for request in pair]
    )
    assert outputs[0] == stopped_by_hand(first, generation, stop_ids, GQA.config.eos_token_id)
    assert outputs[0][0] == first[:end] + (GQA.config.eos_token_id,) * (20 - end)
    ends = [record.step for record in records if 0 in record.done.finished]
    starts = [record.step for record in records if 1 in record.plan.admitted]
    assert starts == [ends[0] + 1]
    assert sum(record.outcome.committed_tokens for record in records[: ends[0] + 1]) == end
    assert [record.done.first_block for record in records[: ends[0] + 1] if record.done.first_block] == [(0,)]


@pytest.mark.parametrize("rule", [{}, {"threshold": 0.5}], ids=str)
def test_one_transfer_and_only_where_it_can_matter(rule, monkeypatch):
    """Reading a tensor is a transfer, and a wait for the device. On a fixed schedule only steps that complete a block
    of a request that asked have one; parallel decoding has its one per step either way."""
    transfers: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> object:
        transfers.append(1)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    config = EngineConfig(max_num_seqs=4, max_model_len=MAX_TOTAL)
    for asked in ((), (1,), (0, 1)):
        engine = serve(GQA, config, 200, frozenset({GQA.config.eos_token_id}))
        for i in (0, 1):
            generation = GenerationConfig(gen_length=12, block_length=6, steps=12, stop_at_eos=i in asked, **rule)
            engine.submit(request_on(GQA, i, 9, generation))
        num_steps = 0
        while engine.has_work:
            transfers.clear()
            record = engine.step()
            assert record is not None
            completes = num_steps % 6 == 5 and bool(asked)
            # A finished request's ids are read once more.
            assert len(transfers) == (bool(rule) or completes) + len(record.done.finished)
            num_steps += 1


# ---- other samplers, one request at a time ------------------------------------------------------

ALONE = (
    ("llada", "llada", {}),
    ("sparse-dllm", "llada", {}),
    ("dllm-serve", "llada", {"compat": "upstream"}),
    ("fast-dllm", "llada", {"cache": "none"}),
    ("fast-dllm", "llada", {"cache": "prefix"}),
    ("fast-dllm", "llada", {"cache": "dual"}),
    ("fast-dllm", "dream", {"cache": "dual", "alg": "confidence_threshold"}),
    ("fast-dllm", "dream", {"cache": "prefix", "alg": "entropy"}),
    ("sparse-dllm", "dream", {"alg": "topk_margin"}),
    ("dllm-cache", "dream", {"alg": "origin"}),
)
"""System, family of its decode rule, options."""


@pytest.mark.parametrize("static", [False, True], ids=["alone", "static"])
@pytest.mark.parametrize("system", ALONE, ids=lambda system: "-".join((*system[:2], *system[2].values())))
@settings(max_examples=3)
@given(data=st.data())
def test_every_sampler_stops_at_a_finished_block(system, static, data):
    """Also those that may commit the mask token, run idle steps or leave the number of tokens to chance."""
    chosen = method(system[0]).sampler(*system[1:])
    model = data.draw(st.sampled_from((GQA, LOUD)))
    request = data.draw(requests(model, 0, is_parallel=chosen.decode.quota == "even" and not chosen.exact_steps))
    generation = request.generation
    if chosen.decode.first_step == "first_position":
        # One position in a block's first step: a single step would leave masks, and no block would be finished.
        generation = replace(generation, steps=max(generation.steps, 2 * generation.num_blocks))
        if chosen.decode.quota == "even":
            generation = replace(generation, threshold=generation.threshold or 0.9, factor=None)
    request = replace(request, generation=generation)
    stop_ids = data.draw(stop_sets(model))
    rows = rows_of(request, chosen.sparsity, chosen.rule.window) if chosen.rule.caches else 0
    config = EngineConfig(
        max_num_seqs=1,
        max_model_len=MAX_TOTAL,
        sparsity=chosen.sparsity,
        decode=chosen.decode,
        suppress_mask_token=chosen.suppress_mask_token,
    )

    def run(asked: bool) -> Stop:
        scheduler: Scheduler
        if static:
            scheduler = StaticBatchScheduler(
                config, KvPool(rows), chosen.rule, batch_size=1, exact_steps=chosen.exact_steps
            )
            executor = padded_executor(network(model), config, rows, batch_size=1, stop_ids=stop_ids)
        else:
            scheduler = PhaseScheduler(config, KvPool(rows), chosen.rule, exact_steps=chosen.exact_steps)
            executor = packed_executor(network(model), config, rows, stop_ids=stop_ids)
        wanted = replace(request, generation=replace(generation, stop_at_eos=asked))
        return drive(Engine(scheduler, executor), [(0, wanted), (0, replace(wanted, request_id=1))])[0][1]

    expected = stopped_by_hand(run(False)[0], generation, stop_ids, model.config.eos_token_id)
    assert run(True) == expected


@settings(max_examples=7)
@given(data=st.data())
def test_dllm_cache_stops_and_starts_afresh(data):
    """Its caches and step count belong to the request that ended, not to the next."""
    model = data.draw(st.sampled_from((GQA, LOUD)))
    config = EngineConfig(max_num_seqs=1, max_model_len=MAX_TOTAL, suppress_mask_token=False)
    pair = [data.draw(requests(model, i, is_parallel=False)) for i in (0, 1)]
    stop_ids = data.draw(stop_sets(model))

    def run(batch: list[Request]) -> dict[int, Stop]:
        cache = FeatureCacheConfig(prompt_interval=5, gen_interval=3)
        executor = feature_cache_executor(network(model), config, cache, batch_size=1, stop_ids=stop_ids)
        scheduler = StaticBatchScheduler(config, KvPool(0), NoCache(), batch_size=1)
        return drive(Engine(scheduler, executor), [(0, request) for request in batch])[0]

    outputs = run(pair)
    for request in pair:
        generation = request.generation
        expected = run([replace(request, generation=replace(generation, stop_at_eos=False))])[request.request_id]
        if generation.stop_at_eos:
            expected = stopped_by_hand(expected[0], generation, stop_ids, model.config.eos_token_id)
        assert outputs[request.request_id] == expected


# ---- records ------------------------------------------------------------------------------------


def test_throughput_counts_the_tokens_up_to_the_stop():
    generation = GenerationConfig(gen_length=16, block_length=4, steps=16)
    sparsity = SparsityConfig()
    batch = [request_on(MHA, i, 10, replace(generation, stop_at_eos=i < 3)) for i in range(5)]
    stop_ids = frozenset({whole(MHA, replace(batch[0], request_id=0), sparsity)[5]})
    config = EngineConfig(max_num_seqs=2, max_model_len=MAX_TOTAL, sparsity=sparsity)
    record = drive_engine(serve(MHA, config, 200, stop_ids), batch, WallClock())
    expected = []
    for request in batch:
        ids = whole(MHA, replace(request, request_id=0), sparsity)
        cut = stopped_by_hand(ids, generation, stop_ids, 0)[1] if request.generation.stop_at_eos else None
        expected.append(cut or 16)
    assert record.requests["output_len"] == expected
    assert expected[0] <= 6
    assert expected[3:] == [16, 16]
    assert DLLM.assess(submitted_in_time(record)).valid
    span = max(record.requests["finished_s"])
    assert served_per_second(record, "output_len") == pytest.approx(sum(expected) / span)
    # Whole blocks were committed, so fewer than output_len would be a fault.
    assert sum(expected) <= sum(record.tables["steps"]["committed_tokens"]) < 5 * 16


# ---- stop tokens of a checkpoint ----------------------------------------------------------------


def test_a_checkpoint_names_its_stop_tokens(tmp_path):
    config = read_config(TINY_DIR)
    assert stop_token_ids(TINY_DIR, config) == {config.eos_token_id}
    assert stop_token_ids(tmp_path, config) == {config.eos_token_id}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_DIR / name, tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    turn_end = {**tokenizer["added_tokens"][0], "id": config.vocab_size - 1, "content": "<|eot_id|>"}
    tokenizer["added_tokens"].append(turn_end)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = stop_token_ids(tmp_path, config)
    assert len(found) == 2
    assert config.eos_token_id in found


# ---- what is refused ----------------------------------------------------------------------------


def test_a_static_batch_refuses_it_at_submission():
    config = EngineConfig(max_model_len=MAX_TOTAL)
    generation = GenerationConfig(gen_length=8, block_length=4, steps=8, stop_at_eos=True)
    request = Request(request_id=7, prompt_len=4, prompt_ids=(0, 1, 2, 3), generation=generation)
    with refuses("stop_at_eos=True"):
        StaticBatchScheduler(config, KvPool(0), NoCache(), batch_size=2).submit(request)
    StaticBatchScheduler(config, KvPool(0), NoCache(), batch_size=1).submit(request)


def test_a_cost_model_refuses_it_at_submission():
    generation = GenerationConfig(gen_length=8, block_length=4, steps=8, stop_at_eos=True)
    shape = ModelShape.from_config(GQA.config, name=GQA.name, dtype_bytes=2)
    executor = RooflineExecutor(Roofline(shape, gpu("l40s"), load_calibration("l40s")), EngineConfig())
    with refuses("stop_at_eos=True"):
        executor.validate(Request(request_id=0, prompt_len=4, generation=generation))


# ---- the command line ---------------------------------------------------------------------------


@pytest.mark.usefixtures("models_loaded_once")
@pytest.mark.parametrize(
    "extra", [(), ("--threshold", "0.9"), ("--system", "llada"), ("--system", "dllm-cache")], ids=str
)
def test_generate_answers_the_same_in_fewer_passes(extra):
    problem = GENERATORS["mini-gsm"](3, 1, "heldout", num_facts=8, num_distractors=6)[0]
    answers = []
    for flag in ((), ("--stop-at-eos",)):
        short = ("--gen-length", "48", "--block-length", "16", "--json")
        arguments = ["generate", "--prompt", problem.prompt, *short, *extra, *flag]
        answers.append(json.loads(CliRunner().invoke(app, arguments).output))
    whole, stopped = answers
    assert stopped["text"] == whole["text"]
    assert problem.final in whole["text"]
    assert stopped["forward_passes"] < whole["forward_passes"]


def test_generate_refuses_it_without_blocks():
    done = CliRunner().invoke(
        app, ["generate", "--prompt", "a", "--gen-length", "16", "--block-length", "16", "--stop-at-eos"]
    )
    assert isinstance(done.exception, UserError)
    assert "stop_at_eos=True has no effect on a single block" in str(done.exception)
