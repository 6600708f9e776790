"""200 streams at a time, a third of whose clients leave: the server and its engine as they are started by users."""

from pathlib import Path

import pytest
from benchmarks.crowd import left_behind, metrics, resident, visit_all
from benchmarks.own_server import own_server

from trials import LENGTH

NUM_VISITS = 300 * LENGTH


@pytest.mark.slow
@pytest.mark.trial
def test_200_streams_while_clients_leave(tiny_model: Path) -> None:
    with own_server(str(tiny_model), "--threads", "1") as (url, process):
        before, crowds, sizes = metrics(url), [], []
        for wave in range(3):
            crowd = visit_all(url, num_streams=200, num_visits=NUM_VISITS, seed=wave)
            assert not crowd.problems, crowd.problems[:5]
            assert crowd.whole > NUM_VISITS / 2 and crowd.left > NUM_VISITS / 5 and crowd.visits == NUM_VISITS
            crowds.append(crowd)
            assert not (wrong := left_behind(url, before, crowds)), wrong
            sizes.append(sum(resident(process).values()))
        assert sizes[2] < sizes[1] * 1.05 + 8, f"memory grows: {sizes} MB"
        assert process.said().count("\n") == 2, "nothing was worth a line in the log"
    assert process.process.returncode == 0
