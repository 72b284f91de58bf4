"""Should a service turn speculation on, with what, and how long a draft? The verdict, and what would change it.

The rules are hysteresis around measured numbers: on where the speed-up is surely above 1.05 at the usual load and no loss at
the peak; the draft's length by batch size where only the peak stands against it; "first" where a measurement or a fact is
missing; "not-yet" where the numbers say no.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from . import acceptance
from .checklist import DOMINATED, REPEATS, checklist, condition, elsewhere, fits, prefill_share
from .load import balance
from .outlook import KEEP, WORTH, Outcome, Plan, World, batches, chosen, last, most_with_drafts, plans, schedule, sweep, world
from .service import Acceptance, ProposerFacts, Service
from .settings import Wish, settings
from .speedup import Prediction, end_to_end

Verdict = Literal["on", "first", "not-yet"]
ORDER: list[Verdict] = ["on", "first", "not-yet"]
CANARY = 0.05  # the share of traffic that a first try gets


@dataclass(frozen=True)
class Decision:
    verdict: Verdict
    because: str


Weighed = list[tuple[Plan, Decision]]  # every proposer's best plan and what is to be said of it, the best first


def advise(service: Service) -> dict[str, Any]:
    """The whole answer as one JSON document; docs/advise.md explains its keys."""
    around = world(service)
    usable = [each for each in service.proposers if fits(service, each) is not False and "another" not in condition(each)]
    found = [chosen(plans(around, facts)) for facts in usable] if around else []
    weighed = [(plan, weigh(service, around, plan)) for plan in found if around and plan]
    weighed.sort(key=lambda each: (ORDER.index(each[1].verdict), -each[0].usual.low))
    plan = weighed[0][0] if weighed else None
    decision = ruled_out(service, around, usable) or missing(service, around, usable, plan) or weighed[0][1]
    proposer, length = (plan.facts, plan.length) if plan and decision.verdict != "not-yet" else (None, 0)
    return {
        "service": service.name,
        "table": checklist(service, around, plan),
        "verdict": decision.verdict,
        "because": decision.because,
        "proposer": proposer and proposer.name,
        "draft_length": length,
        **(quantities(around, plan) if around and plan else NO_QUANTITIES),
        "considered": considered(service, weighed, usable),
        "whole_request": whole(service, around, plan),
        "would_change": changes(service, around, usable, weighed, decision),
        "settings": settings(wish(around, plan)) if around and plan and decision.verdict != "not-yet" else None,
    }


NO_QUANTITIES = {"predicted": [], "draft_length_by_batch": [], "hysteresis": None, "capacity": None, "payback": None}


def quantities(around: World, plan: Plan) -> dict[str, Any]:
    return {
        "predicted": [shown(each) for each in sweep(around, plan)],
        "draft_length_by_batch": [list(step) for step in schedule(around, plan)],
        "hysteresis": hysteresis(around, plan),
        "capacity": capacities(around, plan),
        "payback": payback(around, plan),
    }


# -- the verdict -------------------------------------------------------------------------------------------------


def ruled_out(service: Service, around: World | None, usable: list[ProposerFacts]) -> Decision | None:
    """What no proposer's numbers can change."""
    share = prefill_share(service, around)
    if share is not None and share > DOMINATED:
        return Decision(
            "not-yet",
            f"the first token takes {share:.0%} of a request's time, so drafts cannot make it more than {1 / share:.2f} times "
            "as fast: shorten the prefill first (prefix caching, chunked prefill, shorter prompts).",
        )
    if service.proposers and not usable:
        reasons = ", ".join(f"{each.name} {unusable(service, each)}" for each in service.proposers)
        return Decision("not-yet", f"no proposer fits this target: {reasons}.")
    return None


def missing(service: Service, around: World | None, usable: list[ProposerFacts], plan: Plan | None) -> Decision | None:
    """What has to be measured before there are numbers at all."""
    if not service.proposers:
        kinds = "ngram and suffix" if (service.repetitiveness or 0) >= REPEATS else "a draft head, and ngram as the free one"
        return Decision("first", f"no proposer was looked at: measure {kinds} on the service's own prompts.")
    if around is None:
        off = ", with speculation turned off, since the speeds known include it" if service.speculating else ""
        return Decision("first", f"what the target's passes cost is not known: measure it with --target or --endpoint{off}.")
    if plan is None:
        names = ", ".join(each.name for each in usable)
        return Decision("first", f"nothing tells how many drafts are accepted: measure {names} on the service's own prompts.")
    return None


def weigh(service: Service, around: World, plan: Plan) -> Decision:
    """The verdict on a plan whose numbers are all there."""
    usual, peak, facts = plan.usual, plan.peak, plan.facts
    name, gain = f"{facts.name} with {plan.length} draft tokens", told(usual)
    if usual.high < 1 or (around.cost.bound and usual.speedup < WORTH):
        return Decision("not-yet", losing(around, plan))
    if around.cost.bound:
        return Decision("first", f"{name} gains at most {gain} by the hardware's roofline, which flatters: time real passes.")
    if usual.speedup <= WORTH:
        return Decision("not-yet", losing(around, plan))
    if elsewhere(service, facts):
        at = "an unknown temperature" if facts.temperature is None else f"temperature {facts.temperature:g}"
        return Decision(
            "first",
            f"acceptance was measured at {at} and the service samples at {service.temperature:g}, where fewer drafts are "
            "accepted: measure it there.",
        )
    if condition(facts) == "unknown":
        return Decision("first", f"{name} promises {gain}, but nobody has checked that its tokenizer is the target's: do.")
    if facts.kind == "model" and fits(service, facts) is None:
        return Decision("first", f"{name} promises {gain}, but whether it fits into memory is not known: give memory_free.")
    if not facts.ready:
        return Decision("first", f"{name} promises {gain} once it is trained: train it and measure it.")
    if usual.low <= WORTH:
        return Decision(
            "first", f"{name} promises {gain}, which may be chance: measure more prompts, or try it on {CANARY:.0%} of traffic."
        )
    running = "at the usual load" if usual.plain_batch is None else f"at the usual {usual.plain_batch:.1f} running requests"
    upto = last(around, plan, lambda at: at.speedup >= 1)
    if peak.low >= KEEP:
        end = f" Above {upto} running requests it would lose." if upto < around.most else ""
        return Decision("on", f"{name} answers {gain} {running} and {told(peak)} at the peak.{end}")
    return Decision(
        "on",
        f"{name} answers {gain} {running}, but {told(peak)} at the peak: draft by batch size, and not at all above {upto} "
        "running requests.",
    )


def told(of: Outcome) -> str:
    return f"{of.speedup:.2f} times as fast [{of.low:.2f}, {of.high:.2f}]"


def losing(around: World, plan: Plan) -> str:
    """Why a plan does not pay: the load, where it would pay for a single request; acceptance or cost otherwise."""
    alone = plan.at(1)
    at = plan.usual.plain_batch
    now = plan.at(at or around.most)
    bound = " even by the roofline, which flatters" if around.cost.bound else ""
    if alone.speedup > WORTH and plan.usual.saturated:
        return (
            f"the service is saturated: with {around.most} requests at once a pass with drafts of {plan.length} costs "
            f"{now.break_even:.2f} plain ones and gives {now.tau:.2f} tokens{bound}. Alone, a request would be "
            f"{alone.speedup:.2f} times as fast."
        )
    if alone.speedup > WORTH:
        return (
            f"the load is too high: with {at:.0f} requests at once {plan.facts.name} is {told(plan.usual)}{bound}, alone "
            f"{alone.speedup:.2f} times."
        )
    hot = around.service.temperature
    sampled = f" at temperature {hot:g}" if hot else ""
    return (
        f"too few drafts are accepted{sampled}: {plan.facts.name} with {plan.length} draft tokens gives τ {alone.tau:.2f}, and "
        f"a pass with drafts costs {alone.break_even:.2f} plain ones even for a single request{bound}."
    )


def unusable(service: Service, facts: ProposerFacts) -> str:
    if condition(facts) not in ("yes", "unknown"):
        return f"has {condition(facts)}"
    return f"needs {(facts.memory or 0) / 2**30:.2f} GiB where {(service.memory_free or 0) / 2**30:.2f} GiB are free"


# -- the numbers -------------------------------------------------------------------------------------------------


def shown(at: Prediction) -> dict[str, Any]:
    return {
        "batch": at.batch,
        "speedup": at.speedup,
        "interval": [at.low, at.high],
        "tau": at.tau,
        "break_even_tau": at.break_even,
        "beyond_measured": at.beyond,
        "upper_bound": at.bound,
    }


def considered(service: Service, weighed: Weighed, usable: list[ProposerFacts]) -> list[dict[str, Any]]:
    """Every proposer at its best length with its own verdict, or why it was left out."""
    plans_of = {plan.facts.name: (plan, decision) for plan, decision in weighed}
    found = []
    for facts in service.proposers:
        if facts.name in plans_of:
            plan, own = plans_of[facts.name]
            said = {"verdict": own.verdict, "because": own.because, "draft_length": plan.length}
            usual, peak = asdict(plan.usual), asdict(plan.peak)
            found.append({"proposer": facts.name, **said, "usual": usual, "peak": peak, "checked": against_measured(plan)})
        else:
            why = "too little is known of it" if facts in usable else unusable(service, facts)
            found.append({"proposer": facts.name, "left_out": why})
    return found


def against_measured(plan: Plan) -> dict[str, float] | None:
    """The prediction for one request at a time, drafting as it was measured, beside the speed-up that was measured then."""
    measured = plan.facts.speedup_alone
    if measured is None:
        return None
    predicted = plan.predictor.predict(1.0, plan.predictor.lengths[-1]).speedup
    return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}


def hysteresis(around: World, plan: Plan) -> dict[str, int]:
    """Two running batches apart from each other, so that a load between them switches nothing: drafting is turned on below
    the first and off above the second."""
    on = last(around, plan, lambda at: at.low > WORTH)
    off = last(around, plan, lambda at: at.speedup >= KEEP)
    return {"on_up_to": on, "off_above": off}


def whole(service: Service, around: World | None, plan: Plan | None) -> dict[str, float] | None:
    """The gain of a whole request: its prefill stays as it is."""
    share = prefill_share(service, around)
    if share is None or plan is None or plan.usual.speedup <= 0:
        return None
    return {"prefill_share": share, "speedup": end_to_end(share, plan.usual.speedup), "at_most": 1 / share}


def capacities(around: World, plan: Plan) -> dict[str, float]:
    """The most requests per second that all replicas answer, plainly and with drafts."""
    scale = around.service.replicas / around.output
    return {"plain": around.full * scale, "with_drafts": most_with_drafts(around, plan) * scale}


def payback(around: World, plan: Plan) -> dict[str, float] | None:
    """Days until training has been paid for by the device hours that faster passes save, replicas being in use as much as
    the load keeps them; None where nothing is saved or no cost was given."""
    usual = plan.usual
    if not plan.facts.training or usual.speedup <= 1:
        return None
    use = min(usual.plain_batch, 1.0) if usual.plain_batch else 1.0
    saved = 24 * around.service.replicas * use * (1 - 1 / plan.at(usual.plain_batch or 1).speedup)
    if saved <= 0:
        return None
    return {"training_hours": plan.facts.training, "hours_saved_per_day": saved, "days": plan.facts.training / saved}


def wish(around: World, plan: Plan) -> Wish:
    at = plan.at(plan.usual.plain_batch or around.most)
    sizes = plan.facts.sizes or {}
    tree = max(sizes) if plan.facts.tree else None
    return Wish(plan.facts, plan.length, schedule(around, plan), max(at.break_even - 1, 0) / plan.length, tree)


# -- what would change it ----------------------------------------------------------------------------------------


def changes(
    service: Service, around: World | None, usable: list[ProposerFacts], weighed: Weighed, decision: Decision
) -> list[str]:
    """Sentences, each with the number at which the verdict would turn."""
    found = []
    plan = weighed[0][0] if weighed else None
    share = prefill_share(service, around)
    if share and share > DOMINATED and service.ttft and service.output_tokens:
        longer = service.output_tokens.mean * share / (1 - share) * (1 - DOMINATED) / DOMINATED
        found.append(f"answers longer than about {longer:.0f} tokens, or a first token {share / DOMINATED:.1f} times as early")
    elif around and plan:
        found += numbers(around, plan, decision)
    elif around:
        found += needed(around)
    if plan:
        found += lowest(plan)
    better = [each for each, own in weighed[1:] if own.verdict == "first" and plan and each.usual.low > plan.usual.low]
    found += [f"{each.facts.name} promises more, {told(each.usual)}, and has something open" for each in better]
    lookups = any(each.kind == "lookup" for each in service.proposers)
    if (service.repetitiveness or 0) >= REPEATS and not lookups:
        found.append("the output repeats itself: ngram and suffix cost next to nothing and have not been measured")
    left_out = [each for each in service.proposers if each not in usable]
    found += [f"{each.name}: {unusable(service, each)}; one made for this target would count" for each in left_out]
    unknown = [name for name in ("qps", "batch", "output_tokens", "ttft", "temperature") if getattr(service, name) is None]
    if unknown:
        found.append(f"values that are not known: {', '.join(unknown)}")
    return found


def numbers(around: World, plan: Plan, decision: Decision) -> list[str]:
    at = plan.usual.plain_batch
    now = plan.at(at or around.most)
    edge = now.break_even * WORTH
    found = [f"τ {'below' if now.tau > edge else 'above'} {edge:.2f} at the usual load (now {now.tau:.2f})"]
    upto = last(around, plan, lambda each: each.speedup >= 1)
    if upto:
        turn = upto if upto < around.most else None
        words = f"{'more' if decision.verdict == 'on' else 'fewer'} than {{}}{{}}, where the gain ends"
    else:
        turn = next((batch for batch in batches(around.most) if plan.at(batch).speedup >= 1), None)
        words = "at least {}{}, where the gain begins"
    if turn:
        rate = around.given(turn) / around.output * around.service.replicas
        found.append(words.format(turn, f" running requests a replica (about {rate:.2f} requests per second)"))
    elif plan.peak.saturated:
        found.append("fewer requests per second: plain decoding cannot serve the peak")
    return found


def needed(around: World) -> list[str]:
    """From which τ on drafts would pay at the usual load, before any proposer has been looked at."""
    steady = balance(around.usual, around.step, 1.0, around.most, around.busy(around.usual))
    at = max(steady.batch, 1.0) if steady else around.most
    found = []
    half = Acceptance(rate=0.5)
    head = ProposerFacts(name="a draft head with 3 tokens", kind="head", acceptance=[half] * 3)
    lookup = ProposerFacts(name="a look-up that always drafts 5", kind="lookup", acceptance=[half] * 5)
    for facts in (head, lookup):
        edge = around.predictor(facts).predict(at, len(facts.acceptance)).break_even * WORTH
        found.append(f"{facts.name} pays from τ {edge:.2f} on at the usual load ({at:.1f} running requests)")
    return found


def lowest(plan: Plan) -> list[str]:
    """What to mend in a proposer, by which position's acceptance is low."""
    rates = [each.rate for each in acceptance.known(plan.facts)]
    if plan.facts.kind == "lookup" or len(rates) < 2:
        return []
    if rates[0] < 0.6:
        return [f"only {rates[0]:.0%} of first drafts are accepted: more data of the target's own, or a deeper head"]
    if rates[-1] < 0.8 * rates[0]:
        return [f"acceptance falls from {rates[0]:.0%} to {rates[-1]:.0%} along the draft: train more depths on own outputs"]
    return []


# -- for a reader ------------------------------------------------------------------------------------------------


def sentences(advice: dict[str, Any]) -> str:
    """The advice as text."""
    lines = [f"{advice['verdict'].upper()}: {advice['because']}", ""]
    width = max(len(row["question"]) for row in advice["table"].values())
    marks = {"good": "+", "bad": "-", "unknown": "?", "note": " "}
    lines += [f"{marks[row['answer']]} {row['question']:{width}}  {row['says']}" for row in advice["table"].values()]
    if advice["predicted"]:
        lines += ["", "requests at once   speed-up   95 % interval"]
        for row in advice["predicted"]:
            low, high = row["interval"]
            mark = " at most" if row["upper_bound"] else " beyond what was timed" if row["beyond_measured"] else ""
            lines.append(f"{row['batch']:16g} {row['speedup']:10.2f}   [{low:.2f}, {high:.2f}]{mark}")
    for each in advice["considered"]:
        if each.get("checked"):
            own = each["checked"]
            seen = f"predicted {own['predicted']:.2f}, measured {own['measured']:.2f}"
            lines.append(f"One request at a time, {each['proposer']}: {seen}.")
    between = advice["hysteresis"]
    if between and 0 < between["on_up_to"] < advice["predicted"][-1]["batch"]:
        lines += ["", f"Draft with up to {between['on_up_to']} running requests, and stop above {between['off_above']}."]
    if advice["would_change"]:
        lines += ["", "This would change with:", *(f"  {each}" for each in advice["would_change"])]
    return "\n".join(lines)
