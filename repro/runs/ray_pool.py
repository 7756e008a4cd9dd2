"""A sweep's runs by workers on a Ray cluster. They come back packed; this process alone writes the store."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engines.errors import RunError, UserError, require
from repro.runs.code import is_alone
from repro.runs.experiment import Experiment
from repro.runs.pool import Packing, first_held_here
from repro.runs.provenance import machine_identity
from repro.runs.ray_cluster import check_address, connected, require_ray
from repro.runs.runner import PATIENCE_S, Assignment, Hooks, Lock, Start, WorkerLost, by_repeats, run_by_workers
from repro.runs.sitting import Sitting, UnitLocks, together
from repro.runs.store import Packed

logger = logging.getLogger(__name__)

Identity = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Node:
    id: str
    machine: str
    """Nodes of one machine have one."""
    num_cpus: float
    num_gpus: float
    address: str = ""

    @property
    def name(self) -> str:
        """As messages have it (``node_name``)."""
        return f"node {self.address} ({self.machine})"

    @property
    def threads(self) -> str:
        """Those of a measured run: as many as the node has CPUs, which it takes."""
        return str(int(self.num_cpus))


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a measured run asks of its machine."""

    device: str
    num_gpus: int


def needs_of(experiment: Experiment) -> Needs:
    if experiment.is_tied_here:
        raise UserError(
            f"pool='ray': system={experiment.cell.system!r} is served by processes that Ray does not place: use --pool local"
        )
    device = experiment.device
    if device.startswith("cuda:"):
        raise UserError(f"device={device!r} is one device and Ray chooses which: use --device cuda")
    return Needs(device=device, num_gpus=experiment.num_gpus)


def nodes_of(told: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Those that are alive of what ``ray.nodes()`` tells."""
    return [
        Node(
            id=each["NodeID"],
            machine=each["NodeManagerHostname"],
            num_cpus=each["Resources"].get("CPU", 0.0),
            num_gpus=each["Resources"].get("GPU", 0.0),
            address=each.get("NodeManagerAddress", ""),
        )
        for each in told
        if each["Alive"]
    ]


def died(nodes: Sequence[Node], alive: Sequence[Node]) -> str | None:
    """Which of the nodes are no longer there, in a clause; None where all are."""
    left = {node.id for node in alive}
    names = list(dict.fromkeys(node.name for node in nodes if node.id not in left))
    return f"{' and '.join(names)} died" if names else None


def measuring(nodes: Sequence[Node], needs: Needs) -> list[Node]:
    """Nodes that a run can be measured on: alone on their machine, and with the GPUs it needs."""
    sharing = Counter(node.machine for node in nodes)
    able = [node for node in nodes if node.num_cpus >= 1 and node.num_gpus >= needs.num_gpus]
    if not able:
        what = f"{needs.num_gpus} GPUs" if needs.num_gpus else "CPUs"
        raise UserError(f"pool='ray': a measured run needs a node with {what}, and the cluster has none: add one")
    alone = [node for node in able if sharing[node.machine] == 1]
    if not alone:
        raise UserError(
            f"pool='ray': a measured run needs a machine to itself, and {sharing[able[0].machine]} nodes of this cluster share "
            f"{able[0].machine}: measure with --pool local, or start one node a machine"
        )
    return alone


def alike(nodes: Sequence[Node], identities: Sequence[Identity], here: Identity) -> tuple[Identity, list[Node]]:
    """The largest group of nodes that are the same machine, as measured times go; of equal ones that of ``here``, or the
    first. Runs of unlike machines could not be compared."""
    groups: dict[str, list[Node]] = {}
    for node, identity in zip(nodes, identities, strict=True):
        groups.setdefault(json.dumps(identity, sort_keys=True), []).append(node)
    own = json.dumps(here, sort_keys=True)
    best = max(groups, key=lambda identity: (len(groups[identity]), identity == own))
    found: Identity = json.loads(best)
    if len(groups) > 1:
        said = ", ".join(f"{name} {value}" for name, value in found.items())
        logger.warning("measuring on %d of %d nodes, which are alike (%s)", len(groups[best]), len(nodes), said)
    return found, groups[best]


# -- on a node ----------------------------------------------------------------------------------------------


def node_name() -> str:
    """As messages name a node."""
    import ray

    return f"node {ray.util.get_node_ip_address()} ({socket.gethostname()})"


class RayWorker:
    """One process on a node. What it raises is returned: Ray would wrap it."""

    def __init__(self, packing: Packing, *, is_measuring: bool) -> None:
        """A process that measures is a sitting: its node has nothing else to do as long as it lives."""
        self._packing = packing
        self._sitting = Sitting() if is_measuring else None
        self._where = node_name()

    def where(self) -> str:
        return self._where

    def make(self, pickled: bytes, digest: str, modules: Mapping[str, str]) -> Packed | Exception:
        """The run of a pickled experiment, whose code on the sweep's machine has this digest, and these modules."""
        try:
            experiment: Experiment = pickle.loads(pickled)
            self._check_code(experiment, digest, modules)
            self._check_machine(experiment)
            return self._packing.make(experiment, sitting=self._sitting)
        except Exception as error:
            return _sendable(error, self._where)

    def _check_code(self, experiment: Experiment, digest: str, modules: Mapping[str, str]) -> None:
        code = experiment.code
        changed = () if code.digest == digest else code.changed_from(modules)
        # Beside a module by itself, other plug-ins lie here too.
        changed = tuple(name for name in changed if name not in code.plug_ins or not is_alone(name))
        if changed:
            raise RunError(
                f"{self._where} has other code than this sweep (first: {changed[0]}): its workers import another checkout "
                f"first, take that out of their PYTHONPATH, or a plug-in reads what is not in its package, put it there"
            )

    def _check_machine(self, experiment: Experiment) -> None:
        if experiment.place is not None and machine_identity(experiment.device) != experiment.place:
            raise RunError(
                f"{self._where} is not the machine that the run was to be measured on: run the command again"
            )


def refusal(pickled: Sequence[bytes]) -> str | None:
    """Why the node that this is called on cannot make a run of these pickled experiments; None where it can make all."""
    try:
        for each in pickled:
            pickle.loads(each).check_machine()
    except UserError as error:
        return f"{error} (on {node_name()})"
    return None


def _sendable(error: Exception, where: str) -> Exception:
    """The error, with its traceback as a note, if it survives being pickled; else what it says."""
    error.add_note(f"on {where}:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RunError(f"{type(error).__name__}: {error} (on {where})")
    return error


# -- the pool -----------------------------------------------------------------------------------------------


class RayPool:
    """Simulated runs take a CPU each. A measured one takes all CPUs of a node, and with them the node from everybody else,
    and the GPUs it needs; all are measured on nodes that are alike, a unit on one of them, in one process.

    Connects when it first has something to do.
    """

    is_here = False

    def __init__(self, address: str | None = None) -> None:
        """``address`` is that of a cluster which is there, auto or host:port; else one is started on this machine."""
        require_ray()
        if address is not None:
            check_address(address)
        self._address = address
        self._stack = ExitStack()
        self._ray: Any = None
        self._alike: dict[Needs, tuple[Identity, list[Node]]] = {}

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *error: object) -> None:
        """The cluster that was started here is stopped; of another, what it had of this sweep."""
        self._ray = None
        self._stack.close()

    def placed(self, experiments: Sequence[Experiment]) -> list[Experiment]:
        # Refused before anything is started for them.
        if not {needs_of(experiment) for experiment in experiments if experiment.is_measured}:
            return list(experiments)
        _check_importable(experiments)
        self._connect(experiments)
        return [
            replace(experiment, place=self._machines(needs_of(experiment))[0]) if experiment.is_measured else experiment
            for experiment in experiments
        ]

    def check(self, experiments: Sequence[Experiment]) -> None:
        if not experiments:
            return
        _check_importable(experiments)
        self._connect(experiments)
        measured: dict[Needs, list[bytes]] = {}
        for experiment in experiments:
            if experiment.is_measured:
                measured.setdefault(needs_of(experiment), []).append(self._pickled(experiment))
            else:
                experiment.check_machine()
        for needs, own in measured.items():
            _, nodes = self._machines(needs)
            (reason,) = self._ask(nodes[:1], refusal, own, num_gpus=needs.num_gpus)
            if reason is not None:
                raise UserError(reason)

    def simulate(self, experiments: Sequence[Experiment], jobs: int | None, packing: Packing, hooks: Hooks) -> None:
        """By a worker a CPU of the cluster as it is now."""
        self._connect(experiments)
        num_cpus = int(self._ray.cluster_resources().get("CPU", 0))
        num = min(jobs or max(1, num_cpus), len(experiments))
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        nodes = [node for node in self._nodes() if node.num_cpus >= 1]
        start = partial(self._worker, options, packing, nodes, is_measuring=False)
        run_by_workers(Assignment(by_repeats(experiments)), [start] * num, hooks)

    def measure(
        self, experiments: Sequence[Experiment], sitting: Sitting, packing: Packing, locks: UnitLocks, hooks: Hooks
    ) -> None:
        """Every worker is a sitting of its own."""
        self._connect(experiments)
        for needs in dict.fromkeys(map(needs_of, experiments)):
            units = together(experiment for experiment in experiments if needs_of(experiment) == needs)
            self._measure(units, needs, locks.take, packing, hooks)
            # Waited for without a node in hand.
            for unit, lock in locks.waited_for():
                with lock:
                    self._measure([unit], needs, lambda _: ExitStack(), packing, hooks)

    def _measure(
        self, units: Sequence[Sequence[Experiment]], needs: Needs, lock: Lock, packing: Packing, hooks: Hooks
    ) -> None:
        _, nodes = self._machines(needs)
        starts: list[Start] = []
        for node in nodes[: len(units)]:
            options = self._on(node, num_cpus=node.num_cpus, num_gpus=needs.num_gpus)
            starts.append(partial(self._worker, options, packing, [node], is_measuring=True))
        run_by_workers(Assignment(units, lock), starts, hooks)

    # -- the cluster ------------------------------------------------------------------------------------

    def _connect(self, experiments: Sequence[Experiment]) -> None:
        if self._ray is None:
            self._ray = self._stack.enter_context(connected(self._address, experiments))

    def _nodes(self) -> list[Node]:
        return nodes_of(self._ray.nodes())

    def _machines(self, needs: Needs) -> tuple[Identity, list[Node]]:
        """The nodes that measured runs are made on, and what they all are."""
        if needs not in self._alike:
            able = measuring(self._nodes(), needs)
            # A share of a GPU: its name is all that is asked.
            found = self._ask(able, machine_identity, needs.device, num_gpus=min(needs.num_gpus, 0.01))
            self._alike[needs] = alike(able, found, machine_identity("cpu"))
        return self._alike[needs]

    def _ask(self, nodes: Sequence[Node], question: Callable[..., Any], *given: object, num_gpus: float) -> list[Any]:
        """What a function returns on each of the nodes, which it asks for no CPU of."""
        task = self._ray.remote(question)
        tasks = [task.options(**self._on(node, num_cpus=0, num_gpus=num_gpus)).remote(*given) for node in nodes]
        while waiting := self._ray.wait(tasks, num_returns=len(tasks), timeout=PATIENCE_S)[1]:
            if (gone := died(nodes, self._nodes())) is not None:
                raise RunError(f"{gone} before it answered: run the command again")
            logger.warning("waiting for %d nodes to answer: the GPUs that are asked for are not free", len(waiting))
        try:
            answers: list[Any] = self._ray.get(tasks)
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            gone = died(nodes, self._nodes()) or f"a node was lost ({type(error).__name__})"
            raise RunError(f"{gone} before it answered: run the command again") from error
        return answers

    def _on(self, node: Node, *, num_cpus: float, num_gpus: float) -> dict[str, Any]:
        """Options of what runs on this node and no other."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": node.threads}},
        }

    def _pickled(self, value: object) -> bytes:
        pickled: bytes = self._ray.cloudpickle.dumps(value)
        return pickled

    @contextmanager
    def _worker(
        self, options: Mapping[str, Any], packing: Packing, nodes: Sequence[Node], *, is_measuring: bool
    ) -> Iterator[_Actor]:
        """On one of the nodes, or of such as join later where it is bound to none."""

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
    here = first_held_here(experiments, elsewhere=True)
    require(here is None, f"pool='ray': {here}")


class _Actor:
    def __init__(self, handle: Any, pickled: Callable[[object], bytes], hopeless: Callable[[], str | None]) -> None:
        self._handle = handle
        self._pickled = pickled
        self.hopeless = hopeless
        self._where = "a node"

    def submit(self, experiment: Experiment | None) -> Future[Any]:
        if experiment is None:
            where: Future[Any] = self._handle.where.remote().future()
            return where
        code = experiment.code
        # As a checked fact, not by trust: what the worker imports is what this process has.
        made: Future[Any] = self._handle.make.remote(
            self._pickled(experiment), code.digest, dict(code.modules)
        ).future()
        return made

    def result(self, future: Future[Any]) -> Any:
        import ray

        try:
            made = future.result()
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            raise WorkerLost(f"the worker on {self._where} was lost ({type(error).__name__})") from error
        if isinstance(made, str):
            self._where = made
        if isinstance(made, Exception):
            raise made
        return made
