"""The engine as its own oracle: the same request gives the same tokens whatever happens around it."""

from pathlib import Path

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.client.generate_request import GenerateRequest
from quire.core.errors import BadRequest, PromptTooLong

PROMPTS = ["A quire is", "In the beginning", "x", "The paper of the book " * 6, "def main():\n    return"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.9,
    top_p=0.9,
    top_k=40,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    seed=11,
    max_tokens=24,
    ignore_eos=True,
)
BOTH = pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])


def tokens(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[list[int]]]:
    return [[output.token_ids for output in result.outputs] for result in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[list[list[int]]]]:
    return {
        name: [tokens(llm, [prompt], params)[0] for prompt in PROMPTS]
        for name, params in (("greedy", GREEDY), ("drawn", DRAWN))
    }


def expected(alone: dict[str, list[list[list[int]]]], params: SamplingParams) -> list[list[list[int]]]:
    return alone["greedy" if params.greedy else "drawn"]


@BOTH
def test_batching_changes_nothing(llm: LLM, alone: dict, params: SamplingParams) -> None:
    assert tokens(llm, PROMPTS, params) == expected(alone, params)
    many = tokens(llm, PROMPTS * 13, params)
    assert many == expected(alone, params) * 13


@BOTH
def test_chunking_changes_nothing(tiny_model: Path, alone: dict, params: SamplingParams) -> None:
    chunked = LLM(tiny_model, enable_prefix_caching=False, max_num_batched_tokens=7, max_num_seqs=7)
    assert tokens(chunked, PROMPTS, params) == expected(alone, params)


@BOTH
def test_a_prefix_from_the_cache_changes_nothing(tiny_model: Path, alone: dict, params: SamplingParams) -> None:
    cached = LLM(tiny_model, block_size=4)
    assert tokens(cached, PROMPTS, params) == expected(alone, params)
    again = cached.generate(PROMPTS, params)
    assert [[output.token_ids for output in result.outputs] for result in again] == expected(alone, params)
    assert again[3].num_cached_tokens >= len(again[3].prompt_token_ids) - 5


@BOTH
@pytest.mark.parametrize("swap_space", [0, 0.01], ids=["recomputed", "swapped"])
def test_preemption_changes_nothing(tiny_model: Path, alone: dict, params: SamplingParams, swap_space: float) -> None:
    block = 2 * 2 * 3 * 16 * 4 * 2  # K and V, layers, heads, head_dim, block_size, bytes
    tight = LLM(
        tiny_model,
        enable_prefix_caching=False,
        block_size=4,
        max_model_len=192,
        kv_cache_memory_bytes=60 * block,
        swap_space=swap_space,
    )
    assert tokens(tight, PROMPTS * 3, params) == expected(alone, params) * 3
    record = tight.engine.record
    assert record is not None and record.scheduler.preemptions > 0
    assert record.scheduler.held_blocks == 0


def test_samples_differ_and_do_not_depend_on_how_many_there_are(llm: LLM) -> None:
    several = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    four = tokens(llm, ["A quire"], several)[0]
    assert len({tuple(sample) for sample in four}) == 4
    one = SamplingParams(n=1, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    assert tokens(llm, ["A quire"], one)[0][0] == four[0]


def test_best_of_returns_the_likeliest(llm: LLM) -> None:
    every = SamplingParams(n=6, temperature=1.0, seed=3, max_tokens=8, logprobs=0, ignore_eos=True)
    best = SamplingParams(n=2, best_of=6, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    ranked = sorted(llm.generate("A quire", every)[0].outputs, key=lambda output: -(output.cumulative_logprob or 0) / 8)
    found = llm.generate("A quire", best)[0]
    assert [output.token_ids for output in found.outputs] == [output.token_ids for output in ranked[:2]]
    assert found.metrics is not None and found.metrics.num_output_tokens == 6 * 8, "those not chosen were drawn too"


@pytest.mark.parametrize("width, length_penalty", [(1, 1.0), (3, 1.0), (4, 0.0), (4, 2.0)])
def test_beams_are_those_of_transformers(tiny_model: Path, width: int, length_penalty: float) -> None:
    import torch
    from transformers import LlamaForCausalLM

    llm = LLM(tiny_model, kv_cache_dtype="float32")
    found = llm.beam_search(
        "A quire", BeamSearchParams(beam_width=width, max_tokens=12, length_penalty=length_penalty)
    )[0]
    model = LlamaForCausalLM.from_pretrained(tiny_model).eval()
    ids = torch.tensor([found.prompt_token_ids])
    with torch.no_grad():
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            do_sample=False,
            length_penalty=length_penalty,
            pad_token_id=0,
        )
    for beam, row in zip(found.outputs, wanted.tolist(), strict=True):
        new = row[ids.shape[1] :]
        assert beam.token_ids == new[: len(beam.token_ids)] and not any(new[len(beam.token_ids) :])


def test_logprobs_are_those_of_transformers(tiny_model: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    llm = LLM(tiny_model, kv_cache_dtype="float32", max_num_batched_tokens=5, max_num_seqs=5)
    listed = [7, 3]
    params = SamplingParams(
        temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, logprob_token_ids=listed, ignore_eos=True
    )
    result = llm.generate("The paper of the book", params)[0]
    ids = result.prompt_token_ids + result.outputs[0].token_ids
    with torch.no_grad():
        truth = LlamaForCausalLM.from_pretrained(tiny_model)(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    rows = [*(result.prompt_logprobs or [])[1:], *(result.outputs[0].logprobs or [])]
    assert len(rows) == len(ids) - 1 and (result.prompt_logprobs or [])[0] is None
    for position, row in enumerate(rows):
        assert row is not None and ids[position + 1] in row
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(truth[position, token].item(), abs=2e-3)
    assert all(row.keys() >= {*listed} for row in result.outputs[0].logprobs or ())


def test_stop_strings_cut_the_text_and_end_the_sequence(llm: LLM) -> None:
    whole = llm.generate("A quire is", GREEDY)[0].outputs[0]
    stop = whole.text[6:8]
    cut = llm.generate("A quire is", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop]))[
        0
    ].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert not llm.engine.has_work


def test_prompts_in_every_form(llm: LLM) -> None:
    ids = llm.tokenizer.encode("A quire is")
    forms = [
        llm.generate("A quire is", GREEDY),
        llm.generate(["A quire is"], [GREEDY]),
        llm.generate(ids, GREEDY),
        llm.generate([ids], GREEDY),
        llm.generate({"prompt_token_ids": ids}, GREEDY),
        llm.generate([{"prompt": "A quire is"}], GREEDY),
    ]
    assert len({tuple(form[0].outputs[0].token_ids) for form in forms}) == 1


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    result = llm.chat(messages, GREEDY)[0]
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenizer.decode(result.prompt_token_ids, skip_special_tokens=False) == text
    assert llm.chat([messages, messages], GREEDY)[1].outputs[0].token_ids == result.outputs[0].token_ids


def test_a_stream_closed_early_frees_its_memory(llm: LLM) -> None:
    stream = llm.stream(GenerateRequest(id="s", params=GREEDY, prompt="A quire is"))
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work


def test_mistakes_are_named(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(PromptTooLong, match=r"600 tokens and 24 are asked for, and the context holds 512"):
        llm.generate([[5] * 600], GREEDY)
    with pytest.raises(BadRequest, match="token id 999999"):
        llm.generate([[999999]], GREEDY)
    with pytest.raises(BadRequest, match="empty"):
        llm.generate("", GREEDY)
    with pytest.raises(BadRequest) as error:
        LLM(tiny_model, max_num_sequences=4)
    assert "max_num_seqs" in error.value.hint
    with pytest.raises(BadRequest, match="2 prompts and 1 sampling params"):
        llm.generate(["a", "b"], [GREEDY])
    assert not llm.engine.has_work
