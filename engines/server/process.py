"""The engine's process: takes requests between steps, steps while there is work, tells what became of them.

It ends with its parent, however that ends: a thread watches the socket, and its end is the process's.
"""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from engines.errors import OUT_OF_MEMORY, RunError, UserError, is_out_of_memory
from engines.server import protocol

_STATUS_EVERY_S = 0.05
"""Between two reports of a status in which nothing happened to a request."""
MOST_FAILURES = 3
"""Steps in a row that may raise; the process then ends, to be started afresh."""

_GAVE_UP, _PARENT_GONE = 3, 4
"""Exit codes."""


class Inbox:
    """Commands in the order they came, as they stand in ``channel``: none that has come is left for the step after.

    The end of the channel ends the process, in whatever step it is: an orderly end would wait for a device or for the step.
    """

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def _watch(self) -> None:
        hang_up = select.poll()
        hang_up.register(self._channel.fileno(), 0)
        hang_up.poll()
        os._exit(_PARENT_GONE)

    def take(self, *, wait: bool) -> list[protocol.Command]:
        """All there are; ``wait`` for one where there is none."""
        found: list[protocol.Command] = []
        try:
            while (wait and not found) or self._poll.poll(0):
                found.append(self._channel.recv())
        except (EOFError, OSError):
            os._exit(_PARENT_GONE)
        return found


def serve(
    engine: protocol.ServedEngine, take: Callable[..., list[protocol.Command]], send: Callable[[Any], None]
) -> None:
    """Until told to stop. A step that raises costs the requests it ran; ``MOST_FAILURES`` in a row raise RunError."""
    told_s = 0.0
    failures = 0
    while True:
        events: list[protocol.Event] = []
        for command in take(wait=not engine.has_work):
            if isinstance(command, protocol.Stop):
                return
            if isinstance(command, protocol.Cancel):
                engine.cancel(command.request_id)
            else:
                events.append(_submit(engine, command))
        if events:
            # Before the step: a refusal need not wait for it.
            send(protocol.Report(events, engine.status()))
        events = []
        if engine.has_work:
            try:
                events += engine.step()
                failures = 0
            except Exception as error:
                traceback.print_exc()
                failures += 1
                events += engine.give_up(f"the engine failed in a step of this request ({type(error).__name__})")
        now = time.monotonic()
        if events or now - told_s >= _STATUS_EVERY_S or not engine.has_work:
            send(protocol.Report(events, engine.status()))
            told_s = now
        if failures >= MOST_FAILURES:
            raise RunError(f"{failures} steps in a row failed")


def _submit(
    engine: protocol.ServedEngine, submission: protocol.Submission
) -> protocol.Accepted | protocol.Refused | protocol.Failed:
    request_id = submission.request_id
    try:
        engine.submit(submission)
    except UserError as error:
        return protocol.Refused(request_id, str(error))
    except Exception as error:
        traceback.print_exc()
        return protocol.Failed(request_id, f"the engine failed to take this request ({type(error).__name__})")
    return protocol.Accepted(request_id)


def main(descriptor: int) -> int:
    """Serve the model that comes first through the socket."""
    # The server decides what a signal means, and whoever looks for processes to end may find this one too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Connection(descriptor)
    try:
        model: protocol.ServedModel = channel.recv()
    except (EOFError, OSError):
        return _PARENT_GONE
    inbox = Inbox(channel)
    try:
        model.check_machine()
        channel.send(protocol.Able())
        with model.serving() as engine:
            channel.send(protocol.Ready(engine.status()))
            serve(engine, inbox.take, channel.send)
    except (UserError, RunError) as error:
        channel.send(protocol.Unable(str(error), isinstance(error, UserError)))
        return _GAVE_UP
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        channel.send(protocol.Unable(OUT_OF_MEMORY, False))
        return _GAVE_UP
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread still waits for the parent's end.
    os._exit(code)
