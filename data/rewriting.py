"""One conversation on its way through the target: which turns it answers, and what becomes of each answer.

docs/regenerate.md has the rules as one table.
"""

import random
import re
from dataclasses import dataclass, field
from typing import Any

from ..sampling import Sampling
from .conversations import Conversation
from .loops import is_a_loop

EMPTY = "empty answer"
LOOP = "looping answer"
CUT = "answer cut at the length limit"
TOO_LONG = "prompt beyond the context limit"
NOTHING_TO_ANSWER = "no turn to answer"
OPENS_A_THOUGHT = re.compile(r"<think>\s*\Z")  # how a reasoning template's prompt may end
CLOSES_A_THOUGHT = re.compile(r"\A(?:(?!<think>).)*?</think>", re.DOTALL)  # a text whose thought the prompt opened


@dataclass(frozen=True)
class Settings:
    """How answers are written. Each conversation draws one of the temperatures; 0 is greedy."""

    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            self.sampling(temperature)

    def sampling(self, temperature: float) -> Sampling:
        """Raises UserError where a number is out of its range."""
        return Sampling(temperature, self.top_k, self.top_p)

    def temperature(self, index: int) -> float:
        """The temperature of conversation ``index``, drawn from the seed."""
        return random.Random(f"{self.seed}/{index}").choice(self.temperatures)


@dataclass(frozen=True)
class Answer:
    """What the target wrote: ``tokens`` of them, ``finish`` "stop" or "length".

    ``reasoning``: what a server took out of the text as such. ``reread``: whether the text tokenizes to the ids that were
    written; None where the ids are not known.
    """

    text: str
    finish: str
    tokens: int
    reasoning: str | None = None
    reread: bool | None = None


@dataclass
class Rewrite:
    """A conversation that the target rewrites turn by turn.

    ``messages`` is what stands so far, which is the next prompt while ``due`` says so. ``ahead`` is what is left of the
    conversation, None where the target answers.
    """

    conversation: Conversation
    index: int
    temperature: float
    messages: list[dict[str, Any]] = field(default_factory=list)
    ahead: list[dict[str, Any] | None] = field(default_factory=list)
    through: int = 0  # how many messages stand up to the last answer
    finish: str = "stop"
    answers: int = 0
    tokens: int = 0
    retokenized: int = 0  # answers that tokenize to other ids than were written
    ids_known: bool = True
    cause: str | None = None  # why it ended before its last turn, if it did
    detail: str = ""
    unwritten: int = 0  # answers that were due after that

    def __post_init__(self) -> None:
        self.ahead = plan(self.conversation)
        if None not in self.ahead:
            self.end(NOTHING_TO_ANSWER)

    @property
    def due(self) -> bool:
        """Whether an answer is due. Turns that are not the target's to write are taken up on the way."""
        while self.ahead and self.ahead[0] is not None:
            self.messages.append(self.ahead.pop(0))  # type: ignore[arg-type]
        return bool(self.ahead)

    def take(self, answer: Answer) -> None:
        """Put the target's answer where one is due, or end the conversation before a turn that it answers badly."""
        self.tokens += answer.tokens
        if not answer.text.rpartition("</think>")[2].strip():
            return self.end(EMPTY)
        if is_a_loop(answer.text) or is_a_loop(answer.reasoning or ""):
            return self.end(LOOP)
        self.ahead.pop(0)
        thought = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        self.messages.append({"role": "assistant", "content": answer.text, **thought})
        self.through = len(self.messages)
        self.finish = answer.finish
        self.answers += 1
        self.retokenized += answer.reread is False
        self.ids_known &= answer.reread is not None
        if answer.finish == "length":
            self.end(CUT if None in self.ahead else None)

    def end(self, cause: str | None, detail: str = "") -> None:
        """Let the conversation end at the last answer the target wrote; without one it is dropped.

        ``cause`` None: nothing is missing, only turns that follow no answer are.
        """
        self.cause, self.detail = cause, detail
        self.unwritten += self.ahead.count(None)
        self.ahead = []
        self.messages = self.messages[: self.through]

    @property
    def dropped(self) -> bool:
        return not self.answers

    def row(self) -> dict[str, Any]:
        """The conversation as a line of the output."""
        tools = {"tools": self.conversation.tools} if self.conversation.tools else {}
        told = {"messages": self.messages, **tools, "finish": self.finish, "temperature": self.temperature, "row": self.index}
        return {**self.conversation.about, **told}


def plan(conversation: Conversation) -> list[dict[str, Any] | None]:
    """The conversation's messages, None where the target answers.

    Kept as they are, with weight 0: turns that call tools, since the recorded results belong to them, and what an
    assistant says before any user. Answers in a row are one.
    """
    turns: list[dict[str, Any] | None] = []
    asked = False
    for message in conversation.messages:
        asked = asked or message["role"] == "user"
        if message["role"] != "assistant":
            turns.append(message)
            if conversation.unanswered and message["role"] == "user":
                turns.append(None)
        elif not asked or message.get("tool_calls"):
            turns.append({**message, "weight": 0})
        elif turns[-1] is not None:
            turns.append(None)
    last = turns[-1] if turns else None
    if asked and last and last["role"] != "assistant":
        turns.append(None)
    return turns


def whole_thought(prompt: str, text: str) -> str:
    """The answer with the ``<think>`` that the prompt had written for it, where a template's prompt opens a thought."""
    opened = OPENS_A_THOUGHT.search(prompt)
    if opened and text.strip():
        return opened.group() + text
    return "<think>\n" + text if CLOSES_A_THOUGHT.match(text) else text
