"""The questions to be answered before speculation is turned on, each with its value, where that came from and what it says."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from .load import balance
from .outlook import WORTH, Plan, World, alone
from .service import ProposerFacts, Service

Answer = Literal["good", "bad", "unknown", "note"]

DOMINATED = 0.6  # the share of a request's time before its first token from which decoding is not what to mend
CROWDED = 0.9  # the cache use from which memory for drafts takes requests out
REPEATS = 0.2  # the repetitiveness from which look-ups are worth a try
LOW, FULL = 0.3, 0.85  # of what a replica can give: low load below, saturating above
APART = 0.25  # how far the running batch may be from what rate, length and speed make of it
WARM = 0.8  # the temperature from which acceptance has to be measured there


@dataclass(frozen=True)
class Row:
    question: str
    value: Any
    source: str
    answer: Answer
    says: str


def checklist(service: Service, around: World | None, plan: Plan | None) -> dict[str, dict[str, Any]]:
    """The filled table: for every question ``{question, value, source, answer: good | bad | unknown | note, says}``."""
    rows = {
        "bottleneck": bottleneck(service, around),
        "traffic": traffic(service, around),
        "consistency": consistency(service),
        "repetition": repetition(service),
        "tokenizer": tokenizer(service),
        "memory": memory(service, plan),
        "temperature": temperature(service, plan),
        "batch": batches(plan),
        "targets": targets(service, plan),
        "costs": costs(around),
        "acceptance": acceptance(service, plan),
    }
    return {key: asdict(row) for key, row in rows.items()}


def source(service: Service, *names: str) -> str:
    return ", ".join(dict.fromkeys(service.sources.get(name, "assumed") for name in names))


def prefill_share(service: Service, around: World | None) -> float | None:
    """The share of a request's time before its first token; None where times or lengths are not known. The time per token
    is the service's own, or what the costs make of its load."""
    wait = service.ttft.mean if service.ttft else alone(service)
    tpot = service.tpot.mean if service.tpot else None
    if tpot is None and around:
        steady = balance(around.usual, around.step, 1.0, around.most, around.busy(around.usual))
        tpot = steady and steady.tpot
    if not wait or not tpot or not service.output_tokens:
        return None
    return wait / (wait + (service.output_tokens.mean - 1) * tpot)


def bottleneck(service: Service, around: World | None) -> Row:
    question = "is decoding what takes the time, or the first token?"
    share = prefill_share(service, around)
    if share is None:
        return Row(question, None, "unknown", "unknown", "give ttft, tpot and output_tokens")
    answer = "bad" if share > DOMINATED else "good"
    says = f"{share:.0%} of a request passes before its first token; no decoder makes it {1 / share:.1f} times as fast"
    return Row(question, share, source(service, "ttft", "tpot", "output_tokens"), answer, says)


def traffic(service: Service, around: World | None) -> Row:
    question = "is traffic low, medium or already saturating?"
    if around is None:
        return Row(question, None, "unknown", "unknown", "give step costs, or speeds under rising load")
    full = around.full
    share = around.usual / full
    word = "low" if share < LOW else "medium" if share < FULL else "saturating"
    asked = f"{around.usual:.0f} of at most {full:.0f} tokens per second and replica"
    known = source(service, "qps") if service.qps else source(service, "batch") if service.batch else "assumed"
    return Row(question, {"load": word, "share": share}, known, "bad" if word == "saturating" else "good", f"{word}: {asked}")


def consistency(service: Service) -> Row:
    question = "do rate, length, speed and running batch agree?"
    if not (service.qps and service.output_tokens and service.tpot and service.batch):
        return Row(question, None, "unknown", "note", "give qps, output_tokens, tpot and batch to have them compared")
    made = service.qps * service.output_tokens.mean * service.tpot.mean / service.replicas
    says = f"qps · output · tpot / replicas makes {made:.1f} running requests, {service.batch.p50:.1f} are given"
    apart = abs(made / service.batch.p50 - 1) > APART
    return Row(
        question, made, source(service, "qps", "batch"), "bad" if apart else "good", says + (": check them" if apart else "")
    )


def repetition(service: Service) -> Row:
    question = "is the output repetitive?"
    if service.repetitiveness is None:
        return Row(question, None, "unknown", "unknown", "measure it: look-ups live on it")
    many = service.repetitiveness >= REPEATS
    says = f"{service.repetitiveness:.0%} of its 4-grams stood there before: " + (
        "look-ups such as ngram and suffix are worth a try" if many else "look-ups will find little"
    )
    return Row(question, service.repetitiveness, source(service, "repetitiveness"), "good" if many else "note", says)


def tokenizer(service: Service) -> Row:
    question = "which proposers share tokenizer and vocabulary with the target?"
    if not service.proposers:
        return Row(question, None, "unknown", "unknown", "name a proposer")
    found = {each.name: condition(each) for each in service.proposers}
    answer: Answer = "good" if "yes" in found.values() else "unknown" if "unknown" in found.values() else "bad"
    known = source(service, *(f"proposers.{name}.tokenizer_equal" for name in found))
    return Row(question, found, known, answer, ", ".join(f"{name}: {word}" for name, word in found.items()))


def condition(facts: ProposerFacts) -> str:
    """Look-ups speak the target's own tokens; for others both must be known."""
    if facts.kind == "lookup":
        return "yes"
    if facts.tokenizer_equal is False:
        return "another tokenizer"
    if facts.vocabulary_equal is False:
        return "another vocabulary"
    return "yes" if facts.tokenizer_equal else "unknown"


def memory(service: Service, plan: Plan | None) -> Row:
    question = "is there memory for the draft?"
    if service.kv_cache_use is not None and service.kv_cache_use > CROWDED:
        says = f"{service.kv_cache_use:.0%} of the cache is in use: what a draft takes pushes requests out, lower the batch"
        return Row(question, service.kv_cache_use, source(service, "kv_cache_use"), "bad", says)
    if plan and plan.facts.kind == "lookup":
        return Row(question, 0, "assumed", "good", f"{plan.facts.name} takes none on the device")
    if plan is None or plan.facts.memory is None or service.memory_free is None:
        return Row(question, None, "unknown", "unknown", "give memory_free and the proposer's memory")
    fits_in = fits(service, plan.facts)
    says = f"{plan.facts.name} takes {plan.facts.memory / 2**30:.2f} GiB of {service.memory_free / 2**30:.2f} GiB free"
    if service.hardware and service.hardware.cache_per_token:
        says += f", the cache of {plan.facts.memory / service.hardware.cache_per_token:.0f} tokens"
    return Row(question, plan.facts.memory, source(service, "memory_free"), "good" if fits_in else "bad", says)


def fits(service: Service, facts: ProposerFacts) -> bool | None:
    """Whether a proposer's memory is free; None where that is not known."""
    if facts.kind == "lookup":
        return True
    if facts.memory is None or service.memory_free is None:
        return None
    return facts.memory <= service.memory_free


def temperature(service: Service, plan: Plan | None) -> Row:
    question = "does the gain survive the temperature in use?"
    if service.temperature is None:
        return Row(question, None, "unknown", "unknown", "give the temperature that the service samples at")
    known = source(service, "temperature")
    if plan is None or plan.facts.temperature is None:
        answer: Answer = "unknown" if service.temperature else "note"
        return Row(question, service.temperature, known, answer, "nothing says at which temperature acceptance was measured")
    if elsewhere(service, plan.facts):
        says = f"acceptance was measured at {plan.facts.temperature:g}, the service samples at {service.temperature:g}"
        return Row(question, service.temperature, known, "unknown", says)
    one = plan.at(1)
    gain = f"{one.speedup:.2f} [{one.low:.2f}, {one.high:.2f}]"
    says = f"measured at {service.temperature:g}, a request alone is {gain} times as fast"
    return Row(question, service.temperature, known, "good" if one.low > 1 else "bad", says)


def elsewhere(service: Service, facts: ProposerFacts) -> bool:
    """Whether acceptance was measured at a temperature that says little of the service's."""
    if service.temperature is None:
        return False
    if facts.temperature is None:
        return service.temperature >= WARM and facts.kind != "lookup"
    return abs(facts.temperature - service.temperature) > 0.15


def batches(plan: Plan | None) -> Row:
    question = "does the gain survive the batch sizes seen?"
    if plan is None:
        return Row(question, None, "unknown", "unknown", "costs and acceptance tell it together")
    value = {"usual": asdict(plan.usual), "peak": asdict(plan.peak)}
    parts = []
    for name, at in (("usual", plan.usual), ("peak", plan.peak)):
        running = f"{at.plain_batch:.1f} requests run" if at.plain_batch else "plain decoding is saturated"
        drafting = f"{at.batch:.1f} with drafts" if at.batch else "drafts cannot keep up"
        parts.append(f"at the {name} load {running}, {drafting}: {at.speedup:.2f} [{at.low:.2f}, {at.high:.2f}] times as fast")
    good = plan.usual.low > WORTH and plan.peak.low >= 1
    return Row(question, value, "predicted", "good" if good else "bad", "; ".join(parts))


def targets(service: Service, plan: Plan | None) -> Row:
    question = "are the latency targets kept, and would they be?"
    limit = service.slo
    if limit.ttft is None and limit.tpot is None:
        return Row(question, None, "unknown", "note", "none are given")
    says, answer = [], "good"
    if limit.ttft and service.ttft:
        kept = (service.ttft.p95 or service.ttft.mean) <= limit.ttft
        says.append(f"ttft {'kept' if kept else 'missed, which drafts do not mend'}")
        answer = answer if kept else "bad"
    if limit.tpot and service.tpot:
        now = service.tpot.p95 or service.tpot.mean
        then = now / plan.peak.speedup if plan and plan.peak.speedup else now
        says.append(
            f"tpot {'kept' if now <= limit.tpot else 'missed'} now, {'kept' if then <= limit.tpot else 'missed'} with drafts"
        )
        answer = answer if min(now, then) <= limit.tpot else "bad"
    return Row(question, limit.model_dump(), source(service, "slo"), answer, ", ".join(says) or "ttft and tpot are not known")


def costs(around: World | None) -> Row:
    question = "how are the costs of a pass known?"
    if around is None:
        return Row(
            question, None, "unknown", "unknown", "not at all: measure a local target, probe the endpoint, or state them"
        )
    return Row(question, around.how, "measured", "note" if around.cost.bound else "good", f"from {around.how}")


def acceptance(service: Service, plan: Plan | None) -> Row:
    """The trap is named, for the rates that an engine gave and for those that it will give."""
    question = "what do engines' acceptance rates mean here?"
    says = "accepted / drafted falls with the draft's length; what counts is τ = 1 + rate · length, and α by position"
    rates = {each.name: each.engine.model_dump() for each in service.proposers if each.engine}
    for name, engine in rates.items():
        says += f"; {name}'s {engine['rate']:.2f} at length {engine['length']} is τ {1 + engine['rate'] * engine['length']:.2f}"
    if plan:
        tau = plan.at(1).tau
        says += f"; with {plan.length} draft tokens an engine should show {(tau - 1) / plan.length:.2f}, which is τ {tau:.2f}"
    return Row(question, rates or None, "probed" if rates else "unknown", "note", says)
