"""What a process works on is known when it is dead."""

import os
import signal

from quire.ipc.active_work import GRAMMAR, MESSAGE, STEP, ActiveWork, shared_file


def test_work_of_a_killed_process_is_known() -> None:
    with shared_file() as file:
        parent = ActiveWork(file)
        if (child := os.fork()) == 0:
            work = ActiveWork(file)
            work.write(STEP, [("a", 0), ("b", 3), ("näme with spaces", 1)])
            work.write(MESSAGE, [("gone", 0)])
            work.clear(MESSAGE)
            work.write(GRAMMAR, [("g", 0)])
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    assert parent.read() == {("a", 0), ("b", 3), ("näme with spaces", 1), ("g", 0)}


def test_a_shorter_text_leaves_nothing_of_a_longer_one() -> None:
    with shared_file() as file:
        work = ActiveWork(file)
        assert work.read() == set()
        work.write(STEP, [(f"request {number}", number) for number in range(1000)])
        assert len(work.read()) == 1000
        work.write(STEP, [("a", 0)])
        assert work.read() == {("a", 0)}
        work.write(STEP, [])
        assert work.read() == set()
