"""What is said of a result: its title, its measures as names and values, and what a reader must not overlook."""

from collections.abc import Sequence
from typing import Any

PARTS = ("target", "draft", "bookkeeping")
LONGEST = 32  # letters of a draft's name that a title has room for
FEW = 20  # prompts; below, another handful may well say something else
WIDE = 0.1  # of the number, to either side
SHORT = 10  # seconds of decoding; below, whatever else runs on the machine shows in the speed
LOOPING = 0.5  # of the outputs' 4-grams


def aspects(result: dict[str, Any]) -> dict[str, str]:
    """What tells one result from another, as short phrases by aspect; empty where it goes without saying."""
    temperature, batch = result["temperature"], result["batch"]
    top_k = f", top-k {result['top_k']}" if result["top_k"] else ""
    return {
        "target": result["target"],
        "draft": drafter(result),
        "sampled": "drawn" if result["draft"]["sampled"] else "",
        "decoding": f"temperature {temperature:g}, top-p {result['top_p']:g}{top_k}" if temperature else "greedy",
        "batch": f"batch {batch}",
        "prompts": str(result["cell"]["prompts"]) if "cell" in result else "",
        "lossy": f"lossy: {result['lossy']}" if result["lossy"] else "",
        "adapted": "adapted target" if result["lossless_to"] != "the target" else "",
    }


def drafter(result: dict[str, Any]) -> str:
    """Who drafted in which form."""
    proposer, draft = result["proposer"], result["draft"]
    form = draft["name"]
    if form == f"chain:{draft['length']}":
        form = f"chain of {draft['length']}"
    elif draft["kind"] == "tree" and len(form) > LONGEST:
        form = f"tree of {draft['nodes']} nodes"
    return form if form.startswith(proposer) else f"{proposer}, {form}"  # a look-up's form begins with its name


def title(result: dict[str, Any]) -> str:
    """What was drafted, and how the target decoded."""
    phrases = aspects(result)
    unsaid = {"target", "prompts"} | ({"batch"} if result["batch"] == 1 else set())
    return ", ".join(phrase for aspect, phrase in phrases.items() if phrase and aspect not in unsaid)


def labels(results: Sequence[dict[str, Any]]) -> list[str]:
    """A name for every result: what tells it from the others; never the same one twice. See ``common`` for the rest."""
    found = [aspects(result) for result in results]
    said = {aspect for aspect in found[0] if len({phrases[aspect] for phrases in found}) > 1} or {"draft"}
    said |= {"lossy", "adapted"}  # which no picture may leave out
    names = [", ".join(phrase for aspect, phrase in phrases.items() if phrase and aspect in said) for phrases in found]
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def common(results: Sequence[dict[str, Any]]) -> str:
    """What is the same for all of several results."""
    found = [aspects(result) for result in results]
    return ", ".join(phrase for aspect, phrase in found[0].items() if phrase and all(o[aspect] == phrase for o in found))


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """One result as names and values, in the order a reader asks for them."""
    draft, counters = result["draft"], result["counters"]
    found = [("draft", title(result))]
    if draft["name"] != "none":
        found.append(("drafted per pass", drafted(draft)))
    found.append(("acceptance length τ", spread(result["tau"], result["tau_interval"], 3)))
    if draft["name"] != "none":
        found += [
            ("τ as the mean over requests", f"{result['tau_per_request']:.3f}"),
            ("mean acceptance length (vLLM's)", f"{result['mean_acceptance_length']:.3f}"),
        ]
    if len(result["categories"]) > 1:
        found.append(("τ by category", "  ".join(f"{name} {tau:.3f}" for name, tau in result["categories"].items())))
    if draft["name"] != "none":
        nothing = "nothing was drafted"
        found += [
            ("accepted by position", shares(result["accepted_per_position"]) or nothing),
            ("where the one before was", shares(result["conditional_per_position"]) or nothing),
            (
                "accepted / drafted",
                f"{result['acceptance_rate']:.1%}  ({counters['num_accepted_tokens']} of {counters['num_draft_tokens']} tokens)"
                if counters["num_draft_tokens"]
                else nothing,
            ),
        ]
    found += [
        ("tokens per target pass", f"{result['tokens_per_pass']:.3f}"),
        ("tokens/s", f"{result['tokens_per_s']:.1f}"),
        ("tokens/s without", f"{result['baseline_tokens_per_s']:.1f}" if result["speedup"] else "not measured"),
        ("speed-up", spread(result["speedup"], result["speedup_interval"], 2, "×") if result["speedup"] else "not measured"),
        ("time to first token", latency(result["ttft"])),
        ("time per token behind it", latency(result["tpot"])),
        ("time", "  ".join(f"{part} {result['time'][part]:.1%}" for part in PARTS)),
        ("repeated output", f"{result['repetitiveness']:.1%} of the 4-grams"),
    ]
    if result["peak_memory"]:
        found.append(("peak memory", f"{result['peak_memory'] / 2**30:.2f} GiB"))
    if result["gpu_utilization"] is not None:
        found.append(("GPU utilization", f"{result['gpu_utilization']:.0%}"))
    return [
        *found,
        (
            "measured on",
            f"{result['prompts']} prompts, {result['emitted_tokens']} tokens, {result['verify_passes']} verify passes",
        ),
        ("lossless", losslessness(result)),
        ("with respect to", result["lossless_to"]),
    ]


def spread(value: float, interval: Sequence[float] | None, digits: int, unit: str = "") -> str:
    """A number with its interval."""
    if not interval:
        return f"{value:.{digits}f}{unit}"
    low, high = interval
    return f"{value:.{digits}f}{unit}  (95 % interval {low:.{digits}f} – {high:.{digits}f})"


def shares(values: Sequence[float | None]) -> str:
    return "  ".join("–" if value is None else f"{value:.1%}" for value in values)


def latency(seconds: dict[str, float] | None) -> str:
    """Mean and percentiles in milliseconds."""
    return "  ".join(f"{name} {1000 * value:.1f} ms" for name, value in seconds.items()) if seconds else "not measured"


def drafted(draft: dict[str, Any]) -> str:
    """How large the drafts were, and what ended them."""
    size = f"{draft['mean_nodes']:.1f} tokens, {draft['mean_length']:.1f} deep"
    stop = draft["stop"]
    return size + (f" (a path ends where {stop['by']} falls below {stop['below']:g})" if stop else "")


def losslessness(result: dict[str, Any]) -> str:
    """What is known about the text being the target's own."""
    ties = result["near_ties"]
    if result["lossy"]:
        return f"NO: {result['lossy']} takes drafts that the target would not have drawn"
    if result["lossless"] is None:
        return "by construction; no text was compared"
    compared = f"{result['baseline_prompts']} texts compared with plain decoding"
    if not ties:
        return f"yes: {compared}, all equal"
    margins = ", ".join(f"prompt {tie['prompt']} at token {tie['token']} (margin {tie['margin']:.1e})" for tie in ties)
    return f"{'yes, but for near ties' if result['lossless'] else 'NO'}: {compared}, other tokens in {margins}"


def verdict(result: dict[str, Any]) -> str:
    """Losslessness in a word or two."""
    if result["lossless"] is None:
        return "not compared"
    if not result["lossless"]:
        return "NO"
    return "near ties" if result["near_ties"] else "yes"


def caveats(result: dict[str, Any]) -> list[str]:
    """What a reader must know before believing or quoting the numbers, the gravest first; often nothing."""
    if result["draft"]["name"] == "none":
        return []
    return [*about_the_text(result), *about_the_sample(result), *about_the_speed(result)]


def about_the_text(result: dict[str, Any]) -> list[str]:
    found = []
    if result["lossy"]:
        found.append(f"Lossy: {result['lossy']} changes the text. This τ compares with none that was measured without it.")
    elif result["lossless"] is False:
        found.append("NOT lossless: a text differs from plain decoding by more than a near tie, so τ and speed prove nothing.")
    elif result["near_ties"]:
        n = len(result["near_ties"])
        found.append(f"{counted(n, 'text')} of {result['baseline_prompts']} left plain decoding at a near tie.")
    elif result["lossless"] is None and not result["temperature"]:
        found.append("No text was compared with plain decoding.")
    if not result["counters"]["num_draft_tokens"]:
        found.append("Nothing was drafted: this is plain decoding with the proposer's overhead.")
    if result["repetitiveness"] > LOOPING:
        found.append(
            f"The outputs repeat themselves ({result['repetitiveness']:.0%} of their 4-grams had stood before), which every "
            "proposer profits from: expect less on outputs that do not."
        )
    return found


def about_the_sample(result: dict[str, Any]) -> list[str]:
    found = []
    if result["prompts"] < FEW:
        found.append(f"{counted(result['prompts'], 'prompt')}: a small sample, whose interval is itself uncertain.")
    low, high = result["tau_interval"]
    if high - low > 2 * WIDE * result["tau"]:
        found.append("τ is known roughly: its interval reaches further than a tenth to either side. More prompts narrow it.")
    return found


def about_the_speed(result: dict[str, Any]) -> list[str]:
    if not result["speedup"]:
        return []
    found = []
    low, high = result["speedup_interval"] or (result["speedup"],) * 2
    if high < 1:
        found.append("Slower than plain decoding: under these conditions leave it off.")
    elif low <= 1:
        found.append("No gain in speed is shown: 1 lies inside the interval of the speed-up.")
    if high - low > 2 * WIDE * result["speedup"]:
        found.append("The speed-up is known roughly: its interval reaches further than a tenth to either side.")
    timed = sum(prompt["plain_seconds"] or 0 for prompt in result["per_prompt"])
    if timed < SHORT:
        found.append(f"Plain decoding was timed over {timed:.1f} s: what else the machine did shows in the speed-up.")
    if result["baseline_prompts"] < result["prompts"]:
        found.append(f"Speeds are of the {result['baseline_prompts']} prompts that were decoded both ways.")
    return found


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
