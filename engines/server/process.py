"""The engine's process: it takes requests between steps, steps while there is work, and tells what became of the requests.

It ends with its parent, however that ends: a thread watches the socket, and ends the process when the socket closes.
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
"""Seconds between two reports of the status while no request has an event."""
MOST_FAILURES = 3
"""After so many steps in a row that raise, the process ends, and the server starts a new one."""

_GAVE_UP, _PARENT_GONE = 3, 4
"""Exit codes."""


class Inbox:
    """Commands from ``channel`` in the order they came. Each step begins with all commands that have come.

    The end of the channel ends the process, even inside a step: an orderly end would wait for a device or for the step.
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
        """Return all commands that have come; with ``wait``, wait for one if there is none."""
        commands: list[protocol.Command] = []
        try:
            while (wait and not commands) or self._poll.poll(0):
                commands.append(self._channel.recv())
        except (EOFError, OSError):
            os._exit(_PARENT_GONE)
        return commands


def serve(
    engine: protocol.ServedEngine, take: Callable[..., list[protocol.Command]], send: Callable[[Any], None]
) -> None:
    """Serve until told to stop. If a step raises, the requests it ran fail; ``MOST_FAILURES`` in a row raise RunError."""
    reported_s = 0.0
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
            # We report before the step, so that a refusal does not wait for it.
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
        if events or now - reported_s >= _STATUS_EVERY_S or not engine.has_work:
            send(protocol.Report(events, engine.status()))
            reported_s = now
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
    """Serve the model that is the first message on the socket."""
    # The server decides what a signal means. Somebody who ends processes may send a signal to this one too.
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
    # An orderly exit is not possible: a thread still waits for the parent's end.
    os._exit(code)
