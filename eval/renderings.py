"""Does a head draft better behind prompts that are rendered in another way than a server renders them?"""

from typing import Any

import numpy as np

from ..data.template import QUESTION, REPLY, Refused, letters, render, template_of, tokens
from .case import Case, Part, interval
from .walk import Text, tau

AS_TRAINED, WITHOUT_OPENING = (
    "as the recipe's target renders them",
    "without what the template puts ahead of the first question",
)
SURE = 0.1  # tokens per pass that another rendering must bring at least to be the one that was trained on
NEXT = "second question"


def template(case: Case) -> Part:
    """The target's replies behind other renderings of their prompts: with the recipe's own tokenizer where another one serves,
    and without what the template adds by itself (BOS, a default system turn)."""
    name, served = "template", tau(case.own)
    opening = added_opening(case.target.tokenizer)
    others = renderings(case, opening)
    if not others:
        return Part(name, "the template adds nothing of its own, and the run's is the one that serves.", 0.0)
    gains: dict[str, tuple[float, tuple[float, float]]] = {}
    for how, texts in others.items():
        pairs = list(zip(case.own, case.walked(texts, how[:30]), strict=True))
        gain = tau([theirs for _, theirs in pairs]) - served
        low, high = interval(pairs, lambda some: tau([b for _, b in some]) - tau([a for a, _ in some]))
        gains[how] = gain, (low, high)
    opened = stored_openings(case, opening)
    evidence: dict[str, Any] = {"tau as served": served, **{f"tau {how}": served + gain for how, (gain, _) in gains.items()}}
    if opened is not None:
        evidence["stored rows that open as served"] = opened
    best = max(gains, key=lambda how: gains[how][0])
    if AS_TRAINED in gains:
        how, why = AS_TRAINED, "the recipe's target has another tokenizer or chat template than the one that serves"
    elif opened is not None and opened < 0.5:
        how = WITHOUT_OPENING
        why = f"only {opened:.0%} of the stored rows that the run learnt from open with {shown(opening, case)}"
    elif gains[best][1][0] > SURE:
        how, why = best, "the head drafts better behind prompts that no server writes"
    else:
        gain, bounds = gains[best]
        return Part(
            name, "no other rendering suits the head better than the server's.", max(0.0, gain), bounds, False, evidence
        )
    gain, bounds = gains[how]
    says = f"{why}; behind prompts {how} τ is {served + gain:.2f}, as served {served:.2f}."
    step = (
        "train on conversations that the served model's own tokenizer and chat template render, default system turn included."
    )
    return Part(name, says, max(0.0, gain), bounds, True, evidence, step)


def renderings(case: Case, opening: list[int]) -> dict[str, list[Text]]:
    """The same replies behind other prompts; only renderings that differ from the server's."""
    found = {}
    if case.asked and any(text.ids[: text.start] != ids for text, ids in zip(case.texts, case.asked, strict=True)):
        found[AS_TRAINED] = [behind(ids, text) for text, ids in zip(case.texts, case.asked, strict=True)]
    if opening and any(text.ids[: len(opening)] == opening for text in case.texts):
        cut = [len(opening) * (text.ids[: len(opening)] == opening) for text in case.texts]
        found[WITHOUT_OPENING] = [behind(text.ids[own : text.start], text) for own, text in zip(cut, case.texts, strict=True)]
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
