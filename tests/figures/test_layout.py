"""Nothing of any figure is clipped or printed over something else, whatever platform it is drawn for."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from support.figure_runs import figure_runs
from support.text_boxes import overprinted

from paper_figures.common import style
from paper_figures.common.figure import in_numbers
from paper_figures.common.panel import OF_SHARES, Axis, Bars, Guide, Line, Mark, Panel, Points
from paper_figures.common.words import exactly
from repro.reports.figures import FIGURES, View, default_reading
from repro.runs.statistics import Interval
from repro.systems.platforms import platform

DRAWN = [
    (name, where)
    for name, entry in FIGURES.items()
    for where in entry.load().platforms
    if where != "l40s" or "rtx4090" not in entry.load().platforms  # two cards of one figure are laid out alike
]
SAVED = (("dllm-serve/fig6", "cpu-tiny"), ("ampd/fig7", "h20x32"), ("laps/fig3", "h200"))
"""A picture of every family: how files are made is one for all."""


@pytest.mark.parametrize(("name", "where"), DRAWN)
def test_no_text_is_clipped_or_overprinted(name, where, tmp_path, request):
    """Repeats are drawn, they have more to show."""
    is_saved = (name, where) in SAVED
    if not is_saved:
        request.getfixturevalue("unsaved")
    drawn: list[Figure] = request.getfixturevalue("drawn")
    module, here = FIGURES[name].load(), platform(where)
    view = View(platform=here, reading=default_reading(here), num_runs=3)
    rendered = module.render(figure_runs(module, view), view, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in rendered.files}
    assert all(len(row) == len(rendered.columns) for row in rendered.rows)
    is_picture = any(path.suffix == ".png" for path in rendered.files)
    assert len(drawn) == is_picture
    assert not is_saved or all(path.stat().st_size > 0 for path in rendered.files)
    for figure in drawn:
        assert overprinted(figure) == []
        title = figure._suptitle.get_text()
        # What rests on no step of a run says itself what it was made of.
        obtained = [view.obtained] if module.cells(view) else ["computed", "simulated"]
        assert any(f"\n{each}" in title for each in obtained)
        caption = figure._supxlabel.get_text()
        assert len(caption.splitlines()) <= style.CAPTION_LINES
        (text,) = (path for path in rendered.files if path.suffix == ".txt")
        assert caption.replace("\n", " ").endswith(f"Full caption: {text.name}.")


def panel() -> Figure:
    figure, (axes,) = style.grid_of_panels(["a panel"], columns=1)
    axes.plot([0, 1], [0, 1], marker="o", label="a line")
    axes.set_ylabel("a label")
    return figure


def test_a_sound_figure_has_nothing_to_say(tmp_path):
    with style.drawing():
        figure = panel()
        style.publish(figure, figure.axes, tmp_path, "sound", title="a title", caption=["A sentence."])
        assert overprinted(figure) == []


@pytest.mark.parametrize(
    ("place", "text", "fault"),
    [
        ((1.4, 0.5), "beyond the edge", "text 'beyond the edge' leaves the canvas"),
        ((0.5, 1.04), "on the title", "text 'on the title' lies on text 'a panel'"),
        ((0.99, 0.94), "on the line's end", "text \"on the line's end\" lies on a marker of 'a line'"),
        ((0.5, 1.19), "over the legend", "text 'over the legend' lies on the legend"),
    ],
)
def test_broken_figures_are_found_out(place, text, fault, tmp_path):
    with style.drawing():
        figure = panel()
        style.publish(figure, figure.axes, tmp_path, "broken", title="a title", caption=["A sentence."])
        figure.axes[0].text(*place, text, transform=figure.axes[0].transAxes, ha="center")
        assert any(fault in each for each in overprinted(figure)), overprinted(figure)


def test_ticks_beyond_the_axes_are_not_drawn_and_do_not_count(tmp_path):
    with style.drawing():
        figure = panel()
        figure.axes[0].set_xticks([0, 1, 400], ["0", "1", "far away"])
        figure.axes[0].set_xlim(0, 1)
        style.publish(figure, figure.axes, tmp_path, "ticks", title="a title", caption=[])
        assert overprinted(figure) == []


def test_a_caption_is_cut_between_sentences():
    sentences = ["One sentence of some length.", "Another sentence of some length.", "x " * 200]
    lines = style.shown_caption(sentences, "there.txt", 40)
    assert len(lines) <= style.CAPTION_LINES
    assert " ".join(lines) == f"{sentences[0]} {sentences[1]} Full caption: there.txt."


def test_how_often_it_was_run_stands_under_the_panels_whatever_else_does_not_fit():
    sentences = ["x " * 100, "Five seeds.", "Another sentence."]
    assert style.shown_caption(sentences, "there.txt", 40, "Five seeds.") == ["Five seeds. Full caption: there.txt."]
    short = ["Five seeds.", "Another."]
    assert style.shown_caption(short, "there.txt", 80, "Five seeds.") == [
        "Five seeds. Another. Full caption: there.txt."
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("short", ["short"]),
        ("one two three four five", ["one two three", "four five"]),
        ("measured: a machine; baselines in our code", ["measured: a machine;", "baselines in our code"]),
    ],
)
def test_no_word_of_a_title_stands_alone(text, lines):
    assert style.balanced(text, max(len(text) - 2, 8)) == lines


def interval(mean: float, half_width: float) -> Interval:
    return Interval(mean=mean, half_width=half_width, n=3, confidence=0.95)


def ends(drawn: Figure) -> list[tuple[float, float]]:
    """Of the intervals, from below."""
    (lines,) = drawn.axes[0].collections
    return [tuple(segment[:, 1]) for segment in lines.get_segments()]


def test_intervals_of_shares_end_where_shares_do():
    at, look = [interval(98.0, 5.0), interval(1.0, 2.0), interval(50.0, 5.0)], style.Look(color="black", marker="o")
    layers = (
        Line(label="a line", places=range(3), at=at, look=look, within=OF_SHARES),
        Bars(label="bars", places=range(3), at=at, width=0.5, color="black", within=OF_SHARES),
        Line(label="ratios", places=range(3), at=[replace(each, mean=each.mean - 1) for each in at], look=look, base=1),
    )
    for layer in layers[:2]:
        figure, _ = style.grid_of_panels(["a panel"], columns=1)
        layer.draw(figure.axes[0])
        assert ends(figure) == [(93, 100), (0, 3), (45, 55)]
    figure, _ = style.grid_of_panels(["a panel"], columns=1)
    layers[2].draw(figure.axes[0])
    assert ends(figure) == [(93, 103), (-1, 3), (45, 55)]


def test_the_legend_has_the_order_of_drawing(tmp_path):
    look = style.Look(color="black", marker="o")
    layers = [
        Line(label="a line", places=[0, 1], at=[interval(1.0, 0.1)] * 2, look=look),
        Bars(label="bars", places=[0, 1], at=[interval(1.0, 0.1)] * 2, width=0.5, color="black"),
        Mark(label="printed", place=0, value=1, look=look),
        Guide(value=1, label="a guide"),
    ]
    with style.drawing():
        figure, axes = style.grid_of_panels(["a panel"], columns=1)
        Panel(title="a panel", layers=layers).draw(axes[0])
        style.publish(figure, axes, tmp_path, "order", title="a title", caption=[])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a line", "bars", "printed", "a guide"]


def test_the_table_of_a_picture_has_a_row_a_place_and_a_column_a_label():
    look = style.Look(color="black", marker="o")
    two = [exactly(1.25), exactly(None)]
    bars = Bars(label="bars", places=[-0.2, 0.8], at=two, width=0.4, color="black")
    lines = [
        Line(label="line", places=[0.9, 1.9], names=["1", "2"], at=two, look=look),
        Points(label="points", places=[1, 2], values=[3.0, 40000.0], look=look),
        Mark(label="paper", place=2.1, value=7.0, look=look, name="2"),
    ]
    panels = [
        Panel(title="a", layers=[bars], x=Axis(ticks=range(2), names=["one", "other\none"]), y=Axis(label="of")),
        Panel(title="b", layers=lines),
    ]
    table = in_numbers(panels)
    assert table.columns == ("panel", "at", "bars", "line", "points", "paper")
    assert table.rows == [
        ("a, of", "one", "1.2", "-", "-", "-"),
        ("a, of", "other one", "-", "-", "-", "-"),
        ("b, of", "1", "-", "1.2", "3", "-"),
        ("b, of", "2", "-", "-", "40000", "7"),
    ]
