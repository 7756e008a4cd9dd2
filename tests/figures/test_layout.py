"""Nothing of any figure is clipped or printed over something else, whatever platform it is drawn for."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from support.figure_runs import figure_runs
from support.tables import data_beside
from support.text_boxes import drawn_texts, overprinted

from paper_figures.common import style
from paper_figures.common.figure import Picture, _draw, _known_by, drawn_panels, in_numbers
from paper_figures.common.panel import ANYWHERE, OF_SHARES, AtMost, Axis, Bars, Guide, Labels, Line, Mark, Panel, Points
from paper_figures.common.words import exactly
from repro.families.platforms import platform
from repro.reports.figures import FIGURES, View, default_reading, pictures
from repro.runs.statistics import Interval

DATA = data_beside(__file__, "layout")

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
        texts = drawn_texts(figure)
        assert overprinted(figure, texts) == []
        title = figure._suptitle.get_text()
        # What rests on no step of a run says itself what it was made of.
        obtained = [view.obtained] if module.cells(view) else ["computed", "simulated"]
        assert any(f"\n{each}" in title for each in obtained)
        line = figure._supxlabel.get_text()
        (text,) = (path for path in rendered.files if path.suffix == ".txt")
        assert "\n" not in line
        assert line.endswith(f"Full caption: {text.name}.")
        assert figure.get_figwidth() <= style.WIDEST_INCHES
        assert min(text.get_fontsize() for text in texts) >= style.LEAST_POINTS
        assert max(map(num_series, figure.axes)) <= MOST_SERIES
        assert [line.get_label() for axes in figure.axes for line in joined_categories(axes)] == []


def joined_categories(axes) -> list[Line2D]:
    """Lines over three or more places where an axis has names that are no numbers."""
    names = [text.get_text() for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels()]
    if not any(name[0].isalpha() for name in names if name):
        return []
    return [line for line in axes.get_lines() if len(line.get_xdata()) > 2 and line.get_linestyle() != "None"]


MOST_SERIES = 8


def num_series(axes) -> int:
    """Labels of a panel but for guides and the paper's values."""
    labels = axes.get_legend_handles_labels()[1]
    return len({label for label in labels if not any(word in label for word in NO_SERIES)})


NO_SERIES = DATA["no_series"]


def panel() -> Figure:
    figure, (axes,) = style.grid_of_panels(["a panel"], columns=1)
    axes.plot([0, 1], [0, 1], marker="o", label="a line")
    axes.set_ylabel("a label")
    return figure


def test_a_sound_figure_has_nothing_to_say():
    with style.drawing():
        figure = panel()
        style.compose(figure, figure.axes, title="a title", line="A sentence.")
        assert overprinted(figure) == []


@pytest.mark.parametrize(("place", "text", "fault"), DATA["broken_figures_are_found_out"])
def test_broken_figures_are_found_out(place, text, fault):
    with style.drawing():
        figure = panel()
        style.compose(figure, figure.axes, title="a title", line="A sentence.")
        figure.axes[0].text(*place, text, transform=figure.axes[0].transAxes, ha="center")
        assert any(fault in each for each in overprinted(figure)), overprinted(figure)


def test_ticks_beyond_the_axes_are_not_drawn_and_do_not_count():
    with style.drawing():
        figure = panel()
        figure.axes[0].set_xticks([0, 1, 400], ["0", "1", "far away"])
        figure.axes[0].set_xlim(0, 1)
        style.compose(figure, figure.axes, title="a title", line="A sentence.")
        assert overprinted(figure) == []


@pytest.mark.parametrize(("characters", "line"), DATA["lines_under_panels"])
def test_the_line_under_the_panels_is_one_and_ends_with_the_caption_file(characters, line):
    assert style.caption_line("Mean of 5 seeds.", "there.txt", characters) == line


@pytest.mark.parametrize(("text", "lines"), DATA["no_word_of_a_title_stands_alone"])
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


def test_the_legend_has_the_order_of_drawing():
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
        style.compose(figure, axes, title="a title", line="A sentence.")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a line", "bars", "printed", "a guide"]


def test_the_table_of_a_picture_has_a_row_a_place_and_a_column_a_label():
    look = style.Look(color="black", marker="o")
    two = [exactly(1.25), exactly(None)]
    bars = Bars(label="bars", places=[-0.2, 0.8], at=two, width=0.4, color="black")
    lines = [
        Line(label="line", places=[0.9, 1.9], names=["1", "2"], at=two, look=look),
        Points(label="points", places=[1, 2], values=[3.0, 40000.0], look=look),
        Mark(label="paper", place=2.1, value=7.0, look=look, name="2"),
        Line(label="undrawn", places=[1, 2], at=two, look=look, is_drawn=False),
        AtMost(label="at most", places=[1], bounds=[50.0], look=look, arrow=6),
        Guide(value=4.5, label="peak", is_printed=True),
        Guide(value=1.0, label="base"),
        Points(label="edge", places=[1.4], values=[8.0], look=look),
        Line(label="edge", places=[3], at=[exactly(6.0)], look=look, texts=["> 6"]),
        Points(label="a sign", places=[3], values=[6.9], look=look, has_values=False),
    ]
    panels = [
        Panel(title="a", layers=[bars], x=Axis(ticks=range(2), names=["one", "other\none"]), y=Axis(label="of")),
        Panel(title="b", layers=lines, x=Axis(ticks=[1, 2], names=["", "2"])),
    ]
    table = in_numbers(panels)
    assert table.columns == ("panel", "at", "bars", "line", "points", "undrawn", "at most", "paper", "peak", "edge")
    assert table.rows == [
        ("a, of", "one", "1.2", *"-------"),
        ("a, of", "other one", *"--------"),
        ("b, of", "1", "-", "1.2", "3", "1.2", "<= 50", *"---"),
        ("b, of", "2", "-", "-", "40000", "-", "-", "7", "-", "-"),
        ("b, of", "all", *"------", "4.5", "-"),
        ("b, of", "1.4", *"-------", "8"),
        ("b, of", "3", *"-------", "> 6"),
    ]


PAPER = style.Look(color="black", marker="D")


def shares(*means: float, within=OF_SHARES) -> Panel:
    look = style.Look(color="black", marker="o")
    at = [interval(mean, 0.0) for mean in means]
    return Panel(
        title=f"{means}", layers=[Line(label="a line", places=range(len(at)), at=at, look=look, within=within)]
    )


@pytest.mark.parametrize(
    ("panels", "left_out"),
    [
        ([shares(100.0, 99.0), shares(100.0, 60.0), shares(98.0, 97.0)], ["(100.0, 99.0)", "(98.0, 97.0)"]),
        ([shares(100.0, 60.0), shares(100.0, 99.0, within=ANYWHERE)], []),
        ([shares(100.0, 100.0), shares(99.0, 99.0)], ["(99.0, 99.0)"]),
    ],
)
def test_panels_that_are_flat_at_the_top_are_left_out_and_named(panels, left_out):
    """One is left where all are."""
    drawn, caption = drawn_panels(Picture(panels=panels, caption=["A sentence."]))
    assert [panel.title for panel in panels if panel not in drawn] == left_out
    assert caption[0] == "A sentence."
    assert [sentence.partition(": ")[2] for sentence in caption[1:]] == [f"{', '.join(left_out)}."] * bool(left_out)


@pytest.mark.parametrize(
    ("printed", "is_flat"),
    [
        (AtMost(label="at most", places=[0], bounds=[4.0], look=PAPER, arrow=6), False),
        (Mark(label="paper", place=0, value=94.9, look=PAPER), False),
        (Mark(label="paper", place=0, value=95.0, look=PAPER), True),
    ],
)
def test_a_panel_that_the_paper_prints_less_of_is_not_flat(printed, is_flat):
    panel = shares(100.0, 99.0)
    assert replace(panel, layers=[*panel.layers, printed]).is_flat is is_flat


def test_a_line_of_the_table_alone_is_not_drawn():
    _, (axes,) = style.grid_of_panels(["a panel"], columns=1)
    (line,) = shares(100.0, 99.0).layers
    replace(line, is_drawn=False).draw(axes)
    assert not axes.get_lines()


def test_a_plain_picture_has_neither_title_nor_caption(tmp_path, unsaved, drawn):
    module, view = FIGURES["laps/fig8"].load(), View(platform=platform("h200"), reading="published")
    with pictures("plain"):
        rendered = module.render(figure_runs(module, view), view, tmp_path)
    (figure,) = drawn
    assert figure._suptitle is None
    assert figure._supxlabel is None
    assert overprinted(figure) == []
    assert module.title in (tmp_path / "fig8-h200.txt").read_text(encoding="utf-8")
    assert any(path.suffix == ".csv" for path in rendered.files)


def two_by_two() -> Figure:
    figure, panels = style.grid_of_panels(["a", "b", "c"], columns=2)
    for axes, label in zip(panels, ("left", "left", "other"), strict=True):
        axes.set_ylabel(label)
        axes.set_xlabel("below")
    style.compose(figure, panels, title="a title", line="", columns=2)
    return figure


def test_names_that_neighbours_share_stand_at_the_outermost_axis():
    axes = two_by_two().axes
    assert [each.get_ylabel() for each in axes] == ["left", "", "other"]
    assert [each.get_xlabel() for each in axes] == ["", "below", "below"]


def test_an_axis_says_which_way_is_better():
    _, (axes,) = style.grid_of_panels(["a panel"], columns=1)
    Axis(label="late (%)", better="lower").draw(axes, "x")
    Axis(label="turns/s", better="higher").draw(axes, "y")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("late (%), lower is better", "turns/s\nhigher is better")


def test_a_word_beside_a_point_covers_nothing_or_is_left_out():
    with style.drawing():
        figure = panel()
        figure.axes[0].plot([0.5, 0.52], [0.5, 0.52], marker="s", label="another line", linestyle="none")
        wide = "a word that no place in the panel is wide enough for, however far it is moved from its point"
        Labels(texts=["first", "second", wide], places=[0.5, 0.52, 0.5], values=[0.5, 0.52, 0.1]).draw(figure.axes[0])
        style.compose(figure, figure.axes, title="a title", line="A sentence.")
        assert overprinted(figure) == []
    assert [text.get_visible() for text in figure.axes[0].texts] == [True, True, False]


def test_a_picture_is_drawn_once_for_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    composed, compose = [], style.compose
    monkeypatch.setattr(
        style, "compose", lambda *given, **words: composed.append(words["title"]) or compose(*given, **words)
    )
    module, here = FIGURES["ampd/fig7"].load(), platform("h20x32")
    contents = []
    for num_runs in (2, 2, 3):
        view = View(platform=here, reading=default_reading(here), num_runs=num_runs)
        rendered = module.render(figure_runs(module, view), view, tmp_path / "out")
        contents.append({path.name: path.read_bytes() for path in rendered.files})
    assert len(composed) == 2
    assert contents[0] == contents[1]
    assert contents[1]["fig7-h20x32.png"] != contents[2]["fig7-h20x32.png"]


class Diagonal:
    """A layer of a user's own."""

    def draw(self, axes) -> None:
        axes.plot([0, 1], [0, 1], label="own")


def test_a_layer_of_a_user_s_own_is_drawn_each_time(tmp_path, monkeypatch, drawn):
    monkeypatch.setattr("paper_figures.common.figure.cached_result", lambda *_: pytest.fail("it is not to be kept"))
    look = style.Look(color="black", marker="o")
    for own in (Diagonal(), lambda axes: axes):
        panel = Panel(
            title="a panel", layers=[Line(label="a line", places=[0, 1], at=[interval(1.0, 0.1)] * 2, look=look), own]
        )
        assert _known_by(panel) is None
    assert _known_by(replace(panel, layers=panel.layers[:1])) is not None
    picture = Picture(panels=[replace(panel, layers=[*panel.layers[:1], Diagonal()])], caption=["A sentence."])
    _draw(picture, "a title", tmp_path, "own")
    (figure,) = drawn
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a line", "own"]


def test_a_user_s_settings_change_no_figure():
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 31.0, "axes.facecolor": "red"}), style.drawing():
        assert mpl.rcParams["axes.facecolor"] == "white"
