"""The whole loop on a small real model, as `make demo` runs it: train, measure, export, and say what came out."""

import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # read when torch is imported

from rich.console import Console

from draftsmith.console import note
from draftsmith.eval.harness import measure
from draftsmith.eval.prompts import read_prompts
from draftsmith.eval.proposers import HeadProposer
from draftsmith.eval.report import table, write_report
from draftsmith.eval.tree import parse
from draftsmith.heads.engines.registry import export
from draftsmith.heads.kinds import load_head
from draftsmith.outputs import new_directory
from draftsmith.recipes.schema import load_recipe
from draftsmith.target import Target
from draftsmith.train.__main__ import run

RUN = Path("runs/demo")
PROMPTS, COMPARED, NEW_TOKENS = 32, 8, 48


def main() -> None:
    began = time.perf_counter()
    recipe = load_recipe("demo", [f"output={RUN}"])
    note("1 of 3: training the head")
    run(recipe, force=True)
    trained = time.perf_counter()
    note(f"2 of 3: measuring it on {PROMPTS} held-out prompts, {COMPARED} of them decoded without the head, too")
    target, head = Target.load(recipe.target.name, "float32"), load_head(RUN / "head")
    # the first held-out prompts chose the head, so they do not measure it
    prompts = read_prompts(recipe.sources("held_out"))[recipe.eval.prompts :][:PROMPTS]
    proposer = HeadProposer(head, parse(recipe.eval.tree))
    result = measure(target, proposer, prompts, NEW_TOKENS, baseline=COMPARED, show=True)
    with new_directory(RUN / "eval", force=True) as partial:
        write_report([result], partial, {"dtype": "float32", "max_new_tokens": NEW_TOKENS, "seed": 0})
    measured = time.perf_counter()
    note("3 of 3: exporting it for vLLM")
    exported = export(head, target, "vllm", RUN / "export" / "vllm", parse(recipe.eval.tree).length, force=True)
    places = {"head": RUN / "head", "report": RUN / "eval" / "report.html", "vLLM export": exported}
    answer = table(result, places)
    answer.add_row("wall clock", f"training {trained - began:.0f} s, measuring {measured - trained:.0f} s")
    Console(highlight=False, markup=False).print(answer)


if __name__ == "__main__":
    main()
