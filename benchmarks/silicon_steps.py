"""Steps composed of measured kernels beside the roofline's: python benchmarks/silicon_steps.py --help

A refresh of LLaDA-8B on every card, prompts and decodes of the autoregressive models, each by the kernels of vLLM, SGLang and
TensorRT-LLM; the roofline under the constants it is used with, and the least that the datasheet allows. No overhead of a step is in
any of them. --kappa prints how much longer products take of rows that long and short prompts share than at the long one's rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from common import Rows, parser_of, run, shown, table

from engines.cluster.hardware import PHYSICAL, Hardware, WorkerCost
from engines.cost.kernels import FRAMEWORKS, Composed, Kernels
from engines.cost.roofline import Calibration, Roofline, StepWork, gpu
from engines.models.shape import LLADA_8B, ModelShape, model_shape
from engines.policies.views import Chunk
from repro.systems.cost import load_calibration

CARDS = ("rtx4090", "l40s", "a100", "h100", "h200", "b200", "h20")
REFRESHES = (512, 1024, 2048)
PROMPTS = (128, 512, 2048, 8192)
DECODES = (1, 32, 128)
CONTEXT = 1024
LONGS = (1024, 1500, 2048, 3000, 4096)
SHORTS = (16, 64, 128, 256, 512, 1024)
LAPS_MODELS = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
_NO_OVERHEAD = replace(PHYSICAL, name="bare", step_overhead_s=0.0)
_PEAK = replace(_NO_OVERHEAD, matmul_efficiency=1.0, attention_efficiency=1.0, bandwidth_efficiency=1.0)
_PEAK = replace(_PEAK, all_reduce_latency_s=0.0, nvlink_efficiency=1.0)


@dataclass(frozen=True, kw_only=True)
class Step:
    card: str = shown("card")
    model: str = shown("model")
    degree: int = shown("TP", "d")
    work: str = shown("step")
    least_ms: float = shown("datasheet", ".2f")
    roofline_ms: float = shown("roofline", ".2f")
    """Under the constants it is used with: fitted on a paper's throughputs, assumed, or the datasheet's."""
    vllm_ms: float = shown("vllm", ".2f")
    sglang_ms: float = shown("sglang", ".2f")
    trtllm_ms: float = shown("trtllm", ".2f")
    share: float = shown("of peak %", ".0f", 100)
    """The datasheet's time over the median of the three."""


@dataclass(frozen=True, kw_only=True)
class Mixing:
    model: str = shown("model")
    framework: str = shown("kernels")
    least: float = shown("least", ".3f")
    median: float = shown("median", ".3f")
    most: float = shown("most", ".3f")


def step(
    card: str, shape: ModelShape, degree: int, work: str, least: float, roofline: float, own: Sequence[float]
) -> Step:
    vllm, sglang, trtllm = (1e3 * seconds for seconds in own)
    return Step(
        card=card,
        model=shape.name,
        degree=degree,
        work=work,
        least_ms=1e3 * least,
        roofline_ms=1e3 * roofline,
        vllm_ms=vllm,
        sglang_ms=sglang,
        trtllm_ms=trtllm,
        share=least / median(own),
    )


def refreshes(card: str) -> Iterator[Step]:
    """A block's first forward over all rows of one request, logits of a block of 32."""
    where = gpu(card)
    calibration = replace(load_calibration(card), step_overhead_s=0.0)
    roofline = Roofline(LLADA_8B, where, calibration)
    composed = [Composed(Kernels(LLADA_8B, where, name), calibration) for name in FRAMEWORKS]
    for rows in REFRESHES:
        work = StepWork(rows, rows * rows, 32, rows, rows, 1)
        own = [cost.step_time(work).total_s for cost in composed]
        least = Roofline(LLADA_8B, where, Calibration.datasheet(where)).lower_bound_s(work)
        yield step(card, LLADA_8B, 1, f"refresh of {rows}", least, roofline.step_time(work).total_s, own)


def causal_steps(card: str, shape: ModelShape, degree: int) -> Iterator[Step]:
    where = gpu(card)
    costs = [
        WorkerCost(shape, where, degree, _PEAK),
        WorkerCost(shape, where, degree, _NO_OVERHEAD),
        *(Hardware(shape=shape, gpu=where, constants=_NO_OVERHEAD, kernels=name).cost(degree) for name in FRAMEWORKS),
    ]
    for tokens in PROMPTS:
        least, roofline, *own = (cost.step_s((Chunk(0, tokens),), 0, 0) for cost in costs)
        yield step(card, shape, degree, f"prompt of {tokens}", least, roofline, own)
    for batch in DECODES:
        least, roofline, *own = (cost.step_s((), batch, batch * CONTEXT) for cost in costs)
        yield step(card, shape, degree, f"{batch} decodes", least, roofline, own)


def mixings(card: str) -> Iterator[Mixing]:
    for name in LAPS_MODELS:
        for framework in FRAMEWORKS:
            kernels = Kernels(model_shape(name), gpu(card), framework)
            found = [
                kernels.layers_s(long + short) / (kernels.layers_s(long) * (long + short) / long) - 1
                for long in LONGS
                for short in SHORTS
            ]
            yield Mixing(model=name, framework=framework, least=min(found), median=median(found), most=max(found))


def main() -> None:
    options = _options()
    rows = Rows(options.json)
    if options.kappa:
        rows.rows = list(mixings(options.card))
    elif options.model is None:
        rows.rows = [each for card in CARDS for each in refreshes(card)]
    else:
        rows.rows = list(causal_steps(options.card, model_shape(options.model), options.degree))
    print(table(rows.rows))
    rows.save()


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="an autoregressive one [default: refreshes of LLaDA-8B on every card]")
    parser.add_argument("--card", default="h200", choices=CARDS)
    parser.add_argument("--degree", type=int, default=1, choices=(1, 2, 4, 8))
    parser.add_argument("--kappa", action="store_true", help="of the products of LAPS's models on the card")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
