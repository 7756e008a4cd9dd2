"""What the frontier compares: which rows steps compute, which context rows they read, and how many tokens they commit."""

import csv
import functools
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.errors import UserError
from paper_figures.common.contender import Contender, contenders_beside
from paper_figures.dllm_serve.comparison import OURS
from repro import paths
from repro.families.block.settings import EMBEDDED_TASKS, NAME
from repro.families.platforms import DllmPart, Platform
from repro.reports.accuracy import Solved
from repro.reports.figures import View
from repro.runs.cell import Cell, Scalar
from repro.runs.statistics import wilson_interval

NUM_PROBLEMS = 50
"""A seed's, of each task."""
CARD_REQUESTS, CARD_TOKENS = 64, 256
ONE, THRESHOLD = "one token a step", "threshold 0.9"
Named = Mapping[str, Mapping[str, Scalar]]
"""Knobs under a name."""
PACES: Named = {ONE: {}, THRESHOLD: {"threshold": 0.9}}
FIXED_PACES: Named = {
    ONE: {"steps": CARD_TOKENS},
    "four tokens a step": {"steps": 64},
    "three steps a block": {"steps": 24},
}
SETTINGS: Named = {
    "mini-gsm in blocks of 32": {"gen_length": 64, "block_length": 32, "steps": 64},
    "mini-gsm in blocks of 8": {"gen_length": 40, "block_length": 8, "steps": 40},
    "mini-code in blocks of 8": {"gen_length": 40, "block_length": 8, "steps": 40},
    "mini-chain in blocks of 16": {"gen_length": 96, "block_length": 16, "steps": 96, "model": "tiny-long"},
}
"""The first leaves much of a block to settle, the second and third have several blocks to refresh, and of the last each block needs what
the one before came to. On a card that many tokens of Burst's prompts are in such blocks."""
FIXED = "burst, 256 tokens in blocks of 32"
"""A card's setting whose tokens a step are fixed: nothing is answered in it."""


@dataclass(frozen=True, kw_only=True)
class Policy(Contender):
    """Which rows its steps compute and read, as ``row_policies.yaml`` says."""

    system: str = OURS
    paces: Named = field(default_factory=lambda: PACES)
    preset: str | None = None
    is_fixed: bool = False


*POLICIES, BLOCK_DIFFUSION = contenders_beside(__file__, Policy).values()
FAST_DLLM = POLICIES[0]


def task_of(setting: str) -> str:
    return setting.partition(" ")[0].rstrip(",")


def paces_of(policy: Policy, setting: str = "") -> Named:
    return FIXED_PACES if setting == FIXED else policy.paces


def settings(where: Platform) -> tuple[str, ...]:
    return tuple(SETTINGS) if where.gpu is None else (*SETTINGS, FIXED)


def asked(where: Platform) -> list[tuple[str, str, Policy]]:
    """Setting, pace and policy of every point. Block diffusion is asked of the tasks that its embedded model was trained on; on a card it
    would be a model of other weights, and rows say nothing of what its accuracy costs."""
    found = []
    for setting in settings(where):
        policies: Sequence[Policy] = [each for each in POLICIES if setting != FIXED or each.is_fixed]
        every = FIXED_PACES if setting == FIXED else PACES
        found += [(setting, pace, policy) for pace in every for policy in policies if pace in paces_of(policy, setting)]
        if where.gpu is None and task_of(setting) in EMBEDDED_TASKS:
            found += [(setting, pace, BLOCK_DIFFUSION) for pace in paces_of(BLOCK_DIFFUSION)]
    return found


def cell_of(view: View, setting: str, pace: str, policy: Policy) -> Cell:
    where, own, dataset = view.platform, dict(SETTINGS.get(setting, {})), task_of(setting)
    if setting == FIXED:
        own = {"num_prompts": CARD_REQUESTS, **FIXED_PACES[pace]}
    elif where.gpu is not None:
        dataset = "burst"
        own = {"gen_length": CARD_TOKENS, "block_length": own["block_length"], "num_prompts": CARD_REQUESTS}
        own |= FIXED_PACES[ONE]
        if pace != ONE:
            own |= {"replay": followed(setting, pace, policy), "replay_drawn": True}
    elif policy.system == NAME:
        most = where.part(DllmPart).max_num_batched_tokens
        own = {"gen_length": own["gen_length"], "num_prompts": NUM_PROBLEMS, "max_num_batched_tokens": most}
        own |= policy.paces[pace]
    else:
        own |= {"num_prompts": NUM_PROBLEMS, **policy.paces[pace]}
    knobs = {**own, **dict(policy.knobs), **dict(view.together("frontier"))}
    if policy.system == "dllm-cache" and where.gpu is None:
        knobs["reading"] = "efficient"  # on a device its rule runs in padded batches alone
    return view.cell(None, policy.system, dataset, knobs=tuple(knobs.items()))


# -- what was measured, which cards follow -----------------------------------------------------------


MEASURED = Path("cpu-tiny", "frontier-cpu-tiny.csv")
RUNS = Path("cpu-tiny", "runs")
"""Runs of the first seed with a threshold: how many tokens their steps committed. ``python -m paper_figures.dllm_serve.row_policies
RESULT_DIR`` puts them there from where they were measured."""


@functools.cache
def measured() -> Mapping[tuple[str, str, str], tuple[Mapping[str, str], ...]]:
    """Valid rows of the committed table by setting, pace and policy (``repro reproduce frontier --platform cpu-tiny``)."""
    path = paths.COMMITTED / MEASURED
    found: dict[tuple[str, str, str], tuple[Mapping[str, str], ...]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                place = row["setting"], row["pace"], row["policy"]
                if row["valid"] == "true":
                    found[place] = (*found.get(place, ()), row)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} holds no measured points ({type(error).__name__}): make it by 'repro reproduce frontier --platform cpu-tiny "
            f"--out-dir {path.parent}'"
        ) from error
    return found


def followed(setting: str, pace: str, policy: Policy) -> str:
    """The committed run whose blocks a card's requests follow."""
    rows = measured().get((setting, pace, policy.name))
    if not rows:
        raise UserError(f"{MEASURED} has no {policy.name!r} of {setting} at {pace}: measure it again")
    return str(RUNS / f"{rows[0]['run_folder']}.jsonl.gz")


def followed_points() -> list[tuple[str, str, Policy]]:
    """Setting, pace and policy of every measured point that cards follow a run of."""
    return [
        (setting, THRESHOLD, policy) for setting in SETTINGS for policy in POLICIES if THRESHOLD in paces_of(policy)
    ]


def solved_on_cpu(setting: str, pace: str, policy: Policy) -> Solved | None:
    """By the embedded model, of all measured seeds."""
    rows = measured().get((setting, pace, policy.name), ())
    n = sum(int(row["n"]) for row in rows)
    if not n:
        return None
    solved = sum(round(float(row["accuracy"]) * int(row["n"])) for row in rows)
    low, high = wilson_interval(solved, n)
    return Solved(share=solved / n, low=low, high=high, n=n)


def keep_followed(stored: Path, kept: Path) -> list[Path]:
    """Copy the runs that cards follow from where they are stored, in place of those kept before."""
    names = {Path(followed(setting, pace, policy)).name for setting, pace, policy in followed_points()}
    if missing := sorted(name for name in names if not (stored / name).is_file()):
        raise UserError(f"{stored} has no {missing[0]}: give the --result-dir in which {MEASURED} was measured")
    kept.mkdir(exist_ok=True)
    for old in kept.glob("*.jsonl.gz"):
        old.unlink()
    return [Path(shutil.copyfile(stored / name, kept / name)) for name in sorted(names)]


if __name__ == "__main__":
    print(f"{len(keep_followed(Path(sys.argv[1]), paths.COMMITTED / RUNS))} runs are kept in {paths.COMMITTED / RUNS}")
