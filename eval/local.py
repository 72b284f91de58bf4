"""What a local target shows of itself: how fast it answers, what its passes cost, and what proposers achieve on it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from ..console import Progress, note
from ..errors import UserError
from ..fetch import load_tokenizer, located
from ..heads.base import DraftHead, read_config
from ..heads.drafting import Form
from ..heads.own_lm import compare_tokenizers
from ..sampling import GREEDY, Sampling
from ..target import Target
from . import acceptance
from .costs import measure_drafts, measure_prefill, measure_steps
from .harness import seeded
from .measures import Answer, rate, repetitiveness
from .prompts import Prompt
from .proposers import HeadProposer, Proposer
from .registry import MODEL, read_head, read_lookup
from .service import DraftCost, Mean, ProposerFacts, Service
from .verifier import Request, Run, decode

BATCHES = (1, 2, 4, 8)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
PLAIN = 8  # prompts that are answered plainly, for the speeds
TIMED = 64  # tokens of an answer while drafting is timed at larger batches


def measure_service(
    target: Target,
    proposers: Sequence[str],
    prompts: Sequence[Prompt],
    form: Form,
    max_new: int,
    sampling: Sampling = GREEDY,
    batches: Sequence[int] = BATCHES,
    seed: int = 0,
    show: bool = False,
) -> Service:
    """Answer the prompts plainly and with every proposer, one at a time and in turns, and time passes at every batch size.

    ``proposers``: as eval takes them; heads and models draft in ``form``. A model with another tokenizer is not measured, but
    said to have one.
    """
    ids = [prompt.ids(target) for prompt in prompts]
    requests = [Request(own, max_new, seeded(seed, i, 0), prompts[i].stop) for i, own in enumerate(ids)]
    named = names(proposers)
    usable = {text: loaded(text, target, form) for text in named if not other_tokenizer(text, target)}
    runs = in_turns(target, {text: proposer for text, (proposer, _) in usable.items()}, requests, sampling, seed)
    found: dict[str, ProposerFacts] = {}
    largest = 1
    for text, name in named.items():
        if text not in usable:
            found[text] = ProposerFacts(name=name, kind="model", path=path(text), tokenizer_equal=False)
            continue
        note(f"timing what {text} drafts")
        proposer, head = usable[text]
        facts, size = facts_of(target, proposer, head, text, name, runs[text], requests, sampling, batches)
        slow, fast = rate(runs[None].generations), rate(runs[text].generations[:PLAIN])
        alone = fast / slow if slow and fast else None  # answers of one token have no speed
        found[text], largest = facts.model_copy(update={"speedup_alone": alone}), max(largest, size)
    with torch.inference_mode():
        waits = measure_prefill(target, ids[:PLAIN])
    plain = runs[None]
    told = Mean.of([len(each.tokens) for each in plain.generations])
    asked = Mean.of([len(own) for own in ids])
    tokens = sorted({*(count for count in TOKENS if count <= largest), largest + 1})
    context = round(asked.mean + told.mean / 2)
    answers = [Answer(i, 0, "all", ids[i], each, None) for i, each in enumerate(plain.generations)]
    return Service(
        name=target.name,
        target=target.name,
        prompt_tokens=asked,
        output_tokens=told,
        ttft=Mean.of(waits),
        tpot=Mean.of(per_token(plain)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        repetitiveness=repetitiveness(answers),
        memory_free=memory_free(target.device),
        step_costs=measure_steps(target, batches, tokens, context, sampling, show=show),
        proposers=list(found.values()),
    ).from_("measured")


def in_turns(
    target: Target, proposers: dict[str, Proposer], requests: Sequence[Request], sampling: Sampling, seed: int
) -> dict[str | None, Run]:
    """The requests answered one at a time by every proposer and, the first of them, plainly (None), in rotating order."""
    runs: dict[str | None, Run] = {text: Run([], [], {}) for text in (None, *proposers)}
    with Progress("answering", len(requests)) as bar:
        for i, request in enumerate(requests):
            turns: list[str | None] = [None, *proposers] if i < PLAIN else list(proposers)
            for text in turns[i % len(turns) :] + turns[: i % len(turns)] if turns else []:
                proposer = proposers[text] if text else None
                with proposer.adapted(target) if proposer else nullcontext():
                    own = decode(target, proposer, [replace(request, generator=seeded(seed, i, 0))], sampling)
                runs[text].generations += own.generations
                runs[text].passes += own.passes
            bar.advance()
    return runs


def names(proposers: Sequence[str]) -> dict[str, str]:
    """A short name for every proposer: a look-up's own, a head directory's last part; numbered where two are alike."""
    found: dict[str, str] = {}
    for text in dict.fromkeys(proposers):
        short = kind_of(text)
        found[text] = short if short not in found.values() else f"{short}:{len(found) + 1}"
    return found


def kind_of(text: str) -> str:
    if text.startswith(MODEL):
        return "draft_model"
    return text.partition(":")[0] if read_lookup(text) else read_config(Path(text)).kind


def path(text: str) -> str | None:
    return None if read_lookup(text) else text.removeprefix(MODEL)


def other_tokenizer(text: str, target: Target) -> bool:
    """Whether a model that is to draft as it is writes other tokens than the target."""
    if not text.startswith(MODEL) or target.tokenizer is None:
        return False
    where, how = located(text.removeprefix(MODEL))
    theirs = load_tokenizer(where, **how)
    try:
        compare_tokenizers(target, theirs, text)
    except UserError as error:
        note(str(error))
        return True
    return False


def loaded(text: str, target: Target, form: Form) -> tuple[Proposer, DraftHead | None]:
    lookup = read_lookup(text)
    if lookup:
        return lookup, None
    head = read_head(text, target)
    return HeadProposer(head, form), head


def facts_of(
    target: Target,
    proposer: Proposer,
    head: DraftHead | None,
    text: str,
    name: str,
    run: Run,
    requests: Sequence[Request],
    sampling: Sampling,
    batches: Sequence[int],
) -> tuple[ProposerFacts, int]:
    """What a proposer achieved at batch 1 and what its drafting costs; and the most tokens that a pass read for it."""
    read = [each.nodes - 1 for each in run.passes]
    varied = any(size != proposer.length for size in read)
    fixed = proposer.described()["kind"] != "chain" or max(read, default=0) > proposer.length
    return ProposerFacts(
        name=name,
        kind="lookup" if head is None else "model" if text.startswith(MODEL) else "head",
        path=path(text),
        tokenizer_equal=True,
        vocabulary_equal=True,
        acceptance=acceptance.measured(run.generations, proposer.length),
        temperature=sampling.temperature,
        sizes=acceptance.draft_sizes(read) if varied or fixed else None,
        tree=fixed,
        draft_seconds=drafting(target, proposer, requests, batches, sampling),
        memory=size_of(head) if head else 0.0,
    ), max(read, default=0)


def drafting(
    target: Target, proposer: Proposer, requests: Sequence[Request], batches: Sequence[int], sampling: Sampling
) -> list[DraftCost]:
    """Seconds of drafting at every batch size, and for a chain at a length of 1 too."""
    short = [Request(each.prompt, TIMED, each.generator) for each in requests]
    found = measure_drafts(target, proposer, short, batches, sampling)
    if isinstance(proposer, HeadProposer) and proposer.described()["kind"] == "chain" and proposer.length > 1:
        found += measure_drafts(target, HeadProposer(proposer.head, proposer.form.cut(1)), short, batches, sampling)
    return found


def per_token(run: Run) -> list[float]:
    """Seconds from token to token of every answer that has several."""
    several = [each for each in run.generations if len(each.tokens) > 1]
    return [(each.seconds["total"] - each.seconds["prefill"]) / (len(each.tokens) - 1) for each in several]


def size_of(head: DraftHead) -> float:
    """Bytes of its weights."""
    return float(sum(weight.numel() * weight.element_size() for weight in head.parameters()))


def memory_free(device: torch.device) -> float:
    """Bytes that are left on the device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
