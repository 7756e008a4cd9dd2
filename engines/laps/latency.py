"""The latency model and the boundary between short and long (LAPS §2.1), as printed and with the floor it lacks; and waits (§2.2).

As printed, T_comp = alpha L (L + 2H) + beta L and T_mem = gamma_w L + gamma_r H. L are new tokens, H cached ones. This model has
no term for reading the weights. So its prefill boundary (gamma_w - beta) / alpha is 0 on any GPU, as beta exceeds gamma_w some
hundredfold. ``FloorForm`` adds that floor, T = max(c, beta L) + alpha L (L + 2H) + gamma_r H. T_comp and T_mem cannot be timed apart:
in a total, beta and gamma_w are one coefficient.

``StepModel`` is the step time that policies believe in. It is fitted to timed steps of a simulated or a real instance.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import numpy as np

from engines.errors import require
from engines.knobs import Checked, Range
from engines.least_squares import Floats, nonnegative_fit
from engines.policies.views import Bucket, Chunk, Fallback, Rung, StepTimes


@dataclass(frozen=True, kw_only=True)
class PaperForm:
    """The four coefficients of LAPS §2.1, seconds per token (alpha: per token squared)."""

    alpha: float
    beta: float
    gamma_w: float
    gamma_r: float

    def boundary(self, history: float = 0.0) -> float:
        """L_m of prefill (H = 0) and re-prefill: the root of alpha L^2 + (2 alpha H + beta - gamma_w) L = gamma_r H."""
        return _positive_root(self.alpha, 2 * self.alpha * history + self.beta - self.gamma_w, self.gamma_r * history)

    @property
    def boundary_limit(self) -> float:
        """L_m as H grows without end: gamma_r / (2 alpha)."""
        return self.gamma_r / (2 * self.alpha) if self.alpha else math.inf


@dataclass(frozen=True, kw_only=True)
class FloorForm:
    """T = base + max(c, beta L) + alpha L (L + 2H) + gamma_r H."""

    base_s: float
    c: float
    beta: float
    alpha: float
    gamma_r: float
    mean_error: float
    """Mean |fit - measured| / measured over the samples."""

    def time_s(self, tokens: float, history: float = 0.0) -> float:
        attention_s = self.alpha * tokens * (tokens + 2 * history)
        return self.base_s + max(self.c, self.beta * tokens) + attention_s + self.gamma_r * history

    @property
    def boundary(self) -> float:
        """L_m = c / beta: below it a step is as long as an empty one."""
        return self.c / self.beta if self.beta else math.inf

    def boundary_over(self, history: float) -> float:
        """L at which compute overtakes memory, if the floor is the read of the weights; it falls as H grows."""
        return _positive_root(self.alpha, 2 * self.alpha * history + self.beta, self.c + self.gamma_r * history)


def _positive_root(a: float, b: float, c: float) -> float:
    """The positive root of a x^2 + b x = c with a, c >= 0; 0 if there is none."""
    if a == 0:
        return c / b if b > 0 else math.inf if c > 0 else 0.0
    # Both forms are the same root; each cancels for one sign of b.
    root = math.sqrt(b * b + 4 * a * c)
    return 2 * c / (b + root) if b > 0 else (root - b) / (2 * a)


# ---- fitting -------------------------------------------------------------------------------------


def fit_paper_form(
    tokens: Sequence[float], history: Sequence[float], comp_s: Sequence[float], mem_s: Sequence[float]
) -> PaperForm:
    """Fit non-negative coefficients to compute times and to memory times that are known apart."""
    new, cached = _columns(tokens, history)
    alpha, beta = nonnegative_fit(np.stack([new * (new + 2 * cached), new], axis=1), np.asarray(comp_s))
    gamma_w, gamma_r = nonnegative_fit(np.stack([new, cached], axis=1), np.asarray(mem_s))
    return PaperForm(alpha=float(alpha), beta=float(beta), gamma_w=float(gamma_w), gamma_r=float(gamma_r))


def fit_paper_totals(tokens: Sequence[float], history: Sequence[float], total_s: Sequence[float]) -> PaperForm:
    """Fit total times: beta holds beta + gamma_w, gamma_w is 0, and a floor of the times ends up in gamma_r."""
    new, cached = _columns(tokens, history)
    features = np.stack([new * (new + 2 * cached), new, cached], axis=1)
    alpha, beta, gamma_r = nonnegative_fit(features, np.asarray(total_s))
    return PaperForm(alpha=float(alpha), beta=float(beta), gamma_w=0.0, gamma_r=float(gamma_r))


def fit_floor_form(
    tokens: Sequence[float], history: Sequence[float], total_s: Sequence[float], *, has_base: bool = True
) -> FloorForm:
    """Fit with the least squared relative error, over all places of the knee c / beta between measured lengths.

    Without ``has_base`` the overhead of a step counts as part of c.
    """
    new, cached = _columns(tokens, history)
    times = np.asarray(total_s)
    lengths = np.unique(new)
    best_fit: tuple[float, Floats] | None = None
    base = np.full_like(new, 1.0 if has_base else 0.0)
    shared = [base, new * (new + 2 * cached), cached]
    for knee in lengths[1:-1]:
        on_floor = new <= knee
        features = np.stack([*shared, on_floor.astype(np.float64), np.where(on_floor, 0.0, new)], axis=1)
        solution = nonnegative_fit(features, times)
        fitted = solution[0] * base + solution[1] * shared[1] + solution[2] * cached
        fitted += np.maximum(solution[3], solution[4] * new)
        loss = float(((fitted / times - 1) ** 2).sum())
        if best_fit is None or loss < best_fit[0]:
            best_fit = loss, solution
    assert best_fit is not None
    base_s, alpha, gamma_r, c, beta = (float(value) for value in best_fit[1])
    form = FloorForm(base_s=base_s, c=c, beta=beta, alpha=alpha, gamma_r=gamma_r, mean_error=0.0)
    samples = zip(new.tolist(), cached.tolist(), times.tolist(), strict=True)
    errors = [abs(form.time_s(new_tokens, old) / time - 1) for new_tokens, old, time in samples]
    return replace(form, mean_error=math.fsum(errors) / len(errors))


def _columns(tokens: Sequence[float], history: Sequence[float]) -> tuple[Floats, Floats]:
    return np.asarray(tokens, dtype=np.float64), np.asarray(history, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class TwoClasses(Checked):
    """An M/G/1 queue of two constant service times, first come, first served."""

    rate: Annotated[float, Range(above=0)]
    """lambda, of both classes together."""
    short_share: Annotated[float, Range(0, 1)]
    """p."""
    short_s: float
    """S_s."""
    long_s: float
    """S_l."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.short_s <= self.long_s, f"short_s={self.short_s} must be above 0 and at most {self.long_s}")
        require(self.load < 1, f"load={self.load:.3g} must be below 1: lower the rate")

    @property
    def mean_s(self) -> float:
        return self.short_share * self.short_s + (1 - self.short_share) * self.long_s

    @property
    def load(self) -> float:
        """rho."""
        return self.rate * self.mean_s

    @property
    def wait_s(self) -> float:
        """W = lambda E[S^2] / (2 (1 - rho)), of either class."""
        variance = self.short_share * (1 - self.short_share) * (self.long_s - self.short_s) ** 2
        # The formula of Pollaczek and Khinchine, for service times of any variance.
        return self.rate * (variance + self.mean_s**2) / (2 * (1 - self.load))

    @property
    def hol_penalty_s(self) -> float:
        """lambda p (1 - p) (S_l - S_s)^2 / (2 (1 - rho)): what differing lengths add to every wait."""
        return (
            self.rate
            * self.short_share
            * (1 - self.short_share)
            * (self.long_s - self.short_s) ** 2
            / (2 * (1 - self.load))
        )

    def draw(self, num: int, seed: int) -> tuple[Floats, Floats]:
        """[num] gaps between Poisson arrivals, of which the first lies before the first job, and [num] service times."""
        rng = np.random.default_rng(seed)
        service_s = np.where(rng.random(num) < self.short_share, self.short_s, self.long_s)
        return rng.exponential(1 / self.rate, num), service_s


def waits_s(gaps_s: Floats, service_s: Floats) -> Floats:
    """Wait of each job, first come, first served, one at a time: W' = max(0, W + S - A) (Lindley). We compute it as a walk above its
    running minimum."""
    walk = np.concatenate([[0.0], np.cumsum(service_s[:-1] - gaps_s[1:])])
    return walk - np.minimum.accumulate(walk)


LENGTHS = (1, 16, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
"""Tokens of a lone prompt in a profile."""
HISTORIES = (0, 1024, 4096)
BATCHES = ((8, 16), (8, 64), (32, 16), (32, 64), (8, 256))
"""(prompts, tokens of each)."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """T = base + request B + max(floor, token N + alpha sum L (L + 2H) + history sum H), by least squares.

    N = sum L. A captured shape has its own measured time, to which histories add as above.
    """

    base_s: float
    request_s: float
    floor_s: float
    token_s: float
    alpha: float
    history_s: float
    shapes: Mapping[Bucket | Rung, float]
    fallback_s: float = 0.0
    """Seconds of a look-up that finds no graph."""
    mean_error: float = 0.0

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int, mode: object = None) -> float:
        tokens = histories = 0
        pairs = cross_pairs = 0.0
        for history, new in chunks:
            tokens += new
            histories += history
            pairs += new * new
            cross_pairs += new * history
        requests_s = self.request_s * len(chunks)
        if isinstance(mode, Bucket | Rung):
            over_s = 2 * self.alpha * cross_pairs + self.history_s * histories
            if isinstance(mode, Rung):
                over_s += self.alpha * pairs
            return self.shapes[mode] + requests_s + over_s
        work_s = self.token_s * tokens + self.alpha * (pairs + 2 * cross_pairs) + self.history_s * histories
        busy_s = self.base_s + requests_s + max(self.floor_s, work_s)
        return busy_s + self.fallback_s if isinstance(mode, Fallback) else busy_s

    def work_s(self, history: int, tokens: int) -> float:
        """Seconds that a prefill adds to a step that is longer than the floor anyway."""
        return (
            self.request_s
            + self.token_s * tokens
            + self.alpha * tokens * (tokens + 2 * history)
            + self.history_s * history
        )

    @property
    def terms(self) -> tuple[float, ...]:
        """The constants of the model, without captured shapes."""
        of_work = self.token_s, self.alpha, self.history_s
        return self.base_s, self.request_s, self.floor_s, *of_work, self.fallback_s

    def batch_s(self, requests: int, tokens: int) -> float:
        """Seconds of a step of ``requests`` prompts without history. Their attention counts as that of one prompt of ``tokens``."""
        return self.step_s((Chunk(0, tokens),), 0, 0) + self.request_s * (requests - 1)

    def prefill_s(self, history: int, tokens: int, degree: int = 1) -> float:
        """Seconds of one prompt alone, as an ``Estimator`` returns them."""
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
    ) -> "StepModel":
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

    def replaying(self, timed: StepTimes, shapes: Iterable[Bucket | Rung]) -> "StepModel":
        """Return the same model with the timed graphs of these shapes."""
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
        fallback_s = timed.step_s(lone, 0, 0, Fallback()) - timed.step_s(lone, 0, 0)
        return replace(self, shapes=replays, fallback_s=max(0.0, fallback_s))


def _fit(features: Floats, times: Floats) -> tuple[tuple[float, ...], float]:
    """Return base, request, floor, token, alpha, history and the mean relative error.

    We fit the maximum of two pieces in turns: decide which steps lie on the floor, then solve least squares. We start
    from every knee between measured sizes and keep the best result.
    """
    requests, tokens, pairs, histories = features.T
    ones = np.ones(len(times))
    sizes = np.unique(tokens)
    best_fit: tuple[float, Floats, float] | None = None
    fits: dict[bytes, Floats] = {}  # searches from different knees meet
    for knee in sizes[1:-1]:
        on_floor = tokens <= knee
        for _ in range(20):
            if on_floor.tobytes() not in fits:
                off = np.where(on_floor, 0.0, 1.0)
                columns = [ones, requests, on_floor.astype(np.float64), off * tokens, off * pairs, off * histories]
                fits[on_floor.tobytes()] = nonnegative_fit(np.stack(columns, axis=1), times)
            solution = fits[on_floor.tobytes()]
            work_s = solution[3] * tokens + solution[4] * pairs + solution[5] * histories
            on_floor_now = work_s <= solution[2]
            if (on_floor_now == on_floor).all() or not on_floor_now.any() or on_floor_now.all():
                break
            on_floor = on_floor_now
        errors = (solution[0] + solution[1] * requests + np.maximum(solution[2], work_s)) / times - 1
        loss = float((errors**2).sum())
        if best_fit is None or loss < best_fit[0]:
            best_fit = loss, solution, float(np.abs(errors).mean())
    assert best_fit is not None
    return tuple(float(value) for value in best_fit[1]), best_fit[2]
