"""d2Cache (arXiv:2509.23094): each step computes the rows that need it most, and only the first step computes all rows.

Masks are chosen by their certainty times how many known tokens are near, all other rows by attention rollout. We keep two things of the
published code, as they decide its tokens. Certainties are always those of the first step; the search ends by the number of masks left,
not the block's length. We leave out a third: we never commit a place that was not computed.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from baselines.dllm.dream import timestep_decode
from baselines.dllm.options import D2CacheOptions
from engines.dllm.config import DecodeConfig, Seen
from engines.dllm.method import LEAP, PARALLEL, SERVED, Method, Options, Sampler
from engines.dllm.plan import Chosen, Request
from engines.dllm.rows import NONE, Positions, RowRule, Standing

Numbers = NDArray[np.float64]


def density(known: NDArray[np.bool_], sigma: float) -> Numbers:
    """[G] density of known tokens near each place, where the nearest count most. All tokens before the answer are known; those behind it
    are if its last token is."""
    length = len(known)
    after = np.full(length, known[-1])
    padded = np.concatenate((np.ones(length), known, after)).astype(np.float64)
    weights = np.exp(-(np.arange(-3 * length, 3 * length) ** 2) / (2 * sigma**2))
    # Place p lies at length + p, and a token at q counts by weights[3 * length + p - q].
    return np.convolve(padded, weights / weights.sum())[4 * length : 5 * length]


@dataclass
class ByNeed(RowRule):
    options: D2CacheOptions
    shift: int
    """1 if a row predicts the next token."""
    prompt_len: int = 0
    total_len: int = 0
    block: int = 0
    rows: Positions = field(default_factory=NONE.copy)
    able: Positions = field(default_factory=NONE.copy)
    """Masks of the block when the step began."""
    masks: Positions = field(default_factory=NONE.copy)
    certain: Numbers | None = None
    """[G] confidences in the first step."""
    needs: Collection[str] = frozenset({"attention"})

    def of(self, request: Request) -> "ByNeed":
        length = request.generation.gen_length
        block = min(self.options.commit_block or length, length)
        return replace(
            self,
            prompt_len=request.prompt_len,
            total_len=request.total_len,
            block=block,
            rows=np.arange(request.total_len),
        )

    def choose(self, at: Standing) -> Chosen:
        self.masks = at.masks
        first = int(at.masks[0]) - self.prompt_len
        end = self.prompt_len + (first // self.block + 1) * self.block
        self.able = at.masks[at.masks < end]
        places = at.masks[np.isin(at.masks - self.shift, self.rows)]
        weights = np.ones(len(places))
        if self.options.decoding_sigma:
            weights = density(self._known_mask(at.masks), self.options.decoding_sigma)[places - self.prompt_len]
        is_able = places < end
        commit = min(self.options.tokens_per_step, int(is_able.sum()))
        return Chosen.of(self.rows, places, commit, weights=np.where(is_able, weights, -1.0))

    def _known_mask(self, masks: Positions) -> NDArray[np.bool_]:
        known = np.ones(self.total_len - self.prompt_len, dtype=np.bool_)
        known[masks - self.prompt_len] = False
        return known

    def see(self, seen: Seen) -> None:
        assert seen.learned is not None
        if self.certain is None:
            self.certain = np.array(seen.learned.confidences)
        committed = np.array(seen.learned.places, dtype=np.int64)
        remaining = np.setdiff1d(self.masks, committed)
        if len(remaining):
            selected = self._next_masks(remaining)
            rows = np.union1d(selected - self.shift, committed)
            rows = self._add_heeded(rows, np.array(seen.learned.importance))
            if self.shift:
                rows = rows[rows != self.prompt_len - 1]
                if self.prompt_len in selected:
                    rows = np.union1d(rows, [self.prompt_len - 1])
            self.rows = self._fill_gaps(rows)

    def _next_masks(self, masks: Positions) -> Positions:
        """Return the masks to compute next."""
        assert self.certain is not None
        k, first, places = self.options.current_k, self.prompt_len, masks - self.prompt_len
        score = self.certain * density(self._known_mask(masks), self.options.cache_sigma)
        score[self.able - first] += score.max()
        last = int(places[k - 1]) if len(places) >= k else len(score) - 1
        last = (last // len(self.able) + 1) * len(self.able) - 1
        candidates = places[(places >= self.able[0] - first) & (places <= last)]
        best = candidates[np.argsort(-score[candidates], kind="stable")][:k]
        return np.sort(best) + first

    def _add_heeded(self, rows: Positions, importance: Numbers) -> Positions:
        """Add the other rows that attention depends on most."""
        rest = np.setdiff1d(np.arange(self.total_len), rows)
        if not len(rest):
            return rows
        ordered = rest[np.argsort(-importance[rest], kind="stable")]
        shares = np.cumsum(importance[ordered] / importance[ordered].sum())
        count = max(1, int(np.searchsorted(shares, self.options.rollout_p, side="right")))
        return np.union1d(rows, ordered[:count])

    def _fill_gaps(self, rows: Positions) -> Positions:
        gaps = np.diff(rows)
        return np.union1d(
            rows,
            [
                p
                for gap in np.flatnonzero((gaps > 1) & (gaps <= self.options.inflate_w))
                for p in range(rows[gap], rows[gap + 1])
            ],
        ).astype(np.int64)


class D2Cache(Method):
    name = "d2cache"
    title = "d2Cache"
    heeds = {"llada": PARALLEL | LEAP, "dream": frozenset({"threshold"})}
    own = D2CacheOptions

    def _sampler(self, family: str, own: D2CacheOptions, options: Options) -> Sampler:
        is_dream = family == "dream"
        decode = timestep_decode("maskgit_plus") if is_dream else DecodeConfig()
        decode = replace(decode, learns="attention")
        return Sampler(rule=ByNeed(own, shift=int(is_dream)), decode=decode, exact_steps=False, **SERVED)

    def has_blocks(self, family: str, options: Options) -> bool:
        return False


D2CACHE = D2Cache()
