from benchmarks.table import Row, Section, render


def section() -> Section:
    section = Section("one process")
    for engine, figures in {"quire": [400.0, 380.0, 420.0], "peer": [100.0, 90.0, 130.0]}.items():
        for figure in figures:
            section.row("tokens/s").add(engine, figure)
    section.row("tokens/s").per_unit["quire"] = 1 / 800
    section.row("first token, s", less_is_better=True).add("quire", 0.5)
    return section


def test_cells_have_median_spread_and_share() -> None:
    row = section().row("tokens/s")
    assert (row.cell("quire"), row.share("quire")) == ("400 (380 - 420)", "50%")
    assert (row.cell("peer"), row.share("peer")) == ("100 (90 - 130)", "")
    assert (row.cell("absent"), row.share("absent")) == ("-", "")


def test_a_lead_above_one_is_ours_whichever_way_is_better() -> None:
    assert section().row("tokens/s").lead("peer") == 4
    assert Row("s", {"quire": [2.0], "peer": [5.0]}, less_is_better=True).lead("peer") == 2.5
    assert Row("s", {"quire": [2.0]}).lead("peer") is None


def test_columns_are_aligned_and_titles_do_not_widen_them() -> None:
    wide = Section("a title that is longer than any name of a row, and than the whole table " * 2, section().rows)
    lines = render([wide], ["quire", "peer"]).splitlines()
    assert lines[0].split() == ["quire", "peer", "quire", ":", "peer"]
    rows = [line for line in lines if line.startswith("  ")][1:]
    assert [line.split()[-1] for line in rows] == ["4.00x", "-"]
    assert len({len(line) for line in [lines[0], *rows]}) == 1
    assert len(rows[0]) < 80


def test_without_ours_there_is_nothing_to_compare() -> None:
    assert "peer : " not in render([section()], ["peer"])
