"""What ranks tell each other outside tensors: JSON over the group's own collectives, of any lengths."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rollplex.engine.communicator import Communicator

RANK = """
import json, sys
from pathlib import Path
from rollplex.core.imports import uncollected
from rollplex.core.phases import Phase
with uncollected():
    from rollplex.engine.communicator import Communicator
rank = int(sys.argv[1])
communicator = Communicator("trainer", rank, 2, Path(sys.argv[2]), timeout_s=60)
communicator.announce(1)
communicator.enter(1)
with communicator.together(Phase.UPDATE, "bind_snapshot"):
    first = communicator.all_gather({"rank": rank, "text": "\\u00e4" * (1000 * rank)})
    second = communicator.all_gather("" if rank else [1.5, None])
print(json.dumps([first, second]))
communicator.close()
"""


def test_two_ranks(tmp_path):
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
             for rank in range(2)]
    outputs = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in ranks]
    assert outputs[0] == outputs[1] == [[{"rank": 0, "text": ""}, {"rank": 1, "text": "ä" * 1000}], [[1.5, None], ""]]


def test_a_single_rank_asks_nobody(tmp_path):
    assert Communicator("trainer", 0, 1, tmp_path, timeout_s=1).all_gather(object) == [object]


def test_what_json_does_not_hold_is_refused(tmp_path):
    communicator = Communicator("trainer", 0, 2, tmp_path, timeout_s=1)
    with pytest.raises(TypeError):
        communicator.all_gather(object())
