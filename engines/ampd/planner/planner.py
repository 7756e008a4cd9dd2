"""From a workload to ranked deployments (AMPD §5, Table 2), by the integer program of eq. (5).

Binaries z(n, k) choose one degree n and k replicas of it for each phase. As printed, eq. (5) has an integer x(n) for
every degree and a tau(n) that no replica changes; coefficients here depend on the replicas, and two deviations follow:

- C1 and C2 hold Z above tau(n, k) of the pool that is chosen, so that a second replica can be worth its GPUs.
- A phase has one degree. A pool's tau assumes that it carries the phase's whole load, which a second pool of another
  degree would share; Table 2 lists one degree a phase in all its 36 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from engines.ampd.performance import PerformanceModel
from engines.ampd.planner.coefficients import Coefficients, Key, Method, PhaseLatency, PlanningWorkload, coefficients
from engines.cluster.hardware import Deployment
from engines.errors import UserError, require
from engines.knobs import Checked

Floats = npt.NDArray[np.float64]
Objective = Literal["max", "sum"]
"""max: Z bounds the worst phase, eq. (5). sum: both phases count, as they do for one round end to end."""
SolverName = Literal["scip", "highs", "enumeration"]

TIE = 1e-4
"""Plans whose objective differs by less than this share are equal to the tie-break."""


@dataclass(frozen=True, kw_only=True)
class Program(Checked):
    """Choose one entry of ``prefill`` and one of ``decode``: minimise the objective of their latencies."""

    prefill: Mapping[Key, float]
    decode: Mapping[Key, float]
    num_gpus: int
    uses_all: bool
    """C3 with equality: no GPU idles. Eq. (5) has at most N; Table 2 uses all in all its rows."""
    objective: Objective

    def __post_init__(self) -> None:
        require(bool(self.prefill) and bool(self.decode), "a program without coefficients has no plan")
        super().__post_init__()

    def value(self, prefill: Key, decode: Key) -> float:
        pair = self.prefill[prefill], self.decode[decode]
        return max(pair) if self.objective == "max" else sum(pair)

    def tie_break(self, key: Key, *, is_prefill: bool, least: float) -> float:
        """A phase's part of what decides among plans that all reach ``least``: the sum of both phases' latencies, then
        few replicas, hence large degrees, then few prefill GPUs."""
        n, k = key
        latency = (self.prefill if is_prefill else self.decode)[key] / max(least, 1e-12)
        return latency + TIE * (k + (n * k / (2 * self.num_gpus) if is_prefill else 0.0)) / self.num_gpus


class Choice(NamedTuple):
    prefill: Key
    decode: Key


Solver = Callable[[Program, Sequence[Choice]], Choice | None]
"""The best choice that is not among those excluded; None where there is none."""


def by_enumeration(program: Program, excluded: Sequence[Choice] = ()) -> Choice | None:
    """Every decode pool that the GPUs left by a prefill pool hold: exact, and the yardstick of the solvers.

    Where no GPU idles these are at most as many as there are degrees.
    """
    decodes = list(program.decode)
    tau_dec = np.array([program.decode[key] for key in decodes])
    gpus = np.array([n * k for n, k in decodes])
    by_gpus = np.argsort(gpus, kind="stable")
    left = program.num_gpus - np.array([n * k for n, k in program.prefill])
    stops = np.searchsorted(gpus[by_gpus], left, side="right")
    starts = np.searchsorted(gpus[by_gpus], left) if program.uses_all else np.zeros_like(stops)
    rows = list(zip(program.prefill, starts.tolist(), stops.tolist(), strict=True))
    place = {decode: index for index, decode in enumerate(decodes)}
    banned: dict[Key, list[int]] = {}
    for prefill, decode in excluded:
        if decode in place:
            banned.setdefault(prefill, []).append(place[decode])

    def beside(prefill: Key, start: int, stop: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """The decode pools' places in ``decodes``, rising, and the objective with each."""
        places = np.sort(by_gpus[start:stop])
        if prefill in banned:
            places = places[~np.isin(places, banned[prefill])]
        tau = program.prefill[prefill]
        values: Floats = np.maximum(tau, tau_dec[places]) if program.objective == "max" else tau + tau_dec[places]
        return places, values

    best = [float(beside(*row)[1].min(initial=np.inf)) for row in rows]
    least = min(best)
    ties_dec = np.array([program.tie_break(key, is_prefill=False, least=least) for key in decodes])
    choice: Choice | None = None
    smallest = np.inf
    for row, value in zip(rows, best, strict=True):
        if value > least * (1 + TIE) or value == np.inf:
            continue
        places, values = beside(*row)
        equal = places[values <= least * (1 + TIE)]
        ties = program.tie_break(row[0], is_prefill=True, least=least) + ties_dec[equal]
        first = int(ties.argmin())
        if ties[first] < smallest:
            choice, smallest = Choice(row[0], decodes[equal[first]]), float(ties[first])
    return choice


def by_scip(program: Program, excluded: Sequence[Choice] = ()) -> Choice | None:
    """SCIP through PySCIPOpt (AMPD §6)."""
    try:
        from pyscipopt import Model, quicksum
    except ImportError as error:
        raise _missing("scip", "pyscipopt") from error

    model = Model()
    model.hideOutput()
    z_pre = {key: model.addVar(vtype="B", name=f"pre{key}") for key in program.prefill}
    z_dec = {key: model.addVar(vtype="B", name=f"dec{key}") for key in program.decode}
    bound = model.addVar(vtype="C", lb=0, name="Z")
    tau_pre = quicksum(program.prefill[key] * var for key, var in z_pre.items())
    tau_dec = quicksum(program.decode[key] * var for key, var in z_dec.items())
    gpus = quicksum(n * k * var for (n, k), var in (*z_pre.items(), *z_dec.items()))
    model.addCons(quicksum(z_pre.values()) == 1)
    model.addCons(quicksum(z_dec.values()) == 1)
    model.addCons(gpus == program.num_gpus if program.uses_all else gpus <= program.num_gpus)  # C3
    if program.objective == "max":
        model.addCons(bound >= tau_pre)  # C1
        model.addCons(bound >= tau_dec)  # C2
    else:
        model.addCons(bound >= tau_pre + tau_dec)
    for prefill, decode in excluded:
        if prefill in z_pre and decode in z_dec:
            model.addCons(z_pre[prefill] + z_dec[decode] <= 1)  # no-good cut
    model.setObjective(bound)
    model.optimize()
    if model.getStatus() != "optimal":
        return None
    least = model.getVal(bound)
    model.freeTransform()
    model.addCons(bound <= least * (1 + TIE))
    model.setObjective(
        quicksum(program.tie_break(key, is_prefill=True, least=least) * var for key, var in z_pre.items())
        + quicksum(program.tie_break(key, is_prefill=False, least=least) * var for key, var in z_dec.items())
    )
    model.optimize()
    return Choice(_chosen(model, z_pre), _chosen(model, z_dec))


def _chosen(model: Any, variables: Mapping[Key, Any]) -> Key:
    return max(variables, key=lambda key: model.getVal(variables[key]))


def by_highs(program: Program, excluded: Sequence[Choice] = ()) -> Choice | None:
    """HiGHS through scipy (the solver that AMPD §5 cites). Variables: z_pre, z_dec, Z."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise _missing("highs", "scipy") from error

    pre, dec = list(program.prefill), list(program.decode)
    tau_pre = np.array([program.prefill[key] for key in pre])
    tau_dec = np.array([program.decode[key] for key in dec])
    gpus = np.array([n * k for n, k in (*pre, *dec)])
    no_pre, no_dec, of_z = np.zeros(len(pre)), np.zeros(len(dec)), np.ones(1)

    def row(left: Floats, right: Floats, z: float = 0.0) -> Floats:
        return np.concatenate([left, right, z * of_z])

    rows = [row(no_pre + 1, no_dec), row(no_pre, no_dec + 1), row(gpus[: len(pre)], gpus[len(pre) :])]  # C3
    low = [1.0, 1.0, program.num_gpus if program.uses_all else 0.0]
    high = [1.0, 1.0, program.num_gpus]
    bounds = [row(tau_pre, no_dec, -1), row(no_pre, tau_dec, -1)] if program.objective == "max" else []  # C1, C2
    for bound in bounds or [row(tau_pre, tau_dec, -1)]:
        rows.append(bound)
        low.append(-np.inf)
        high.append(0.0)
    for prefill, decode in excluded:
        if prefill in program.prefill and decode in program.decode:  # no-good cut
            rows.append(row(np.array([key == prefill for key in pre]), np.array([key == decode for key in dec])))
            low.append(-np.inf)
            high.append(1.0)

    def solve(objective: Floats, z_limit: float) -> Floats | None:
        result = milp(
            objective,
            constraints=LinearConstraint(np.array(rows, dtype=np.float64), low, high),
            integrality=row(no_pre + 1, no_dec + 1),
            bounds=Bounds(np.zeros(len(objective)), row(no_pre + 1, no_dec + 1, z_limit)),
        )
        return result.x if result.success else None

    first = solve(row(no_pre, no_dec, 1), np.inf)
    if first is None:
        return None
    least = float(first[-1])
    ties = row(
        np.array([program.tie_break(key, is_prefill=True, least=least) for key in pre]),
        np.array([program.tie_break(key, is_prefill=False, least=least) for key in dec]),
    )
    second = solve(ties, least * (1 + TIE))
    if second is None:
        return None
    return Choice(pre[int(np.argmax(second[: len(pre)]))], dec[int(np.argmax(second[len(pre) : -1]))])


SOLVERS: Mapping[SolverName, Solver] = MappingProxyType(
    {"scip": by_scip, "highs": by_highs, "enumeration": by_enumeration}
)


def _missing(solver: str, package: str) -> UserError:
    return UserError(
        f"solver={solver!r}: {package} is not installed: pip install '.[planner]', or use solver='enumeration', which is as exact"
    )


@dataclass(frozen=True, kw_only=True)
class PlannerConfig(Checked):
    """What the paper leaves open, and our choices; none was chosen by Table 2 or Figure 4."""

    latency: Literal["of_slo", "seconds"] = "of_slo"
    """Unit of tau: P95 TTFT and P95 ITL over their objectives, or P95 seconds of a prefill and of a round's decode."""
    objective: Objective = "max"
    uses_all: bool = True
    method: Method | None = None
    """None: direct simulation for small clusters, closed forms for large ones."""
    solver: SolverName = "enumeration"
    """All are exact. Enumeration needs nothing installed, so that every machine plans alike."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    deployment: Deployment
    value: float
    """Z."""
    prefill: PhaseLatency
    decode: PhaseLatency
    solver: SolverName


def plan(
    model: PerformanceModel,
    workload: PlanningWorkload,
    degrees: Sequence[int],
    num_gpus: int,
    *,
    top: int = 1,
    config: PlannerConfig | None = None,
) -> tuple[Plan, ...]:
    """The best ``top`` deployments, best first; fewer where there are no more."""
    config = config or PlannerConfig()
    table = coefficients(model, workload, degrees, num_gpus, config.method)
    return solve(table, num_gpus, top=top, config=config)


def solve(table: Coefficients, num_gpus: int, *, top: int = 1, config: PlannerConfig | None = None) -> tuple[Plan, ...]:
    """Each further plan by cutting off those found (no-good cuts)."""
    config = config or PlannerConfig()
    require(top >= 1, f"top={top} must be at least 1")
    program = Program(
        prefill={key: getattr(latency, config.latency) for key, latency in table.prefill.items()},
        decode={key: getattr(latency, config.latency) for key, latency in table.decode.items()},
        num_gpus=num_gpus,
        uses_all=config.uses_all,
        objective=config.objective,
    )
    found: list[Choice] = []
    while len(found) < top:
        choice = SOLVERS[config.solver](program, found)
        if choice is None:
            break
        found.append(choice)
    return tuple(
        Plan(
            deployment=Deployment.disaggregated(*prefill, *decode),
            value=program.value(prefill, decode),
            prefill=table.prefill[prefill],
            decode=table.decode[decode],
            solver=config.solver,
        )
        for prefill, decode in found
    )
