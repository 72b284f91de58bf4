"""``accelerate launch -m draftsmith.train RECIPE``: train, and choose the best head by the verifier's own τ."""

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
import yaml
from accelerate import PartialState

from ..console import AsJson, Debug, Force, command_line, run_command_line
from ..eval.harness import measure
from ..eval.prompts import read_prompts
from ..eval.proposers import HeadProposer
from ..eval.tree import parse
from ..heads.base import DraftHead
from ..recipes.schema import Recipe, load_recipe
from ..target import Target
from .dry_run import dry_run
from .loop import Score, train
from .stopping import AGAIN
from .summary import told


def verifier_score(recipe: Recipe) -> Score | None:
    """τ of a head on the recipe's first held-out prompts, first questions alone, greedy; None when it asks for no prompts."""
    if not recipe.eval.prompts:
        return None
    read = read_prompts(recipe.sources("held_out"))[: recipe.eval.prompts]
    prompts = [replace(prompt, later=()) for prompt in read]
    shape = parse(recipe.eval.tree)

    def score(target: Target, head: DraftHead) -> float:
        shown = PartialState().is_main_process
        result = measure(target, HeadProposer(head, shape), prompts, recipe.eval.max_new_tokens, baseline=0, show=shown)
        return result["tau"]

    return score


def run(recipe: Recipe, resume: bool = False, force: bool = False, profile: int = 0) -> dict[str, Any]:
    """Train as the recipe says; see ``train``. The head that stays is the best by the verifier."""
    return train(recipe, verifier_score(recipe), resume, force, profile)


def train_command(
    recipe: Annotated[str, typer.Argument(help="a recipe file, or the name of a shipped one")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="change a key: section.key=value")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest whole checkpoint; start where there is none")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="resolve all but the weights, print it, write nothing")] = False,
    profile: Annotated[
        int, typer.Option(min=0, metavar="N", help="trace N steps, after a short warm-up, into the run's profile/")
    ] = 0,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a draft head from a recipe."""
    loaded = load_recipe(recipe, changes)
    result = dry_run(loaded) if dry else run(loaded, resume, force, profile)
    if PartialState().is_main_process:
        tell(result, dry, as_json)
    if "stopped" in result:
        raise typer.Exit(AGAIN)


def tell(result: dict[str, Any], dry: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
    elif dry:
        print(yaml.safe_dump(result, sort_keys=False, allow_unicode=True, width=1000), end="")
    elif "stopped" in result:
        print(f"stopped by {result['stopped']} after step {result['steps']} of {result['of']}: go on with --resume")
    else:
        print(told(result["summary"]))


if __name__ == "__main__":
    app = command_line()
    app.command()(train_command)
    run_command_line(app)
