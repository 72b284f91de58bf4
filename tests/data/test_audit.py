"""What ``data inspect`` says of a file and a target: numbers worked out by hand, and masks that can be looked at."""

import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from draftsmith.cli import main
from draftsmith.data.audit import bin_edges, coverage, padding, usual_sizes
from draftsmith.data.audit_page import write
from draftsmith.data.audit_tables import duration, number, size
from draftsmith.data.chat import encode
from draftsmith.data.checks import check_all, check_positions
from draftsmith.data.coloured import pieces, terminal, visible
from draftsmith.data.conversations import Conversation
from draftsmith.data.facts import TargetFacts
from draftsmith.errors import UserError
from draftsmith.target import Target

EVIL = "</span></div><script>alert('x')</script><img src=x onerror=\"y\"> &amp; <!-- ]]> \"' \x1b[31m"


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


ROWS = [
    chat("say one", "one one"),
    chat("hi", "yes\nno", "and", "so it is, of course: " + "well " * 20),
    chat(EVIL, "no " + EVIL),
    chat("nobody answers"),
    {"text": 5},
]


def draftsmith(*arguments: object) -> tuple[int, str, str]:
    """Run the command line in this process: its exit status, stdout and stderr."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["draftsmith", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    return code, out.getvalue(), err.getvalue()


def inspect(place: Path, *arguments: object) -> tuple[int, Any, str]:
    """The status, the JSON document if there is one, and stderr."""
    code, out, err = draftsmith("data", "inspect", "--target", place / "target", "--json", *arguments)
    return code, json.loads(out) if out else None, err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]) -> Path:
    """A folder with a target and data files, sound and broken."""
    place = tmp_path_factory.mktemp("inspect")
    tiny_target.model.save_pretrained(place / "target")
    tiny_tokenizer_factory().save_pretrained(place / "target")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (place / "mixed.jsonl").write_text(lines)
    (place / "broken.jsonl").write_text(lines + '{"messages": [{"role": "us')
    (place / "unanswered.jsonl").write_text(json.dumps(ROWS[3]) + "\n")
    return place


# -- token by token --------------------------------------------------------------------------------------------------------


def byte_tokenizer(fallback: bool) -> Any:
    """A token for each byte: as GPT-2 writes bytes, or as SentencePiece falls back to them."""
    if fallback:
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
        core = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
        core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=core)


BYTES = {fallback: byte_tokenizer(fallback) for fallback in (False, True)}


@pytest.mark.parametrize("fallback", [False, True])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20))
def test_a_letter_of_several_tokens_is_shown_whole_and_once(fallback: bool, text: str) -> None:
    ids = BYTES[fallback](text)["input_ids"]
    found = pieces(ids, BYTES[fallback])
    whole = [piece for letter in text for piece in [letter, *[None] * (len(letter.encode()) - 1)]]
    assert found == whole


def test_bytes_that_make_no_letter_stay_tokens_of_their_own() -> None:
    tokenizer = BYTES[False]
    party = tokenizer("a🎉")["input_ids"]
    assert pieces([*party[:3], *tokenizer("b")["input_ids"]], tokenizer) == ["a", "�", "", "b"]
    assert pieces(party[:4], tokenizer)[:2] == ["a", "�"]  # cut inside a letter
    assert "".join(filter(None, pieces(tokenizer("a\ufffdb\ufffd")["input_ids"], tokenizer))) == "a\ufffdb\ufffd"


@pytest.mark.parametrize(
    ("piece", "seen"),
    [("a\n\nb", "a⏎\n⏎\nb"), ("\t", "⇥"), ("\r", "␍"), ("\x1b[31m", "␛[31m"), ("\u202egnp", "⟨202E⟩gnp"), ("\u200b", "⟨200B⟩")]
    + [(" ", " "), ("é漢🎉", "é漢🎉"), ("", "∅"), (None, "◂"), ("\x7f\x85", "⟨007F⟩⟨0085⟩")],
)
def test_everything_can_be_seen_and_nothing_steers_the_terminal(piece: str | None, seen: str) -> None:
    assert visible(piece) == seen


def test_the_terminal_shows_borders_and_mask_without_colours(tiny_tokenizer_factory: Callable[..., Any]) -> None:
    tokenizer = tiny_tokenizer_factory()
    example = encode(Conversation(chat("hi", "no\nthe")["messages"], "a", 1), tokenizer, None)
    drawn = terminal(example, tokenizer)
    assert drawn.plain == (
        "<|im_start|>│u│s│er│⏎\n│h│i│<|im_end|>│⏎\n│<|im_start|>│a│s│s│i│s│t│an│t│⏎\n⟦n│o│⏎\n│the│<|im_end|>⟧⏎\n"
    )
    styled = {drawn.plain[span.start : span.end] for span in drawn.spans if str(span.style) == "bold green"}
    assert styled == {"n", "o", "⏎\n", "the", "<|im_end|>"}


# -- does the target fit its template? -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts(tiny_tokenizer_factory: Callable[..., Any]) -> TargetFacts:
    return TargetFacts("tiny", tiny_tokenizer_factory(), 4, 32, 128, 64, frozenset({2}))


CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
NEXT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
TRIMMED = CHATML.replace("m['content']", "m['content'] | trim") + NEXT
DATED = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}" + CHATML + NEXT


@pytest.mark.parametrize(
    ("template", "changes", "warned", "says"),
    [
        ("plain", {}, set(), "at which the model stops"),
        ("generation", {}, set(), "generation tags are there"),
        ("plain", {"eos_ids": frozenset({0})}, {"end of turn"}, "(2) and the model stops at '<|endoftext|>' (0): add 2"),
        ("plain", {"eos_ids": frozenset()}, {"end of turn"}, "stops at no token at all"),
        ("plain", {"eos_ids": frozenset({0, 2})}, set(), "'<|endoftext|>' (0) ends texts, too"),
        ("plain", {"vocab_size": 111}, set(), "have 111 tokens each"),
        ("plain", {"vocab_size": 100}, {"vocabulary"}, "111 tokens and the model 100: rows with one of the last 11"),
        ("plain", {"vocab_size": 128}, set(), "the last 17 are padding"),
        ("thinking", {}, {"history"}, "rewrites earlier answers (all of them)"),
        ("thinking-prompt", {}, {"history", "plain answer"}, "holds no reasoning are dropped"),
        (TRIMMED, {}, set(), "stay as they were"),
        (SYSTEM + CHATML + NEXT, {}, set(), "is given 'Be kind.'"),
        (DATED, {}, {"date"}, "today's date"),
        ("{{ bos_token }}" + CHATML + NEXT, {}, {"BOS"}, "writes it twice"),  # the first token of ChatML is its BOS here
    ],
)  # fmt: skip
def test_checks_warn_of_what_would_cost_acceptance(
    facts: TargetFacts, tiny_tokenizer_factory: Any, template: str, changes: dict[str, Any], warned: set[str], says: str
) -> None:
    found = check_all(replace(facts, tokenizer=tiny_tokenizer_factory(template), **changes))
    assert {check.name for check in found if not check.ok} == warned
    assert says in " ".join(check.says for check in found)
    assert all(check.says.endswith(".") and "\n" not in check.says for check in found)


def test_a_bos_that_only_plain_text_gets_is_warned_of(facts: TargetFacts, tiny_tokenizer_factory: Any) -> None:
    def bos_check(bos: str) -> Any:
        tokenizer = tiny_tokenizer_factory()
        tokenizer.bos_token = bos
        special = [(bos, tokenizer.convert_tokens_to_ids(bos))]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=special)
        return next(check for check in check_all(replace(facts, tokenizer=tokenizer)) if check.name == "BOS")

    left_out, twice = bos_check("<|endoftext|>"), bos_check("<|im_start|>")
    assert (left_out.ok, twice.ok) == (False, True)
    assert "the template leaves it out" in left_out.says and "would add another" in twice.says


def test_positions(facts: TargetFacts) -> None:
    assert check_positions(facts, 64).ok and not check_positions(facts, 65).ok


def test_facts_are_what_the_loaded_target_finds(place: Path) -> None:
    facts, target = TargetFacts.read(str(place / "target")), Target.load(str(place / "target"))
    for name in ("depth", "hidden_size", "vocab_size", "max_positions", "eos_ids"):
        assert getattr(facts, name) == getattr(target, name)
    assert facts.tokenizer.get_vocab() == target.tokenizer.get_vocab()


@pytest.mark.parametrize(("written", "found"), [(None, {2}), (7, {7}), ([7, 3], {3, 7})])
def test_eos_ids_come_from_the_generation_config_first(place: Path, tmp_path: Path, written: Any, found: set[int]) -> None:
    for file in (place / "target").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    generation = tmp_path / "generation_config.json"
    generation.unlink()
    if written:
        generation.write_text(json.dumps({"eos_token_id": written}))
    assert TargetFacts.read(str(tmp_path)).eos_ids == found


# -- numbers ---------------------------------------------------------------------------------------------------------------


def test_a_small_file_exactly(place: Path) -> None:
    code, found, err = inspect(place, place / "mixed.jsonl", "--max-length", 170, "--vocab-sizes", "8,128", "--taps", "1,2")
    assert code == 0, err
    assert found["rows"] == {"read": 5, "kept": 3, "changed": 1, "dropped": 2}
    assert (found["tokens"], found["supervised_tokens"]) == (33 + 167 + 170, 8 + 127 + 70)  # the third has lost 18 of 188
    assert found["changes"] == {"cut at max_length": 1} and found["damaged"] is None
    assert sorted(found["reasons"].values()) == [1, 1] and found["reasons"]["no assistant turn"] == 1
    assert {drop["row"]: drop["reason"] for drop in found["dropped"]}[4] == "no assistant turn"
    lengths = found["lengths"]
    assert (lengths["min"], lengths["max"], lengths["mean"], lengths["cut"]) == (33, 170, pytest.approx(370 / 3), 1)
    assert lengths["quantiles"]["0.5"] == 167 and lengths["cut_share"] == pytest.approx(1 / 3)
    assert lengths["histogram"] == {"edges": list(range(30, 181, 10)), "counts": [1, *[0] * 12, 1, 1]}
    assert found["padding"]["alone"] == found["padding"]["packed"] == pytest.approx(1 - 370 / (3 * 170))
    whole = found["vocabulary"]["sizes"][1]
    assert (whole["size"], whole["coverage"], whole["unseen"]) == (128, 1.0, 1.0)
    small = found["vocabulary"]["sizes"][0]
    assert 0 < small["unseen"] <= small["coverage"] < 1
    each = found["store"]["bytes_per_token"]
    assert (each["float32"], each["bfloat16"], each["float16"]) == (384, 192, 192) and 96 < each["int8"] < 192
    assert found["store"]["bytes"]["bfloat16"] == 192 * 370
    assert found["extraction"] is None and {check["name"] for check in found["checks"] if not check["ok"]} == {"positions"}


def test_the_first_row_alone_and_only_the_last_turn(place: Path, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text(json.dumps(chat("a", "one", "b", "no")) + "\n")
    both, last = (inspect(place, tmp_path / "two.jsonl", *flags)[1] for flags in ([], ["--only-last"]))
    assert both["supervised_tokens"] == 4 + 3  # the letters and the end of each turn
    assert last["supervised_tokens"] == 3 and last["tokens"] == both["tokens"]
    assert both["supervised_share"] == 7 / both["tokens"]


@pytest.mark.parametrize("workers", [1, 2])
def test_more_workers_find_the_same(place: Path, tmp_path: Path, workers: int) -> None:
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(chat(f"say {i}", "no " * (i % 7 + 1))) + "\n" for i in range(9)))
    code, found, err = inspect(place, tmp_path / "many.jsonl", "--workers", workers, "--html", tmp_path / "p.html", "--show", 7)
    assert code == 0, err
    assert found["rows"]["kept"] == 9 and found["supervised_tokens"] == sum(3 * (i % 7 + 1) + 1 for i in range(9))
    assert "many.jsonl, row 7" in (tmp_path / "p.html").read_text()


def test_padding_by_hand() -> None:
    lengths = np.array([4, 4, 3], np.int32)
    assert padding(lengths, 3, 7, 0) == {"batch_size": 3, "width": 7, "alone": 1 - 11 / 12, "packed": 1 - 11 / 14}
    assert padding(lengths[1:], 3, 7, 0)["packed"] == 0
    assert padding(lengths[:0], 3, 7, 0) == {"batch_size": 3, "width": 7, "alone": None, "packed": None}


def test_coverage_of_seen_and_unseen_tokens() -> None:
    halves = [torch.tensor([0, 6, 1, 1]), torch.tensor([0, 1, 1, 6])]
    (two,) = coverage(halves, (2,), set())["sizes"]
    assert two == {"size": 2, "coverage": 14 / 16, "unseen": 2 / 8}
    assert coverage([halves[0] * 0] * 2, (2,), {1})["sizes"] == [{"size": 2, "coverage": None, "unseen": None}]


@pytest.mark.parametrize(
    ("vocab", "least", "sizes"),
    [(128, 2, [8, 16, 32, 64]), (128, 20, [32, 64]), (49152, 3, [2048, 4096, 8192, 16384]), (128256, 9, [8192, 16384, 32768])]
    + [(4, 3, []), (151936, 3, [8192, 16384, 32768, 65536])],
)
def test_usual_sizes(vocab: int, least: int, sizes: list[int]) -> None:
    assert usual_sizes(vocab, least)[-len(sizes) or 9 :] == sizes


@given(low=st.integers(0, 10_000), more=st.integers(0, 200_000))
def test_bins_hold_every_length_in_round_steps(low: int, more: int) -> None:
    edges = bin_edges(low, low + more)
    steps = set(np.diff(edges))
    assert len(steps) == 1 and edges[0] <= low < edges[1] and edges[-2] <= low + more < edges[-1] and len(edges) <= 26
    assert re.fullmatch("[125]0*", str(steps.pop()))


def test_numbers_as_words() -> None:
    assert [size(n) for n in (0, 999, 1000, 2_500_000, 1.5e12)] == ["0 B", "999 B", "1 kB", "2.5 MB", "1.5 TB"]
    assert [duration(s) for s in (3, 150, 10_000, 400_000)] == ["3.0 seconds", "2.5 minutes", "2.8 hours", "4.6 days"]
    assert number(1234567) == "1\u202f234\u202f567"


# -- the command -----------------------------------------------------------------------------------------------------------


def test_damage_is_reported_and_ends_with_status_2_unless_salvaged(place: Path) -> None:
    code, found, err = inspect(place, place / "broken.jsonl")
    assert code == 2 and err.splitlines()[-1].startswith("error: ") and "--salvage" in err and "Traceback" not in err
    assert "broken.jsonl" in found["damaged"]["at"] and "broken.jsonl" in found["damaged"]["message"]
    assert found["rows"]["kept"] == 3 and found["tokens"] > 0
    code, salvaged, _ = inspect(place, place / "broken.jsonl", "--salvage")
    assert code == 0 and salvaged == found
    code, out, _ = draftsmith("data", "inspect", place / "broken.jsonl", "--target", place / "target")
    assert code == 2 and out.startswith("DAMAGED: ") and "Draft vocabulary" in out


def test_that_no_row_is_kept_is_a_finding(place: Path, tmp_path: Path) -> None:
    code, found, err = inspect(place, place / "unanswered.jsonl", "--html", tmp_path / "page.html")
    assert code == 0, err
    assert found["rows"] == {"read": 1, "kept": 0, "changed": 0, "dropped": 1} and found["reasons"] == {"no assistant turn": 1}
    assert found["tokens"] == found["supervised_tokens"] == 0 and found["lengths"]["mean"] is None
    assert "There is none to show" in (tmp_path / "page.html").read_text()
    code, out, _ = draftsmith("data", "inspect", place / "unanswered.jsonl", "--target", place / "target")
    assert code == 0 and "no assistant turn" in out


def test_the_terminal_report_names_all_that_was_found(place: Path) -> None:
    code, out, err = draftsmith(
        "data", "inspect", place / "mixed.jsonl", "--target", place / "target", "--show", 1, "--show", 2
    )
    assert code == 0, err
    words = "".join(out.split())  # long cells are folded
    for wanted in ("Rows and tokens", "no assistant turn", "mixed.jsonl:4", "end of turn", "longest", "█", "packed into lines"):
        assert wanted.replace(" ", "") in words
    for wanted in ("Draft vocabulary", "bfloat16", "--time", "mixed.jsonl, row 1", "⟦o│n│e│ │o│n│e│<|im_end|>⟧"):
        assert wanted.replace(" ", "") in words
    assert "row 3" not in out and "\x1b" not in out


def test_a_dropped_row_can_be_shown_and_says_why(place: Path) -> None:
    _, out, _ = draftsmith("data", "inspect", place / "mixed.jsonl", "--target", place / "target", "--show", "mixed.jsonl:4")
    assert "row 4: 0 tokens, 0 supervised, dropped: no assistant turn" in out


def test_time_runs_the_target(place: Path) -> None:
    code, found, err = inspect(place, place / "mixed.jsonl", "--time", "--batch-tokens", 70, "--max-length", 60)
    assert code == 0, err
    timed = found["extraction"]
    assert timed["batches"] == 2 and timed["seconds"] == pytest.approx(found["tokens"] / timed["tokens_per_s"])
    assert (timed["dtype"], timed["device"], timed["batch_tokens"]) == ("float32", "cpu", 70)


def test_rejects_are_written_and_kept(place: Path, tmp_path: Path) -> None:
    flags = [place / "mixed.jsonl", "--rejects", tmp_path / "rejects.jsonl"]
    assert inspect(place, *flags)[0] == 0
    rejects = [json.loads(line) for line in (tmp_path / "rejects.jsonl").read_text().splitlines()]
    assert [record["row"] for record in sorted(rejects, key=lambda record: record["row"])] == [4, 5]
    assert inspect(place, *flags)[0] == 0 and len((tmp_path / "rejects.jsonl").read_text().splitlines()) == 2
    (tmp_path / "rejects.jsonl").write_text("my notes\n")
    code, _, err = inspect(place, *flags)
    assert code == 2 and "holds something else than dropped rows" in err


def test_rejects_are_written_where_no_row_is_left(place: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    code, found, _ = inspect(place, tmp_path / "odd.jsonl", "--rejects", tmp_path / "rejects.jsonl")
    assert code == 0 and found["reasons"] == {"no known shape": 2} and found["rows"]["kept"] == 0
    assert "its keys are q" in found["dropped"][0]["detail"]
    rejects = [json.loads(line) for line in (tmp_path / "rejects.jsonl").read_text().splitlines()]
    assert [record["value"] for record in rejects] == [{"q": "a"}, {"q": "b"}]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["mixed.jsonl", "--strict"], ["row", "--strict"]),
        (["mixed.jsonl", "--show", "99"], ["--show 99", "ROW"]),
        (["mixed.jsonl", "--show", "5"], ["--show 5", "it was dropped"]),
        (["mixed.jsonl", "--vocab-sizes", "500"], ["500", "128"]),
        (["mixed.jsonl", "--vocab-sizes", "many"], ["--vocab-sizes", "many"]),
        (["mixed.jsonl", "--taps", "2,9"], ["tap 9", "4 layers"]),
        (["mixed.jsonl", "--columns", "prompt"], ["--columns prompt", "OURS=THEIRS"]),
        (["mixed.jsonl", "--format", "bush"], ["bush", "auto"]),
        (["mixed.jsonl", "--head", "eagle9"], ["eagle9", "medusa"]),
        (["mixed.jsonl", "--target", "nowhere/at-all"], ["nowhere/at-all"]),
        (["missing.jsonl"], ["missing.jsonl"]),
        (["mixed.jsonl", "--html", "."], ["exists", "--force"]),
    ],
)
def test_a_mistake_gets_one_plain_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], says: list[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(place)
    target = [] if "--target" in flags else ["--target", "target"]
    code, out, err = draftsmith("data", "inspect", *flags, *target)
    assert (code, out) == (2, ""), out + err
    last = err.splitlines()[-1]
    assert last.startswith("error: ") and last.endswith((".", ")")) and "Traceback" not in err
    for words in says:
        assert words in last


@pytest.mark.parametrize("template", ["none", CHATML.replace("<|im_end|>", "\n") + NEXT])
def test_a_template_that_is_of_no_use_is_said_at_once(
    place: Path, tmp_path: Path, tiny_tokenizer_factory: Any, template: str
) -> None:
    for file in (place / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    tiny_tokenizer_factory(template).save_pretrained(tmp_path)
    code, out, err = draftsmith("data", "inspect", place / "mixed.jsonl", "--target", tmp_path)
    assert (code, out) == (2, "") and "template" in err and err.count("\n") == 1


# -- the page --------------------------------------------------------------------------------------------------------------


VOID = {"meta", "link", "img", "br"}  # and what is written <so/>


class Elements(HTMLParser):
    """Every element of a page in order, the text of each token's span, and whether all are closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.spans: list[tuple[dict[str, str | None], str]] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "span" and "title" in dict(attrs):
            self.spans.append((dict(attrs), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "span" and self.spans:
            self.spans[-1] = (self.spans[-1][0], self.spans[-1][1] + data)


@pytest.fixture(scope="module")
def written(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("page") / "new" / "page.html"
    code, found, err = inspect(place, place / "broken.jsonl", "--show", 3, "--html", out, "--salvage")
    assert code == 0 and found["html"] == str(out), err
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    return out.read_text(), found


def test_the_page_stands_alone_and_nothing_breaks_out_of_it(written: tuple[str, dict[str, Any]]) -> None:
    elements = Elements(written[0])
    assert elements.stack == []
    tags = {tag for tag, _ in elements.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    for _, attributes in elements.seen:
        assert not attributes.keys() & {"src", "href", "srcset", "xlink:href"}
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in written[0] and "@import" not in written[0] and "http" not in re.sub("http-equiv", "", written[0])
    assert "prefers-color-scheme: dark" in written[0] and "\x1b" not in written[0]


def test_each_token_is_a_span_with_its_place_id_and_mask(
    written: tuple[str, dict[str, Any]], tiny_tokenizer_factory: Any
) -> None:
    tokenizer = tiny_tokenizer_factory()
    example = encode(Conversation(ROWS[2]["messages"], "a", 3), tokenizer, 2048)
    spans = Elements(written[0]).spans
    assert [attributes["title"] for attributes, _ in spans] == [
        f"token {i}, id {token}, {'supervised' if supervised else 'read'}"
        for i, (token, supervised) in enumerate(zip(example.ids, example.mask, strict=True))
    ]
    assert [attributes["class"] == "t s" for attributes, _ in spans] == example.mask.tolist()
    learnt = "".join(text for attributes, text in spans if attributes["class"] == "t s")
    expected = tokenizer.decode(example.ids[example.mask])
    assert learnt == visible(expected) and "<script>" in learnt


def test_the_page_shows_tables_histogram_and_damage(written: tuple[str, dict[str, Any]]) -> None:
    text, found = written
    elements = Elements(text)
    bars = [attributes for tag, attributes in elements.seen if tag == "rect"]
    assert len(bars) == len(found["lengths"]["histogram"]["counts"])
    assert sum(tag == "svg" for tag, _ in elements.seen) == 1
    for wanted in ("Damaged.", "no assistant turn", "end of turn", "Draft vocabulary", "bfloat16", "broken.jsonl:4"):
        assert wanted in text


def test_unasked_the_page_shows_a_spread(place: Path, tmp_path: Path) -> None:
    code, _, err = inspect(place, place / "mixed.jsonl", "--html", tmp_path / "p.html", "--max-length", 60)
    assert code == 0, err
    text = (tmp_path / "p.html").read_text()
    shown = re.findall("<em>(.*?)</em>", text)
    assert shown == ["the first", "the longest", "dropped: no supervised tokens"]
    assert "cut at max_length" in text


def test_a_page_is_replaced_with_force_alone(place: Path, tmp_path: Path) -> None:
    (tmp_path / "p.html").write_text("mine")
    code, found, err = inspect(place, place / "mixed.jsonl", "--html", tmp_path / "p.html")
    assert code == 2 and found is None and "--force" in err and (tmp_path / "p.html").read_text() == "mine"
    assert inspect(place, place / "mixed.jsonl", "--html", tmp_path / "p.html", "--force")[0] == 0
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    with pytest.raises(UserError, match="is a directory"):
        write(tmp_path, "text")


def test_names_are_escaped_too(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "<b>&.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n")
    assert inspect(place, file, "--html", tmp_path / "p.html")[0] == 0
    text = (tmp_path / "p.html").read_text()
    assert "<b>&" not in text and "&lt;b&gt;&amp;.jsonl" in text
