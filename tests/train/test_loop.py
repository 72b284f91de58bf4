"""The training run: the same curve however it is cut, exact resume, what is left on disk."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from workplace import build, curve, launch, losses, recipe_in, several, torchrun

from draftsmith.data.chat import Encoded
from draftsmith.data.extract import extract
from draftsmith.data.features import OnlineFeatures
from draftsmith.data.manifest import Part
from draftsmith.data.store import Store
from draftsmith.data.tally import Tally
from draftsmith.errors import UserError
from draftsmith.heads.eagle3 import Eagle3Head
from draftsmith.heads.kinds import load_head
from draftsmith.recipes.schema import load_recipe
from draftsmith.target import Target
from draftsmith.train.dry_run import dry_run
from draftsmith.train.loop import train
from draftsmith.train.prepare import prepare, rate, read_examples, start


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, tiny_target) -> Path:
    """A saved tiny target, twenty conversations and a recipe."""
    return build(tmp_path_factory.mktemp("workplace"), tiny_target)


@pytest.fixture(scope="module")
def whole_run(workplace) -> Path:
    """The run all others are compared with."""
    train(recipe_in(workplace, "whole"))
    return workplace / "whole"


def test_a_run_learns_and_leaves_its_directory(whole_run):
    assert losses(whole_run)[-1] < 0.9 * losses(whole_run)[0]
    assert {path.name for path in whole_run.iterdir()} >= {"recipe.yaml", "run.json", "metrics.jsonl", "head"}
    data = json.loads((whole_run / "run.json").read_text())["data"]
    assert data["train"]["rows"]["kept"] == 20 and data["train"]["fingerprint"] != data["held_out"]["fingerprint"]
    assert load_recipe(whole_run / "recipe.yaml").train.lr == 1e-2
    assert [row["step"] for row in curve(whole_run, "held_out")] == [0, 5, 10], "the initial head is scored too"
    assert set(curve(whole_run)[0]) >= {"accuracy_0", "accuracy_1", "tau_sim", "lr"}


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0.05), (10, 0.3), (10, 0.0), (200, 0.05), (4, 1.0)])
def test_the_rate_rises_to_lr_and_falls_to_its_end_within_the_steps(workplace, steps, warmup):
    recipe = recipe_in(workplace, "unused", f"train.warmup={warmup}", "train.final_lr=0.1")
    rates = [rate(done, recipe, steps) for done in range(steps)]
    warm = max(1, round(warmup * steps))
    assert rates[:warm] == pytest.approx([(i + 1) / warm for i in range(warm)]) and max(rates) == 1
    assert rates[warm - 1 :] == sorted(rates[warm - 1 :], reverse=True)
    assert rates[-1] == pytest.approx(0.1 if steps > warm else 1)


def test_every_step_learns_at_the_rate_that_is_logged(workplace):
    """The first one too: one step of AdamW moves each weight that has a gradient by the rate itself."""
    recipe = recipe_in(workplace, "unused", "train.max_steps=1")
    run = prepare(recipe, start(recipe), workplace / "unused")
    before = {name: tensor.detach().clone() for name, tensor in run.head.named_parameters()}
    run.advance(1, run.global_batch(0))
    moved = torch.cat(
        [(tensor.detach() - before[name].detach()).abs().flatten() for name, tensor in run.head.named_parameters()]
    )
    assert run.lr == 1e-2 and moved.max() == pytest.approx(1e-2, rel=1e-3)


def test_micro_batches_do_not_change_the_curve(workplace, whole_run):
    train(recipe_in(workplace, "micro", "train.micro_batch_size=1"))
    assert losses(workplace / "micro") == pytest.approx(losses(whole_run), rel=1e-4)


@pytest.fixture(scope="module")
def store(workplace) -> Path:
    """A float32 store of the training rows, in several shards."""
    target, recipe = Target.load(str(workplace / "target"), "float32"), recipe_in(workplace, "unused")
    examples = read_examples(recipe, "train", target, Tally())
    extract(target, examples, Eagle3Head.default_taps(target), workplace / "store", "float32", shard_bytes=100_000)
    assert len(list((workplace / "store").glob("*.safetensors"))) > 2
    return workplace / "store"


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("features", ["online", "memory", "store", "write-through"])
def test_hidden_states_from_anywhere_give_the_same_curve(workplace, whole_run, store, features, pack):
    place = store if features == "store" else workplace / f"through-{pack}"
    out = f"{features}-{pack}"
    named = [f"data.features={features}", f"data.store={place}", "data.store_dtype=float32"]
    named += ["data.pack=true", "data.max_length=100"] if pack else []
    train(recipe_in(workplace, out, *named))
    assert losses(workplace / out) == pytest.approx(losses(whole_run), rel=1e-4)
    padding = [row["padding"] for row in curve(workplace / out)]
    assert max(padding) < 0.3 and (padding != [row["padding"] for row in curve(whole_run)]) == pack
    if features == "write-through":
        assert len(Store(place, growing=True)) == 20


def test_a_store_is_read_without_the_data_and_without_the_target(workplace, whole_run, store, monkeypatch):
    seen = []
    compute = Target.features
    monkeypatch.setattr(Target, "features", lambda self, ids, *rest: seen.append(len(ids)) or compute(self, ids, *rest))
    named = ["data.features=store", f"data.store={store}", "data.train=absent.jsonl", "train.eval_every=null"]
    train(recipe_in(workplace, "from-store", *named))
    assert losses(workplace / "from-store") == pytest.approx(losses(whole_run), rel=1e-4)
    assert sum(seen) == 2 * 6, "only the held-out rows, before and after"


def test_a_write_through_store_is_found_again_and_keeps_to_its_budget(workplace, whole_run, monkeypatch):
    place = workplace / "tight"
    named = ["data.features=write-through", f"data.store={place}", "data.store_dtype=float32", "data.store_budget=5.0e-5"]
    train(recipe_in(workplace, "tight-1", *named))
    kept = len(Store(place, growing=True))
    assert 0 < kept < 20 and sum(file.stat().st_size for file in place.glob("*.safetensors")) < 6e4
    train(recipe_in(workplace, "tight-2", *named, "data.store_budget=null"))
    assert len(Store(place, growing=True)) == 20
    for run in ("tight-1", "tight-2"):
        assert losses(workplace / run) == pytest.approx(losses(whole_run), rel=1e-4)
    with pytest.raises(UserError, match="is a store of other states"):
        train(recipe_in(workplace, "tight-3", *named, "head.taps=[1,2]"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("head.taps=[0,1]", "not tap 0"),
        ("target.name=OTHER", "holds states of"),
    ],
)
def test_a_store_that_does_not_fit_the_head_is_refused(workplace, store, change, sentence):
    torch.manual_seed(3)
    other = LlamaForCausalLM(LlamaConfig.from_pretrained(workplace / "target", hidden_size=64)).float()
    other.save_pretrained(workplace / "other")
    Target.load(str(workplace / "target"), "float32").tokenizer.save_pretrained(workplace / "other")
    named = ["data.features=store", f"data.store={store}", change.replace("OTHER", str(workplace / "other"))]
    with pytest.raises(UserError, match=sentence):
        train(recipe_in(workplace, "unfit", *named))


def test_one_part_of_a_store_is_refused(workplace, store, tmp_path):
    target, recipe = Target.load(str(workplace / "target"), "float32"), recipe_in(workplace, "unused")
    examples = read_examples(recipe, "train", target, Tally())
    extract(target, examples, Eagle3Head.default_taps(target), tmp_path / "part", "float32", Part(index=0, of=2))
    with pytest.raises(UserError, match="is part 0 of 2: join the parts"):
        train(recipe_in(workplace, "parted", "data.features=store", f"data.store={tmp_path}/part"))


def test_case_17_a_damaged_row_is_named_and_teaches_nothing(workplace, store, tmp_path, capfd):
    damaged = tmp_path / "store"
    shutil.copytree(store, damaged)
    file = sorted(damaged.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-9] ^= 1  # one bit of a state
    file.write_bytes(content)
    named = ["data.features=store", f"data.store={damaged}", "train.batch_size=1", "train.max_steps=20"]
    train(recipe_in(workplace, "damaged", *named))
    said = " ".join(capfd.readouterr().err.split())
    assert re.search(r"left out: row \d+ is damaged in \S+", said)
    assert said.count("supervise nothing: no step is taken") == 1, "it was a batch of its own"
    assert curve(workplace / "damaged")[-1]["damaged_rows"] == 1
    with pytest.raises(UserError, match="is damaged in"):
        train(recipe_in(workplace, "strict", *named, "data.strict=true"))


def test_case_03_a_batch_that_supervises_nothing_is_no_step(workplace, whole_run):
    run = prepare(recipe_in(workplace, "unused"), start(recipe_in(workplace, "unused")), workplace / "unused")
    before = {name: tensor.clone() for name, tensor in run.head.state_dict().items()}
    rate = run.scheduler.get_last_lr()
    assert isinstance(run.train, OnlineFeatures)
    run.train.examples = [Encoded(example.ids, np.zeros_like(example.mask)) for example in run.train.examples]
    assert not run.advance(1, [0, 1, 2, 3]).rows.any()
    assert run.scheduler.get_last_lr() == rate and not run.optimizer.state_dict()["state"]
    for name, tensor in run.head.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_case_03_a_row_without_supervision_changes_nothing(workplace, whole_run):
    recipe = recipe_in(workplace, "unused")
    norms = []
    for blank in (False, True):
        run = prepare(recipe, start(recipe), workplace / "unused")
        assert isinstance(run.train, OnlineFeatures)
        if blank:
            run.train.examples = [*run.train.examples, Encoded(np.arange(40, dtype=np.int32), np.zeros(40, bool))]
        sums = run.advance(1, [0, 1, 2, *([20] if blank else [])])
        norms.append((sums.loss.tolist(), [tensor.double().norm().item() for tensor in run.head.state_dict().values()]))
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5) and norms[0][1] == pytest.approx(norms[1][1], rel=1e-5)


def test_accelerate_launch_runs_a_recipe(workplace, whole_run):
    launch(workplace, several(1), "launched")
    assert losses(workplace / "launched") == pytest.approx(losses(whole_run), rel=1e-4)


def test_two_processes_give_the_curve_of_one(workplace, whole_run):
    launch(workplace, torchrun(2), "two")
    assert json.loads((workplace / "two" / "run.json").read_text())["processes"] == 2
    assert losses(workplace / "two") == pytest.approx(losses(whole_run), rel=1e-4)
    for one, two in zip(curve(whole_run, "held_out"), curve(workplace / "two", "held_out"), strict=True):
        assert one == pytest.approx(two, rel=1e-4)


def test_two_processes_fill_one_store_and_agree_on_the_vocabulary(workplace, whole_run):
    place = workplace / "shared"
    named = ["data.features=write-through", f"data.store={place}", "data.store_dtype=float32", "data.pack=true"]
    launch(workplace, torchrun(2), "two-through", *named, "data.max_length=100")
    assert losses(workplace / "two-through") == pytest.approx(losses(whole_run), rel=1e-4)
    ids = [load_file(run / "head" / "model.safetensors")["target_ids"] for run in (whole_run, workplace / "two-through")]
    assert torch.equal(*ids), "counted by two processes, each over its half"
    assert len(Store(place, growing=True)) == 20
    assert {file.name.rpartition("-")[0] for file in place.glob("*.safetensors")} == {"rank-0", "rank-1"}


@pytest.mark.parametrize("features", ["online", "store", "write-through"])
def test_resume_is_exact(workplace, whole_run, store, features):
    """In the middle of the second epoch, wherever the hidden states come from."""
    place = store if features == "store" else workplace / "through-resumed"
    changes = ["train.checkpoint_every=3", "train.keep_checkpoints=1", f"data.features={features}", f"data.store={place}"]
    changes.append("data.store_dtype=float32")
    run = workplace / f"resumed-{features}"
    train(recipe_in(workplace, run.name, *changes))
    expected = (curve(run), load_file(run / "head" / "model.safetensors"))
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-9"]
    (run / "checkpoints" / ".step-10").mkdir()  # a checkpoint that was being written when the power went
    torch.manual_seed(99)
    AcceleratorState._reset_state()
    train(recipe_in(workplace, run.name, *changes), resume=True)
    assert curve(run) == expected[0]
    assert losses(run) == pytest.approx(losses(whole_run), rel=1e-5)
    for name, tensor in load_file(run / "head" / "model.safetensors").items():
        assert torch.equal(tensor, expected[1][name])


def test_the_best_head_is_the_best_by_the_verifier(workplace):
    scores = iter([1.5, 2.5, 1.7])
    result = train(recipe_in(workplace, "scored"), score=lambda target, head: next(scores))
    held_out = curve(workplace / "scored", "held_out")
    assert result["best_tau"] == 2.5 and [row["tau"] for row in held_out] == [1.5, 2.5, 1.7]


def test_an_existing_output_is_refused(workplace, whole_run):
    with pytest.raises(UserError, match="exists"):
        train(recipe_in(workplace, "whole"))


def test_a_refused_start_touches_nothing(workplace, whole_run):
    for out in ("whole", "never"):
        with pytest.raises(UserError, match="absent.jsonl"):
            train(recipe_in(workplace, out, "data.train=absent.jsonl"), force=True)
    assert (whole_run / "head" / "model.safetensors").is_file() and not (workplace / "never").exists()


@pytest.mark.parametrize(("tracker", "trace"), [("tensorboard", "**/events.out.*"), ("wandb", "**/*.wandb")])
def test_trackers_write_offline(workplace, monkeypatch, tracker, trace):
    run = workplace / tracker
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(recipe_in(workplace, tracker, f"train.tracker={tracker}", "train.max_steps=2"))
    assert list(run.glob(trace))


def test_medusa_trains_too(workplace):
    changes = ["head.kind=medusa", "head.options={lm_head: shared}", "head.draft_vocab=null", "objective.loss=ce"]
    train(recipe_in(workplace, "medusa", *changes))
    assert losses(workplace / "medusa")[-1] < losses(workplace / "medusa")[0]


def test_a_run_goes_on_from_another_runs_head(workplace, whole_run):
    """CASE 10 (b): its vocabulary stays, and its first evaluation is the other's best."""
    more = ["train.epochs=1", f"head.init_from={whole_run}/head"]
    train(recipe_in(workplace, "finer", *more))
    best = max(row["tau_sim"] for row in curve(whole_run, "held_out"))
    assert curve(workplace / "finer", "held_out")[0]["tau_sim"] == best
    planned = dry_run(recipe_in(workplace, "planned", *more, "head.draft_vocab=null"))["head"]
    assert planned["draft_vocab_size"] == 64, "as the other head's"
    heads = [load_file(workplace / run / "head" / "model.safetensors") for run in ("whole", "finer")]
    assert torch.equal(*(tensors["target_ids"] for tensors in heads))
    refused = (("draft_vocab=48", "head.draft_vocab is 48"), ("taps=[1,2]", "head.taps"), ("options.layers=2", None))
    for change, said in (*refused, ("options.fc_norm=true", None)):
        again = recipe_in(workplace, "otherwise", *more, f"head.{change}")
        if said:
            for refusing in (dry_run, train):
                with pytest.raises(UserError, match=said):
                    refusing(again)
        else:  # what the other head does not have starts fresh
            train(again, force=True)
    fewer = recipe_in(workplace, "fewer", *more[:1], f"head.init_from={workplace}/otherwise/head")
    with pytest.raises(UserError, match="fc_norm"):
        train(fewer)


def test_the_last_share_of_the_steps_learns_from_rollouts(workplace, whole_run):
    with pytest.raises(UserError, match="learns from the target's distribution, not ce"):
        recipe_in(workplace, "policy", "train.on_policy=0.4")
    for share in (0, 0.4):
        train(recipe_in(workplace, f"policy-{share}", f"train.on_policy={share}", "objective.loss=kl"))
    plain, rolled = losses(workplace / "policy-0"), losses(workplace / "policy-0.4")
    assert rolled[:6] == plain[:6] and all(a != b for a, b in zip(rolled[6:], plain[6:], strict=True))


def test_an_adapter_trains_beside_its_heads_and_resumes(workplace):
    """Medusa-2: the heads at a multiple of the logged rate, which is the adapter's; a resumed run is the unbroken one."""
    changes = ["head.kind=medusa", "head.options={lora: {rank: 4, heads_lr: 3}}", "train.checkpoint_every=4"]
    run = workplace / "medusa2"
    train(recipe_in(workplace, run.name, *changes))
    expected = curve(run)
    assert load_head(run / "head").adapts and expected[-1]["loss"] < expected[0]["loss"]
    untouched = curve(run, "held_out")[0]["side_0"]
    assert abs(untouched) < 1e-6 < expected[-1]["side_0"], "how far the adapted target has moved from the target"
    tensors = load_file(run / "checkpoints" / "step-8" / "head" / "model.safetensors")
    assert all(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    AcceleratorState._reset_state()
    train(recipe_in(workplace, run.name, *changes), resume=True)
    assert curve(run) == expected
