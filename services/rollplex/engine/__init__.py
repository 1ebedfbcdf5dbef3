"""What rollout, reference and trainer have in common. Start with README.md."""

from rollplex.engine.actor import ActorMapping
from rollplex.engine.communicator import Communicator
from rollplex.engine.device import device_errors, finish_work, release_cached, use_device
from rollplex.engine.layout_hash import layout_facts, layout_hash
from rollplex.engine.prompts import PromptReader

__all__ = ["ActorMapping", "Communicator", "PromptReader", "device_errors", "finish_work", "layout_facts", "layout_hash",
           "release_cached", "use_device"]
