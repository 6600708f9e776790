"""POST /v1/chat/completions: the response."""

from msgspec import UNSET, Struct, UnsetType

from quire.client.generate_request import GenerateRequest
from quire.server.dialects.completion import Completion, CompletionSample
from quire.server.dialects.dialect import Context
from quire.server.dialects.fields import created_now
from quire.server.dialects.openai.fields import StreamOptions
from quire.server.dialects.openai.shapes import CompletionObject, prompt_logprobs_of, sse, token_name
from quire.server.dialects.openai.tool_calls import ToolCallDelta, ToolCallDeltas, merge_tool_calls
from quire.server.dialects.openai.usage import UsageCounter, write_usage
from quire.server.dialects.text_template import TEXT, TextTemplate
from quire.text.answer_parser import AnswerDelta, AnswerParser
from quire.text.event import TextEvent, TokenLogprob
from quire.text.tools.params import ToolParams


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the newer name of reasoning_content
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage | UnsetType = UNSET  # in a response that is not streamed
    delta: Delta | UnsetType = UNSET  # in a chunk
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCall:
    def __init__(
        self,
        request: GenerateRequest,
        context: Context,
        use: ToolParams,
        *,
        stream: bool = False,
        stream_options: StreamOptions | None = None,
        top_logprobs: int | None = 0,  # None: all that the sampler gave
        token_ids: bool = False,
        by_id: bool = False,
        reasoning: bool = True,
        custom: frozenset[str] = frozenset(),
        echo: str = "",
    ) -> None:
        """`custom`: names of custom tools. `echo`: text that comes before every answer."""
        self.requests = [request]
        self.stream = stream
        self._context, self._use = context, use
        self._custom, self._short_ids = custom, context.chat_format().short_ids
        self._echo = echo
        self._id = request.id
        self._created = created_now()
        self._top = top_logprobs
        self._ids_too, self._by_id = token_ids, by_id
        self._reasoning_too = reasoning
        self._tally = UsageCounter(stream_options)
        self._prompt_ids: list[int] = []
        self._samples: dict[int, _SampleState] = {}
        self._has_plain_chunks = not token_ids and not self._tally.always

    def begin(self, prompts: list[list[int]]) -> None:
        self._prompt_ids = prompts[0]
        self._tally.begin(prompts)

    def chunks(self, prompt: int, event: TextEvent) -> list[object]:
        self._tally.add(prompt, event)
        sent: list[object] = []
        sample = self._samples.get(event.index)
        if sample is None:
            first = self._chunk([ChatChoice(index=event.index, delta=Delta(role="assistant", content=self._echo))])
            if self._ids_too and not self._samples:
                first.prompt_token_ids = self._prompt_ids
            sample = self._samples[event.index] = _SampleState(self._parser(), self._calls())
            sent.append(first)
        ended = event.finish_reason is not None
        answer = sample.parser.push(event.text, ended)
        if self._has_plain_chunks and answer.is_content and not ended and event.logprobs is None:
            sent.append(self._template(event.index, sample).fill(answer.content))
            return sent
        delta = self._delta(sample, answer, ended)
        if delta or event.finish_reason or event.logprobs or (self._ids_too and event.token_ids):
            choice = ChatChoice(index=event.index, delta=delta or Delta(), logprobs=self._logprobs(event.logprobs))
            if event.finish_reason:
                choice.finish_reason = _finish(event.finish_reason, sample.called)
                choice.stop_reason = event.stop_reason
            if self._ids_too:
                choice.token_ids = event.token_ids
            sent.append(self._chunk([choice]))
        return sent

    def end(self) -> list[object]:
        if not self._tally.at_end:
            return []
        last = self._chunk([])
        self._tally.write(last)
        return [last]

    def full(self, completions: list[Completion]) -> object:
        [completion] = completions
        params = self.requests[0].params
        choices = [self._choice(index, sample) for index, sample in enumerate(completion.samples)]
        answer = self._answer("chat.completion", choices)
        write_usage(answer, completions)
        answer.prompt_logprobs = None
        if params.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs_of(completion.prompt_logprobs)
        if self._ids_too:
            answer.prompt_token_ids = self._prompt_ids
        return answer

    def _choice(self, index: int, sample: CompletionSample) -> ChatChoice:
        answer = self._parser().push(sample.text, ended=True)
        message = ChatMessage(content=self._echo + answer.content)
        if answer.reasoning and self._reasoning_too:
            message.reasoning_content = message.reasoning = answer.reasoning
        if answer.calls:
            message.tool_calls = merge_tool_calls(self._calls().push(answer.calls, ended=True))
            message.content = message.content or None
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(sample.logprobs),
            finish_reason=_finish(sample.finish_reason, message.tool_calls is not UNSET),
            stop_reason=sample.stop_reason,
            token_ids=sample.token_ids if self._ids_too else UNSET,
        )

    def _parser(self) -> AnswerParser:
        return self._context.answer_parser(self.requests[0], self._use, self._prompt_ids)

    def _calls(self) -> ToolCallDeltas:
        return ToolCallDeltas(self._custom, self._short_ids)

    def _delta(self, sample: "_SampleState", answer: AnswerDelta, ended: bool) -> Delta | None:
        calls = sample.calls.push(answer.calls, ended)
        if not (answer.reasoning or answer.content or calls):
            return None
        delta = Delta()
        if answer.content:
            delta.content = answer.content
        if answer.reasoning and self._reasoning_too:
            delta.reasoning_content = delta.reasoning = answer.reasoning
        if calls:
            sample.called = True
            delta.tool_calls = calls
        return delta

    def _template(self, index: int, sample: "_SampleState") -> TextTemplate:
        """Of chunks that have nothing but content: most of an answer."""
        if sample.template is None:
            sample.template = TextTemplate(sse(self._chunk([ChatChoice(index=index, delta=Delta(content=TEXT))])))
        return sample.template

    def _chunk(self, choices: list[ChatChoice]) -> CompletionObject[ChatChoice]:
        chunk = self._answer("chat.completion.chunk", choices)
        if self._tally.always:
            chunk.usage = self._tally.usage()
        elif self._tally.at_end:
            chunk.usage = None
        return chunk

    def _answer(self, kind: str, choices: list[ChatChoice]) -> CompletionObject[ChatChoice]:
        return CompletionObject(
            id=self._id, object=kind, created=self._created, model=self._context.model, choices=choices
        )

    def _logprobs(self, positions: list[list[TokenLogprob]] | None) -> ChatLogprobs | None:
        if positions is None:
            return None
        return ChatLogprobs([chat_logprob(position, self._top, self._by_id) for position in positions])


def chat_logprob(position: list[TokenLogprob], num_top: int | None, by_id: bool = False) -> ChatLogprob:
    def name(token: TokenLogprob) -> str:
        return token_name(token.token_id, token.text, by_id)

    chosen = position[0]
    by_rank = sorted({token.token_id: token for token in position}.values(), key=lambda token: token.rank)
    top = [TopLogprob(name(token), token.finite_logprob, token.bytes) for token in by_rank[:num_top]]
    return ChatLogprob(name(chosen), chosen.finite_logprob, chosen.bytes, top)


class _SampleState:
    """What is known of one sample while it is streamed."""

    __slots__ = ("called", "calls", "parser", "template")

    def __init__(self, parser: AnswerParser, calls: ToolCallDeltas) -> None:
        self.parser, self.calls = parser, calls
        self.called = False  # a tool
        self.template: TextTemplate | None = None


def _finish(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
