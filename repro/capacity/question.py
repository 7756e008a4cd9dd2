"""A capacity question, checked: which plans of which systems on which cards, for which workload. Raises UserError for anything that a
user can get wrong, before any run."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.errors import UserError, require
from repro.capacity.objectives import METRICS, Objective, parse_objectives, tightest
from repro.capacity.sites import ClusterSite, InstanceSite, RequestSite, Site, refuse_set_here
from repro.families.cluster.ampd import ArSystem
from repro.families.cluster.laps import PrefillSystemEntry
from repro.families.platforms import ArPart, PrefillPart, platform
from repro.runs.cell import Cell, Scalar
from repro.runs.system import SYSTEMS
from repro.workloads.conversations import known_conversation_cards
from repro.workloads.dataset import known_datasets
from repro.workloads.knobs import named_after, place_of
from repro.workloads.sessions import known_session_cards

_NAMES = (
    "ampd, dynamo-sim, vllm-sim, continuum-sim, for prefill laps, reserve, srpt, sglang-pd, vllm-pd, or for diffusion dllm-serve, "
    "block-diffusion"
)
KNOWN: Mapping[type[Site], Callable[[], Sequence[str]]] = {
    ClusterSite: known_session_cards,
    InstanceSite: known_conversation_cards,
    RequestSite: known_datasets,
}
PARTS: Mapping[type[Site], type] = {ClusterSite: ArPart, InstanceSite: PrefillPart}
METRICS_OF: Mapping[str, Sequence[str]] = {InstanceSite.unit: ("ttft",), RequestSite.unit: ("ttft", "e2el")}


def _kind_of(name: str) -> type[ClusterSite | InstanceSite | RequestSite] | None:
    system = SYSTEMS.get(name)
    if isinstance(system, ArSystem):
        return ClusterSite
    if isinstance(system, PrefillSystemEntry):
        return InstanceSite
    return RequestSite if system.family.name in ("dllm", "block") else None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A range of numbers of GPUs."""

    text: str
    least: int
    most: int

    def fitting(self, site: Site) -> tuple[int, ...]:
        """Return the sizes that some plan of the site uses completely. Raises UserError if there are none."""
        shape, card = site.hardware()
        target = f"of system={site.cell.system!r} on {card}"
        require(
            self.most <= site.most_gpus,
            f"gpus={self.text!r} is more than the {site.most_gpus} of platform={site.cell.platform!r}: give fewer, or a "
            "card by its name",
        )
        sizes = tuple(gpus for gpus in range(self.least, self.most + 1) if site.fits(gpus))
        require(
            bool(sizes),
            f"gpus={self.text!r} fits no plan {target}, which takes {site.least_gpus} or more for {shape.name} and uses all: "
            f"give a range with a multiple of {site.least_gpus}, or another --system",
        )
        return sizes

    def halved(self, site: Site) -> tuple[int, ...]:
        """Return the largest of these, and from there repeatedly the largest of at most half, in rising order."""
        fitting = self.fitting(site)
        sizes = [fitting[-1]]
        while smaller := [gpus for gpus in fitting if gpus <= sizes[-1] // 2]:
            sizes.append(smaller[-1])
        return tuple(reversed(sizes))


def parse_sizes(text: str) -> Sizes:
    match = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text)
    if match is None:
        raise UserError(f"gpus={text!r} is no number of GPUs: write 16, or a range like 1..64")
    least, most = int(match[1]), int(match[2] or match[1])
    require(1 <= least <= most, f"gpus={text!r} must go from 1 or more upwards: write it like 1..64")
    return Sizes(text=text, least=least, most=most)


@dataclass(frozen=True, kw_only=True)
class Question:
    systems: Sequence[str]
    platforms: Sequence[str]
    workload: str
    """A file, a user's own workload, or a trace or conversations by name."""
    dataset: str | None
    """The data set whose card tells a file's format and draws what it lacks; None if the file needs no card."""
    file_knobs: Mapping[str, Scalar] = field(default_factory=dict)
    """How to read a file: columns, time_unit, sort and arrivals; None for those not given."""
    slo: str
    knobs: Mapping[str, Scalar]
    num_prompts: int | None
    num_seeds: int

    def objectives(self) -> tuple[Objective, ...]:
        units = []
        for name in self.systems:
            kind = _kind_of(name)
            require(kind is not None, f"system={name!r} is no simulated cluster: use {_NAMES}")
            units.append(kind.unit if kind is not None else "")
        require(
            len({*units}) == 1,
            f"system={self.systems[-1]!r} serves {units[-1]} and others {units[0]}, whose rates are not one thing: ask for one kind at a "
            "time",
        )
        return parse_objectives(self.slo, METRICS_OF.get(units[0], METRICS))

    def sites(self, sizes: Sizes) -> list[Site]:
        refuse_set_here(self.knobs)
        objectives = self.objectives()
        pairs = [(name, card) for card in dict.fromkeys(self.platforms) for name in dict.fromkeys(self.systems)]
        sites = []
        for name, card in pairs:
            site = self._site(name, card, objectives)
            least = site.least_prompts
            require(
                self.num_prompts is None or self.num_prompts >= least,
                f"num_prompts={self.num_prompts} is too few to tell what system={name!r} serves: give {least} or more, or leave it out",
            )
            fitting = sizes.fitting(site)
            site.check(fitting[-1])
            sites.append(site)
        return sites

    def _site(self, name: str, card: str, objectives: tuple[Objective, ...]) -> Site:
        kind, machine = _kind_of(name), platform(card)
        assert kind is not None, "refused before"
        part = PARTS.get(kind)
        gpu = machine.gpu if part is None else getattr(machine.part(part), "gpu", machine.gpu)
        require(gpu is not None, f"platform={card!r} is measured and a capacity is searched by simulation: use h200")
        dataset, file = self._data(kind)
        knobs: dict[str, Scalar] = {**self.knobs, **file}
        limits = {} if kind is RequestSite else {"slo_ttft_s": tightest(objectives, "ttft", "e2el")}
        if kind is ClusterSite:
            # Policies heed both limits. A metric without an objective gets the longest limit there may be.
            limits |= {"slo_itl_s": tightest(objectives, "itl", "tpot")}
        knobs |= {knob: min(limit or 1e6, 1e6) for knob, limit in limits.items()}
        cell = Cell(
            system=name,
            dataset=dataset,
            platform=machine.name,
            executor="roofline",
            rate=1.0,
            seed=0,
            knobs=tuple(knobs.items()),
        )
        return kind(cell=cell, objectives=objectives, num_seeds=self.num_seeds)

    def _data(self, kind: type[Site]) -> tuple[str, dict[str, Scalar]]:
        """Return the data set's name, and the knobs that name its file, if there is one."""
        known_names = KNOWN[kind]()
        name, path, place = self.workload.lower(), self.path, place_of(self.workload)
        if path is None and place is None:
            require(
                name in known_names,
                f"workload={self.workload!r} is neither a file nor one of {', '.join(known_names)}: check the path, name one, or give "
                "module:NAME",
            )
            require(
                self.dataset in (None, name),
                f"dataset_name={self.dataset!r} has no effect with workload={self.workload!r}: leave it out",
            )
            require(
                not self._file_settings,
                f"{', '.join(self._file_settings)} has no effect with workload={self.workload!r}, which is no file: leave it out",
            )
            return name, {}
        if place is None:
            assert path is not None
            require(path.stat().st_size > 0, f"workload={str(path)!r} is empty: give a file with a session a line")
        else:
            require(
                self.dataset is None,
                f"dataset_name={self.dataset!r} has no effect with workload={self.workload!r}, which has no format: leave it out",
            )
        if self.dataset is None:
            workload = place or str(path)
            return named_after(workload), {"workload": workload, **self._file_settings}
        require(
            not self._file_settings,
            f"{', '.join(self._file_settings)} has no effect with dataset_name={self.dataset!r}, whose card says what is what: leave one out",
        )
        return self.dataset, {"dataset_path": str(path)}

    @property
    def _file_settings(self) -> dict[str, Scalar]:
        return {name: value for name, value in self.file_knobs.items() if value is not None}

    @property
    def is_given(self) -> bool:
        """Whether the requests are the user's own."""
        return self.path is not None or place_of(self.workload) is not None

    @property
    def path(self) -> Path | None:
        path = Path(self.workload)
        return path if path.is_file() else None
