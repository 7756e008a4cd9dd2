"""What no source prints of each system, said by the systems: ``docs/tuning.md``, which ``python -m repro.reports.tuning_reference``
writes."""

from __future__ import annotations

from collections.abc import Iterator

from repro.paths import REPO
from repro.runs.system import SYSTEMS, free_of
from repro.runs.tuning import CANDIDATES, TRIALS, TUNING_SEED

PATH = REPO / "docs" / "tuning.md"
_HEAD = f"""# Equal tuning

What a paper does not print is a free knob. Whoever reproduces it has to choose, and a choice that suits one system and not the next
decides a comparison. So every simulated system has two forms: as printed with our defaults, and tuned (`--knob tune=search`), its
free knobs set by a search of one size for all.

```sh
repro bench --system laps --system sglang-pd --platform h200 --request-rate 75 --knob transient=true --knob tune=search
```

The search simulates up to {CANDIDATES} combinations of what is below, the defaults first and the others drawn at random, the same ones in
every run, in {TRIALS} trials in all: half of the combinations are dropped after each round, by the mean over all samples so far, and what
two are left with decides between them. Its samples are of seeds from {TUNING_SEED:,} on, which no comparison has: the best of many on the
very runs that are reported would be luck as well. A knob that the cell itself sets is not free, and what has no effect in a cell is
not tried. It is made anew in every process (seconds to a minute or two) and finds the same everywhere; `tuned` among a run's facts says what it
chose. What is not below is held by the system's own definition, and is in [knobs.md](knobs.md).

AMPD and what it is compared with are free in their deployments too, which have no default: `deployment=search` is that search with the
deployment in it, and what such a system does where nothing says its deployment (but AMPD, which has a planner).

What is searched for is the same for all of a family, and one number says nothing of its price: read the longest wait beside it.
`repro reproduce dllm-serve/tuned` and `repro reproduce laps/tuned` draw both forms of every system.

Made by `python -m repro.reports.tuning_reference` from the systems themselves.
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
