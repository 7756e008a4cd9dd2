"""What a drawn figure clips or prints over each other, found from the boxes of its texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.transforms import Bbox

TOLERANCE = 1.0
"""Pixels two boxes may share: a box is its glyphs' rounded outwards."""


@dataclass(frozen=True)
class Box:
    name: str
    bounds: Bbox
    owner: int = 0
    """Id of the legend it is a part of; 0 for none."""
    is_text: bool = True


def overprinted(figure: Figure, texts: Sequence[Text] | None = None) -> list[str]:
    """A sentence for every text off the canvas, and for every one that lies on another, on a legend or on a marker; ``texts`` are the
    drawn ones, where they are known."""
    boxes = [*_texts(figure, drawn_texts(figure) if texts is None else texts), *_legends(figure), *_markers(figure)]
    canvas = figure.bbox
    found = [
        f"{box.name} leaves the canvas"
        for box in boxes
        if box.bounds.x0 < canvas.x0 - TOLERANCE
        or box.bounds.y0 < canvas.y0 - TOLERANCE
        or box.bounds.x1 > canvas.x1 + TOLERANCE
        or box.bounds.y1 > canvas.y1 + TOLERANCE
    ]
    for one, other in _overlapping(boxes):
        is_apart = one.owner and one.owner == other.owner
        if (one.is_text or other.is_text) and not is_apart:
            found.append(f"{one.name} lies on {other.name}")
    return found


def _overlapping(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs in order. All are compared at once: a figure may have a thousand markers."""
    if not boxes:
        return
    x0, y0, x1, y1 = np.array([box.bounds.extents for box in boxes]).T
    width = np.minimum.outer(x1, x1) - np.maximum.outer(x0, x0)
    height = np.minimum.outer(y1, y1) - np.maximum.outer(y0, y0)
    for i, j in np.argwhere(np.triu((width > TOLERANCE) & (height > TOLERANCE), k=1)):
        yield boxes[i], boxes[j]


def drawn_texts(figure: Figure) -> list[Text]:
    """Those that drawing really comes to, which leaves out ticks and annotations beyond the axes."""
    found: dict[int, Text] = {}
    draw = Text.draw

    def keep(self: Text, renderer: Any, *args: Any, **kwargs: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            found[id(self)] = self
        draw(self, renderer, *args, **kwargs)

    with patch.object(Text, "draw", keep):
        figure.draw_without_rendering()
    return list(found.values())


def _texts(figure: Figure, texts: Sequence[Text]) -> Iterator[Box]:
    owners = {id(text): id(legend) for legend in _all_legends(figure) for text in legend.findobj(Text)}
    for text in texts:
        bounds = Text.get_window_extent(text)  # an annotation's own would hold its arrow
        yield Box(name=f"text {text.get_text()!r}", bounds=bounds, owner=owners.get(id(text), 0))


def _legends(figure: Figure) -> Iterator[Box]:
    for legend in _all_legends(figure):
        yield Box(name="the legend", bounds=legend.get_window_extent(), owner=id(legend))


def _markers(figure: Figure) -> Iterator[Box]:
    """A box for every marker inside its panel."""
    for axes in figure.axes:
        for line in axes.get_lines():
            if not line.get_visible() or line.get_marker() in ("", "None", None, "|", "_"):
                continue
            half = line.get_markersize() * figure.dpi / 72 / 2
            for x, y in line.get_transform().transform(line.get_xydata()):
                if axes.bbox.contains(x, y):
                    yield _marker_box(line, x, y, half)


def _marker_box(line: Line2D, x: float, y: float, half: float) -> Box:
    return Box(
        name=f"a marker of {line.get_label()!r}",
        bounds=Bbox.from_extents(x - half, y - half, x + half, y + half),
        is_text=False,
    )


def _all_legends(figure: Figure) -> list[Any]:
    per_axes = [axes.get_legend() for axes in figure.axes]
    return [*figure.legends, *(legend for legend in per_axes if legend is not None)]
