"""A broker, and the reference served over its socket."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_rig import RUN, Loop, broker, connect, served
from tiny_checkpoint import PromptMaker, frozen_model, save_tiny, tensor_parallel

from rollplex.core.config import MeshSection, ModelSection
from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader
from rollplex.reference.config import ReferenceConfig, ReferenceSection
from rollplex.reference.server import build_engine
from rollplex.reference.servicer import add_reference


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    torch.set_num_threads(1)
    checkpoint = save_tiny(tmp_path_factory.mktemp("tiny"))
    section = MeshSection(runtime_dir=tmp_path_factory.mktemp("mesh"))
    section.runtime_dir.chmod(0o700)
    loop = Loop()
    with tensor_parallel(), broker(section), connect(section, "coordinator", "coordinator") as session:
        processor = PromptProcessor.load(checkpoint, max_prompt_tokens=2048)
        oracle = frozen_model(checkpoint)

        def deposit(name: str, fd: int, size_bytes: int) -> object:
            return session.deposit(name, fd, object_class="media", run=RUN)

        yield SimpleNamespace(
            section=section, checkpoint=checkpoint, session=session, loop=loop, oracle=oracle,
            config=ReferenceConfig(model=ModelSection(checkpoint=checkpoint), mesh=section,
                                   reference=ReferenceSection(suffix_tokens=24)),
            reader=PromptReader(session, processor, oracle.config),
            prompts=PromptMaker(processor, deposit))


@pytest.fixture(scope="module")
def serve_reference(mesh):
    """A new reference process's engine, served until the end of the context."""
    def serve(config: ReferenceConfig = mesh.config):
        return served(mesh.loop, mesh.section, "reference-0", build_engine(config), add_reference)

    return serve
