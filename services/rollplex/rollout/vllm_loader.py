"""vLLM's model loader: builds the model without weights and puts every parameter on its place in the actor slab.

Registered in every process of vLLM by the entry point `rollplex` in the group `vllm.general_plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from rollplex.core.errors import InternalError
from rollplex.rollout.vllm_internals import align_tower, on_gpu, plain_linear_layers, take_patches, tensor_parallel_place

if TYPE_CHECKING:
    from rollplex.engine.actor import ActorMapping
    from rollplex.memory.client import BrokerSession

LOAD_FORMAT = "rollplex"


@dataclass(frozen=True)
class SlabSource:
    """What a worker needs to lease its slab; travels as vLLM's `model_loader_extra_config`."""

    broker: str
    handle_socket: str
    process: str
    """Of the rollout process; worker r is `PROCESS.wR` at the broker."""
    checkpoint: str
    dtype: str
    train_tp: int
    devices: tuple[str, ...]
    """By rank."""
    leader: int
    """Process that makes requests."""

    def as_config(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class WorkerActor:
    """This worker's hold on the actor, on the model as `model.rollplex_actor`."""

    session: BrokerSession
    mapping: ActorMapping


class SlabLoader(BaseModelLoader):
    """`load_format="rollplex"`. Loads nothing: until the first bind all weights read as zeros and take no memory."""

    def download_model(self, model_config: Any) -> None:
        """Weights come from the slab."""

    def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        # Here, because vLLM imports this module in every process, those that only read a model's config included.
        from rollplex.engine.products import check_products
        from rollplex.model import read_model_config
        from rollplex.rollout.vllm_patches import PatchReader

        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
        if on_gpu():
            check_products(device)
        with parameters_without_memory(), plain_linear_layers():
            model = super().load_model(*args, **kwargs)
        check_placed(model, model.rollplex_actor.mapping.views())
        align_tower(model)
        source = self._source
        take_patches(model, PatchReader(source.leader, read_model_config(Path(source.checkpoint)).patch_width,
                                        getattr(torch, source.dtype), device).take)
        return model

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        actor = connect_worker(self._source)
        actor.mapping.map_zeros()
        place_parameters(model, actor.mapping.views())
        # Not a submodule: nn.Module keeps plain objects as they are.
        model.rollplex_actor = actor

    @property
    def _source(self) -> SlabSource:
        return SlabSource(**self.load_config.model_loader_extra_config)


def register() -> None:
    """Idempotent: vLLM may load plugins several times in a process."""
    if not SlabLoader.__dict__.get("registered"):
        SlabLoader.registered = True
        register_model_loader(LOAD_FORMAT)(SlabLoader)


def connect_worker(source: SlabSource) -> WorkerActor:
    """A broker session of this worker's own, and addresses for its shard."""
    # Here, because vLLM imports this module in every process, those that only read a model's config included.
    from rollplex.engine.actor import ActorMapping
    from rollplex.memory.client import BrokerSession
    from rollplex.model import ActorLayout, read_model_config

    rank, size = tensor_parallel_place()
    layout = ActorLayout.build(read_model_config(Path(source.checkpoint)), size, source.dtype, source.train_tp)
    session = BrokerSession.connect(source.broker, Path(source.handle_socket), process=f"{source.process}.w{rank}",
                                    role="rollout")
    return WorkerActor(session, ActorMapping(session, layout, source.devices[rank]))


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules built meanwhile keep their parameters' shapes, but the memory of one element each."""
    def shrink(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter.data = torch.empty(1, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)

    hook = nn.modules.module.register_module_parameter_registration_hook(shrink)
    try:
        yield
    finally:
        hook.remove()


def place_parameters(model: nn.Module, views: Mapping[str, torch.Tensor]) -> None:
    """Raises InternalError unless model and layout have the same tensors: names, shapes (vocabulary padding included), types."""
    parameters = dict(model.named_parameters())
    problems = [f"{name}: in the layout only" for name in views.keys() - parameters.keys()]
    problems += [f"{name}: in vLLM only" for name in parameters.keys() - views.keys()]
    for name in views.keys() & parameters.keys():
        found, wanted = ((tensor.dtype, tuple(tensor.shape)) for tensor in (parameters[name], views[name]))
        if found != wanted:
            problems.append(f"{name}: {found} in vLLM, {wanted} in the layout")
    if problems:
        raise InternalError(f"vLLM's model is not the actor's layout, {len(problems)} tensor(s): "
                            f"{'; '.join(sorted(problems)[:5])}", reason="LAYOUT_MISMATCH")
    for name, parameter in parameters.items():
        parameter.data = views[name]


def check_placed(model: nn.Module, views: Mapping[str, torch.Tensor]) -> int:
    """How many parameters lie on their views; InternalError unless all do."""
    parameters = dict(model.named_parameters())
    astray = [name for name, view in views.items()
              if name not in parameters or parameters[name].data_ptr() != view.data_ptr()
              or parameters[name].stride() != view.stride()]
    if astray or len(parameters) != len(views):
        raise InternalError(f"{len(astray)} of {len(views)} parameters outside the actor slab: {', '.join(astray[:5])}; "
                            f"vLLM has {len(parameters)}")
    return len(parameters)
