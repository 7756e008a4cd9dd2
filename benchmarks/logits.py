"""Times the output head with the reduction that serves, in chunks of max_num_logits: python benchmarks/logits.py --help

    ms          of all rows, from hidden states to a token and a confidence each
    peak MiB    largest memory held at once beyond the hidden states and the weights
    chunked ms  lower bound of this chunking: the head's weights once for every chunk, logits written once
    whole ms    lower bound of any: the head's weights once, logits never stored
    of ...      bound / ms
    fused       whether the reduction is one kernel (engines/dllm/executor/kernel_choice.py)

Bounds are at the card's datasheet peaks or at measured ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from common import add_model, save, subject_facts, subject_of
from torch import Tensor

from engines.dllm.config import EngineConfig
from engines.dllm.decode.denoise import Reduced, Reduction, reduce_in_chunks
from engines.dllm.executor.kernel_choice import KernelChoice
from engines.dllm.memory.profile import peak_bytes
from engines.hardware.catalogue import Gpu
from engines.hardware.peaks import seconds_of
from engines.hardware.roofline import Roofline, StepWork
from engines.models.protocol import DiffusionModel
from engines.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    rows: int
    max_num_logits: int
    chunks: int
    ms: float
    peak_bytes: int
    chunked_ms: float
    whole_ms: float
    of_chunked: float
    of_whole: float
    fused: bool


def time_head(name: str, model: DiffusionModel, hidden: Tensor, max_num_logits: int, card: Gpu, *, repeats: int) -> Row:
    rows = hidden.shape[0]
    chunks = -(-rows // max_num_logits)
    reduction = serving_reduction(model, max_num_logits)

    @torch.inference_mode()
    def head() -> Reduced:
        return reduce_in_chunks(model.logits, hidden, max_num_logits, reduction, None)

    ms = 1e3 * median(seconds_of(head, hidden.device, repeats))
    shape = ModelShape.from_config(model.config, name=name, dtype_bytes=hidden.dtype.itemsize)
    work = StepWork(
        query_rows=0,
        attention_pairs=0,
        logit_rows=rows,
        kv_read_rows=0,
        kv_written_rows=0,
        num_sequences=0,
        logit_chunks=chunks,
    )
    chunked_ms = 1e3 * Roofline(shape, card).lower_bound_s(work)
    whole_ms = 1e3 * max(
        shape.logits_flops_per_row * rows / card.peak_flops, shape.streamed_weight_bytes_head / card.bandwidth
    )
    return Row(
        model=name,
        rows=rows,
        max_num_logits=max_num_logits,
        chunks=chunks,
        ms=ms,
        peak_bytes=peak_bytes(head, hidden.device),
        chunked_ms=chunked_ms,
        whole_ms=whole_ms,
        of_chunked=chunked_ms / ms,
        of_whole=whole_ms / ms,
        fused=type(reduction) is not Reduction,
    )


def serving_reduction(model: DiffusionModel, max_num_logits: int) -> Reduction:
    """As an executor chooses it for this model and its device."""
    return KernelChoice(model, EngineConfig(max_num_logits=max_num_logits)).reduction


def table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'model':9s} {'rows':>6s} {'max_num_logits':>14s} {'chunks':>6s} {'ms':>9s} {'peak MiB':>9s} {'chunked ms':>10s} "
        f"{'whole ms':>9s} {'of chunked':>10s} {'of whole':>8s} {'fused':>5s}"
    ]
    lines += [
        f"{r.model:9s} {r.rows:6d} {r.max_num_logits:14d} {r.chunks:6d} {r.ms:9.3f} {r.peak_bytes / 2**20:9.2f} "
        f"{r.chunked_ms:10.3f} {r.whole_ms:9.3f} {r.of_chunked:10.1%} {r.of_whole:8.1%} {'yes' if r.fused else 'no':>5s}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--rows", type=int, default=2048, help="hidden states that get a token")
    parser.add_argument("--max-num-logits", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args()
    if min(*options.max_num_logits, options.rows, options.repeats) < 1:
        parser.error("--rows, --max-num-logits and --repeats count from 1")
    subject = subject_of(options)
    model, device, dtype, card = subject

    generator = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn((options.rows, model.config.d_model), generator=generator, device=device).to(dtype)
    rows: list[Row] = []
    for size in options.max_num_logits:
        rows.append(time_head(options.model, model, hidden, size, card, repeats=options.repeats))
        save(options.json, rows, **subject_facts(options, subject))
    print(table(rows))
    print(f"bounds: {card.name}; {card.source}")


if __name__ == "__main__":
    main()
