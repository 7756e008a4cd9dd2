"""Nodes of a Ray cluster: which of them are there, and which a run can be measured on."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.errors import UserError
from repro.runs.experiment import Experiment

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
