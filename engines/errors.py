"""Exceptions that the CLI prints as one sentence, a check that raises one, and a test for errors that a lack of memory caused."""

import errno
import re

OUT_OF_MEMORY = "out of memory: ask for less (fewer or shorter requests, a smaller model), or free some"
_LACKS_MEMORY = re.compile(
    "|".join(
        (
            r"out of memory|not enough memory|alloc_failed|bad_?alloc",
            r"(can't|cannot|could not|unable to|failed to) allocate (?!.*static TLS)",
            # Messages of the shared library loader and of oneDNN, which name no cause.
            r"failed to map segment from shared object",
            r"could not (create|execute|initialize) an? (primitive|memory|reorder)",
        )
    ),
    re.IGNORECASE,
)
"""Messages of libraries about a failed allocation. Each library raises its own kind of exception."""


class UserError(ValueError):
    """Bad input, said in one sentence: the field, its value and the fix.

    The CLI prints the sentence and exits with code 2. Raise it before any work starts.
    """


class RunError(RuntimeError):
    """A failure during a run, said in one sentence; the CLI prints it and exits with code 1."""


def require(ok: bool, message: str) -> None:
    """Raise ``message`` as a UserError unless ``ok``."""
    if not ok:
        raise UserError(message)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a lack of memory is among the error's causes: a library may wrap it, or fail later at what an import left half made."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return True
        if isinstance(cause, RuntimeError | ImportError) and _LACKS_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
