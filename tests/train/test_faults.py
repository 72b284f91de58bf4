"""What goes wrong in the middle of a run: what happens then is as docs/faults.md says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from workplace import build, command, curve, losses, on_cpu, recipe_in, same_weights, torchrun

from draftsmith.data.extract import extract
from draftsmith.data.features import FeatureBatch, OnlineFeatures
from draftsmith.data.tally import Tally
from draftsmith.errors import UserError
from draftsmith.heads.eagle3 import Eagle3Head
from draftsmith.target import Target
from draftsmith.train.loop import train
from draftsmith.train.prepare import prepare, read_examples, start

pytestmark = pytest.mark.usefixtures("one_thread")
FAULTS = Path(__file__).parent.parent / "faults_train.py"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_target) -> Path:
    return build(tmp_path_factory.mktemp("faulty"), tiny_target)


def blow_up(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Make the states of the first training batches finite and far too large: their loss is not finite."""
    read, left = OnlineFeatures.batch, [batches]

    def batch(source: OnlineFeatures, rows: list[int]) -> FeatureBatch:
        found = read(source, rows)
        if len(source.lengths) == 20 and left[0]:
            left[0] -= 1
            found.features.taps.fill_(3e38)
        return found

    monkeypatch.setattr(OnlineFeatures, "batch", batch)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_its_rows(workplace, monkeypatch):
    blow_up(monkeypatch, 1)
    with pytest.raises(UserError, match=r"step 1: its loss is not finite.*faults.jsonl.*train.nonfinite to skip"):
        train(recipe_in(workplace, "stops"))
    (fault,) = faults(workplace / "stops")
    assert fault["step"] == 1 and len(fault["rows"]) == 4
    lines = (workplace / "train.jsonl").read_text().splitlines()
    assert all(0 < int(place.rpartition(":")[2]) <= len(lines) and "train.jsonl:" in place for place in fault["from"])


def faults(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]


def test_a_loss_that_is_not_finite_may_be_skipped(workplace, monkeypatch):
    """The step changes nothing, and the others go on; the schedule goes on too."""
    blow_up(monkeypatch, 2)
    recipe = recipe_in(workplace, "skips", "train.nonfinite=skip", "train.checkpoint_every=1", "train.keep_checkpoints=10")
    result = train(recipe)
    assert [fault["step"] for fault in faults(workplace / "skips")] == [1, 2]
    heads = [load_file(workplace / "skips" / "checkpoints" / f"step-{i}" / "head" / "model.safetensors") for i in (1, 2, 3)]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert any(not torch.equal(heads[1][name], heads[2][name]) for name in heads[0])
    rows = curve(workplace / "skips")
    assert [row.get("skipped_steps") for row in rows[:3]] == [1, 1, None] and rows[-1]["lr"] == pytest.approx(1e-3)
    assert all(tensor.isfinite().all() for tensor in heads[2].values()) and result["steps"] == 10


def test_skipping_ends_where_every_step_is_spoilt(workplace, monkeypatch):
    blow_up(monkeypatch, 100)
    with pytest.raises(UserError, match="step 10: .* as in the 9 steps before"):
        train(recipe_in(workplace, "hopeless", "train.nonfinite=skip", "train.epochs=5"))


@pytest.fixture(scope="module")
def overflowing(workplace, tiny_target) -> Path:
    """A target that overflows at the letter z, which one row of overflow.jsonl has."""
    config = LlamaConfig(**tiny_target.config.to_dict())
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    (letter,) = tiny_target.tokenizer("z", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.model.embed_tokens.weight[letter] = float("inf")
    model.save_pretrained(workplace / "overflows")
    tiny_target.tokenizer.save_pretrained(workplace / "overflows")
    rows = (workplace / "train.jsonl").read_text().splitlines()
    bad = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a zoo"}]}
    (workplace / "overflow.jsonl").write_text("\n".join([*rows[:7], json.dumps(bad), *rows[7:]]) + "\n")
    return workplace / "overflows"


@pytest.mark.parametrize("features", ["online", "memory", "write-through"])
def test_a_row_at_which_the_target_overflows_is_left_out_and_named(workplace, overflowing, features, capsys):
    """One bad row, packed beside sound ones too: it teaches nothing and spoils nothing."""
    changes = [f"target.name={overflowing}", "data.train=overflow.jsonl", "data.pack=true", f"data.features={features}"]
    changes += [f"data.store={workplace}/overflow-store", "data.store_dtype=float32"]
    train(recipe_in(workplace, f"left-out-{features}", *changes))
    said = capsys.readouterr().err
    assert said.count("left out: the states of row 7") == 1
    rows = curve(workplace / f"left-out-{features}")
    assert rows[-1]["damaged_rows"] == 1 and all(row["loss"] < 10 for row in rows)
    with pytest.raises(UserError, match="the states of row 7"):
        train(recipe_in(workplace, "strict", *changes, "data.strict=true"), force=True)


def start_fault(name: str, recipe: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(FAULTS), name, str(recipe)], env=on_cpu(), capture_output=True, text=True, timeout=300
    )


def written(workplace: Path, out: str, *changes: str) -> Path:
    """The recipe with the changes, as a file."""
    place = workplace / f"{out}.yaml"
    recipe = recipe_in(workplace, out, *changes)
    place.write_text(recipe.to_yaml())
    return place


def test_training_goes_on_while_the_disk_is_full(workplace):
    """No file grows between the checkpoint of step 2 and step 6: a checkpoint comes again once there is room."""
    recipe = written(workplace, "full", "train.checkpoint_every=2", "train.keep_checkpoints=9", "train.eval_every=100")
    done = start_fault("full_disk", recipe)
    assert done.returncode == 0, done.stderr
    assert "WARNING: no checkpoint of step 4 could be written" in done.stderr
    steps = {int(path.name.removeprefix("step-")) for path in (workplace / "full" / "checkpoints").iterdir()}
    assert 2 in steps and 4 not in steps and {8, 10} <= steps, "the old one stayed, and later ones came"
    train(recipe_in(workplace, "calm-disk", "train.checkpoint_every=10", "train.eval_every=100"))
    last = Path("checkpoints") / "step-10" / "head"
    assert same_weights(workplace / "full" / last, workplace / "calm-disk" / last), "no step was lost"


def test_running_out_of_memory_names_the_batch_and_the_keys(workplace, tiny_target):
    torch.manual_seed(0)
    config = LlamaConfig(**{**tiny_target.config.to_dict(), "vocab_size": 65536})
    LlamaForCausalLM(config).float().save_pretrained(workplace / "wide")
    tiny_target.tokenizer.save_pretrained(workplace / "wide")
    done = start_fault("little_memory", written(workplace, "little", f"target.name={workplace}/wide", "head.draft_vocab=null"))
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()[-1]
    assert (
        "memory ran out at a batch of 4 lines x " in said and "train.micro_batch_size (4)" in said and "Traceback" not in said
    )


@pytest.mark.slow
def test_the_others_end_when_a_process_dies(workplace):
    """Two processes, one of them killed: the other does not wait for it, and says why."""
    changes = ["train.max_steps=100000", "train.eval_every=100000"]
    launched = subprocess.Popen(
        command(workplace, torchrun(2), "bereaved", *changes), env=on_cpu(), text=True, stderr=subprocess.PIPE
    )
    metrics = workplace / "bereaved" / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 4:
        assert launched.poll() is None
        time.sleep(0.05)
    workers = [child for child in psutil.Process(launched.pid).children() if "draftsmith.train" in " ".join(child.cmdline())]
    assert len(workers) == 2
    rank_1 = next(worker for worker in workers if worker.environ()["RANK"] == "1")
    os.kill(rank_1.pid, signal.SIGKILL)
    _, said = launched.communicate(timeout=120)
    assert launched.returncode != 0 and not any(worker.is_running() for worker in workers)
    assert "process 0 lost another one" in said and "--resume" in said


def test_a_shard_that_vanishes_is_named_or_left_out(workplace, tiny_target, capsys):
    """Gone before the run: it is refused. Deleted under a run: its bytes stay. Cut under a run: its rows are left out."""
    target = Target.load(str(workplace / "target"), "float32")
    recipe = recipe_in(workplace, "unused")
    examples = read_examples(recipe, "train", target, Tally())
    place = workplace / "store"
    changes = ["data.features=store", f"data.store={place}"]
    extract(target, examples, Eagle3Head.default_taps(target), place, "float32", shard_bytes=100_000)
    shards = sorted(place.glob("*.safetensors"))
    assert len(shards) > 2
    stored = recipe_in(workplace, "shards", *changes)
    run = prepare(stored, start(stored), workplace / "shards")
    shards[0].unlink()
    with open(shards[1], "r+b") as file:
        file.truncate(1000)
    for step in range(1, 6):
        assert run.advance(step, run.global_batch(step - 1)).loss.isfinite().all()
    assert run.train.lost > 0 and "was cut while it was read" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"{shards[0].name} is missing|{shards[1].name} "):
        train(recipe_in(workplace, "never", *changes))


def test_losses_are_told_apart_from_faults(workplace):
    """A sound run writes no faults.jsonl."""
    train(recipe_in(workplace, "sound"))
    assert not (workplace / "sound" / "faults.jsonl").exists() and losses(workplace / "sound")
