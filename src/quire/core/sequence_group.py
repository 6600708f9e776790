"""A sequence group: what the samples or beams of one request share, and the events that deliver them."""

from dataclasses import replace

from quire.core.beam import BeamSearch
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import SampledRow
from quire.core.request import FinishReason, IdLogprob, Request, SequenceEvent
from quire.core.seq2seq import encoder_digest, lay_out_prompt
from quire.core.sequence import PolicyKey, Sequence


class SequenceGroup:
    """The samples, or the beams, of one request.

    One sequence, the leader, computes the prompt. The others fork from a sequence that has it (`prompt_owner`)."""

    __slots__ = (
        "adapter",
        "arrival",
        "awaiting_prompt",
        "deadline",
        "end_ids",
        "forced_eos_id",
        "held_events",
        "held_prompt_logprobs",
        "holds_rows",
        "id",
        "key",
        "leader",
        "length",
        "live",
        "min_stop_length",
        "namespace",
        "needs_last_token",
        "num_cached",
        "num_encoder_slots",
        "num_open",
        "num_output",
        "num_prompt",
        "num_prompt_ids",
        "num_prompt_logprobs",
        "num_rows",
        "params",
        "preempted",
        "prompt",
        "prompt_owner",
        "ranked",
        "resumed",
        "row_params",
        "search",
        "shares_prompt",
        "started",
        "stop_ids",
        "weight",
    )

    def __init__(self, request: Request, key: PolicyKey, limits: SchedulerLimits) -> None:
        params = request.params
        self.id = request.id
        self.key = key
        self.arrival = request.arrival
        self.deadline = request.deadline
        self.adapter = request.adapter
        salt = f"{request.salt}/{encoder_digest(request.prompt_ids)}" if request.start_ids else request.salt
        self.namespace = (request.tenant, salt, request.adapter)
        self.params = params
        self.prompt = lay_out_prompt(request, limits.block_size)
        self.num_prompt = len(self.prompt)
        self.num_prompt_ids = len(request.prompt_ids)  # without padding and start_ids
        # Of an encoder-decoder: leading slots with the encoder's input and its padding; whole blocks
        self.num_encoder_slots = self.num_prompt - len(request.start_ids) if request.start_ids else 0
        self.length = limits.max_length(request)  # prompt and output tokens at which a sample ends
        self.min_stop_length = self.num_prompt + max(params.min_tokens, 1)  # a stop token ends no shorter sample
        eos_ids = () if params.ignore_eos and params.structured is None else request.eos_ids
        self.stop_ids = frozenset((*eos_ids, *params.stop_token_ids))
        self.end_ids = frozenset(request.eos_ids if params.structured else ())  # end a structured output at any length
        free = params.structured is None and not params.ignore_eos
        self.forced_eos_id = limits.seq2seq.forced_eos_id if limits.seq2seq and free else None
        self.search = self._new_search() if params.beam_width else None
        # Beams, structured outputs and limited reasoning: the next token is planned only when the last one is known
        self.needs_last_token = self.search is not None or params.needs_masks
        self.num_rows = params.beam_width or 1  # that an admission takes: beams run together
        self.holds_rows = False  # of a beam search: while its rows are reserved
        self.ranked = self.search is None and params.num_samples > params.n  # best_of: delivers the n best at the end
        self.held_events: dict[int, SequenceEvent] = {}  # of a ranked group: by sample, not delivered yet
        self.held_prompt_logprobs: list[list[IdLogprob]] = []  # delivered with the first result
        self.shares_prompt = params.num_samples > 1
        self.row_params = params
        if self.ranked or params.prompt_logprobs is not None:
            logprobs = params.logprobs or 0 if self.ranked else params.logprobs
            self.row_params = replace(params, prompt_logprobs=None, logprobs=logprobs)
        self.resumed = any(request.resumed)  # tokens of it were delivered by another engine
        self.num_prompt_logprobs = self.num_prompt - 1 if self.resumed else 0  # delivered
        self.weight = request.weight
        self.num_cached = 0
        self.num_output = 0  # tokens of samples that have ended
        self.num_open = params.n if self.search is not None else params.num_samples  # samples that have not ended
        self.live: list[Sequence] = []  # sequences that have not ended
        self.awaiting_prompt: list[Sequence] = []  # live sequences that wait for the leader to compute the prompt
        self.leader: Sequence | None = None
        self.prompt_owner: Sequence | None = None  # a running sequence that holds the whole prompt
        self.started = False  # has been admitted
        self.preempted = False  # has been preempted: later prefix hits are its own blocks, and not counted

    def _new_search(self) -> BeamSearch:
        params = self.params
        assert params.beam_width is not None
        return BeamSearch(
            params.beam_width,
            max_tokens=self.length - self.num_prompt,
            stop_ids=self.stop_ids,
            min_tokens=0 if params.structured else params.min_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            num_logprobs=params.logprobs or 0,
            forced_eos_id=self.forced_eos_id,
            num_start_tokens=self.num_prompt - self.num_encoder_slots - 1 if self.num_encoder_slots else 0,
        )

    def set_key(self, key: PolicyKey) -> None:
        """Set the key of a group that was never admitted. The queue that it waits in is to be sorted then."""
        self.key = key
        for seq in self.live:
            seq.key = (*key, seq.sample)

    def computes_prompt_logprobs(self, seq: Sequence) -> bool:
        """Whether `seq` must compute its prompt itself, since cached tokens have no logits."""
        wanted = self.params.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt - 1
        return wanted and seq is self.leader

    def takes_arrived_blocks(self, seq: Sequence) -> bool:
        """Whether `seq` may start from blocks that come from beyond the pool."""
        return not (self.prompt_owner is not None or self.num_encoder_slots or self.computes_prompt_logprobs(seq))

    def params_of(self, seq: Sequence) -> SamplingParams:
        """The parameters for the runner. Only one sequence of a group computes prompt logprobs."""
        if self.computes_prompt_logprobs(seq):
            return replace(self.row_params, prompt_logprobs=self.params.prompt_logprobs)
        return self.row_params

    def finish_reason(self, token: int, length: int) -> FinishReason | None:
        """Whether a sample of `length` tokens ends with its last one, `token`. A forced token is no stop token."""
        if length >= self.length and self.forced_eos_id is not None:
            return "length"
        if token in self.end_ids or (token in self.stop_ids and length >= self.min_stop_length):
            return "stop"
        return "length" if length >= self.length else None

    def force_eos(self, sampled: SampledRow) -> SampledRow:
        """Replace the last sampled token by forced_eos_id, with logprob 0 and no alternatives."""
        assert self.forced_eos_id is not None
        logprobs = sampled.logprobs and [*sampled.logprobs[:-1], [IdLogprob(self.forced_eos_id, 0.0, 1)]]
        return replace(sampled, tokens=[*sampled.tokens[:-1], self.forced_eos_id], logprobs=logprobs)

    def new_prompt_logprobs(self, seq: Sequence, sampled: SampledRow, end: int) -> list[list[IdLogprob]] | None:
        """The prompt logprobs of a run that ended before position `end`, without those that were delivered before a
        preemption. A ranked group or a beam search holds them until its results."""
        if not sampled.prompt_logprobs or seq is not self.leader:
            return None
        last = min(end, self.num_prompt - 1)  # positions 1 .. num_prompt - 1 have one each
        num_new = last - self.num_prompt_logprobs
        if num_new <= 0:
            return None
        assert num_new <= len(sampled.prompt_logprobs), (
            f"prompt logprobs of {self.id} are missing before position {last}"
        )
        self.num_prompt_logprobs = last
        new = sampled.prompt_logprobs[-num_new:]
        if self.ranked or self.search is not None:
            self.held_prompt_logprobs += new
            return None
        return new

    def event(self, index: int) -> SequenceEvent:
        return SequenceEvent(request_id=self.id, index=index, num_cached=self.num_cached)

    def deliver(self, event: SequenceEvent) -> list[SequenceEvent]:
        """The events to send now that a sample gained `event`; a ranked group holds them until all have ended."""
        self.num_open -= event.finish_reason is not None
        if not self.ranked:
            event.final = self.num_open == 0
            return [event]
        held = self.held_events.setdefault(event.index, event)
        if held is not event:
            held.tokens += event.tokens
            held.logprobs = (held.logprobs or []) + (event.logprobs or [])
            held.finish_reason, held.stop_token, held.reason = event.finish_reason, event.stop_token, event.reason
            held.cumulative_logprob = event.cumulative_logprob
            held.verified += event.verified
        return [] if self.num_open else self._best()

    def _best(self) -> list[SequenceEvent]:
        """The n samples of highest mean logprob, best first; cancelled samples come last."""

        def rank(event: SequenceEvent) -> tuple[bool, float, int]:
            mean = (event.cumulative_logprob or 0.0) / max(len(event.tokens), 1)
            return event.finish_reason == "cancelled", -mean, event.index

        ranked = sorted(self.held_events.values(), key=rank)
        ranked, others = ranked[: self.params.n], ranked[self.params.n :]
        for index, event in enumerate(ranked):
            event.index = index
            if self.params.logprobs is None:
                event.logprobs = None
        ranked[0].prompt_logprobs = self.held_prompt_logprobs or None
        ranked[-1].num_unseen = sum(len(event.tokens) for event in others)
        for event in others:
            ranked[-1].verified += event.verified
        ranked[-1].final = True
        return ranked

    def abort(self, finish_reason: FinishReason, reason: str) -> list[SequenceEvent]:
        """The events that end every open sample."""
        if self.ranked or self.search is not None:
            events = [self.event(index) for index in range(self.params.n)]
        else:
            events = [self.event(seq.sample) for seq in self.live]
        for event in events:
            event.finish_reason, event.reason = finish_reason, reason
        events[-1].final = True
        return events

    def search_results(self) -> list[SequenceEvent]:
        """The events of the n best beams of a search that is done."""
        assert self.search is not None
        events = [self.event(index) for index in range(self.params.n)]
        events[0].prompt_logprobs = self.held_prompt_logprobs or None
        for i, event in enumerate(events):
            if i >= len(self.search.results):
                event.finish_reason = "error"
                event.reason = f"the search ended with {len(self.search.results)} hypotheses"
                continue
            beam = self.search.results[i]
            event.tokens = beam.tokens
            event.logprobs = beam.logprobs if self.params.logprobs is not None else None
            event.finish_reason = "length" if beam.stop_token is None else "stop"
            event.stop_token, event.cumulative_logprob = beam.stop_token, beam.logprob
        events[-1].final = True
        return events
