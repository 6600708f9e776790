"""Beam search against a second implementation that works as transformers does: on whole score vectors, with masks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_language import chain, language_model
from fakes import FakeExecutor
from quire.core.beam import BeamSearch
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.request import IdLogprob, Request
from quire.core.scheduler import Scheduler
from trials import rounds

Model = tuple[int, int]  # (seed, vocabulary size)
FAR = -1e9


def logprobs(model: Model, tokens: list[int]) -> list[float]:
    seed, vocab_size = model
    return language_model(chain([seed, *tokens])[-1], vocab_size)


def oracle(
    model: Model, width: int, max_tokens: int, stop_ids: set[int], penalty: float, early: bool
) -> list[tuple[float, list[int]]]:
    """Running and finished beams as fixed-size lists whose empty places have a very low score."""
    running = [(0.0 if i == 0 else FAR, list[int]()) for i in range(width)]
    finished = [(FAR, list[int](), False)] * width
    improvable = True
    while True:
        every = [
            (score + logprob, [*tokens, token])
            for score, tokens in running
            for token, logprob in enumerate(logprobs(model, tokens))
        ]
        top = sorted(every, key=lambda each: -each[0])[: max(2, 1 + len(stop_ids)) * width]
        length = len(top[0][1])
        ends = [tokens[-1] in stop_ids or length >= max_tokens for _, tokens in top]
        running = sorted(
            ((score + FAR * end, tokens) for (score, tokens), end in zip(top, ends, strict=True)), key=lambda b: -b[0]
        )[:width]
        new = [
            (score / length**penalty, tokens, True) if end and place < width else (FAR, tokens, False)
            for place, ((score, tokens), end) in enumerate(zip(top, ends, strict=True))
        ]
        finished = sorted([*finished, *new], key=lambda each: -each[0])[:width]
        worst = min(score for score, _, _ in finished)
        reachable = running[0][0] / length**penalty
        improvable = improvable and any(reachable > (worst if done else FAR) for _, _, done in finished)
        full = all(done for _, _, done in finished)
        if not improvable or (full and early) or all(ends):
            return [(score, tokens) for score, tokens, done in finished if done]


def search(model: Model, beams: BeamSearch) -> list[tuple[float, list[int]]]:
    """Drive a BeamSearch with a model; what a comparison with another engine needs as well."""
    while not beams.done:
        continuations = []
        for beam in beams.beams:
            scores = logprobs(model, beam.tokens)
            order = sorted(range(len(scores)), key=lambda token: -scores[token])[: 2 * beams.width]
            continuations.append([IdLogprob(token, scores[token], rank) for rank, token in enumerate(order, 1)])
        parents = beams.advance(continuations)
        assert len(parents) == len(beams.beams)
    return [(beam.score, beam.tokens) for beam in beams.results]


@pytest.mark.trial
@settings(max_examples=rounds(200), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 10),
    stop_ids=st.sets(st.integers(0, 11), max_size=1),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]),
    early=st.booleans(),
)
def test_search_decides_as_transformers_does(
    seed: int, width: int, max_tokens: int, stop_ids: set[int], penalty: float, early: bool
) -> None:
    model = (seed, 12)
    results = search(
        model,
        BeamSearch(
            width,
            max_tokens=max_tokens,
            stop_ids=frozenset(stop_ids),
            length_penalty=penalty,
            early_stopping=early,
        ),
    )
    expected = oracle(model, width, max_tokens, stop_ids, penalty, early)
    assert [tokens for _, tokens in results] == [tokens for _, tokens in expected]
    assert [score for score, _ in results] == pytest.approx([score for score, _ in expected])


def test_a_wide_search_finds_the_best_of_all_texts() -> None:
    """As wide as there are texts, beam search is exhaustive search."""
    model = (7, 3)
    every = [([a, b, c], 0.0) for a in range(3) for b in range(3) for c in range(3)]
    scored = [(sum(logprobs(model, text[:i])[text[i]] for i in range(3)) / 3, text) for text, _ in every]
    best = max(scored)
    (score, tokens), *_ = search(model, BeamSearch(27, max_tokens=3))
    assert (score, tokens) == (pytest.approx(best[0]), best[1])


def test_beams_of_width_one_are_greedy() -> None:
    model, text = (3, 12), list[int]()
    for _ in range(6):
        scores = logprobs(model, text)
        text.append(scores.index(max(scores)))
    assert search(model, BeamSearch(1, max_tokens=6))[0][1] == text


@pytest.mark.parametrize("num_blocks", [11, 200])
def test_the_scheduler_searches_as_the_search_alone(num_blocks: int) -> None:
    """Rows, forks and copies add nothing to the decisions; n results come in order, and say their logprob."""
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4)
    scheduler = Scheduler(limits, num_blocks)
    executor = FakeExecutor(num_blocks=num_blocks, block_size=4, vocab_size=12)
    prompt = [5, 6, 7, 8, 9]
    params = SamplingParams(n=2, beam_width=3, max_tokens=10, logprobs=2)
    scheduler.add(Request(id="a", prompt_ids=prompt, params=params, eos_ids=[3]), 0.0)
    events = []
    while scheduler.has_work:
        events += scheduler.update(executor.run(scheduler.schedule()))
        scheduler.check()

    beams = BeamSearch(3, max_tokens=10, stop_ids=frozenset([3]))
    while not beams.done:
        best = []
        for beam in beams.beams:
            scores = language_model(chain([*prompt, *beam.tokens])[-1], 12)
            order = sorted(range(12), key=lambda token: -scores[token])[:6]
            best.append([IdLogprob(token, scores[token], rank) for rank, token in enumerate(order, 1)])
        beams.advance(best)
    assert [event.tokens for event in events] == [beam.tokens for beam in beams.results[:2]]
    assert [event.cumulative_logprob for event in events] == [beam.logprob for beam in beams.results[:2]]
    assert [event.final for event in events] == [False, True]
    for event in events:
        assert event.logprobs is not None
        assert [each[0].token for each in event.logprobs] == event.tokens
        assert all(len(each) == 3 and each[1].rank == 1 for each in event.logprobs)


@pytest.mark.parametrize(("penalty", "early"), [(1.0, False), (0.0, True), (2.0, False)])
def test_search_gives_the_texts_of_transformers(penalty: float, early: bool) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=31,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for prompt in ([5, 6, 7], [9], [1, 2, 4, 8, 16]):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=4,
            num_return_sequences=4,
            do_sample=False,
            max_new_tokens=12,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=3,
            pad_token_id=31,
        )
        beams = BeamSearch(4, max_tokens=12, stop_ids=frozenset([3]), length_penalty=penalty, early_stopping=early)
        while not beams.done:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + beam.tokens for beam in beams.beams])).logits[:, -1].float()
            values, tokens = logits.log_softmax(-1).topk(8)
            beams.advance(
                [
                    [
                        IdLogprob(token, value, rank)
                        for rank, (token, value) in enumerate(zip(row, vals, strict=True), 1)
                    ]
                    for row, vals in zip(tokens.tolist(), values.tolist(), strict=True)
                ]
            )
        for beam, text in zip(beams.results, expected[:, len(prompt) :].tolist(), strict=True):
            assert text[: len(beam.tokens)] == beam.tokens
            assert set(text[len(beam.tokens) :]) <= {31}, "padding follows the shorter ones"
