"""Data the target writes itself: what is kept, what the files say, and what training makes of an answer that was cut."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.data import synthesize
from draftsmith.data.chat import encode
from draftsmith.data.conversations import read_conversations
from draftsmith.data.synthesize import Filter, Settings, loops, user_header, write
from draftsmith.data.tally import Tally
from draftsmith.errors import UserError
from draftsmith.sampling import Sampling
from draftsmith.target import Target

SETTINGS = Settings(seed=3, user=Sampling(1.0), answer=Sampling(1.0), max_user_tokens=12, max_answer_tokens=16, batch=32)
TEXT: str = "the river rises early in spring and the fields below the mill stand under water until the first warm days of april"


@pytest.fixture
def ending_target(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The tiny random target, with a tenth of its tokens ending a text: user turns then finish within their limit."""
    monkeypatch.setattr(tiny_target, "eos_ids", frozenset(range(2, 128, 10)))
    monkeypatch.setattr(tiny_target.model.generation_config, "eos_token_id", sorted(tiny_target.eos_ids))
    return tiny_target


def written(target: Target, out: Path, settings: Settings = SETTINGS) -> dict:
    out.mkdir()
    return write(target, out, 6, 3, settings, lambda _: None)


def test_loops_are_told_from_prose():
    assert not loops(TEXT.split())
    assert loops(["yes", "and", "no", "or"] * 12)
    assert loops(["day", "of", "the", "week", "is"] * 6)
    assert not loops(["a", "b", "c", "d"])  # too short to tell


def test_filter_drops_loops_empty_turns_and_near_duplicates():
    keep = Filter()
    assert keep.keeps("tell me of rivers", TEXT)
    assert not keep.keeps("tell  me of RIVERS", "another answer altogether")  # the same question
    assert not keep.keeps("and of mills", TEXT.replace("april", "may"))  # half of its shingles are known
    assert not keep.keeps("count", "one two three four " * 10)
    assert not keep.keeps("", "an answer") and not keep.keeps("a question", "42 !")
    assert keep.keeps("and of hills", "nothing here was said before in eight words running, so it stays")
    assert keep.dropped == {"unfinished user turn": 0, "empty turn": 2, "loop": 1, "near-duplicate": 2}


def test_filter_passes_on_user_turns_before_they_are_answered():
    keep = Filter()
    assert keep.worth_answering("what", True) and keep.keeps("what", TEXT)
    assert not keep.worth_answering("what", True) and not keep.worth_answering("and then", False)
    assert keep.dropped["near-duplicate"] == keep.dropped["unfinished user turn"] == 1


def test_files_and_provenance(ending_target: Target, tmp_path: Path):
    provenance = written(ending_target, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "provenance.json").read_text()) == provenance
    assert provenance["model"] == "tiny" and provenance["fingerprint"] == ending_target.fingerprint
    assert provenance["dtype"] == "float32" and provenance["settings"]["seed"] == 3
    assert provenance["settings"]["user"]["temperature"] == 1.0 and provenance["rows"] == {"train": 6, "heldout": 3}
    rows = [json.loads(line) for part in ("train", "heldout") for line in (tmp_path / "out" / f"{part}.jsonl").open()]
    assert len(rows) == 9 and {row["id"] for row in rows} == {f"3-{i}" for i in range(9)}
    assert [[message["role"] for message in row["messages"]] for row in rows] == [["user", "assistant"]] * 9
    users = [row["messages"][0]["content"].lower() for row in rows]
    assert len(set(users)) == 9


def test_the_seed_decides(ending_target: Target, tmp_path: Path):
    for name in ("one", "two"):
        written(ending_target, tmp_path / name)
    written(ending_target, tmp_path / "three", replace(SETTINGS, seed=4))
    one, two, three = ((tmp_path / name / "train.jsonl").read_text() for name in ("one", "two", "three"))
    assert one == two != three


def test_a_cut_answer_is_not_taught_to_end(ending_target: Target, tmp_path: Path):
    """finish "length": the target wrote no end of turn there, so none is supervised."""
    written(ending_target, tmp_path / "out")
    conversations = list(read_conversations([tmp_path / "out" / f"{part}.jsonl" for part in ("train", "heldout")], Tally()))
    finishes = {conversation.finish for conversation in conversations}
    assert finishes == {"stop", "length"}, "the settings must give both kinds"
    end = ending_target.tokenizer.eos_token_id
    for conversation in conversations:
        example = encode(conversation, ending_target.tokenizer, None)
        supervised = example.ids[example.mask]
        assert (end in supervised) == (conversation.finish == "stop")
        if conversation.finish == "length":
            assert example.mask[-1] and example.ids[-1] != end


def test_generation_stops_at_any_end_and_strips_it(ending_target: Target):
    texts = synthesize.generate(ending_target, ["a", "the other"], Sampling(), 10)
    again = synthesize.generate(ending_target, ["the other"], Sampling(), 10)
    assert texts[1] == again[0]  # padding on the left changes nothing


def test_the_user_header_is_the_template_s(tiny_target: Target):
    assert user_header(tiny_target) == "<|im_start|>user\n"


def test_a_target_that_never_ends_a_user_turn_is_refused(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny_target, "eos_ids", frozenset())
    with pytest.raises(UserError, match=r"0 of \d+ conversations were worth keeping"):
        write(tiny_target, tmp_path, 1, 0, Settings(max_user_tokens=2, max_answer_tokens=2, batch=512), lambda _: None)
