"""``draftsmith diagnose``: why is τ what it is?"""

from pathlib import Path
from typing import Annotated

import typer

from .console import AsJson, Debug, Seed, show
from .errors import UserError
from .eval.diagnose import diagnose as find_causes
from .eval.diagnose import table, write
from .outputs import new_directory, refuse_existing


def diagnose(
    run: Annotated[Path, typer.Argument(help="a run directory, or a head's")],
    target: Annotated[
        str | None, typer.Option(help="the model that serves: a directory, a hub id or a .gguf file; default: the run's own")
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="prompts as the service gets them; default: the run's held-out; may be repeated")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="training conversations; default: the run's; may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="a directory to write diagnosis.json and diagnosis.html into")] = None,
    limit: Annotated[int, typer.Option(min=2, help="look at so many prompts and so many training rows")] = 24,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="of a reply")] = 64,
    length: Annotated[int | None, typer.Option(min=1, help="of the greedy draft; default: as the recipe's eval.tree")] = None,
    temperature: Annotated[float, typer.Option(help="at which the service draws; 0 is greedy")] = 0.0,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16; default: the recipe's")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ...; auto spreads the target")] = None,
    seed: Seed = 0,
    force: Annotated[bool, typer.Option("--force", help="replace the output")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say why a head's acceptance is what it is: named causes, what each costs, and the next step."""
    if temperature < 0:
        raise UserError(f"--temperature is {temperature}: give 0 for greedy decoding or a positive number.")
    if out:
        refuse_existing(out, force)
    found = find_causes(
        run, target, prompts or [], data or [], limit, max_new_tokens, length, temperature, dtype, device, seed, True
    )
    if out:
        with new_directory(out, force) as partial:
            write(found, partial)
    show(found, as_json, table(found))
