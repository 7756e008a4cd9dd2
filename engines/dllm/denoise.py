"""The decoding operator (dLLM-Serve §4.3): make logits in bounded chunks, reduce each at once to (token, confidence), then remask.
Remasking is LLaDA's sampler's or a relative's. Logits whose columns lie on several ranks are not gathered."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from engines.dllm.config import Confidence, ConfidenceDtype, ConfidenceOf
from engines.dllm.memory import REDUCTION_ROWS
from engines.kernels import confidence as kernel
from engines.kernels.confidence import Partial, combine, combine_reference, partial_reference
from engines.models.config import span
from engines.models.protocol import DiffusionModel, Ranks
from engines.runtime.noise import gumbel, gumbel_argmax, uniform

Reduced = tuple[Tensor, Tensor]
"""token [rows] int64, confidence [rows]."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Per-row randomness, built only if some request of the step needs it. A field is None if no request needs it. Rows of other requests
    stay as they are, bit for bit."""

    temperature: Tensor
    keys: Tensor
    random_remasking: Tensor
    """Rows whose confidence is drawn at random instead of read from the model."""
    top_p: Tensor | None = None
    """1 keeps every token."""
    top_k: Tensor | None = None
    """The vocabulary's size keeps every token."""
    alg_temp: Tensor | None = None
    """0 ranks by confidence alone."""

    def rows(self, index: slice | Tensor) -> Self:
        parts: dict[str, Any] = {name: field if field is None else field[index] for name, field in vars(self).items()}
        return replace(self, **parts)

    def allowed_tokens(self, logits: Tensor, suppress_id: int | None) -> Tensor | None:
        """[rows, V] the tokens that may be drawn, at least one per row; None if all may.

        We sort softmax(logits / temperature) downwards in float64, the lower id of equals first. The shortest prefix whose sum exceeds
        ``top_p`` is kept, at most ``top_k`` tokens.
        """
        if self.top_p is None or self.top_k is None:
            return None
        logits = logits.to(torch.float64, copy=True)
        if suppress_id is not None:
            logits[:, suppress_id] = -torch.inf
        ordered, token = _scaled(logits, self.temperature).sort(dim=-1, descending=True, stable=True)
        sums = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
        rank = torch.arange(logits.shape[1], device=logits.device)
        top_p = self.top_p.unsqueeze(1)
        # Rounded sums may exceed 1.
        kept = (sums.roll(1, dims=-1) <= top_p) | (rank == 0) | (top_p >= 1)
        kept &= rank < self.top_k.unsqueeze(1)
        return torch.empty_like(kept).scatter_(1, token, kept)

    def tempered(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        """Logits of the distribution that tokens are drawn from, in the dtype of ``logits``."""
        scaled = _scaled(logits, self.temperature)
        if allowed is not None:
            scaled.masked_fill_(~allowed, -torch.inf)
        return torch.where((self.temperature > 0).unsqueeze(1), scaled, logits)

    def tokens(self, logits: Tensor, greedy: Tensor, allowed: Tensor | None) -> Tensor:
        drawn = gumbel_argmax(logits, self.temperature, self.keys, allowed)
        return torch.where(self.temperature > 0, drawn, greedy)

    def remasked(self, confidence: Tensor) -> Tensor:
        """The values that rank positions; their random numbers come from other streams than the tokens'.

        Random remasking draws the value. ``alg_temp`` a adds a times Gumbel noise: the k largest are then k draws without replacement from
        softmax(confidence / a).
        """
        drawn = uniform(~self.keys, 2)
        # Keep the NaN of logits that are not finite: it is how we find them.
        is_drawn = self.random_remasking & ~confidence.isnan()
        ranked = torch.where(is_drawn, drawn[:, 0].to(confidence.dtype), confidence)
        if self.alg_temp is None:
            return ranked
        return (ranked + self.alg_temp * gumbel(drawn[:, 1])).to(ranked.dtype)


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits / temperature, minus the largest, so that a tiny temperature does not overflow."""
    divisor = torch.where(temperature > 0, temperature, 1.0).to(logits.dtype).clamp(min=torch.finfo(logits.dtype).tiny)
    return (logits - logits.amax(dim=-1, keepdim=True)) / divisor.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Reduces each row of logits to a token and its confidence. ``suppress_id`` is never chosen but stays in the softmax, so other tokens
    keep their confidence."""

    confidence: Confidence = "max_prob"
    confidence_of: ConfidenceOf = "model"
    dtype: ConfidenceDtype = "native"
    suppress_id: int | None = None

    def __call__(self, logits: Tensor, sampling: Sampling | None) -> Reduced:
        """Return x0 and the confidence it is ranked by, in float32 at least; may overwrite ``logits``."""
        is_plain = sampling is None and self.confidence == "max_prob"
        if self.dtype == "float64" and not is_plain:
            logits = logits.to(torch.float64)
        kept = None if sampling is None else sampling.allowed_tokens(logits, self.suppress_id)
        source = logits
        if sampling is not None and self.confidence_of == "sampler":
            source = sampling.tempered(logits, kept)
        if self.confidence == "max_prob":
            token, confidence = self._most_probable(logits, source, kept, sampling)
        else:
            token, confidence = self._from_probabilities(logits, source, kept, sampling)
        # In fewer bits, draws that rank positions would tie.
        confidence = confidence.to(torch.promote_types(confidence.dtype, torch.float32))
        return token, confidence if sampling is None else sampling.remasked(confidence)

    def _most_probable(
        self, logits: Tensor, source: Tensor, allowed: Tensor | None, sampling: Sampling | None
    ) -> Reduced:
        """Reads confidences from ``source`` and draws tokens from ``logits``.

        This is the published operator, not exp(logit - logsumexp): that rounds as large logits do, and swaps or levels the confidences of a
        16-bit model.
        """
        if self.suppress_id is not None:
            suppressed = logits[:, self.suppress_id].clone()
            logits[:, self.suppress_id] = -torch.inf
        token = logits.argmax(dim=-1)
        if sampling is not None:
            token = sampling.tokens(logits, token, allowed)
        if self.suppress_id is not None:
            logits[:, self.suppress_id] = suppressed
        p = torch.softmax(source, dim=-1, dtype=torch.float64 if self.dtype == "float64" else None)
        return token, p.gather(1, token.unsqueeze(1)).squeeze(1)

    def _from_probabilities(
        self, logits: Tensor, source: Tensor, allowed: Tensor | None, sampling: Sampling | None
    ) -> Reduced:
        """Dream's confidences need the whole distribution: top-1 minus top-2, or negative entropy."""
        p = torch.softmax(source, dim=-1)
        if self.suppress_id is not None:
            logits[:, self.suppress_id] = -torch.inf
        token = (p if self.suppress_id is None else logits).argmax(dim=-1)
        if sampling is not None:
            token = sampling.tokens(logits, token, allowed)
        if self.confidence == "margin":
            top = p.topk(2, dim=-1).values
            return token, top[:, 0] - top[:, 1]
        if p.dtype == torch.float16:
            p = p.float()  # float16 cannot hold 1e-10
        return token, (p * torch.log(p + 1e-10)).sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class FusedReduction(Reduction):
    """``Reduction`` with greedy tokens and their probabilities from one kernel, which sums in float32 and rounds to the logits' dtype, as
    torch's softmax does. Draws and other confidences need whole distributions, and get them from torch."""

    def __call__(self, logits: Tensor, sampling: Sampling | None) -> Reduced:
        if sampling is not None or self.confidence != "max_prob" or self.dtype != "native":
            return super().__call__(logits, sampling)
        token, probability = kernel.confidence(logits, self.suppress_id)
        return token, probability.to(logits.dtype).to(torch.float32)


def reduce_in_chunks(
    project: Callable[[Tensor], Tensor],
    rows: Tensor,
    max_num_logits: int,
    reduction: Reduction,
    sampling: Sampling | None,
) -> Reduced:
    """Logit decomposition (§4.3): at most ``max_num_logits`` rows of logits exist at any time.

    ``project`` returns the logits of a part of ``rows``; chunks are made and released one by one.
    """
    # Float64 copies are several times as wide as the chunk that the budget counts.
    reduce = partial(reduce_in_parts, reduction) if reduction.dtype == "float64" else reduction
    parts = [slice(start, start + max_num_logits) for start in range(0, rows.shape[0], max_num_logits)]
    reduced = [reduce(project(rows[part]), None if sampling is None else sampling.rows(part)) for part in parts]
    return concat(reduced)


def concat(parts: Iterable[Reduced]) -> Reduced:
    """Concatenate the results of consecutive parts of the rows."""
    tokens, confidences = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(confidences)


def reduce_in_parts(
    reduce: Callable[[Tensor, Sampling | None], Reduced], logits: Tensor, sampling: Sampling | None
) -> Reduced:
    """Apply ``reduce`` to at most REDUCTION_ROWS rows at a time, so that only so many are copied at once. ``reduce`` must treat each row by
    itself: then this changes no number."""
    num_parts = -(-logits.shape[0] // REDUCTION_ROWS)
    if num_parts <= 1:
        return reduce(logits, sampling)
    # Parts have nearly equal sizes, so none is a single row, which some kernels would sum in another order.
    parts = logits.tensor_split(num_parts)
    bounds = pairwise([0, *accumulate(part.shape[0] for part in parts)])
    return concat(
        reduce(part, None if sampling is None else sampling.rows(slice(*limits)))
        for part, limits in zip(parts, bounds, strict=True)
    )


def choose(
    confidence: Tensor,
    commit: Tensor | int,
    threshold: Tensor | None = None,
    factor: Tensor | None = None,
    leap: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """[n, B] bool: which positions to commit. Ties go to the lower position (``stable``).

    ``confidence`` [n, B] is -inf where nothing may be committed; ``commit`` [n] is the quota, or one number for all. With a ``threshold``
    [n] (inf if a request has none) we also take every position that reaches it. With a ``factor`` [n] (0 if a request has none) Fast-dLLM's
    factor rule says how many. ``leap`` holds LocalLeap's anchor level (inf if a request has none), neighbour level and radius, [n] each.
    With it we also take positions near a chosen anchor that reach the neighbour level.
    """
    if isinstance(commit, int) and commit == 1 and threshold is None and factor is None:
        best = confidence.argmax(dim=-1, keepdim=True)  # argmax takes the first of equals, as documented
        return torch.zeros_like(confidence, dtype=torch.bool).scatter_(1, best, True) & (confidence > -torch.inf)
    order = confidence.sort(dim=-1, descending=True, stable=True).indices
    if isinstance(commit, int):
        commit = torch.full_like(order[:, 0], commit)
    places = torch.arange(confidence.shape[1], device=confidence.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    if factor is not None:
        commit = torch.where(factor > 0, _num_passing(confidence.gather(1, order), factor), commit)
    chosen = rank < commit.unsqueeze(1)
    if threshold is not None:
        chosen |= confidence >= threshold.unsqueeze(1)
    if leap is not None:
        anchor, neighbor, radius = (level[:, None, None] for level in leap)
        is_anchor = (chosen & (confidence >= anchor[:, 0])).unsqueeze(1)
        is_near = (places[:, :, None] - places[:, None, :]).abs() <= radius
        chosen |= (is_anchor & is_near).any(dim=2) & (confidence >= neighbor[:, 0])
    return chosen & (confidence > -torch.inf)


def _num_passing(ranked: Tensor, factor: Tensor) -> Tensor:
    """[n] tokens that the factor rule commits of ``ranked`` [n, B], best first and -inf past the candidates.

    The j-th (from 1) needs 1 - factor / (j + 1). The first always passes, and the first to fail ends the run. We keep upstream's quirk: if
    only the very last candidate fails, it is committed too.
    """
    rank = torch.arange(1, ranked.shape[1] + 1, device=ranked.device)
    level = 1 - factor.unsqueeze(1) / (rank + 1)
    candidates = (ranked > -torch.inf).sum(dim=1)
    passes = (ranked >= level) | (rank == 1)
    run = passes.long().cumprod(dim=1).sum(dim=1).minimum(candidates)
    return torch.where(run == candidates - 1, candidates, run)


def choose_parity(confidence: Tensor, commit: list[int], offsets: list[int], lengths: list[int]) -> Tensor:
    """Like ``choose``, but by ``torch.topk`` on a 1-D tensor of the length that the published sampler ranks. It ranks all T positions on a
    Refresh, the window on a Reuse; the order of ties is the library's."""
    chosen = torch.zeros_like(confidence, dtype=torch.bool)
    for i, (count, offset, length) in enumerate(zip(commit, offsets, lengths, strict=True)):
        if count == 0:
            continue
        ranked = confidence.new_full((length,), -torch.inf)
        width = min(confidence.shape[1], length - offset)
        ranked[offset : offset + width] = confidence[i, :width]
        index = torch.topk(ranked, count).indices - offset
        chosen[i, index[(index >= 0) & (index < width)]] = True
    return chosen & (confidence > -torch.inf)


@dataclass(frozen=True, kw_only=True)
class VocabularyReduction(Reduction):
    """``Reduction`` by ``max_prob``, without sampling, of the columns [first, first + own) that a rank holds.

    Ranks exchange four numbers per row: the best logit that may be chosen, its id, the largest logit, and the exponentials' sum relative to
    it. All ranks get the same answer: the lowest id of equal logits, as in one process. Confidences differ from one process's only by the
    rounding of sums.
    """

    ranks: Ranks
    first: int
    is_fused: bool = False
    """Whether the Triton kernel computes a rank's numbers."""

    def __call__(self, logits: Tensor, sampling: Sampling | None) -> Reduced:
        """``logits`` [rows, own], from ``DiffusionModel.local_logits``, may be overwritten."""
        assert sampling is None, "tokens are drawn from whole rows"
        is_wide = self.dtype == "float64"
        wide_dtype = torch.float64 if is_wide else torch.promote_types(logits.dtype, torch.float32)
        is_fused = self.is_fused and not is_wide
        reduce = kernel.partial if is_fused else partial_reference
        # Ids are exact in float64, and so are logits of any dtype.
        part = reduce(logits.to(torch.float64) if is_wide else logits, self.suppress_id, self.first)
        our_part = torch.stack([field.double() for field in part])
        best, token, maximum, sumexp = self.ranks.all_gather(our_part.unsqueeze(0), dim=0).unbind(1)
        parts = Partial(best.to(wide_dtype), token.long(), maximum.to(wide_dtype), sumexp.to(wide_dtype))
        token, confidence = combine(parts) if is_fused else combine_reference(parts)
        rounded = confidence if is_wide else confidence.to(logits.dtype)
        return token, rounded.to(wide_dtype)


def vocabulary_reduction(
    reduction: Reduction, model: DiffusionModel, *, is_fused: bool = False
) -> VocabularyReduction | None:
    """Return the same reduction for ``model.local_logits``, for steps that draw nothing at random. None if the model is whole, or
    ``reduction`` needs whole rows."""
    ranks = model.tensor_parallel
    if ranks is None or reduction.confidence != "max_prob":
        return None
    first, _ = span(model.config.vocab_size, ranks.rank, ranks.size)
    return VocabularyReduction(**vars(reduction), ranks=ranks, is_fused=is_fused, first=first)
