"""Does a head draft better behind prompts that are rendered in another way than a server renders them?"""

from typing import Any

import numpy as np

from ..data.template import QUESTION, REPLY, Refused, letters, render, template_of, tokens
from .case import Case, Part, between
from .walk import Text, Walked, tau, written

AS_TRAINED, WITHOUT_OPENING = (
    "as the recipe's target renders them",
    "without what the template puts ahead of the first question",
)
SURE = 0.1  # tokens per pass that another rendering must bring at least to be the one that was trained on
NEXT = "second question"


def template(case: Case) -> Part:
    """The target's replies behind other renderings of their prompts: with the recipe's own tokenizer where another one serves,
    and without what the template adds by itself (BOS, a default system turn)."""
    name = "template"
    opening = added_opening(case.target.tokenizer)
    gains = {how: crossed(case, prompts, how) for how, prompts in renderings(case, opening).items()}
    if not gains:
        return Part(name, "the template adds nothing of its own, and the run's is the one that serves.", 0.0)
    opened = stored_openings(case, opening)
    evidence: dict[str, Any] = {f"gain {how}": gain for how, (gain, _) in gains.items()}
    if opened is not None:
        evidence["stored rows that open as served"] = opened
    how = max(gains, key=lambda how: gains[how][0])
    why = ""
    if AS_TRAINED in gains:
        how, why = AS_TRAINED, "the recipe's target has another tokenizer or chat template than the one that serves"
    elif opened is not None and opened < 0.5:
        how = WITHOUT_OPENING
        why = f"{opened:.0%} of the stored rows that the run learnt from open with {shown(opening, case)}, as served ones do"
    elif gains[how][1][0] > SURE:
        why = "the head drafts better behind prompts that no server writes"
    gain, bounds = gains[how]
    if not why:
        says = "no other rendering suits the head better than the server's."
        return Part(name, says, max(0.0, gain), bounds, False, evidence)
    says = f"{why}; {how}, τ changes by {gain:+.2f}."
    step = (
        "train on conversations that the served model's own tokenizer and chat template render, default system turn included."
    )
    return Part(name, says, max(0.0, gain), bounds, True, evidence, step)


def crossed(case: Case, prompts: list[list[int]], how: str) -> tuple[float, tuple[float, float]]:
    """What τ gains where prompts are rendered as ``prompts``, with its 95 % interval.

    A reply is easiest behind the very prompt that it was written behind. So the replies to both renderings are read behind
    both, and the two gains are averaged.
    """
    served = [text.ids[: text.start] for text in case.texts]
    theirs = written(case.target, case.head, prompts, [text.category for text in case.texts], case.max_new)
    pairs = [(i, text) for i, text in enumerate(theirs) if text]
    walks = [
        list(case.own),
        case.walked([behind(prompts[i], text) for i, text in enumerate(case.texts)], how),
        case.walked([behind(served[i], text) for i, text in pairs], how),
        case.walked([text for _, text in pairs], how),
    ]
    ours = list(zip(walks[0], walks[1], strict=True))
    others = list(zip(walks[2], walks[3], strict=True))

    def gain(some: list[tuple[Walked, Walked]], more: list[tuple[Walked, Walked]]) -> float:
        each = [tau([after for _, after in pairs]) - tau([before for before, _ in pairs]) for pairs in (some, more) if pairs]
        return float(np.mean(each))

    return gain(ours, others), between(ours, others, gain)


def renderings(case: Case, opening: list[int]) -> dict[str, list[list[int]]]:
    """Other renderings of the prompts; only such as differ from the server's."""
    found = {}
    served = [text.ids[: text.start] for text in case.texts]
    if case.asked and case.asked != served:
        found[AS_TRAINED] = case.asked
    if opening and any(ids[: len(opening)] == opening for ids in served):
        found[WITHOUT_OPENING] = [ids[len(opening) :] if ids[: len(opening)] == opening else ids for ids in served]
    return found


def behind(prompt: list[int], text: Text) -> Text:
    return Text(prompt + text.ids[text.start :], len(prompt), text.category)


def added_opening(tokenizer: Any) -> list[int]:
    """The ids that the template writes ahead of a first question and not ahead of a later one."""
    first, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": REPLY}
    try:
        alone, whole = (
            render(chat, tokenizer, "a sample chat") for chat in ([first], [first, answer, {**first, "content": NEXT}])
        )
    except Refused:
        return []
    known = template_of(tokenizer)
    header = whole.rpartition(REPLY)[2].partition(NEXT)[0].removeprefix(known.ending).removeprefix(known.rest)
    before = alone.partition(QUESTION)[0]
    return tokens(before.removesuffix(header), tokenizer) if header and before.endswith(header) else []


def stored_openings(case: Case, opening: list[int]) -> float | None:
    """The share of the rows in the run's store that open as the template has it; None where there is no store."""
    if not case.recorded or not opening:
        return None
    return float(np.mean([row.ids[: len(opening)].tolist() == opening for row in case.taught]))


def shown(opening: list[int], case: Case) -> str:
    text = letters(opening, case.target.tokenizer).strip()
    return repr(text if len(text) < 60 else f"{text[:56]} ...")
