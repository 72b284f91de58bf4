"""What a proposer would do to a service at the load that it has: at its usual and its busy hours, and at every batch size."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from .acceptance import tau
from .costs import Cost, Roofline, step_surface
from .load import balance, capacity
from .service import ProposerFacts, Service, StepCost
from .speedup import Prediction, Predictor

PEAK = 2.0  # times the usual load, where the busy hours are not known
OUTPUT = 256.0  # tokens of an answer, where that is not known
READING = 0.5  # the most of its time that a service which keeps up is taken to read prompts
MOST = 256  # sequences at once, where the engine's limit is not known
WORTH = 1.05  # the speed-up that must be sure before speculation is turned on
KEEP = 0.98  # and what it may fall to before it is turned off
FINE = 32  # batch sizes up to here are looked at one by one, larger ones in steps


@dataclass(frozen=True)
class World:
    """A service with its costs: ``how`` they are known; ``usual`` and ``peak``: tokens per second asked of a replica;
    ``context``: tokens behind a pass; ``output``: tokens of an answer; ``prefill``: seconds of reading one prompt."""

    service: Service
    cost: Cost
    how: str
    usual: float
    peak: float
    context: float
    output: float
    prefill: float

    @property
    def most(self) -> int:
        return most(self.service)

    def step(self, batch: float) -> float:
        return self.cost.seconds(batch, 1, self.context)

    def given(self, batch: float) -> float:
        """Tokens per second of so many sequences at once, the reading of prompts between their passes counted."""
        return batch / (self.step(max(batch, 1.0)) + batch * self.prefill / self.output)

    def busy(self, tokens_per_s: float) -> float:
        """The share of a replica's time in which it reads prompts."""
        return min(tokens_per_s / self.output * self.prefill, 1.0)

    @cached_property
    def full(self) -> float:
        """The most tokens per second that a replica gives without drafts."""
        return capacity(self.step, 1.0, self.most, self.prefill / self.output)

    def predictor(self, facts: ProposerFacts) -> Predictor:
        return Predictor(facts, self.cost, self.context, self.service.pads)


def most(service: Service) -> int:
    """The most sequences at once that a replica runs, or has been seen to run."""
    seen = [row.concurrency for row in service.throughput] + [row.batch for row in service.step_costs]
    busiest = [service.batch.p95 or service.batch.p50] if service.batch else []
    return service.max_batch or int(max([MOST, *seen, *busiest]))


def costs_of(service: Service) -> tuple[Cost, str] | None:
    """What passes cost, and how that is known: from timed passes; from the speeds under rising load, a sequence standing for
    a token, which is dearer than a token is; or from the hardware, as a bound. None where nothing tells it."""
    timed = service.step_costs
    if timed and max(row.tokens for row in timed) > 1:
        return step_surface(timed), "timed passes"
    rows = [(row.batch, row.context, row.seconds, row.spread) for row in timed]
    if not rows and not service.speculating:
        rows = [(row.concurrency, 0, row.tpot, 0.05) for row in service.throughput if row.tpot]
    if len({row[0] for row in rows}) > 1:
        table = [StepCost(tokens=count, context=context, seconds=s, spread=spread) for count, context, s, spread in rows]
        return step_surface(table), "the speeds under rising load, a sequence counted for a token"
    if service.hardware:
        return Roofline(service.hardware), "the hardware's roofline, which flatters"
    return None


def world(service: Service) -> World | None:
    """The service with its load; None where nothing tells what passes cost."""
    found = costs_of(service)
    if found is None:
        return None
    cost, how = found
    prompt = service.prompt_tokens.mean if service.prompt_tokens else 0.0
    output = service.output_tokens.mean if service.output_tokens else OUTPUT
    context, prefill = prompt + output / 2, alone(service)

    idle, running = World(service, cost, how, 0.0, 0.0, context, output, prefill), service.batch
    usual = idle.given(running.p50) if running else idle.given(1)
    times = idle.given(running.p95) / usual if running and running.p95 else PEAK if running or service.qps else 1.0
    if service.qps:
        usual = service.qps * output / service.replicas
    return replace(idle, usual=usual, peak=usual * max(times, 1.0))


def alone(service: Service) -> float:
    """Seconds of reading a prompt: to the first token at the least load known, or what may be of the time that users wait,
    queueing included."""
    seen = [(row.concurrency, row.ttft) for row in service.throughput if row.ttft]
    if seen:
        return min(seen)[1]
    longest = READING * service.replicas / service.qps if service.qps else math.inf
    return min(service.ttft.mean, longest) if service.ttft else 0.0


@dataclass(frozen=True)
class Outcome:
    """What a rate of requests becomes: sequences running and seconds per token, plainly and with drafts (None: saturated);
    ``speedup`` [``low``, ``high``] of the seconds per token, or of the capacity where plain decoding is saturated."""

    tokens_per_s: float
    plain_batch: float | None
    plain_tpot: float | None
    batch: float | None
    tpot: float | None
    speedup: float
    low: float
    high: float

    @property
    def saturated(self) -> bool:
        return self.plain_batch is None


@dataclass(frozen=True)
class Plan:
    """A proposer at one draft length, at the usual load and at the peak."""

    predictor: Predictor
    length: int
    usual: Outcome
    peak: Outcome

    @property
    def facts(self) -> ProposerFacts:
        return self.predictor.facts

    def at(self, batch: float) -> Prediction:
        return self.predictor.predict(max(batch, 1.0), self.length)


def outcome(around: World, predictor: Predictor, length: int, tokens_per_s: float) -> Outcome:
    """Solve for the requests that run at once, without drafts and with drafts of ``length`` tokens."""

    def step(batch: float) -> float:
        return predictor.pass_seconds(batch, length)

    def gain(given: float) -> float:
        if plain is None:
            return capacity(step, given, around.most, around.prefill / around.output) / around.full
        found = balance(tokens_per_s, step, given, around.most, busy)
        return plain.tpot / found.tpot if found else 0.0

    busy = around.busy(tokens_per_s)
    plain = balance(tokens_per_s, around.step, 1.0, around.most, busy)
    here = predictor.predict(max(plain.batch, 1.0) if plain else around.most, length)
    speculating = balance(tokens_per_s, step, here.tau, around.most, busy)
    low, high = (here.tau * edge / here.speedup for edge in (here.low, here.high))
    return Outcome(
        tokens_per_s,
        plain and plain.batch,
        plain and plain.tpot,
        speculating and speculating.batch,
        speculating and speculating.tpot,
        gain(here.tau),
        gain(low),
        gain(high),
    )


def kept(predictor: Predictor, length: int, batch: float) -> Outcome:
    """What becomes of clients that ask again as soon as they are answered: as many sequences run as before."""
    here, plain = predictor.predict(max(batch, 1.0), length), predictor.pass_seconds(max(batch, 1.0), 0)
    return Outcome(batch / plain, batch, plain, batch, here.pass_seconds / here.tau, here.speedup, here.low, here.high)


def plans(around: World, facts: ProposerFacts) -> list[Plan]:
    """Every draft length of a proposer but none."""
    predictor, running = around.predictor(facts), around.service.batch
    if around.service.closed and running:
        sizes = running.p50, running.p95 or running.p50
        return [Plan(predictor, n, *(kept(predictor, n, size) for size in sizes)) for n in predictor.lengths if n]
    rates = around.usual, around.peak
    return [Plan(predictor, n, *(outcome(around, predictor, n, rate) for rate in rates)) for n in predictor.lengths if n]


def chosen(found: list[Plan]) -> Plan | None:
    """The plan with the highest speed-up at the usual load, of those within a hundredth of it the shortest draft; one that
    holds at the peak, too, goes before one that does not."""
    if not found:
        return None
    holding = [plan for plan in found if plan.peak.low >= KEEP and plan.usual.low > WORTH] or found
    top = max(plan.usual.speedup for plan in holding)
    return min((plan for plan in holding if plan.usual.speedup >= 0.99 * top), key=lambda plan: plan.length)


def most_with_drafts(around: World, plan: Plan) -> float:
    """The most tokens per second that a replica gives with a plan."""
    given = tau(plan.facts, plan.length)[0]
    each = around.prefill / around.output
    return capacity(lambda batch: plan.predictor.pass_seconds(batch, plan.length), given, around.most, each)


def sweep(around: World, plan: Plan) -> list[Prediction]:
    """The speed-up at batch sizes by powers of two, up to the most that run, and at those of the service."""
    sizes = {2**power for power in range(around.most.bit_length())} | {around.most}
    if around.service.batch:
        sizes |= {round(size) for size in (around.service.batch.p50, around.service.batch.p95 or 1) if size >= 1}
    return [plan.at(batch) for batch in sorted(sizes)]


def batches(limit: int) -> list[int]:
    found = list(range(1, min(limit, FINE) + 1))
    while found[-1] < limit:
        found.append(min(int(found[-1] * 1.05) + 1, limit))
    return found


def schedule(around: World, plan: Plan) -> list[tuple[int, int, int]]:
    """The draft length by batch size, [(from, to, length)]: the best at each, none where the best gains nothing; a length is
    kept until another is better by a hundredth."""
    found: list[tuple[int, int]] = []
    length = 0
    for batch in batches(around.most):
        pick, kept = plan.predictor.best(batch), plan.predictor.predict(batch, length)
        if kept.speedup < 1 or pick.speedup > 1.01 * kept.speedup:
            length = pick.length
        found.append((batch, length))
    starts = [(batch, length) for i, (batch, length) in enumerate(found) if not i or length != found[i - 1][1]]
    ends = [batch - 1 for batch, _ in starts[1:]] + [around.most]
    return [(start, end, length) for (start, length), end in zip(starts, ends, strict=True)]


def last(around: World, plan: Plan, holds: Callable[[Prediction], bool]) -> int:
    """The largest batch size up to which a plan's prediction holds what is asked; 0 where it does not at one sequence."""
    reached = 0
    for batch in batches(around.most):
        if not holds(plan.at(batch)):
            break
        reached = batch
    return reached
