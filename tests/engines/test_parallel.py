"""A model divided among ranks gives what the whole one gives. Ranks are processes on the CPU."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.forks import forks
from support.graph_recorders import CountingRecorder
from support.processes import ends
from support.ranks import ComparingExecutor, RanksDiffer, wait_for_ever
from support.refusals import refuses
from support.tiny_models import DREAM, GQA, LOUD, MHA, TinyCheckpoint, prompt_of

from engines.dllm.config import (
    DecodeConfig,
    DelayedCache,
    EngineConfig,
    GenerationConfig,
    NoCache,
    RefreshRule,
    SparsityConfig,
)
from engines.dllm.denoise import Reduction, reduce_in_chunks, vocabulary_reduction
from engines.dllm.engine import Engine
from engines.dllm.executor.compose import packed_executor
from engines.dllm.executor.torch import LeadingExecutor, follow
from engines.dllm.plan import Executor, Request, StepOutcome, StepPlan
from engines.dllm.scheduling import KvPool, PhaseScheduler
from engines.errors import UserError
from engines.kernels.scores import ContextRows, attention_importance, importance
from engines.models.checkpoint import TINY_DIR, config_of
from engines.models.config import DREAM_7B, LLADA_8B, check_division, span
from engines.models.loader import load_model
from engines.models.shape import ModelShape
from engines.models.tokenizer import load_tokenizer
from engines.parallel.group import RankFailed, TensorParallel, local_ranks, rank_device
from engines.parallel.shard import PartialLinear, load_shard, shard_model

ODD = replace(MHA, name="odd", vocab=97)
ODD_DREAM = replace(DREAM, name="odd-dream", vocab=99, heads=8, kv_heads=4, mlp=50)
CHECKPOINTS: tuple[TinyCheckpoint, ...] = (GQA, LOUD, ODD, ODD_DREAM)
KV_ROWS = 100
Check = Callable[[TensorParallel, Path], None]


# ---- what every rank does, rank 0 in the test's own process -----------------------------------------


def exchanges(group: TensorParallel, _: Path) -> None:
    own = torch.full((2, 3), float(group.rank))
    ranks = torch.arange(group.size, dtype=torch.float32)
    assert group.all_gather(own).tolist() == ranks.repeat_interleave(2).unsqueeze(1).expand(-1, 3).tolist()
    assert group.all_gather(own, 1).tolist() == ranks.repeat_interleave(3).expand(2, -1).tolist()
    assert group.all_reduce(own) is own
    assert own.unique().tolist() == [ranks.sum()]
    for width in (group.size, 7, 8, 97):
        whole = torch.arange(3.0 * width).view(3, width)
        start, end = span(width, group.rank, group.size)
        assert torch.equal(group.gather_columns(whole[:, start:end], width), whole)
    assert group.from_leader({"said": group.rank}) == {"said": 0}
    assert group.gather_objects(group.rank) == list(range(group.size))


def reductions(group: TensorParallel, _: Path) -> None:
    """Tokens are those of whole rows, confidences too up to rounding; ids of equal logits lie on all ranks."""
    vocabulary, generator = 61, torch.Generator().manual_seed(7)
    start, end = span(vocabulary, group.rank, group.size)
    config = SimpleNamespace(vocab_size=vocabulary)
    model: Any = SimpleNamespace(config=config, tensor_parallel=group)
    spread = torch.randn((40, vocabulary), generator=generator) * 4
    tied = torch.randint(0, 3, (40, vocabulary), generator=generator).float()
    level = torch.zeros((3, vocabulary))
    for logits in (spread, tied, level, spread.bfloat16(), tied.double()):
        for suppress_id in (None, 0, 30, vocabulary - 1, int(logits[0].argmax())):
            for dtype in ("native", "float64") if group.size == 2 else ("native",):
                plain = Reduction(suppress_id=suppress_id, dtype=dtype)
                parallel = vocabulary_reduction(plain, model)
                assert parallel is not None
                token, confidence = plain(logits.clone(), None)
                parts = logits[:, start:end].clone()
                found, confidence_found = reduce_in_chunks(lambda rows: rows, parts, 7, parallel, None)
                assert torch.equal(found, token)
                assert found.dtype == token.dtype
                assert confidence_found.dtype == confidence.dtype
                # One unit in the last place of a bfloat16 probability.
                rtol = 2**-7 if logits.dtype == torch.bfloat16 and dtype == "native" else 1e-5
                torch.testing.assert_close(confidence_found, confidence, rtol=rtol, atol=0)
    assert vocabulary_reduction(Reduction(confidence="margin"), model) is None
    whole_model: Any = SimpleNamespace(config=config, tensor_parallel=None)
    assert vocabulary_reduction(Reduction(), whole_model) is None


def uniform_scores(group: TensorParallel, _: Path) -> None:
    """``uniform`` averages the heads of all ranks, and ``attended`` takes their largest."""
    generator = torch.Generator().manual_seed(3)
    heads, kv_heads = 8, 4
    q, k = torch.randn((12, heads, 6), generator=generator), torch.randn((12, kv_heads, 6), generator=generator)
    rows = ContextRows(
        block_rows=torch.tensor([[2, 3], [9, 6]]),
        block_valid=torch.tensor([[True, True], [True, False]]),
        context_rows=torch.tensor([[0, 1, 4, 5], [6, 7, 8, 6]]),
        context_valid=torch.tensor([[True] * 4, [True] * 3 + [False]]),
    )
    own_q, own_k = (slice(*span(count, group.rank, group.size)) for count in (heads, kv_heads))
    whole = importance(q, k, rows, "uniform", 3)
    torch.testing.assert_close(importance(q[:, own_q], k[:, own_k], rows, "uniform", 3, group), whole)
    by_head = importance(q[:, own_q], k[:, own_k], rows, "head", 3, group)
    torch.testing.assert_close(by_head, importance(q, k, rows, "head", 3)[:, own_k])
    lengths = [2, 1], [4, 3]
    shared = attention_importance(q[:, own_q], k[:, own_k], rows, *lengths, 3, group)
    torch.testing.assert_close(shared, attention_importance(q, k, rows, *lengths, 3))


def loading(group: TensorParallel, folder: Path) -> None:
    """A rank reads what it would cut out of the whole model, holds nothing more, and all ranks hold all of it."""
    for name in names_of(folder, group.size):
        # Random ones are drawn alike whatever the number of ranks.
        for weights in ("checkpoint", "random") if group.size == 2 else ("checkpoint",):
            load = {"weights": weights, "seed": 5, "dtype": torch.bfloat16}
            whole: Any = load_model(name, **load)
            complete = whole.state_dict()
            parts = shard_model(whole, group)
            cut, read = whole.state_dict(), load_shard(name, group, **load).state_dict()
            assert list(read) == list(complete) == list(cut)
            for tensor, own in read.items():
                assert torch.equal(own, cut[tensor])
                assert own.untyped_storage().nbytes() == own.nbytes, f"{tensor} keeps more than it shows"
                if tensor in parts:
                    assert torch.equal(torch.cat(group.gather_objects(own), parts[tensor].dim), complete[tensor])
                else:
                    assert torch.equal(own, complete[tensor])
                    assert own.dim() == 1, f"{tensor} is on every rank"
        held = sum(own.numel() for own in read.values())
        shape = ModelShape.from_config(config_of(name), name="")
        largest = max(group.gather_objects(held))
        computed = shape.on_rank(group.size).weight_bytes // shape.dtype_bytes
        assert largest == computed or shape.vocab_rows % group.size
        assert largest <= computed <= largest + 2 * group.size * shape.d_model


def serving(group: TensorParallel, folder: Path) -> None:
    """Greedy ids of requests run together, and what lies in the KV pool, equal one process's."""
    names = names_of(folder, group.size)
    if group.size == 2:
        # Every case on one checkpoint, every checkpoint with one case.
        pairs = [
            (name, case)
            for n, name in enumerate(names)
            for c, case in enumerate(CASES)
            if (Path(name).name == case.only if case.only else (n + c) % 5 == 0)
        ]
        assert {name for name, _ in pairs} == set(names)
        assert len({id(case) for _, case in pairs}) == len(CASES)
    else:
        # Four processes on two cores are slow to meet.
        few = [name for name in names if Path(name).name in ("tiny", "odd-dream")]
        pairs = list(zip(few, CASES[:2], strict=True))
    for name, case in pairs:
        serve(group, name, case)


def mismatches(group: TensorParallel, _: Path) -> None:
    """The control of ``serving``: a rank that committed something else is found."""
    plan = StepPlan(items=(), admitted=(), scheduled_tokens=0)
    for wrong in ("committed", "ids"):
        executor = Constant(group.rank if wrong == "committed" else 0, group.rank if wrong == "ids" else 0)
        with pytest.raises(RanksDiffer, match=r"on rank 1 differ from those on rank 0"):
            lead_or_follow(executor, group, plan)


def closing(group: TensorParallel, folder: Path) -> None:
    """Every rank has released its graphs before it returns, and so before it leaves the group: NCCL waits for
    collectives that graphs hold. After an error too."""
    chosen = case(SparsityConfig(), attention_backend="sdpa-padded")
    for fails in (False, True):
        recorder = CountingRecorder()
        executor = packed_executor(load_shard("tiny", group), chosen.config, KV_ROWS, recorder=recorder)
        executor.prepare(4)
        assert recorder.num_live == recorder.num_made > 0
        if group.rank and fails:
            executor.commit = None
            with pytest.raises(TypeError):
                follow(executor, group)
        elif group.rank:
            follow(executor, group)
        else:
            leading = LeadingExecutor(executor, group)
            requests = requests_of("tiny", chosen)
            if fails:
                engine = Engine(PhaseScheduler(chosen.config, KvPool(KV_ROWS), DelayedCache(delay=1)), leading)
                engine.submit(requests[0])
                engine.step()
                leading.close()
            else:
                outputs(leading, chosen.config, DelayedCache(delay=1), requests)
                assert recorder.num_replays > 0
                leading.stop()
        assert recorder.num_live == 0
        assert executor.pool.num_rows == 0


CHECKS: tuple[Check, ...] = (exchanges, reductions, uniform_scores, loading, serving)
OF_TWO: tuple[Check, ...] = (mismatches, closing)
"""What every follower does alike, however many there are."""


# ---- their parts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """An executor that commits a count and answers an id."""

    count: int
    token: int

    def validate(self, request: Request) -> None: ...

    def execute(self, plan: StepPlan) -> StepOutcome:
        return StepOutcome(committed=(self.count,), query_rows=0, logit_rows=0, forward_s=0.0, duration_s=None)

    def wait(self) -> None: ...

    def times(self) -> Mapping[int, Any]:
        return {}

    def release(self, request_id: int) -> tuple[int, ...]:
        return (self.token,)

    def close(self) -> None: ...


def lead_or_follow(executor: Executor, group: TensorParallel, plan: StepPlan) -> None:
    executor = ComparingExecutor(executor, group)
    if group.rank:
        follow(executor, group)
    else:
        leading = LeadingExecutor(executor, group)
        leading.execute(plan)
        leading.release(3)


@dataclass(frozen=True, kw_only=True)
class Case:
    config: EngineConfig
    generation: tuple[Mapping[str, Any], ...] = ({},)
    """What the requests in turn ask for besides their lengths."""
    only: str | None = None
    rule: RefreshRule | None = None


def case(
    sparsity: SparsityConfig,
    *generation: Mapping[str, Any],
    only: str | None = None,
    rule: RefreshRule | None = None,
    **config: Any,
) -> Case:
    limits = {"max_num_batched_tokens": 150, "max_num_logits": 16, "max_model_len": 120, "max_num_seqs": 4}
    return Case(
        config=EngineConfig(sparsity=sparsity, **(limits | config)),
        generation=generation or ({},),
        only=only,
        rule=rule,
    )


CASES = (
    *(case(SparsityConfig(selection=selection)) for selection in ("head", "uniform", "dense")),
    case(
        SparsityConfig(selection="uniform", refresh_delay=0),
        logit_rows="monolithic",
        decode=DecodeConfig(confidence_dtype="float64"),
    ),
    case(SparsityConfig(), {"threshold": 0.4}, {"stop_at_eos": True}, suppress_mask_token=False),
    case(SparsityConfig(), {"cfg_scale": 1.5}, {}, only="gqa", rule=NoCache()),
    # Whole rows of logits are needed.
    case(SparsityConfig(), {}, {"temperature": 0.7, "seed": 3}, only="odd"),
    case(SparsityConfig(), decode=DecodeConfig(confidence="neg_entropy"), only="odd-dream"),
)


def serve(group: TensorParallel, name: str, case: Case) -> None:
    config, requests = case.config, requests_of(name, case)
    if name == "tiny":
        # The trained model is sure of much. Float32 rounds its confidences to 1, and in which order it commits such
        # tokens would hang on the last bit of a sum.
        config = replace(config, decode=replace(config.decode, confidence_dtype="float64"))
    rule = case.rule or DelayedCache(delay=config.sparsity.refresh_delay)
    own = packed_executor(load_shard(name, group), config, KV_ROWS)
    own.pool.fill_with_zeros()
    # The end of a run closes the executor.
    parts = own.pool.k, own.pool.v
    if group.rank:
        follow(ComparingExecutor(own, group), group)
        wholes = group.from_leader()
    else:
        alone = packed_executor(load_model(name, device=group.device), config, KV_ROWS)
        alone.pool.fill_with_zeros()
        wholes = alone.pool.k, alone.pool.v
        expected = outputs(alone, config, rule, requests)
        leading = LeadingExecutor(ComparingExecutor(own, group), group)
        found = outputs(leading, config, rule, requests)
        leading.stop()
        assert found == expected, f"{name} {case}"
        wholes = group.from_leader(tuple(pool.cpu() for pool in wholes))
    kv_heads = config_of(name).n_kv_heads
    heads = slice(*span(kv_heads, group.rank, group.size))
    for whole, part in zip(wholes, parts, strict=True):
        assert (whole.abs().sum() > 0) == rule.caches
        torch.testing.assert_close(
            part.cpu(), whole[:, :, heads], rtol=2e-3, atol=2e-3, msg=lambda text: f"{name} {case}: {text}"
        )


def outputs(executor: Executor, config: EngineConfig, rule: RefreshRule, requests: list[Request]) -> list[Any]:
    engine = Engine(PhaseScheduler(config, KvPool(KV_ROWS), rule), executor)
    for request in requests:
        engine.submit(request)
    engine.run()
    return [engine.take_output(request.request_id) for request in requests]


def requests_of(name: str, case: Case) -> list[Request]:
    if name == "tiny":
        tokenizer = load_tokenizer(TINY_DIR)
        prompts = [tuple(tokenizer.encode(text)) for text in ("12+35=", "the capital of", "sort: d a c b ->", "7*8=")]
        sizes = ((12, 6), (16, 8), (9, 4), (8, 8))
    else:
        model = next(model for model in CHECKPOINTS if model.name == name.rsplit("/", 1)[1])
        prompts = [prompt_of(model, seed, length) for seed, length in ((1, 9), (2, 30), (3, 17), (4, 4))]
        sizes = ((8, 4), (10, 4), (6, 6), (5, 2))
    return [
        Request(
            request_id=i,
            prompt_len=len(prompt),
            prompt_ids=prompt,
            generation=GenerationConfig(
                gen_length=gen, block_length=block, steps=gen, **case.generation[i % len(case.generation)]
            ),
        )
        for i, (prompt, (gen, block)) in enumerate(zip(prompts, sizes, strict=True))
    ]


def names_of(folder: Path, size: int) -> list[str]:
    """Checkpoints whose heads ``size`` ranks can share: the trained one, and small random ones."""
    own = sorted(str(path) for path in folder.iterdir())
    return [name for name in ("tiny", *own) if config_of(name).n_kv_heads % size == 0]


def write_checkpoints(folder: Path) -> None:
    for model in CHECKPOINTS:
        model.write(folder / model.name)


def write_tied(folder: Path) -> str:
    """A checkpoint whose head is its embedding, and which stores it twice."""
    weights = MHA.weights()
    weights["model.transformer.ff_out.weight"] = weights["model.transformer.wte.weight"].clone()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(replace(MHA.config, weight_tying=True).to_dict()))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def run_checks(group: TensorParallel, folder: Path) -> None:
    for check in (*CHECKS, *(OF_TWO if group.size == 2 else ())):
        check(group, folder)


def fail(group: TensorParallel) -> None:
    raise ValueError("the follower's own words")


def wait_for_the_others() -> None:
    with local_ranks(2, "cpu", fail) as group:
        group.all_reduce(torch.ones(1))


# ---- tests ------------------------------------------------------------------------------------------


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on the CPU begin with everything imported. ``test_ranks_die_with_rank_0`` spawns them, as users do."""
    monkeypatch.setattr("engines.parallel.group.get_context", lambda method: forks())


@pytest.mark.usefixtures("_forked")
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_do_what_one_process_does(size, tmp_path):
    write_checkpoints(tmp_path)
    with local_ranks(size, "cpu", run_checks, tmp_path) as group:
        run_checks(group, tmp_path)
    # Models keep the group; gloo's threads, alive when an interpreter ends, may abort it.
    assert group.tensors is group.control is None


@pytest.mark.gpu
def test_ranks_on_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, torch sees {torch.cuda.device_count()}")
    write_checkpoints(tmp_path)
    with local_ranks(2, "cuda", serving, tmp_path) as group:
        serving(group, tmp_path)


@pytest.mark.gpu
def test_a_graph_captures_the_sum_over_ranks():
    """NCCL with a single rank: a group that takes itself for one of two, whose sum is its own part."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        group = TensorParallel(rank=0, size=2, device="cuda:0", tensors=dist.group.WORLD)
        weight = torch.randn((4, 3), device="cuda:0")
        layer = PartialLinear(torch.nn.Parameter(weight, requires_grad=False), group)
        x = torch.randn((5, 3), device="cuda:0")
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = layer(x)
        x.copy_(torch.randn((5, 3), device="cuda:0"))
        graph.replay()
        torch.testing.assert_close(out, x @ weight.T)
        # Or the communicator waits for it for ever.
        graph.reset()
    finally:
        dist.destroy_process_group()


def test_tied_weights_are_divided_once(tmp_path):
    """Without other ranks: what a rank reads does not depend on them."""
    name = write_tied(tmp_path / "tied")
    whole: Any = load_model(name)
    embedding = "model.transformer.wte.weight"
    for rank in range(2):
        own: Any = load_shard(name, TensorParallel(rank=rank, size=2))
        start, end = span(whole.config.vocab_size, rank, 2)
        assert torch.equal(own.state_dict()[embedding], whole.state_dict()[embedding][start:end])
        hidden = torch.randn((5, whole.config.d_model))
        torch.testing.assert_close(own.local_logits(hidden), whole.logits(hidden)[:, start:end])


def test_one_rank_is_the_model_itself():
    with local_ranks(1, "cpu", fail) as group:
        own: Any = load_shard("tiny", group)
        assert own.tensor_parallel is None
        assert group.from_leader(3) == 3
        assert group.gather_objects(3) == [3]
        x = torch.ones(2, 3)
        assert group.all_reduce(x) is group.all_gather(x) is group.gather_columns(x, 3) is x


@pytest.mark.usefixtures("_forked")
def test_a_followers_error_is_reported():
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed: .*the follower's own words"):
        wait_for_the_others()
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("_forked")
def test_rank_0s_error_ends_the_others():
    with pytest.raises(ZeroDivisionError), local_ranks(2, "cpu", wait_for_ever):
        raise ZeroDivisionError
    assert not multiprocessing.active_children()


def test_ranks_die_with_rank_0():
    """However it dies."""
    script = (
        "import multiprocessing, os, signal, sys\n"
        "from engines.parallel.group import local_ranks\n"
        "from support.ranks import wait_for_ever\n"
        "if __name__ == '__main__':\n"
        "    with local_ranks(2, 'cpu', wait_for_ever):\n"
        "        print(multiprocessing.active_children()[0].pid, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    pid = int(ended.stdout)
    assert ends(pid), "the follower outlived rank 0"


@pytest.mark.parametrize(
    ("config", "size", "sentence"),
    [
        (LLADA_8B, 0, "tensor_parallel=0 must be at least 1"),
        (LLADA_8B, 3, "tensor_parallel=3 does not divide the model's n_kv_heads=32: use one of 1, 2, 4, 8, 16, 32"),
        (DREAM_7B, 8, "tensor_parallel=8 does not divide the model's n_kv_heads=4: use one of 1, 2, 4"),
        (GQA.config, 4, "tensor_parallel=4 does not divide the model's n_kv_heads=2: use one of 1, 2"),
    ],
)
def test_divisions_that_are_refused(config, size, sentence):
    with pytest.raises(UserError) as error:
        check_division(config, size)
    assert str(error.value) == sentence


def test_too_many_ranks_for_a_checkpoint_are_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr("engines.models.loader.load_weights", None)
    with refuses("tensor_parallel=3"):
        load_shard("tiny", TensorParallel(rank=0, size=3))


def test_devices_of_ranks(monkeypatch):
    assert [rank_device("cpu", rank, 3) for rank in range(3)] == ["cpu"] * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [rank_device("cuda", rank, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert rank_device("cuda:1", 0, 1) == "cuda:1"
    for device, size, sentence in (
        ("cuda", 4, "tensor_parallel=4 exceeds the 2 CUDA devices"),
        ("cuda:1", 2, "device='cuda:1' is one device and tensor_parallel=2 needs 2"),
        ("tpu", 2, "device='tpu' is unknown"),
    ):
        with pytest.raises(UserError, match=sentence):
            rank_device(device, 0, size)


def test_a_layer_without_a_rule_is_no_silent_copy():
    model: Any = load_model("tiny")
    model.blocks[0].extra = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"blocks\.0\.extra has no rule"):
        shard_model(model, TensorParallel(rank=0, size=2))
