"""Nothing of any figure is clipped or printed over something else, whatever platform it is drawn for."""

import pytest
from matplotlib.figure import Figure
from support.figure_runs import figure_runs
from support.text_boxes import overprinted

from paper_figures.common import style
from repro.reports.figures import FIGURES, View, default_reading
from repro.reports.stamp import read_stamp, write_stamp
from repro.systems.platforms import platform

ON_BOTH_CARDS = frozenset(f"dllm-serve/{name}" for name in ("fig3", "fig4", "fig7", "fig8", "table4"))
DRAWN = [
    (name, where)
    for name, entry in FIGURES.items()
    for where in dict.fromkeys((*entry.load().platforms, *(("rtx4090", "l40s") if name in ON_BOTH_CARDS else ())))
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
        stamp = read_stamp(write_stamp(FIGURES[name], view, [], rendered))
        assert text.name in stamp["files"]
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
