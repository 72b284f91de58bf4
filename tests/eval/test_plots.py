"""Pictures: what each shows, when there is none, and that nothing lies on the data."""

import io
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from results import entry

from draftsmith.eval.plots import plots

ALWAYS = {"acceptance", "categories", "accepted-lengths", "tau-by-position", "time"}
LOOKUPS = {"ngram": "ngram:5,max=4,min=1", "suffix": "suffix:16", "lookahead": "lookahead:5x4,guesses=5"}


def many(n: int) -> list[dict[str, Any]]:
    """``n`` unlike results, no two of the same proposer and batch."""
    found = []
    for i in range(n):
        proposer = ("eagle3", "ngram", "suffix", "lookahead", "medusa", "draft_model")[i % 6]
        result = entry(proposer, 0.3 + 0.05 * i, 16 if proposer == "suffix" else 5, prompts=6, batch=1 + i // 6)
        result["draft"]["name"] = LOOKUPS.get(proposer, result["draft"]["name"])
        found.append(result)
    return found


def drawn(figure: Figure) -> None:
    figure.savefig(io.BytesIO(), format="png", dpi=60)


@pytest.mark.parametrize("n", [1, 3, 12])
def test_every_number_of_results_can_be_drawn(n: int) -> None:
    figures = plots(many(n))
    assert figures.keys() == ALWAYS | ({"speedup-by-batch"} if n > 6 else set())
    for figure in figures.values():
        drawn(figure)
        below = [legend.get_window_extent() for legend in figure.legends]
        boxes = [axes.get_window_extent() for axes in figure.axes if axes.get_visible()]
        assert all(not legend.overlaps(box) for legend in below for box in boxes)
        assert all(legend.x0 >= 0 and legend.x1 <= figure.bbox.x1 for legend in below)


@pytest.mark.parametrize("n", [2, 12])
def test_no_two_results_look_the_same(n: int) -> None:
    axes = plots(many(n))["acceptance"].axes[0]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == len({line.get_label() for line in axes.lines}) == n


def test_acceptance_shows_both_rates() -> None:
    result = entry(sure=0.7, depth=3)
    left, right = plots([result])["acceptance"].axes
    assert np.asarray(left.lines[0].get_ydata()).tolist() == result["accepted_per_position"]
    assert np.asarray(right.lines[0].get_ydata()).tolist() == result["conditional_per_position"]


def test_positions_that_hardly_a_draft_reached_are_left_out() -> None:
    result = entry(sure=0.2, depth=12, prompts=3)
    reached = [result["counters"]["num_drafts"], *result["counters"]["num_accepted_tokens_per_pos"]]
    places = np.asarray(plots([result])["acceptance"].axes[1].lines[0].get_xdata()).tolist()
    assert places == [1, *(at for at in range(2, 13) if reached[at - 1] >= 10)] and len(places) < 12


def test_a_sweep_is_drawn_with_its_intervals() -> None:
    results = [entry(prompts=5, batch=batch, temperature=t) for batch in (1, 4) for t in (0.0, 0.5, 1.0)]
    figures = plots(results)
    by_batch, by_temperature = figures["speedup-by-batch"].axes[0], figures["speedup-by-temperature"].axes[0]
    assert len(by_batch.containers) == 3 and len(by_temperature.containers) == 2
    values = list(by_temperature.containers[0][0].get_ydata())  # type: ignore[index]
    assert values == [result["speedup"] for result in results if result["batch"] == 1]
    assert list(by_batch.get_xticks()) == [1, 4] and list(by_temperature.get_xticks()) == [0, 0.5, 1]


def test_unlike_results_are_no_sweep() -> None:
    figures = plots([entry("eagle3", prompts=4, batch=1), entry("ngram", prompts=4, batch=4)])
    assert "speedup-by-batch" not in figures


def test_what_there_is_not_is_not_drawn() -> None:
    plain = entry("eagle3", 0, 0, prompts=4, categories=("all",), tokens=20, speedup=None)
    plain["time"] = dict.fromkeys(plain["time"], 0.0)
    assert plots([plain]) == {}


def test_the_histogram_is_of_all_passes() -> None:
    result = entry()
    bars = plots([result])["accepted-lengths"].axes[0].patches
    heights = [bar.get_height() for bar in bars]  # type: ignore[attr-defined]
    assert sum(heights) == pytest.approx(1)
    assert heights == pytest.approx([n / result["verify_passes"] for n in result["accepted_lengths"]])


def test_what_is_lossy_is_named_in_every_picture_of_it() -> None:
    lossy = entry(lossless=False, lossy="typical acceptance ε=0.2", temperature=1.0)
    for results in ([lossy], [lossy, entry(temperature=1.0, lossless=None)]):
        for name, figure in plots(results).items():
            words = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]  # type: ignore[attr-defined]
            assert "typical acceptance" in " ".join(words), name
