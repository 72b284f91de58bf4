"""How does a service answer? An OpenAI-compatible endpoint is asked a few questions, more and more of them at once.

Rungs of 1, 2, 4, … requests under way, until the throughput stops growing or the budget ends, each request streamed and
timed here. Where the engine shows its own counters they are read before and after each rung, and what they say of the
traffic before the probe is taken over what the probe's own questions show.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..console import Progress, note
from ..errors import UserError
from .engine_metrics import EngineMetrics
from .measures import repeated_share
from .prompts import Prompt
from .service import Acceptance, Engine, Load, Mean, Middle, ProposerFacts, Service
from .streaming import Answer, Spent, Streams

WARM_UP = Prompt([{"role": "user", "content": "Say yes."}], max_new=8)
FEWEST = 4  # answers of a rung
GROWTH = 1.1  # of the throughput from rung to rung; less is none
HISTORY = 100  # finished requests from which on an engine's past says more of the service than a few questions do
PIECES = 16  # tokens; an answer as long that comes at once was not streamed
FASTEST = 1e-4  # seconds per token that no model undercuts for one sequence: what is faster was held back on the way

QUESTIONS = (
    "Explain in a few sentences why the sky is blue at noon and red in the evening.",
    "Write a Python function that merges two sorted lists, with a docstring and one example.",
    "Summarize in two sentences: The mill on the river was built in 1842 to grind the valley's grain. When the railway came, "
    "flour from the plains was cheaper, and the mill turned to sawing timber. A flood took the wheel in 1903; since then the "
    "building has been a school, a dance hall and, today, the town's library.",
    "Translate into French: The meeting has been moved to Thursday at ten, and the room is now on the third floor.",
    "Repeat this JSON with every price raised by one: "
    '[{"item": "bread", "price": 3}, {"item": "milk", "price": 2}, {"item": "cheese", "price": 7}]',
    "A train leaves at 9:40 and arrives at 13:05. It stops for 25 minutes on the way. How long does it move? Show the steps.",
    "Begin a short story about a lighthouse keeper who finds a letter addressed to nobody.",
    "List ten questions that a new employee might ask in the first week, one on each line.",
)


@dataclass(frozen=True)
class Budget:
    """What the probe may cost: HTTP requests of every kind, the warm-up and the readings of /metrics included, and seconds."""

    requests: int = 100
    seconds: float = 120.0


@dataclass(frozen=True)
class Rung:
    """The answers that came with ``concurrency`` requests under way. ``engine``: what the engine counted meanwhile."""

    concurrency: int
    answers: list[Answer]
    engine: EngineMetrics | None = None

    @property
    def ttft(self) -> list[float]:
        return [answer.ttft for answer in self.answers if answer.ttft is not None]

    @property
    def tpot(self) -> list[float]:
        return [answer.tpot for answer in self.answers if answer.tpot is not None]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all answers over the time from the first request to the last answer."""
        seconds = max(answer.last for answer in self.answers) - min(answer.sent for answer in self.answers)
        return sum(answer.tokens for answer in self.answers) / seconds

    @property
    def latency(self) -> float:
        """Mean seconds from a request to the end of its answer."""
        return statistics.fmean(answer.last - answer.sent for answer in self.answers)

    @property
    def load(self) -> Load:
        ttft, tpot = (statistics.fmean(values) if values else None for values in (self.ttft, self.tpot))
        return Load(concurrency=self.concurrency, tokens_per_s=self.tokens_per_s, ttft=ttft, tpot=tpot)


@dataclass
class Probed:
    """What was seen. ``sent``: HTTP requests. ``ended``: why the ladder went no higher.

    ``history``: what the engine had counted when the first rung began, at Unix time ``read_at``; ``during``: since then.
    """

    url: str
    model: str = ""
    temperature: float | None = None
    rungs: list[Rung] = field(default_factory=list)
    history: EngineMetrics | None = None
    during: EngineMetrics | None = None
    read_at: float = 0.0
    sent: int = 0
    seconds: float = 0.0
    ended: str = ""

    @property
    def answers(self) -> list[Answer]:
        return [answer for rung in self.rungs for answer in rung.answers]

    @property
    def tokens_counted(self) -> bool:
        """Whether the server said how many tokens its answers had."""
        return all(answer.used is not None for answer in self.answers)

    def service(self) -> Service:
        """The values seen with one request at a time, or in the traffic before where the engine tells enough of it."""
        first = self.rungs[0]
        prompt_tokens = [answer.prompt_tokens for answer in self.answers if answer.prompt_tokens]
        known = {
            "name": self.url,
            "target": self.model,
            "prompt_tokens": Mean.of(prompt_tokens) if prompt_tokens else None,
            "output_tokens": Mean.of([answer.tokens for answer in self.answers]),
            "ttft": Mean.of(first.ttft),
            "tpot": Mean.of(first.tpot) if first.tpot else None,
            "temperature": self.temperature,
            "repetitiveness": repetitiveness(self.answers),
            "throughput": [rung.load for rung in self.rungs],
        }
        if self.history:
            known |= of_traffic(self.history, self.read_at)
            known |= of_speculation(self.history, self.during, self.temperature)
        return Service.model_validate({key: value for key, value in known.items() if value is not None}).from_("probed")

    def sentence(self) -> str:
        tokens = "as the server counts them" if self.tokens_counted else "counted by pieces, which may hold several"
        rungs = ", ".join(f"{rung.concurrency}: {rung.tokens_per_s:.1f}" for rung in self.rungs)
        return (
            f"probed {self.url} with {self.sent} requests in {self.seconds:.1f} s; tokens per second by requests under way: "
            f"{rungs} (tokens {tokens}); {self.ended}"
        )


def of_traffic(history: EngineMetrics, read_at: float) -> dict:
    """The service's values in the engine's own counts; nothing where it has answered too few requests to tell."""
    requests = history.requests or 0
    if requests < HISTORY:
        return {}
    found: dict = {}
    if history.started and read_at > history.started:
        found["qps"] = requests / (read_at - history.started)
    for name in ("prompt_tokens", "output_tokens"):
        if count := getattr(history, name):
            found[name] = Mean(mean=count / requests)
    for name in ("ttft", "tpot"):
        spans = getattr(history, name)
        if spans and spans.mean:
            found[name] = Mean(mean=spans.mean)
    if history.running:
        found |= {"batch": Middle(p50=history.running), "kv_cache_use": history.kv_cache}
    return found


def of_speculation(history: EngineMetrics, during: EngineMetrics | None, temperature: float | None) -> dict:
    """Whether the engine speculates, and how often it accepted: in its own traffic, or else in the probe's."""
    counts = history if (history.requests or 0) >= HISTORY or not during else during
    acceptance = as_counted(counts)
    running = {"name": "served", "tokenizer_equal": True, "temperature": temperature}  # it runs, so it fits the target
    return {"speculating": counts.speculating, "proposers": acceptance and [ProposerFacts.model_validate(running | acceptance)]}


def as_counted(counts: EngineMetrics) -> dict | None:
    """How often the engine's own proposer was accepted, by position where the counts tell; None where nothing was drafted."""
    if counts.drafts:
        reached, rates = counts.drafts, []
        for accepted in counts.accepted_at:
            rates.append(Acceptance(rate=min(accepted / reached, 1.0) if reached else 0.0))
            reached = accepted
        return {"acceptance": rates}
    if counts.tau_now and counts.rate_now:  # τ = 1 + rate × length
        length = max(1, round((counts.tau_now - 1) / counts.rate_now))
        return {"engine": Engine(rate=min(counts.rate_now, 1.0), length=length)}
    return None


def repetitiveness(answers: Sequence[Answer]) -> float | None:
    """The share of the answers' runs of four words that stood before in prompt or answer; None where all are shorter."""
    # the empty word parts the two: no run goes from one into the other
    return repeated_share([([*answer.prompt.split(), ""], answer.text.split()) for answer in answers])


# -- the ladder ------------------------------------------------------------------------------------------------------


def probe(
    url: str,
    prompts: Sequence[Prompt] = (),
    budget: Budget = Budget(),
    model: str | None = None,
    max_tokens: int = 128,
    temperature: float | None = None,
    patience: float = 30.0,
) -> Service:
    """What ``explore`` sees, as a service's values; a line on the terminal says what it took."""
    probed = explore(url, prompts, budget, model, max_tokens, temperature, patience)
    note(probed.sentence())
    return probed.service()


def explore(
    url: str,
    prompts: Sequence[Prompt] = (),
    budget: Budget = Budget(),
    model: str | None = None,
    max_tokens: int = 128,
    temperature: float | None = None,
    patience: float = 30.0,
) -> Probed:
    """Ask the server at ``url``, which ends in /v1, the ``prompts`` (or a few of our own) at rising concurrency.

    ``max_tokens`` of an answer, where a prompt does not say itself; ``temperature`` None leaves it to the server;
    ``patience``: seconds without a byte that count as a stall. Raises UserError, in one sentence, for a server that is not
    there, refuses, fails, stalls or does not stream before one rung is whole; later such a failure only ends the ladder.
    """
    asked = list(prompts) or [Prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    with Progress("probe", budget.requests) as bar:
        return asyncio.run(Ladder(url, asked, budget, max_tokens, temperature, bar).climb(model, patience))


class Ladder:
    """One probing: what is asked, and what came of it so far."""

    def __init__(
        self, url: str, prompts: list[Prompt], budget: Budget, max_tokens: int, temperature: float | None, bar: Progress
    ) -> None:
        self.prompts, self.budget, self.max_tokens, self.bar = prompts, budget, max_tokens, bar
        self.probed = Probed(url, temperature=temperature)
        self.asked = 0
        self.finished: list[Answer] = []  # in the rung under way

    async def climb(self, model: str | None, patience: float) -> Probed:
        """All of it, within the budget."""
        budget, probed, start = self.budget, self.probed, time.monotonic()
        async with Streams(probed.url, budget.requests, budget.seconds, patience) as streams:
            try:
                async with asyncio.timeout(budget.seconds):
                    await streams.choose(model)
                    probed.model = streams.model
                    await streams.ask(WARM_UP, self.max_tokens, probed.temperature)
                    await self.rungs(streams)
            except TimeoutError:
                probed.ended = "the budget's seconds ended"
            except Spent:
                probed.ended = "the budget's requests ended"
            probed.sent = budget.requests - streams.left
        probed.seconds = time.monotonic() - start
        if not probed.rungs and any(answer.ttft for answer in self.finished):
            probed.rungs.append(Rung(1, self.finished))  # the first rung, as far as it came
        if not probed.rungs:
            raise UserError(
                f"{probed.url} gave no whole answer within {budget.requests} requests and {budget.seconds:g} s: "
                "raise --budget-requests or --budget-seconds."
            )
        return probed

    async def rungs(self, streams: Streams) -> None:
        """1, 2, 4, … requests under way. Raises TimeoutError, Spent, and UserError where the first one fails."""
        probed = self.probed
        probed.history, probed.read_at = await streams.metrics(), time.time()
        readings, concurrency = [probed.history], 1
        while not probed.ended:
            room = streams.left - (probed.history is not None and streams.left > 1)  # for the reading behind the rung
            if room < concurrency:
                raise Spent
            if probed.rungs and time.monotonic() + probed.rungs[-1].latency > streams.deadline:
                raise TimeoutError
            try:
                await self.rung(streams, concurrency, min(max(FEWEST, 2 * concurrency), room))
            except UserError as error:
                if not probed.rungs:
                    raise
                probed.ended = f"with {concurrency} under way, {error}"
                return
            readings.append(await streams.metrics() if probed.history else None)
            probed.rungs.append(Rung(concurrency, self.finished, between(*readings[-2:])))
            probed.during = between(readings[0], readings[-1])
            probed.ended = self.as_high_as_it_goes()
            concurrency *= 2

    async def rung(self, streams: Streams, concurrency: int, count: int) -> None:
        """``count`` answers, ``concurrency`` of them under way at any time."""
        self.finished, places = [], iter(range(self.asked, self.asked + count))
        self.asked += count

        async def work() -> None:
            for place in places:
                prompt = self.prompts[place % len(self.prompts)]
                self.finished.append(await streams.ask(prompt, self.max_tokens, self.probed.temperature))
                self.bar.advance(extra=f"{concurrency} under way")

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(work())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        if concurrency == 1:
            refuse_unstreamed(streams.url, self.finished)

    def as_high_as_it_goes(self) -> str:
        """Why another rung would tell nothing; empty where it would."""
        speeds = [rung.tokens_per_s for rung in self.probed.rungs[-2:]]
        if len(speeds) == 2 and speeds[1] < GROWTH * speeds[0]:
            return "the throughput grows no more"
        return ""


def between(earlier: EngineMetrics | None, later: EngineMetrics | None) -> EngineMetrics | None:
    return later.since(earlier) if later and earlier else None


def refuse_unstreamed(url: str, answers: list[Answer]) -> None:
    """Raise UserError where no answer of a rung has text, or where the long ones came at once."""
    if not any(answer.pieces for answer in answers):
        raise UserError(f"{url} answers every question with nothing: try its model by hand, or give other --prompts.")
    long = [answer for answer in answers if answer.tokens >= PIECES and answer.pieces]
    times = [(answer.tpot or 0.0) if answer.pieces > 1 else 0.0 for answer in long]
    if times and statistics.median(times) < FASTEST:
        raise UserError(
            f"{url} holds its answers back and sends them whole, so no token's time can be seen: "
            "turn streaming on, and buffering off in what stands before it."
        )
