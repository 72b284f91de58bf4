"""What every kind must keep, on any target: its text, its target, its gradients, padding, processes and a new kind's place."""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, DEPTHS, make_head
from pydantic import BaseModel, ConfigDict
from scipy.stats import chisquare
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from draftsmith.data.features import FeatureBatch
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.tree import chain, full, parse
from draftsmith.eval.verifier import Request, decode, generate
from draftsmith.heads.base import Depth, DraftHead, Guess
from draftsmith.heads.drafting import Adaptive
from draftsmith.heads.kinds import KINDS, load_head
from draftsmith.sampling import Sampling, probabilities
from draftsmith.target import Features, Target
from draftsmith.train.objectives import Objective
from draftsmith.train.step import judged

SIZES: dict[str, Any] = dict(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64
)
LLAMA, QWEN = (LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied": (LLAMA, dict(num_key_value_heads=2, tie_word_embeddings=True)),
    "one key head": (LLAMA, dict(num_key_value_heads=1)),
    "head_dim 16 of 8": (QWEN, dict(num_key_value_heads=2, head_dim=16)),
    "head_dim 6": (LLAMA, dict(num_key_value_heads=4, head_dim=6)),
}
FIRST = {kind: case for case, (kind, _) in reversed(CASES.items())}  # the first case of every kind


def a_target(name: str) -> Target:
    """A random target with large weights, whose greedy texts wander."""
    (config, model), options = TARGETS[name]
    torch.manual_seed(1)
    built = model(config(**SIZES, **options, eos_token_id=None)).float()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.4) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.3)
    built.generation_config.eos_token_id = None
    return Target(built, None, name)


def a_batch(target: Target, taps: list[int], lines: int = 4, time: int = 18, seed: int = 0) -> FeatureBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 111, (lines, time), generator=generator)
    mask = torch.rand(lines, time, generator=generator) < 0.85
    mask[:, :2] = False
    return FeatureBatch(ids, mask, target.features(ids, taps), None, ids.numel())


def learn(head: DraftHead, batch: FeatureBatch, target: Target, counts: Tensor | None = None) -> Tensor:
    """The loss of a batch, its gradients added to the head's parameters."""
    rows = head.taught(batch.ids, batch.mask, 0)
    loss, _ = judged(head, batch, target, Objective("kl"), rows, counts)
    loss.backward()
    return loss.detach()


# -- the text is the target's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_the_greedy_text_is_the_targets_own_on_any_target(case: str, name: str) -> None:
    target = a_target(name)
    head = make_head(target, case)
    with head.adapted(target):
        plain = generate(target, None, [5, 6, 7, 8], chain(1), 16).tokens
        for shape in (chain(DEPTHS), full([2, 2, 1])):
            assert generate(target, head, [5, 6, 7, 8], shape, 16).tokens == plain


@pytest.mark.parametrize("form", ["chain:3", "tree:2x2x1", "dynamic:7,k=3,depth=3", "chain:3,stop=0.02"])
@pytest.mark.parametrize("case", CASES)
def test_drafts_for_several_sequences_are_those_for_each(case: str, form: str) -> None:
    """Sequences that start at different lengths and accept different numbers of tokens, in one pass and each alone."""
    target = a_target("tied")
    proposer = HeadProposer(make_head(target, case), parse(form))
    asked = [Request(prompt, 9) for prompt in ([5, 6, 7, 8], [9], [4, 4, 30, 31, 32, 33, 34], [77, 5])]
    with proposer.adapted(target):
        together = decode(target, proposer, asked, batch=3).generations
        alone = decode(target, proposer, asked).generations
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.tokens, ours.accepted, ours.drafted) == (theirs.tokens, theirs.accepted, theirs.drafted)


@pytest.mark.parametrize("case", ["eagle3", "eagle3-layers", "peagle"])
def test_sequences_share_a_heads_forward(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = a_target("tied")
    head = make_head(target, case)
    seen: list[int] = []
    lm_head, read = head.lm_head, head.lm_head.forward  # type: ignore[union-attr]
    monkeypatch.setattr(lm_head, "forward", lambda x: seen.append(len(x)) or read(x))
    decode(target, HeadProposer(head, chain(3)), [Request([5, 6, i], 2) for i in range(4)], batch=4)
    assert seen == ([4 * DEPTHS] if case == "peagle" else [4, 4, 4])  # a pass: one forward a level, or one for all levels


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("case", FIRST.values())
def test_sampled_texts_have_the_targets_distribution(case: str, sampled: bool) -> None:
    """The first two tokens of 400 texts against the target's own probabilities (chi-square)."""
    target, sampling = a_target("tied"), Sampling(temperature=1.5, top_k=3)
    head = make_head(target, case)
    generator = torch.Generator().manual_seed(0)
    prompt = [5, 6, 7]
    with head.adapted(target):
        texts = [
            tuple(generate(target, head, prompt, full([2, 1]), 3, sampling, sampled, generator).tokens[1:]) for _ in range(400)
        ]
        law: dict[tuple[int, int], float] = defaultdict(float)
        first = probabilities(target.model(torch.tensor([prompt])).logits[0, -1:], sampling)[0]
        for a in first.nonzero().flatten().tolist():
            second = probabilities(target.model(torch.tensor([[*prompt, a]])).logits[0, -1:], sampling)[0]
            for b in second.nonzero().flatten().tolist():
                third = probabilities(target.model(torch.tensor([[*prompt, a, b]])).logits[0, -1:], sampling)[0]
                for c in third.nonzero().flatten().tolist():
                    law[b, c] += float(first[a] * second[b] * third[c])
    seen = Counter(texts)
    assert set(seen) <= set(law)
    common = [pair for pair, chance in law.items() if chance * 400 >= 5]
    observed = [seen[pair] for pair in common] + [400 - sum(seen[pair] for pair in common)]
    expected = [400 * law[pair] for pair in common] + [400 * (1 - sum(law[pair] for pair in common))]
    kept = [i for i, mean in enumerate(expected) if mean > 1e-3]
    scale = sum(observed[i] for i in kept) / sum(expected[i] for i in kept)
    assert chisquare([observed[i] for i in kept], [expected[i] * scale for i in kept]).pvalue > 1e-4


@pytest.mark.parametrize("case", FIRST.values())
def test_one_depth_and_one_token_are_enough(case: str, lively_target: Target, tmp_path: Path) -> None:
    """A head of a single depth with a confidence learns from one line and drafts from a single token to the context's end."""
    made = make_head(lively_target, case, depths=1, confidence=True)
    learn(made.train(), a_batch(lively_target, made.config.taps, lines=1), lively_target)
    estimate = made.get_parameter("confidence.proj.weight")
    assert estimate.grad is not None and estimate.grad.any()
    made.save(tmp_path)
    head = load_head(tmp_path)
    plain = generate(lively_target, None, [5], chain(1), 100).tokens
    assert len(plain) == lively_target.max_positions - 1
    for form in (Adaptive(1, 0.3), full([3])):
        assert generate(lively_target, head, [5], form, 100).tokens == plain


# -- what training touches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_training_reaches_what_is_trained_and_leaves_the_target(case: str, name: str) -> None:
    target = a_target(name)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    ids = torch.arange(5, 25)[None]
    states = target.features(ids, [1, 2]).taps
    head = make_head(target, case).train()
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    first = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
    for step in range(2):
        learn(head, a_batch(target, head.config.taps, seed=step), target)
        reached = {name for name, p in head.named_parameters() if p.grad is not None and p.grad.any()}
        assert reached == {name for name, p in head.named_parameters() if p.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, parameter in head.named_parameters() if not torch.equal(parameter, first[name])}
    assert moved == {name for name, p in head.named_parameters() if p.requires_grad}
    assert torch.equal(target.features(ids, [1, 2]).taps, states)
    after = {key.replace(".base_layer", ""): tensor for key, tensor in target.model.state_dict().items()}
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


# -- padding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_padding_on_either_side_costs_nothing(lively_target: Target, case: str) -> None:
    """Lines of three lengths; padding on the left is told by positions that restart where the text begins."""
    target, lengths, time = lively_target, (9, 14, 18), 18
    head = make_head(target, case)
    texts = [a_batch(target, head.config.taps, 1, n, seed=n) for n in lengths]
    counts = torch.ones(len(head.taught(texts[0].ids, texts[0].mask, 0)))
    wanted = sum(learn(head, text, target, counts) for text in texts)
    gradients = [parameter.grad.clone() for parameter in head.parameters() if parameter.grad is not None]
    for left in (False, True):
        head.zero_grad()
        ids, mask = torch.zeros(3, time, dtype=torch.long), torch.zeros(3, time, dtype=torch.bool)
        positions = torch.arange(time).repeat(3, 1)
        for line, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            where = slice(time - n, time) if left else slice(0, n)
            ids[line, where], mask[line, where] = text.ids[0], text.mask[0]
            positions[line, where] = torch.arange(n)
        batch = FeatureBatch(ids, mask, target.features(ids, head.config.taps, positions), positions, int(sum(lengths)))
        torch.testing.assert_close(learn(head, batch, target, counts), wanted, rtol=1e-4, atol=1e-4)
        found = [parameter.grad for parameter in head.parameters() if parameter.grad is not None]
        for ours, alone in zip(found, gradients, strict=True):
            torch.testing.assert_close(ours, alone, rtol=1e-3, atol=1e-3 * max(1.0, float(alone.abs().max())))


# -- two processes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """For every case the loss and gradient norms that two processes agree on, each with half of a batch."""
    out = tmp_path_factory.mktemp("halves") / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, str(out)]
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def share_of(batch: FeatureBatch, lines: slice) -> FeatureBatch:
    return FeatureBatch(batch.ids[lines], batch.mask[lines], batch.features.rows(lines), None, 0)


def measured(head: nn.Module, loss: float) -> list[float]:
    return [loss, *(float(p.grad.norm()) for p in head.parameters() if p.grad is not None)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_learn_what_one_learns(case: str, halves: dict[str, list[float]]) -> None:
    target = a_target("tied")
    head = make_head(target, case)
    batch = a_batch(target, head.config.taps)
    assert halves[case] == pytest.approx(measured(head, float(learn(head, batch, target))), rel=1e-3, abs=1e-5)


def main() -> None:
    """One of two processes: its half of every case's batch through DDP, as the training loop does it."""
    torch.distributed.init_process_group("gloo")
    rank, found = torch.distributed.get_rank(), {}
    target = a_target("tied")
    for case in CASES:
        head = make_head(target, case)
        wrapped = nn.parallel.DistributedDataParallel(head)
        own = share_of(a_batch(target, head.config.taps), slice(2 * rank, 2 * rank + 2))
        rows = head.taught(own.ids, own.mask, 0)
        counts = torch.stack([maps.sum() for maps in rows])
        torch.distributed.all_reduce(counts)
        loss, _ = judged(wrapped, own, target, Objective("kl"), rows, counts)
        (loss * 2).backward()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        found[case] = measured(head, float(total))
        del wrapped  # a reducer that outlives the process group never joins its threads
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


# -- a new kind ------------------------------------------------------------------------------------------------


class BigramOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Bigram(DraftHead):
    """The next token from the last one alone: a table, and nothing read of the target."""

    kind, Options = "bigram", BigramOptions

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.target.vocab_size, config.target.hidden_size)
        self.lm_head = nn.Linear(config.target.hidden_size, config.draft_vocab_size, bias=False)

    @classmethod
    def default_taps(cls, target: Target) -> list[int]:
        return []

    def initialize(self, target: Target) -> None: ...

    def predict(
        self, ids: Tensor, rows: list[Tensor], features: Features, target: Target, positions: Tensor | None = None
    ) -> list[Depth]:
        depths = []
        for depth, own in enumerate(rows):
            flat = own.flatten().nonzero().squeeze(1)
            depths.append(Depth(flat, self.table(ids.flatten()[flat + 1 + depth]), self.lm_head, ahead=1 + depth))
        return depths

    def new_state(self) -> None: ...

    def begin(self, state: None, features: Features, ids: Tensor, target: Target) -> Guess:
        return self.deepen(state, [0], ids[-1:], chain(1), target)

    def deepen(self, state: None, nodes: list[int], tokens: Tensor, shape: Any, target: Target) -> Guess:
        states = self.table(tokens)
        return Guess(self.lm_head(states), states)


def test_a_new_kind_is_its_own_class_and_one_line(
    lively_target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It learns, drafts chains and trees without loss, and comes back from its directory."""
    monkeypatch.setitem(KINDS, "bigram", Bigram)
    torch.manual_seed(0)
    head = Bigram.create(lively_target, BigramOptions(), None, 2, torch.arange(128))
    batch = a_batch(lively_target, [])
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        losses.append(float(learn(head, batch, lively_target)))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    head.save(tmp_path)
    plain = generate(lively_target, None, [5, 6, 7], chain(1), 20).tokens
    for shape in (chain(4), full([3, 2])):
        assert generate(lively_target, load_head(tmp_path), [5, 6, 7], shape, 20).tokens == plain


if __name__ == "__main__":
    main()
