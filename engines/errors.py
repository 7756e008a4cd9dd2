"""The one exception a user can cause."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input, said in one sentence: the field, its value and the fix.

    The CLI prints the sentence and exits with code 2. Raise it before any work starts.
    """
