"""Does the endpoint probe see what the server sees? vLLM's own counters against the times taken outside.

Starts vLLM's server on loopback, once plain and once with n-gram speculation, lets it be probed, and compares the mean TTFT
and TPOT of the same requests with the differences of the server's /metrics: rung by rung, and within 10 % for one request
at a time (what the advice reads) and over all. The requests that the server counted must be those of the probe's account and
within its budget, for a budget that ends in requests and for one that ends in seconds. Leaves runs/advise/report.json; exits
with status 1 unless all of it holds.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from vllm_server import PYTHON, require_engine, server

from draftsmith.console import note
from draftsmith.errors import UserError
from draftsmith.eval.engine_metrics import EngineMetrics, Spans, read_metrics, samples
from draftsmith.eval.probe import Budget, Probed, explore
from draftsmith.fetch import DEMO_TARGET, local_path

ROOT = Path(__file__).resolve().parent.parent
AGREE = 0.1  # of the server's mean
ADVICE = 24  # requests that the command may send
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}


def main() -> int:
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    path, plain = local_path(options.target), Budget(options.requests, options.seconds)
    with served(options, path, "plain") as (url, version):
        cases = {"plain": compare(url, plain, options.max_tokens)}
        # ending in requests, and in time
        small = [Budget(9, options.seconds), Budget(100, 1 + 3 * cases["plain"]["rungs"][0]["latency"])]
        budgets = [compare(url, budget, options.max_tokens)["account"] for budget in small]
        advice = advise(url, options)
    with served(options, path, "ngram", "--speculative-config", json.dumps(SPECULATION)) as (url, _):
        # without compiled kernels the engine verifies slowly
        cases["n-gram speculation"] = compare(url, Budget(14, options.seconds), options.max_tokens // 2)
    report = {
        "engine": {"name": "vllm", "version": version},
        "target": options.target,
        "cases": cases,
        "small_budgets": budgets,
        "advice": advice,
        "agrees": all(case["agrees"] and case["account"]["ok"] for case in cases.values())
        and all(budget["ok"] for budget in budgets)
        and advice["ok"],
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    note("all agrees" if report["agrees"] else "NOT all agrees")
    return 0 if report["agrees"] else 1


def served(options: argparse.Namespace, path: str, name: str, *more: str) -> AbstractContextManager[tuple[str, str]]:
    log = options.out / f"engine-{name}.log"
    return server(options.vllm_python, path, options.target, log, ("--max-num-seqs", 8, *more))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare what the endpoint probe measures with vLLM's own metrics.")
    parser.add_argument("--target", default=DEMO_TARGET)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/advise")
    parser.add_argument("--vllm-python", type=Path, default=PYTHON)
    options = parser.parse_args()
    require_engine(options.vllm_python)
    return options


def compare(url: str, budget: Budget, max_tokens: int) -> dict[str, Any]:
    """A probing, with the server's means beside the probe's and the server's count of its requests."""
    before = counts(url)
    probed = explore(url, budget=budget, max_tokens=max_tokens, temperature=0.0)
    time.sleep(1)  # for what was cancelled to be counted
    counted = {name: value - before[name] for name, value in counts(url).items()}
    rungs = [
        {
            "concurrency": rung.concurrency,
            "latency": rung.latency,
            "tokens_per_s": rung.tokens_per_s,
            **both(rung.ttft, rung.tpot, rung.engine),
        }
        for rung in probed.rungs
    ]
    ttft, tpot = ([value for rung in probed.rungs for value in getattr(rung, name)] for name in ("ttft", "tpot"))
    overall = both(ttft, tpot, probed.during)
    note(f"{probed.sentence()}\nTTFT and TPOT, ours and the server's: {json.dumps(overall)}")
    return {
        "rungs": rungs,
        "overall": overall,
        "tau": probed.during and probed.during.tau,
        "account": account(budget, probed, counted),
        "service": probed.service().model_dump(mode="json", exclude_unset=True),
        "agrees": bool(overall) and all(near(pair) for part in (rungs[0], overall) for pair in (part["ttft"], part["tpot"])),
    }


def advise(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The command's answer, and whether it has a table and a verdict and the server counted no more than it was allowed."""
    line = [sys.executable, "-c", "from draftsmith.cli import main; main()", "advise", "--endpoint", url, "--json", "--force"]
    line += ["--out", options.out / "advice", "--budget-requests", ADVICE, "--max-new-tokens", options.max_tokens]
    before = counts(url)
    done = subprocess.run(list(map(str, [*line, "--temperature", 0])), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"advise ended with status {done.returncode}: see its last words above.")
    found = json.loads(done.stdout)
    counted = counts(url)["chat_requests"] - before["chat_requests"]
    ok = bool(found["table"]) and found["verdict"] in ("on", "first", "not-yet") and counted <= ADVICE
    return {"budget": ADVICE, "requests": counted, **{key: found[key] for key in ("verdict", "because", "table")}, "ok": ok}


def counts(url: str) -> dict[str, float]:
    page = httpx.get(url.removesuffix("/v1") + "/metrics").text
    metrics = read_metrics(page)
    assert metrics and metrics.ttft
    chats = [s.value for s in samples(page) if s.name == "http_requests_total" and "chat" in s.labels.get("handler", "")]
    return {"chat_requests": sum(chats), "first_tokens": metrics.ttft.count, "finished": metrics.requests or 0.0}


def account(budget: Budget, probed: Probed, counted: dict[str, float]) -> dict[str, Any]:
    sent = {"sent": probed.sent, "seconds": probed.seconds, "answers": len(probed.answers), "ended": probed.ended}
    ok = max(counted.values()) <= probed.sent <= budget.requests and probed.seconds < budget.seconds + 1
    return {"requests": budget.requests, "within": budget.seconds, **sent, **counted, "ok": ok}


def both(ttft: Sequence[float], tpot: Sequence[float], engine: EngineMetrics | None) -> dict[str, Any]:
    """The probe's means and the server's, in seconds, and how many values each is of; nothing where a rung was cut."""
    if not (engine and engine.ttft and engine.tpot and ttft and tpot):
        return {}
    return {"ttft": pair(ttft, engine.ttft), "tpot": pair(tpot, engine.tpot)}


def pair(ours: Sequence[float], theirs: Spans) -> dict[str, Any]:
    mean = theirs.mean or float("nan")
    return {"ours": fmean(ours), "server": mean, "ratio": fmean(ours) / mean, "of": [len(ours), theirs.count]}


def near(pair: dict[str, Any]) -> bool:
    return abs(pair["ratio"] - 1) <= AGREE


if __name__ == "__main__":
    start = time.perf_counter()
    try:
        status = main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    note(f"{time.perf_counter() - start:.0f} s")
    sys.exit(status)
