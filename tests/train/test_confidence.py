"""The confidence estimate: what it learns, that nothing else learns from it, and how it is calibrated."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.features import FeatureBatch
from draftsmith.heads.base import DraftHead
from draftsmith.heads.confidence import Confidence
from draftsmith.heads.kinds import KINDS, load_head
from draftsmith.recipes.schema import load_recipe
from draftsmith.target import Target
from draftsmith.train.calibration import BINS, FAR, calibrate, calibration_error, fitted_temperatures
from draftsmith.train.loop import train
from draftsmith.train.metrics import DepthSums
from draftsmith.train.objectives import Look, Objective, doubt, link
from draftsmith.train.step import judged

DEPTHS = 3


def make_head(target: Target, confidence: bool = True) -> DraftHead:
    torch.manual_seed(0)
    options = KINDS["medusa"].Options()
    head = KINDS["medusa"].create(target, options, None, DEPTHS, torch.arange(1, 128, 2), confidence)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if not name.startswith("confidence"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return head


@pytest.fixture
def batch(tiny_target: Target) -> FeatureBatch:
    ids = torch.randint(3, 111, (4, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 30, dtype=torch.bool)
    mask[:, :4] = False
    return FeatureBatch(ids, mask, tiny_target.features(ids, []), None, ids.numel())


def lesson(head: DraftHead, batch: FeatureBatch, target: Target) -> tuple[Tensor, DepthSums]:
    return judged(head, batch, target, Objective("kl", depth_decay=1.0), head.taught(batch.ids, batch.mask, 0))


def overlaps(head: DraftHead, batch: FeatureBatch, target: Target) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every depth's rows, their overlap, and the states."""
    p = target.model(batch.ids).logits.softmax(-1).flatten(0, 1)
    depths = head.predict(batch.ids, head.taught(batch.ids, batch.mask, 0), batch.features, target)
    return [
        (d.rows, torch.minimum(p[d.rows + d.ahead][:, head.target_ids], d.logits.softmax(-1)).sum(-1), d.states) for d in depths
    ]


# -- what it learns ----------------------------------------------------------------------------------------------------


def test_a_confidence_draws_no_random_number() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    sure = Confidence(16, 2)
    assert torch.equal(torch.rand(3), expected)
    assert sure.probability(torch.randn(4, 16), 0).tolist() == [0.5] * 4


def test_its_loss_is_binary_cross_entropy_on_the_overlap_of_what_is_reached(tiny_target: Target, batch: FeatureBatch) -> None:
    with_it, without = make_head(tiny_target), make_head(tiny_target, confidence=False)
    assert with_it.confidence is not None
    with torch.no_grad():
        with_it.confidence.proj.weight.normal_(std=0.3)
        with_it.confidence.proj.bias.fill_(-0.2)
    expected, reach = 0.0, torch.ones(batch.ids.numel())
    for rows, alpha, states in overlaps(with_it, batch, tiny_target):
        sure = with_it.confidence(states).sigmoid()
        costs = -(alpha * sure.log() + (1 - alpha) * (1 - sure).log())
        expected += float((costs * reach[rows]).mean().detach()) / DEPTHS
        reach[rows] = reach[rows] * alpha.detach()
    losses = [float(lesson(head, batch, tiny_target)[0].detach()) for head in (with_it, without)]
    assert losses[0] - losses[1] == pytest.approx(expected, rel=1e-4)


def test_nothing_but_itself_learns_from_it(tiny_target: Target, batch: FeatureBatch) -> None:
    with_it, without = make_head(tiny_target), make_head(tiny_target, confidence=False)
    for head in (with_it, without):
        lesson(head, batch, tiny_target)[0].backward()
    plain = dict(without.named_parameters())
    for name, parameter in with_it.named_parameters():
        assert parameter.grad is not None
        if name.startswith("confidence"):
            assert parameter.grad.abs().max() > 0
        else:
            own = plain[name].grad
            assert own is not None and torch.equal(parameter.grad, own), name


def test_it_comes_to_know_the_overlap(tiny_target: Target, batch: FeatureBatch) -> None:
    """On a fixed head it ends as sure at every depth as drafts are accepted there, as far as a linear map can tell."""
    head = make_head(tiny_target)
    assert head.confidence is not None
    optimizer = torch.optim.Adam(head.confidence.parameters(), lr=0.03)
    for _ in range(400):
        optimizer.zero_grad()
        lesson(head, batch, tiny_target)[0].backward()
        optimizer.step()
    _, alpha, states = overlaps(head, batch, tiny_target)[0]
    said = head.confidence.probability(states, 0)
    assert float(torch.corrcoef(torch.stack([said, alpha]))[0, 1].detach()) > 0.6
    _, sums = lesson(head, batch, tiny_target)
    assert sums.report(torch.ones(DEPTHS) / DEPTHS)["ece_0"] < 0.02


def test_reach_is_the_chance_to_get_this_far() -> None:
    """Rows 0 and 2 have a second depth: it counts as much as their first is accepted."""
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.2, 0.2]])
    first = Look(torch.zeros(3, 2), p, torch.zeros(3).long(), torch.zeros(3).long(), torch.arange(3))
    second = Look(torch.zeros(2, 2), p[:2], torch.zeros(2).long(), torch.zeros(2).long(), torch.tensor([0, 2]))
    link([first, second], 3)
    assert first.reach.tolist() == [1, 1, 1]
    assert second.reach.tolist() == pytest.approx([1.0, 0.4])
    assert doubt(torch.zeros(2), second).tolist() == pytest.approx([math.log(2), 0.4 * math.log(2)])


# -- how sure, and how right -------------------------------------------------------------------------------------------


def seen(logits: Tensor, accepted: Tensor, reach: Tensor | None = None) -> Tensor:
    """The sums of one depth whose rows were so sure and so right."""
    rows = len(logits)
    p = torch.stack([accepted, torch.zeros(rows)], 1)  # a head that is certain of token 0 overlaps by p(0)
    certain = torch.tensor([[100.0, -100.0]]).expand(rows, 2)
    look = Look(certain, p, torch.zeros(rows).long(), torch.zeros(rows).long(), torch.arange(rows))
    look.reach = torch.ones(rows) if reach is None else reach
    sums = DepthSums.zeros(1, torch.device("cpu"))
    sums.count_sure(0, look, logits)
    return sums.sure


def test_the_calibration_error_by_hand() -> None:
    """Two bins: 0.9 said and 0.7 accepted in three rows of four, 0.2 said and 0.3 accepted in one."""
    said = torch.tensor([0.9, 0.9, 0.9, 0.2])
    sums = seen(said.logit(), torch.tensor([0.7, 0.6, 0.8, 0.3]))
    assert calibration_error(sums).tolist() == pytest.approx([0.75 * 0.2 + 0.25 * 0.1], abs=1e-6)
    weighted = seen(said.logit(), torch.tensor([0.7, 0.6, 0.8, 0.3]), torch.tensor([0.5, 0.5, 0.0, 1.0]))
    assert calibration_error(weighted).tolist() == pytest.approx([0.5 * abs(0.9 - 0.65) + 0.5 * 0.1], abs=1e-6)


def test_fine_bins_give_the_error_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, generator=generator) * 2
    accepted = (logits * 0.6 + torch.randn(5000, generator=generator)).sigmoid()
    said, gap = logits.sigmoid(), 0.0
    for i in range(15):
        inside = (said >= i / 15) & (said < (i + 1) / 15)
        gap += abs(float((said - accepted)[inside].sum())) / 5000
    assert calibration_error(seen(logits, accepted)).tolist() == pytest.approx([gap], abs=2e-3)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_fit_finds_the_temperature_that_was_missing(temperature: float) -> None:
    logits = torch.randn(20000, generator=torch.Generator().manual_seed(0)).clamp(-FAR / 3, FAR / 3) * 1.5
    sums = seen(logits, (logits / temperature).sigmoid())
    found = fitted_temperatures(sums)
    assert found.tolist() == pytest.approx([temperature], rel=0.06)
    assert float(calibration_error(sums, found)) < 0.005
    if temperature != 1:
        assert float(calibration_error(sums)) > 0.05


def test_the_fit_does_not_flatten_what_is_told_apart() -> None:
    """Half of the rows are accepted for sure and half never: saying 0.5 of all would be calibrated, and useless."""
    logits = torch.tensor([2.0, -2.0]).repeat(500)
    sums = seen(logits, (logits > 0).float())
    assert float(fitted_temperatures(sums)) == pytest.approx(1 / 8)


def test_nothing_to_fit_leaves_the_temperature_alone() -> None:
    nothing = torch.zeros(2, BINS, 3, dtype=torch.float64)
    assert fitted_temperatures(nothing).tolist() == [1, 1] and calibration_error(nothing).tolist() == [0, 0]
    unsure = seen(torch.zeros(50), torch.full((50,), 0.3))  # a fresh confidence: every temperature leaves it at 0.5
    assert fitted_temperatures(unsure).tolist() == [1]


def test_calibration_sets_every_depths_own_temperature() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    sums = torch.cat([seen(logits, (logits / t).sigmoid()) for t in (0.5, 3.0)])
    sure = Confidence(4, 2)
    before = calibration_error(sums)
    report = calibrate(sure, sums)
    assert sure.temperature.tolist() == pytest.approx([0.5, 3.0], rel=0.06)
    for i, temperature in enumerate(sure.temperature.tolist()):
        assert report[f"confidence_temperature_{i}"] == pytest.approx(temperature)
        assert report[f"ece_calibrated_{i}"] < 0.01 < before[i]
    states = torch.randn(3, 4)
    with torch.no_grad():
        sure.proj.weight.normal_()
        expected = (sure(states) / sure.temperature[1]).sigmoid()
        assert torch.equal(sure.probability(states, 1), expected) and torch.equal(sure.probability(states, 7), expected)


# -- in a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    folder = tmp_path_factory.mktemp("confidence")
    tiny_target.model.save_pretrained(folder / "target")
    tiny_target.tokenizer.save_pretrained(folder / "target")
    for name, count in (("train", 8), ("held_out", 4)):
        turns = [("user", "hi"), ("assistant", "the cat sat on an old mat")]
        messages = [{"role": role, "content": content} for role, content in turns]
        (folder / f"{name}.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * count)
    (folder / "recipe.yaml").write_text(f"""
target: {{name: {folder}/target, dtype: float32}}
data: {{train: train.jsonl, held_out: held_out.jsonl, max_length: 60}}
head: {{kind: eagle3, depths: 2, draft_vocab: 64}}
train: {{epochs: 4, batch_size: 4, lr: 1.0e-2, precision: "no", clip: 0.05, log_every: 1, eval_every: 4}}
eval: {{prompts: 0}}
output: {folder}/run
""")
    return folder


def test_a_head_trains_bit_for_bit_the_same_with_a_confidence_beside_it(workplace: Path) -> None:
    """Clipping included: the recipe's norm is small enough to clip every step."""
    heads: dict[bool, Any] = {}
    for confidence in (False, True):
        out = workplace / f"run-{confidence}"
        last = train(load_recipe(workplace / "recipe.yaml", [f"output={out}", f"head.confidence={str(confidence).lower()}"]))
        heads[confidence] = load_head(Path(last["head"]))
        curve = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        held_out = [row for row in curve if row["part"] == "held_out"]
        for row in held_out:
            told = {f"{name}_{i}" in row for name in ("ece", "ece_calibrated", "confidence_temperature") for i in range(2)}
            assert told == {confidence}
        assert ("ece_calibrated_1" in last) == confidence
    plain, beside = heads[False].state_dict(), heads[True].state_dict()
    assert set(beside) - set(plain) == {f"confidence.{name}" for name in ("proj.weight", "proj.bias", "temperature")}
    for name, tensor in plain.items():
        assert torch.equal(tensor, beside[name]), name
    best = max(held_out, key=lambda row: row["tau_sim"])
    assert heads[True].confidence.temperature.tolist() == pytest.approx([best[f"confidence_temperature_{i}"] for i in range(2)])
    assert heads[True].confidence.proj.weight.abs().max() > 0
