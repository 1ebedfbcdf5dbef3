"""What rollout, reference and trainer have in common. Start with README.md."""

from rollplex.engine.actor import ActorMapping
from rollplex.engine.layout_hash import layout_hash
from rollplex.engine.prompts import PromptReader

__all__ = ["ActorMapping", "PromptReader", "layout_hash"]
