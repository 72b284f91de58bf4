"""Runs side by side: what is compared with what, what is said of it, and what is refused."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from results import entry
from rich.console import Console
from typer.testing import CliRunner

from draftsmith.cli_compare import compare_command
from draftsmith.console import command_line
from draftsmith.errors import UserError
from draftsmith.eval.compare import compare
from draftsmith.eval.compare_page import page, terminal
from draftsmith.eval.harness import measure
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.registry import read_lookup
from draftsmith.eval.report import write_report
from draftsmith.target import Target

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reports.md"


def run(place: Path, name: str, *results: dict[str, Any], **about: Any) -> Path:
    """A report's directory."""
    (place / name).mkdir(parents=True)
    (place / name / "report.json").write_text(json.dumps({"version": 2, "about": about, "results": results}))
    return place / name


def counted(*rows: tuple[str, int, int, int, float, float], **changes: Any) -> dict[str, Any]:
    """A result whose prompts have these digests, accepted drafts, passes, tokens, seconds and seconds of plain decoding."""
    result = entry(prompts=len(rows), **changes)
    for number, (row, (asked, accepted, passes, tokens, seconds, plain)) in enumerate(
        zip(result["per_prompt"], rows, strict=True)
    ):
        row |= {"id": str(number), "asked": asked, "accepted": accepted, "passes": passes, "tokens": tokens}
        row |= {"seconds": seconds, "plain_tokens": tokens, "plain_seconds": plain}
    return result


def test_differences_by_hand(tmp_path: Path) -> None:
    a = counted(("x", 10, 10, 30, 2.0, 4.0), ("y", 30, 10, 30, 2.0, 4.0), ("z", 20, 10, 40, 1.0, 2.0))
    b = counted(("y", 36, 10, 30, 1.0, 4.0), ("z", 20, 10, 40, 1.0, 2.0), ("x", 22, 10, 30, 0.5, 4.0))
    (pair,) = compare([run(tmp_path, "a", a), run(tmp_path, "b", b)])["pairs"]
    assert pair["prompts"] == 3 and not pair["notes"]
    assert pair["tau"]["a"] == 3 and pair["tau"]["b"] == pytest.approx(3.6) and pair["tau"]["difference"] == pytest.approx(0.6)
    assert pair["tokens_per_s"]["a"] == 20 and pair["tokens_per_s"]["b"] == 40
    assert pair["tokens_per_s"]["ratio"] == pytest.approx(2)
    assert pair["speedup"]["a"] == 2 and pair["speedup"]["b"] == pytest.approx(4)
    assert pair["tau"]["interval"] == pytest.approx([0, 1.2])  # the prompt that gains nothing, and the one that gains most
    assert pair["tau"]["p"] == 0.5  # x and y swapped together, or apart from z: four of eight ways are as far apart
    assert pair["tau"]["verdict"] == "no difference shown with 3 prompts (too few to show any)"


def test_turns_of_a_question_stay_together(tmp_path: Path) -> None:
    paths = []
    for name, gain in (("a", 0), ("b", 5)):
        result = counted(("x", 10, 10, 30, 2.0, 4.0), (name, 10 + gain, 10, 30, 2.0, 4.0), ("y", 10, 10, 30, 2.0, 4.0))
        result["per_prompt"][1] |= {"id": "0", "turn": 1}  # its prompt holds the model's own answer, another in each run
        paths.append(run(tmp_path, name, result | {"prompts": 2}))
    (pair,) = compare(paths)["pairs"]
    assert pair["prompts"] == 2 and not pair["notes"]
    assert pair["tau"]["difference"] == pytest.approx(5 / 30)


@pytest.mark.parametrize(("sure", "verdict"), [(0.75, "B above A"), (0.5, "A above B"), (0.651, "no difference shown")])
def test_the_verdict_is_plain(sure: float, verdict: str, tmp_path: Path) -> None:
    paths = [run(tmp_path, "a", entry(sure=0.65)), run(tmp_path, "b", entry(sure=sure))]
    (pair,) = compare(paths)["pairs"]
    assert pair["tau"]["verdict"].startswith(verdict) and pair["speedup"]["verdict"].startswith(verdict)
    text = shown(compare(paths))
    assert verdict in text and f"{pair['tau']['difference']:+.2f}" in text


def test_many_pairs_raise_the_bar(tmp_path: Path) -> None:
    results = [[entry(sure=sure, batch=batch) for batch in range(1, 7)] for sure in (0.65, 0.67)]
    pairs = compare([run(tmp_path, "a", *results[0]), run(tmp_path, "b", *results[1])])["pairs"]
    assert len(pairs) == 6
    least = min(pairs, key=lambda pair: pair["tau"]["p"])
    assert least["tau"]["p_adjusted"] == pytest.approx(min(1, 6 * least["tau"]["p"]))
    for pair in pairs:
        assert ("above" in pair["tau"]["verdict"]) == (pair["tau"]["p_adjusted"] < 0.05)


def test_measured_runs_share_their_prompts(tiny_target: Target, tmp_path: Path) -> None:
    """Ids and order differ from run to run; what was asked does not."""
    asked = ["hi hi hi", "the sea", "one two one", "an ant ran"]
    runs = []
    for name, look_up in (("a", "ngram:3"), ("b", "suffix:8")):
        talks = [[{"role": "user", "content": text}] for text in asked]
        prompts = [Prompt(talk, id=f"{name}{i}", later=("more",)) for i, talk in enumerate(talks)]
        proposer = read_lookup(look_up)
        assert proposer is not None
        runs.append(run(tmp_path, name, measure(tiny_target, proposer, prompts, 8)))
        asked.reverse()
    (pair,) = compare(runs)["pairs"]
    assert pair["prompts"] == 4 and not any("shared" in note for note in pair["notes"])
    for side, path in zip("ab", runs, strict=True):
        assert pair["tau"][side] == pytest.approx(json.loads((path / "report.json").read_text())["results"][0]["tau"])


# -- what goes with what ---------------------------------------------------------------------------------------------------


def test_the_same_proposers_go_together(tmp_path: Path) -> None:
    a = run(tmp_path, "a", entry("ngram", 0.3), entry("eagle3"), entry("eagle3", depth=3))
    b = run(tmp_path, "b", entry("eagle3", depth=3), entry("eagle3", 0.8), entry("ngram", 0.4))
    document = compare([a, b])
    assert not document["unpaired"]
    assert [(pair["a"].split(": ")[1], pair["b"].split(": ")[1]) for pair in document["pairs"]] == [
        (name, name) for name in ("eagle3, chain of 3, greedy", "eagle3, chain of 5, greedy", "ngram, chain of 5, greedy")
    ]


def test_what_alone_is_left_goes_together(tmp_path: Path) -> None:
    a = run(tmp_path, "a", entry("ngram", 0.3), entry("eagle3"))
    b = run(tmp_path, "b", entry("ngram", 0.3), entry("medusa"))
    pairs = compare([a, b])["pairs"]
    assert [pair["b"] for pair in pairs] == ["b: ngram, chain of 5, greedy", "b: medusa, chain of 5, greedy"]
    assert pairs[1]["a"] == "a: eagle3, chain of 5, greedy"


def test_every_later_run_is_compared_with_the_first(tmp_path: Path) -> None:
    document = compare([run(tmp_path, name, entry()) for name in "abc"])
    assert [(pair["a"][0], pair["b"][0]) for pair in document["pairs"]] == [("a", "b"), ("a", "c")]
    assert [one["name"] for one in document["runs"]] == ["a", "b", "c"]


def test_a_single_report_is_compared_with_its_first(tmp_path: Path) -> None:
    results = [entry("eagle3"), entry("ngram", 0.3), entry("medusa", 0.6), entry("eagle3", batch=4)]
    document = compare([run(tmp_path, "a", *results)])
    assert [pair["b"].split(",")[0] for pair in document["pairs"]] == ["ngram", "medusa"]
    assert [one["why"] for one in document["unpaired"]] == ["no other result has its conditions and prompts"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target": "m2"}, "target is m2 here and tiny in a"),
        ({"temperature": 0.7}, "temperature is 0.7 here and 0.0 in a"),
        ({"batch": 4, "top_p": 0.9}, "top_p is 0.9 here and 1.0 in a; batch is 4 here and 1 in a"),
        ({"max_new_tokens": 64}, "max_new_tokens is 64 here and 150 in a"),
    ],
)
def test_unlike_conditions_are_refused_by_name(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    document = compare([run(tmp_path, "a", entry()), run(tmp_path, "b", entry(**changes))])
    assert not document["pairs"] and [one["run"] for one in document["unpaired"]] == ["a", "b"]
    assert document["unpaired"][1]["why"] == why and why in shown(document) and why in page(document)


def test_other_prompts_are_refused_though_their_ids_are_alike(tmp_path: Path) -> None:
    other = entry()
    for row in other["per_prompt"]:
        row["asked"] = "f" + row["asked"]
    document = compare([run(tmp_path, "a", entry()), run(tmp_path, "b", other)])
    assert not document["pairs"]
    assert document["unpaired"][1]["why"] == (
        "other prompts: none of its 24 is among those of a, though 24 ids are alike: their text or the chat template is another"
    )


def test_only_shared_prompts_count_and_it_is_said(tmp_path: Path) -> None:
    (pair,) = compare([run(tmp_path, "a", entry(prompts=24)), run(tmp_path, "b", entry(prompts=18, sure=0.8))])["pairs"]
    assert pair["prompts"] == pair["tau"]["prompts"] == 18
    assert pair["notes"] == ["only the 18 shared prompts count: 6 of A's and 0 of B's are left out"]


def test_several_that_could_stand_for_it_are_refused(tmp_path: Path) -> None:
    a = run(tmp_path, "a", entry("ngram", 0.3), entry("suffix", 0.3))
    document = compare([a, run(tmp_path, "b", entry("eagle3"))])
    assert not document["pairs"]
    assert "more than one that could stand for it" in document["unpaired"][-1]["why"]


# -- what must be known --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"lossy": "typical acceptance", "lossless": False}, "B is lossy (typical acceptance)"),
        ({"lossless": False}, "B is NOT lossless"),
        ({"lossless_to": "the target with the head's adapters"}, "B that of the target with the head's adapters"),
        ({"baseline_tokens_per_s": 10.0}, "and 10.0 beside B: trust the speed-ups"),
    ],
)
def test_notes(changes: dict[str, Any], note: str, tmp_path: Path) -> None:
    document = compare([run(tmp_path, "a", entry()), run(tmp_path, "b", entry(**changes))])
    assert any(note in said for said in document["pairs"][0]["notes"])
    assert note in " ".join(shown(document).split())


def test_another_machine_is_named(tmp_path: Path) -> None:
    a, b = run(tmp_path, "a", entry(), device="cpu", dtype="float32"), run(tmp_path, "b", entry(), device="H", dtype="float32")
    assert compare([a, b])["notes"] == ["device: cpu in a, H in b"]


def test_without_plain_decoding_no_speed_up_is_compared(tmp_path: Path) -> None:
    bare = entry(speedup=None, speedup_interval=None, baseline_tokens_per_s=0.0)
    for row in bare["per_prompt"]:
        row |= {"plain_tokens": None, "plain_seconds": None}
    document = compare([run(tmp_path, "a", entry()), run(tmp_path, "b", bare)])
    assert document["pairs"][0]["speedup"] is None and document["pairs"][0]["tokens_per_s"]
    assert "speed-up" not in shown(document)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    paths = [run(tmp_path / name, "eval", entry()) for name in ("one", "two")]
    assert [one["name"] for one in compare(paths)["runs"]] == ["one/eval", "two/eval"]
    again = compare([paths[0], paths[0] / "report.json"])
    assert [one["name"] for one in again["runs"]] == ["eval (1)", "eval (2)"]
    assert again["pairs"][0]["tau"]["p"] == 1


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent/report.json does not exist|absent does not exist"):
        compare([run(tmp_path, "a", entry()), tmp_path / "absent"])


# -- how it is shown -----------------------------------------------------------------------------------------------------


def shown(document: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(terminal(document))
    return out.getvalue()


def test_the_page_stands_alone(tmp_path: Path) -> None:
    evil = entry("<script>alert(1)</script>", 0.8)
    html = page(compare([run(tmp_path, "a", entry()), run(tmp_path, "b", evil, entry(batch=2))]))
    assert "<script" not in html and not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "Not compared" in html and html.count("data:image/png") == 1


def test_the_command(tmp_path: Path) -> None:
    app = command_line()
    app.command()(compare_command)
    write = tmp_path / "written"
    write.mkdir()
    write_report([entry(prompts=6)], write, {"seed": 0})
    paths = [str(write), str(run(tmp_path, "b", entry(sure=0.8, prompts=6)))]
    done = CliRunner().invoke(app, [*paths, "--out", str(tmp_path / "out"), "--json"])
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "out" / "comparison.json").read_text()) == compare([Path(path) for path in paths])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"comparison.json", "comparison.html"}
    again = CliRunner().invoke(app, [*paths, "--out", str(tmp_path / "out")])
    assert isinstance(again.exception, UserError) and "exists" in str(again.exception)
    assert "verdict" in CliRunner().invoke(app, paths).stdout


def test_the_documented_keys_are_the_real_ones(tmp_path: Path) -> None:
    a = run(tmp_path, "a", entry(prompts=6), device="cpu")
    document = compare([a, run(tmp_path, "b", entry(prompts=6), entry(prompts=6, batch=2), device="cuda")])
    section = DOCS.read_text(encoding="utf-8").split("# comparison.json\n")[1].split("\n#")[0]
    found = {
        f"{name}.{key}" for name in ("runs", "pairs", "unpaired") for each in document[name] for key in each
    } | document.keys()
    assert found == set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    effect = document["pairs"][0]
    assert (
        effect["tau"].keys() - {"difference"}
        == effect["speedup"].keys() - {"ratio"}
        == effect["tokens_per_s"].keys() - {"ratio"}
    )
    assert effect["tau"].keys() == set("a b difference interval p p_adjusted prompts verdict".split())
