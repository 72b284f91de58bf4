"""``accelerate launch -m draftsmith.train RECIPE``: train, and choose the best head by the verifier's own τ."""

import json
import sys
from typing import Annotated

import typer

from ..console import note
from ..errors import UserError
from ..eval.harness import measure
from ..eval.prompts import read_prompts
from ..eval.tree import parse
from ..heads.base import DraftHead
from ..recipes.schema import Recipe, load_recipe
from ..target import Target
from .loop import Score, train


def verifier_score(recipe: Recipe) -> Score | None:
    """τ of a head on the recipe's first held-out prompts, greedy; None when the recipe asks for no prompts."""
    if not recipe.eval.prompts:
        return None
    prompts = read_prompts(recipe.data_file(recipe.data.held_out))[: recipe.eval.prompts]
    shape = parse(recipe.eval.tree)

    def score(target: Target, head: DraftHead) -> float:
        result = measure(target, head, prompts, shape, recipe.eval.max_new_tokens, baseline=0)
        return result["tau"]

    return score


def run(recipe: Recipe, resume: bool, force: bool) -> dict:
    return train(recipe, verifier_score(recipe), resume, force)


def main(
    recipe: Annotated[str, typer.Argument(help="a recipe file, or the name of a shipped one")],
    set: Annotated[list[str] | None, typer.Option(help="change a key: section.key=value")] = None,
    resume: Annotated[bool, typer.Option(help="go on from the newest whole checkpoint")] = False,
    force: Annotated[bool, typer.Option(help="replace an output directory that exists")] = False,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
    debug: Annotated[bool, typer.Option(help="show tracebacks")] = False,
) -> None:
    """Train a draft head from a recipe."""
    try:
        result = run(load_recipe(recipe, set), resume, force)
    except UserError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if json_:
        print(json.dumps(result))
    else:
        note(f"best head (τ {result['best_tau']:.3f}): {result['head']}")


if __name__ == "__main__":
    typer.run(main)
