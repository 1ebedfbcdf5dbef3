"""A new run's options: read strictly, completed from the recorded run in a replay, checked against the mesh."""

from __future__ import annotations

import json

from rollplex.coordinator.recordings import Recordings
from rollplex.core.config import RunConfig
from rollplex.core.errors import BadInput
from rollplex.core.strict import parse
from rollplex.core.topology import Topology


async def read_config(config_json: str, recordings: Recordings, topology: Topology) -> RunConfig:
    """Missing options are the defaults, or the recorded run's in a replay. Raises BadInput, NotFound for no such recording."""
    try:
        given = json.loads(config_json or "{}")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"config_json is no JSON: {error}", reason="BAD_CONFIG") from error
    if isinstance(given, dict) and given.get("replay"):
        given = await recordings.config(str(given["replay"]), given)
    config = parse(RunConfig, given)
    own = topology.own_replicas > 0
    if own != (config.schedule == "disaggregated"):
        raise BadInput(f"schedule {config.schedule!r} on a mesh with mesh.own_replicas = {topology.own_replicas}: "
                       "`disaggregated` needs rollout on devices of its own, the other schedules share the trainer's",
                       reason="BAD_SCHEDULE", schedule=config.schedule)
    return config
