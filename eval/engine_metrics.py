"""What an inference engine counts of itself: its /metrics page, in Prometheus' text format, read and subtracted.

Everything but the gauges is cumulative since the engine's start, so what happened between two readings is their difference.
The names are those of vLLM (its v1/metrics/loggers.py and v1/spec_decode/metrics.py) and of SGLang (its
srt/metrics/collector.py, served with --enable-metrics).
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
STARTED = "process_start_time_seconds"  # of Prometheus' own clients, whatever the engine

# Where a release renamed one, the newest name comes first. SGLang shares a step's time among the tokens that it brought, and
# counts no drafts: it shows the means of its last steps.
NAMES = {
    "vllm": {
        "running": ["vllm:num_requests_running"],
        "waiting": ["vllm:num_requests_waiting"],
        "kv_cache": ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
        "requests": ["vllm:request_success_total"],
        "prompt_tokens": ["vllm:prompt_tokens_total"],
        "output_tokens": ["vllm:generation_tokens_total"],
        "ttft": ["vllm:time_to_first_token_seconds"],
        "tpot": ["vllm:request_time_per_output_token_seconds"],
        "itl": ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
        "drafts": ["vllm:spec_decode_num_drafts_total"],
        "draft_tokens": ["vllm:spec_decode_num_draft_tokens_total"],
        "accepted": ["vllm:spec_decode_num_accepted_tokens_total"],
        "accepted_at": ["vllm:spec_decode_num_accepted_tokens_per_pos_total"],
    },
    "sglang": {
        "running": ["sglang:num_running_reqs"],
        "waiting": ["sglang:num_queue_reqs"],
        "kv_cache": ["sglang:token_usage"],
        "requests": ["sglang:num_requests_total"],
        "prompt_tokens": ["sglang:prompt_tokens_total"],
        "output_tokens": ["sglang:generation_tokens_total"],
        "ttft": ["sglang:time_to_first_token_seconds"],
        "tpot": ["sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"],
        "tau_now": ["sglang:spec_accept_length"],
        "rate_now": ["sglang:spec_accept_rate"],
    },
}


class Sample(NamedTuple):
    """One line of the page."""

    name: str
    labels: dict[str, str]
    value: float


class Spans(NamedTuple):
    """Lengths of time, as a histogram keeps them: how many, and their sum in seconds."""

    count: float
    seconds: float

    @property
    def mean(self) -> float | None:
        return self.seconds / self.count if self.count else None


@dataclass(frozen=True)
class EngineMetrics:
    """One reading of an engine's page, or the difference of two. None where the engine does not say."""

    engine: str  # vllm or sglang
    running: float | None  # requests at this moment
    waiting: float | None
    kv_cache: float | None  # the share in use, 0 to 1; of several replicas the fullest
    requests: float | None  # finished
    prompt_tokens: float | None
    output_tokens: float | None
    ttft: Spans | None
    tpot: Spans | None  # vLLM: one per finished request, its decode time over its tokens but the first; SGLang: one per token
    itl: Spans | None  # one per step of a request, which under speculation brings several tokens
    drafts: float | None
    draft_tokens: float | None
    accepted: float | None
    accepted_at: tuple[float, ...]  # accepted drafts by position
    tau_now: float | None  # acceptance length of the last steps
    rate_now: float | None  # accepted drafts over drafted tokens in them
    started: float | None  # Unix time

    @property
    def tau(self) -> float | None:
        """Mean acceptance length, the bonus token included; None without speculation."""
        if self.drafts and self.accepted is not None:
            return 1 + self.accepted / self.drafts
        return self.tau_now or None

    @property
    def speculating(self) -> bool:
        """Whether speculation is on: vLLM shows its counts only then, SGLang shows 0 otherwise."""
        return self.drafts is not None or bool(self.tau_now)

    def since(self, earlier: Self) -> "EngineMetrics | None":
        """What was counted after ``earlier``, gauges as they are now; None where the engine was restarted in between."""
        spans = {name: less_spans(getattr(self, name), getattr(earlier, name)) for name in ("ttft", "tpot", "itl")}
        counts = {name: less(getattr(self, name), getattr(earlier, name)) for name in COUNTERS}
        if self.started != earlier.started or any((count or 0) < 0 for count in counts.values()):
            return None
        old = earlier.accepted_at or (0.0,) * len(self.accepted_at)
        at = tuple(now - before for now, before in zip(self.accepted_at, old, strict=False))
        gauges = {name: getattr(self, name) for name in GAUGES}
        return EngineMetrics(engine=self.engine, started=self.started, accepted_at=at, **counts, **spans, **gauges)


COUNTERS = ("requests", "prompt_tokens", "output_tokens", "drafts", "draft_tokens", "accepted")
GAUGES = ("running", "waiting", "kv_cache", "tau_now", "rate_now")


def read_metrics(page: str) -> EngineMetrics | None:
    """The numbers of an engine whose names are known; replicas and label values are summed. None for any other page."""
    found = list(samples(page))
    present = {sample.name.partition(":")[0] for sample in found if ":" in sample.name}
    engine = next((engine for engine in NAMES if engine in present), None)
    if engine is None:
        return None
    names = NAMES[engine]
    gauges = {name: total(found, names.get(name, [])) for name in GAUGES if name != "kv_cache"}
    cache = [sample.value for sample in found if sample.name in names["kv_cache"]]
    return EngineMetrics(
        engine=engine,
        kv_cache=max(cache, default=None),
        started=max((sample.value for sample in found if sample.name == STARTED), default=None),
        accepted_at=by_position(found, names.get("accepted_at", [])),
        ttft=spans(found, names.get("ttft", [])),
        tpot=spans(found, names.get("tpot", [])),
        itl=spans(found, names.get("itl", [])),
        **gauges,
        **{name: total(found, names.get(name, [])) for name in COUNTERS},
    )


def samples(page: str) -> Iterable[Sample]:
    """The samples of a page; comments, lines that are none and values that are no number are passed over."""
    for line in page.splitlines():
        match = SAMPLE.match(line)
        if not match:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isnan(value):
            yield Sample(match[1], dict(LABEL.findall(match[2] or "")), value)


def total(found: list[Sample], names: list[str]) -> float | None:
    """The sum of the first of the ``names`` that is there."""
    for name in names:
        values = [sample.value for sample in found if sample.name == name]
        if values:
            return sum(values)
    return None


def spans(found: list[Sample], names: list[str]) -> Spans | None:
    """The histogram of the first of the ``names`` that is there."""
    for name in names:
        count, seconds = total(found, [f"{name}_count"]), total(found, [f"{name}_sum"])
        if count is not None and seconds is not None:
            return Spans(count, seconds)
    return None


def by_position(found: list[Sample], names: list[str]) -> tuple[float, ...]:
    counts: dict[int, float] = {}
    for sample in found:
        if sample.name in names and sample.labels.get("position", "").isdigit():
            position = int(sample.labels["position"])
            counts[position] = counts.get(position, 0.0) + sample.value
    return tuple(counts[position] for position in sorted(counts))


def less(now: float | None, before: float | None) -> float | None:
    """What was added; a counter that was not there before began at 0."""
    return None if now is None else now - (before or 0.0)


def less_spans(now: Spans | None, before: Spans | None) -> Spans | None:
    before = before or Spans(0.0, 0.0)
    return now and Spans(now.count - before.count, now.seconds - before.seconds)
