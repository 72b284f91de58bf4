"""Entries of a report's results by the harness's own arithmetic, from answers that were thrown with dice."""

import random
from typing import Any

from draftsmith.eval.measures import Answer, measures, sizes
from draftsmith.eval.verifier import Generation


def thrown(rng: random.Random, sure: float, depth: int, tokens: int, pace: float) -> Generation:
    """An answer whose drafts of ``depth`` are accepted, token by token, with the chance ``sure``; ``pace``: seconds a pass."""
    proposed: list[int] = []
    accepted: list[int] = []
    emitted = 1
    while emitted < tokens:
        taken = next((at for at in range(depth) if rng.random() > sure), depth)
        proposed.append(depth)
        accepted.append(taken)
        emitted += taken + 1
    seconds = sum(pace * rng.uniform(0.8, 1.2) for _ in accepted)
    text = [rng.randrange(100) for _ in range(emitted)]
    spent = {"prefill": 3 * pace, "total": 3 * pace + seconds}
    return Generation(text, proposed, accepted, False, spent, sum(proposed), (emitted - 1, seconds))


def entry(
    proposer: str = "eagle3",
    sure: float = 0.7,
    depth: int = 5,
    prompts: int = 24,
    seed: int = 0,
    categories: tuple[str, ...] = ("math", "chat", "code"),
    tokens: int = 150,
    pace: float = 0.05,
    **changes: Any,
) -> dict[str, Any]:
    """One entry; ``changes`` replace its keys. The same seed asks the same questions."""
    asked, luck = random.Random(seed), random.Random(f"{proposer} {sure} {depth} {changes.get('batch')}")
    answers = []
    for question in range(prompts):
        length, hard = asked.randrange(tokens // 2, tokens), asked.uniform(-0.2, 0.2)
        drafted = thrown(luck, min(0.99, max(0.0, sure + hard)), depth, length, pace)
        plain = thrown(luck, 0, 0, length, pace * 0.8)
        answers.append(Answer(question, 0, categories[question % len(categories)], [1, 2, 3], drafted, plain))
    runs = [answer.drafted for answer in answers]
    by_category = {
        name: measures([answer for answer in answers if answer.category == name], depth, 0)
        for name in sorted({answer.category for answer in answers})
    }
    chain = {"kind": "chain", "name": f"chain:{depth}" if depth else "none", "length": depth, "nodes": depth}
    return {
        "proposer": proposer,
        "target": "tiny",
        **measures(answers, depth, 0),
        "categories": {name: found["tau"] for name, found in by_category.items()},
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "draft": {**chain, "paths": None, "stop": None, "sampled": False, **sizes(runs)},
        "search": None,
        "batch": 1,
        "max_new_tokens": tokens,
        "time": {"target": 0.6, "draft": 0.3, "bookkeeping": 0.1},
        "peak_memory": 2**30,
        "gpu_utilization": None,
        "lossless": True,
        "lossless_to": "the target",
        "near_ties": [],
        "lossy": None,
        "by_category": by_category,
        "per_prompt": [row(answer) for answer in answers],
        "sample": pieces(runs[0]),
        **changes,
    }


def row(answer: Answer) -> dict[str, Any]:
    drafted, plain = answer.drafted, answer.plain or answer.drafted
    return {
        "id": f"q{answer.question}",
        "turn": answer.turn,
        "asked": f"{answer.question:012x}",
        "category": answer.category,
        "accepted": sum(drafted.accepted),
        "passes": len(drafted.accepted),
        "drafted": drafted.drafted,
        "tokens": drafted.paced[0],
        "seconds": drafted.paced[1],
        "plain_tokens": plain.paced[0],
        "plain_seconds": plain.paced[1],
    }


def pieces(run: Generation) -> list[dict[str, str]]:
    """A text marked as the harness marks it."""
    words = "the sea is wide & the <ship> is small, so we sail on through the night and the day\n".split(" ")
    found = [{"text": "Well ", "by": "plain"}]
    for at, taken in enumerate(run.accepted[:40]):
        drafted = [words[(at * 3 + i) % len(words)] for i in range(taken)]
        found += [{"text": " ".join(drafted) + " ", "by": "draft"}] if drafted else []
        found.append({"text": words[(at * 5 + 2) % len(words)] + " ", "by": "bonus" if run.proposed[at] else "plain"})
    return found
