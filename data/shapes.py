"""In which shape does a record hold its turns? Each shape is one function from the record to its turns, None for another's."""

import re
from collections.abc import Callable
from typing import Any

from .turns import REASONING, Unreadable

PROMPTS = ("prompt", "question", "query", "instruction", "input")
ANSWERS = ("response", "completion", "answer", "output")
EXTRAS = ("input", "context")  # what an instruction speaks of
SYSTEMS = ("system", "system_prompt")
ENDS = r"(?:</s>|<eos>|<\|endoftext\|>|<\|end_of_text\|>)"
BEGINS = r"(?:<s>|<bos>|<\|begin_of_text\|>|<\|endoftext\|>)"
# a turn as chat templates of ChatML, Llama 3, Gemma, and Phi or Zephyr write it: role, content
RENDERED = [
    re.compile(rf"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>{ENDS}?\s*", re.DOTALL),
    re.compile(rf"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)<\|eot_id\|>{ENDS}?\s*", re.DOTALL),
    re.compile(rf"<start_of_turn>(\w+)\n(.*?)<end_of_turn>{ENDS}?\s*", re.DOTALL),
    re.compile(rf"<\|(system|user|assistant)\|>\n?(.*?)(?:<\|end\|>\s*{ENDS}?|{ENDS})\s*", re.DOTALL),
]
OPENS_RENDERED = re.compile(rf"\s*{BEGINS}?\s*(?=<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|(?:system|user)\|>)")
OTHERWISE_RENDERED = re.compile(
    r"\s*(?:<s>)?\s*(?:\[INST\].*\[/INST\]|(?:###\s*)?(?:human|user):.*\b(?:assistant|gpt):)", re.DOTALL | re.IGNORECASE
)

Row = dict[str, Any]
Turns = list[Any] | None


def messages(row: Row) -> Turns:
    return first_list(row, "messages")


def sharegpt(row: Row) -> Turns:
    return first_list(row, "conversations", "conversation")


def prompts_alone(row: Row) -> Turns:
    """``turns``: what a user asks, one after the other."""
    turns = first_list(row, "turns")
    return turns and [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]


def alpaca(row: Row) -> Turns:
    return pair(row, ("instruction",), ("output",))


def pair(row: Row, asks: tuple[str, ...] = PROMPTS, answers: tuple[str, ...] = ANSWERS) -> Turns:
    """A prompt and its answer, each a text or a list of turns; of given turns before the answer nothing is supervised."""
    ask = next((key for key in asks if row.get(key) is not None), None)
    answer = next((key for key in answers if key in row and key != ask), None)
    if ask is None or answer is None:
        return None
    reply = row[answer]
    if not is_turns(reply):
        reply = [{"role": "assistant", "content": reply, **{key: row[key] for key in REASONING if key in row}}]
    return asked(row, ask) + reply


def prompt(row: Row) -> Turns:
    ask = next((key for key in PROMPTS if row.get(key) is not None), None)
    return asked(row, ask) if ask else None


def text(row: Row) -> Turns:
    """A bare text is what a user says."""
    return [{"role": "user", "content": row["text"]}] if isinstance(row.get("text"), str) else None


def rendered(row: Row) -> Turns:
    """A text that a chat template has rendered is taken apart into its turns again.

    Raises Unreadable where it begins like one and is not turns from there to its end.
    """
    said = row.get("text")
    if not isinstance(said, str):
        return None
    if OTHERWISE_RENDERED.match(said):
        raise Unreadable("rendered chat that cannot be read back")
    opening = OPENS_RENDERED.match(said)
    if not opening:
        return None
    for family in RENDERED:
        turns, at = [], opening.end()
        while turn := family.match(said, at):
            turns.append({"role": turn[1], "content": turn[2]})
            at = turn.end()
        if turns and at == len(said):
            return turns
    raise Unreadable("rendered chat that cannot be read back")


SHAPES: dict[str, Callable[[Row], Turns]] = {
    "messages": messages,
    "sharegpt": sharegpt,
    "turns": prompts_alone,
    "alpaca": alpaca,
    "pair": pair,
    "prompt": prompt,
    "rendered": rendered,
    "text": text,
}


def first_list(row: Row, *keys: str) -> Turns:
    return next((row[key] for key in keys if isinstance(row.get(key), list)), None)


def is_turns(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)


def asked(row: Row, ask: str) -> list[Any]:
    """The turns before the answer: earlier ones and the prompt, with what it speaks of after a blank line."""
    value = row[ask]
    if is_turns(value):
        return [turn if not isinstance(turn, dict) else {**turn, "weight": 0} for turn in value]
    extra = next((row[key] for key in EXTRAS if key != ask and isinstance(row.get(key), str) and row[key].strip()), None)
    if extra and isinstance(value, str):
        value = f"{value}\n\n{extra}"
    return [*earlier(row.get("history") or []), {"role": "user", "content": value}]


def earlier(history: Any) -> list[Any]:
    """The turns of a history [[question, answer], ...]."""
    if not isinstance(history, list) or not all(isinstance(both, list) and len(both) == 2 for both in history):
        raise Unreadable("history that is not a list of pairs")
    roles = ("user", "assistant")
    return [{"role": role, "content": said} for both in history for role, said in zip(roles, both, strict=True)]


def system_of(row: Row) -> list[Any]:
    """The system turn that stands in a column of its own."""
    return next(([{"role": "system", "content": row[key]}] for key in SYSTEMS if isinstance(row.get(key), str)), [])
