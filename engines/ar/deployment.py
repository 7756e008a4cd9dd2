"""Which workers there are: replicas and tensor-parallel degrees of each phase, and the servers they stand on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from engines.errors import require
from engines.knobs import Checked, Count, Range

DEGREES = (1, 2, 4, 8)
"""T of AMPD §5."""
GPUS_PER_SERVER = 8


@dataclass(frozen=True, kw_only=True)
class Pool(Checked):
    """``replicas`` workers of ``degree`` GPUs each (TP and DP of AMPD's Table 2)."""

    degree: Annotated[int, Range(1, GPUS_PER_SERVER)]
    """A worker does not span servers."""
    replicas: Count

    def __str__(self) -> str:
        return f"TP{self.degree}x{self.replicas}"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """``decode`` workers hold the sessions; without ``prefill`` workers they are co-located and do both."""

    decode: tuple[Pool, ...]
    prefill: tuple[Pool, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.decode), "decode=(): a deployment needs at least one worker that decodes")

    @staticmethod
    def disaggregated(prefill_degree: int, prefill_replicas: int, degree: int, replicas: int) -> Deployment:
        """In the order of Table 2: P:<TP, DP>, D:<TP, DP>."""
        return Deployment(
            prefill=(Pool(degree=prefill_degree, replicas=prefill_replicas),),
            decode=(Pool(degree=degree, replicas=replicas),),
        )

    @staticmethod
    def colocated(degree: int, replicas: int) -> Deployment:
        return Deployment(decode=(Pool(degree=degree, replicas=replicas),))

    @property
    def gpus(self) -> int:
        return sum(pool.degree * pool.replicas for pool in (*self.prefill, *self.decode))

    def __str__(self) -> str:
        decode = "+".join(map(str, self.decode))
        return f"P:{'+'.join(map(str, self.prefill))} D:{decode}" if self.prefill else decode


def place(decode: Sequence[int], prefill: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """The servers of workers of these degrees: the largest first, those of the two phases in turn so that each finds the other on
    its own server, each on the first with room."""
    free: list[int] = []
    servers = [0] * len(decode), [0] * len(prefill)
    workers = [
        (-degree, index, phase) for phase, each in enumerate((decode, prefill)) for index, degree in enumerate(each)
    ]
    for minus_degree, index, phase in sorted(workers):
        server = next((place for place, room in enumerate(free) if room >= -minus_degree), len(free))
        if server == len(free):
            free.append(GPUS_PER_SERVER)
        free[server] += minus_degree
        servers[phase][index] = server
    return servers


def splits(num_gpus: int, prefill_degrees: Sequence[int], decode_degrees: Sequence[int]) -> Iterator[Deployment]:
    """Every deployment with one degree a phase that uses all GPUs, small prefill pools first."""
    for prefill_gpus in range(1, num_gpus):
        for prefill in prefill_degrees:
            for decode in decode_degrees:
                if prefill_gpus % prefill == 0 and (num_gpus - prefill_gpus) % decode == 0:
                    yield Deployment.disaggregated(
                        prefill, prefill_gpus // prefill, decode, (num_gpus - prefill_gpus) // decode
                    )


def replications(num_gpus: int, degrees: Sequence[int]) -> Iterator[Deployment]:
    """Every co-located deployment with one degree that uses all GPUs."""
    for degree in degrees:
        if num_gpus % degree == 0:
            yield Deployment.colocated(degree, num_gpus // degree)
