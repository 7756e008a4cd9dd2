"""What no source prints of each system, said by the systems: ``docs/tuning.md``, which ``python -m repro.reports.tuning_reference``
writes."""

from collections.abc import Iterator

from repro.paths import REPO
from repro.runs.system import SYSTEMS, free_of
from repro.runs.tuning import CANDIDATES, TRIALS, TUNING_SEED

PATH = REPO / "docs" / "tuning.md"
_HEAD = f"""# Equal tuning

This page lists the knobs that no paper prints, and says how we tune every system with equal effort. Such a knob is free: a choice that suits one
system and not the next decides a comparison. So every simulated system has two forms: as printed with our defaults, and tuned
(`--knob tune=search`).

```sh
repro bench --system laps --system sglang-pd --platform h200 --request-rate 75 --knob transient=true --knob tune=search
```

The search simulates up to {CANDIDATES} combinations of the knobs below in {TRIALS} trials, the same in every run. After each round it drops half of the
combinations, by the mean over all samples so far, until two are left. Its samples have seeds from {TUNING_SEED:,} on, which no comparison has.

A knob that the cell itself sets is not free. `tuned` among a run's facts says what the search chose. AMPD's baselines have no default deployment. If you
do not give one, we search for it too (`deployment=search`). The commands `repro reproduce dllm-serve/tuned` and `repro reproduce laps/tuned` draw both forms of
every system. We make this page by `python -m repro.reports.tuning_reference` from the systems themselves.
"""


def reference() -> str:
    """The text of ``docs/tuning.md``: a section for each family, a row for each thing that is free."""
    systems: dict[str, list[str]] = {}
    for name in SYSTEMS:
        if free_of(name):
            systems.setdefault(SYSTEMS.get(name).family.score_said, []).append(name)
    return "\n".join([_HEAD, *(line for score, names in systems.items() for line in _section(score, names))])


def _section(score: str, names: list[str]) -> Iterator[str]:
    yield f"## {', '.join(names)}\n"
    yield f"Searched for: {score}.\n"
    yield "| what is free | of | besides the default | what the source says |"
    yield "|---|---|---|---|"
    rows = dict.fromkeys((each.what, each.said, each.why) for name in names for each in free_of(name))
    for row in rows:
        having = [name for name in names if row in [(each.what, each.said, each.why) for each in free_of(name)]]
        what, said, why = row
        yield f"| {what} | {', '.join(having)} | {'; '.join(said)} | {why} |"
    yield ""


if __name__ == "__main__":
    PATH.write_text(reference(), encoding="utf-8")
