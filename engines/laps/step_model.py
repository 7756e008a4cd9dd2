"""What the policies believe a step takes: fitted to timed steps, by the same code for a simulated and a real instance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from engines.errors import require
from engines.least_squares import Floats, nonnegative_fit
from engines.policies.step import Bucket, Chunk, Fallback, Rung, StepTimes

LENGTHS = (1, 16, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
"""Tokens of a lone prompt in a profile."""
HISTORIES = (0, 1024, 4096)
BATCHES = ((8, 16), (8, 64), (32, 16), (32, 64), (8, 256))
"""(prompts, tokens of each)."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """T = base + request B + max(floor, token N + alpha sum L (L + 2H) + history sum H), by least squares.

    N = sum L. A captured shape has its own time, measured; histories add to it as above.
    """

    base_s: float
    request_s: float
    floor_s: float
    token_s: float
    alpha: float
    history_s: float
    shapes: Mapping[Bucket | Rung, float]
    fallback_s: float = 0.0
    """Seconds of looking for a graph in vain."""
    mean_error: float = 0.0

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        tokens = histories = 0
        pairs = crossed = 0.0
        for history, new in chunks:
            tokens += new
            histories += history
            pairs += new * new
            crossed += new * history
        requests_s = self.request_s * len(chunks)
        if isinstance(mode, Bucket | Rung):
            over_s = 2 * self.alpha * crossed + self.history_s * histories
            if isinstance(mode, Rung):
                over_s += self.alpha * pairs
            return self.shapes[mode] + requests_s + over_s
        work_s = self.token_s * tokens + self.alpha * (pairs + 2 * crossed) + self.history_s * histories
        busy_s = self.base_s + requests_s + max(self.floor_s, work_s)
        return busy_s + self.fallback_s if isinstance(mode, Fallback) else busy_s

    def work_s(self, history: int, tokens: int) -> float:
        """What a prefill adds to a step that is longer than the floor anyway."""
        return (
            self.request_s
            + self.token_s * tokens
            + self.alpha * tokens * (tokens + 2 * history)
            + self.history_s * history
        )

    def prefill_s(self, history: int, tokens: int, degree: int = 1) -> float:
        """One prompt alone, an ``Estimator``'s answer."""
        return self.step_s((Chunk(history, tokens),), 0, 0)

    @property
    def knee_tokens(self) -> float:
        """Tokens of a step below which the floor decides its time."""
        return self.floor_s / self.token_s

    @staticmethod
    def profile(
        timed: StepTimes,
        shapes: Iterable[Bucket | Rung] = (),
        *,
        lengths: Sequence[int] = LENGTHS,
        histories: Sequence[int] = HISTORIES,
        batches: Sequence[tuple[int, int]] = BATCHES,
    ) -> StepModel:
        """Time steps of ``timed`` and fit the model; the grid should cover the workload's lengths."""
        steps = [(1, history, length) for history, length in product(histories, lengths)]
        steps += [(batch, 0, length) for batch, length in batches]
        times = np.array([timed.step_s([Chunk(history, length)] * batch, 0, 0) for batch, history, length in steps])
        # B, N, sum L (L + 2H), sum H
        features = np.array([(b, b * length, b * length * (length + 2 * h), b * h) for b, h, length in steps])
        coefficients, error = _fit(features, times)
        names = ("base_s", "request_s", "floor_s", "token_s", "alpha", "history_s")
        fitted = StepModel(**dict(zip(names, coefficients, strict=True)), shapes={}, mean_error=error)
        return fitted.replaying(timed, shapes)

    def replaying(self, timed: StepTimes, shapes: Iterable[Bucket | Rung]) -> StepModel:
        """The same model with graphs of these shapes captured, timed too."""
        replays: dict[Bucket | Rung, float] = {}
        for shape in shapes:
            if isinstance(shape, Bucket):
                replays[shape] = timed.step_s([Chunk(0, shape.length)] * shape.batch, 0, 0, shape)
                replays[shape] -= self.request_s * shape.batch
            else:
                replays[shape] = timed.step_s([Chunk(0, shape.tokens)], 0, 0, shape) - self.request_s
                replays[shape] -= self.alpha * shape.tokens**2
        if not replays:
            return self
        lone = [Chunk(0, LENGTHS[0])]
        looked_s = timed.step_s(lone, 0, 0, Fallback()) - timed.step_s(lone, 0, 0)
        return replace(self, shapes=replays, fallback_s=max(0.0, looked_s))


def _fit(features: Floats, times: Floats) -> tuple[tuple[float, ...], float]:
    """base, request, floor, token, alpha, history and the mean relative error.

    The larger of two pieces is fitted in turns: which steps lie on the floor, then least squares. It starts from
    every knee between measured sizes and keeps the best end.
    """
    requests, tokens, pairs, histories = features.T
    ones = np.ones(len(times))
    sizes = np.unique(tokens)
    require(len(sizes) >= 4, f"{len(sizes)} different step sizes: time at least 4 to find the floor")
    best: tuple[float, Floats, float] | None = None
    fits: dict[bytes, Floats] = {}  # ways from different knees meet
    for knee in sizes[1:-1]:
        floor = tokens <= knee
        for _ in range(20):
            if floor.tobytes() not in fits:
                off = np.where(floor, 0.0, 1.0)
                columns = [ones, requests, floor.astype(np.float64), off * tokens, off * pairs, off * histories]
                fits[floor.tobytes()] = nonnegative_fit(np.stack(columns, axis=1), times)
            found = fits[floor.tobytes()]
            work = found[3] * tokens + found[4] * pairs + found[5] * histories
            moved = work <= found[2]
            if (moved == floor).all() or not moved.any() or moved.all():
                break
            floor = moved
        ratio = (found[0] + found[1] * requests + np.maximum(found[2], work)) / times - 1
        loss = float((ratio**2).sum())
        if best is None or loss < best[0]:
            best = loss, found, float(np.abs(ratio).mean())
    assert best is not None
    return tuple(float(value) for value in best[1]), best[2]
