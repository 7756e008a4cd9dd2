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

import argparse
import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
import torch
from bare_sampler import BareSampler, DllmCache, DllmServe, DualCache, FastDllm, PrefixCache, SparseDllm, StepKind
from common import save

from baselines.dllm.dllm_cache.schedule import FeatureCacheConfig
from baselines.dllm.dllm_cache.torch_executor import feature_cache_executor
from baselines.dllm.registry import method
from baselines.dllm.static.executor import padded_executor
from baselines.dllm.static.scheduler import StaticBatchScheduler
from engines.dllm.cache.kv_pool import KvPool
from engines.dllm.config import EngineConfig, GenerationConfig
from engines.dllm.engine import Engine
from engines.dllm.executor.packed import packed_executor
from engines.dllm.executor.torch import TorchExecutor
from engines.dllm.method import Sampler
from engines.dllm.record import StepRecord
from engines.dllm.request import Request
from engines.dllm.scheduling.scheduler import PhaseScheduler
from engines.dllm.sequence import cache_rows
from engines.models.llada import LLaDAModelLM
from engines.models.llada_config import LLaDAConfig
from engines.models.loader import load_model

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

    def sampler(
        self,
        model: LLaDAModelLM,
        prompts: Prompts,
        generation: GenerationConfig,
        *,
        published: bool = False,
        stable: bool = False,
    ) -> BareSampler:
        if self.bare is DllmCache:
            cache = FeatureCacheConfig()
            return DllmCache(model, prompts, generation, cache=cache, published=published, stable=stable)
        return self.bare(model, prompts, generation, published=published, stable=stable)

    def engine(self, model: LLaDAModelLM, prompts: Prompts, generation: GenerationConfig) -> Engine:
        """With everything submitted; the first step admits it all."""
        chosen = method(self.system).sampler("llada", self.options)
        longest = max(len(prompt) for prompt in prompts) + generation.gen_length
        config = EngineConfig(
            max_num_batched_tokens=len(prompts) * longest,
            max_model_len=longest,
            max_num_seqs=len(prompts),
            sparsity=chosen.sparsity,
            decode=chosen.decode,
            suppress_mask_token=chosen.suppress_mask_token,
        )
        requests = [
            Request(request_id=i, prompt_len=len(prompt), prompt_ids=prompt, generation=generation)
            for i, prompt in enumerate(prompts)
        ]
        engine = self._assemble(model, config, chosen, requests)
        for request in requests:
            engine.submit(request)
        return engine

    def _assemble(
        self, model: LLaDAModelLM, config: EngineConfig, chosen: Sampler, requests: Sequence[Request]
    ) -> Engine:
        size = len(requests)
        rows = 0
        if chosen.rule.caches:
            rows = size * max(cache_rows(request, chosen.sparsity, chosen.rule.window) for request in requests)
        if self.system == "dllm-serve":
            return Engine(
                PhaseScheduler(config, KvPool(rows), chosen.rule), packed_executor(model, config, rows, num_slots=size)
            )
        scheduler = StaticBatchScheduler(
            config, KvPool(rows), chosen.rule, batch_size=size, exact_steps=chosen.exact_steps
        )
        executor: TorchExecutor
        if self.system == "dllm-cache":
            executor = feature_cache_executor(model, config, FeatureCacheConfig(), batch_size=size)
        else:
            executor = padded_executor(model, config, rows, batch_size=size)
        return Engine(scheduler, executor)


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
class Row:
    """Medians over the steps of one kind; ``generation`` sums them over a generation but for its first step, which also
    admits and allocates."""

    model: str
    baseline: str
    batch_size: int
    kind: str
    steps: int
    ours_ms: float
    published_ms: float
    bare_ms: float
    to_published: float
    to_bare: float
    outside: float
    beyond_ours: float
    beyond_bare: float


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
) -> list[Row]:
    by_kind: dict[StepKind, list[Timed]] = defaultdict(list)
    alone: dict[StepKind, list[StepRecord]] = defaultdict(list)
    counts: Counter[StepKind] = Counter()
    for repeat in range(-1, repeats):
        with torch.inference_mode():
            published, bare = (
                baseline.sampler(model, prompts, generation, published=reading) for reading in (True, False)
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

    def row(kind: str, num_steps: int, share: float, middle: Callable[[Callable[[Timed], float]], float]) -> Row:
        ours, theirs, bare_s = middle(lambda s: s.ours_s), middle(lambda s: s.published_s), middle(lambda s: s.bare_s)
        model_s = middle(lambda s: s.model_s)
        return Row(
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
    assert isinstance(model, LLaDAModelLM)
    return model


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'model':7s} {'baseline':17s} {'n':>3s} {'step':10s} {'steps':>5s} {'ours ms':>9s} {'published':>9s} "
        f"{'bare':>9s} {'to published':>12s} {'to bare':>8s} {'outside':>8s} {'beyond':>7s} {'(bare)':>7s}"
    ]
    lines += [
        f"{r.model:7s} {r.baseline:17s} {r.batch_size:3d} {r.kind:10s} {r.steps:5d} {r.ours_ms:9.3f} "
        f"{r.published_ms:9.3f} {r.bare_ms:9.3f} {r.to_published:12.2f} {r.to_bare:8.2f} {r.outside:8.1%} "
        f"{r.beyond_ours:7.1%} {r.beyond_bare:7.1%}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [baseline.name for baseline in BASELINES]
    parser.add_argument("--model", nargs="+", choices=tuple(GENERATIONS), default=["tiny"], help="embedded, or random")
    parser.add_argument("--baseline", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="members of the static batch")
    parser.add_argument("--prompt", nargs=2, type=int, default=[60, 180], metavar=("MIN", "MAX"), help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=3, help="generations timed, after one to warm up")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    shortest, longest = options.prompt
    if min(*options.batch, options.repeats, shortest) < 1 or shortest > longest:
        parser.error("--batch, --repeats and --prompt count from 1, and MIN is at most MAX")

    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in options.model:
        model = network_of(name)
        for batch_size in options.batch:
            prompts = prompts_of(model, batch_size, *options.prompt)
            for baseline in BASELINES:
                if baseline.name in options.baseline:
                    rows += time_baseline(baseline, name, model, prompts, GENERATIONS[name], options.repeats)
                    print(f"{name}, {batch_size} at once: {baseline.name}", file=sys.stderr)
    print(table(rows))
    if options.json is not None:
        facts = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1, "prompt": options.prompt}
        save(options.json, rows, **facts)


if __name__ == "__main__":
    main()
