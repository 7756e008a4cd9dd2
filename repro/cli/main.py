"""The command tree and the one place where errors become messages and exit codes."""

from __future__ import annotations

import logging
import sys

import typer

from engines.errors import UserError
from repro.cli.bench import bench
from repro.cli.figure import figure, reproduce
from repro.cli.fit import calibrate
from repro.cli.generate import generate
from repro.cli.inspect import doctor, list_command, plan
from repro.cli.train import train_tiny

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
app.command()(generate)
app.command(name="list")(list_command)
app.command()(doctor)
app.command()(plan)
app.command()(calibrate)
app.command(name="train-tiny")(train_tiny)


@app.callback()
def _root(verbose: bool = typer.Option(False, "--verbose", "-v", help="Log what is reused and why.")) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)


def main() -> None:
    """Exit codes: 0 done, 1 a run failed or is INVALID, 2 bad input (one sentence), 130 interrupted."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept; the same command continues", file=sys.stderr)
        sys.exit(130)
