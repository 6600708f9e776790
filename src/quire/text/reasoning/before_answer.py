"""Reasoning before structured output: whether there is room for it, and the tokens that begin and end it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.core.thinking import Thinking
from quire.text.reasoning import ReasoningFormat

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer


def thinking_before_answer(
    form: ReasoningFormat,
    prompt_ids: Sequence[int],
    template_options: Mapping[str, Any],
    tokenizer: "Tokenizer",
    vocab_size: int,
) -> Thinking | None:
    """None: the grammar holds from the first token. So it does where the prompt has ended reasoning, where reasoning is
    turned off, where an answer is continued, and where text that is no token of its own marks reasoning."""
    begin_id, end_ids = _begin_id(form, tokenizer), _end_ids(form, tokenizer)
    if not end_ids or max(*end_ids, begin_id or 0) >= vocab_size:
        return None
    tail = prompt_tail(prompt_ids, tokenizer).rstrip()
    for marker in form.silent:
        tail = tail.removesuffix(marker).rstrip()
    if tail.endswith(form.end.strip()):
        return None
    begun = tail.endswith(form.begin.strip())
    if not begun:
        is_off = any(template_options.get(name) is False for name in ("enable_thinking", "thinking"))
        begun = form.always
        if is_off or template_options.get("continue_final_message") or (begin_id is None and not begun):
            return None
    return Thinking(end_ids[0] if begin_id is None else begin_id, end_ids, begun)


def prompt_tail(prompt_ids: Sequence[int], tokenizer: "Tokenizer") -> str:
    """The end of the prompt, which shows whether the completion begins with reasoning."""
    return tokenizer.decode(list(prompt_ids[-16:]), skip_special_tokens=False)


def _begin_id(form: ReasoningFormat, tokenizer: "Tokenizer") -> int | None:
    """The token that reasoning begins with. None: it begins with text, which an answer may have, too."""
    marker = form.begin.strip()
    if (token := tokenizer.id_of(marker)) is not None:
        return token
    first = tokenizer.encode(marker, add_special_tokens=False)[0]
    return first if first in tokenizer.special_ids else None


def _end_ids(form: ReasoningFormat, tokenizer: "Tokenizer") -> tuple[int, ...]:
    """One token, or several between special ones. Empty: it is text, which is not always the same tokens."""
    if (token := form.end_id(tokenizer.id_of)) is not None:
        return (token,)
    ids = tokenizer.encode(form.end.strip(), add_special_tokens=False)
    return tuple(ids) if {ids[0], ids[-1]} <= tokenizer.special_ids else ()
