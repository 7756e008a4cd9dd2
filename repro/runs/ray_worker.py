"""What runs on a node of a cluster: it makes one run after the other, by the very code that the sweep has."""

from __future__ import annotations

import pickle
import socket
import traceback
from collections.abc import Mapping, Sequence

from engines.errors import RunError, UserError
from repro.runs.experiment import Experiment
from repro.runs.pool import Packing
from repro.runs.provenance import machine_identity
from repro.runs.sitting import Sitting
from repro.runs.store import Packed


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
        if code.digest != digest:
            changed = code.changed_from(modules)
            raise RunError(
                f"{self._where} has other code than this sweep (first: {changed[0]}): its workers import another checkout "
                f"first, take that out of their PYTHONPATH"
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
