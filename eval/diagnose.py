"""Why is τ what it is? Splits what a head loses into named causes, each measured by an experiment on held-out text.

The verdict's rule. A cause whose fault is shown comes first: responses that another wrote, prompts rendered otherwise than a
server renders them, a shifted mask, a run of fewer than FEW_STEPS steps. Among several, and among the others, the one that
costs most comes first. The first one dominates that is a fault, or that costs at least MATERIAL tokens per target pass and
something for certain (its interval lies above 0); else none does.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

from ..data.chat import prompt_ids
from ..errors import UserError
from ..fetch import load_tokenizer, located
from ..heads.base import DraftHead, check_target, read_config
from ..heads.kinds import load_head
from ..sampling import GREEDY, Sampling
from ..target import UNREADABLE, Target
from . import experiments
from .case import Case, Part, interval
from .masks import mask
from .page import standalone
from .prompts import Prompt, read_prompts
from .ran import Ran, read_ran, some_rows, stored_rows
from .renderings import template
from .tree import parse
from .walk import Text, by_depth, replayed, tau, walk_all, written

MATERIAL = 0.25  # tokens per target pass
LENGTH = 5  # of the draft, where no recipe names one
EXPERIMENTS = (
    experiments.responses, template, mask, experiments.vocabulary, experiments.growth, experiments.training,
    experiments.temperature, experiments.domain,
)  # fmt: skip


def diagnose(
    place: Path,
    target_name: str | None = None,
    prompts: Sequence[str] = (),
    data: Sequence[str] = (),
    limit: int = 24,
    max_new: int = 64,
    length: int | None = None,
    temperature: float = 0.0,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    show: bool = False,
) -> dict[str, Any]:
    """Diagnose the run or head in ``place``, and return what docs/diagnose.md describes.

    ``target_name``: the model that serves (default: the recipe's, else the head's own). ``prompts``: sources of prompts as the
    service gets them (default: the run's held-out ones). ``data``: sources of training conversations (default: the run's).
    ``limit``: prompts, and training rows, that are looked at; ``max_new``: tokens of a reply. ``length``: of the greedy chain
    that is judged (default: as long as the recipe's eval.tree). Raises UserError for what is missing or does not go together.
    """
    ran = read_ran(place)
    config, recipe = read_config(ran.head), ran.recipe
    if not prompts and not ran.held_out:
        raise UserError(f"{place} is a head alone, without held-out conversations: name some prompts with --prompts.")
    own_name = recipe.target.name if recipe else config.target.name
    target = Target.load(target_name or own_name, dtype or (recipe.target.dtype if recipe else "auto"), device)
    check_target(config, target, force=True)  # another template is a finding, not a mistake
    target.tokenizer_or_refuse()
    head = load_head(ran.head).to(target.device)
    form = parse(recipe.eval.tree) if recipe else None
    asked = length or (form.length if form else 0) or LENGTH
    case = make_case(
        ran, head, target, prompts, data, limit, max_new, min(asked, head.deepest or asked), temperature, seed, show
    )
    parts = ranked([experiment(case) for experiment in EXPERIMENTS])
    dominant, because = verdict(parts)
    return {
        "run": str(place),
        "head": config.kind,
        "target": target.name,
        "target_is_the_heads": target.fingerprint == config.target.fingerprint,
        "prompts": len(case.texts),
        "places": int(sum(len(one.accepted) for one in case.own)),
        "length": case.length,
        "temperature": temperature,
        "tau": tau(case.own),
        "tau_interval": list(interval(case.own, tau)),
        "tau_replayed": replayed(case.own),
        "accepted_per_position": by_depth(case.own),
        "dominant": dominant,
        "because": because,
        "parts": [asdict(part) for part in parts],
    }


def make_case(
    ran: Ran,
    head: DraftHead,
    target: Target,
    prompts: Sequence[str],
    data: Sequence[str],
    limit: int,
    max_new: int,
    length: int,
    temperature: float,
    seed: int,
    show: bool,
) -> Case:
    """Have the target reply, walk the head along its replies, and collect what else the experiments look at."""
    recipe = ran.recipe
    skip = recipe.eval.prompts if recipe else 0  # these chose the head
    home = read_prompts(ran.held_out) if ran.held_out else []
    home = (home[skip:] or home)[:limit]
    chosen = read_prompts(list(prompts))[:limit] if prompts else home

    def walked(texts: list[Text], title: str) -> Any:
        return walk_all(target, head, texts, length, temperature or 1.0, title, show)

    kept = [(one, text) for one, text in zip(chosen, replies(target, head, chosen, GREEDY, max_new, seed), strict=True) if text]
    if not kept:
        raise UserError("the target writes nothing behind any of the prompts: give others with --prompts.")
    texts = [text for _, text in kept]
    hot = replies(target, head, chosen, Sampling(temperature), max_new, seed) if temperature else []
    at_home = replies(target, head, home, GREEDY, max_new, seed) if prompts else []
    rows = stored_rows(ran.store, limit) if ran.store and not data else []
    sources = list(data) or ran.train
    anew = some_rows(sources, target.tokenizer, recipe, limit) if sources and not rows else []
    unseen = some_rows(ran.held_out or list(data), target.tokenizer, recipe, limit, skip) if ran.held_out or data else []
    categories = Counter(row.category for row in anew)
    return Case(
        target,
        head,
        length,
        texts,
        walked(texts, "the target's replies"),
        max_new,
        rendered_by_the_recipe([one for one, _ in kept], ran, target),
        [experiments.reply(row.example, max_new) for row in unseen],
        [row.example for row in rows or anew],
        bool(rows),
        walked([text for text in at_home if text], "replies to held-out prompts"),
        {name: count / len(anew) for name, count in categories.items()},
        temperature,
        walked([text for text in hot if text], "drawn replies"),
        ran.curve,
        show,
    )


def replies(
    target: Target, head: DraftHead, prompts: Sequence[Prompt], sampling: Sampling, max_new: int, seed: int
) -> list[Text | None]:
    """What the target writes behind each prompt; None where that is nothing, or where the prompt leaves no room."""
    asked = [prompt.ids(target) for prompt in prompts]
    return written(target, head, asked, [prompt.category for prompt in prompts], max_new, sampling, seed)


def rendered_by_the_recipe(prompts: Sequence[Prompt], ran: Ran, target: Target) -> list[list[int]]:
    """The prompts as the recipe's target renders them; empty where that is the target at hand, or where it is gone."""
    name = ran.recipe.target.name if ran.recipe else target.name
    if name == target.name:
        return []
    path, where = located(name)
    try:
        tokenizer = load_tokenizer(path, **where)
    except UNREADABLE:
        return []
    return [prompt_ids(prompt.messages, tokenizer, prompt.tools, prompt.thinking) for prompt in prompts]


def ranked(parts: Sequence[Part]) -> list[Part]:
    """Faults first, then by share; what does not apply last."""
    return sorted(parts, key=lambda part: (not part.fault, part.share is None, -(part.share or 0.0)))


def verdict(parts: Sequence[Part]) -> tuple[str, str]:
    """The name of the dominant part, or "none", and why; ``parts`` are ranked."""
    first = next((part for part in parts if part.fault or is_material(part)), None)
    if first is None:
        largest = f"{parts[0].name} costs {parts[0].share:.2f}" if parts[0].share else "none costs anything"
        line = f"no part costs {MATERIAL:g} tokens per target pass for certain ({largest})"
        return "none", f"{line}; what is left is the head's kind and size."
    if first.fault:
        return first.name, first.says
    return first.name, f"it costs {first.share:.2f} tokens per target pass, more than any other: {first.says}"


def is_material(part: Part) -> bool:
    """Whether a part costs enough to be named, and costs anything for certain."""
    return (part.share or 0.0) >= MATERIAL and (part.interval is None or part.interval[0] > 0)


# -- for people ------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> Table:
    """The diagnosis for the terminal."""
    grid = Table("part", "costs", "what was found", "next step", box=None, padding=(0, 2, 0, 0), caption_justify="left")
    for part in found["parts"]:
        worth = part["fault"] or (part["share"] or 0) >= MATERIAL / 5
        grid.add_row(part["name"], cost(part), part["says"], part["next_step"] if worth else "")
    grid.title, grid.title_justify = headline(found), "left"
    grid.caption = f"dominant: {found['dominant']}. {found['because']}"
    return grid


def headline(found: dict[str, Any]) -> str:
    low, high = found["tau_interval"]
    return (
        f"τ {found['tau']:.2f} ({low:.2f} to {high:.2f}) of at most {found['length'] + 1}: {found['head']} on "
        f"{found['target']}, {found['prompts']} prompts, greedy chain of {found['length']}"
    )


def cost(part: dict[str, Any]) -> str:
    """A part's share with its interval."""
    if part["share"] is None:
        return "–"
    bounds = f" ({part['interval'][0]:.2f} to {part['interval'][1]:.2f})" if part["interval"] else ""
    return f"{part['share']:.2f}{bounds}{' fault' if part['fault'] else ''}"


def write(found: dict[str, Any], out: Path) -> None:
    """diagnosis.json and diagnosis.html in an existing directory."""
    (out / "diagnosis.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    cells = [
        f"<tr><td>{escape(part['name'])}</td><td class=n>{escape(cost(part))}</td><td>{escape(part['says'])}</td>"
        f"<td>{escape(part['next_step'])}</td></tr>"
        for part in found["parts"]
    ]
    evidence = json.dumps({part["name"]: part["evidence"] for part in found["parts"]}, indent=2, ensure_ascii=False)
    parts = [
        f"<p><b>Dominant: {escape(found['dominant'])}.</b> {escape(found['because'])}</p>",
        f"<p class=remark>{escape(headline(found))}</p>",
        "<div class=wide><table>",
        "<tr><th>part</th><th class=n>tokens per pass</th><th>what was found</th><th>next step</th></tr>",
        *cells,
        "</table></div>",
        f"<h2>The numbers</h2>\n<pre>{escape(evidence)}</pre>",
    ]
    (out / "diagnosis.html").write_text(standalone(f"Why τ is {found['tau']:.2f}", parts), encoding="utf-8")
