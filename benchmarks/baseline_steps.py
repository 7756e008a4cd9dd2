"""Times every baseline's step against plain ones: python benchmarks/baseline_steps.py --help

One request alone and one static batch run through our engine and, in lockstep, through plain batched
samplers of the same method on the same weights (bare_sampler.py): as published, and with the fewest
operators. The three take turns, so that whatever else the machine does meets all of them; compared
are medians of processor time, per kind of step.

    to published   our step / the published reading's; below 1, the baseline is at least as fast here
    to bare        our step / the bare step, a lower bound of what the method costs
    outside        share of our steps outside forward_s, as a run records it (docs/metrics.md; wall clock,
                   from generations of our own with nothing in between)
    beyond         share of our step, and of the bare one, that is not the plain model's layers and head:
                   1 - model / step. Softmax, top-k and index updates are in the bare step's too.

One thread on the CPU. dllm-serve is compared with a padded batch, where its own code packs.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import process_time

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
import torch
from bare_sampler import BareSampler, DllmCache, DllmServe, DualCache, FastDllm, PrefixCache, SparseDllm, StepKind
from common import Rows, add_counts, count, facts_of, parser_of, run, shown, table

from baselines.dllm.published import PublishedMethod
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.plan import Request, StepRecord
from engines.dllm.scheduling.scheduler import KvPool, PhaseScheduler, Scheduler
from engines.models.llada import LLaDAModelLM
from engines.models.llada_config import LLaDAConfig
from engines.models.loader import load_model
from repro.systems.dllm.system import method

Prompts = Sequence[tuple[int, ...]]
Step = StepRecord | StepKind | None
"""A step of our engine or of a plain sampler; None where there is none left."""

MEDIUM = LLaDAConfig(
    d_model=512,
    n_layers=8,
    n_heads=8,
    n_kv_heads=8,
    mlp_hidden_size=1536,
    vocab_size=4096,
    max_sequence_length=1024,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    mask_token_id=4095,
    eos_token_id=4094,
    pad_token_id=4094,
)
GENERATIONS = {
    "tiny": GenerationConfig(gen_length=64, block_length=16, steps=64),
    "medium": GenerationConfig(gen_length=32, block_length=16, steps=32),
}


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A system as the command line names it, its options, and the plain sampler of the same rules."""

    system: str
    options: Mapping[str, str]
    bare: type[BareSampler]

    @property
    def name(self) -> str:
        return "-".join((self.system, *self.options.values()))

    def engine(self, model: LLaDAModelLM, prompts: Prompts, generation: GenerationConfig) -> Engine:
        """With everything submitted; the first step admits it all."""
        chosen, size = method(self.system), len(prompts)
        sampler = chosen.sampler("llada", self.options)
        longest = max(len(prompt) for prompt in prompts) + generation.gen_length
        config = EngineConfig(
            max_num_batched_tokens=size * longest,
            max_model_len=longest,
            max_num_seqs=size,
            sparsity=sampler.sparsity,
            decode=sampler.decode,
            suppress_mask_token=sampler.suppress_mask_token,
        )
        rows = size * sampler.rows_of_request(longest, generation)
        scheduler: Scheduler
        if isinstance(chosen, PublishedMethod):
            scheduler = StaticBatchScheduler(
                config, KvPool(rows), sampler.rule, batch_size=size, exact_steps=sampler.exact_steps
            )
            executor = chosen.static_torch(model, config, sampler, rows, batch_size=size)
        else:
            scheduler = PhaseScheduler(config, KvPool(rows), sampler.rule)
            executor = chosen.packed_torch(model, config, rows, stop_ids=None, block_length=generation.block_length)
        engine = Engine(scheduler, executor)
        for i, prompt in enumerate(prompts):
            engine.submit(Request(request_id=i, prompt_len=len(prompt), prompt_ids=prompt, generation=generation))
        return engine


BASELINES = (
    Baseline(system="llada", options={}, bare=BareSampler),
    Baseline(system="fast-dllm", options={"cache": "none"}, bare=FastDllm),
    Baseline(system="fast-dllm", options={"cache": "prefix"}, bare=PrefixCache),
    Baseline(system="fast-dllm", options={"cache": "dual"}, bare=DualCache),
    Baseline(system="sparse-dllm", options={}, bare=SparseDllm),
    Baseline(system="dllm-cache", options={}, bare=DllmCache),
    Baseline(system="dllm-serve", options={}, bare=DllmServe),
)


@dataclass(frozen=True, kw_only=True)
class BaselineRow:
    """Medians over the steps of one kind; ``generation`` sums them over a generation but for its first step, which also
    admits and allocates."""

    model: str = shown("model")
    baseline: str = shown("baseline")
    batch_size: int = shown("n")
    kind: str = shown("step")
    steps: int = shown("steps")
    ours_ms: float = shown("ours ms", ".3f")
    published_ms: float = shown("published", ".3f")
    bare_ms: float = shown("bare", ".3f")
    to_published: float = shown("to published", ".2f")
    to_bare: float = shown("to bare", ".2f")
    outside: float = shown("outside", ".1%")
    beyond_ours: float = shown("beyond", ".1%")
    beyond_bare: float = shown("(bare)", ".1%")


@dataclass(frozen=True, kw_only=True)
class Timed:
    kind: StepKind
    ours_s: float
    published_s: float
    bare_s: float
    model_s: float


def timed(step: Callable[[], Step]) -> tuple[Step, float]:
    started = process_time()
    result = step()
    return result, process_time() - started


def lockstep(engine: Engine, published: BareSampler, bare: BareSampler, first: int) -> Iterator[Timed]:
    """One generation, step by step on all three; who goes first changes in turn."""
    steps = {"published": published.steps(), "bare": bare.steps()}
    sides: list[tuple[str, Callable[[], Step]]] = [
        ("ours", engine.step),
        ("published", lambda: next(steps["published"], None)),
        ("bare", lambda: next(steps["bare"], None)),
    ]
    while True:
        model_s = bare.model_s
        turn = sides[first % 3 :] + sides[: first % 3]
        found = {name: timed(step) for name, step in turn}
        first += 1
        (record, ours_s), (kind, bare_s), (other, published_s) = (found[s] for s in ("ours", "bare", "published"))
        if record is None or kind is None:
            assert record is kind is other, "all sides run the same steps"
            return
        assert isinstance(kind, str)
        yield Timed(kind=kind, ours_s=ours_s, published_s=published_s, bare_s=bare_s, model_s=bare.model_s - model_s)


def time_baseline(
    baseline: Baseline, name: str, model: LLaDAModelLM, prompts: Prompts, generation: GenerationConfig, repeats: int
) -> list[BaselineRow]:
    by_kind: dict[StepKind, list[Timed]] = defaultdict(list)
    alone: dict[StepKind, list[StepRecord]] = defaultdict(list)
    counts: Counter[StepKind] = Counter()
    for repeat in range(-1, repeats):
        with torch.inference_mode():
            published, bare = (
                baseline.bare(network=model, prompts=prompts, generation=generation, published=reading)
                for reading in (True, False)
            )
            steps = list(lockstep(baseline.engine(model, prompts, generation), published, bare, repeat))
        # The first generation warms up; the first step of each also admits and allocates.
        counts = Counter(step.kind for step in steps[1:])
        if repeat < 0:
            continue
        for step in steps[1:]:
            by_kind[step.kind].append(step)
        # What a run records: nobody else's step in between.
        for step, record in zip(steps[1:], baseline.engine(model, prompts, generation).run()[1:], strict=True):
            alone[step.kind].append(record)

    def outside(kinds: Iterable[StepKind]) -> float:
        records = [record for kind in kinds for record in alone[kind]]
        return 1 - sum(record.outcome.forward_s for record in records) / sum(record.duration_s for record in records)

    def row(
        kind: str, num_steps: int, share: float, middle: Callable[[Callable[[Timed], float]], float]
    ) -> BaselineRow:
        ours, theirs, bare_s = middle(lambda s: s.ours_s), middle(lambda s: s.published_s), middle(lambda s: s.bare_s)
        model_s = middle(lambda s: s.model_s)
        return BaselineRow(
            model=name,
            baseline=baseline.name,
            batch_size=len(prompts),
            kind=kind,
            steps=num_steps,
            ours_ms=ours * 1e3,
            published_ms=theirs * 1e3,
            bare_ms=bare_s * 1e3,
            to_published=ours / theirs,
            to_bare=ours / bare_s,
            outside=share,
            beyond_ours=1 - model_s / ours,
            beyond_bare=1 - model_s / bare_s,
        )

    def middle_of(kind: StepKind) -> Callable[[Callable[[Timed], float]], float]:
        return lambda what: median(map(what, by_kind[kind]))

    rows = [row(kind, len(by_kind[kind]), outside([kind]), middle_of(kind)) for kind in by_kind]
    if len(rows) == 1:
        return rows

    def generation_of(what: Callable[[Timed], float]) -> float:
        return sum(counts[kind] * middle_of(kind)(what) for kind in by_kind)

    return [*rows, row("generation", repeats, outside(by_kind), generation_of)]


def prompts_of(model: LLaDAModelLM, batch_size: int, shortest: int, longest: int) -> Prompts:
    """One prompt of the longest length, or lengths evenly spread, in an order that is not theirs."""
    random = np.random.default_rng(0)
    lengths = random.permutation(np.linspace(shortest, longest, batch_size).round().astype(int))
    if batch_size == 1:
        lengths = np.array([longest])
    ids = np.setdiff1d(np.arange(model.config.vocab_size), [model.config.mask_token_id])
    return [tuple(random.choice(ids, size).tolist()) for size in lengths]


def network_of(name: str) -> LLaDAModelLM:
    if name == "tiny":
        model = load_model("tiny")
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LLaDAModelLM(MEDIUM).requires_grad_(False).eval()
        model.reorder(joins=False)
    assert isinstance(model, LLaDAModelLM)
    return model


def main() -> None:
    parser = parser_of(__doc__)
    names = [baseline.name for baseline in BASELINES]
    parser.add_argument("--model", nargs="+", choices=tuple(GENERATIONS), default=["tiny"], help="embedded, or random")
    parser.add_argument("--baseline", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--prompt", nargs=2, type=count, default=[60, 180], metavar=("MIN", "MAX"), help="prompt lengths"
    )
    add_counts(
        parser, batch=((1, 8), "members of the static batch"), repeats=(3, "generations timed, after one to warm up")
    )
    options = parser.parse_args()
    shortest, longest = options.prompt
    if shortest > longest:
        parser.error("--prompt: MIN is at most MAX")

    torch.set_num_threads(1)
    rows = Rows(options.json, {**facts_of(torch.device("cpu"), torch.float32), "prompt": options.prompt})
    for name in options.model:
        model = network_of(name)
        for batch_size in options.batch:
            prompts = prompts_of(model, batch_size, shortest, longest)
            for baseline in [each for each in BASELINES if each.name in options.baseline]:
                for row in time_baseline(baseline, name, model, prompts, GENERATIONS[name], options.repeats):
                    rows.add(row)
                print(f"{name}, {batch_size} at once: {baseline.name}", file=sys.stderr)
    print(table(rows.rows))


if __name__ == "__main__":
    run(main)
