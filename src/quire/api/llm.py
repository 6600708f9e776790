"""`LLM`: a model in this process, for scripts and notebooks.

llm = LLM("smollm2", max_num_seqs=64)
for output in llm.generate(["A quire is", "Paper was"], SamplingParams(temperature=0, max_tokens=32)):
    print(output.outputs[0].text)
"""

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.api.engine_args import engine_args
from quire.api.outputs import CompletionOutput, RequestOutput
from quire.client.generate_request import GenerateRequest, LoRARequest, Prompt, request_for
from quire.client.generation_config import read_generation_config
from quire.client.live_request import LiveRequest
from quire.client.prompt import Prompter
from quire.client.sleep_mode import check_level, check_tags
from quire.core.errors import BadRequest, EngineFailed, Unavailable
from quire.core.params import SamplingParams
from quire.engine.engine import Engine
from quire.engine.option import named_values
from quire.engine.options import EngineOptions
from quire.engine.start import load_tokenizer, new_executor, task_of, uses_gpu
from quire.hub import DEFAULT_MODEL, resolve_model
from quire.hub.adapters import resolve_adapter
from quire.text.chat.chat_format import chat_format
from quire.text.event import TextEvent
from quire.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.api.group_runner import GroupRunner
    from quire.api.pooling import (
        EmbeddingOutput,
        Pooler,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
    )


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 1.0  # a beam's logprobs are taken of logits / temperature
    length_penalty: float = 1.0
    early_stopping: bool = False

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature or 1.0,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


class LLM:
    """An engine, its tokenizer and its model. Keywords are those of `EngineOptions`."""

    @classmethod
    def from_engine_args(cls, options: EngineOptions) -> "LLM":
        return cls(**{spec.name: getattr(options, spec.name) for spec in fields(options)})

    def __init__(self, model: str | Path = DEFAULT_MODEL, **options: Any) -> None:
        self.options = engine_args(model, **options)
        files = resolve_model(self.options.model, revision=self.options.revision)
        self.generation = read_generation_config(self.options, files.path)
        self._pooler: Pooler | None = None  # of a model that embeds or scores
        self._adapters: dict[str, str] = {}  # name -> where it was loaded from
        self._asleep = False
        self._end: Callable[[], object] = _nothing  # ends what was started
        self._given, self._path = (model, options), files.path
        self._generates = task_of(files.path, self.options) == "generate"
        if not self._generates:
            self._start_pooler()
            return
        tokenizer = load_tokenizer(files.path, self.options)
        if self.options.kv_transfer and self.options.kv_transfer.is_producer:
            raise BadRequest(
                "an LLM computes nothing between its calls, and a kv_producer does",
                "use `quire serve`",
                param="kv_transfer_config",
            )
        self.tokenizer = tokenizer
        self._group: GroupRunner | None = None  # engines in other processes, instead of one in this
        self._start()
        for name, path in named_values(self.options.lora_modules, "lora_modules", "PATH").items():
            self.load_adapter(name, path)
        self._ids = (f"request-{number}" for number in itertools.count())

    def _start(self) -> None:
        if not self._generates:
            self._start_pooler()
        elif self.options.is_group:
            self._start_group()
        else:
            self._start_engine()

    def _start_pooler(self) -> None:
        from quire.api.embedder import Embedder
        from quire.api.pooling import Pooler

        model, options = self._given
        embedder = Embedder(model, **options)
        self._pooler, self.tokenizer, self._end = Pooler(embedder), embedder.tokenizer, embedder.stop

    def _start_group(self) -> None:
        from quire.api.group_runner import GroupRunner

        self._group = GroupRunner(self.options)
        self._end = weakref.finalize(self, self._group.stop)
        self._max_model_len = self._group.group.info.max_model_len

    def _start_engine(self) -> None:
        tokenizer = self.tokenizer
        self.engine = Engine(new_executor(self._path, self.options), self.options, lambda: tokenizer)
        self._end, has_processes = (
            self.engine.stop,
            self.options.tensor_parallel_size > 1 or self.options.num_stages > 1,
        )
        if self.engine.executor.store is not None or has_processes:
            self._end = weakref.finalize(self, self._end)  # also when Python ends: blocks are saved, processes end
        capacity = self.engine.capacity
        self._max_model_len = capacity.max_model_len
        self._prompter = Prompter(
            tokenizer,
            capacity.vocab_size,
            capacity.max_model_len,
            self.options.seed,
            capacity.seq2seq,
            self.options.structured_defaults,
        )

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the weights and of the KV cache back, until `wake_up`. Levels 1 and 2 are the same here:
        weights are read again from their files, which the system keeps in memory that is free."""
        check_level(level)
        if self._asleep:
            return
        if self._generates and not self.options.is_group and (stats := self.engine.stats()).running + stats.waiting:
            raise BadRequest("a stream is in flight", "read it to its end, or close it")
        self._end()
        self._asleep, self._end = True, _nothing
        self._pooler = self._group = self.engine = None  # type: ignore[assignment]
        gc.collect()
        if uses_gpu(self.options.device):
            from quire.ops.gpu.device import release_memory

            release_memory()

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Load the model again, with its adapters. If this raises, it is still asleep."""
        check_tags(tags)
        if not self._asleep:
            return
        self._start()
        self._asleep = False
        for name, path in self._adapters.items():
            self.load_adapter(name, path)

    def _check_awake(self) -> None:
        if self._asleep:
            raise Unavailable("the model is asleep", "call wake_up() first")

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts. `lora_request`: for all, or one each."""
        self._check_generates()
        one = isinstance(prompts, str | Mapping) or _is_ids(prompts)
        many: list[Any] = [prompts] if one else list(prompts)
        params = self._broadcast(sampling_params, len(many))
        window = self._window(sampling_params)
        requests = [
            request_for(prompt, id=next(self._ids), params=p, window=window)
            for prompt, p in zip(many, params, strict=True)
        ]
        if priority is not None:
            requests = [replace(request, priority=p) for request, p in zip(requests, priority, strict=True)]
        self._adapt(requests, lora_request)
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        self._check_generates()
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        params = self._broadcast(sampling_params, len(conversations))
        window = self._window(sampling_params)
        requests = [
            GenerateRequest(
                id=next(self._ids), params=p, messages=self._messages(c), template_options=template, window=window
            )
            for c, p in zip(conversations, params, strict=True)
        ]
        self._adapt(requests, lora_request)
        return self._run(requests, use_tqdm)

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return chat_format(self.tokenizer.chat_template or "").messages([dict(message) for message in messages])

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool | None = None
    ) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first."""
        return self.generate(prompts, params.sampling(), use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: "PoolingParams | None" = None,
        *,
        use_tqdm: bool | None = None,
    ) -> "list[PoolingRequestOutput[EmbeddingOutput]]":
        """One vector a prompt, of a model that embeds: as `Embedder.embed`, in vLLM's shape."""
        return self._as_pooler().embed(prompts, pooling_params)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: "PoolingParams | None" = None,
        *,
        use_tqdm: bool | None = None,
    ) -> "list[PoolingRequestOutput[PoolingOutput]]":
        """What `embed` computes, as arrays."""
        return self._as_pooler().encode(prompts, pooling_params)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: "PoolingParams | None" = None,
        use_tqdm: bool | None = None,
    ) -> "list[PoolingRequestOutput[ScoringOutput]]":
        """How well texts answer a query: one against several, or pairs."""
        return self._as_pooler().score(data_1, data_2, pooling_params)

    def _as_pooler(self) -> "Pooler":
        self._check_awake()
        if self._pooler is None:
            raise BadRequest(f"{self.options.model} generates text", 'give task="embed" or task="score"', param="task")
        return self._pooler

    def _check_generates(self) -> None:
        self._check_awake()
        if not self._generates:
            raise BadRequest(
                f"{self.options.model} embeds or scores texts, and does not generate",
                "use embed, encode or score; on the command line, `quire embed`",
            )

    def stream(self, request: GenerateRequest) -> Iterator[TextEvent]:
        """One request's text as it comes. Closing the iterator early cancels the request."""
        live, ended = self._submit(request), False
        try:
            while not ended:
                events = [event for owner, event in self._step({live.request.id: live}) if owner is live]
                yield from events
                ended = any(event.final for event in events)
        finally:
            self._cancel(live.request.id)

    def _adapt(self, requests: list[GenerateRequest], lora: LoRARequest | Sequence[LoRARequest | None] | None) -> None:
        each = lora if isinstance(lora, Sequence) else [lora] * len(requests)
        if len(each) != len(requests):
            raise BadRequest(f"{len(requests)} prompts and {len(each)} LoRA requests", "give one for all, or one each")
        for request, adapter in zip(requests, each, strict=True):
            if adapter is not None:
                self.load_adapter(adapter.lora_name, adapter.lora_path)
                request.adapter = adapter.lora_name

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter under a name, unless it is loaded. A name keeps the path it was first loaded from."""
        self._check_generates()
        if self._adapters.setdefault(name, path) != path and path:
            raise BadRequest(f"an adapter is called `{name}` already, from {self._adapters[name]}", param="lora_name")
        if self._group is not None:
            self._group.load_adapter(name, path)
        elif name not in self.engine.adapters:
            self.engine.add_adapter(name, self.engine.executor.load_adapter(resolve_adapter(path)))

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model advises: the parameters of prompts that are given without any."""
        return self.generation.params()

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many devices compute."""
        return self.options.data_parallel_size if include_dp else 1

    def reset_prefix_cache(self) -> bool:
        """Forget the KV cache of all prompts that have ended. -> whether nothing is left of it"""
        self._check_generates()
        return self._group.reset_prefix_cache() if self._group else self.engine.reset_prefix_cache()

    def _broadcast(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.get_default_sampling_params()] * count
        if len(params) != count:
            raise BadRequest(f"{count} prompts and {len(params)} sampling params", "give one for all, or one each")
        return list(params)

    def _window(self, params: SamplingParams | Sequence[SamplingParams] | None) -> int | None:
        """A default of max_tokens is cut to what the context holds; one that is given is refused where it is more."""
        return self._max_model_len if params is None else None

    def _submit(self, request: GenerateRequest) -> LiveRequest:
        self._check_generates()
        if self._group is not None:
            return self._group.submit(request)
        prepared = self._prompter.prepare(request)
        self.engine.submit(prepared)
        return LiveRequest(prepared, self.tokenizer)

    def _run(self, requests: list[GenerateRequest], use_tqdm: bool | None) -> list[RequestOutput]:
        live: dict[str, LiveRequest] = {}
        outputs: dict[str, RequestOutput] = {}
        progress = _progress(len(requests), use_tqdm)
        try:
            for request in requests:
                entry = live[request.id] = self._submit(request)
                outputs[request.id] = RequestOutput.of(entry.request, request.prompt)
            while live:
                for entry, event in self._step(live):
                    output = outputs[entry.request.id]
                    output.add(event)
                    if event.final:
                        output.metrics = live.pop(entry.request.id).record
                        if event.finish_reason == "error":
                            raise EngineFailed(event.reason)
                        progress.update()
        finally:
            for request_id in live:
                self._cancel(request_id)
            progress.close()
        return [outputs[request.id] for request in requests]

    def _step(self, live: Mapping[str, LiveRequest]) -> list[tuple[LiveRequest, TextEvent]]:
        """One step of the engine, as text."""
        if self._group is not None:
            return self._group.step(live)
        texts = []
        for event in self.engine.step():
            entry = live.get(event.request_id)
            if entry is None or (text := entry.push(event)) is None:
                continue
            texts.append((entry, text))
            if text.finish_reason and not event.finish_reason:  # a stop string
                self.engine.cancel(event.request_id, event.index)
        return texts

    def _cancel(self, request_id: str) -> None:
        if self._group is not None:
            self._group.cancel(request_id)
        else:
            self.engine.cancel(request_id)


def _is_ids(prompts: Any) -> bool:
    return isinstance(prompts, Sequence) and len(prompts) > 0 and all(isinstance(token, int) for token in prompts)


def _nothing() -> None: ...


class _NoProgress:
    def update(self) -> None: ...

    def close(self) -> None: ...


def _progress(total: int, use_tqdm: bool | None) -> Any:
    """A progress bar, by default if stderr is a terminal."""
    if use_tqdm is False or (use_tqdm is None and not sys.stderr.isatty()):
        return _NoProgress()
    from tqdm import tqdm

    return tqdm(total=total, desc="prompts", unit="prompt", leave=False)


__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestOutput"]
