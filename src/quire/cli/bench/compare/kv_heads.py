"""MHA, GQA, MQA and MLA: what the KV cache of this model takes with each kind of attention. Computed, not measured."""

from quire.cli.bench.compare.charts import BarChart, LineChart
from quire.cli.bench.compare.lab import Lab
from quire.cli.bench.compare.result import Column, Result, Row, bars, times, value

TITLE = "MHA, GQA, MQA and MLA: KV cache of this model"
MIB = 1 << 20


def compare(lab: Lab) -> Result:
    from quire.planning.memory import kv_variants
    from quire.planning.packed_bytes import NativeFormat
    from quire.planning.planned_model import plan_model

    config, spec = lab.model, lab.kv_spec()
    planned = plan_model(lab.options.model, lab.checkpoint, NativeFormat())
    vectors = config.kv_heads * config.head_dim * (1 if config.latent else 2)
    own_bytes = spec.block_bytes / spec.block_size
    own = "MLA" if config.latent else _own_kind(config.heads, config.kv_heads)
    rows: list[Row] = []
    for variant in kv_variants(planned, own_bytes / (config.layers * vectors)):
        rows.append(
            {
                "side": variant.name + (" (this model's)" if variant.name == own else ""),
                "token": variant.bytes_per_token / 1024,
                **{str(length): variant.bytes_per_token * length / MIB for length in lab.sizes.lengths},
            }
        )
    most, least = (choose(rows, key=lambda row: value(row, "token")) for choose in (max, min))
    return Result(
        title=TITLE,
        columns=[
            Column("side", ""),
            Column("token", "KiB a token", 2),
            *(Column(str(length), f"MiB at {length:,}", 1) for length in lab.sizes.lengths),
        ],
        rows=rows,
        conclusion=f"{most['side']} takes {times(most['token'], least['token'])} times the memory of "
        f"{least['side']}; this model keeps {own_bytes / 1024:.2f} KiB a token",
        held_fixed=f"{config.layers} layers, {config.heads} query heads of {config.head_dim}, {spec.dtype} keys and "
        "values, one sequence",
        notes=[
            "computed from the shapes, not measured, and nothing is said about how well such a model would answer",
            "GQA has the model's own groups, or 8 query heads a group where it has none; MLA has DeepSeek's ratio: a "
            "latent of four heads and a rope part of half a head",
        ],
        charts=[
            BarChart("KV cache of one token", "KiB, lower is better", bars(rows, "token")),
            LineChart(
                "KV cache of one sequence",
                "tokens",
                "MiB, logarithmic",
                {
                    str(row["side"]): [(length, value(row, str(length))) for length in sorted(lab.sizes.lengths)]
                    for row in rows
                },
                log_x=True,
                log_y=True,
            ),
        ],
        computed=True,
    )


def _own_kind(heads: int, kv_heads: int) -> str:
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
