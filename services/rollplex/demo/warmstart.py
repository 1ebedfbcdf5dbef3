"""The demo's supervised warm start: it teaches the model to see and to keep to the format, from a sloppy annotator.

Two parts, both plain supervised learning on clips that are in neither question file:

1. *Sight.* The vision tower learns, through linear heads that are thrown away afterwards, to tell colour, direction and
   number of the shapes in each pair of frames. (A pretrained vision tower would bring this along.)
2. *Speech.* The whole model imitates responses such as `<think>they move left</think>\\n<answer>A</answer>`. The
   thought is always right. The target of the answer token is `annotator_distribution`, the shares of the options that
   a sloppy annotator ticks: three options in four he mostly takes for another one.

The model that comes out speaks the format, sees what moves, and answers as badly as its annotator: it is right about
three times in ten when sampled, and greedily one time in four. That the answer must follow from what was seen is left
to reinforcement, which is told nothing but whether an answer was right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rollplex.demo.checkpoint import IMAGE_MEAN, IMAGE_STD
from rollplex.demo.clips import COLOURS, DIRECTIONS, FRAME_PX, FRAMES, QUESTIONS, Clip
from rollplex.demo.prompts import VIDEO_TOKENS, prompt_ids, response
from rollplex.demo.videos import draw_rows, encoded_clip

if TYPE_CHECKING:
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

_PATCH, _MERGE, _PAIR = 14, 2, 2
GRID = (FRAMES // _PAIR, FRAME_PX // _PATCH, FRAME_PX // _PATCH)  # of one clip, in patches: time, height, width
_PATCHES = GRID[0] * GRID[1] * GRID[2]

Progress = Callable[[str, int, int, float], None]  # (part, steps done, steps in all, loss)


@dataclass(frozen=True)
class WarmStartOptions:
    """How long and how hard to teach; the defaults are what the demo's recipe was measured with."""

    clips: int = 1024
    sight_steps: int = 150
    sight_learning_rate: float = 2e-3
    speech_steps: int = 280
    speech_learning_rate: float = 1e-3
    batch_rows: int = 32
    answer_weight: float = 0.3


@dataclass(frozen=True)
class WarmStartResult:
    """Mean losses (nats) over the last ten steps of each part, and seconds taken."""

    sight_loss: float
    speech_loss: float
    seconds: float


def annotator_distribution(right: int) -> np.ndarray:
    """Probability [4] that the sloppy annotator ticks each option when option `right` is right.

    The first option he mostly ticks when it is right. For each of the others he has a favourite wrong one, which he
    ticks more often than the right one. Over uniform right options every option is ticked equally often, so an answer
    given without looking is right one time in four.
    """
    if right == 0:
        return np.array([0.45, 0.55 / 3, 0.55 / 3, 0.55 / 3])
    shares = np.full(4, 0.55 / 3)
    favourite, other = right % 3 + 1, (right + 1) % 3 + 1
    shares[right], shares[favourite], shares[other] = 0.25, 0.48, 0.27 - 0.55 / 3
    return shares


def patches(frames: np.ndarray) -> Tensor:
    """Pixel patches float32 [clips * patches, 1176] of frames uint8 [clips, T, H, W, 3].

    The arithmetic and the patch order are those of the checkpoint's own video processor; a test compares them.
    """
    mean, std = (np.array(values, dtype=np.float32) for values in (IMAGE_MEAN, IMAGE_STD))
    pixels = torch.from_numpy((frames.astype(np.float32) / 255 - mean) / std).permute(0, 1, 4, 2, 3)
    clips, channels = pixels.shape[0], pixels.shape[2]
    rows, columns = GRID[1] // _MERGE, GRID[2] // _MERGE
    blocks = pixels.reshape(clips, GRID[0], _PAIR, channels, rows, _MERGE, _PATCH, columns, _MERGE, _PATCH)
    return blocks.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(clips * _PATCHES, channels * _PAIR * _PATCH * _PATCH)


class _Pool:
    """Clips of the warm start, as the decoder of their encoded files gives them, with what was asked about each."""

    def __init__(self, clips: int, rng: np.random.Generator, *, blank: bool) -> None:
        rows = draw_rows(clips, rng)
        self.questions = [(kind, answer) for kind, answer, _ in rows]
        self.labels = np.array([_sight_labels(clip) for *_, clip in rows])  # [clips, pairs of frames, 3]
        self.frames = np.stack([encoded_clip(clip, blank=blank) for *_, clip in rows])
        self._rng = rng

    def draw(self, rows: int) -> np.ndarray:
        """Indices [rows] of distinct clips."""
        return self._rng.choice(len(self.questions), rows, replace=False)


def _sight_labels(clip: Clip) -> list[list[int]]:
    """(colour, direction, count - 1) of each pair of frames."""
    shared = [list(DIRECTIONS).index(clip.direction), clip.count - 1]
    return [[list(COLOURS).index(clip.colours[pair * 2 // GRID[0]]), *shared] for pair in range(GRID[0])]


def warm_start(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
    *,
    seed: int,
    blank: bool = False,
    options: WarmStartOptions | None = None,
    progress: Progress = lambda part, done, total, loss: None,
) -> WarmStartResult:
    """Teach `model` in place. `blank` teaches it on blank clips: it then learns the format, but nothing to see."""
    options = options or WarmStartOptions()
    started = time.monotonic()
    torch.manual_seed(seed)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(7,)))  # apart from the question files' streams
    pool = _Pool(options.clips, rng, blank=blank)
    model.train()
    sight_loss = _teach_sight(model, pool, options, progress)
    speech_loss = _teach_speech(model, tokenizer, pool, rng, options, progress)
    model.eval()
    return WarmStartResult(sight_loss, speech_loss, time.monotonic() - started)


def _teach_sight(
    model: Qwen2_5_VLForConditionalGeneration, pool: _Pool, options: WarmStartOptions, progress: Progress
) -> float:
    """Train the vision tower and its projector on the attributes of each pair of frames."""
    tower = model.model.visual
    heads = torch.nn.Linear(model.config.text_config.hidden_size, 3 * 4)
    parameters = [*tower.parameters(), *heads.parameters()]

    def loss_of_batch() -> Tensor:
        index = pool.draw(options.batch_rows)
        merged = tower(patches(pool.frames[index]), grid_thw=torch.tensor([GRID] * len(index))).pooler_output
        logits = heads(merged.view(len(index), GRID[0], VIDEO_TOKENS // GRID[0], -1).mean(dim=2))  # [clips, pairs, 12]
        return F.cross_entropy(logits.reshape(-1, 4), torch.from_numpy(pool.labels[index]).reshape(-1))

    return _descend("sight", parameters, loss_of_batch, options.sight_steps, options.sight_learning_rate, progress)


def _teach_speech(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
    pool: _Pool,
    rng: np.random.Generator,
    options: WarmStartOptions,
    progress: Progress,
) -> float:
    """Train the whole model to imitate the annotator; the answer token learns his shares, not single ticks."""
    prompts = {kind: prompt_ids(tokenizer, kind) for kind in QUESTIONS}
    answer_ids = {kind: tokenizer.convert_tokens_to_ids(list(q.answers)) for kind, q in QUESTIONS.items()}
    ticks = torch.zeros(len(QUESTIONS), 4, len(tokenizer))  # the annotators' distribution over the token after <answer>
    for row, kind in enumerate(QUESTIONS):
        for right in range(4):
            ticks[row, right, answer_ids[kind]] = torch.from_numpy(annotator_distribution(right)).float()
    kinds = {kind: row for row, kind in enumerate(QUESTIONS)}

    def loss_of_batch() -> Tensor:
        index = pool.draw(options.batch_rows)
        asked = [pool.questions[i] for i in index]
        texts = [response(kind, right, right) + tokenizer.eos_token for kind, right in asked]
        responses = tokenizer(texts)["input_ids"]
        logits, targets = _response_logits(
            model, tokenizer.pad_token_id, [prompts[kind] for kind, _ in asked], responses, patches(pool.frames[index])
        )
        is_answer = torch.cat([torch.tensor([0, *ids[:-1]]) for ids in responses]) == open_id
        shares = ticks[[kinds[kind] for kind, _ in asked], [right for _, right in asked]]
        spoken = F.cross_entropy(logits[~is_answer], targets[~is_answer])
        return spoken + options.answer_weight * F.cross_entropy(logits[is_answer], shares)

    open_id = tokenizer.convert_tokens_to_ids("<answer>")
    parameters = list(model.parameters())
    return _descend("speech", parameters, loss_of_batch, options.speech_steps, options.speech_learning_rate, progress)


def _response_logits(
    model: Qwen2_5_VLForConditionalGeneration,
    pad_id: int,
    prompts: list[list[int]],
    responses: list[list[int]],
    pixels: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits [tokens, V] that predict the response tokens [tokens] of all rows, one row after the other."""
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, responses))
    ids = torch.full((len(prompts), length), pad_id)
    in_response = torch.zeros_like(ids, dtype=torch.bool)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, responses)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        mask[row, :end] = 1
        in_response[row, len(prompt) : end] = True
    hidden = model.model(
        input_ids=ids,
        attention_mask=mask,
        mm_token_type_ids=(ids == model.config.video_token_id).int() * 2,
        pixel_values_videos=pixels,
        video_grid_thw=torch.tensor([GRID] * len(prompts)),
        use_cache=False,
    ).last_hidden_state
    predicts = in_response.roll(-1, dims=1)  # the position before each response token
    return model.lm_head(hidden[predicts]), ids[in_response]


def _descend(
    part: str,
    parameters: list[torch.nn.Parameter],
    loss_of_batch: Callable[[], Tensor],
    steps: int,
    learning_rate: float,
    progress: Progress,
) -> float:
    """AdamW with a short warm-up and a linear decay to a tenth; returns the mean loss of the last ten steps."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    recent: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        loss = loss_of_batch()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        recent = [*recent[-9:], loss.item()]
        progress(part, step + 1, steps, recent[-1])
    return float(np.mean(recent))
