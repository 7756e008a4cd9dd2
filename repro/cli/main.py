"""The command tree and the one place where errors become messages and exit codes."""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

import typer

try:  # typer carries its own copy of click in newer releases
    from typer._click.exceptions import ClickException, NoArgsIsHelpError
except ImportError:
    from click.exceptions import ClickException, NoArgsIsHelpError  # type: ignore[assignment]

from engines.errors import UserError
from repro.cli.ablate import ablate
from repro.cli.bench import bench
from repro.cli.calibrate import calibrate
from repro.cli.check_results import check_results
from repro.cli.claims import claims
from repro.cli.doctor import doctor
from repro.cli.evaluate import evaluate
from repro.cli.figure import figure, reproduce
from repro.cli.generate import generate
from repro.cli.gpu_suite import gpu_suite
from repro.cli.list_command import list_command
from repro.cli.plan import plan
from repro.cli.train import train_tiny
from repro.cli.verify import verify_baselines

_INTERRUPTED = 130

app = typer.Typer(
    name="repro",
    help="Reproduce, benchmark and extend LLM-serving research. Every number says how it was obtained: "
    "measured, simulated or paper.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(reproduce)
app.command()(figure)
app.command()(bench)
app.command()(claims)
app.command(name="check-results")(check_results)
app.command()(ablate)
app.command(name="eval")(evaluate)
app.command()(generate)
app.command(name="list")(list_command)
app.command()(doctor)
app.command()(plan)
app.command()(calibrate)
app.command(name="train-tiny")(train_tiny)
app.command(name="verify-baselines")(verify_baselines)
app.command(name="gpu-suite")(gpu_suite)


@app.callback()
def _root(verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what is reused and why.")) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)


def main() -> None:
    """Exit codes: 0 done, 1 a run failed or is INVALID, 2 bad input (one sentence), 130 interrupted."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        _refuse(str(error))
    except ClickException as error:
        # An unknown command or option, a missing argument, a value of the wrong type.
        if isinstance(error, NoArgsIsHelpError):
            print(error.format_message())
            sys.exit(0)
        _refuse(f"{error.format_message().rstrip('.')}: see 'repro --help'")
    else:
        if code == _INTERRUPTED:
            print("interrupted: finished runs are kept; the same command continues", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


def _refuse(sentence: str) -> NoReturn:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(2)
