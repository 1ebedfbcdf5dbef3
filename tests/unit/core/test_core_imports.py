"""What every engine does first: import, without the collector and without torch's compiler."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from rollplex.core.imports import uncollected

ENGINE = """
import gc, json, sys
import torch
from rollplex.core.imports import uncollected
real = torch.compile
with uncollected():
    import rollplex.model
print(json.dumps({"compile": torch.compile is real, "compiler": "torch._inductor.compile_fx" in sys.modules,
                  "frozen": gc.get_freeze_count() > len(sys.modules), "collects": gc.isenabled()}))
"""


def test_an_engine_starts_without_the_compiler_and_leaves_torch_as_it_was():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ENGINE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"compile": True, "compiler": False, "frozen": True, "collects": True}


def test_nothing_is_frozen_where_nothing_was_imported():
    frozen = gc.get_freeze_count()
    with uncollected():
        import json  # noqa: F401
    assert gc.get_freeze_count() <= frozen


def test_collections_come_back_after_an_import_that_fails():
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
