"""The command line's part about data: one thin command per verb."""

from typing import Annotated

import typer

from .console import AsJson, Debug, Dtype, Force, Out, Progress, Seed, command_line, show
from .data import synthesize
from .outputs import new_directory
from .sampling import Sampling
from .target import Target

data_app = command_line(no_args_is_help=True, help="Look at training data, and make it.")

TargetName = Annotated[str, typer.Option("--target", help="a model directory, a hub id or a .gguf file")]


@data_app.command("synthesize")
def synthesize_data(
    target: TargetName,
    out: Out,
    conversations: Annotated[int, typer.Option(min=1, help="rows of train.jsonl")],
    held_out: Annotated[int, typer.Option(min=0, help="rows of heldout.jsonl")] = 0,
    seed: Seed = 0,
    user_temperature: Annotated[float, typer.Option(help="for the user's turns")] = 0.8,
    user_top_p: Annotated[float, typer.Option(help="for the user's turns")] = 0.9,
    answer_temperature: Annotated[float, typer.Option(help="for the answers; 0 is greedy")] = 0.0,
    max_user_tokens: Annotated[int, typer.Option(min=1, help="longer user turns are dropped")] = 64,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="longer answers are cut there")] = 160,
    batch: Annotated[int, typer.Option(min=1, help="conversations written at once")] = 128,
    dtype: Dtype = "auto",
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Let the target write conversations, both sides: train.jsonl, heldout.jsonl, provenance.json."""
    user, answer = Sampling(user_temperature, top_p=user_top_p), Sampling(answer_temperature)
    settings = synthesize.Settings(seed, user, answer, max_user_tokens, max_answer_tokens, batch)
    with new_directory(out, force) as partial:
        loaded = Target.load(target, dtype)
        with Progress("writing conversations", conversations + held_out) as bar:
            provenance = synthesize.write(loaded, partial, conversations, held_out, settings, bar.advance)
    show({**provenance, "out": str(out)}, as_json, f"{conversations} conversations and {held_out} held out: {out}")
