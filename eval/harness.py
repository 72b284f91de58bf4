"""Measure a proposer on prompts, and against plain decoding in the same run."""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import psutil
import torch

from ..console import Progress, note
from ..sampling import GREEDY, Sampling
from ..target import Target
from .measures import Answer, measures, sizes, tau
from .prompts import Prompt
from .proposers import Proposer
from .typical import Typical
from .verifier import Pass, Request, Run, decode

NEAR_TIE = 1e-3  # in logits: two tokens closer than this may swap places when sums are taken in another order
REFILLS = 4  # so many batches of prompts are decoded one way before they are decoded the other
SAMPLE = 200  # tokens of one answer that the report shows


def measure(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    max_new: int,
    sampling: Sampling = GREEDY,
    batch: int = 1,
    baseline: int | None = None,
    seed: int = 0,
    show: bool = False,
    typical: Typical | None = None,
    bar: Progress | None = None,
) -> dict[str, Any]:
    """Decode every prompt with the proposer and return one entry of a report's ``results`` (see docs/evaluation.md).

    The first ``baseline`` prompts (all of them by default) are also decoded plainly, group by group in alternating order,
    for the speed-up and, when greedy, for the proof that the text is the target's own. Further turns are asked on the
    model's own answers. What a proposer adapts on the target is adapted throughout, in plain decoding too.
    """
    baseline = len(prompts) if baseline is None else min(baseline, len(prompts))
    size = batch if batch == 1 else REFILLS * batch
    cuts = sorted({0, baseline, len(prompts), *range(0, baseline, size), *range(baseline, len(prompts), size)})
    groups = [range(low, high) for low, high in pairwise(cuts)]
    bench = Bench(target, proposer, prompts, max_new, sampling, batch, seed, typical)
    shown = nullcontext(bar) if bar else Progress("decoding", len(prompts), show=show)
    with proposer.adapted(target), shown as bar:
        if prompts:
            decode(target, None, [Request(prompts[0].ids(target), 3)])  # the first passes of a process are slow
        for number, group in enumerate(groups):
            bench.ask(group, compared=group.start < baseline, plain_first=number % 2 == 1)
            bar.advance(len(group), f"τ {tau([answer.drafted for answer in bench.answers]):.3f}")
    return bench.result()


@dataclass
class Bench:
    """What a measurement collects. ``passes`` are those with drafts."""

    target: Target
    proposer: Proposer
    prompts: Sequence[Prompt]
    max_new: int
    sampling: Sampling
    batch: int
    seed: int
    typical: Typical | None
    answers: list[Answer] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    ties: list[dict[str, Any]] = field(default_factory=list)
    memory: int = 0
    busy: list[float] = field(default_factory=list)

    def ask(self, group: range, compared: bool, plain_first: bool) -> None:
        """Ask the questions of a group, turn by turn, with drafts and, where they are ``compared``, plainly."""
        asked = {index: self.prompts[index] for index in group}
        turn = 0
        while asked:
            ids = {index: prompt.ids(self.target) for index, prompt in asked.items()}
            if turn:
                fitting = {index: own for index, own in ids.items() if len(own) < self.target.max_positions}
                if len(fitting) < len(ids):
                    note(f"{len(ids) - len(fitting)} questions outgrow the target's context: their further turns are left out")
                ids = fitting
            runs: dict[bool, Run] = {}
            for drafting in [False, True] if plain_first else [True, False]:
                if drafting or compared:
                    runs[drafting] = self.run(asked, ids, turn, drafting)
            for row, (index, own) in enumerate(ids.items()):
                plain = runs[False].generations[row] if compared else None
                answer = Answer(index, turn, self.prompts[index].category, own, runs[True].generations[row], plain)
                self.answers.append(answer)
                if plain and self.sampling.greedy and answer.drafted.tokens != plain.tokens:
                    parted = divergence(self.target, own, answer.drafted.tokens, plain.tokens)
                    self.ties.append({"prompt": index, "turn": turn, **parted})
            said = {index: run.tokens for index, run in zip(ids, runs[True].generations, strict=True)}
            asked = {index: followed(asked[index], said[index], self.target) for index in ids if asked[index].later}
            turn += 1

    def run(self, asked: dict[int, Prompt], ids: dict[int, list[int]], turn: int, drafting: bool) -> Run:
        requests = [
            Request(own, asked[index].max_new or self.max_new, seeded(self.seed, index, turn), asked[index].stop)
            for index, own in ids.items()
        ]
        proposer, typical = (self.proposer, self.typical) if drafting else (None, None)
        run = decode(self.target, proposer, requests, self.sampling, self.batch, typical)
        self.memory = max(self.memory, memory_in_use(self.target.device))
        if drafting:
            self.passes += run.passes
            busy = gpu_utilization(self.target.device)
            self.busy += [] if busy is None else [busy]
        return run

    def result(self) -> dict[str, Any]:
        self.answers.sort(key=lambda answer: (answer.question, answer.turn))
        self.ties.sort(key=lambda tie: (tie["prompt"], tie["turn"]))
        greedy, compared = self.sampling.greedy, any(answer.plain for answer in self.answers)
        lossless = all(tie["margin"] < NEAR_TIE for tie in self.ties) if compared and greedy else None
        described = self.proposer.described()
        categories = sorted({answer.category for answer in self.answers})
        by_category = {
            name: measures([answer for answer in self.answers if answer.category == name], self.proposer.length, self.seed)
            for name in categories
        }
        return {
            "proposer": self.proposer.name,
            "target": self.target.name,
            **measures(self.answers, self.proposer.length, self.seed),
            "categories": {name: found["tau"] for name, found in by_category.items()},
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "draft": {**described, **sizes([answer.drafted for answer in self.answers])},
            "search": None,
            "batch": self.batch,
            "max_new_tokens": self.max_new,
            "time": shares(self.passes),
            "peak_memory": self.memory,
            "gpu_utilization": sum(self.busy) / len(self.busy) if self.busy else None,
            "lossless": False if self.typical else lossless,
            "lossless_to": "the target with the head's adapters" if self.proposer.adapts else "the target",
            "near_ties": self.ties,
            "lossy": self.typical and self.typical.name,
            "by_category": by_category,
            "per_prompt": [self.row(answer) for answer in self.answers],
            "sample": sample(self.answers[0], self.target) if self.answers else [],
        }

    def row(self, answer: Answer) -> dict[str, Any]:
        """One answer's counts, for comparisons prompt by prompt."""
        drafted, plain = answer.drafted, answer.plain
        return {
            "id": self.prompts[answer.question].id or str(answer.question),
            "turn": answer.turn,
            "asked": hashlib.sha256(str(answer.prompt).encode()).hexdigest()[:12],  # ids of unlike prompts may be alike
            "category": answer.category,
            "accepted": sum(drafted.accepted),
            "passes": len(drafted.accepted),
            "drafted": drafted.drafted,
            "tokens": drafted.paced[0],
            "seconds": drafted.paced[1],
            "plain_tokens": plain.paced[0] if plain else None,
            "plain_seconds": plain.paced[1] if plain else None,
        }


def followed(prompt: Prompt, answer: list[int], target: Target) -> Prompt:
    """The question with its answer and its next turn."""
    said = {"role": "assistant", "content": target.tokenizer.decode(answer, skip_special_tokens=True)}
    asked = {"role": "user", "content": prompt.later[0]}
    return replace(prompt, messages=[*prompt.messages, said, asked], later=prompt.later[1:])


def seeded(seed: int, index: int, turn: int) -> torch.Generator:
    """A generator of one answer's own, so that batch size and order change no text."""
    digest = hashlib.sha256(f"{seed}/{index}/{turn}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def shares(passes: Sequence[Pass]) -> dict[str, float]:
    """Where the time of the verify passes went: target, draft and bookkeeping (all the rest), as shares of 1."""
    total = sum(each.total for each in passes)
    if not total:
        return {"target": 0.0, "draft": 0.0, "bookkeeping": 0.0}
    spent, drafting = sum(each.target for each in passes) / total, sum(each.draft for each in passes) / total
    return {"target": spent, "draft": drafting, "bookkeeping": 1 - spent - drafting}


def memory_in_use(device: torch.device) -> int:
    """Bytes: the most that the device has given out so far, or what the process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def gpu_utilization(device: torch.device) -> float | None:
    """The share of the last moments in which the GPU was at work, by NVML; None without a GPU or NVML."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):
        return None


def sample(answer: Answer, target: Target) -> list[dict[str, str]]:
    """The beginning of an answer cut into pieces by who wrote them: ``plain`` (a pass without a draft, or the prefill), an
    accepted ``draft``, or the target's ``bonus`` behind one."""
    by = ["plain"]
    for depth, taken in zip(answer.drafted.proposed, answer.drafted.accepted, strict=True):
        by += ["draft"] * taken + ["bonus" if depth else "plain"]
    pieces: list[dict[str, str]] = []
    text, tokens = "", answer.drafted.tokens[:SAMPLE]
    for end, name in zip(range(1, len(tokens) + 1), by, strict=False):
        whole = target.tokenizer.decode(tokens[:end]) if target.tokenizer else " ".join(map(str, tokens[:end]))
        new, text = whole[len(text) :], whole
        if pieces and pieces[-1]["by"] == name:
            pieces[-1]["text"] += new
        else:
            pieces.append({"text": new, "by": name})
    return pieces


@torch.inference_mode()
def divergence(target: Target, prompt: list[int], ours: list[int], plain: list[int]) -> dict[str, Any]:
    """Where two greedy texts part, and how far the worse of their two tokens is behind the target's best one there.

    A text that just stops has no token there and ties with nothing: its margin is the row's whole range.
    """
    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain)))
    ids = torch.tensor(prompt + plain[:at], device=target.device)
    logits = target.prefill(ids, target.new_cache(), [])[0].float()
    pair = ours[at : at + 1] + plain[at : at + 1]
    worse = logits[pair].min() if len(pair) == 2 else logits.min()
    return {"token": at, "ours": ours[at : at + 1], "plain": plain[at : at + 1], "margin": float(logits.max() - worse)}
