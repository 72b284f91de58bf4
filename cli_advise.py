"""``draftsmith advise``: should a service turn speculation on, with what, and how long a draft?"""

import json
from pathlib import Path
from typing import Annotated

import typer

from .console import AsJson, Debug, Dtype, Force, Out, Seed, show
from .errors import UserError
from .eval.advise import advise, sentences
from .eval.local import BATCHES, measure_service
from .eval.probe import Budget, probe
from .eval.prompts import read_prompts
from .eval.service import Service
from .eval.settings import written
from .eval.tree import parse
from .outputs import new_directory
from .sampling import Sampling
from .target import Target


def advise_command(
    out: Out,
    service: Annotated[Path | None, typer.Option(help="YAML of the service's known values; see docs/advise.md")] = None,
    target: Annotated[str | None, typer.Option(help="measure this model here: a directory, a hub id or a .gguf file")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="probe this OpenAI-compatible server, such as http://localhost:8000/v1")
    ] = None,
    model: Annotated[str | None, typer.Option(help="which of the endpoint's models; default: its only one")] = None,
    proposer: Annotated[list[str] | None, typer.Option(help="with --target, as eval takes them; may be repeated")] = None,
    prompts: Annotated[Path | None, typer.Option(help="the service's own: JSONL of messages, prompt or turns")] = None,
    limit: Annotated[int, typer.Option(min=1, help="use the first N prompts")] = 32,
    tree: Annotated[str, typer.Option(help="of heads and models: chain:5, tree:4x2x1, dynamic:24 or another form")] = "chain:5",
    batch: Annotated[str, typer.Option(help="the batch sizes that passes are timed at")] = ",".join(map(str, BATCHES)),
    temperature: Annotated[float | None, typer.Option(help="at which the service samples; 0 is greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 switches it off")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="per answer")] = 128,
    budget_requests: Annotated[int, typer.Option(min=1, help="the most requests that the endpoint gets")] = Budget().requests,
    budget_seconds: Annotated[float, typer.Option(min=1, help="the longest that it is probed")] = Budget().seconds,
    dtype: Dtype = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda:0, ...; auto spreads the target")] = None,
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say whether speculation pays for a service, with what, and how long a draft; write engine settings that go with it.

    What is known of the service comes from a local target, from an endpoint, or from a YAML file, whose values go first.
    """
    if target and endpoint:
        raise UserError("--target measures here and --endpoint there, and their costs differ: give one of them.")
    if not (service or target or endpoint):
        raise UserError("nothing is known of the service: give --service FILE, --target MODEL or --endpoint URL.")
    if proposer and not target:
        raise UserError("--proposer is measured on a --target: name one, or state its values under proposers in --service.")
    if model and not endpoint:
        raise UserError("--model is one of an --endpoint's: give its URL, or the model as --target.")
    if target and not prompts:
        raise UserError("--target answers the service's own prompts: give --prompts FILE.")
    stated = Service.read(service) if service else Service()
    asked = read_prompts(prompts)[:limit] if prompts else []
    temperature = stated.temperature if temperature is None else temperature
    top_p = stated.top_p if top_p is None else top_p
    with new_directory(out, force) as partial:
        known = Service()
        if target:
            sampling = Sampling(temperature or 0.0, 0, top_p or 1.0)
            known = measure_service(
                Target.load(target, dtype, device),
                proposer or [],
                asked,
                parse(tree),
                max_new_tokens,
                sampling,
                read_batches(batch),
                seed,
                show=True,
            )
        if endpoint:
            budget = Budget(budget_requests, budget_seconds)
            known = probe(endpoint, asked, budget, model, max_tokens=max_new_tokens, temperature=temperature)
        known = known.under(stated)
        found = advise(known)
        (partial / "advice.json").write_text(json.dumps(found, indent=2) + "\n")
        (partial / "service.json").write_text(known.model_dump_json(indent=2, exclude_unset=True) + "\n")
        for name, text in written(found["settings"]).items() if found["settings"] else ():
            (partial / name).write_text(text)
    show({**found, "out": str(out)}, as_json, f"{sentences(found)}\n\nwritten to {out}")


def read_batches(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise UserError(f"--batch {text} cannot be read: give whole numbers from 1 on, with commas between them.")
    return found
