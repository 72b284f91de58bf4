"""Grids of measurements: what is measured, what is kept, and that a killed sweep ends as an undisturbed one does."""

import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from killing import draftsmith, kill_until_done, kill_when

from draftsmith.cli_eval import of_every_category
from draftsmith.data.extract import alone
from draftsmith.eval.cells import read_cell
from draftsmith.eval.fingerprint import digest, of_head
from draftsmith.eval.grid import Cell, Grid
from draftsmith.eval.prompts import Prompt, read_prompts
from draftsmith.eval.registry import read_head
from draftsmith.eval.sweep import Rig, fingerprints
from draftsmith.eval.typical import Typical
from draftsmith.heads.kinds import load_head
from draftsmith.heads.medusa import MedusaHead
from draftsmith.target import Target

TIMED = (
    "ttft tpot tokens_per_s baseline_tokens_per_s speedup speedup_interval time peak_memory gpu_utilization seconds "
    "plain_seconds"
).split()


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def results(self) -> list[dict[str, Any]]:
        return json.loads(self.out)["results"]


def run(*arguments: object) -> Outcome:
    """``draftsmith eval ARGUMENTS`` in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", sys.argv), redirect_stdout(out), redirect_stderr(err):
        try:
            draftsmith("eval", *arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
    return Outcome(code, out.getvalue(), err.getvalue())


def untimed(found: Any) -> Any:
    """A report without what a clock or a meter said."""
    if isinstance(found, dict):
        return {key: untimed(value) for key, value in found.items() if key not in TIMED}
    return [untimed(value) for value in found] if isinstance(found, list) else found


def report(out: Path) -> Any:
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def cells(folder: Path) -> dict[str, tuple[int, int]]:
    """The finished cells of a folder, each with what would change if it were written again."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in (folder / "cells").glob("*.json")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_tokenizer_factory: Callable[..., Any]) -> Path:
    """A folder with a target, a head, prompts, and one prompt that is too long for the target."""
    place = tmp_path_factory.mktemp("sweep")
    tiny_target.model.save_pretrained(place / "target")
    tiny_tokenizer_factory().save_pretrained(place / "target")
    target = Target.load(str(place / "target"), "float32")
    torch.manual_seed(0)
    head = MedusaHead.create(target, MedusaHead.Options(), None, 2, torch.arange(40))
    (place / "head").mkdir()
    head.save(place / "head")
    for name, words in {"few": ["one", "two", "red"], "other": ["sea", "sun"], "long": ["x" * 80]}.items():
        rows = [{"messages": [{"role": "user", "content": f"say {word}"}]} for word in words]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def command(place: Path, out: Path, *options: object) -> list[object]:
    shared = ["--prompts", place / "few.jsonl", "--tree", "chain:2", "--max-new-tokens", 6, "--baseline", 1]
    return [place / "head", "ngram:3", *shared, *options, "--out", out]


@pytest.fixture(scope="module")
def measured(place: Path) -> Path:
    """A report of four cells: a head and a look-up, greedy and sampled."""
    out = place / "measured"
    done = run(*command(place, out, "--temperature", "0,1"))
    assert done.code == 0, done.err
    return out


# -- killed and started again ----------------------------------------------------------------------------------------------


def test_a_killed_sweep_goes_on_where_it_stopped(place: Path, tmp_path: Path):
    options = ["--temperature", "0,1", "--batch", "1,2", "--tree", "tree:2x1", "--force"]
    job = partial(draftsmith, "eval", *command(place, tmp_path / "killed", *options))
    kept: dict[str, tuple[int, int]] = {}
    unfinished = tmp_path / "killed.partial"
    for count in (1, 4, 8):
        assert kill_when(job, lambda count=count: len(cells(unfinished)) >= count)
        now = cells(unfinished)
        assert kept.items() <= now.items()  # nothing was written again
        assert all(read_cell(unfinished / "cells" / name) for name in now)
        kept = now
    assert not (tmp_path / "killed").exists()
    kill_until_done(job, kills=3, seed=1, longest=1.0)
    assert kept.items() <= cells(tmp_path / "killed").items()
    assert not unfinished.exists() and not list((tmp_path / "killed" / "cells").glob(".*"))
    kill_until_done(partial(draftsmith, "eval", *command(place, tmp_path / "whole", *options)), kills=0, seed=0)
    assert untimed(report(tmp_path / "killed")) == untimed(report(tmp_path / "whole"))
    assert len(report(tmp_path / "whole")["results"]) == 12
    assert cells(tmp_path / "killed").keys() == cells(tmp_path / "whole").keys()


def test_ctrl_c_says_how_to_go_on(place: Path, tmp_path: Path):
    arguments = command(place, tmp_path / "out", "--temperature", "0,0.5,1", "--batch", "1,2", "--tree", "tree:2x1")

    def interrupt() -> None:
        while not cells(tmp_path / "out.partial"):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    stopped = run(*arguments)
    assert stopped.code == 130 and "Traceback" not in stopped.err
    kept = cells(tmp_path / "out.partial")
    assert f"{len(kept)} finished" in stopped.err and "the same command" in stopped.err
    assert 1 <= len(kept) < 18 and not (tmp_path / "out").exists()
    assert run(*arguments).code == 0
    assert kept.items() <= cells(tmp_path / "out").items()


def test_two_sweeps_do_not_share_an_output(place: Path, tmp_path: Path):
    with alone(tmp_path / "out"):
        done = run(*command(place, tmp_path / "out"))
    assert done.code == 2 and "another process" in done.err
    assert list(tmp_path.iterdir()) == []


# -- what is measured again ------------------------------------------------------------------------------------------------


def test_a_grown_and_reordered_grid_measures_what_is_new(place: Path, measured: Path, tmp_path: Path):
    out = tmp_path / "grown"
    shutil.copytree(measured, out)
    assert run(*command(place, out)).code == 2  # it exists
    (damaged, *_), before = sorted((out / "cells").glob("*.json")), report(out)["results"]
    damaged.write_text(damaged.read_text()[:-100])
    grown = run(*command(place, out, "--temperature", "1,0.5,0", "--force", "--json"))
    assert grown.code == 0, grown.err
    old = {file.name: file.read_text() for file in (measured / "cells").glob("*.json") if file.name != damaged.name}
    new = {file.name: file.read_text() for file in (out / "cells").glob("*.json")}
    assert old.items() <= new.items() and len(new) == 6
    assert [result["temperature"] for result in grown.results] == [1, 0.5, 0] * 2
    assert grown.results == report(out)["results"]
    again = {json.dumps(untimed(result)) for result in grown.results}
    assert {json.dumps(untimed(result)) for result in before} < again


@pytest.fixture
def rig(place: Path) -> Rig:
    target, head = Target.load(str(place / "target"), "float32"), load_head(place / "head")
    return Rig(target, {"head": head}, {"few": read_prompts(place / "few.jsonl")}, 6)


CELL = Cell("head", "few", "chain:2", False, 1.0, 1.0, 0, 1)


def fingerprint(rig: Rig, cell: Cell) -> str:
    return digest(fingerprints(rig, [cell])[0])


@torch.no_grad()
def nudge(model: torch.nn.Module) -> None:
    next(model.parameters()).view(-1)[0] += 1e-3


def more(prompt: Prompt) -> Prompt:
    return replace(prompt, messages=[{"role": "user", "content": "say more"}])


@pytest.mark.parametrize(
    "change",
    [
        lambda rig, cell: (nudge(rig.heads["head"]), (rig, cell))[1],
        lambda rig, cell: (nudge(rig.target.model), (rig, cell))[1],
        lambda rig, cell: (rig.heads["head"].target_ids.add_(1), (rig, cell))[1],
        lambda rig, cell: (setattr(rig.target.tokenizer, "chat_template", "{{ messages }}"), (rig, cell))[1],
        lambda rig, cell: (replace(rig, target=Target(rig.target.model.half(), rig.target.tokenizer, "t")), cell),
        lambda rig, cell: (replace(rig, prompts={"few": rig.prompts["few"][:2]}), cell),
        lambda rig, cell: (replace(rig, prompts={"few": rig.prompts["few"][::-1]}), cell),
        lambda rig, cell: (replace(rig, prompts={"few": [more(each) for each in rig.prompts["few"]]}), cell),
        lambda rig, cell: (replace(rig, prompts={"few": [replace(each, stop=("\n",)) for each in rig.prompts["few"]]}), cell),
        lambda rig, cell: (replace(rig, max_new=7), cell),
        lambda rig, cell: (replace(rig, baseline=1), cell),
        lambda rig, cell: (replace(rig, seed=1), cell),
        lambda rig, cell: (replace(rig, typical=Typical(0.1, 0.3)), cell),
        lambda rig, cell: (rig, replace(cell, tree="chain:1")),
        lambda rig, cell: (rig, replace(cell, sampled_drafts=True)),
        lambda rig, cell: (rig, replace(cell, temperature=0.9)),
        lambda rig, cell: (rig, replace(cell, top_p=0.9)),
        lambda rig, cell: (rig, replace(cell, top_k=5)),
        lambda rig, cell: (rig, replace(cell, batch=2)),
        lambda rig, cell: (rig, replace(cell, proposer="ngram:3", tree=None)),
    ],
    ids=(
        "head-weights target-weights draft-vocabulary template dtype fewer-prompts order-of-prompts prompts stops length "
        "baseline seed typical tree drawn temperature top-p top-k batch proposer"
    ).split(),
)
def test_whatever_goes_in_counts(rig: Rig, change: Callable[[Rig, Cell], tuple[Rig, Cell]]):
    before = fingerprint(rig, CELL)
    assert fingerprint(rig, CELL) == before
    assert fingerprint(*change(rig, CELL)) != before


def test_threads_count(rig: Rig):
    before, threads = fingerprint(rig, CELL), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert fingerprint(rig, CELL) != before
    finally:
        torch.set_num_threads(threads)


def test_names_and_places_do_not_count(rig: Rig, place: Path, tmp_path: Path):
    shutil.copytree(place / "target", tmp_path / "moved")
    moved = Rig(
        Target.load(str(tmp_path / "moved"), "float32"),
        {"copy": load_head(place / "head")},
        {"copied": read_prompts(place / "few.jsonl")},
        6,
    )
    renamed = replace(CELL, proposer="copy", prompts="copied", tree="chain:2")
    assert fingerprint(moved, renamed) == fingerprint(rig, CELL)
    models = [
        of_head(read_head(f"model:{folder / name}", rig.target)) for folder, name in ((place, "target"), (tmp_path, "moved"))
    ]
    assert models[0] == models[1] != of_head(rig.heads["head"])


# -- the grid --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "count"),
    [
        (Grid(), 2),
        (Grid(tree=("chain:2", "chain:3")), 3),  # two of the head, one of the look-up
        (Grid(temperature=(0.0, 1.0), top_p=(1.0, 0.9)), 6),  # the cut does nothing to greedy decoding
        (Grid(tree=("chain:2", "chain:3"), temperature=(0.0, 1.0), batch=(1, 2, 4)), 18),
    ],
)
def test_the_grid_is_the_product_of_what_makes_sense(grid: Grid, count: int):
    found = grid.cells(["head", "ngram"], {"head"}, ["few"])
    assert len(found) == len(set(found)) == count
    assert [cell for cell in found if cell.proposer == "ngram" and cell.tree] == []
    assert len(grid.cells(["head", "ngram"], {"head"}, ["few", "other"])) == 2 * count


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--temperature", "0,1", "--sampled-drafts"], ["--sampled-drafts", "--temperature"]),
        (["--temperature", "1", "--tree", "dynamic:6", "--sampled-drafts"], ["dynamic:6", "--sampled-drafts"]),
        (["--tree", "chain:3"], ["chain:3", "2 depths"]),
        (["--tree", "search:6", "--prompts", "{place}/long.jsonl"], ["search:6", "two prompts"]),
        (["--temperature", "0,warm"], ["--temperature 0,warm"]),
        (["--temperature", "1", "--top-p", "0.9,2"], ["top_p"]),
        (["--batch", "0"], ["--batch 0"]),
        (["--protocol", "dspark"], ["--protocol", "--prompts"]),
        (["--target", "{place}/nowhere"], ["nowhere"]),
    ],
    ids=["greedy-drawn", "dynamic-drawn", "too-deep", "search", "temperature", "top-p", "batch", "protocol", "target"],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(
    place: Path, tmp_path: Path, options: Sequence[str], says: list[str]
):
    done = run(*command(place, tmp_path / "out", *(each.format(place=place) for each in options)))
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1, done.err
    for words in says:
        assert words in done.err
    assert list(tmp_path.iterdir()) == []


def test_look_ups_alone_need_a_target(place: Path, tmp_path: Path):
    arguments = ["ngram:3", "suffix:4", "--prompts", place / "few.jsonl", "--max-new-tokens", 4, "--baseline", 0]
    done = run(*arguments, "--out", tmp_path / "out")
    assert done.code == 2 and "--target" in done.err
    done = run(*arguments, "--target", place / "target", "--tree", "chain:2", "--out", tmp_path / "out")
    assert done.code == 2 and "--tree" in done.err
    done = run(*arguments, "--target", place / "target", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert [result["proposer"] for result in done.results] == ["ngram", "suffix"]
    assert [result["cell"]["proposer"] for result in done.results] == ["ngram:3", "suffix:4"]


# -- what fails ------------------------------------------------------------------------------------------------------------


def test_a_cell_that_fails_is_named_and_the_others_go_on(place: Path, tmp_path: Path):
    done = run(*command(place, tmp_path / "out", "--prompts", place / "long.jsonl", "--json"))
    assert done.code == 1
    assert done.err.count("failed: ") == 2 and "shorten it" in done.err
    assert [result["cell"]["prompts"] for result in done.results] == [str(place / "few.jsonl")] * 2
    failed = report(tmp_path / "out")["about"]["failed"]
    assert failed == json.loads(done.out)["failed"]
    assert [(cell["proposer"], cell["prompts"]) for cell in failed] == [
        (proposer, str(place / "long.jsonl")) for proposer in (str(place / "head"), "ngram:3")
    ]
    assert "shorten it" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert len(cells(tmp_path / "out")) == 2  # what failed is tried again


def test_where_everything_fails_there_is_no_report(place: Path, tmp_path: Path):
    done = run("ngram:3", "--target", place / "target", "--prompts", place / "long.jsonl", "--out", tmp_path / "out")
    assert done.code == 2 and "shorten it" in done.err and done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# -- protocols -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def protocol(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A protocol of one task, greedy and at temperature 1, with drafts that are drawn."""
    (tmp_path / "task.yaml").write_text(f"about: a task\nsources: [{{file: {place / 'few.jsonl'}}}]\nmax_new: 9\n")
    (tmp_path / "ours.yaml").write_text(
        f"about: a protocol\ntasks: [{{task: {tmp_path / 'task.yaml'}, count: 3}}]\ntemperature: [0, 1]\nmax_new: 5\n"
        "dtype: float32\nforms: ['chain:2']\nsampled_drafts: true\ntau: pooled\n"
    )
    return tmp_path / "ours.yaml"


def test_a_protocol_sets_everything_and_says_when_it_was_changed(protocol: Path, place: Path, tmp_path: Path):
    done = run(place / "head", "--protocol", protocol, "--baseline", 0, "--out", tmp_path / "a", "--json")
    assert done.code == 0, done.err
    found = [(each["temperature"], each["draft"]["sampled"], each["prompts"]) for each in done.results]
    assert found == [(0, False, 3), (1, True, 3)]
    assert max(len(each["per_prompt"]) for each in done.results) == 3
    assert all(each["emitted_tokens"] <= 3 * 5 for each in done.results)
    assert report(tmp_path / "a")["about"]["protocol"]["changed"] == [] and "WARNING" not in done.err
    done = run(place / "head", "--protocol", protocol, "--limit", 1, "--temperature", 0, "--out", tmp_path / "b", "--json")
    assert done.code == 0, done.err
    assert report(tmp_path / "b")["about"]["protocol"]["changed"] == ["temperature", "limit"]
    assert "--temperature, --limit" in done.err and "no longer the protocol" in done.err


# -- the command -----------------------------------------------------------------------------------------------------------


def test_the_help_is_that_of_measuring():
    done = run("--help")
    assert done.code == 0 and "--temperature" in done.out and "draftsmith eval [OPTIONS] {proposers}" in done.out


def test_a_sample_has_prompts_of_every_category() -> None:
    asked = [Prompt([{"role": "user", "content": str(i)}], "abb"[i % 3], id=str(i)) for i in range(9)]
    assert [prompt.id for prompt in of_every_category(asked, 2)] == ["0", "1", "2", "3"]
    assert of_every_category(asked, 9) == asked
