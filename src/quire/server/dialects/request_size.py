"""Limits on what multiplies in one HTTP request: prompts, completions of each, and the lists that each one holds."""

from collections.abc import Sequence

from quire.core.errors import BadRequest
from quire.core.params import SamplingParams
from quire.text.event import TextEvent

MAX_COMPLETIONS = 2048  # of all prompts of one HTTP request
MAX_LISTED_IDS = 1 << 20  # token ids in the lists of all prompts together
MAX_ECHOED_TOKENS = 1 << 20  # of prompts in the answer, each as often as it has completions
MAX_LOGPROBS_OF_ANSWER = 1 << 18  # that an answer holds when it is not streamed; one takes about 500 bytes


def check_prompts(params: Sequence[SamplingParams], max_in_flight: int) -> None:
    """`params`: those of each prompt. `max_in_flight`: what the engine takes at the same time; all prompts are served
    together."""
    if len(params) > max_in_flight:
        raise BadRequest(
            f"the request has {len(params)} prompts, and the server takes {max_in_flight} at the same time",
            "send several requests, or start the server with a larger --max-queued-requests",
            param="prompt",
        )
    num_completions = sum(each.num_samples for each in params)
    if num_completions > MAX_COMPLETIONS:
        raise BadRequest(
            f"{len(params)} prompts ask for {num_completions} completions, and {MAX_COMPLETIONS} are allowed",
            "send several requests",
            param="n",
        )
    num_ids = sum(map(_num_listed_ids, params))
    if num_ids > MAX_LISTED_IDS:
        raise BadRequest(
            f"the lists of token ids of {len(params)} prompts have {num_ids} ids, and {MAX_LISTED_IDS} are allowed",
            "send several requests",
            param="allowed_token_ids",
        )


def check_echo(prompts: Sequence[Sequence[int]], num_samples: int) -> None:
    num_tokens = num_samples * sum(map(len, prompts))
    if num_tokens > MAX_ECHOED_TOKENS:
        raise BadRequest(
            f"the prompts would be {num_tokens} tokens of the answer, and {MAX_ECHOED_TOKENS} are allowed",
            "ask for fewer completions, or leave out what repeats the prompt",
            param="n",
        )


def num_logprobs(event: TextEvent, num_samples: int) -> int:
    """That the answer holds because of this event; those of the prompt may be shown with each completion."""
    of_output = sum(map(len, event.logprobs or ()))
    return of_output + num_samples * sum(map(len, event.prompt_logprobs or ()))


def _num_listed_ids(params: SamplingParams) -> int:
    bad = sum(map(len, params.bad_token_ids))
    lists = (params.stop_token_ids, params.logit_bias, params.allowed_token_ids or (), params.logprob_token_ids or ())
    return bad + sum(map(len, lists))
