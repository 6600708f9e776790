"""The limits of a step and of the engine, and the refusal of requests that can never be served within them."""

from dataclasses import dataclass

from quire.core.errors import BadRequest, PromptTooLong
from quire.core.request import Request
from quire.core.seq2seq import Seq2Seq, num_padding
from quire.core.sliding_window import SlidingWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int  # rows: sequences that run at once
    max_num_batched_tokens: int  # of one step
    max_draft_tokens: int = 0  # of a step without prompts, beside these; 0: drafts have no room of their own
    max_model_len: int  # tokens of one sequence, prompt and output
    block_size: int = 16  # tokens per KV block
    max_queued: int = 4096  # requests that were never admitted; more are refused
    seq2seq: Seq2Seq | None = None  # of an encoder-decoder
    has_states: bool = False  # the model has states: those after a block's last token, in the block, or in state slots
    long_prefill_token_threshold: int = 0  # prompt tokens of one sequence in one step; 0: no limit
    step_seconds: float = 0.0  # target for steps in which sequences decode beside prompts; 0: none

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "max_queued"):
            if getattr(self, name) < 1:
                raise BadRequest(f"{name} is {getattr(self, name)}", f"{name} must be at least 1", param=name)
        if self.long_prefill_token_threshold < 0:
            raise BadRequest(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}",
                "0 means no threshold",
                param="long_prefill_token_threshold",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadRequest(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs is {self.max_num_seqs}: "
                "not every running sequence could have a token in a step",
                f"let max_num_batched_tokens be at least {self.max_num_seqs}",
                param="max_num_batched_tokens",
            )

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of one step, drafts included."""
        return self.max_num_batched_tokens + self.max_draft_tokens

    @property
    def max_chunk(self) -> int:
        """Tokens of one sequence in one step, at most."""
        return min(self.max_num_batched_tokens, self.long_prefill_token_threshold or self.max_num_batched_tokens)

    def max_length(self, request: Request) -> int:
        """The number of tokens, prompt and output, at which a sample of `request` ends."""
        num_prompt = self.num_prompt(request)
        if request.params.max_tokens is not None:
            return num_prompt + request.params.max_tokens
        if self.seq2seq is None:
            return self.max_model_len
        return min(self.max_model_len, num_prompt - len(request.start_ids) + self.seq2seq.max_decoder_tokens)

    def num_prompt(self, request: Request) -> int:
        """Tokens of a sequence that are known before anything is sampled, padding included."""
        return len(request.prompt_ids) + num_padding(request, self.block_size) + len(request.start_ids)


def refuse_impossible(
    request: Request,
    limits: SchedulerLimits,
    num_blocks: int,
    window: SlidingWindow,
    max_running: int,  # sequences
    shares_prompt: bool,  # beams share the blocks of their prompt
) -> None:
    """Raise if `request` could not be served even with the whole engine to itself."""
    params = request.params
    if not request.prompt_ids:
        raise BadRequest("the prompt is empty", "give at least one token", param="prompt")
    if limits.seq2seq is not None:
        _check_encoder_decoder(request, limits, limits.seq2seq)
    num_prompt = limits.num_prompt(request)
    length = limits.max_length(request)
    if num_prompt >= limits.max_model_len or length > limits.max_model_len:
        room = limits.max_model_len - num_prompt
        raise PromptTooLong(
            f"the prompt has {len(request.prompt_ids)} tokens and max_tokens is {params.max_tokens}, "
            f"and the context holds {limits.max_model_len} tokens",
            f"shorten the prompt or let max_tokens be at most {room}" if room > 0 else "shorten the prompt",
            param="max_tokens" if room > 0 else "prompt",
        )
    if params.beam_width and limits.has_states and shares_prompt and window.size:
        raise BadRequest(
            "beam search is asked for, and the model has states in blocks that its window has passed",
            "leave out beam_width",
            param="beam_width",
        )
    width = params.beam_width or 1
    if width > max_running:
        raise BadRequest(
            f"beam_width is {width}, and {max_running} sequences run at the same time",
            f"let beam_width be at most {max_running}",
            param="beam_width",
        )
    # Samples can run one after the other. Beams run together, and share the full blocks of the prompt: with state
    # slots, only those that the prefix tree keeps. The last token of a sequence is never computed, so it needs no slot.
    shared = (num_prompt - 1) // limits.block_size if shares_prompt else 0
    needed = shared + width * (limits.num_blocks(length - 1) - shared)
    needed = min(needed, width * window.max_blocks(length - 1))
    if needed > num_blocks:
        raise BadRequest(
            f"a prompt of {len(request.prompt_ids)} tokens with max_tokens {params.max_tokens} "
            f"needs {needed} cache blocks of {limits.block_size} tokens{f' for {width} beams' if width > 1 else ''}, "
            f"and there are {num_blocks}",
            "lower max_tokens, or give the cache more memory",
            param="max_tokens",
        )
    if params.beam_width and params.logprobs is not None and params.logprobs > 2 * width:
        raise BadRequest(
            f"logprobs is {params.logprobs}, and a search of {width} beams looks at {2 * width} continuations",
            f"let logprobs be at most {2 * width}",
            param="logprobs",
        )
    if any(request.resumed):
        _check_resumed(request, length, num_prompt)


def _check_encoder_decoder(request: Request, limits: SchedulerLimits, seq2seq: Seq2Seq) -> None:
    """Check the lengths of both sides; the caller checks their sum."""
    num_encoder_tokens, params = len(request.prompt_ids), request.params
    assert request.start_ids, "a request to an encoder-decoder has start_ids"
    if num_encoder_tokens > seq2seq.max_encoder_tokens:
        raise PromptTooLong(
            f"the prompt has {num_encoder_tokens} tokens, and the model reads {seq2seq.max_encoder_tokens}",
            "shorten the prompt, or set truncate_prompt_tokens",
            param="prompt",
        )
    room = seq2seq.max_decoder_tokens - len(request.start_ids)
    if (params.max_tokens or 1) > room:
        raise BadRequest(
            f"max_tokens is {params.max_tokens}, and the model writes {room}",
            f"let max_tokens be at most {room}",
            param="max_tokens",
        )
    if params.prompt_logprobs is not None:
        raise BadRequest(
            "prompt_logprobs is asked for, and an encoder-decoder reads its prompt without predicting it",
            "leave it out",
            param="prompt_logprobs",
        )


def _check_resumed(request: Request, length: int, num_prompt: int) -> None:
    params = request.params
    if params.beam_width or params.num_samples > params.n:
        raise BadRequest(
            "the request has tokens to resume from, and delivers only its best samples, at the end",
            "send it again without these tokens",
            param="resumed",
        )
    if len(request.resumed) != params.num_samples:
        raise BadRequest(
            f"{len(request.resumed)} samples are resumed of {params.num_samples}",
            "give the delivered tokens of every sample, an empty list where there are none",
            param="resumed",
        )
    if request.resumed_mu and len(request.resumed_mu) != params.num_samples:
        raise BadRequest(
            f"resumed_mu has {len(request.resumed_mu)} numbers for {params.num_samples} samples", param="resumed_mu"
        )
    longest = max(map(len, request.resumed)) + num_prompt
    if longest > length:
        raise BadRequest(
            f"a resumed sample has {longest} tokens with its prompt, and ends at {length}", param="resumed"
        )
