"""From the sampled ids of a completion to its text: detokenizer, stop strings and the texts of logprobs."""

from collections.abc import Callable, Sequence

from quire.core.params import SamplingParams
from quire.core.request import IdLogprob, SequenceEvent
from quire.text.event import TextEvent, TokenLogprob
from quire.text.stop import StopStrings
from quire.text.tokenizers.detokenizer import Detokenizer
from quire.text.tokenizers.tokenizer import Tokenizer


class CompletionText:
    """One completion of a request: `push` its events in order until one returns with a `finish_reason`.

    If the pushed event had none, a stop string has ended the completion: the engine must be told to stop."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, _tail(tokenizer, prompt_ids))
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._num_tokens = 0  # counted where there are stop strings
        self._ended = False
        # Instead of `push`, for tokens that end nothing, where no stop string is looked for.
        self.text_of: Callable[[Sequence[int]], str] | None = None if params.stop else self._detokenizer.push

    def push(self, event: SequenceEvent) -> TextEvent:
        assert not self._ended, f"completion {event.index} of {event.request_id} has ended"
        text, kept, stop = self._text_of(event)
        out = TextEvent(
            index=event.index,
            text=text,
            token_ids=event.tokens[:kept],
            logprobs=self._describe_all(None if event.logprobs is None else event.logprobs[:kept]),
            prompt_logprobs=self._describe_all(event.prompt_logprobs),
            finish_reason=event.finish_reason,
            stop_reason=event.stop_token if event.stop_token in self._params.stop_token_ids else None,
            cumulative_logprob=event.cumulative_logprob,
            reason=event.reason,
            num_unseen_tokens=event.num_unseen,
            num_cached_tokens=event.num_cached,
            final=event.final,
        )
        if stop is not None:
            out.finish_reason, out.stop_reason, out.reason = "stop", stop, ""
            if kept < len(event.tokens):
                out.cumulative_logprob = None  # the sum includes the dropped tokens
        self._ended = out.finish_reason is not None
        return out

    def _text_of(self, event: SequenceEvent) -> tuple[str, int, str | None]:
        """The text that may be shown, how many of the tokens belong to it, and the stop string that ended it."""
        tokens = event.tokens
        if event.stop_token is not None and not self._params.include_stop_str_in_output:
            tokens = tokens[:-1] if tokens[-1:] == [event.stop_token] else tokens  # counted, but not shown
        shown: list[str] = []
        for count, piece in enumerate(self._pieces(tokens), 1):
            self._num_tokens += 1
            text, stop = self._search(piece)
            shown.append(text)
            if stop is not None:
                return "".join(shown), count, stop
        if event.finish_reason is not None:
            text, stop = self._search(self._detokenizer.flush())
            shown.append(text)
            if stop is not None:
                return "".join(shown), len(event.tokens), stop
            shown.append(self._stops.flush())
        return "".join(shown), len(event.tokens), None

    def _pieces(self, tokens: list[int]) -> list[str]:
        """The text token by token if there are stop strings: one may end the completion in the middle of a step."""
        if self._params.stop:
            return [self._detokenizer.push([token]) for token in tokens]
        return [self._detokenizer.push(tokens)] if tokens else []

    def _search(self, text: str) -> tuple[str, str | None]:
        if self._num_tokens < self._params.min_tokens:  # stop strings do not count yet
            return text, None
        return self._stops.push(text)

    def _describe_all(self, positions: list[list[IdLogprob]] | None) -> list[list[TokenLogprob]] | None:
        if positions is None:
            return None
        return [[self._describe(choice) for choice in position] for position in positions]

    def _describe(self, choice: IdLogprob) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(choice.token)
        text = raw.decode("utf-8", errors="replace")
        return TokenLogprob(choice.token, text, list(raw), choice.logprob, choice.rank)


def _tail(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Sequence[int]:
    """The last tokens of the prompt: enough for its last character, and at least one that is text."""
    tail = prompt_ids[-8:]
    return prompt_ids if tokenizer.special_ids.issuperset(tail) else tail
