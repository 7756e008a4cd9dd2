"""Watches one server: run as a program, it starts the command behind ``--``, and ends it when standard input ends.

Standard input is a pipe whose other end its parent process holds. It ends when the parent does, in whatever way, so no server outlives
its parent. The server has its own process group, which Ctrl-C in a terminal does not reach. Once the server has ended, the warden kills
whatever is left of the group.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def main(grace_s: float, command: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end(*_: object) -> None:
        with suppress(ProcessLookupError):
            server.terminate()
        # A thread that is not a daemon would keep the interpreter alive.
        timer = threading.Timer(grace_s, kill)
        timer.daemon = True
        timer.start()

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=watch, daemon=True).start()
    code = server.wait()
    kill()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    code = main(float(sys.argv[1]), sys.argv[sys.argv.index("--") + 1 :])
    # The thread that watches standard input holds its lock, so a normal exit would hang.
    os._exit(code)
