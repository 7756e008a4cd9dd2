"""``repro install``: another project's server, in an environment of its own."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Annotated

import typer

from repro.cli.output import say


def install(
    server: Annotated[str, typer.Argument(help="vllm, dynamo, sglang or sglang-router.")],
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda [default: cuda where there is an NVIDIA driver].")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run none.")] = False,
) -> None:
    """Install a server into a virtual environment of its own: .venv-SERVER, here or in REPRO_SERVERS_DIR. The same command
    again finishes what was interrupted, and does nothing where all is done."""
    from repro.systems.servers import environment_of

    environment = environment_of(server, device)
    if dry_run:
        for command in environment.commands():
            print(shlex.join(command))
        say(f"{server}: {environment.folder}, {environment.cost}", file=sys.stderr)
        return
    # What installers print goes where progress goes.
    environment.install(
        lambda command: subprocess.run(command, stdout=sys.stderr.fileno()).returncode,
        lambda line: say(line, file=sys.stderr),
    )
