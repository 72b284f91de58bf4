"""The command line as a user meets it: every verb for real on a tiny target, and every mistake as one plain sentence."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from draftsmith.cli import main
from draftsmith.target import Target

ROWS = [
    {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"{word} {word} then {word}"}]}
    for word in ("one", "two", "red", "sea", "sun", "ant")
]


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as exactly one JSON document."""
        return json.loads(self.out)


def draftsmith(*arguments: object) -> Outcome:
    """Run the command line in this process, as ``draftsmith ARGUMENTS`` would."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["draftsmith", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    return Outcome(code, out.getvalue(), err.getvalue())


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]) -> Path:
    """A folder with targets, data files sound and broken, a recipe, and a head trained from it for three steps."""
    place = tmp_path_factory.mktemp("cli")
    for name, template in (("target", "plain"), ("other", "generation"), ("untemplated", "none")):
        tiny_target.model.save_pretrained(place / name)
        tiny_tokenizer_factory(template).save_pretrained(place / name)
    (place / "good.jsonl").write_text(lines(ROWS))
    (place / "broken.jsonl").write_text(lines(ROWS[:1]) + '{"messages": [\n')
    (place / "unanswered.jsonl").write_text(lines([*ROWS[:2], {"messages": ROWS[0]["messages"][:1]}]))
    (place / "taken").mkdir()
    recipe = {
        "target": {"name": str(place / "target"), "dtype": "float32"},
        "data": {"train": "good.jsonl", "held_out": "good.jsonl", "max_length": 60},
        "head": {"kind": "eagle3", "taps": [1, 2, 3], "depths": 2, "draft_vocab": 40},
        "train": {"max_steps": 3, "batch_size": 2, "micro_batch_size": 1, "precision": "no", "checkpoint_every": 2},
        "eval": {"tree": "chain:2", "max_new_tokens": 6, "prompts": 2},
        "output": str(place / "run"),
    }
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    trained = draftsmith("train", place / "recipe.yaml", "--json")
    assert trained.code == 0, trained.err
    assert trained.document["steps"] == 3 and trained.document["head"] == str(place / "run" / "head")
    assert trained.document["summary"] == json.loads((place / "run" / "summary.json").read_text())
    return place


# -- what a user wants -----------------------------------------------------------------------------------------------------


def test_train_leaves_the_run_directory(place: Path):
    run = place / "run"
    assert {path.name for path in run.iterdir()} >= {"recipe.yaml", "run.json", "head", "checkpoints", "metrics.jsonl"}
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["clip"] == 1.0  # every default filled in


def test_train_resumes_and_replaces_only_when_told(place: Path, tmp_path: Path):
    out = f"output={tmp_path / 'again'}"
    first = draftsmith("train", place / "recipe.yaml", "--set", out, "--profile", "1")
    assert first.code == 0 and f"{tmp_path}/again/head" in first.out and "draftsmith export" in first.out
    assert [file.name for file in sorted((tmp_path / "again" / "profile").iterdir())] == ["steps-3-3.json.gz", "steps-3-3.txt"]
    table = (tmp_path / "again" / "profile" / "steps-3-3.txt").read_text()
    assert all(part in table for part in ("hidden states", "head and losses", "backward"))
    resumed = draftsmith("train", place / "recipe.yaml", "--set", out, "--set", "train.max_steps=4", "--resume", "--json")
    assert resumed.document["steps"] == 4
    assert draftsmith("train", place / "recipe.yaml", "--set", out, "--force").code == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--tree", "chain:2"],
        ["--tree", "tree:2x2", "--temperature", "0.8", "--top-p", "0.9"],
        ["--tree", "none"],
        ["--tree", "dynamic:6,k=2,depth=3,stop=0.01"],
        ["--tree", "beam:2x3", "--temperature", "1"],
        ["--tree", "chain:4,stop=0.1", "--temperature", "1", "--sampled-drafts"],
    ],
    ids=["chain", "sampled-tree", "none", "dynamic", "beam", "stopping-chain"],
)
def test_eval_reports(place: Path, tmp_path: Path, options: list[str]):
    arguments = ["--prompts", place / "good.jsonl", "--max-new-tokens", "6", "--limit", "3", "--baseline", "2", *options]
    done = draftsmith("eval", place / "run" / "head", *arguments, "--out", tmp_path / "eval", "--json")
    assert done.code == 0, done.err
    (result,) = done.document["results"]
    keys = (
        "proposer target prompts categories temperature top_p draft batch emitted_tokens verify_passes tau tau_interval "
        "accepted_per_position tokens_per_s baseline_tokens_per_s speedup time lossless near_ties"
    )
    assert set(keys.split()) <= result.keys() and result["prompts"] == 3
    assert json.loads((tmp_path / "eval" / "report.json").read_text())["results"] == [result]
    written = {path.name for path in (tmp_path / "eval").iterdir()}
    drawn = set() if options == ["--tree", "none"] else {"acceptance.png", "accepted-lengths.png"}
    assert written == {"report.json", "report.html", "cells", "time.png"} | drawn
    assert [path.name for path in tmp_path.iterdir()] == ["eval"]  # nothing is left beside it


def test_eval_names_what_is_lossy(place: Path, tmp_path: Path):
    arguments = ["--prompts", place / "good.jsonl", "--max-new-tokens", "6", "--temperature", "1", "--lossy-typical", "0.2"]
    done = draftsmith("eval", place / "run" / "head", *arguments, "--out", tmp_path / "eval", "--json")
    assert done.code == 0, done.err
    (result,) = done.document["results"]
    assert result["lossless"] is False and result["lossy"] == "typical acceptance ε=0.2 δ=0.447"
    page = (tmp_path / "eval" / "report.html").read_text(encoding="utf-8")
    assert page.count("typical acceptance ε=0.2 δ=0.447") >= 2  # in the title, as in the picture, and under lossless


def test_eval_chooses_a_tree_and_says_which(place: Path, tmp_path: Path):
    arguments = ["--prompts", place / "good.jsonl", "--max-new-tokens", "6", "--tree"]
    done = draftsmith("eval", place / "run" / "head", *arguments, "search:5,depth=2", "--out", tmp_path / "a", "--json")
    assert done.code == 0, done.err
    (result,) = done.document["results"]
    assert result["search"]["prompts"] >= 1 and result["draft"]["kind"] in ("tree", "chain")
    paths = json.dumps(result["draft"]["paths"], separators=(",", ":"))
    again = draftsmith("eval", place / "run" / "head", *arguments, paths, "--out", tmp_path / "b", "--json")
    assert again.document["results"][0]["draft"]["paths"] == result["draft"]["paths"]


def test_eval_prints_a_table(place: Path, tmp_path: Path):
    arguments = ["--prompts", place / "good.jsonl", "--max-new-tokens", "6", "--tree", "chain:2"]
    done = draftsmith("eval", place / "run" / "head", *arguments, "--out", tmp_path / "eval")
    for wanted in ("acceptance length τ", "accepted by position", "speed-up", "bookkeeping", "lossless", "report.html"):
        assert wanted.replace(" ", "") in "".join(done.out.split())  # long paths are folded


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_export_writes_a_directory(place: Path, tmp_path: Path, engine: str):
    done = draftsmith("export", place / "run" / "head", "--to", engine, "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert done.document == {"engine": engine, "draft_length": 2, "out": str(tmp_path / "out")}
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "model.safetensors"}


def test_heads_lists_the_kinds():
    kinds = draftsmith("heads", "--json").document
    assert {"eagle3", "medusa"} <= kinds.keys()
    for kind in kinds.values():
        assert {"taps", "lossless", "trains", "exports", "served"} <= kind.keys()
    assert "eagle3" in draftsmith("heads").out


def test_recipes_list_show_copy(tmp_path: Path):
    assert {"demo", "eagle3-llama3-8b", "medusa-llama3-8b"} <= draftsmith("recipes", "list", "--json").document.keys()
    assert "accelerate launch" in draftsmith("recipes", "list").out
    assert "depths: 3" in draftsmith("recipes", "show", "demo").out
    assert draftsmith("recipes", "show", "demo", "--json").document["train"]["clip"] == 1.0
    written = draftsmith("recipes", "copy", "eagle3-llama3-8b", tmp_path / "recipes", "--json").document["written"]
    names = {Path(path).relative_to(tmp_path / "recipes").as_posix() for path in written}
    launches = {path.name for path in (Path(__file__).parent.parent / "recipes" / "accelerate").glob("*.yaml")}
    assert names == {"eagle3-llama3-8b.yaml", *(f"accelerate/{name}" for name in launches)} and "ddp.yaml" in launches
    assert all(Path(path).is_file() for path in written)


def test_module_is_the_same_command(place: Path, tmp_path: Path):
    """python -m draftsmith.train, as accelerate launches it, in a process of its own."""
    command = [sys.executable, "-m", "draftsmith.train", str(place / "recipe.yaml"), "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]["output"] == str(place / "run")
    broken = subprocess.run([*command, "--set", "train.epoch=2"], capture_output=True, text=True, cwd=tmp_path)
    assert broken.returncode == 2 and "train.epochs" in broken.stderr and "Traceback" not in broken.stderr


# -- what a user gets wrong ------------------------------------------------------------------------------------------------


@dataclass
class Mistake:
    """A command line with {place} and {new} (a path that does not exist), and what its one sentence must say."""

    name: str
    command: str
    says: list[str]


TRAIN = "train {place}/recipe.yaml --set output={new}"
EVAL = "eval {place}/run/head --prompts {place}/good.jsonl --max-new-tokens 4 --tree chain:2 --out {new}"
EXPORT = "export {place}/run/head --to vllm --out {new}"
SYNTHESIZE = "data synthesize --target {place}/target --conversations 2"
MISTAKES = [
    Mistake("missing recipe", "train {place}/nope.yaml", ["nope.yaml", "demo"]),
    Mistake("missing data", TRAIN + " --set data.train={place}/nope.jsonl", ["nope.jsonl"]),
    Mistake(
        "broken line",
        TRAIN + " --set data.train={place}/broken.jsonl",
        ["broken.jsonl is damaged at line 2", "JSON", "data.salvage"],
    ),
    Mistake(
        "no assistant turn",
        TRAIN + " --set data.train={place}/unanswered.jsonl --set data.strict=true",
        ["unanswered.jsonl, row 3", "no assistant turn"],
    ),
    Mistake("no chat template", TRAIN + " --set target.name={place}/untemplated", ["untemplated", "no chat template"]),
    Mistake("file as folder", TRAIN + " --set output={place}/good.jsonl/x", ["good.jsonl/x", "is a file"]),
    Mistake(
        "target dtype",
        "data extract {place}/good.jsonl --target {place}/target --out {new} --target-dtype foo",
        ["'foo'", "bfloat16"],
    ),
    Mistake(
        "output is the input",
        "data regenerate {place}/good.jsonl --target {place}/target --out {place}/good.jsonl --force",
        ["good.jsonl is what is read"],
    ),
    Mistake("device", TRAIN + " --set target.device=foo", ["device 'foo'"]),
    Mistake("missing target", TRAIN + " --set target.name={place}/nope", ["nope"]),
    Mistake("unknown key", TRAIN + " --set train.epoch=2", ["train.epoch", "train.epochs"]),
    Mistake("unknown section", TRAIN + " --set trian.epochs=2", ["trian", "train"]),
    Mistake("unknown option", TRAIN + " --set head.options.norm_befor_fc=true", ["norm_befor_fc", "norm_before_fc"]),
    Mistake("unknown kind", TRAIN + " --set head.kind=eagle9", ["eagle9", "eagle3", "medusa"]),
    Mistake("wrong value", TRAIN + " --set train.lr=fast", ["train.lr"]),
    Mistake("broken change", TRAIN + " --set train.lr", ["train.lr", "section.key=value"]),
    Mistake("tap too deep", TRAIN + " --set head.taps=[1,9]", ["tap 9", "4 layers"]),
    Mistake("vocabulary too large", TRAIN + " --set head.draft_vocab=500", ["500", "128"]),
    Mistake("unknown tree in a recipe", TRAIN + " --set eval.tree=bush:3", ["bush:3", "chain:5"]),
    Mistake("train: output exists", "train {place}/recipe.yaml --set output={place}/taken", ["taken exists", "--force"]),
    Mistake(
        "resume: no run there",
        "train {place}/recipe.yaml --set output={place}/other --resume",
        ["other holds no checkpoint", "--resume", "--force"],
    ),
    Mistake("dry run: tap too deep", TRAIN + " --dry-run --set head.taps=[1,9]", ["tap 9"]),
    Mistake("dry run: broken line", TRAIN + " --dry-run --set data.train={place}/broken.jsonl", ["line 2"]),
    Mistake("dry run: vocabulary", TRAIN + " --dry-run --set head.draft_vocab=500", ["500", "128"]),
    Mistake("missing head", "eval {place}/nope --prompts {place}/good.jsonl --out {new}", ["nope is not a head"]),
    Mistake("another target", EVAL + " --target {place}/other", ["fingerprint", "--force"]),
    Mistake("missing target of eval", EVAL + " --target {place}/nope", ["nope"]),
    Mistake("missing prompts", EVAL + " --prompts {place}/nope.jsonl", ["nope.jsonl"]),
    Mistake("broken prompts", EVAL + " --prompts {place}/broken.jsonl", ["line 2"]),
    Mistake("unknown tree", EVAL + " --tree bush:3", ["bush:3", "chain:5"]),
    Mistake("broken tree", EVAL + " --tree chain:x", ["chain:x"]),
    Mistake("unknown setting of a tree", EVAL + " --tree dynamic:24,nodes=3", ["'nodes'", "depth, k, stop"]),
    Mistake("drawn dynamic tree", EVAL + " --tree dynamic:24 --sampled-drafts", ["dynamic:24", "--sampled-drafts"]),
    Mistake("greedy and drawn", EVAL + " --sampled-drafts", ["--sampled-drafts", "--temperature"]),
    Mistake("broken threshold", EVAL + " --temperature 1 --lossy-typical 0.1,x", ["--lossy-typical", "0.09,0.3"]),
    Mistake("greedy and lossy", EVAL + " --lossy-typical 0.09", ["--lossy-typical", "--temperature"]),
    Mistake("one prompt for a search", EVAL + " --tree search:9 --limit 1", ["search:9", "two prompts"]),
    Mistake("negative temperature", EVAL + " --temperature -1", ["temperature"]),
    Mistake("no top-p", EVAL + " --temperature 1 --top-p 0", ["top_p"]),
    Mistake("eval: output exists", EVAL + " --out {place}/taken", ["taken exists", "--force"]),
    Mistake("export: missing head", "export {place}/nope --to vllm --out {new}", ["nope is not a head"]),
    Mistake("export: unknown engine", EXPORT + " --to nope", ["nope", "vllm"]),
    Mistake("export: another target", EXPORT + " --target {place}/other", ["fingerprint"]),
    Mistake("export: draft length", EXPORT + " --draft-length 0", ["draft length of 0"]),
    Mistake("export: output exists", "export {place}/run/head --to vllm --out {place}/taken", ["taken exists", "--force"]),
    Mistake("synthesize: output exists", SYNTHESIZE + " --out {place}/taken", ["taken exists", "--force"]),
    Mistake(
        "synthesize: no chat template",
        "data synthesize --target {place}/untemplated --conversations 2 --out {new}",
        ["no chat template"],
    ),
    Mistake("unknown recipe", "recipes show nope", ["nope", "demo"]),
    Mistake("copy: unknown recipe", "recipes copy nope {new}", ["nope", "demo"]),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_gets_one_plain_sentence(mistake: Mistake, place: Path, tmp_path: Path):
    new = tmp_path / "new"
    done = draftsmith(*(part.format(place=place, new=new) for part in mistake.command.split()))
    assert done.code == 2, done.out + done.err
    assert done.out == ""
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and "Traceback" not in done.err
    assert done.err.rstrip().endswith((".", ")"))
    for words in mistake.says:
        assert words in done.err
    assert list((place / "taken").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.name != "new"] == []  # nothing is left beside the output


@pytest.mark.parametrize(
    "command",
    ["eval {place}/run/head", "eval --nope", "nope", "data synthesize --target x --out y --conversations 0", "heads --nope"],
)
def test_wrong_usage_exits_2(command: str, place: Path):
    done = draftsmith(*command.format(place=place).split())
    assert done.code == 2 and done.out == "" and "Error: " in done.err and "Traceback" not in done.err


def test_debug_shows_where_a_mistake_was_found(place: Path):
    done = draftsmith("train", place / "nope.yaml", "--debug")
    assert done.code == 2 and "Traceback" in done.err and done.err.splitlines()[-1].startswith("error: ")


def test_an_output_is_replaced_with_force_alone(place: Path, tmp_path: Path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine").write_text("mine")
    command = ["export", place / "run" / "head", "--to", "vllm", "--out", tmp_path / "old"]
    assert draftsmith(*command).code == 2 and (tmp_path / "old" / "mine").exists()
    assert draftsmith(*command, "--force").code == 0 and not (tmp_path / "old" / "mine").exists()


def test_a_copied_recipe_is_not_overwritten(tmp_path: Path):
    assert draftsmith("recipes", "copy", "demo", tmp_path).code == 0
    (tmp_path / "demo.yaml").write_text("mine")
    again = draftsmith("recipes", "copy", "demo", tmp_path)
    assert again.code == 2 and "demo.yaml exists" in again.err and (tmp_path / "demo.yaml").read_text() == "mine"


def test_the_working_directory_is_never_replaced(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    command = ["eval", place / "run" / "head", "--prompts", place / "good.jsonl", "--out", ".", "--force"]
    done = draftsmith(*command)
    assert done.code == 2 and "working directory" in done.err


def test_another_target_of_the_same_sizes_is_allowed_with_force(place: Path, tmp_path: Path):
    command = ["--prompts", place / "good.jsonl", "--target", place / "other", "--max-new-tokens", 4, "--tree", "chain:2"]
    assert draftsmith("eval", place / "run" / "head", *command, "--out", tmp_path / "eval", "--force").code == 0
