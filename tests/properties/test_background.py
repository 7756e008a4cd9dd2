"""Tests that interrupt what they start hold where they are a job in the background of a script, in which Ctrl-C is ignored."""

import os
import signal
import subprocess
import sys

import pytest

NESTED = "REPRO_TESTS_NESTED"


def test_an_interrupt_reaches_what_a_test_starts():
    asked = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.skipif(NESTED in os.environ, reason="the other one's own")
def test_it_does_so_from_a_job_in_the_background():
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command,
        env={**os.environ, NESTED: "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
