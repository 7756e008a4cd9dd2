"""What no source prints of each system, said by the systems: ``docs/tuning.md``, which ``python -m repro.reports.tuning_reference``
writes."""

from collections.abc import Iterator

from repro.paths import REPO
from repro.runs.system import SYSTEMS, free_of
from repro.runs.tuning import CANDIDATES, TRIALS, TUNING_SEED

PATH = REPO / "docs" / "tuning.md"
_HEAD = f"""# Equal tuning

This page lists the knobs that no paper prints, and says how we tune every system with equal effort. Such a knob is free. Someone who reproduces the paper has to choose, and a choice that suits one system and not the next decides a comparison. So every simulated system has two forms: as printed with
our defaults, and tuned (`--knob tune=search`). For the second, a search of one size for all systems sets the free knobs.

```sh
repro bench --system laps --system sglang-pd --platform h200 --request-rate 75 --knob transient=true --knob tune=search
```

The search simulates up to {CANDIDATES} combinations of the knobs below in {TRIALS} trials. The defaults come first. The others are drawn at random, and are the same in every run. After each round it drops half of the
combinations, by the mean over all samples so far, until two are left. Its samples have seeds from {TUNING_SEED:,} on, which no comparison has. The best of many on the very runs that are reported would be luck as well.

A knob that the cell itself sets is not free, and the search does not try knobs without effect in a cell. Every process searches anew (seconds to a minute or two) and finds the same. `tuned` among a run's facts says what it
chose. The system's own definition fixes all other knobs ([knobs.md](knobs.md)).

AMPD's baselines have no default deployment. If you do not give one, we search for it together with the other free knobs (`deployment=search`). AMPD itself uses its planner, or this search if you ask for it.

All systems of a family are searched for the same score. One number does not show its price, so read the longest wait beside it. `repro reproduce dllm-serve/tuned` and `repro reproduce laps/tuned` draw both forms of every
system.

We make this page by `python -m repro.reports.tuning_reference` from the systems themselves.
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
