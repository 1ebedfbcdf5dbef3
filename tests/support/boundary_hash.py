"""`boundary_hash.py CHECKPOINT DEVICE DTYPE SAVED`: prints what the boundaries of four prompts (text, image, video, both) hash to
in this process, keys and values of every layer."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from fake_session import FakeSession
from tiny_checkpoint import PromptMaker, tensor_parallel

from rollplex.data.processor import PromptProcessor
from rollplex.engine import PromptReader, use_device
from rollplex.model import ActorLayout, VisionLanguageModel, load_into, prefix_forward, read_model_config


def main(checkpoint: Path, device: str, dtype: str, saved: str) -> str:
    torch_device = use_device(device)
    config, session = read_model_config(checkpoint), FakeSession()
    layout = ActorLayout.build(config, 1, dtype)
    views = layout.training_views(layout.views(torch.zeros(layout.size_bytes, dtype=torch.uint8, device=torch_device)))
    load_into(checkpoint, config, views)
    model = VisionLanguageModel(config, getattr(torch, dtype), torch_device)
    model.bind(views)
    processor = PromptProcessor.load(checkpoint, max_prompt_tokens=2048)
    prompts, reader = PromptMaker(processor, session.add), PromptReader(session, processor, config, torch_device)
    digest = hashlib.sha256()
    for kind in ("text", "image", "video", "mixed"):
        for keys, values in prefix_forward(model, reader.read(prompts.group(kind, 1)), saved).layers:
            for tensor in (keys, values):
                digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy())
    session.close()
    return digest.hexdigest()


if __name__ == "__main__":
    with tensor_parallel():
        print(main(Path(sys.argv[1]), *sys.argv[2:]))
