"""A run that is killed, stopped or starts from a damaged checkpoint ends as one that was left alone."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from killing import draftsmith, kill_until_done, kill_when
from safetensors.torch import load_file
from workplace import PLAIN, build, command, curve, finished, launch, losses, on_cpu, recipe_in, same_weights, torchrun

from draftsmith.errors import UserError
from draftsmith.outputs import put_in_place, restore
from draftsmith.recipes.schema import Recipe, load_recipe
from draftsmith.train.changes import FIXED
from draftsmith.train.checkpoints import newest
from draftsmith.train.loop import train
from draftsmith.train.prepare import rate

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_STEP = ["train.checkpoint_every=1"]


def forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_target) -> Path:
    return build(tmp_path_factory.mktemp("resumed"), tiny_target)


@pytest.fixture(scope="module")
def undisturbed(workplace) -> Path:
    """The run all others must end as."""
    train(recipe_in(workplace, "undisturbed", *EVERY_STEP))
    forget()
    return workplace / "undisturbed"


def job(workplace: Path, out: str) -> partial:
    """``draftsmith train --resume``, the one command that a scheduler starts again and again."""
    sets = [f"--set={change}" for change in (f"output={workplace}/{out}", *EVERY_STEP)]
    return partial(draftsmith, "train", workplace / "recipe.yaml", *sets, "--resume")


def ended_alike(run: Path, other: Path) -> bool:
    last = Path("checkpoints") / "step-10" / "head"
    assert curve(run) == curve(other) and curve(run, "held_out") == curve(other, "held_out")
    return same_weights(run / last, other / last) and same_weights(run / "head", other / "head")


def test_a_run_killed_at_any_moment_ends_with_the_same_bits(workplace, undisturbed):
    """Killed six times, a random while after a step was logged, and started again each time."""
    draw, run = random.Random(0), workplace / "killed"
    hits = 0
    for after in (0, 1, 3, 5, 6, 8):
        wanted, pause = after, draw.uniform(0, 0.1)
        hits += kill_when(job(workplace, run.name), lambda wanted=wanted, pause=pause: logged(run) > wanted and waited(pause))
    assert kill_until_done(job(workplace, run.name), kills=0, seed=0) == 0
    assert hits >= 4 and ended_alike(run, undisturbed)


def logged(run: Path) -> int:
    """How many lines metrics.jsonl has."""
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:  # not there yet, or just taken away by a start that begins anew
        return 0


def waited(seconds: float) -> bool:
    time.sleep(seconds)
    return True


@pytest.mark.parametrize("moment", ["checkpoints/.step-[3-9]", "checkpoints/step-7", "head"])
def test_a_run_killed_while_it_writes_ends_with_the_same_bits(workplace, undisturbed, moment):
    """In the middle of a checkpoint, just behind one, and just behind the first best head, before any checkpoint."""
    out = f"at-{Path(moment).name}"
    assert kill_when(job(workplace, out), lambda: any((workplace / out).glob(moment)))
    job_ended = kill_until_done(job(workplace, out), kills=0, seed=0)
    assert job_ended == 0 and ended_alike(workplace / out, undisturbed)
    left = [*(workplace / out).glob(".head*"), *(workplace / out / "checkpoints").glob(".*")]
    assert not left, "what the kill left is gone"


@pytest.mark.slow
@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_ends_with_the_same_bits(workplace, undisturbed, name):
    """Told to stop after a few steps, again and again, until it is done."""
    run, statuses = workplace / name.name, [75]
    full = [*command(workplace, PLAIN, run.name, "train.checkpoint_every=100"), "--resume"]
    while statuses[-1] == 75:
        before = logged(run)
        process = subprocess.Popen(full, env=on_cpu(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while process.poll() is None and logged(run) < before + 4:
            time.sleep(0.005)
        process.send_signal(name)
        said, warned = process.communicate(timeout=120)
        statuses.append(process.returncode)
        if process.returncode == 75:
            assert f"stopped by {name.name} after step" in said and f"a second {name.name} stops at once" in warned
            newest_step = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
            assert newest_step == curve(run)[-1]["step"], "the checkpoint is of the last step"
    assert statuses[-1] == 0 and len(statuses) > 3, statuses
    assert curve(run) == curve(undisturbed) and same_weights(run / "head", undisturbed / "head")


def test_a_second_signal_stops_at_once(workplace):
    full = command(workplace, PLAIN, "twice", "train.max_steps=100000")
    process = subprocess.Popen(full, env=on_cpu(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while logged(workplace / "twice") < 3:
        time.sleep(0.005)
    process.send_signal(signal.SIGSTOP)  # so that both come within one step
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    while process.stderr is not None and "finishing this step" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode in (-signal.SIGTERM, 75), "75 where the step was over before the second one came"


@pytest.mark.parametrize("moment", ["preparing", "the first evaluation", "a later evaluation"])
def test_a_signal_outside_of_a_step_stops_there(workplace, undisturbed, moment, monkeypatch):
    """Nothing is lost by it: the run goes on to the same bits."""
    run = workplace / moment.replace(" ", "-")

    def told(*_: object) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return 0.0

    if moment == "preparing":
        monkeypatch.setattr("draftsmith.train.loop.prepare", told)
        with pytest.raises(SystemExit) as stopped:
            train(recipe_in(workplace, run.name, *EVERY_STEP))
        assert stopped.value.code == 75 and not run.exists()
        monkeypatch.undo()
    else:
        first = moment == "the first evaluation"
        scores = iter([told] if first else [lambda *_: 1.0, told])
        changes = ["train.checkpoint_every=100"]
        result = train(recipe_in(workplace, run.name, *changes), score=lambda *each: next(scores)(*each))
        assert result["stopped"] == "SIGTERM" and result["steps"] == (0 if first else 5)
        assert not any(row["step"] == result["steps"] for row in curve(run, "held_out"))
    forget()
    train(recipe_in(workplace, run.name, *EVERY_STEP), resume=True)
    last = Path("checkpoints") / "step-10" / "head"
    assert same_weights(run / last, undisturbed / last)
    assert [row["step"] for row in curve(run, "held_out")] == [0, 5, 10]


def spoil_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


SPOILT = {
    "a byte of the head": lambda step: spoil_byte(step / "head" / "model.safetensors"),
    "a byte of the optimizer": lambda step: spoil_byte(step / "optimizer.bin"),
    "half a file": lambda step: os.truncate(step / "optimizer.bin", 100),
    "no random states": lambda step: (step / "random_states_0.pkl").unlink(),
    "no progress": lambda step: (step / "progress.json").unlink(),
    "half a progress": lambda step: os.truncate(step / "progress.json", 30),
}


@pytest.mark.parametrize("damage", SPOILT)
def test_a_damaged_checkpoint_is_passed_over(workplace, undisturbed, damage, capsys):
    run = workplace / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(undisturbed, run)
    SPOILT[damage](run / "checkpoints" / "step-10")
    train(recipe_in(workplace, run.name, *EVERY_STEP), resume=True)
    warned = capsys.readouterr().err
    assert "step-10 is not whole" in warned and "going on from" in warned and "step-9" in warned
    assert ended_alike(run, undisturbed)


def test_a_run_with_damaged_checkpoints_alone_is_refused(workplace, undisturbed):
    run = workplace / "all-damaged"
    shutil.copytree(undisturbed, run)
    for step in (run / "checkpoints").iterdir():
        (step / "optimizer.bin").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        train(recipe_in(workplace, run.name, *EVERY_STEP), resume=True)


def test_the_last_and_the_best_checkpoints_stay(workplace):
    scores = iter([1.0, 3.0, 2.0])
    changes = [*EVERY_STEP, "train.keep_checkpoints=2"]
    train(recipe_in(workplace, "kept", *changes), score=lambda target, head: next(scores))
    kept = {path.name for path in (workplace / "kept" / "checkpoints").iterdir()}
    assert kept == {"step-5", "step-9", "step-10"}, "evaluated at 0, 5 and 10: 5 was the best"
    best = workplace / "kept" / "checkpoints" / "step-5" / "head"
    assert same_weights(best, workplace / "kept" / "head"), "a checkpoint's head is a head's directory"


def test_resuming_what_was_never_started_starts_it(workplace, undisturbed):
    train(recipe_in(workplace, "first", *EVERY_STEP), resume=True)
    assert ended_alike(workplace / "first", undisturbed)


def test_resuming_does_not_start_over_what_is_no_killed_run(workplace):
    for name, inside in (("foreign", "notes.txt"), ("finished", "head")):
        (workplace / name / inside).mkdir(parents=True)
        with pytest.raises(UserError, match="holds no checkpoint"):
            train(recipe_in(workplace, name, *EVERY_STEP), resume=True)
        assert (workplace / name / inside).is_dir()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("head.confidence=true", "head.confidence (False before, True now)"),
        ("head.options={layers: 2}", "head.options"),
        ("train.lr=1.0e-4", "train.lr (0.01 before, 0.0001 now)"),
        ("train.seed=1", "train.seed (0 before, 1 now)"),
        ("train.batch_size=2", "train.batch_size (4 before, 2 now)"),
        ("data.train=other.jsonl", "data.train"),
    ],
)
def test_what_a_checkpoint_hangs_on_may_not_change(workplace, undisturbed, change, said):
    with pytest.raises(UserError) as refused:
        train(recipe_in(workplace, "undisturbed", *EVERY_STEP, change, "train.log_every=2"), resume=True)
    assert said in str(refused.value) and "What may change: target.*, objective.*, eval.*" in str(refused.value)


def test_all_else_may_change_and_is_named(workplace, undisturbed, capsys):
    run = workplace / "changed"
    shutil.copytree(undisturbed, run)
    changes = ["train.micro_batch_size=2", "train.max_steps=12", "objective.loss=kl", "train.tracker=tensorboard"]
    train(recipe_in(workplace, run.name, *EVERY_STEP, *changes), resume=True)
    said = capsys.readouterr().err
    assert all(f"changed: {change.partition('=')[0]} (" in said for change in changes)
    assert [row["step"] for row in curve(run)] == list(range(1, 13))


def test_every_fixed_key_is_a_key_of_the_recipe():
    recipe = load_recipe("demo")
    for section, keys in FIXED.items():
        assert set(keys) <= set(type(getattr(recipe, section)).model_fields), section
    assert set(FIXED) == set(Recipe.model_fields) - {"output"}


def test_case_10_a_longer_text_limit_keeps_the_draft_vocabulary(workplace, undisturbed):
    run = workplace / "longer"
    shutil.copytree(undisturbed, run)
    tau = curve(run, "held_out")[-1]["tau_sim"]
    train(recipe_in(workplace, run.name, *EVERY_STEP, "data.max_length=64", "train.max_steps=11"), resume=True)
    checkpoint = newest(run / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 11
    one, other = (load / "head" / "model.safetensors" for load in (checkpoint.path, undisturbed / "checkpoints" / "step-10"))
    assert torch.equal(ids(one), ids(other))
    before = [row["tau_sim"] for row in curve(run, "held_out") if row["step"] == 10]
    assert before == [tau], "the first evaluation after the change would be the last one before it"


def ids(file: Path) -> torch.Tensor:
    return load_file(file)["target_ids"]


def test_another_number_of_processes_goes_on_with_the_same_rows(workplace, undisturbed):
    run = workplace / "widened"
    train(recipe_in(workplace, run.name, "train.max_steps=10", "train.checkpoint_every=4", "train.keep_checkpoints=3"))
    shutil.rmtree(run / "checkpoints" / "step-8")
    said = finished([*command(workplace, torchrun(2), run.name, "train.max_steps=10"), "--resume"])
    assert "written by 1 processes, this run has 2" in said
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-4)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_case_23_a_resumed_run_is_the_unbroken_one(workplace, precision):
    """Saved after the second step of the second pass of three, warm-up over: order, rate, losses and weights to the bit."""
    changes = ["train.epochs=3", "train.warmup=0.13", "train.checkpoint_every=7", f'train.precision="{precision}"']
    whole, run = workplace / f"whole-{precision}", workplace / f"resumed-{precision}"
    train(recipe_in(workplace, whole.name, *changes))
    forget()
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-14")
    torch.manual_seed(99)
    train(recipe_in(workplace, run.name, *changes), resume=True)
    assert curve(run) == curve(whole) and curve(run)[6]["lr"] == 1e-2 * rate(6, recipe_in(workplace, "unused", *changes), 15)
    last = Path("checkpoints") / "step-14"
    assert same_weights(run / last / "head", whole / last / "head")
    one, other = (torch.load(each / last / "optimizer.bin", weights_only=False)["state"] for each in (run, whole))
    for name, held in one.items():
        assert held["exp_avg"].dtype == torch.float32, "as it is held, not in the precision of the arithmetic"
        assert torch.equal(held["exp_avg"], other[name]["exp_avg"])


@pytest.mark.slow
def test_two_processes_killed_and_resumed_end_with_the_same_bits(workplace):
    """SIGKILL to all processes of a launch, in the middle; then the same launch again."""
    full = [*command(workplace, torchrun(2), "pair", *EVERY_STEP), "--resume"]
    run, statuses = workplace / "pair", []
    for after in (2, 6, 100):
        process = subprocess.Popen(full, env=on_cpu(), start_new_session=True, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and logged(run) < after:
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            for left in [each for each in psutil.process_iter(["cmdline"]) if str(run) in " ".join(each.info["cmdline"] or [])]:
                left.kill()
        process.communicate(timeout=120)
        statuses.append(process.returncode)
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0]
    launch(workplace, torchrun(2), "calm-pair", *EVERY_STEP)
    assert ended_alike(run, workplace / "calm-pair")


def test_a_directory_that_a_kill_left_without_its_name_gets_it_back(tmp_path):
    for name in ("head", ".head.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    (tmp_path / "head").rename(tmp_path / ".head.old")  # where put_in_place may be killed
    restore(tmp_path / "head")
    assert (tmp_path / "head" / "which").read_text() == "head"
    put_in_place(tmp_path / ".head.new", tmp_path / "head")
    restore(tmp_path / "head")
    assert (tmp_path / "head" / "which").read_text() == ".head.new" and len(list(tmp_path.iterdir())) == 1


def test_metrics_are_cut_back_to_the_checkpoint(workplace, undisturbed):
    run = workplace / "torn"
    shutil.copytree(undisturbed, run)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"part": "train", "step": 11, "loss": 1.0}) + '\n{"part": "tra')
    train(recipe_in(workplace, run.name, *EVERY_STEP), resume=True)
    assert ended_alike(run, undisturbed)
