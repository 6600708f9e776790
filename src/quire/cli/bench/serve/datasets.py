"""What a load is made of: random prompts, shared prefixes, files of prompts, traces."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.cli.bench.prompts import read_file
from quire.cli.bench.serve.flags import DatasetFlags, LoadFlags
from quire.cli.bench.serve.prompt_tokens import PromptTokens
from quire.cli.parser import UsageError
from quire.planning.workload import Arrival, WorkloadSpec, generate, read_trace

BURSTGPT_MODEL = "GPT-4"  # whose requests vLLM takes of BurstGPT
MIN_SHAREGPT, MAX_SHAREGPT_PROMPT, MAX_SHAREGPT_TOTAL = 4, 1024, 2048  # tokens; others are left out, as vLLM does


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`numbers` stand for tokens of a prompt that is made up; else there is `text` or `ids`."""

    num_output: int
    numbers: list[int] | None = None
    text: str | None = None
    ids: list[int] | None = None
    time: float | None = None  # seconds after the start, where the dataset says when

    def prompt(self, tokens: PromptTokens, takes_ids: bool) -> str | list[int]:
        if self.text is not None:
            return self.text
        if self.ids is not None:
            if not takes_ids:
                raise UsageError("the file has prompt_token_ids, and the server takes text", "give `prompt` instead")
            return self.ids
        numbers = self.numbers or []
        return tokens.ids(numbers) if takes_ids else tokens.text(numbers)


def read_requests(flags: DatasetFlags, load: LoadFlags, tokens: PromptTokens) -> list[LoadRequest]:
    if flags.dataset == "trace":
        if math.isfinite(load.request_rate) or load.ramp_up_strategy is not None:
            raise UsageError(
                "a trace says itself when requests come", "leave out --request-rate and --ramp-up-strategy"
            )
        return _timed(read_trace(Path(flags.dataset_path or ""))[: flags.num_prompts])
    if flags.dataset == "simulated":
        return _timed(generate(workload(flags, load)))
    return _DATASETS[flags.dataset](flags, tokens)


def workload(flags: DatasetFlags, load: LoadFlags) -> WorkloadSpec:
    """What `quire simulate` has with the same numbers."""
    if load.burstiness != 1 or load.ramp_up_strategy is not None:
        raise UsageError(
            "simulated arrivals have a rate and bursts only", "leave out --burstiness and --ramp-up-strategy"
        )
    return WorkloadSpec(
        rate=load.request_rate,
        num_requests=flags.num_prompts,
        prompt=flags.input_len or flags.random_input_len,
        output=flags.output_len or flags.random_output_len,
        spread=flags.random_range_ratio,
        shared_prefix=flags.random_prefix_len,
        num_prefixes=flags.simulated_num_prefixes,
        burst=flags.simulated_burst,
        seed=flags.seed,
    )


def _timed(arrivals: list[Arrival]) -> list[LoadRequest]:
    begin = arrivals[0].time
    return [LoadRequest(each.output, list(each.prompt_ids), time=each.time - begin) for each in arrivals]


def _random(flags: DatasetFlags, tokens: PromptTokens) -> list[LoadRequest]:
    """No two prompts share more than the prefix of all."""
    rng = random.Random(flags.seed)
    prefix = _draw(rng, flags.random_prefix_len)
    means = (flags.input_len or flags.random_input_len, flags.output_len or flags.random_output_len)

    def one() -> LoadRequest:
        num_prompt, num_output = (_vary(rng, mean, flags.random_range_ratio) for mean in means)
        return LoadRequest(num_output, prefix + _draw(rng, num_prompt))

    return [one() for _ in range(flags.num_prompts)]


def _prefix_repetition(flags: DatasetFlags, tokens: PromptTokens) -> list[LoadRequest]:
    """Each prefix stands before as many suffixes as any other, in random order."""
    if flags.num_prompts < flags.prefix_repetition_num_prefixes:
        raise UsageError(
            f"{flags.num_prompts} prompts cannot begin with {flags.prefix_repetition_num_prefixes} prefixes",
            "give a greater --num-prompts or a smaller --prefix-repetition-num-prefixes",
        )
    rng = random.Random(flags.seed)
    prefixes = [_draw(rng, flags.prefix_repetition_prefix_len) for _ in range(flags.prefix_repetition_num_prefixes)]
    num_output = flags.output_len or flags.prefix_repetition_output_len
    requests = [
        LoadRequest(num_output, prefixes[index % len(prefixes)] + _draw(rng, flags.prefix_repetition_suffix_len))
        for index in range(flags.num_prompts)
    ]
    rng.shuffle(requests)
    return requests


def _draw(rng: random.Random, count: int) -> list[int]:
    return memoryview(rng.randbytes(8 * count)).cast("Q").tolist()


def _vary(rng: random.Random, mean: int, ratio: float) -> int:
    return max(1, rng.randint(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))))


def _burstgpt(flags: DatasetFlags, tokens: PromptTokens) -> list[LoadRequest]:
    """Lengths of BurstGPT's requests to GPT-4, drawn without their times, as vLLM draws them."""
    arrivals = read_trace(Path(flags.dataset_path or ""), model=BURSTGPT_MODEL)
    rng = random.Random(flags.seed)
    few = len(arrivals) < flags.num_prompts
    drawn = rng.choices(arrivals, k=flags.num_prompts) if few else rng.sample(arrivals, flags.num_prompts)
    return [LoadRequest(flags.output_len or each.output, _draw(rng, len(each.prompt_ids))) for each in drawn]


def _custom(flags: DatasetFlags, tokens: PromptTokens) -> list[LoadRequest]:
    num_output = flags.output_len or max(flags.custom_output_len, 0)  # 0: a line without a length is an error
    entries = read_file(Path(flags.dataset_path or ""), None, num_output)
    requests = [
        LoadRequest(entry.output_len, text=entry.prompt)
        if isinstance(entry.prompt, str)
        else LoadRequest(entry.output_len, ids=entry.prompt)
        for entry in entries
    ]
    return _sampled(flags, requests)


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def _sharegpt(flags: DatasetFlags, tokens: PromptTokens) -> list[LoadRequest]:
    """The first question of each conversation; the output is as long as its answer."""
    path, num_output = Path(flags.dataset_path or ""), flags.output_len or flags.sharegpt_output_len
    if tokens.tokenizer is None and num_output is None:
        raise UsageError("ShareGPT's answers are counted in tokens", "give --tokenizer, or --sharegpt-output-len")
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "give ShareGPT's JSON file") from error
    except msgspec.DecodeError as error:
        shape = '[{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}]'
        raise UsageError(f"{path} is not ShareGPT's JSON: {error}", f"it looks like {shape}") from error
    pairs = [entry.conversations[:2] for entry in entries if len(entry.conversations) >= 2]
    if not flags.disable_shuffle:
        random.Random(flags.seed).shuffle(pairs)
    requests: list[LoadRequest] = []
    for question, answer in pairs:
        if len(requests) == flags.num_prompts:
            break
        request = _sharegpt_request(question.value, answer.value, num_output, tokens)
        if request is not None:
            requests.append(request)
    if not requests:
        raise UsageError(
            f"{path} has no conversation of a suitable length", f"of {len(entries):,} entries none is taken"
        )
    return _oversampled(flags, requests)


def _sharegpt_request(question: str, answer: str, num_output: int | None, tokens: PromptTokens) -> LoadRequest | None:
    num_prompt = tokens.count(question)
    length = num_output or tokens.count(answer) or 0
    if num_prompt is not None and (
        min(num_prompt, length if num_output is None else MIN_SHAREGPT) < MIN_SHAREGPT
        or num_prompt > MAX_SHAREGPT_PROMPT
        or num_prompt + length > MAX_SHAREGPT_TOTAL
    ):
        return None
    return LoadRequest(length, text=question)


def _sampled(flags: DatasetFlags, requests: list[LoadRequest]) -> list[LoadRequest]:
    if not flags.disable_shuffle:
        random.Random(flags.seed).shuffle(requests)
    return _oversampled(flags, requests[: flags.num_prompts])


def _oversampled(flags: DatasetFlags, requests: list[LoadRequest]) -> list[LoadRequest]:
    """As many requests as were asked for: those of a file that has too few are repeated."""
    if flags.no_oversample:
        return requests
    return [requests[index % len(requests)] for index in range(flags.num_prompts)]


_DATASETS: dict[str, Callable[[DatasetFlags, PromptTokens], list[LoadRequest]]] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "custom": _custom,
    "burstgpt": _burstgpt,
    "sharegpt": _sharegpt,
}
