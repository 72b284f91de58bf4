"""Let the target rewrite what the assistants of a data set say, so that a head learns from the target's own words.

Either the target writes in this process, or a server that runs it does. Both keep a journal, so that a run that is killed
goes on where it was and every conversation comes out exactly once.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, groupby
from pathlib import Path
from typing import Any

import torch

from ..console import Progress, note
from ..errors import UserError
from ..outputs import refuse_parent, write_whole
from ..target import Target
from .conversations import Conversation
from .endpoint import Endpoint, through_endpoint
from .generation import continue_batch, text_after
from .journal import Journal, differences
from .rewriting import TOO_LONG, Answer, Rewrite, Settings, whole_thought
from .tally import Tally, listed
from .template import Refused, render, tokens

JOURNAL, PROVENANCE = ".partial", ".provenance.json"  # beside the output
HEADER = ("writer", "settings", "input")
WINDOW = 4  # batches of conversations that are written together: sorted by length, and the most work that a kill undoes


@dataclass
class Job:
    """The conversations to rewrite and where they go.

    ``in_order``: the output has the input's order, else that in which conversations were finished. ``token_budget``: once
    so many tokens are written, over all starts of the job, no further conversation is begun.
    """

    conversations: Sequence[Conversation]
    settings: Settings
    out: Path
    tally: Tally
    in_order: bool = True
    token_budget: int | None = None
    force: bool = False
    journal: Journal = field(init=False)
    bar: Progress = field(init=False)
    source: dict[str, Any] = field(init=False, default_factory=dict)
    spent: int = field(init=False, default=0)  # tokens of earlier starts

    def header(self, writer: dict[str, Any]) -> dict[str, Any]:
        """Which work this is: who writes, how, and of what."""
        if not self.source:
            self.source = digest(self.conversations)
        return json.loads(json.dumps({"writer": writer, "settings": asdict(self.settings), "input": self.source}))

    def done_before(self, writer: dict[str, Any]) -> dict[str, Any] | None:
        """What ``finish`` returned when this very job wrote the output; None where it has not.

        Raises UserError where the output is another job's, unless ``force`` lets that go.
        """
        if self.force or not self.out.exists() or beside(self.out, JOURNAL).exists():
            return None
        provenance = read_provenance(self.out)
        parted = list(differences({key: provenance.get(key) for key in HEADER}, self.header(writer)))
        if parted:
            raise UserError(
                f"{self.out} exists and was written with other settings ({'; '.join(parted)}): choose another output, or pass "
                "--force to replace it."
            )
        for entry in provenance.pop("dropped_rows"):
            self.count(entry)
        note(f"{self.out} is whole already: nothing was left to do")
        return provenance

    @contextmanager
    def begun(self, writer: dict[str, Any]) -> Iterator[None]:
        """Open the journal of what ``writer`` writes and count what it holds. A progress bar runs meanwhile.

        Raises UserError where the journal is another process's or another work's.
        """
        with Journal.opened(beside(self.out, JOURNAL), self.header(writer), self.force) as self.journal:
            for entry in self.journal.entries():
                self.spent += entry["tokens"]
                self.count(entry)
            done = len(self.journal.places)
            with Progress("rewriting conversations", len(self.conversations), done) as self.bar:
                yield

    def start(self, index: int) -> Rewrite:
        return Rewrite(self.conversations[index], index, self.settings.temperature(index))

    def missing(self, window: Iterable[int]) -> list[int]:
        """Those of these conversations that the journal does not have."""
        return [index for index in window if index not in self.journal.places]

    def may_start(self, used: int) -> bool:
        """Whether the budget lasts, after ``used`` tokens were written since the job was begun."""
        return self.token_budget is None or self.spent + used < self.token_budget

    def record(self, rewrites: Iterable[Rewrite]) -> None:
        """Journal finished conversations. Raises UserError under --strict where one is dropped."""
        entries = [entry_of(rewrite) for rewrite in rewrites]
        self.journal.append(entries)
        for entry in entries:
            self.count(entry)
        self.bar.advance(len(entries))

    def count(self, entry: dict[str, Any]) -> None:
        """Tell the tally of a dropped conversation."""
        if not entry["row"]:
            source = self.conversations[entry["index"]]
            self.tally.drop(source.file, source.row, entry["cause"], entry["detail"], {"messages": source.messages})

    def finish(self, about: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write the output and its provenance, whole, if every conversation is done; returns the provenance.

        Where the budget was spent before, the journal stays for the next start and nothing else is written. Raises
        UserError where no conversation is left.
        """
        document = {**(self.journal.header or {}), **(about or {}), **self.summary()}
        if not document["complete"]:
            note(
                f"the token budget of {self.token_budget} is spent with {len(self.journal.places)} of "
                f"{len(self.conversations)} conversations done: raise --token-budget and run the same command to go on."
            )
            return document
        if not self.tally.kept:
            raise UserError(
                f"no conversation is left ({listed(self.tally.dropped) or 'the input holds none'}): see --rejects for what "
                "is wrong with them, mend it, and pass --force to begin anew."
            )
        dropped = [entry for entry in self.journal.entries() if not entry["row"]]
        provenance = json.dumps({**document, "dropped_rows": dropped}, indent=1, ensure_ascii=False)
        write_whole(beside(self.out, PROVENANCE), [provenance + "\n"])
        rows = (entry["row"] for entry in self.journal.entries(self.in_order) if entry["row"])
        write_whole(self.out, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self.journal.path.unlink()
        return document

    def summary(self) -> dict[str, Any]:
        """What was read, written, shortened and dropped, over all starts of the job.

        ``retokenized``: answers that tokenize to other ids than were written; None where a server wrote them.
        """
        totals: Counter[str] = Counter()
        finish, shortened = Counter({"stop": 0, "length": 0}), Counter()
        ids_known = True
        for entry in self.journal.entries():
            totals["tokens"] += entry["tokens"]
            if entry["row"]:
                totals.update(answers=entry["answers"], unwritten=entry["unwritten"], retokenized=entry["retokenized"] or 0)
                ids_known &= entry["retokenized"] is not None
                finish[entry["row"]["finish"]] += 1
                shortened.update([entry["cause"]] if entry["cause"] else [])
        complete = len(self.journal.places) == len(self.conversations)
        counts = self.tally.as_json()
        counts["rows"]["kept"] = sum(finish.values())  # the others are not written yet
        return {
            **counts,
            "tokens": totals["tokens"],
            "answers": totals["answers"],
            "finish": dict(finish),
            "shortened": dict(shortened),
            "turns_not_written": totals["unwritten"],
            "retokenized": totals["retokenized"] if ids_known else None,
            "complete": complete,
            "out": str(self.out) if complete else None,
        }


def entry_of(rewrite: Rewrite) -> dict[str, Any]:
    """A finished conversation as the journal keeps it; ``row`` None means that it was dropped."""
    return {
        "index": rewrite.index,
        "tokens": rewrite.tokens,
        "answers": rewrite.answers,
        "cause": rewrite.cause,
        "detail": rewrite.detail,
        "unwritten": rewrite.unwritten,
        "retokenized": rewrite.retokenized if rewrite.ids_known else None,
        "row": rewrite.row() if rewrite.answers else None,
    }


def digest(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """What the input is: how many conversations, and a hash of all that their rewriting depends on."""
    known = hashlib.sha256()
    for one in conversations:
        known.update(json.dumps([one.messages, one.tools, one.unanswered, one.about], sort_keys=True, default=str).encode())
    return {"conversations": len(conversations), "sha256": known.hexdigest()[:16]}


def sentence(document: dict[str, Any]) -> str:
    """What ``Job.finish`` returned, for a reader."""
    lines = [Tally.of(document).sentence(), f"{document['answers']} answers, {document['tokens']} tokens"]
    if document["finish"]["length"]:
        lines.append(f"{document['finish']['length']} conversations end in an answer that was cut")
    if document["shortened"]:
        lines.append(
            f"{sum(document['shortened'].values())} conversations end early ({listed(Counter(document['shortened']))}), "
            f"with {document['turns_not_written']} answers not written"
        )
    if document["retokenized"]:
        lines.append(f"{document['retokenized']} answers whose tokens change when read back")
    return "\n".join([*lines, document["out"] or "not done yet"])


def beside(out: Path, ending: str) -> Path:
    return out.with_name(out.name + ending)


def read_provenance(out: Path) -> dict[str, Any]:
    """What is told beside an output. Raises UserError where nothing is: the output is no work of ours."""
    try:
        return json.loads(beside(out, PROVENANCE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{out} exists: choose another output, or pass --force to replace it.") from error


def check_output(out: Path, force: bool) -> None:
    """Raise UserError, before anything is loaded, where ``out`` exists and is no work of ours, finished or not."""
    refuse_parent(out)
    if out.is_dir():
        raise UserError(f"{out} is a directory: give --out the name of a file.")
    if not force and out.exists() and not beside(out, JOURNAL).exists():
        read_provenance(out)


# -- in this process -----------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """One answer that is due: the prompt as text and as ids, and how many tokens may follow it."""

    rewrite: Rewrite
    prompt: str
    ids: list[int]
    room: int


def in_process(job: Job, target: Target, batch: int) -> dict[str, Any]:
    """Let the target rewrite the job's conversations, ``batch`` at once; returns what ``Job.finish`` does.

    Conversations are taken in windows and journaled when their window is done. The draws of a batch depend on the seed and
    on its place in the input alone, so a window that is written again comes out the same.
    """
    tokenizer = target.tokenizer_or_refuse()
    dtype = str(target.dtype).removeprefix("torch.")
    writer = {"target": target.name, "fingerprint": target.fingerprint, "dtype": dtype, "batch": batch}
    if done := job.done_before(writer):
        return done
    with job.begun(writer):
        used = 0
        for first in range(0, len(job.conversations), WINDOW * batch):
            window = range(first, min(first + WINDOW * batch, len(job.conversations)))
            missing = job.missing(window)
            if missing and not job.may_start(used):
                break
            if missing:
                rewrites = [job.start(index) for index in window]
                write_window(rewrites, target, tokenizer, job.settings, batch, first)
                job.record(rewrite for rewrite in rewrites if rewrite.index in missing)
                used += sum(rewrite.tokens for rewrite in rewrites)
        return job.finish()


def write_window(rewrites: list[Rewrite], target: Target, tokenizer: Any, settings: Settings, batch: int, first: int) -> None:
    """Answer the conversations turn by turn, all first turns before the second ones, in batches of like length."""
    for turn in count():
        due = [rewrite for rewrite in rewrites if rewrite.due]
        if not due:
            return
        asked = [one for rewrite in due if (one := ask(rewrite, target, tokenizer, settings.max_new_tokens))]
        for number, group in enumerate(batches(asked, batch)):
            seed = hashlib.sha256(f"{settings.seed}/{first}/{turn}/{number}".encode()).digest()
            torch.manual_seed(int.from_bytes(seed[:7]))
            answer(group, target, tokenizer, settings)


def ask(rewrite: Rewrite, target: Target, tokenizer: Any, limit: int) -> Asked | None:
    """The prompt of the answer that is due. None where it cannot be asked, which ends the conversation."""
    source = rewrite.conversation
    try:
        prompt = render(rewrite.messages, tokenizer, f"{source.file}, row {source.row}", answer_next=True, tools=source.tools)
    except Refused as error:
        rewrite.end(error.reason, str(error))
        return None
    ids = tokens(prompt, tokenizer)
    room = min(limit, target.max_positions - len(ids))
    if room < 1:
        rewrite.end(TOO_LONG, f"{len(ids)} tokens of {target.max_positions}")
        return None
    return Asked(rewrite, prompt, ids, room)


def batches(asked: list[Asked], size: int) -> Iterator[list[Asked]]:
    """Answers to be written together: of one temperature, with the same room, and of like length."""

    def kind(one: Asked) -> tuple[float, int]:
        return one.rewrite.temperature, one.room

    asked = sorted(asked, key=lambda one: (*kind(one), len(one.ids)))
    for _, alike in groupby(asked, kind):
        group = list(alike)
        yield from (group[i : i + size] for i in range(0, len(group), size))


def answer(group: list[Asked], target: Target, tokenizer: Any, settings: Settings) -> None:
    """Write one batch of answers into their conversations."""
    sampling = settings.sampling(group[0].rewrite.temperature)
    written = continue_batch(target, [one.ids for one in group], sampling, group[0].room)
    for one, row in zip(group, written, strict=True):
        text = text_after(one.ids, row.ids, tokenizer)
        reread = tokens(one.prompt + text, tokenizer) == one.ids + row.ids
        finish = "stop" if row.ended else "length"
        one.rewrite.take(Answer(whole_thought(one.prompt, text), finish, len(row.ids) + row.ended, reread=reread))


# -- through a server ----------------------------------------------------------------------------------------------


def through_server(job: Job, url: str, model: str | None, concurrency: int, timeout: float, tries: int) -> dict[str, Any]:
    """Let the server at ``url`` rewrite the job's conversations, ``concurrency`` at once; returns what ``Job.finish`` does.

    Each is journaled when it is finished. Raises UserError where the server fails or refuses the settings.
    """

    async def work() -> dict[str, Any]:
        async with Endpoint(url, job.settings, concurrency, timeout, tries) as endpoint:
            await endpoint.connect(model)
            if job.token_budget and not endpoint.counts_tokens:
                raise UserError(f"{url} does not say how many tokens it writes: leave out --token-budget.")
            writer = {"model": endpoint.model}
            if done := job.done_before(writer):
                return done
            with job.begun(writer):
                waiting = map(job.start, job.missing(range(len(job.conversations))))
                await through_endpoint(endpoint, waiting, lambda rewrite: job.record([rewrite]), job.may_start)
                return job.finish({"endpoint": url, "failed_tries": endpoint.failures})

    return asyncio.run(work())
