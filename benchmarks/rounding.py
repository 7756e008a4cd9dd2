"""How often bfloat16 changes what a mixture of experts (LLaDA2) says, and which experts it asks: python benchmarks/rounding.py --help

    token    masked places whose most likely token is float32's: the holes of the first block behind each prompt, all at once
    experts  hidden states that get the same set of experts from LLaDA2-mini's router (256 in 8 groups, 8 of the best 4; width 2048, random
             weights) once they are rounded; and once the router is rounded as well, which the engine never does

Prompts are of random ids. Without --model the mixture is tiny-llada2 with random weights, drawn in bfloat16 and widened: only the arithmetic
differs. A checkpoint is loaded in both, so that rounding its weights counts. On the CPU.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from common import Rows, add_counts, parser_of, run, shown, table
from torch import Tensor

from engines.errors import require
from engines.models.block_config import LLADA2_MINI, BlockConfig
from engines.models.layers import FusedOps, fuse
from engines.models.llada2 import LLaDA2Model, Router
from engines.models.loader import load_block
from engines.models.packed import PackedModel
from repro.checks.plain_blocks import masked_logits
from repro.runs.statistics import wilson_interval
from repro.systems.block.settings import TINY


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str = shown("equal in bfloat16 and float32")
    share: float = shown("share %", ".2f", 100)
    low: float = shown("from", ".2f", 100)
    high: float = shown("to", ".2f", 100)
    equal: int = shown("equal")
    n: int = shown("n")

    @staticmethod
    def of(what: str, is_equal: Tensor) -> Row:
        equal, n = int(is_equal.sum()), is_equal.numel()
        low, high = wilson_interval(equal, n)
        return Row(what=what, share=equal / n, low=low, high=high, equal=equal, n=n)


def main() -> None:
    parser = parser_of(__doc__)
    add_counts(parser, prompts=(200, "of 1 to 64 tokens"), states=(10_000, "hidden states"))
    parser.add_argument("--model", help="a LLaDA2 checkpoint's directory")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    name = options.model or "tiny-llada2"
    rows = Rows(options.json, {"model": name, "seed": options.seed, "torch": torch.__version__})
    exact, rounded = load_pair(options.model)
    rows.add(Row.of(f"token ({name})", equal_tokens(exact, rounded, options.prompts, options.seed)))
    states, both = equal_experts(options.states, options.seed)
    rows.add(Row.of("experts, states rounded", states))
    rows.add(Row.of("experts, states and router rounded", both))
    print(table(rows.rows))


def load_pair(model: str | None) -> tuple[LLaDA2Model, LLaDA2Model]:
    """In float32 and in bfloat16."""
    if model is None:
        rounded = load_block(TINY["tiny-llada2"], weights="random", dtype=torch.bfloat16)
        exact = copy.deepcopy(rounded).to(torch.float32)
        fuse(exact, FusedOps(joins=False))  # joined products hold the weights of before
    else:
        exact, rounded = load_block(model), load_block(model, dtype=torch.bfloat16)
    if not isinstance(exact, LLaDA2Model) or not isinstance(rounded, LLaDA2Model):
        require(False, f"model={model!r} has no experts: give a LLaDA2 checkpoint")
        raise AssertionError
    return exact, rounded


def equal_tokens(exact: PackedModel[BlockConfig], rounded: PackedModel[BlockConfig], prompts: int, seed: int) -> Tensor:
    """[places] of all prompts."""
    config, generator, found = exact.config, torch.Generator().manual_seed(seed), []
    block, mask = config.block_length, config.mask_token_id
    for length in torch.randint(1, 65, (prompts,), generator=generator).tolist():
        prompt = torch.randint(0, mask, (length,), generator=generator).tolist()
        ids = prompt + [mask] * (block - length % block)
        best = [masked_logits(model, ids, block)[length:].float().argmax(-1) for model in (exact, rounded)]
        found.append(best[0] == best[1])
    return torch.cat(found)


@torch.inference_mode()
def equal_experts(states: int, seed: int) -> tuple[Tensor, Tensor]:
    """[states] of which the states alone are rounded, and of which the router is too. Its weights are as random ones are drawn; a
    state has the length that a norm gives it."""
    width, config = LLADA2_MINI.d_model, LLADA2_MINI.experts
    assert config is not None
    generator = torch.Generator().manual_seed(seed)
    router = Router(width, config)
    for held in router.parameters():
        held.normal_(0.0, 0.02, generator=generator)
    narrow = Router(width, config)
    narrow.load_state_dict({name: held.bfloat16() for name, held in router.state_dict().items()})
    equal: tuple[list[Tensor], list[Tensor]] = ([], [])
    for start in range(0, states, 1000):
        h = torch.randn(min(1000, states - start), width, generator=generator)
        wanted = _experts(router, h)
        for same, each in zip(equal, (router, narrow), strict=True):
            same.append((_experts(each, h.bfloat16()) == wanted).all(dim=1))
    return torch.cat(equal[0]), torch.cat(equal[1])


def _experts(router: Router, h: Tensor) -> Tensor:
    """Sets: in order of their numbers."""
    return router(h)[0].sort(dim=1).values


if __name__ == "__main__":
    run(main)
