"""A sweep's runs by workers on a Ray cluster. Runs come back packed, and only this process writes the store. The cluster exists already, or
is started on this machine for the sweep. Workers without a checkout get the code in one folder."""

import atexit
import logging
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engines.errors import RunError, UserError, first_line, require
from engines.machine import usable_cores
from repro.paths import CALIBRATION, DATASETS, IS_INSTALLED, PAPER, REPO
from repro.runs.clean import is_secret
from repro.runs.environment import is_numeric
from repro.runs.experiment import Experiment
from repro.runs.pool import (
    PATIENCE_S,
    Assignment,
    Hooks,
    Packing,
    WorkerLost,
    first_unshareable,
    group_repeats,
    run_by_workers,
    run_here,
)
from repro.runs.provenance import PACKAGES, files_of_plug_in, is_alone, machine_identity
from repro.runs.sitting import Sitting, UnitLocks
from repro.runs.store import Packed

# -- the cluster ------------------------------------------------------------------------------------------

OBJECT_STORE_BYTES = 512 * 2**20
"""Object store of a cluster on this machine, enough for the few records in transit."""
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
    """Yields the ``ray`` package, connected to the cluster at ``address``, which keeps running afterwards, or to one that is started here.
    Workers import a copy of the experiments' code as it is now."""
    with ExitStack() as stack:
        code = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="repro-code-")))
        copy_code(experiments, code)
        # In a job with its own runtime environment, ours must win.
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}
        if address is None:
            # Nobody else may submit work: it listens only on the loopback device, and asks for a token that is in no file.
            settings |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _token()}
        stack.enter_context(_environment(settings))
        options = {} if address is not None else _local_options(stack)
        import ray

        if ray.is_initialized():
            raise UserError("pool='ray': this process is connected to a Ray cluster: call ray.shutdown() first")
        stack.callback(ray.shutdown)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=address or "local",
                runtime_env={"working_dir": str(code), "env_vars": ray_env(os.environ)},
                log_to_driver=False,
                logging_level="CRITICAL",
                **options,
            )
        except ConnectionError as error:
            raise UserError(f"address={address!r}: no Ray cluster answers there ({first_line(error)})") from error
        except SystemExit:  # its handler of SIGTERM
            if callable(handler):
                handler(signal.SIGTERM, None)
            raise
        except Exception as error:
            raise RunError(
                f"pool='ray': Ray could not be started or joined ({first_line(error)}): free the machine, or try again"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
        yield ray


def ray_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for workers: REPRO_* and those that decide numbers. Secrets are left out, because Ray shows variables to anyone
    who can see the cluster. LD_PRELOAD is left out, because each machine has its own. Folders become absolute, because workers have another
    working directory."""
    return {
        name: str(Path(value).resolve()) if name.endswith("_DIR") and value else value
        for name, value in environment.items()
        if name.startswith("REPRO_") or (is_numeric(name) and name != "LD_PRELOAD" and not is_secret(name))
    }


@cache
def _token() -> str:
    """One token for all clusters of this process: Ray keeps the first that it sees, whatever the environment says later."""
    return secrets.token_hex(32)


def _local_options(stack: ExitStack) -> dict[str, Any]:
    # Not below TMPDIR, because socket paths must be short.
    folder = tempfile.mkdtemp(prefix="repro-ray-", dir="/tmp" if sys.platform != "win32" else None)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    # A cluster that did not start fully ends only with this process. Ray is imported later, so its exit handler runs before this one.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options: dict[str, Any] = {"_temp_dir": folder, "_node_ip_address": "127.0.0.1", "include_dashboard": False}
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * OBJECT_STORE_BYTES:
        options["object_store_memory"] = OBJECT_STORE_BYTES
    return options | {"num_cpus": usable_cores()}


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -- its workers' code -----------------------------------------------------------------------------------


def copy_code(experiments: Iterable[Experiment], folder: Path) -> None:
    """Fill ``folder``, which comes first in a worker's ``sys.path``. It gets the packages that decide numbers and their data, laid out like
    a wheel (repro/paths.py), and the files of the experiments' plug-ins."""
    for package in sorted(PACKAGES):
        shutil.copytree(REPO / package, folder / package, ignore=_LEFT_OUT)
    for plug_in in {name for experiment in experiments for name in experiment.code.plug_ins}:
        for name, file in files_of_plug_in(plug_in).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / name)
    if not IS_INSTALLED:
        for source, name in ((DATASETS, "datasets"), (PAPER, "results/paper"), (CALIBRATION, "results/calibration")):
            shutil.copytree(source, folder / "repro" / "data" / name, ignore=_LEFT_OUT)


# -- the pool ---------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Node:
    id: str
    machine: str
    """The host name, shared by all nodes of one machine."""
    num_cpus: float
    num_gpus: float
    address: str = ""

    @property
    def name(self) -> str:
        """The node's name in messages, in the same form as ``node_name``."""
        return f"node {self.address} ({self.machine})"


def nodes_of(node_facts: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The nodes from ``ray.nodes()`` that are alive."""
    return [
        Node(
            id=node["NodeID"],
            machine=node["NodeManagerHostname"],
            num_cpus=node["Resources"].get("CPU", 0.0),
            num_gpus=node["Resources"].get("GPU", 0.0),
            address=node.get("NodeManagerAddress", ""),
        )
        for node in node_facts
        if node["Alive"]
    ]


def died(nodes: Sequence[Node], alive: Sequence[Node]) -> str | None:
    """Says as a clause which of the nodes died; None if all are alive."""
    alive_ids = {node.id for node in alive}
    names = list(dict.fromkeys(node.name for node in nodes if node.id not in alive_ids))
    return f"{' and '.join(names)} died" if names else None


def pick_node(nodes: Sequence[Node], num_gpus: int) -> Node:
    """The node to measure runs on: the first by name that is alone on its machine and has the GPUs that the runs need."""
    sharing = Counter(node.machine for node in nodes)
    suitable = [node for node in nodes if node.num_cpus >= 1 and node.num_gpus >= num_gpus]
    if not suitable:
        resource = f"{num_gpus} GPUs" if num_gpus else "CPUs"
        raise UserError(f"pool='ray': a measured run needs a node with {resource}, and the cluster has none: add one")
    alone = [node for node in suitable if sharing[node.machine] == 1]
    if not alone:
        raise UserError(
            f"pool='ray': a measured run needs a machine to itself, and {sharing[suitable[0].machine]} nodes of this cluster share "
            f"{suitable[0].machine}: measure with --pool local, or start one node a machine"
        )
    return min(alone, key=lambda node: node.machine)


def check_movable(measured: Sequence[Experiment]) -> None:
    """Raises UserError for runs that cannot be measured on another machine."""
    for experiment in measured:
        if experiment.is_tied_here:
            raise UserError(
                f"pool='ray': system={experiment.cell.system!r} is served by processes that Ray does not place: use --pool local"
            )
        if experiment.device.startswith("cuda:"):
            raise UserError(f"device={experiment.device!r} is one device and Ray chooses which: use --device cuda")


# -- on a node ----------------------------------------------------------------------------------------------


def node_name() -> str:
    """The name of the node that this runs on, for messages."""
    import ray

    return f"node {ray.util.get_node_ip_address()} ({socket.gethostname()})"


class RayWorker:
    """One process on a node. It returns its exceptions, because Ray would wrap raised ones."""

    def __init__(self, packing: Packing, *, is_measuring: bool) -> None:
        """A process that measures is one sitting: its node does nothing else as long as it lives."""
        self._packing = packing
        self._sitting = Sitting() if is_measuring else None
        self._where = node_name()

    def where(self) -> str:
        return self._where

    def make(self, pickled: bytes, digest: str, modules: Mapping[str, str]) -> Packed | Exception:
        """Make the run of a pickled experiment. ``digest`` and ``modules`` identify its code on the sweep's machine."""
        try:
            experiment: Experiment = pickle.loads(pickled)
            self._check_code(experiment, digest, modules)
            if experiment.place is not None and machine_identity(experiment.device) != experiment.place:
                raise RunError(
                    f"{self._where} is not the machine that the run was to be measured on: run the command again"
                )
            return self._packing.make(experiment, sitting=self._sitting)
        except Exception as error:
            return _sendable(error, self._where)

    def _check_code(self, experiment: Experiment, digest: str, modules: Mapping[str, str]) -> None:
        code = experiment.code
        changed = () if code.digest == digest else code.changed_from(modules)
        # Here, the files of other plug-ins also lie beside a single module.
        changed = tuple(name for name in changed if name not in code.plug_ins or not is_alone(name))
        if changed:
            raise RunError(
                f"{self._where} has other code than this sweep (first: {changed[0]}): its workers import another checkout "
                f"first, take that out of their PYTHONPATH, or a plug-in reads what is not in its package, put it there"
            )


def refusal(pickled: Sequence[bytes]) -> str | None:
    """Why this node cannot make one of these pickled runs; None if it can make all."""
    try:
        for run in pickled:
            pickle.loads(run).check_machine()
    except UserError as error:
        return f"{error} (on {node_name()})"
    return None


def _sendable(error: Exception, node: str) -> Exception:
    """The error, with its traceback as a note, if it survives pickling; else a RunError with its message."""
    error.add_note(f"on {node}:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"{type(error).__name__}: {error} (on {node})")
    return error


# -- the pool -----------------------------------------------------------------------------------------------


class RayPool:
    """Simulated runs take one CPU each. One process on one node makes the measured runs. It takes the GPUs that they need and all the
    node's CPUs, so that nobody else gets the node.

    The pool connects to the cluster when it first has something to do.
    """

    is_here = False

    def __init__(self, address: str | None = None) -> None:
        """``address`` is that of a running cluster, auto or host:port. None starts a cluster on this machine."""
        require_ray()
        if address is not None:
            check_address(address)
        self._address = address
        self._stack = ExitStack()
        self._ray: Any = None
        self._measuring: Node | None = None
        self._machines: dict[tuple[Node, str], Mapping[str, Any]] = {}
        """Machine identity of each node and device."""

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, *error: object) -> None:
        """Stops a cluster that was started here. On another cluster, ends only what belongs to this sweep."""
        self._ray = None
        self._stack.close()

    def placed(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        measured = [experiment for experiment in experiments if experiment.is_measured]
        if not measured:
            return list(experiments)
        # Refuse these before anything is started for them.
        check_movable(measured)
        _check_importable(experiments)
        self._connect(experiments)
        node = self._pick_node(_most_gpus(measured))
        return [
            replace(experiment, place=self._machine(node, experiment)) if experiment.is_measured else experiment
            for experiment in experiments
        ]

    def check(self, experiments: Sequence[Experiment]) -> None:
        if not experiments:
            return
        _check_importable(experiments)
        self._connect(experiments)
        measured = [experiment for experiment in experiments if experiment.is_measured]
        for experiment in experiments:
            if not experiment.is_measured:
                experiment.check_machine()
        if measured:
            num_gpus = _most_gpus(measured)
            reason = self._call_on(
                self._pick_node(num_gpus), refusal, list(map(self._pickled, measured)), num_gpus=num_gpus
            )
            if reason is not None:
                raise UserError(reason)

    def simulate(self, experiments: Sequence[Experiment], jobs: int | None, packing: Packing, hooks: Hooks) -> None:
        """Makes simulated runs, by default with one worker for each CPU that the cluster has now."""
        self._connect(experiments)
        num_cpus = int(self._ray.cluster_resources().get("CPU", 0))
        num = min(jobs or max(1, num_cpus), len(experiments))
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        nodes = [node for node in self._nodes() if node.num_cpus >= 1]
        start = partial(self._worker, options, packing, nodes, is_measuring=False)
        run_by_workers(Assignment(group_repeats(experiments)), [start] * num, hooks)

    def measure(
        self, experiments: Sequence[Experiment], sitting: Sitting, packing: Packing, locks: UnitLocks, hooks: Hooks
    ) -> None:
        """Makes measured runs with one worker, which is a sitting of its own."""
        self._connect(experiments)
        num_gpus = _most_gpus(experiments)
        node = self._pick_node(num_gpus)
        options = self._options_on(node, num_cpus=node.num_cpus, num_gpus=num_gpus)
        with self._worker(options, packing, [node], is_measuring=True) as worker:
            # Wait for the node before locking a unit: otherwise two sweeps could wait for each other.
            worker.result(self._wait_for(worker.submit(None), node))
            with closing(locks.one_by_one(experiments)) as locked:
                run_here(locked, lambda experiment, _: worker.result(worker.submit(experiment)), hooks)

    # -- the cluster ------------------------------------------------------------------------------------

    def _connect(self, experiments: Sequence[Experiment]) -> None:
        if self._ray is None:
            self._ray = self._stack.enter_context(connected(self._address, experiments))

    def _nodes(self) -> list[Node]:
        return nodes_of(self._ray.nodes())

    def _pick_node(self, num_gpus: int) -> Node:
        """The node to measure runs on; the same one as long as it has enough GPUs."""
        if self._measuring is None or self._measuring.num_gpus < num_gpus:
            self._measuring = pick_node(self._nodes(), num_gpus)
        return self._measuring

    def _machine(self, node: Node, experiment: Experiment) -> Mapping[str, Any]:
        device = experiment.device
        if (node, device) not in self._machines:
            # A small share of a GPU is enough to ask for its name.
            num_gpus = min(experiment.num_gpus, 0.01)
            self._machines[node, device] = self._call_on(node, machine_identity, device, num_gpus=num_gpus)
        return self._machines[node, device]

    def _call_on(self, node: Node, function: Callable[..., Any], *arguments: object, num_gpus: float) -> Any:
        """Calls a function on the node and returns its result. It reserves no CPU."""
        task = self._ray.remote(function).options(**self._options_on(node, num_cpus=0, num_gpus=num_gpus))
        return _result(self._wait_for(task.remote(*arguments).future(), node), node.name)

    def _wait_for(self, future: Future[Any], node: Node) -> Future[Any]:
        """Waits until the node has answered, and returns the finished future."""
        while wait([future], timeout=PATIENCE_S).not_done:
            if (death := died([node], self._nodes())) is not None:
                raise RunError(f"{death} before it answered: run the command again")
            logger.warning("waiting for %s: what is asked of it is not free", node.name)
        return future

    def _options_on(self, node: Node, *, num_cpus: float, num_gpus: float) -> dict[str, Any]:
        """Ray options that pin a task or actor to this node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
            # A measured run takes all CPUs of its node.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(int(node.num_cpus))}},
        }

    def _pickled(self, value: object) -> bytes:
        pickled: bytes = self._ray.cloudpickle.dumps(value)
        return pickled

    @contextmanager
    def _worker(
        self, options: Mapping[str, Any], packing: Packing, nodes: Sequence[Node], *, is_measuring: bool
    ) -> "Iterator[_Actor]":
        """Yields a worker on one of the nodes. Unless it measures, it may also start on a node that joins later."""

        def hopeless() -> str | None:
            alive = self._nodes()
            is_elsewhere = not is_measuring and any(node.num_cpus >= 1 for node in alive)
            return None if is_elsewhere else died(nodes, alive)

        actor = self._ray.remote(RayWorker).options(max_restarts=0, max_task_retries=0, **options)
        handle = actor.remote(packing, is_measuring=is_measuring)
        try:
            yield _Actor(handle, self._pickled, hopeless)
        finally:
            self._ray.kill(handle, no_restart=True)


def _check_importable(experiments: Sequence[Experiment]) -> None:
    obstacle = first_unshareable(experiments, is_remote=True)
    require(obstacle is None, f"pool='ray': {obstacle}")


class _Actor:
    def __init__(self, handle: Any, pickled: Callable[[object], bytes], hopeless: Callable[[], str | None]) -> None:
        self._handle = handle
        self._pickled = pickled
        self.hopeless = hopeless
        self._where = "a node"

    def submit(self, experiment: Experiment | None) -> Future[Any]:
        if experiment is None:
            location: Future[Any] = self._handle.where.remote().future()
            return location
        code = experiment.code
        # The worker checks that it imports the same code as this process.
        run: Future[Any] = self._handle.make.remote(self._pickled(experiment), code.digest, dict(code.modules)).future()
        return run

    def result(self, future: Future[Any]) -> Any:
        outcome = _result(future, self._where)
        if isinstance(outcome, str):
            self._where = outcome
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _result(future: Future[Any], node: str) -> Any:
    import ray

    try:
        return future.result()
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        raise WorkerLost(f"the worker on {node} was lost ({type(error).__name__})") from error


def _most_gpus(experiments: Sequence[Experiment]) -> int:
    return max(experiment.num_gpus for experiment in experiments)
