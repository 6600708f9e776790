"""Speculative decoding off and on: on a text that repeats itself, and on one that does not."""

from dataclasses import replace
from typing import Any

from quire.cli.bench.compare.charts import BarChart
from quire.cli.bench.compare.lab import Lab, RunTrace, in_turn, same_tokens
from quire.cli.bench.compare.result import Column, Figure, Result, Row, bars, doubt, times
from quire.cli.bench.prompts import BenchRequest
from quire.engine.engine import Engine
from quire.engine.options import SPECULATION

TITLE = "speculative decoding: off against on"
SIDES = ("off", "on")
DEFAULT_METHOD = "ngram"
PASSAGE = (
    "A quire is a gathering of sheets, folded once and sewn through the fold. Four sheets make eight leaves, and "
    "eight leaves make sixteen pages.\n\n"
)
TEXTS = {  # name: (prompt, temperature)
    "repeats": (PASSAGE * 2, 0.0),
    "does not repeat": ("Once upon a time, in a village by the sea, there lived an old man who", 1.0),
}


def compare(lab: Lab) -> Result:
    sizes = lab.sizes
    prompts = {name: lab.tokenizer.encode(text) for name, (text, _) in TEXTS.items()}
    drafting: dict[str, Any] = {} if lab.options.speculation else {"spec_method": DEFAULT_METHOD}
    speculation = replace(lab.options, **drafting).speculation
    assert speculation is not None
    length = max(map(len, prompts.values())) + sizes.output_len + speculation.num_tokens + 1
    engines = {
        "off": lab.engine(length=length, num_seqs=1, **dict.fromkeys(SPECULATION)),
        "on": lab.engine(length=length, num_seqs=1, **drafting),
    }

    def one(side: str, text: str) -> tuple[RunTrace, int, int]:
        """-> the run, the draft tokens that were verified, and those that were accepted."""
        engine: Engine = engines[side]
        before = engine.stats()
        request = BenchRequest(prompts[text], sizes.output_len)
        run = lab.run(engine, [request], temperature=TEXTS[text][1])
        after = engine.stats()
        return run, after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens

    def one_round(number: int) -> dict[tuple[str, str], tuple[RunTrace, int, int]]:
        return {(side, text): one(side, text) for text in TEXTS for side in in_turn(number, SIDES)}

    rounds = lab.rounds(one_round)
    rows: list[Row] = []
    for text in TEXTS:
        for side in SIDES:
            runs = [done[side, text] for done in rounds]
            drafts, accepted = sum(run[1] for run in runs), sum(run[2] for run in runs)
            rows.append(
                {
                    "side": f"{text}, {side}",
                    "tokens_per_second": Figure.of([_rate(run[0]) for run in runs]),
                    "steps": len(runs[0][0].records),
                    "drafts": drafts // len(runs) if side == "on" else None,
                    "acceptance": 100 * accepted / drafts if drafts else None,
                }
            )
    gains = [times(rows[i + 1]["tokens_per_second"], rows[i]["tokens_per_second"]) for i in (0, 2)]
    same = all(done["off", text][0].tokens == done["on", text][0].tokens for done in rounds for text in TEXTS)
    return Result(
        title=TITLE,
        columns=[
            Column("side", ""),
            Column("tokens_per_second", "decode tok/s", 1),
            Column("steps", "steps"),
            Column("drafts", "draft tokens"),
            Column("acceptance", "accepted %", 0),
        ],
        rows=rows,
        conclusion=f"with drafts, text that repeats comes {gains[0]} times as fast, and text that does not {gains[1]} "
        "times" + doubt(*((rows[i]["tokens_per_second"], rows[i + 1]["tokens_per_second"]) for i in (0, 2))),
        held_fixed=f"the model, one sequence, {sizes.output_len} output tokens, the same seeds; at most "
        f"{speculation.num_tokens} draft tokens a step by {speculation.method}; text that repeats is greedy, the other "
        "has temperature 1",
        notes=[
            "both sides gave the same tokens"
            if same
            else same_tokens(rounds[0]["off", "repeats"][0], rounds[0]["on", "repeats"][0])
        ],
        charts=[BarChart("speed", "decoded tokens/s, higher is better", bars(rows, "tokens_per_second"), (0, 2))],
        rounds=len(rounds),
    )


def _rate(run: RunTrace) -> float:
    """Tokens a second after the first."""
    times_of = run.requests[0].times
    return (len(times_of) - 1) / (times_of[-1] - times_of[0])
