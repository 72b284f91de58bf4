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
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from vllm_server import PYTHON, require_engine, server

from draftsmith.console import note
from draftsmith.errors import UserError
from draftsmith.eval.engine_metrics import Spans, read_metrics, samples
from draftsmith.eval.probe import Budget, Probed, explore
from draftsmith.fetch import DEMO_TARGET, local_path

ROOT = Path(__file__).resolve().parent.parent
AGREE = 0.1  # of the server's mean
ADVICE = 24  # requests that the command may send
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
CASES = {"plain": [], "n-gram speculation": ["--speculative-config", json.dumps(SPECULATION)]}


def main() -> int:
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    path = local_path(options.target)
    cases, versions = {}, set()
    for name, more in CASES.items():
        log = options.out / f"engine-{name.split()[0]}.log"
        with server(options.vllm_python, path, options.target, log, ("--max-num-seqs", 8, *more)) as (url, version):
            cases[name] = check(url, options)
            versions.add(version)
        note(f"{name}: {json.dumps(cases[name]['overall'])}; within the budget: {cases[name]['budgets']}")
    report = {
        "engine": {"name": "vllm", "version": versions.pop()},
        "target": options.target,
        "max_tokens": options.max_tokens,
        "cases": cases,
        "agrees": all(case["agrees"] for case in cases.values()),
    }
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["agrees"] else 1


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


def check(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """One server, probed in full and then with small budgets."""
    asked = Budget(options.requests, options.seconds)
    probed, counted = watched(url, asked, options)
    rungs = [
        {"concurrency": rung.concurrency, "requests": len(rung.answers), **both(rung.ttft, rung.tpot, rung.engine)}
        for rung in probed.rungs
    ]
    everything = [values for rung in probed.rungs for values in rung.ttft], [v for rung in probed.rungs for v in rung.tpot]
    overall = both(*everything, probed.during)
    budgets = [account(asked, probed, counted)]
    for budget in (Budget(9, options.seconds), Budget(100, 1 + 3 * probed.rungs[0].latency)):  # ending in requests, in time
        budgets.append(account(budget, *watched(url, budget, options)))
    advice, told = advise(url, options)
    return {
        "rungs": rungs,
        "overall": overall,
        "ended": probed.ended,
        "budgets": budgets,
        "service": probed.service().model_dump(mode="json", exclude_unset=True),
        "tau": probed.during and probed.during.tau,
        "advice": advice,
        "agrees": all(near(pair) for part in (rungs[0], overall) for pair in (part["ttft"], part["tpot"]))
        and all(budget["ok"] for budget in budgets)
        and told,
    }


def watched(url: str, budget: Budget, options: argparse.Namespace) -> tuple[Probed, dict[str, float]]:
    """What the probe saw, and the requests that the server counted meanwhile: chat completions, and first tokens of such."""
    before = counts(url)
    probed = explore(url, budget=budget, max_tokens=options.max_tokens, temperature=0.0)
    time.sleep(1)  # for what was cancelled to be counted
    return probed, {name: value - before[name] for name, value in counts(url).items()}


def advise(url: str, options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The command's answer, and whether it has a table and a verdict and the server counted no more than it was allowed."""
    line = [sys.executable, "-c", "from draftsmith.cli import main; main()", "advise", "--endpoint", url, "--json", "--force"]
    line += ["--out", options.out / "advice", "--budget-requests", ADVICE, "--max-new-tokens", options.max_tokens]
    before = counts(url)
    done = subprocess.run(list(map(str, [*line, "--temperature", 0])), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"advise ended with status {done.returncode}: see its last words above.")
    found = json.loads(done.stdout)
    counted = counts(url)["chat_requests"] - before["chat_requests"]
    told = bool(found["table"]) and found["verdict"] in ("on", "first", "not-yet") and counted <= ADVICE
    return {**{key: found[key] for key in ("verdict", "because", "table")}, "requests": counted}, told


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


def both(ttft: Sequence[float], tpot: Sequence[float], engine: Any) -> dict[str, Any]:
    """The probe's means and the server's, in seconds, and how many values each is of."""
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
