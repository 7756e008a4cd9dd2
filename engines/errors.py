"""The one exception a user can cause, and the check that raises it."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input, said in one sentence: the field, its value and the fix.

    The CLI prints the sentence and exits with code 2. Raise it before any work starts.
    """


class RunError(RuntimeError):
    """What went wrong while something ran, said in one sentence; the CLI prints it and exits with code 1."""


def require(ok: bool, message: str) -> None:
    """Raise ``message`` as a UserError unless ``ok``."""
    if not ok:
        raise UserError(message)
