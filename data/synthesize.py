"""Conversations that the target writes itself, both sides: the data that fits a head best and belongs to nobody."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..sampling import Sampling
from ..target import Target
from .chat import render, tokens
from .generation import continue_batch
from .loops import loops

SHINGLE = 8  # words
PLACEHOLDER = "draftsmith-user-turn"


@dataclass(frozen=True)
class Settings:
    """How the two sides are written. The answer is greedy by default, as most services of small models decode."""

    seed: int = 0
    user: Sampling = Sampling(temperature=0.8, top_p=0.9)
    answer: Sampling = Sampling()
    max_user_tokens: int = 64
    max_answer_tokens: int = 160
    batch: int = 128


@dataclass
class Filter:
    """Keeps a conversation unless it loops or repeats what was kept before; counts what is dropped, by reason."""

    dropped: dict[str, int] = field(
        default_factory=lambda: {"unfinished user turn": 0, "empty turn": 0, "loop": 0, "near-duplicate": 0}
    )
    seen_users: set[tuple[str, ...]] = field(default_factory=set)
    seen_shingles: set[tuple[str, ...]] = field(default_factory=set)

    def worth_answering(self, user: str, finished: bool) -> bool:
        """Whether a user turn is finished and was not kept before."""
        if finished and user_words(user) not in self.seen_users:
            return True
        self.dropped["near-duplicate" if finished else "unfinished user turn"] += 1
        return False

    def keeps(self, user: str, answer: str) -> bool:
        """Whether this conversation is kept; a kept one is remembered."""
        words = re.findall(r"[^\W\d_]+", answer.lower())
        shingles = {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
        repeated = len(shingles & self.seen_shingles) > len(shingles) / 2
        if not user_words(user) or not words:
            self.dropped["empty turn"] += 1
        elif loops(words):
            self.dropped["loop"] += 1
        elif user_words(user) in self.seen_users or repeated:
            self.dropped["near-duplicate"] += 1
        else:
            self.seen_users.add(user_words(user))
            self.seen_shingles |= shingles
            return True
        return False


def user_words(user: str) -> tuple[str, ...]:
    """What makes two user turns the same: their words, whatever the case and the space between them."""
    return tuple(user.lower().split())


def synthesize(
    target: Target, count: int, settings: Settings, keep: Filter, progress: Callable[[int], Any]
) -> Iterator[dict[str, Any]]:
    """Yield ``count`` kept conversations as rows {messages, finish, id}; ``finish`` is "stop" or "length".

    The user turn is sampled from the chat template's bare user header, then answered. ``progress`` is called with 1 for
    each kept row. Raises UserError when the template has no user header to continue, or nearly nothing is kept.
    """
    header = user_header(target)
    torch.manual_seed(settings.seed)
    kept = tried = 0
    while kept < count:
        if tried >= 20 * count + 1000:
            raise UserError(
                f"only {kept} of {tried} conversations were worth keeping ({keep.dropped}): raise --user-temperature."
            )
        tried += settings.batch
        turns = generate(target, [header] * settings.batch, settings.user, settings.max_user_tokens)
        users = [text for text, finished in turns if keep.worth_answering(text, finished)]
        prompts = [render([{"role": "user", "content": user}], target.tokenizer, "a user turn", True) for user in users]
        answers = generate(target, prompts, settings.answer, settings.max_answer_tokens) if users else []
        for user, (answer, finished) in zip(users, answers, strict=True):
            if kept == count or not keep.keeps(user, answer):
                continue
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            yield {"messages": messages, "finish": "stop" if finished else "length", "id": f"{settings.seed}-{kept}"}
            kept += 1
            progress(1)


def user_header(target: Target) -> str:
    """The text a chat template writes before a first user turn, its default system prompt included."""
    text = render([{"role": "user", "content": PLACEHOLDER}], target.tokenizer_or_refuse(), "a user turn")
    if PLACEHOLDER not in text:
        raise UserError(f"the chat template of {target.name!r} does not write user turns as they are: mend the template.")
    return text[: text.index(PLACEHOLDER)]


def generate(target: Target, prompts: list[str], sampling: Sampling, limit: int) -> list[tuple[str, bool]]:
    """Continue each prompt text; returns (text, whether it ended by itself), in order.

    Texts come stripped of special tokens and outer whitespace, since a user turn is made of one.
    """
    written = continue_batch(target, [tokens(prompt, target.tokenizer) for prompt in prompts], sampling, limit)
    return [(target.tokenizer.decode(row.ids, skip_special_tokens=True).strip(), row.ended) for row in written]


def write(
    target: Target, out: Path, count: int, held_out: int, settings: Settings, progress: Callable[[int], Any]
) -> dict[str, Any]:
    """Write ``out``/train.jsonl (``count`` rows), ``out``/heldout.jsonl (``held_out`` rows) and provenance.json.

    Both files come from one stream through one filter, so no held-out row is a near-duplicate of a training row; which
    rows are held out is drawn with the seed. ``out`` must exist. Returns the provenance.
    """
    keep = Filter()
    rows = list(synthesize(target, count + held_out, settings, keep, progress))
    random.Random(settings.seed).shuffle(rows)
    for name, part in (("heldout", rows[:held_out]), ("train", rows[held_out:])):
        with open(out / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
    provenance = {
        "model": target.name,
        "fingerprint": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "settings": asdict(settings),
        "rows": {"train": count, "heldout": held_out},
        "dropped": keep.dropped,
    }
    (out / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    return provenance
