"""The token that stands for a place still to be drafted: a row of the target's embedding that no text uses."""

from ..errors import UserError
from ..target import Target

FAINT = 0.01  # of the usual length of an embedding: such a row was never trained


def mask_token(target: Target, wished: int | None) -> int:
    """``wished``, or where that is None a token found to be unused; UserError for one that texts do use.

    Unused is a row behind the tokenizer's last token, else the last token that was added to the vocabulary and is neither a
    special token of any role nor part of the chat template.
    """
    found = unused_token(target) if wished is None else wished
    if not 0 <= found < target.vocab_size:
        raise UserError(
            f"mask_token {found} is outside the vocabulary of {target.name!r}, which has {target.vocab_size} tokens."
        )
    if found in target.eos_ids | roles(target) | in_template(target):
        raise UserError(
            f"mask_token {found} is a token that the texts of {target.name!r} use (the end, the padding or another special "
            "token): set head.options.mask_token to one that none does."
        )
    return found


def roles(target: Target) -> set[int]:
    """The ids that the tokenizer gives a role."""
    named = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    return {id for name in named if (id := getattr(target.tokenizer, name, None)) is not None}


def in_template(target: Target) -> set[int]:
    """The ids of those added tokens that the chat template writes."""
    template = str(getattr(target.tokenizer, "chat_template", None) or "")
    added = getattr(target.tokenizer, "added_tokens_decoder", {})
    return {id for id, token in added.items() if token.content in template}


def unused_token(target: Target) -> int:
    tokenizer = target.tokenizer
    if tokenizer is not None and (behind := max(tokenizer.get_vocab().values()) + 1) < target.vocab_size:
        return behind
    added = getattr(tokenizer, "added_tokens_decoder", {})
    unused = added.keys() - target.eos_ids - roles(target) - in_template(target)
    if not unused:
        raise UserError(
            f"no unused token was found for {target.name!r}: set head.options.mask_token to a token that no text uses."
        )
    return max(unused)


def is_faint(target: Target, token: int) -> bool:
    """Whether the target's embedding of ``token`` is next to nothing, as rows are that were never trained."""
    lengths = target.embed.get_parameter("weight").detach().float().norm(dim=-1)
    return bool(lengths[token] < FAINT * lengths.median())
