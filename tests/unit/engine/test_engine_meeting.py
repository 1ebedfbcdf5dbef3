import json
import os
import subprocess
import sys
import threading

import pytest

from rollplex.core.errors import Aborted, DeadlineExceeded, Unavailable
from rollplex.core.phases import Phase
from rollplex.engine.communicator import Communicator
from rollplex.engine.meeting import Meeting, meet


def never() -> None: ...


def meet_all(folder, epoch: int, size: int) -> list[Meeting]:
    found: list[Meeting] = []
    threads = [threading.Thread(target=lambda rank=rank: found.append(
        meet(folder, epoch, rank, size, timeout_s=20, go_on=never))) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_of_an_epoch_meet_and_leave_notes(tmp_path):
    meetings = meet_all(tmp_path, 1, 3)
    assert len({meeting.folder for meeting in meetings}) == 1
    assert [found.pid for found in meetings[0].attendances] == [os.getpid()] * 3
    meetings[0].note("left", 2, "why")
    assert (meetings[1].read("left", 2), meetings[1].read("left", 0)) == ("why", "")
    assert meet_all(tmp_path, 2, 2)[0].folder != meetings[0].folder
    assert [place.name for place in tmp_path.iterdir()] == ["2"]


def test_a_rank_that_does_not_come_is_named(tmp_path):
    with pytest.raises(DeadlineExceeded, match="rank 1 did not come to epoch 4 within 0.05 s"):
        meet(tmp_path, 4, 0, 2, timeout_s=0.05, go_on=never)


def test_what_a_dead_process_left_does_not_count(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "1").mkdir()
    for pid, started in ((gone.pid, 7), (os.getpid(), 7)):
        (tmp_path / "1" / "rank-1").write_text(json.dumps([pid, started, "instance-old"]))
        with pytest.raises(DeadlineExceeded, match="rank 1"):
            meet(tmp_path, 1, 0, 2, timeout_s=0.05, go_on=never)


def test_a_newer_epoch_ends_the_waiting(tmp_path):
    communicator = Communicator("trainer", 0, 2, tmp_path, timeout_s=30)
    communicator.announce(3)
    threading.Timer(0.1, communicator.announce, [4]).start()
    communicator.enter(3)
    with pytest.raises(Unavailable, match="could not join epoch 3: epoch 4 was announced"), \
            communicator.together(Phase.SUFFIX, "train_suffix"):
        raise AssertionError("it must not run")
    communicator.enter(3)  # superseded: not even tried
    communicator.close()
    with pytest.raises(Unavailable, match="is ending"), communicator.together(Phase.SUFFIX, "train_suffix"):
        raise AssertionError("it must not run")


def test_one_rank_needs_nobody(tmp_path):
    alone = Communicator("trainer", 0, 1, tmp_path, timeout_s=1)
    alone.announce(1)
    alone.enter(1)
    with pytest.raises(KeyError), alone.together(Phase.SUFFIX, "train_suffix"):
        raise KeyError("passed on")
    alone.fail(Aborted("no"), "nowhere")
    assert alone.all_gather(5) == [5]
    alone.close()
    assert not list(tmp_path.iterdir())
