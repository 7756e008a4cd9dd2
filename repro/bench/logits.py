"""Times the output head with the reduction that serves, in chunks of max_num_logits: python -m repro.bench.logits --help

    ms          of all rows, from hidden states to a token and a confidence each
    peak_bytes  largest memory held at once beyond the hidden states and the weights
    chunked_ms  lower bound of this chunking: the head's weights once for every chunk, logits written once
    whole_ms    lower bound of any: the head's weights once, logits never stored
    of_...      bound / ms
    fused       whether the reduction is one kernel (engines/dllm/executor/kernel_choice.py)

Bounds are at the card's datasheet peaks or at measured ones.
"""

from statistics import median
from typing import Any

import torch
from torch import Tensor

from engines.cost.peaks import seconds_of
from engines.cost.roofline import Gpu, Roofline, StepWork
from engines.dllm.config import EngineConfig
from engines.dllm.denoise import Reduced, Reduction, reduce_in_chunks
from engines.dllm.executor.compose import peak_bytes
from engines.dllm.executor.kernel_choice import KernelChoice
from engines.models.protocol import DiffusionModel
from engines.models.shape import ModelShape
from repro.bench.common import Rows, add_counts, add_model, parser_of, run, subject_of, table


def time_head(
    name: str, model: DiffusionModel, hidden: Tensor, max_num_logits: int, card: Gpu, *, repeats: int
) -> dict[str, Any]:
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
    return {
        "model": name,
        "rows": rows,
        "max_num_logits": max_num_logits,
        "chunks": chunks,
        "ms": ms,
        "peak_bytes": peak_bytes(head, hidden.device),
        "chunked_ms": chunked_ms,
        "whole_ms": whole_ms,
        "of_chunked": chunked_ms / ms,
        "of_whole": whole_ms / ms,
        "fused": type(reduction) is not Reduction,
    }


def serving_reduction(model: DiffusionModel, max_num_logits: int) -> Reduction:
    """As an executor chooses it for this model and its device."""
    return KernelChoice(model, EngineConfig(max_num_logits=max_num_logits)).reduction


def main() -> None:
    parser = parser_of(__doc__)
    add_model(parser)
    add_counts(
        parser,
        rows=(2048, "hidden states that get a token"),
        max_num_logits=((64, 128, 256, 512, 1024, 2048), "rows of a chunk"),
        repeats=(5, "calls timed"),
    )
    options = parser.parse_args()
    subject = subject_of(options)
    model, device, dtype, card = subject

    generator = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn((options.rows, model.config.d_model), generator=generator, device=device).to(dtype)
    rows = Rows(options.json, subject.facts)
    for size in options.max_num_logits:
        rows.add(time_head(options.model, model, hidden, size, card, repeats=options.repeats))
    print(table(rows.rows))
    print(f"bounds: {card.name}; {card.source}")


if __name__ == "__main__":
    run(main)
