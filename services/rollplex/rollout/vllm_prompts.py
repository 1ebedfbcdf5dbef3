"""A prepared group as vLLM takes it: vLLM's own processor makes pixels and token ids, and the result must hash to ours.

Legend: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from vllm.v1.engine.llm_engine import LLMEngine

from rollplex.core import work
from rollplex.core.errors import BadInput
from rollplex.core.prompt_hash import prompt_hash
from rollplex.data.media import MediaItem
from rollplex.data.processor import PromptProcessor
from rollplex.engine.prompts import PromptReader, check_prompt_hash, data_media_item, naming_group
from rollplex.model import ModelConfig
from rollplex.rollout.vllm_internals import passes_video_metadata, render


class VllmPrompts:
    """Reads a prompt once for all of its samples. Owner thread only."""

    def __init__(self, reader: PromptReader, processor: PromptProcessor, config: ModelConfig) -> None:
        self._reader, self._processor = reader, processor
        self._placeholders = (config.image_token_id, config.video_token_id)
        self._vocab_size = config.vocab_size

    def read(self, engine: LLMEngine, group: work.PreparedGroup) -> tuple[dict[str, Any], str]:
        """(vLLM's input, its hash). Raises as PromptReader.read does."""
        with naming_group(group):
            tokens_P = np.frombuffer(group.token_ids, dtype=np.int64)
            if not len(tokens_P) or tokens_P.min() < 0 or tokens_P.max() >= self._vocab_size:
                raise BadInput(f"{len(tokens_P)} prompt tokens; at least one is needed, all within the vocabulary of "
                               f"{self._vocab_size}", reason="BAD_TOKEN_ID" if len(tokens_P) else "EMPTY_PROMPT")
            rendered = render(engine, self._prompt(engine, tokens_P, group.media))
        found = _hash(rendered)
        check_prompt_hash(group, found)
        return rendered, found

    def _prompt(self, engine: LLMEngine, tokens_P: np.ndarray, media: Sequence[work.MediaItem]) -> dict[str, Any]:
        if not media:
            return {"prompt_token_ids": tokens_P.tolist()}
        items = [data_media_item(item) for item in media]
        with self._reader.frames(media) as frames:
            data = self._media(items, frames)
            frames.clear()
        metadata = [metadata for _, metadata in data.get("video", ())]
        options = self._video_options(metadata, passes_video_metadata(engine)) if metadata else {}
        return {"prompt_token_ids": collapse_runs(tokens_P, self._placeholders).tolist(), "multi_modal_data": data,
                "mm_processor_kwargs": options}

    def _media(self, items: Sequence[MediaItem], frames: Sequence[np.ndarray]) -> dict[str, list]:
        """Copies: the slab is unmapped before vLLM has seen the last of them."""
        images = [Image.fromarray(array[0]) for item, array in zip(items, frames) if item.kind == "image"]
        videos = [(np.array(array), self._video_metadata(item)) for item, array in zip(items, frames) if item.kind == "video"]
        return {kind: media for kind, media in (("image", images), ("video", videos)) if media}

    def _video_options(self, metadata: list[dict[str, Any]], passed_on: bool) -> dict[str, Any]:
        """The rate is where each version of vLLM and of transformers looks for it."""
        rates = [known["fps"] for known in metadata]
        options = {**self._processor.video_options(), "fps": rates[0] if len(set(rates)) == 1 else rates}
        if not passed_on:
            options["video_metadata"] = [{key: known[key] for key in known if key != "do_sample_frames"} for known in metadata]
        return options

    def _video_metadata(self, item: MediaItem) -> dict[str, Any]:
        known = self._processor.video_metadata(item)
        return known | {"duration": known["total_num_frames"] / known["fps"], "video_backend": "rollplex",
                        "do_sample_frames": False}


def collapse_runs(tokens_P: np.ndarray, placeholders: Sequence[int]) -> np.ndarray:
    """One placeholder a medium, as before expansion: vLLM replaces each by as many as the medium's grid needs."""
    repeated = np.isin(tokens_P[1:], placeholders) & (tokens_P[1:] == tokens_P[:-1])
    return tokens_P[np.concatenate([[True], ~repeated])]


def _hash(rendered: Mapping[str, Any]) -> str:
    """Over what vLLM made of the prompt, in the coordinator's order."""
    made = rendered.get("mm_kwargs", {})

    def field(modality: str, name: str) -> list[Any]:
        return [item[name].data.tolist() for item in made.get(modality, ())]

    return prompt_hash(rendered["prompt_token_ids"], field("image", "image_grid_thw"), field("video", "video_grid_thw"),
                       field("video", "second_per_grid_ts"))
