"""Block diffusion plainly: one request, every forward over the whole sequence under the mask of blocks, rules in lists."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.blockdiffusion.rules import (
    DecodeRule,
    Dynamic,
    JointThreshold,
    LowConfidence,
    Sequential,
    Static,
    SubBlocks,
)
from engines.models.block_config import BlockConfig
from engines.models.packed import PackedModel

Logits = Callable[[PackedModel[BlockConfig], list[int], int], Tensor]


@torch.inference_mode()
def masked_logits(model: PackedModel[BlockConfig], ids: list[int], block: int) -> Tensor:
    """[N, V] of a whole sequence through the packed model, with the mask of blocks in its attention."""
    position = torch.arange(len(ids))
    seen = (position // block)[None] <= (position // block)[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)

    return model.logits(model(torch.tensor(ids), position, attend))


@dataclass
class Plain:
    ids: list[int] = field(default_factory=list)
    """Tokens of whole blocks, behind the prompt."""
    denoised: int = 0
    sglang_forwards: int = 0
    """What SGLang's loop makes of the same: it runs a block that is final once more, and one that the limit of edits ended twice."""
    trace: list[tuple[list[int], list[float]]] = field(default_factory=list)
    """Tokens and confidences of every denoise, over the block."""


def plain_take(
    rule: DecodeRule,
    ids: list[int],
    holes: list[int],
    given: list[int],
    tokens: list[int],
    conf: list[float],
    step: int,
) -> set[int]:
    """Places that take their token; ``holes`` and ``given`` are places."""
    size = len(ids)
    by_confidence = sorted(holes, key=lambda i: (-conf[i], i))
    share = 0
    if isinstance(rule, Static | Dynamic | Sequential):
        share = size // rule.steps + (1 if step < size % rule.steps else 0)
    if isinstance(rule, Static):
        return set(by_confidence[:share])
    if isinstance(rule, Sequential):
        return set(sorted(holes)[:share])
    if isinstance(rule, Dynamic):
        sure = {i for i in holes if conf[i] > rule.threshold}
        return sure if len(sure) >= share else set(by_confidence[:share])
    if isinstance(rule, SubBlocks):
        part = min(holes) // rule.length
        by_confidence = [i for i in by_confidence if i // rule.length == part]
        return {i for i in by_confidence if conf[i] > rule.threshold} | {by_confidence[0]}
    assert isinstance(rule, LowConfidence | JointThreshold)
    found = {i for i in holes if conf[i] > rule.threshold} or set(by_confidence[:1])
    if isinstance(rule, JointThreshold):
        written = set(range(size)) - set(holes) - set(given)
        found |= {i for i in written if conf[i] > rule.edit_threshold and tokens[i] != ids[i]}
    return found


@torch.inference_mode()
def plain_run(
    model: PackedModel[BlockConfig],
    prompt: list[int],
    gen_length: int,
    rule: DecodeRule,
    block: int,
    logits: Logits = masked_logits,
) -> Plain:
    """Whole blocks until ``gen_length`` tokens are there; nothing stops it before."""
    config, found = model.config, Plain()
    whole = len(prompt) // block * block
    final, opening = list(prompt[:whole]), list(prompt[whole:])
    while len(final) < len(prompt) + gen_length:
        if config.shifts_logits and not opening and final:
            row = logits(model, final, block)[-1]
            row[config.mask_token_id] = -torch.inf
            opening = [int(row.argmax())]
        ids = opening + [0] * (block - len(opening))
        given = list(range(len(opening)))
        holes = [i for i in range(block) if i not in given]
        step = full = 0
        while True:
            shown = [config.mask_token_id if i in holes else ids[i] for i in range(block)]
            rows = logits(model, final + shown, block)
            if config.shifts_logits:
                rows = torch.cat((rows[:1], rows[:-1]))
            rows = rows[-block:]
            conf = rows.softmax(-1)
            rows[:, config.mask_token_id] = -torch.inf
            tokens = rows.argmax(-1)
            sure = conf.gather(1, tokens[:, None])[:, 0].tolist()
            found.trace.append((tokens.tolist(), sure))
            take = plain_take(rule, ids, holes, given, tokens.tolist(), sure, step)
            full += not holes
            for i in take:
                ids[i] = int(tokens[i])
            holes = [i for i in holes if i not in take]
            step += 1
            found.denoised += 1
            if holes:
                continue
            if not isinstance(rule, JointThreshold) or not take or full >= rule.max_post_steps:
                found.sglang_forwards += step + 1 + (isinstance(rule, JointThreshold) and bool(take))
                break
        final, opening = final + ids, []
    found.ids = final[len(prompt) :]
    return found
