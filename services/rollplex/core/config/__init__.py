"""The options of a run and of a mesh, a file each section. Services add their own section in their config.py."""

from rollplex.core.config.ablation import AblationConfig
from rollplex.core.config.loss import LossConfig
from rollplex.core.config.mesh import MeshSection
from rollplex.core.config.model import ModelSection
from rollplex.core.config.optimizer import OptimizerConfig
from rollplex.core.config.run import ONE_CHUNK, SAVED_MODES, SUFFIX_MODES, RunConfig
from rollplex.core.config.sampling import SamplingConfig

__all__ = ["ONE_CHUNK", "SAVED_MODES", "SUFFIX_MODES", "AblationConfig", "LossConfig", "MeshSection", "ModelSection",
           "OptimizerConfig", "RunConfig", "SamplingConfig"]
