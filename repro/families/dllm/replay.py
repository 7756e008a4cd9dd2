"""A measured run that a simulated one follows: its requests, and what its steps did."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from engines.cluster.record import rows_of
from engines.dllm.config import GenerationConfig
from engines.dllm.plan import Request
from engines.dllm.simulated import LETTERS, BlockSteps, Replayed, drawn
from engines.dllm.simulated import Path as Steps
from engines.errors import UserError, require
from repro.families.dllm.record import BLOCKS, DLLM
from repro.files import kept
from repro.paths import COMMITTED
from repro.runs.cell import BASIS, COMPARISON, Cell
from repro.runs.record import REQUESTS
from repro.runs.store import UNREADABLE, StoredRun, StoreError, read_run
from repro.workloads.card import Origin
from repro.workloads.workload import Workload, workload_of


@dataclass(frozen=True, kw_only=True)
class Recorded:
    run: StoredRun
    file: str
    digest: str

    @property
    def cell(self) -> Cell:
        """As its system was asked."""
        return self.run.cell.without(BASIS).without(COMPARISON)

    @cached_property
    def paths(self) -> Mapping[int, Steps]:
        requests, blocks = self.run.table(REQUESTS), self.run.table(BLOCKS)
        rows = rows_of(requests, "request_id", "status", "output_len", "gen_length")
        ends = {request_id: told for request_id, *told in rows}
        found: dict[int, list[BlockSteps]] = {}
        for request_id, phases, committed in rows_of(blocks, "request_id", "phases", "committed"):
            block = BlockSteps(tuple(LETTERS[letter] for letter in phases), tuple(map(int, committed.split())))
            found.setdefault(request_id, []).append(block)
        for request_id, path in found.items():
            status, length, asked = ends[request_id]
            generated = sum(sum(block.committed) for block in path)
            if status == "ok" and (length < generated or generated < asked):
                before = generated - sum(path[-1].committed)
                path[-1] = path[-1]._replace(stop=length - before - 1)
        return {request_id: tuple(path) for request_id, path in found.items() if ends[request_id][0] == "ok"}

    def workload(self, cell: Cell, generation: GenerationConfig) -> Workload:
        """The run's requests, at its times, or at those of another rate."""
        own, table = self.run.cell, self.run.table(REQUESTS)
        for name in ("dataset", "seed"):
            here, there = getattr(cell, name), getattr(own, name)
            require(
                here == there,
                f"{name}={here!r} is not that of replay={self.file!r}: ask for {there!r}, or add --replay-drawn",
            )
        require(
            cell.rate == own.rate or own.rate is not None,
            f"rate={cell.rate}: replay={self.file!r} was asked all at once, which has no times to stretch: use --request-rate inf",
        )
        if cell.rate == own.rate:
            factor = 1.0
        else:
            factor = 0.0 if cell.rate is None or own.rate is None else own.rate / cell.rate
        num = cell.knob_values.get("num_prompts")
        most = len(table["request_id"])
        require(
            num is None or int(num) <= most,
            f"num_prompts={num}: replay={self.file!r} has {most} requests, ask for no more",
        )
        rows = sorted(rows_of(table, "request_id", "arrival_s", "prompt_len", "gen_length"))
        rows = rows[: most if num is None else int(num)]
        requests = tuple(
            Request(
                request_id=request_id,
                arrival_s=arrival_s * factor,
                prompt_len=prompt_len,
                generation=replace(
                    generation, gen_length=gen_length, steps=max(generation.steps, generation.num_blocks)
                ),
            )
            for request_id, arrival_s, prompt_len, gen_length in rows
        )
        given = self.run.manifest["facts"]["dataset"]
        origin = Origin(**{each.name: given[each.name] for each in fields(Origin)})
        left = most - len(requests)
        said = given["description"] + (f"; the first {len(requests)} of these {most} requests" if left else "")
        return workload_of(
            own.dataset,
            requests,
            origin,
            f"{said}; as in a measured run ({self.digest})",
            num_clipped=min(given["num_clipped"], len(requests)),
            num_repeated=max(0, given["num_repeated"] - left),
            length_scale=given["length_scale"],
            seed=given["seed"],
        )

    def replayed(self, requests: Sequence[Request], seed: int, *, is_drawn: bool) -> Replayed:
        if is_drawn:
            return drawn(list(self.paths.values()), requests, seed)
        found = Replayed(paths=self.paths)
        for request in requests:
            found.check(request)
        return found


@kept(maxsize=4)
def recorded(file: str) -> Recorded:
    """A run that can be followed: a model decided how its steps went."""
    found = measured_run(file, "replay")
    try:
        is_open = bool(found.paths)
    except StoreError:
        is_open = False
    require(
        is_open,
        f"replay={file!r} says nothing of its steps, which its settings fix beforehand, or which an older version did not note: "
        f"simulate it as it is, or measure it again",
    )
    return found


@kept(maxsize=4)
def measured_run(file: str, what: str = "measured") -> Recorded:
    """The run of a file, which is looked for below the committed results where it is not found as it is."""
    path = Path(file) if Path(file).exists() else COMMITTED / file
    try:
        run = read_run(path, what)
    except UserError:
        raise
    except (*UNREADABLE, StoreError) as error:
        raise UserError(f"{what}={file!r} is no stored run ({error}): give the file of a measured run") from error
    require(
        run.family is DLLM and run.machine is not None,
        f"{what}={file!r} is no measured run of a diffusion LLM: give the file of one",
    )
    return Recorded(run=run, file=file, digest=hashlib.sha256(run.content).hexdigest()[:12])
