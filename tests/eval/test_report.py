"""Reports: what is written where, what is said plainly, and that the documented keys are the real ones."""

import io
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from results import entry
from rich.console import Console

from draftsmith.errors import UserError
from draftsmith.eval.harness import measure
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.registry import read_lookup
from draftsmith.eval.report import overview, read_report, table, write_report
from draftsmith.eval.words import caveats, labels, rows, title
from draftsmith.target import Target

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reports.md"
VOID = {"meta", "img", "br"}


@pytest.fixture(scope="module")
def measured(tiny_target: Target) -> dict[str, Any]:
    """A result as the harness gives it."""
    asked = (("hi hi hi", "chat"), ("the sea", "chat"), ("one two one", "code"))
    prompts = [Prompt([{"role": "user", "content": text}], category, id=text) for text, category in asked]
    proposer = read_lookup("ngram:3")
    assert proposer is not None
    return measure(tiny_target, proposer, prompts, 24)


def documented(section: str) -> set[str]:
    """The keys that a section of the page documents in its first table."""
    text = DOCS.read_text(encoding="utf-8").split(f"# {section}\n")[1]
    return set(re.findall(r"^\| `([^`]+)` \|", text.split("\n#")[0], re.MULTILINE))


def keys(document: Any, before: str = "", closed: tuple[str, ...] = ()) -> Iterator[str]:
    """All keys of nested objects and of lists of them, joined with dots; not below those that are ``closed``."""
    for each in document if isinstance(document, list) else [document]:
        if isinstance(each, dict) and before.rstrip(".") not in closed:
            for key, value in each.items():
                yield before + key
                yield from keys(value, f"{before}{key}.", closed)


def test_the_documented_keys_are_the_real_ones(measured: dict[str, Any], tmp_path: Path) -> None:
    tie = {"prompt": 1, "turn": 0, "token": 3, "ours": [4], "plain": [5], "margin": 1e-5}
    write_report([{**measured, "near_ties": [tie], "cell": {"prompts": "p.jsonl"}}], tmp_path, {})
    document = json.loads((tmp_path / "report.json").read_text())
    assert document.keys() == documented("report.json")
    free = ("categories", "by_category", "search", "draft.stop", "cell")
    assert set(keys(document["results"], closed=free)) == documented("A result")


def test_dice_and_harness_give_the_same_keys(measured: dict[str, Any]) -> None:
    free = ("categories", "by_category", "near_ties")
    assert set(keys(entry(), closed=free)) == set(keys(measured, closed=free))


class Reader(HTMLParser):
    """Reads a page as a browser would: balanced tags, what it would fetch, its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.spans: list[tuple[str, str]] = []
        self.words = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetched += [value for key in ("src", "href") if (value := given.get(key)) and not value.startswith("data:")]
        self.fetched += [tag] if tag in ("script", "link", "iframe") else []
        if tag == "span":
            self.spans.append((given.get("class") or "", given.get("title") or ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def page_of(results: list[dict[str, Any]], out: Path, about: dict[str, Any] | None = None) -> Reader:
    write_report(results, out, about or {"dtype": "float32"})
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "url(" not in page and "@import" not in page and "width=device-width" in page
    return Reader(page)


@pytest.mark.parametrize("n", [1, 4])
def test_a_page_stands_alone_and_holds_every_number(n: int, tmp_path: Path) -> None:
    results = [entry(("eagle3", "medusa", "ngram", "suffix")[i], 0.3 + 0.1 * i, prompts=6) for i in range(n)]
    page = page_of(results, tmp_path)
    assert not page.fetched
    for result in results:
        assert all(value in page.words for _, value in rows(result))
        assert f"{result['speedup']:.2f}" in page.words
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {f"{name}.png" for name in "acceptance categories accepted-lengths tau-by-position time".split()}
    assert (tmp_path / "report.html").read_text().count("data:image/png;base64,") == len(pictures)


def test_the_sample_is_marked_without_colour_too(measured: dict[str, Any], tmp_path: Path) -> None:
    result = entry(prompts=4)
    result["sample"] = [{"text": "<b>& so", "by": "draft"}, {"text": " on", "by": "bonus"}, {"text": ".", "by": "plain"}]
    page = page_of([result], tmp_path)
    assert [kind for kind, meaning in page.spans if meaning] == ["draft", "bonus", "plain"]
    assert [kind for kind, meaning in page.spans if not meaning] == ["draft", "bonus", "plain"]  # the legend
    assert "<b>& so on." in page.words
    style = (tmp_path / "report.html").read_text().split("<style>")[1]
    assert "border-bottom: 2px solid" in style and "border-bottom: 2px dotted" in style
    assert {piece["by"] for piece in measured["sample"]} <= {"draft", "bonus", "plain"}


def test_nothing_gets_out_of_its_place(tmp_path: Path) -> None:
    evil = "</pre></table><script>alert(1)</script>"
    sample = [{"text": evil, "by": "draft"}]
    result = entry(prompts=4, target=evil, categories=(evil, "$x$ $\\y$"), sample=sample)  # TeX would not even parse
    about = {"prompts": evil, "failed": [{"proposer": evil, "why": evil}]}
    assert not page_of([result, entry("ngram", prompts=4)], tmp_path, about).fetched


def test_cells_that_failed_are_named(tmp_path: Path) -> None:
    about = {"failed": [{"proposer": "ngram:5", "tree": None, "batch": 4, "why": "out of memory"}]}
    assert "proposer ngram:5, batch 4: out of memory" in page_of([entry(prompts=4)], tmp_path, about).words


# -- what is said plainly ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"lossy": "typical acceptance", "lossless": False}, "Lossy: typical acceptance changes the text"),
        ({"lossless": False}, "NOT lossless"),
        ({"near_ties": [{"prompt": 0, "turn": 0, "token": 1, "ours": [1], "plain": [2], "margin": 0.0}]}, "at a near tie"),
        ({"lossless": None}, "No text was compared"),
        ({"depth": 0, "draft": None}, "Nothing was drafted"),
        ({"prompts": 5}, "5 prompts: a small sample"),
        ({"prompts": 1}, "1 prompt: a small sample"),
        ({"prompts": 4}, "τ is known roughly"),
        ({"prompts": 4}, "The speed-up is known roughly"),
        ({"sure": 0.0}, "Slower than plain decoding"),
        ({"speedup": 1.01, "speedup_interval": [0.9, 1.1]}, "No gain in speed is shown"),
        ({"tokens": 10, "pace": 0.01}, "what else the machine did"),
        ({"baseline_prompts": 7}, "the 7 prompts that were decoded both ways"),
        ({"repetitiveness": 0.8}, "The outputs repeat themselves (80%"),
    ],
)
def test_what_must_not_be_overlooked(settings: dict[str, Any], wanted: str) -> None:
    if "draft" in settings:  # a form was asked for and the proposer found nothing
        settings = {**settings, "draft": entry(prompts=1)["draft"]}
    assert any(wanted in caveat for caveat in caveats(entry(**settings)))


def test_a_sound_result_needs_no_warning(tmp_path: Path) -> None:
    sound = entry(prompts=200, tokens=80)
    assert caveats(sound) == []
    page_of([sound], tmp_path)
    assert 'class="caveats"' not in (tmp_path / "report.html").read_text()
    assert caveats(entry(depth=0, prompts=2)) == []  # plain decoding, measured for its own sake


def test_a_caveat_of_some_results_names_them(tmp_path: Path) -> None:
    page = page_of([entry(prompts=30), entry("ngram", 0.3, prompts=5)], tmp_path)
    assert "ngram, chain of 5: 5 prompts: a small sample" in page.words


# -- names ---------------------------------------------------------------------------------------------------------------


def test_a_title_says_what_is_unusual() -> None:
    assert title(entry(prompts=1)) == "eagle3, chain of 5, greedy"
    result = entry(prompts=1, temperature=0.7, top_p=0.9, top_k=40, batch=4, lossy="typical", lossless_to="the target with")
    assert title(result) == "eagle3, chain of 5, temperature 0.7, top-p 0.9, top-k 40, batch 4, lossy: typical, adapted target"


def test_labels_say_what_differs_and_never_twice_the_same() -> None:
    one, four, ngram = entry(prompts=1), entry(prompts=1, batch=4), entry("ngram", prompts=1)
    ngram["draft"]["name"] = "ngram:5,max=4,min=1"
    assert labels([one]) == ["eagle3, chain of 5"]
    assert labels([one, four]) == ["batch 1", "batch 4"]
    assert labels([one, ngram]) == ["eagle3, chain of 5", "ngram:5,max=4,min=1"]
    assert labels([one, one, four]) == ["batch 1 (1)", "batch 1 (2)", "batch 4"]
    lossy = [entry(prompts=1, lossy="typical", batch=batch) for batch in (1, 2)]
    assert labels(lossy) == ["batch 1, lossy: typical", "batch 2, lossy: typical"]


# -- the terminal, and reading back --------------------------------------------------------------------------------------


def printed(grid: Any, width: int = 110) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(grid)
    return out.getvalue()


def test_one_result_is_a_table_of_its_measures(measured: dict[str, Any]) -> None:
    text = printed(table(measured, {"report": Path("x/report.html")}))
    assert f"{measured['tau']:.3f}" in text and "x/report.html" in text and "3 prompts: a small sample" in text
    assert all(name in text for name, _ in rows(measured))


def test_many_results_are_a_line_each() -> None:
    results = [entry(prompts=4), entry("ngram", 0.3, prompts=4, speedup=None), entry("medusa", prompts=4, lossless=False)]
    lines = printed(overview(results, {"report": Path("report.html")})).splitlines()
    assert len(lines) == 6 and "report.html" in lines[-1] and "3 of 3 come with caveats" in lines[-2]
    assert f"{results[0]['tau']:.2f} [" in lines[1] and lines[2].split()[-3] == "–" and lines[3].split()[-1] == "NO"


def test_a_report_is_read_back(tmp_path: Path) -> None:
    result = entry(prompts=3)
    write_report([result], tmp_path, {"seed": 1})
    for path in (tmp_path, tmp_path / "report.json"):
        document = read_report(path)
        assert document["about"] == {"seed": 1} and document["results"][0]["tau"] == result["tau"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "does not exist: name a report's directory"),
        ("{", "cannot be read as JSON"),
        ("[]", "is no report of draftsmith eval"),
        ('{"results": []}', "it has no results"),
        ('{"results": [{}]}', "is a report of version 1 and this draftsmith reads version 2: measure again"),
    ],
)
def test_what_is_no_report_is_refused(text: str | None, wanted: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match=wanted):
        read_report(tmp_path)
