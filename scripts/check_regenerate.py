"""Does a real server write what the target writes in this process? `draftsmith data regenerate` both ways, against vLLM.

Starts vLLM's server on loopback in float32 and lets it answer conversations of one to three user turns, greedy; the same in
this process. Texts must be equal; only a near-tie of the target, shown with its margin, excuses one. One run is killed
with SIGKILL on its way and started again: nothing may be missing, twice, or other than before. The server's own words for
what it refuses are checked too. Leaves runs/regenerate/report.json; exits with status 1 unless all of it holds.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm_server import CONTEXT, PYTHON, require_engine, server

from draftsmith.console import note
from draftsmith.data.regenerate import beside
from draftsmith.data.rewriting import TOO_LONG
from draftsmith.data.template import render, tokens
from draftsmith.errors import UserError
from draftsmith.eval.harness import NEAR_TIE, divergence
from draftsmith.fetch import DEMO_TARGET, local_path
from draftsmith.target import Target

ROOT = Path(__file__).resolve().parent.parent
SHORT = "Answer every question with one short sentence."
LONG_QUESTION = "What comes next? " + "one two three four " * 400


def main() -> int:
    options = read_options()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in ("served", "killed", "own", "sampled-0", "sampled-1", "refused"):
        for path in (options.out / f"{name}.jsonl", beside(options.out / f"{name}.jsonl", ".partial")):
            path.unlink(missing_ok=True)
    source = write_input(options)
    path = local_path(options.target)
    start = time.perf_counter()
    with server(options.vllm_python, path, options.target, options.out / "engine.log") as (url, version):
        seconds = {"engine_start": time.perf_counter() - start}
        served = timed(seconds, "served", lambda: regenerate(options, "served", source, "--endpoint", url))
        kill = timed(seconds, "killed", lambda: kill_and_resume(options, source, url))
        sampled = timed(seconds, "sampled", lambda: sample_twice(options, source, url))
        refusals = timed(seconds, "refusals", lambda: refused(options, url))
    own = timed(
        seconds, "own", lambda: regenerate(options, "own", source, "--target", path, "--dtype", "float32", "--batch", "4")
    )
    texts = compare(options, Target.load(path, "float32"))
    report = {
        "engine": {"name": "vllm", "version": version},
        "target": options.target,
        "served": served,
        "own": own,
        **texts,
        "kill": kill,
        "sampled": sampled,
        "refusals": refusals,
        "seconds": seconds,
    }
    report["equal"] = not texts["unequal"] and kill["as_unbroken"] and all(entry["ok"] for entry in refusals)
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    note(f"texts equal to the server's: {texts['texts_equal']} of {texts['texts_total']}, near-ties {len(texts['near_ties'])}")
    note(f"killed at {kill['done_at_kill']} of {options.conversations} conversations: {kill}")
    note(f"sampled twice with one seed: {sampled['equal']} of {sampled['total']} conversations equal")
    note("\n".join(f"{'as expected' if entry['ok'] else 'NOT as expected'}: {entry['asked']}" for entry in refusals))
    return 0 if report["equal"] else 1


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare data regenerate through vLLM with data regenerate in process.")
    parser.add_argument("--target", default=DEMO_TARGET)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--questions", type=Path, default=ROOT / "recipes/demo/heldout.jsonl")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/regenerate")
    parser.add_argument("--vllm-python", type=Path, default=PYTHON)
    options = parser.parse_args()
    require_engine(options.vllm_python)
    return options


def write_input(options: argparse.Namespace) -> Path:
    """Conversations of one, two and three user turns, the questions taken one after another from a file of chats.

    They ask for short answers, since an answer that is cut ends its conversation.
    """
    chats = [json.loads(line)["messages"] for line in options.questions.open(encoding="utf-8")]
    questions = iter([chat[0]["content"] for chat in chats if len(chat[0]["content"]) < 200])
    path = options.out / "input.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(options.conversations):
            messages = [{"role": "system", "content": SHORT}]
            for _ in range(1 + i % 3):
                messages += [{"role": "user", "content": next(questions)}, {"role": "assistant", "content": "An old answer."}]
            file.write(json.dumps({"id": f"c{i}", "messages": messages}, ensure_ascii=False) + "\n")
    return path


# -- the command ---------------------------------------------------------------------------------------------------


def command(options: argparse.Namespace, name: str, source: Path, *more: object) -> list[str]:
    """``draftsmith data regenerate``, greedy unless ``more`` says otherwise, as a process of its own."""
    line = [sys.executable, "-c", "from draftsmith.cli import main; main()", "data", "regenerate", source]
    line += ["--out", options.out / f"{name}.jsonl", "--max-new-tokens", options.max_new, "--concurrency", 4, "--json", *more]
    return list(map(str, line))


def regenerate(options: argparse.Namespace, name: str, source: Path, *more: object) -> dict[str, Any]:
    """The command's summary."""
    done = subprocess.run(command(options, name, source, *more), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"data regenerate ended with status {done.returncode}: see its last words above.")
    return json.loads(done.stdout)


def timed(seconds: dict[str, float], name: str, work: Any) -> Any:
    start = time.perf_counter()
    result = work()
    seconds[name] = time.perf_counter() - start
    return result


def rows(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (options.out / f"{name}.jsonl").open(encoding="utf-8")]


def kill_and_resume(options: argparse.Namespace, source: Path, url: str) -> dict[str, Any]:
    """Kill a run when a third of its conversations are done, start it again, and look at what came out."""
    out = options.out / "killed.jsonl"
    journal = beside(out, ".partial")
    process = subprocess.Popen(command(options, "killed", source, "--endpoint", url), stdout=subprocess.DEVNULL)
    while process.poll() is None and done_in(journal) < options.conversations // 3:
        time.sleep(0.05)
    process.kill()
    process.wait()
    at_kill = done_in(journal)
    whole_before = out.exists()
    regenerate(options, "killed", source, "--endpoint", url)
    indices = [row["row"] for row in rows(options, "killed")]
    unbroken = rows(options, "served")
    return {
        "done_at_kill": at_kill,
        "finished_before_kill": whole_before,
        "lost": len({row["row"] for row in unbroken} - set(indices)),
        "doubled": len(indices) - len(set(indices)),
        "as_unbroken": not whole_before and rows(options, "killed") == unbroken,
    }


def done_in(journal: Path) -> int:
    return max(journal.read_bytes().count(b"\n") - 1, 0) if journal.exists() else 0


def sample_twice(options: argparse.Namespace, source: Path, url: str) -> dict[str, int]:
    """How many conversations come out the same when they are sampled twice with one seed: the server's affair, not ours."""
    for name in ("sampled-0", "sampled-1"):
        more = ("--endpoint", url, "--temperature", "0.8", "--top-p", "0.95", "--seed", "7", "--limit", "4")
        regenerate(options, name, source, *more)
    first, second = rows(options, "sampled-0"), rows(options, "sampled-1")
    return {"equal": sum(a == b for a, b in zip(first, second, strict=True)), "total": len(first)}


def refused(options: argparse.Namespace, url: str) -> list[dict[str, Any]]:
    """What the client makes of the server's own refusals."""
    short, long = options.out / "short.jsonl", options.out / "long.jsonl"
    short.write_text(json.dumps({"prompt": "Say yes."}) + "\n")
    long.write_text(short.read_text() + json.dumps({"prompt": LONG_QUESTION}) + "\n")
    told = regenerate(options, "refused", long, "--endpoint", url)
    expected = {TOO_LONG: 1}
    entries = [{"asked": "a prompt beyond the context", "seen": told["reasons"], "ok": told["reasons"] == expected}]
    for asked, more, said in [
        ("more tokens than the context", ("--endpoint", url, "--max-new-tokens", CONTEXT + 1), "refuses a plain question"),
        ("a model that is not served", ("--endpoint", url, "--model", "nobody"), f"choose --model from {options.target}"),
        ("an address without /v1", ("--endpoint", url.removesuffix("/v1")), "check --endpoint, which ends in /v1"),
    ]:
        line = command(options, "never", short, *more)
        done = subprocess.run(line, capture_output=True, text=True)
        seen = done.stderr.strip().splitlines()[-1:]
        entries.append({"asked": asked, "seen": seen, "ok": done.returncode == 2 and said in done.stderr})
    return entries


# -- the texts -----------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The answers of both ways, turn by turn; behind the first that differs, a conversation's prompts differ too."""
    equal, total, ties = 0, 0, []
    unequal: list[dict[str, Any]] = []
    of_server, of_ours = ({row["row"]: row for row in rows(options, name)} for name in ("served", "own"))
    unequal += [{"row": row, "written_by": "one side alone"} for row in sorted(of_server.keys() ^ of_ours.keys())]
    for served, own in ((of_server[row], of_ours[row]) for row in sorted(of_server.keys() & of_ours.keys())):
        for turn, (theirs, ours) in enumerate(zip(served["messages"], own["messages"], strict=False)):
            if ours["role"] != "assistant":
                continue
            total += 1
            if theirs == ours:
                equal += 1
                continue
            found = parting(target, own["messages"][:turn], ours["content"], theirs["content"])
            entry = {"row": own["row"], "turn": turn, **found, "our_text": ours["content"], "server_text": theirs["content"]}
            (ties if found.get("margin", 1.0) < NEAR_TIE else unequal).append(entry)
            break
        else:
            if (len(served["messages"]), served["finish"]) != (len(own["messages"]), own["finish"]):
                unequal.append({"row": own["row"], "finish": [own["finish"], served["finish"]]})
    return {"texts_equal": equal, "texts_total": total, "near_ties": ties, "unequal": unequal}


def parting(target: Target, messages: list[dict[str, Any]], ours: str, theirs: str) -> dict[str, Any]:
    """Where two answers to the same messages part, and the target's margin there."""
    prompt = render(messages, target.tokenizer, "a prompt", answer_next=True)
    fed = tokens(prompt, target.tokenizer)
    one, other = (tokens(prompt + text, target.tokenizer)[len(fed) :] for text in (ours, theirs))
    return divergence(target, fed, one, other) if one != other else {}


if __name__ == "__main__":
    start = time.perf_counter()
    try:
        status = main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    note(f"{time.perf_counter() - start:.0f} s")
    sys.exit(status)
