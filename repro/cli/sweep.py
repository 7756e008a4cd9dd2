"""Run a list of cells with progress, resume and verdicts, and read data files that a user names. Shared by several commands."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engines.data import open_file
from engines.errors import RunError, UserError
from repro.cli.output import count_text, say
from repro.runs.cell import Cell

if TYPE_CHECKING:
    from repro.runs.experiment import Experiment
    from repro.runs.pool import Pool
    from repro.runs.store import Store, StoredRun
    from repro.runs.sweep import CellEvent, CellOutcome, Sweep

MAX_WARNED = 3


def sweep_of(
    cells: Sequence[Cell], store: "Store", *, force: bool = False, will_run: bool = True, pool: "Pool | None" = None
) -> "Sweep":
    """Check every cell, and look it up in the store. Cheap checks come first: if runs will be made, a missing device is refused at
    once."""
    from repro.runs.experiment import check_device, prepare_all
    from repro.runs.progress import preparing
    from repro.runs.sweep import Sweep

    if will_run and (pool is None or pool.is_here):
        for cell in cells if force else store.surely_missing(cells):
            check_device(cell)
    return Sweep(prepare_all(cells, preparing), store, force=force, pool=pool)


def run_sweep(
    sweep: "Sweep", *, continue_on_error: bool = False, out_dir: Path | None = None, jobs: int | None = None
) -> "list[CellOutcome]":
    """Run the cells of a sweep. ``out_dir``: the folder for figures of the runs."""
    from repro.runs.progress import sweep_progress

    sweep.check(out_dir)
    if not sweep.num_cells:
        return []
    ending: list[CellEvent] = []

    def on_event(event: "CellEvent") -> None:
        # A failure that ends the sweep is raised, so that we say it once.
        (ending.append if event.kind == "failed" and not continue_on_error else progress.on_event)(event)

    with sweep_progress(sweep.num_cells) as progress:
        try:
            return sweep.run(
                continue_on_error=continue_on_error, on_event=on_event, on_step=progress.on_step, jobs=jobs
            )
        except (UserError, RunError) as error:
            names = [event.cell.folder_name for event in ending if event.cell is not None]
            if not names or names[-1] in str(error):
                raise
            kind = UserError if isinstance(error, UserError) else RunError
            raise kind(f"{names[-1]}: {error}") from error
        except Exception:
            for event in ending:
                progress.on_event(event)
            raise


def with_common_search(cells: Sequence[Cell], varied: Sequence[str]) -> list[Cell]:
    """Give cells that differ only in ``varied`` knobs one common search, and tell each search on stderr."""
    from repro.runs.tuning import with_tuned_knobs

    return with_tuned_knobs(cells, varied, lambda text: say(text, file=sys.stderr))


def say_what_runs(sweep: "Sweep") -> None:
    """Before measured runs begin, print how many there are; before searches begin, print how long they take."""
    from repro.runs.tuning import Tuned, search_text

    searches = [each.deployment.cell.with_seed(0) for each in sweep.to_run if isinstance(each.deployment, Tuned)]
    for cell in dict.fromkeys(searches):
        say(search_text(cell), file=sys.stderr)
    measured = [experiment for experiment in sweep.to_run if experiment.is_measured]
    if len(measured) < 2:
        return
    repeats = len({experiment.cell.seed for experiment in measured})
    turns = f", {repeats} repeats in turns" if repeats > 1 else ""
    say(f"{count_text(len(measured), 'run')} to measure{turns}", file=sys.stderr)


def say_what_ran(outcomes: "Sequence[CellOutcome]", root: Path) -> None:
    """Print on stderr how many runs were done and reused, and why."""
    for line in outcome_lines(outcomes, root):
        say(line, file=sys.stderr)


def outcome_lines(outcomes: "Sequence[CellOutcome]", root: Path) -> Iterator[str]:
    ran = sum(outcome.status == "ran" for outcome in outcomes)
    reused = [outcome for outcome in outcomes if outcome.status == "reused"]
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    line = f"{count_text(ran, 'run')} done, {len(reused)} reused"
    if reused:
        line += f" (e.g. {reused[0].reason}; --force runs them again)"
    yield f"{line}; runs: {root}"
    for outcome in failed:
        yield f"failed {outcome.cell.folder_name}: {outcome.reason}"
    runs = [outcome.run for outcome in outcomes if outcome.run is not None]
    yield from dict.fromkeys(_search_text(run) for run in runs if "tuned" in run.facts)
    invalid = [(run, run.validity.reasons) for run in runs if not run.validity.valid]
    warned = [(run, run.validity.warnings) for run in runs if run.validity.warnings]
    for kind, listed in (("INVALID", invalid), ("warning", warned)):
        for run, reasons in listed[:MAX_WARNED]:
            yield f"{kind} {run.cell.folder_name}: {'; '.join(reasons)}"
        if len(listed) > MAX_WARNED:
            yield f"{kind}: so too {count_text(len(listed) - MAX_WARNED, 'more run')}"


def _search_text(run: "StoredRun") -> str:
    from repro.runs.system import setting_text

    tuned = run.facts["tuned"]
    tried = f"{count_text(tuned['candidates'], 'setting')} tried in {count_text(tuned['trials'], 'trial')}"
    best, *next_best = (
        setting_text(tuple(each.items())) for each in (tuned["chosen"], tuned.get("next_best", {}).get("setting", {}))
    )
    return f"{run.cell.system}: {tried}, best {best or 'the defaults'}" + "".join(
        f", then {setting}" for setting in next_best if setting
    )


def is_failure(outcome: "CellOutcome") -> bool:
    """Whether a run failed, or is INVALID."""
    return outcome.status == "failed" or (outcome.run is not None and not outcome.run.validity.valid)


def require_folders(cells: Sequence[Cell], store: "Store", figure: str, command: str) -> None:
    """Like ``require_runs``, but cheaper: it refuses cells for which the store has no run at all, without drawing their requests."""
    if missing := store.surely_missing(cells):
        raise _missing_error(len(missing), len(cells), f"{missing[0].folder_prefix}: not stored", figure, command)


def require_runs(sweep: "Sweep", figure: str, command: str) -> None:
    """Refuse to continue if a run is missing; ``command`` makes the runs."""
    if missing := sweep.missing:
        raise _missing_error(
            len(missing), sweep.num_cells, f"{missing[0].folder_name}: {sweep.why(missing[0])}", figure, command
        )


def _missing_error(num_missing: int, num_cells: int, first: str, figure: str, command: str) -> UserError:
    return UserError(
        f"{num_missing} of {num_cells} runs behind {figure} are missing (first: {first}): run this first: {command}"
    )


def require_alike(runs: "Iterable[StoredRun]", subject: str) -> None:
    """Refuse to compare runs that were measured on different machines."""
    from repro.runs.provenance import differing_facts

    for name, values in differing_facts([run.machine for run in runs if run.machine is not None]).items():
        raise UserError(
            f"runs behind {subject} were measured on unlike machines ({name}: {'; '.join(sorted(set(values)))}): measure them "
            f"alike with --force, or in a new --result-dir"
        )


_MALFORMED = (AttributeError, EOFError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""Errors that come from reading a file with an unexpected shape."""


@contextmanager
def readable(option: str, path: Path | None, datasets: Iterable[str]) -> Iterator[None]:
    """The body works with the file, if there is one. If the body fails and reading the file alone fails too, we blame the file. We raise
    any other failure unchanged."""
    if path is None:
        yield
        return
    check_regular(option, path)
    try:
        yield
    except UserError:
        raise
    except _MALFORMED:
        for dataset in datasets:
            _read(option, path, dataset)
        raise


def _read(option: str, path: Path, dataset: str) -> None:
    """Read the file as the data set's card says, if we have its card. Failures that come from the file's content become a UserError that
    names it."""
    from repro.workloads import conversations, recorded, sessions
    from repro.workloads.card import find_local
    from repro.workloads.dataset import known_datasets, load_card
    from repro.workloads.workload import open_source

    dataset = dataset.lower()
    try:
        if dataset in sessions.known_session_cards():
            match = find_local(sessions.load_session_card(dataset).local, str(path), None)
            recorded.read_sessions(path, None if match is None or match.entry is None else match.entry.format)
        elif dataset in conversations.known_conversation_cards():
            recorded.read_chats([path])
        elif dataset in known_datasets():
            open_source(load_card(dataset), "local", dataset_path=str(path))
    except UserError:
        raise
    except _MALFORMED as error:
        logging.getLogger(__name__).info("where it happened:", exc_info=error)
        raise UserError(
            f"{option}={str(path)!r} has not the format that its name or its card says ({type(error).__name__}: {error}): "
            f"check that it is the whole file, and of that kind"
        ) from error


def check_regular(option: str, path: Path) -> None:
    """Refuse a path that cannot be read as a file. A missing file is for the reader to refuse."""
    if os.path.lexists(path):
        open_file(option, path).close()


def data_of(experiments: "Iterable[Experiment]") -> Iterator[str]:
    """Describe how data sets' own rows were used, as some are cut, clipped or repeated. Generated data sets need no description."""
    by_workload = {id(experiment.workload): experiment for experiment in experiments}
    descriptions = []
    for experiment in by_workload.values():
        provenance = experiment.workload.provenance
        description: str | None = getattr(provenance, "description", None)
        if description is not None and getattr(provenance, "source", None) != "embedded":
            descriptions.append(description)
    yield from dict.fromkeys(descriptions)
