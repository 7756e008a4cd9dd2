"""A Ray cluster: one that is there, or one of this machine alone, started for a sweep and stopped with it; and the code that its
workers need, gathered in one folder, to be sent to machines that have no checkout."""

import atexit
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engines.errors import RunError, UserError
from engines.machine import usable_cores
from repro.paths import CALIBRATION, DATASETS, IS_INSTALLED, PAPER, REPO
from repro.runs.clean import is_secret
from repro.runs.code import PACKAGES, files_of_plug_in
from repro.runs.environment import is_numeric
from repro.runs.experiment import Experiment

OBJECT_STORE_BYTES = 512 * 2**20
"""Object store of a cluster on this machine: a few records on their way."""
SHARED_MEMORY = Path("/dev/shm")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def require_ray() -> None:
    if find_spec("ray") is None:
        raise UserError("pool='ray': package 'ray' is not installed: pip install 'dllm-serve-repro[ray]'")


def check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in address or not host or not port.isdigit()):
        raise UserError(
            f"address={address!r} is no address of a cluster: give auto or host:port, on a machine that is one of its nodes"
        )


@contextmanager
def connected(address: str | None, experiments: Iterable[Experiment]) -> Iterator[Any]:
    """Yields the ``ray`` package, connected to the cluster at ``address``, which goes on afterwards, or to one that is
    started here. Workers import the code of the experiments as it is now, from a copy."""
    with ExitStack() as stack:
        code = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="repro-code-")))
        gather(experiments, code)
        stack.enter_context(_environment(_settings(is_started_here=address is None)))
        how = {} if address is not None else _started_here(stack)
        import ray

        if ray.is_initialized():
            raise UserError("pool='ray': this process is connected to a Ray cluster: call ray.shutdown() first")
        stack.callback(ray.shutdown)
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=address or "local",
                runtime_env={"working_dir": str(code), "env_vars": passed_on(os.environ)},
                log_to_driver=False,
                logging_level="CRITICAL",
                **how,
            )
        except ConnectionError as error:
            raise UserError(f"address={address!r}: no Ray cluster answers there ({_first_line(error)})") from error
        except SystemExit:  # its handler of SIGTERM
            if callable(before):
                before(signal.SIGTERM, None)
            raise
        except Exception as error:
            raise RunError(
                f"pool='ray': Ray could not be started or joined ({_first_line(error)}): free the machine, or try again"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
        yield ray


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the environment that workers get: REPRO_* and what decides numbers. Secrets are none of them: Ray shows these to
    whoever may look at the cluster. Libraries to load first are another machine's own. Folders are named whole: a worker's
    working directory is another one."""
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith("REPRO_") or (is_numeric(name) and name != "LD_PRELOAD" and not is_secret(name))
    }
    return {
        name: str(Path(value).resolve()) if name.endswith("_DIR") and value else value for name, value in found.items()
    }


def _settings(*, is_started_here: bool) -> dict[str, str]:
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # In a job that has an environment of its own, this one counts.
        "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
    }
    if is_started_here:
        # Nobody else is to hand it work: it listens on the loopback device alone, and asks for a token that is in no file.
        settings |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}
    return settings


@cache
def _token() -> str:
    """One for all clusters of this process: Ray keeps the first that it sees, whatever the environment says later."""
    return secrets.token_hex(32)


def _started_here(stack: ExitStack) -> dict[str, Any]:
    # Not below TMPDIR: names of sockets must not be long.
    folder = tempfile.mkdtemp(prefix="repro-ray-", dir="/tmp" if sys.platform != "win32" else None)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    # What did not start whole ends with this process alone: Ray, imported later, has its turn before this.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    how: dict[str, Any] = {"_temp_dir": folder, "_node_ip_address": "127.0.0.1", "include_dashboard": False}
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * OBJECT_STORE_BYTES:
        how["object_store_memory"] = OBJECT_STORE_BYTES
    return how | {"num_cpus": usable_cores()}


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


# -- its workers' code -----------------------------------------------------------------------------------


def gather(experiments: Iterable[Experiment], folder: Path) -> None:
    """Fill ``folder``, which goes in front of a worker's ``sys.path``: the packages that decide numbers, with the data
    beside them, laid out as a wheel is (repro/paths.py); and the files of the experiments' plug-ins."""
    for package in sorted(PACKAGES):
        shutil.copytree(REPO / package, folder / package, ignore=_LEFT_OUT)
    for plug_in in {name for experiment in experiments for name in experiment.code.plug_ins}:
        for name, file in files_of_plug_in(plug_in).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / name)
    if not IS_INSTALLED:
        for source, name in ((DATASETS, "datasets"), (PAPER, "results/paper"), (CALIBRATION, "results/calibration")):
            shutil.copytree(source, folder / "repro" / "data" / name, ignore=_LEFT_OUT)
