"""SLO attainment in every reading of it: the paper says neither of what, nor of which statistic (AMPD §7.1).

A reading has three parts:

- scope: the share of *rounds* that meet both objectives, or of *sessions* that do
- ttft: *every* TTFT in scope must meet the objective, or the *mean* TTFT of the session (a round is then
  judged by its session's mean)
- itl: the mean, a percentile or the maximum of the gaps between tokens in scope

A round without gaps meets any ITL objective. What did not finish meets none and stays in the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import numpy as np

from engines.ar.metrics import ItlStat, Observed
from engines.errors import UserError
from engines.policies.slo import Slo

Scope = Literal["round", "session"]
TtftRule = Literal["every", "mean"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    scope: Scope
    ttft: TtftRule
    itl: ItlStat

    def __post_init__(self) -> None:
        for name, kind in (("scope", Scope), ("ttft", TtftRule), ("itl", ItlStat)):
            if getattr(self, name) not in get_args(kind):
                raise UserError(f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(get_args(kind))}")

    def __str__(self) -> str:
        return f"{self.scope}/{self.ttft}/{self.itl}"


READINGS: tuple[Reading, ...] = tuple(
    Reading(scope=scope, ttft=ttft, itl=itl)
    for scope, ttft, itl in product(get_args(Scope), get_args(TtftRule), get_args(ItlStat))
)


def attainment(observed: Observed, slo: Slo, reading: Reading) -> float:
    """Share in [0, 1]; NaN for a run without sessions."""
    return attainments(observed, slo, (reading,))[reading]


def attainments(observed: Observed, slo: Slo, readings: Sequence[Reading] = READINGS) -> dict[Reading, float]:
    """All readings of one run."""
    if not observed.num_sessions:
        return dict.fromkeys(readings, math.nan)
    session = observed.round_session
    reached = np.bincount(session, minlength=observed.num_sessions)
    with np.errstate(invalid="ignore"):
        each = observed.ttft_s <= slo.ttft_s  # NaN, a token that never came, is not
        total = np.bincount(session, weights=observed.ttft_s, minlength=observed.num_sessions)
        mean = total / np.maximum(reached, 1) <= slo.ttft_s
    every = np.bincount(session, weights=each, minlength=observed.num_sessions) == observed.session_rounds
    num_rounds = int(observed.session_rounds.sum())
    found = {}
    for reading in readings:
        if reading.scope == "round":
            quick = each if reading.ttft == "every" else mean[session]
            good = quick & observed.round_done & _meets(observed.round_itl_s[reading.itl], slo.itl_s)
            found[reading] = float(good.sum()) / num_rounds
        else:
            quick = every if reading.ttft == "every" else mean
            good = quick & observed.session_done & _meets(observed.session_itl_s[reading.itl], slo.itl_s)
            found[reading] = float(good.sum()) / observed.num_sessions
    return found


def _meets(itl_s: np.ndarray, limit_s: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.isnan(itl_s) | (itl_s <= limit_s)
