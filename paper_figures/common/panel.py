"""Panels of a picture as data: their layers and two axes. Only this module and ``style`` call matplotlib."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paper_figures.common import style
from paper_figures.common.style import Look
from paper_figures.common.words import brief, said
from repro.runs.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bounds = tuple[float | None, float | None]
ANYWHERE: Bounds = (None, None)
OF_SHARES: Bounds = (0.0, 100.0)
"""Bounds of shares, in percent."""
FLAT_PERCENT = 95.0
"""A panel in which all shares reach this says nothing."""
Better = Literal["higher", "lower"]


class Layer(Protocol):
    """Something to draw into a panel; the legend lists a label once, even if several layers have it."""

    def draw(self, axes: "Axes") -> None: ...


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of means with their intervals; a place without a mean stays empty."""

    label: str
    places: Sequence[float]
    at: Sequence[Interval]
    look: Look
    base: float = 0.0
    """Added to every mean after it is multiplied by ``scale``."""
    scale: float = 1.0
    capsize: float = 2
    zorder: float | None = None
    spread: Sequence[tuple[float, float]] | None = None
    """Distances below and above each mean, in place of the interval's ends."""
    within: Bounds = ANYWHERE
    """Bounds of a value: intervals are drawn no further."""
    names: Sequence[str] | None = None
    """Names of the places, if the line is drawn beside them."""
    is_drawn: bool = True
    """If False, only the table has it."""
    texts: Sequence[str] | None = None
    """Texts for the table in place of the values."""

    def draw(self, axes: "Axes") -> None:
        if not self.is_drawn:
            return
        means = [math.nan if interval.mean is None else self.base + self.scale * interval.mean for interval in self.at]
        errors: Any = list(zip(*self.spread, strict=True)) if self.spread is not None else None
        if errors is None:
            errors = _errors(self.at, self.scale, self.base, self.within)
        extra = _given(zorder=self.zorder)
        axes.errorbar(
            self.places, means, yerr=errors, capsize=self.capsize, label=self.label, **self.look.line, **extra
        )


@dataclass(frozen=True, kw_only=True)
class Points:
    """Values without an interval."""

    label: str
    places: Sequence[float]
    values: Sequence[float]
    look: Look
    size: float | None = None
    width: float | None = None
    edge: float | None = None
    zorder: float = 3
    is_ring: bool = False
    """Drawn as rings around other points."""
    has_values: bool = True
    """If False, it only marks what others draw, and adds no number to the table."""

    def draw(self, axes: "Axes") -> None:
        extra = _given(markersize=self.size, linewidth=self.width, markeredgewidth=self.edge)
        extra |= {"fillstyle": "none"} if self.is_ring else {}
        axes.plot(self.places, self.values, label=self.label, zorder=self.zorder, **self.look.line, **extra)


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One bar per place, side by side with those of other layers."""

    label: str | None
    places: Sequence[float]
    at: Sequence[Interval]
    width: float
    color: str
    capsize: float = 3
    hatch: str | None = None
    edge: str | None = None
    within: Bounds = ANYWHERE
    """Bounds of a value: intervals are drawn no further."""
    is_numbered: bool = False
    """Whether each bar's number stands below the axis."""

    def draw(self, axes: "Axes") -> None:
        axes.bar(
            self.places,
            [interval.mean or 0.0 for interval in self.at],
            self.width,
            yerr=_errors(self.at, within=self.within),
            capsize=self.capsize,
            color=self.color,
            hatch=self.hatch,
            edgecolor=self.edge,
            label=self.label,
        )
        for place, interval in zip(self.places, self.at, strict=True) if self.is_numbered else ():
            style.foot_label(axes, place, interval.mean)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Parts of horizontal bars; each part begins where the last one ends."""

    label: str
    starts: Sequence[float]
    widths: Sequence[float]
    color: str

    def draw(self, axes: "Axes") -> None:
        rows = range(len(self.widths))
        axes.barh(
            rows, self.widths, left=self.starts, color=self.color, edgecolor="white", height=0.55, label=self.label
        )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A value that the paper prints: hollow, on top of all else, with a white rim."""

    label: str
    place: float
    value: float
    look: Look
    size: float = 8
    name: str | None = None
    """Name of the place, if the value is drawn beside it."""

    def draw(self, axes: "Axes") -> None:
        from matplotlib import patheffects

        rim, look = patheffects.withStroke(linewidth=3, foreground="white"), {**self.look.line, "linestyle": "none"}
        hollow: dict[str, Any] = {
            "markersize": self.size,
            "fillstyle": "none",
            "markeredgewidth": 1.4,
            "path_effects": [rim],
        }
        axes.plot([self.place], [self.value], label=self.label, zorder=10, **look, **hollow)


@dataclass(frozen=True, kw_only=True)
class AtMost:
    """Upper bounds that follow from the paper's numbers: hollow, with arrows down."""

    label: str
    places: Sequence[float]
    bounds: Sequence[float]
    look: Look
    arrow: float
    """Length, in units of the axis."""

    def draw(self, axes: "Axes") -> None:
        axes.errorbar(
            self.places,
            self.bounds,
            yerr=self.arrow,
            uplims=True,
            label=self.label,
            zorder=9,
            color=self.look.color,
            marker=self.look.marker,
            linestyle="none",
            markersize=5,
            markerfacecolor="white",
            elinewidth=1,
            markeredgewidth=1,
        )


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A line across the panel that is no series, horizontal or upright."""

    value: float
    label: str | None = None
    is_upright: bool = False
    is_printed: bool = False
    """Whether it is the paper's value, so that the table of drawn numbers has it."""
    linestyle: str | tuple[int, tuple[int, ...]] = "--"
    color: str = style.GUIDE_COLOR
    width: float = 1
    opacity: float | None = None
    zorder: float | None = None

    def draw(self, axes: "Axes") -> None:
        extra = _given(zorder=self.zorder, alpha=self.opacity, label=self.label)
        across = axes.axvline if self.is_upright else axes.axhline
        across(self.value, linestyle=self.linestyle, linewidth=self.width, color=self.color, **extra)


@dataclass(frozen=True, kw_only=True)
class Band:
    low: float
    high: float

    def draw(self, axes: "Axes") -> None:
        axes.axhspan(self.low, self.high, color=style.GUIDE_COLOR, alpha=0.2, linewidth=0, zorder=1)


@dataclass(frozen=True, kw_only=True)
class Text:
    """Words in a panel, placed by shares of the panel unless ``is_at_values``."""

    text: str
    x: float = 0.5
    y: float = 0.5
    is_at_values: bool = False

    def draw(self, axes: "Axes") -> None:
        if self.is_at_values:
            axes.text(self.x, self.y, self.text, ha="right", va="top", fontsize=8)
        else:
            axes.text(self.x, self.y, self.text, transform=axes.transAxes, ha="center", color=style.GUIDE_COLOR)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Words beside points, each placed where it covers nothing."""

    texts: Sequence[str]
    places: Sequence[float]
    values: Sequence[float]
    color: str = "#404040"

    def draw(self, axes: "Axes") -> None:
        for text, place, value in zip(self.texts, self.places, self.values, strict=True):
            style.label_beside(axes, text, place, value, self.color)


@dataclass(frozen=True, kw_only=True)
class Axis:
    label: str | None = None
    better: Better | None = None
    """Which values are better; the axis shows it after its label. None shows nothing."""
    scale: Literal["linear", "log2", "log", "plain log"] = "linear"
    """log2 has only the given ticks; plain log has plain numbers at 1, 2 and 5 of every decade."""
    ticks: Sequence[float] | None = None
    names: Sequence[str] | None = None
    """Names of the ticks; by default their numbers."""
    size: float | None = None
    """Font size of the names, in points."""
    rotation: float | None = None
    limits: tuple[float | None, float | None] | None = None
    is_inverted: bool = False
    margin: float | None = None
    """Free space at both ends, as a share of the drawn range."""

    def draw(self, axes: "Axes", name: Literal["x", "y"]) -> None:
        setters = {part: getattr(axes, f"set_{name}{part}") for part in ("scale", "ticks", "lim", "label")}
        if self.scale == "plain log":
            style.log_scale(axes, name)
        elif self.scale != "linear":
            setters["scale"]("log", **({"base": 2} if self.scale == "log2" else {}))
        if self.ticks is not None:
            names = [f"{tick:g}" for tick in self.ticks] if self.names is None else list(self.names)
            setters["ticks"](list(self.ticks), names, **_given(fontsize=self.size, rotation=self.rotation))
        if self.scale in ("log2", "log") and self.ticks is not None:
            axes.minorticks_off()
        if self.margin is not None:
            axes.margins(**_given(**{name: self.margin}))
        if self.is_inverted:
            axes.invert_yaxis()
        if self.limits is not None:
            setters["lim"](*self.limits)
        if self.label is not None:
            # On a line of its own: one long label would be longer than the panel is high.
            separator = ", " if name == "x" else "\n"
            setters["label"](self.label + ("" if self.better is None else f"{separator}{self.better} is better"))


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    layers: Sequence[Layer]
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)

    @property
    def is_flat(self) -> bool:
        """Whether the panel shows only shares near 100 %, and the paper prints no lower ones."""
        lines = [layer for layer in self.layers if isinstance(layer, Line)]
        for layer in self.layers:
            printed = layer.bounds if isinstance(layer, AtMost) else [layer.value] if isinstance(layer, Mark) else []
            if any(value < FLAT_PERCENT for value in printed):
                return False
        means = [interval.mean for line in lines for interval in line.at if interval.mean is not None]
        return bool(means) and all(line.within == OF_SHARES for line in lines) and min(means) >= FLAT_PERCENT

    def draw(self, axes: "Axes") -> None:
        for layer in self.layers:
            layer.draw(axes)
        self.x.draw(axes, "x")
        self.y.draw(axes, "y")

    def numbers(self) -> Iterator[tuple[str, str, str]]:
        """Yield place, label and value of everything drawn."""
        for layer in self.layers:
            match layer:
                case Line(places=places, texts=texts) if texts is not None:
                    text_pairs = zip(places, texts, strict=True)
                    yield from ((self.name_of(place), layer.label, text) for place, text in text_pairs)
                case Line(at=at, names=names) if names is not None:
                    yield from ((name, layer.label, said(mean)) for name, mean in zip(names, at, strict=True))
                case Line(places=places, at=at) | Bars(places=places, at=at):
                    pairs = zip(places, at, strict=True)
                    yield from ((self.name_of(place), layer.label or "value", said(mean)) for place, mean in pairs)
                case Points(places=places, values=values, has_values=True):
                    points = zip(places, values, strict=True)
                    yield from ((self.name_of(place), layer.label, brief(value)) for place, value in points)
                case Mark(place=place, value=value, name=name):
                    yield (self.name_of(place) if name is None else name), layer.label, brief(value)
                case AtMost(places=places, bounds=bounds):
                    limits = zip(places, bounds, strict=True)
                    yield from ((self.name_of(place), layer.label, f"<= {brief(value)}") for place, value in limits)
                case Guide(value=value, label=str(label), is_printed=True):
                    yield "all", label, brief(value)

    def name_of(self, place: float) -> str:
        """Return the name of the nearest tick, or the number if ticks have no other names."""
        ticks, names = self.x.ticks, self.x.names
        if ticks is None or names is None:
            return brief(place)
        tick, nearest = min(zip(ticks, names, strict=True), key=lambda each: abs(each[0] - place))
        return brief(place) if nearest in ("", f"{tick:g}") else nearest.replace("\n", " ")


def _errors(
    at: Sequence[Interval], scale: float = 1.0, base: float = 0.0, within: Bounds = ANYWHERE
) -> list[list[float]] | None:
    """Lengths below and above each mean, as drawn; None if no mean has an interval."""
    arms = [_arms(interval, scale, base, within) for interval in at]
    return [list(ends) for ends in zip(*arms, strict=True)] if any(map(any, arms)) else None


def _arms(each: Interval, scale: float, base: float, within: Bounds) -> tuple[float, float]:
    (below, above), (low, high) = each.arms, within
    mean = base + scale * (each.mean or 0.0)
    return (
        scale * below if low is None else max(0.0, min(scale * below, mean - low)),
        scale * above if high is None else max(0.0, min(scale * above, high - mean)),
    )


def _given(**values: Any) -> dict[str, Any]:
    """Keep the values that are set; matplotlib decides the others."""
    return {name: value for name, value in values.items() if value is not None}
