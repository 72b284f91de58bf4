"""The target rewrites conversations in this process: what it writes, that kills change nothing, and what is left behind."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import draftsmith, kill_until_done
from serving import Reply, babble, completion, serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.data.chat import encode, prompt_ids
from draftsmith.data.conversations import Conversation
from draftsmith.data.generation import continue_batch, text_after
from draftsmith.data.regenerate import Asked, Job, batches, beside, in_process
from draftsmith.data.rewriting import TOO_LONG, Rewrite, Settings
from draftsmith.data.tally import Tally
from draftsmith.errors import UserError
from draftsmith.sampling import Sampling
from draftsmith.target import Target

GREEDY = Settings(max_new_tokens=24)
PROBE = "Say yes."  # what a server is asked first
ENDS = list(range(2, 128, 16))  # so that an answer ends after some sixteen tokens


def make_target(tokenizer: Any, max_positions: int = 512) -> Target:
    """A random Llama whose greedy texts wander and end, as those of a real model do."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=max_positions, bos_token_id=1, eos_token_id=ENDS, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.3)
    return Target(model, tokenizer, "wandering")


@pytest.fixture(scope="module")
def target(tiny_tokenizer_factory: Callable[..., Any]) -> Target:
    return make_target(tiny_tokenizer_factory())


def conversations(count: int, turns: int = 2) -> list[Conversation]:
    said = ["tell me of rivers", "why", "and then what happens at the mill", "go on", "is that so"]
    return [
        Conversation(
            [
                {"role": role, "content": f"{said[(i + 2 * turn) % 5]} {i}" if role == "user" else "an old answer"}
                for turn in range(1 + i % turns)
                for role in ("user", "assistant")
            ],
            "f",
            i + 1,
            about={"id": f"c{i}"},
        )
        for i in range(count)
    ]


def run(
    target: Target, chats: list[Conversation], out: Path, settings: Settings = GREEDY, **more: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary and the rows written."""
    batch = more.pop("batch", 3)
    summary = in_process(Job(chats, settings, out, Tally(read=len(chats)), **more), target, batch)
    return summary, read(out)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.open(encoding="utf-8")] if out.exists() else []


@torch.no_grad()
def greedy(target: Target, ids: list[int], limit: int) -> tuple[list[int], bool]:
    """Plain greedy decoding, one token after another without a cache."""
    written: list[int] = []
    while len(written) < limit:
        token = int(target.model(torch.tensor([ids + written])).logits[0, -1].argmax())
        if token in target.eos_ids:
            return written, True
        written.append(token)
    return written, False


def test_each_answer_is_the_target_s_own_greedy_answer_to_what_stands_before_it(target: Target, tmp_path: Path):
    chats = conversations(10, turns=3)
    summary, rows = run(target, chats, tmp_path / "out.jsonl")
    finishes = set()
    for row in rows:
        source = chats[row["row"]]
        assert row["id"] == source.about["id"] and row["temperature"] == 0.0
        for turn, message in enumerate(row["messages"]):
            if message["role"] == "user":
                assert message == source.messages[turn]
                continue
            ids = prompt_ids(row["messages"][:turn], target.tokenizer)
            written, ended = greedy(target, ids, 24)
            assert message["content"] == target.tokenizer.decode(written)
            last = turn == len(row["messages"]) - 1
            assert ended or (last and row["finish"] == "length")
        finishes.add(row["finish"])
    assert finishes == {"stop", "length"}
    lost = summary["rows"]["dropped"]
    assert len(rows) + lost == 10 and summary["rows"] == {"read": 10, "kept": len(rows), "changed": 0, "dropped": lost}
    assert summary["finish"] == {f: sum(row["finish"] == f for row in rows) for f in ("stop", "length")}
    assert summary["complete"] and summary["out"] == str(tmp_path / "out.jsonl")
    assert summary["answers"] == sum(message["role"] == "assistant" for row in rows for message in row["messages"])


def test_penalties_in_the_model_s_own_generation_config_are_set_aside(target: Target, monkeypatch: pytest.MonkeyPatch):
    ids = prompt_ids([{"role": "user", "content": "tell me"}], target.tokenizer)
    plain = continue_batch(target, [ids], Sampling(), 24)
    for name, value in {"repetition_penalty": 1.8, "min_new_tokens": 20, "temperature": 0.1, "do_sample": True}.items():
        monkeypatch.setattr(target.model.generation_config, name, value)
    own = target.model.generation_config
    assert continue_batch(target, [ids], Sampling(), 24) == plain
    assert target.model.generation_config is own
    assert plain[0].ids == greedy(target, ids, 24)[0]


def test_sampling_follows_the_seed_and_the_drawn_temperature(target: Target, tmp_path: Path):
    settings = Settings((0.0, 1.0), top_p=0.95, max_new_tokens=12, seed=4)
    chats = [replace(chat, messages=conversations(1)[0].messages) for chat in conversations(24)]
    _, rows = run(target, chats, tmp_path / "a", settings)
    _, again = run(target, chats, tmp_path / "b", settings)
    _, other = run(target, chats, tmp_path / "c", replace(settings, seed=5))
    assert rows == again != other
    texts = {t: [row["messages"][1]["content"] for row in rows if row["temperature"] == t] for t in (0.0, 1.0)}
    assert len(set(texts[0.0])) == 1 < len(texts[0.0]) and len(set(texts[1.0])) > 5
    assert all(row["temperature"] == settings.temperature(row["row"]) for row in rows)


@pytest.mark.parametrize("template", ["plain", "generation", "strict", "thinking", "thinking-prompt"])
def test_what_is_supervised_is_what_the_target_wrote(
    template: str, target: Target, tiny_tokenizer_factory: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A cut answer without an end of turn, any other with one; nothing of what the prompt supplied."""
    tokenizer = tiny_tokenizer_factory(template)
    monkeypatch.setattr(target, "tokenizer", tokenizer)
    _, rows = run(target, conversations(16, turns=1), tmp_path / "out", Settings((1.0,), max_new_tokens=20))
    finishes = set()
    for row in rows:
        example = encode(Conversation(row["messages"], "f", 1, row["finish"]), tokenizer, None)
        content = row["messages"][1]["content"]
        wrote = content.removeprefix("<think>\n") if template == "thinking-prompt" else content
        supervised = tokenizer.decode(example.ids[example.mask])
        trimmed = template.startswith("thinking")  # these templates drop newlines around an answer
        assert supervised.strip("\n" if trimmed else "") == (wrote + "<|im_end|>" * (row["finish"] == "stop")).strip(
            "\n" if trimmed else ""
        )
        finishes.add(row["finish"])
    assert finishes == {"stop", "length"}


def test_texts_that_read_back_as_other_tokens_are_counted(target: Target, tmp_path: Path):
    """The model's vocabulary is larger than the tokenizer's, so some answers hold tokens without a text."""
    summary, rows = run(target, conversations(30, turns=1), tmp_path / "out", Settings((1.0,), max_new_tokens=8))
    assert 0 < summary["retokenized"] < len(rows)
    ids = target.tokenizer("then").input_ids  # "the" is one token of it
    letters = target.tokenizer.convert_tokens_to_ids(list("then"))
    assert text_after([1], letters, target.tokenizer) == text_after([1], ids, target.tokenizer) == "then" and letters != ids


def test_a_first_word_keeps_the_space_before_it():
    core = Tokenizer(models.WordLevel({"<s>": 0, "▁hello": 1, "▁you": 2, "▁[/INST]": 3}, unk_token="<s>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    core.decoder = decoders.Metaspace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<s>")
    assert tokenizer.decode([1, 2]) == "hello you"  # what a decoder alone would say
    assert text_after([2, 3], [1, 2], tokenizer) == " hello you"


def test_special_tokens_stay_in_the_text(target: Target):
    ids = target.tokenizer("<|im_start|>a", add_special_tokens=False).input_ids
    assert text_after([5], ids, target.tokenizer) == "<|im_start|>a"


def test_batches_are_alike(target: Target):
    chat = conversations(1)[0]
    asked = [Asked(Rewrite(chat, i, float(i % 2)), "", [0] * (i * 7 % 40), 24 if i % 5 else 3) for i in range(40)]
    cut = list(batches(asked, 8))
    assert sorted(one.rewrite.index for group in cut for one in group) == list(range(40))
    for group in cut:
        assert len({(one.rewrite.temperature, one.room) for one in group}) == 1 and len(group) <= 8
    widths = [(len(group[0].ids), len(group[-1].ids)) for group in cut if group[0].rewrite.temperature and group[0].room == 24]
    assert widths == sorted(widths) and all(low <= high for low, high in widths)


def test_the_context_limit(tiny_tokenizer_factory: Callable[..., Any], tmp_path: Path):
    """A prompt that fills the context is not asked; an answer that would run past it is cut there."""
    target = make_target(tiny_tokenizer_factory(), 48)
    chats = [
        Conversation([{"role": "user", "content": "x" * length}, {"role": "assistant", "content": "old"}], "f", length)
        for length in [1, 60, *list(range(27, 34)) * 4]
    ]
    header = len(prompt_ids([{"role": "user", "content": ""}], target.tokenizer))
    summary, rows = run(target, chats, tmp_path / "out", Settings((1.0,), max_new_tokens=24))
    room = {chats[row["row"]].row: 48 - header - chats[row["row"]].row for row in rows}
    assert min(room.values()) == 1 and set(summary["reasons"]) <= {TOO_LONG, "empty answer"}
    assert summary["reasons"][TOO_LONG] == sum(48 - header - chat.row < 1 for chat in chats) > 0
    for row in rows:
        written = len(target.tokenizer(row["messages"][1]["content"]).input_ids)
        assert written <= room[chats[row["row"]].row]
        assert row["finish"] == "length" or written < room[chats[row["row"]].row]


def test_a_template_that_refuses_costs_one_row(
    target: Target, tiny_tokenizer_factory: Callable[..., Any], tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(target, "tokenizer", tiny_tokenizer_factory("strict"))
    bad = Conversation([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "f", 9)
    with open(tmp_path / "rejects", "w+") as rejects:
        tally = Tally(read=3, rejects=rejects)
        in_process(Job([*conversations(2, 1), bad], Settings((1.0,), max_new_tokens=9), tmp_path / "out", tally), target, 2)
        rejects.seek(0)
        records = [json.loads(line) for line in rejects]
    assert [(record["row"], record["reason"]) for record in records] == [(9, "the chat template refuses the messages")]
    assert "roles must alternate" in records[0]["detail"] and records[0]["value"]["messages"] == bad.messages
    monkeypatch.setattr(target, "tokenizer", tiny_tokenizer_factory("none"))
    with pytest.raises(UserError, match="has no chat template"):
        run(target, conversations(2), tmp_path / "other")


def test_strict_ends_at_the_first_drop_and_goes_on_without(target: Target, tmp_path: Path):
    chats = [*conversations(2, 1), Conversation([{"role": "system", "content": "s"}], "f", 3), *conversations(2, 1)]
    job = Job(chats, Settings((1.0,), max_new_tokens=9), tmp_path / "out", Tally(read=5, strict=True))
    for _ in range(2):
        with pytest.raises(UserError, match=r"f, row 3: no turn to answer: mend or remove the row, or let it be dropped"):
            in_process(replace(job, tally=Tally(read=5, strict=True)), target, 2)
    summary = in_process(replace(job, tally=Tally(read=5)), target, 2)
    assert summary["reasons"] == {"no turn to answer": 1} and len(read(tmp_path / "out")) == 4


def test_nothing_left_is_said_and_nothing_is_written(target: Target, tmp_path: Path):
    with pytest.raises(UserError, match=r"no conversation is left \(no turn to answer: 1\)"):
        run(target, [Conversation([{"role": "system", "content": "s"}], "f", 1)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_journal_that_lacks_rows_of_a_window_gives_the_same_file(target: Target, tmp_path: Path):
    """Whatever was lost, what is written again is what an unbroken run writes; the order is the one asked for."""
    chats, settings = conversations(20), Settings((0.7, 1.0), max_new_tokens=12)
    run(target, chats, tmp_path / "whole", settings)
    whole = (tmp_path / "whole").read_bytes()
    budget = {"token_budget": 1}
    summary, rows = run(target, chats, tmp_path / "out", settings, batch=3, **budget)
    journal = beside(tmp_path / "out", ".partial")
    assert not summary["complete"] and summary["out"] is None and rows == []
    header, *lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 12  # one window of four batches
    for kept in (lines[5:], lines[:3] + [lines[4], lines[9][:20]], lines[::-1]):
        journal.write_bytes(header + b"".join(kept))
        summary, rows = run(target, chats, tmp_path / "out", settings)
        assert (tmp_path / "out").read_bytes() == whole and not journal.exists()
        (tmp_path / "out").unlink()
    journal.write_bytes(header + b"".join(lines[::-1]))
    _, rows = run(target, chats, tmp_path / "out", settings, in_order=False)
    assert [row["row"] for row in rows] == [row["row"] for line in lines[::-1] if (row := json.loads(line)["row"])] + [
        row["row"] for row in read(tmp_path / "whole") if row["row"] >= 12
    ]


def test_the_budget_holds_over_all_starts(target: Target, tmp_path: Path):
    chats = conversations(30, 1)
    done = []
    for budget in (1, 1, 250, 10**6):
        summary, _ = run(target, chats, tmp_path / "out", batch=2, token_budget=budget)
        done.append((summary["complete"], summary["tokens"]))
    assert done[0] == done[1] and done[1][1] < 250 <= done[2][1] < done[3][1]
    assert [complete for complete, _ in done] == [False, False, False, True]


def test_provenance_and_other_settings(target: Target, tmp_path: Path):
    out, chats = tmp_path / "out", conversations(6)
    run(target, chats, out, token_budget=1, batch=1)
    for settings, asked, said in [
        (Settings(max_new_tokens=25), chats, "settings.max_new_tokens was 24 and is 25"),
        (Settings(max_new_tokens=24), chats[:5], "input.conversations was 6 and is 5"),
    ]:
        with pytest.raises(UserError, match=said):
            run(target, asked, out, settings, batch=1)
    summary, _ = run(target, chats, out, Settings(max_new_tokens=25), batch=1, force=True)
    provenance = json.loads(beside(out, ".provenance.json").read_text())
    assert {key: provenance[key] for key in summary} == summary
    assert provenance["writer"]["target"] == "wandering" and provenance["writer"]["fingerprint"] == target.fingerprint
    assert provenance["settings"]["max_new_tokens"] == 25 and provenance["input"]["conversations"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.provenance.json"]


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # killing.draftsmith sets it


@pytest.fixture(scope="module")
def saved(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's directory."""
    path = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty conversations of one to three turns, one that the strictest would drop, and one of questions alone."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [{"id": chat.about["id"], "messages": chat.messages} for chat in conversations(60, turns=3)]
    rows += [{"messages": [{"role": "system", "content": "s"}]}, {"turns": ["who", "and why"], "category": "writing"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The summary that ``draftsmith data regenerate ARGUMENTS --json`` prints."""
    with pytest.raises(SystemExit) as ended:
        draftsmith("data", "regenerate", *arguments, "--json")
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


WRITING = ("--temperature", "0.0,1.0", "--max-new-tokens", 12, "--dtype", "float32")


def test_the_command_in_this_process(saved: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, rejects = tmp_path / "out.jsonl", tmp_path / "rejects.jsonl"
    told = command(capsys, data, "--target", saved, "--out", out, *WRITING, "--batch", 8, "--rejects", rejects)
    rows, dropped = read(out), read(rejects)
    assert told["rows"]["read"] == 62 and told["rows"]["kept"] == len(rows) and told["rows"]["dropped"] == len(dropped)
    assert sum(told["reasons"].values()) == len(dropped) >= 1 and told["finish"]["stop"] + told["finish"]["length"] == len(rows)
    turns = next(row for row in rows if row.get("category") == "writing")
    roles = [message["role"] for message in turns["messages"]]
    assert roles in (["user", "assistant"], ["user", "assistant"] * 2) and turns["row"] == 60
    assert rows == sorted(rows, key=lambda row: row["row"]) and {row["temperature"] for row in rows} == {0.0, 1.0}
    before = out.read_bytes(), rejects.read_bytes()
    again = command(capsys, data, "--target", saved, "--out", out, *WRITING, "--batch", 8, "--rejects", rejects)
    assert again == told and (out.read_bytes(), rejects.read_bytes()) == before  # a finished job has nothing left to do
    with pytest.raises(SystemExit) as ended:
        draftsmith("data", "regenerate", data, "--target", saved, "--out", out, *WRITING, "--batch", 9)
    assert ended.value.code == 2 and "written with other settings (writer.batch was 8 and is 9)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name one writer"),
        (["--target", "t", "--endpoint", "http://127.0.0.1:1/v1"], "name one writer"),
        (["--target", "t", "--temperature", "warm"], "--temperature 'warm' is no number"),
        (["--target", "t", "--temperature", "0,-1"], "temperature is -1.0"),
        (["--target", "t", "--top-p", "0"], "top_p is 0.0"),
        (["--target", "t", "--columns", "messages"], "--columns messages names no column"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--tries", "1"], "gave no answer in 1 tries (cannot connect"),
        (["--target", "t", "--rejects", "DATA"], "holds something else than dropped rows"),
        (["--target", "t", "--out", "DATA"], "exists: choose another output, or pass --force"),
        (["--target", "t", "--out", "/tmp"], "is a directory: give --out the name of a file"),
    ],
)
def test_mistakes_are_named(arguments: list[str], said: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    given = [str(data) if argument == "DATA" else argument for argument in arguments]
    before = data.read_bytes()
    with pytest.raises(SystemExit) as ended:
        draftsmith("data", "regenerate", data, "--out", tmp_path / "out", *given)
    assert ended.value.code == 2 and said in capsys.readouterr().err and data.read_bytes() == before
    assert not (tmp_path / "out").exists()


def test_the_command_through_a_server(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.jsonl"
    with serving(models=("first", "second")) as server:
        common = (data, "--endpoint", server.url, "--model", "second", "--out", out, "--limit", 20)
        part = command(capsys, *common, "--token-budget", 150, "--concurrency", 2)
        assert not part["complete"] and part["out"] is None and not out.exists() and part["tokens"] >= 150
        asked = len(server.bodies)
        told = command(capsys, *common, "--as-finished")
    rows = read(out)
    assert sorted(row["row"] for row in rows) == list(range(20)) and told["complete"] and told["retokenized"] is None
    answers = sum(message["role"] == "assistant" for row in rows for message in row["messages"])
    assert told["answers"] == answers == len(server.bodies) - 2  # each start asks one short question
    assert asked - 1 == part["answers"] and told["tokens"] == 13 * answers
    provenance = json.loads(beside(out, ".provenance.json").read_text())
    assert provenance["writer"] == {"model": "second"} and provenance["endpoint"] == server.url


def test_a_budget_needs_a_server_that_counts(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(lambda *_: completion("yes", used=0)) as server, pytest.raises(SystemExit):
        draftsmith("data", "regenerate", data, "--endpoint", server.url, "--out", tmp_path / "out", "--token-budget", 5)
    assert "leave out --token-budget" in capsys.readouterr().err


# -- kills ---------------------------------------------------------------------------------------------------------


def kill_ten_times(job: Callable[..., Callable[[], None]], folder: Path) -> None:
    """Run ``job("whole")`` undisturbed, and others until ten kills have hit them; all must leave the same bytes."""
    kill_until_done(job("first", "--limit", 1), 0, 0)  # loads what all later processes share
    start = time.monotonic()
    kill_until_done(job("whole"), 0, 0)
    longest, hits, runs = (time.monotonic() - start) / 2, 0, 0
    while hits < 10:  # a job may be done before all its kills have come
        hits += kill_until_done(job(f"killed-{runs}"), 10 - hits, 100 + runs, longest)
        assert (folder / f"killed-{runs}").read_bytes() == (folder / "whole").read_bytes()
        runs += 1
    assert not list(folder.glob("*.partial"))


def test_ten_kills_change_nothing_in_this_process(saved: Path, data: Path, tmp_path: Path):
    """Every conversation comes out once, and the file is the one that an unbroken run writes."""

    def job(name: str, *more: object) -> Callable[[], None]:
        options = ("--out", tmp_path / name, *WRITING, "--batch", 1, "--rejects", tmp_path / f"{name}.rejects")
        return partial(draftsmith, "data", "regenerate", data, "--target", saved, "--limit", 40, *options, *more)

    kill_ten_times(job, tmp_path)
    assert (tmp_path / "killed-0.rejects").read_bytes() == (tmp_path / "whole.rejects").read_bytes()
    indices = [row["row"] for row in read(tmp_path / "killed-0")]
    assert len(set(indices)) == len(indices) > 30


def test_ten_kills_change_nothing_through_a_server(data: Path, tmp_path: Path):
    """A slow server that fails now and then; what it is asked again is only what was under way at a kill."""

    def chat(body: dict[str, Any], tries: int) -> Reply:
        if body["seed"] % 19 == 0 and tries % 2 == 0:
            return Reply(503, {}, headers={"Retry-After": "0.05"})
        return Reply(**{**vars(babble(body)), "delay": 0.03})

    with serving(chat) as server:

        def job(name: str, *more: object) -> Callable[[], None]:
            options = ("--out", tmp_path / name, "--temperature", "0,1", "--concurrency", 4)
            return partial(draftsmith, "data", "regenerate", data, "--endpoint", server.url, *options, *more)

        kill_ten_times(job, tmp_path)
    runs = 2 + len(list(tmp_path.glob("killed-*.json")))
    asked = [tries for body, tries in server.tries.items() if json.loads(body)["seed"] % 19 and PROBE not in body]
    again = sum(max(tries - runs, 0) for tries in asked)
    assert len(asked) > 90 and again <= 10 * 4 * 3  # at each kill four conversations of up to three turns were under way
