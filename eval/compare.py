"""Runs side by side: which of their results may be compared, and what the prompts they share say of the difference."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import statistics
from .report import read_report
from .statistics import by_question, holm, paired
from .words import aspects, counted, title

VERSION = 1  # of the document, see docs/reports.md
SURE = 0.05  # the share of verdicts that may be wrong where there is no difference
SHAKY = 0.1  # by how much plain decoding may differ between two runs before their clocks are not worth comparing
CONDITIONS = ("target", "temperature", "top_p", "top_k", "batch", "max_new_tokens")
MEASURED_BY = ("dtype", "machine", "device", "threads", "versions")  # of a report's ``about``


@dataclass(frozen=True)
class Run:
    """A report by its name in the comparison."""

    name: str
    path: Path
    about: dict[str, Any]
    results: list[dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Two results that answer the same question: ``a`` is what ``b`` is compared with."""

    a: dict[str, Any]
    b: dict[str, Any]
    name_a: str
    name_b: str


def compare(paths: Sequence[Path], seed: int = 0) -> dict[str, Any]:
    """Compare every later report with the first, or the results of a single one with its first; see docs/reports.md.

    Raises UserError for what is no report. Results without a partner are listed with the reason.
    """
    runs = read_runs(paths)
    pairs: list[Pair] = []
    unpaired: list[dict[str, str]] = []
    if len(runs) == 1:
        pairs, unpaired = within(runs[0])
    for run in runs[1:]:
        found, rest = between(runs[0], run)
        pairs += found
        unpaired += rest
    return {
        "version": VERSION,
        "runs": [{"name": run.name, "path": str(run.path), "results": len(run.results)} for run in runs],
        "notes": [note for run in runs[1:] for note in other_machines(runs[0], run)],
        "pairs": adjusted([judged(pair, seed) for pair in pairs]),
        "unpaired": unpaired,
    }


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The reports, each with a name of its own."""
    names = told_apart([path.absolute().parent if path.is_file() else path.absolute() for path in paths])
    documents = [read_report(path) for path in paths]
    return [
        Run(name, path, document["about"], document["results"])
        for name, path, document in zip(names, paths, documents, strict=True)
    ]


def told_apart(places: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes; numbered where the same path stands twice."""
    for length in range(1, max(len(place.parts) for place in places)):
        names = ["/".join(place.parts[-length:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [f"{place.name} ({number})" for number, place in enumerate(places, start=1)]


# -- what goes with what ---------------------------------------------------------------------------------------------


def conditions(result: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for two results to be comparable, prompts aside."""
    return {key: result[key] for key in CONDITIONS}


def who(result: dict[str, Any]) -> tuple[str, ...]:
    """What is compared: the proposer and how it drafts."""
    phrases = aspects(result)
    return phrases["draft"], phrases["sampled"], phrases["lossy"]


def asked(result: dict[str, Any]) -> dict[str, str]:
    """Every question's id and the digest of its first turn; later turns hold the model's own answers."""
    return {row["id"]: row["asked"] for row in result["per_prompt"] if row["turn"] == 0}


def shared(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    return set(asked(a).values()) & set(asked(b).values())


def within(run: Run) -> tuple[list[Pair], list[dict[str, str]]]:
    """Every result against the first one of the same conditions and prompts."""
    pairs: list[Pair] = []
    firsts: list[dict[str, Any]] = []
    for result in run.results:
        first = next((one for one in firsts if conditions(one) == conditions(result) and shared(one, result)), None)
        if first is None:
            firsts.append(result)
        else:
            pairs.append(Pair(first, result, title(first), title(result)))
    with_partner = {id(pair.a) for pair in pairs}
    alone = [one for one in firsts if id(one) not in with_partner]
    return pairs, [lonely(run, one, "no other result has its conditions and prompts") for one in alone]


def between(first: Run, other: Run) -> tuple[list[Pair], list[dict[str, str]]]:
    """The results of two runs that go together: the same proposer drafting the same way, or the only two that are left."""
    ours, theirs = list(first.results), list(other.results)
    pairs: list[Pair] = []
    for same in (True, False):
        for b in list(theirs):
            candidates = [a for a in ours if fits(a, b) and (who(a) == who(b)) is same]
            rivals = [one for one in theirs if fits(candidates[0], one)] if candidates else []
            if candidates and (same or len(candidates) == len(rivals) == 1):
                a = max(candidates, key=lambda a: len(shared(a, b)))
                pairs.append(Pair(a, b, f"{first.name}: {title(a)}", f"{other.name}: {title(b)}"))
                ours, theirs = without(ours, a), without(theirs, b)
    alone = [lonely(other, b, why_alone(b, first)) for b in theirs]
    return pairs, [lonely(first, a, why_alone(a, other)) for a in ours] + alone


def fits(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return conditions(a) == conditions(b) and bool(shared(a, b))


def without(results: list[dict[str, Any]], gone: dict[str, Any]) -> list[dict[str, Any]]:
    return [result for result in results if result is not gone]


def lonely(run: Run, result: dict[str, Any], why: str) -> dict[str, str]:
    return {"run": run.name, "result": title(result), "why": why}


def why_alone(result: dict[str, Any], other: Run) -> str:
    """What keeps a result from being compared with any of another run."""
    own = conditions(result)
    unlike = [[key for key in CONDITIONS if own[key] != conditions(one)[key]] for one in other.results]
    nearest = min(range(len(unlike)), key=lambda i: len(unlike[i]))
    if unlike[nearest]:
        theirs = conditions(other.results[nearest])
        return "; ".join(f"{key} is {own[key]} here and {theirs[key]} in {other.name}" for key in unlike[nearest])
    alike = [one for one in other.results if conditions(one) == own]
    if any(shared(result, one) for one in alike):
        return f"{other.name} has no result of the same proposer and draft left, and more than one that could stand for it"
    ids = set(asked(result)) & {name for one in alike for name in asked(one)}
    named = f", though {counted(len(ids), 'id')} are alike: their text or the chat template is another" if ids else ""
    return f"other prompts: none of its {result['prompts']} is among those of {other.name}{named}"


def other_machines(first: Run, other: Run) -> list[str]:
    """What else differed between two runs and may show in their clocks."""
    unlike = [key for key in MEASURED_BY if first.about.get(key) != other.about.get(key)]
    return [f"{key}: {first.about.get(key)} in {first.name}, {other.about.get(key)} in {other.name}" for key in unlike]


# -- what is found ---------------------------------------------------------------------------------------------------


def judged(pair: Pair, seed: int) -> dict[str, Any]:
    """What the prompts that both results have in common say of them."""
    common = sorted(shared(pair.a, pair.b))
    both = [name for name in common if all(timed_plainly(result, name) for result in (pair.a, pair.b))]
    plain = ("tokens", "seconds", "plain_tokens", "plain_seconds")
    return {
        "conditions": conditions(pair.a),
        "a": pair.name_a,
        "b": pair.name_b,
        "prompts": len(common),
        "tau": difference(pair, common, ("accepted", "passes"), seed),
        "tokens_per_s": ratio(pair, common, plain[:2], statistics.rate, seed),
        "speedup": ratio(pair, both, plain, statistics.speedup, seed),
        "notes": notes(pair, len(common)),
    }


def counts(result: dict[str, Any], names: Iterable[str], keys: Sequence[str]) -> np.ndarray:
    """What every question of these digests adds to the sums, all its turns together: [questions, k]."""
    digests = asked(result)
    found = by_question(({**row, "id": digests[row["id"]]} for row in result["per_prompt"]), keys)
    return np.array([found[name] for name in names])


def timed_plainly(result: dict[str, Any], name: str) -> bool:
    digests = asked(result)
    return all(row["plain_seconds"] is not None for row in result["per_prompt"] if digests[row["id"]] == name)


def difference(pair: Pair, names: Sequence[str], keys: Sequence[str], seed: int) -> dict[str, Any]:
    """B's τ minus A's."""
    a, b = counts(pair.a, names, keys), counts(pair.b, names, keys)
    found, interval, p = paired(a, b, statistics.tau, seed)
    pooled = [float(statistics.tau(each.sum(0))) for each in (a, b)]
    return {"a": pooled[0], "b": pooled[1], "difference": found, "interval": interval, "p": p, "prompts": len(names)}


def ratio(
    pair: Pair, names: Sequence[str], keys: Sequence[str], speed: statistics.Statistic, seed: int
) -> dict[str, Any] | None:
    """B's speed over A's; None where one of them was not timed."""
    if not names:
        return None
    a, b = counts(pair.a, names, keys), counts(pair.b, names, keys)
    pooled = [float(speed(each.sum(0))) for each in (a, b)]
    if not all(math.isfinite(each) and each > 0 for each in pooled):
        return None
    found, interval, p = paired(a, b, lambda sums: np.log(speed(sums)), seed)
    factors = [math.exp(end) for end in interval]
    return {"a": pooled[0], "b": pooled[1], "ratio": math.exp(found), "interval": factors, "p": p, "prompts": len(names)}


def adjusted(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pairs with a verdict on every measure, which allows for how many pairs there are."""
    for measure in ("tau", "tokens_per_s", "speedup"):
        asked_of = [pair for pair in pairs if pair[measure]]
        for pair, p in zip(asked_of, holm([pair[measure]["p"] for pair in asked_of]), strict=True):
            pair[measure] |= {"p_adjusted": p, "verdict": verdict(pair[measure], p)}
    return pairs


def verdict(found: dict[str, Any], p: float) -> str:
    """Which of the two is shown to be above, in words."""
    if p < SURE:
        return "B above A" if found["b"] > found["a"] else "A above B"
    n = found["prompts"]
    few = " (too few to show any)" if 2 / 2**n >= SURE else ""
    return f"no difference shown with {counted(n, 'prompt')}{few}"


def notes(pair: Pair, common: int) -> list[str]:
    """What must be known of the two before their difference is quoted."""
    found = []
    left_out = [result["prompts"] - common for result in (pair.a, pair.b)]
    if any(left_out):
        found.append(f"only the {common} shared prompts count: {left_out[0]} of A's and {left_out[1]} of B's are left out")
    for name, result in (("A", pair.a), ("B", pair.b)):
        if result["lossy"]:
            found.append(f"{name} is lossy ({result['lossy']}): its τ and speed are of another text")
        elif result["lossless"] is False:
            found.append(f"{name} is NOT lossless: its text is not the target's own")
    if pair.a["lossless_to"] != pair.b["lossless_to"]:
        found.append(f"A keeps the text of {pair.a['lossless_to']}, B that of {pair.b['lossless_to']}")
    plain = [result["baseline_tokens_per_s"] for result in (pair.a, pair.b)]
    if all(plain) and max(plain) > (1 + SHAKY) * min(plain):
        found.append(
            f"plain decoding ran at {plain[0]:.1f} tokens/s beside A and {plain[1]:.1f} beside B: trust the speed-ups, each "
            "measured against its own, not the tokens/s"
        )
    return found
