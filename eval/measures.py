"""The numbers of a measurement, from what the prompts gave. docs/evaluation.md defines every one of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .statistics import interval, speedup
from .statistics import tau as tau_of_sums
from .verifier import Generation

GRAM = 4  # tokens or words: how long a repeated run is that counts for the repetitiveness
SPANS = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # output positions at which τ is looked at apart


@dataclass(frozen=True)
class Answer:
    """One answered turn of a question: with drafts, and plainly where it was compared."""

    question: int
    turn: int
    category: str
    prompt: list[int]
    drafted: Generation
    plain: Generation | None


def measures(answers: Sequence[Answer], length: int, seed: int) -> dict[str, Any]:
    """What can be said of these answers, drafts being ``length`` deep at most."""
    runs = [answer.drafted for answer in answers]
    positions = per_position(runs, length)
    return {
        "prompts": len({answer.question for answer in answers}),
        "emitted_tokens": sum(len(run.tokens) for run in runs),
        "verify_passes": passes(runs),
        "tau": tau(runs),
        "tau_interval": tau_interval(answers, seed),
        "tau_per_request": sum(tau([run]) for run in runs) / len(runs) if runs else 1.0,
        "mean_acceptance_length": 1 + accepted(runs) / drafts(runs) if drafts(runs) else 1.0,
        "tokens_per_pass": sum(len(run.tokens) - 1 for run in runs) / (passes(runs) or 1),
        "accepted_per_position": positions,
        "conditional_per_position": conditional(runs, length),
        "acceptance_rate": accepted(runs) / (sum(run.drafted for run in runs) or 1),
        "counters": counters(runs, length),
        "accepted_lengths": lengths(runs, length),
        "tau_by_output_position": by_output_position(runs),
        "ttft": spread([run.seconds["prefill"] for run in runs]),
        "tpot": spread([per_token(run) for run in runs if len(run.tokens) > 1]),
        "repetitiveness": repetitiveness(answers),
        **speeds(answers, seed),
    }


# -- acceptance --------------------------------------------------------------------------------------------------


def passes(runs: Sequence[Generation]) -> int:
    return sum(len(run.accepted) for run in runs)


def accepted(runs: Sequence[Generation]) -> int:
    return sum(sum(run.accepted) for run in runs)


def drafts(runs: Sequence[Generation]) -> int:
    """Passes in which something was drafted: vLLM's number of drafts."""
    return sum(depth > 0 for run in runs for depth in run.proposed)


def tau(runs: Sequence[Generation]) -> float:
    """Acceptance length pooled over verify passes: 1 + accepted drafts / passes."""
    return 1 + accepted(runs) / passes(runs) if passes(runs) else 1.0


def tau_interval(answers: Sequence[Answer], seed: int) -> list[float]:
    """The 95 % bootstrap interval of the pooled τ, resampling questions with all their turns."""
    counts = [(sum(answer.drafted.accepted), len(answer.drafted.accepted)) for answer in answers]
    return interval(by_question(answers, counts), tau_of_sums, seed) or [1.0, 1.0]


def by_question(answers: Sequence[Answer], counts: Sequence[Sequence[float]]) -> np.ndarray:
    """The counts of every answer summed over the turns of a question: [questions, k]."""
    questions = sorted({answer.question for answer in answers})
    found = np.zeros((len(questions), len(counts[0]) if counts else 2))
    for answer, count in zip(answers, counts, strict=True):
        found[questions.index(answer.question)] += count
    return found


def reached(runs: Sequence[Generation], length: int) -> tuple[list[int], list[int]]:
    """For every position from 1 on, how many drafts proposed it and how many of them were accepted there."""
    rounds = Counter(pair for run in runs for pair in zip(run.proposed, run.accepted, strict=True))
    positions = range(1, length + 1)
    proposed = [sum(count for (depth, _), count in rounds.items() if depth >= at) for at in positions]
    right = [sum(count for (_, taken), count in rounds.items() if taken >= at) for at in positions]
    return proposed, right


def per_position(runs: Sequence[Generation], length: int) -> list[float]:
    """Unconditional acceptance: accepted at position i / drafts that proposed position i."""
    return [right / proposed if proposed else 0.0 for proposed, right in zip(*reached(runs, length), strict=True)]


def conditional(runs: Sequence[Generation], length: int) -> list[float | None]:
    """Accepted at position i / drafts that proposed it and were accepted up to there; null where none came so far."""
    rounds = Counter(pair for run in runs for pair in zip(run.proposed, run.accepted, strict=True))
    found: list[float | None] = []
    for at in range(1, length + 1):
        tried = sum(count for (depth, taken), count in rounds.items() if depth >= at and taken >= at - 1)
        right = sum(count for (_, taken), count in rounds.items() if taken >= at)
        found.append(right / tried if tried else None)
    return found


def counters(runs: Sequence[Generation], length: int) -> dict[str, Any]:
    """The numbers that vLLM keeps under these names (``vllm:spec_decode_…``), for chains by its definitions."""
    return {
        "num_drafts": drafts(runs),
        "num_draft_tokens": sum(run.drafted for run in runs),
        "num_accepted_tokens": accepted(runs),
        "num_accepted_tokens_per_pos": reached(runs, length)[1],
    }


def lengths(runs: Sequence[Generation], length: int) -> list[int]:
    """How many passes accepted 0, 1, … ``length`` tokens."""
    seen = Counter(taken for run in runs for taken in run.accepted)
    return [seen[taken] for taken in range(length + 1)]


def by_output_position(runs: Sequence[Generation]) -> list[dict[str, Any]]:
    """τ of the passes that began at so many emitted tokens: acceptance may decay over a long answer (2605.09329)."""
    found = []
    for low, high in zip(SPANS, (*SPANS[1:], None), strict=True):
        inside = []
        for run in runs:
            at = 1
            for taken in run.accepted:
                if at >= low and (high is None or at < high):
                    inside.append(taken)
                at += taken + 1
        if inside:
            found.append({"from": low, "to": high, "passes": len(inside), "tau": 1 + sum(inside) / len(inside)})
    return found


def sizes(runs: Sequence[Generation]) -> dict[str, float]:
    """The drafts as they were: mean depth and mean tokens of a verify pass."""
    count = passes(runs) or 1
    return {
        "mean_length": sum(sum(run.proposed) for run in runs) / count,
        "mean_nodes": sum(run.drafted for run in runs) / count,
    }


def repetitiveness(answers: Sequence[Answer]) -> float:
    """The share of the outputs' runs of four tokens that stood before in the prompt or the output."""
    return repeated_share([(answer.prompt, answer.drafted.tokens) for answer in answers]) or 0.0


def repeated_share(pairs: Sequence[tuple[list[Any], list[Any]]]) -> float | None:
    """Of prompts and outputs, the share of the outputs' runs of GRAM items that stood before; None where all are shorter."""
    repeated = total = 0
    for prompt, output in pairs:
        text, seen = prompt + output, set()
        for start in range(len(text) - GRAM + 1):
            gram = tuple(text[start : start + GRAM])
            if start >= len(prompt):
                repeated, total = repeated + (gram in seen), total + 1
            seen.add(gram)
    return repeated / total if total else None


# -- time --------------------------------------------------------------------------------------------------------


def speeds(answers: Sequence[Answer], seed: int) -> dict[str, Any]:
    """Output tokens per second behind the prefill, of the questions that were decoded both ways where there are any."""
    compared = [answer for answer in answers if answer.plain]
    counts = [(*answer.drafted.paced, *(answer.plain.paced if answer.plain else (0, 0.0))) for answer in compared]
    plain = rate([answer.plain for answer in compared if answer.plain])
    drafted = rate([answer.drafted for answer in compared or answers])
    return {
        "tokens_per_s": drafted,
        "baseline_prompts": len({answer.question for answer in compared}),
        "baseline_tokens_per_s": plain,
        "speedup": drafted / plain if plain else None,
        "speedup_interval": interval(by_question(compared, counts), speedup, seed) if plain else None,
    }


def rate(runs: Sequence[Generation]) -> float:
    """Tokens per second of passes in which a full batch ran."""
    seconds = sum(run.paced[1] for run in runs)
    return sum(run.paced[0] for run in runs) / seconds if seconds else 0.0


def per_token(run: Generation) -> float:
    """Seconds from one output token of a request to the next, behind the first."""
    return (run.seconds["total"] - run.seconds["prefill"]) / (len(run.tokens) - 1)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 95th percentile, in seconds."""
    if not values:
        return None
    return {"mean": float(np.mean(values)), "p50": float(np.median(values)), "p95": float(np.quantile(values, 0.95))}
