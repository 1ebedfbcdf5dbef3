"""From submitted rows to prepared groups: checked, decoded once into a host slab, tokenised. Before any engine works."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from array import array
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from rollplex.coordinator.records import IterationKey
from rollplex.core.errors import BadInput, DeadlineExceeded, Forbidden, NotFound, RollplexError
from rollplex.core.ids import media_slab
from rollplex.core.placement import Placement
from rollplex.core.work import MediaItem, PreparedGroup
from rollplex.data.decoder import MediaDecoder
from rollplex.data.limits import MediaLimits
from rollplex.data.processor import PromptProcessor
from rollplex.data.rows import PromptRow, check_row
from rollplex.memory.client import BrokerSession

log = logging.getLogger(__name__)

MOST_EXPLAINED = 16
"""Refused prompts whose reason is spelled out; a status has to fit into gRPC's trailers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row and what the engines get of it."""

    row: PromptRow
    group: PreparedGroup

    @property
    def slab(self) -> str | None:
        return self.group.media[0].frames.slab if self.group.media else None


class Intake:
    """Prepares prompts and gives their media back."""

    def __init__(self, session: BrokerSession, decoder: MediaDecoder, processor: PromptProcessor, limits: MediaLimits,
                 roots: Sequence[Path], broker_thread: Executor) -> None:
        self._session, self._decoder, self._processor = session, decoder, processor
        self._limits, self._roots = processor.fit_limits(limits), tuple(roots)
        self._broker_thread = broker_thread
        self._to_delete: list[str] = []
        self._tag = secrets.token_hex(4)

    async def prepare(self, key: IterationKey, rows: Sequence[PromptRow], first_ordinal: int, sample_count: int
                      ) -> list[Prompt]:
        """One prompt a row. When some are refused nothing is kept, and the BadInput names each by index."""
        outcomes = await asyncio.gather(*(
            self._prepare_one(key, index, row, first_ordinal + index, sample_count) for index, row in enumerate(rows)),
            return_exceptions=True)
        refused = {index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
        if not refused:
            return outcomes
        await self.release([outcome for outcome in outcomes if isinstance(outcome, Prompt)])
        for error in refused.values():
            if not isinstance(error, BadInput | Forbidden | DeadlineExceeded):
                raise error
        raise _refusal(refused, len(rows))

    async def release(self, prompts: Sequence[Prompt]) -> None:
        """Deletes the prompts' media slabs. One that an engine still leases is tried again with the next release."""
        self._to_delete += [prompt.slab for prompt in prompts if prompt.slab is not None]
        if self._to_delete:
            slabs, self._to_delete = self._to_delete, []
            self._to_delete += await self._in_broker_thread(lambda: self._delete(slabs))

    def _delete(self, slabs: Sequence[str]) -> list[str]:
        """The slabs that could not be deleted yet."""
        kept = []
        for slab in slabs:
            try:
                self._session.delete(slab)
            except NotFound:
                continue
            except RollplexError as error:
                log.warning("media slab %s stays for now: %s", slab, error)
                kept.append(slab)
        return kept

    async def release_leftovers(self) -> None:
        """Deletes the media slabs that an earlier coordinator left: nobody else knows of them."""
        def release() -> None:
            self._to_delete += self._delete([slab.name for slab in self._session.list_slabs("runs/")
                                             if slab.object_class == "media"])

        await self._in_broker_thread(release)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._processor.decode_text(token_ids)

    async def _prepare_one(self, key: IterationKey, index: int, row: PromptRow, ordinal: int, sample_count: int
                           ) -> Prompt:
        check_row(row)
        if not row.media:
            return Prompt(row, self._tokenise(row, (), (), index, ordinal, sample_count))
        slab = media_slab(key.run, key.iteration, index, self._tag, validation=key.validation)
        decoded = await self._decoder.decode(row.media, self._limits, self._roots, factor=self._processor.factor)
        with decoded:
            items = tuple(
                MediaItem(item.kind, Placement.contiguous(slab, item.offset_bytes, item.shape, "uint8"),
                          item.fps or 0.0, item.sha256) for item in decoded.items)
            group = self._tokenise(row, decoded.items, items, index, ordinal, sample_count)
            descriptor = decoded.release()

        def deposit() -> None:
            # The thread closes it: it goes on when whoever waits for it is cancelled.
            try:
                self._session.deposit(slab, descriptor, object_class="media", run=key.run, size_bytes=decoded.size_bytes)
            finally:
                os.close(descriptor)

        await self._in_broker_thread(deposit)
        return Prompt(row, group)

    def _tokenise(self, row: PromptRow, decoded: Sequence, items: tuple[MediaItem, ...], index: int, ordinal: int,
                  sample_count: int) -> PreparedGroup:
        tokens = self._processor.tokenize(row.messages, decoded)
        return PreparedGroup(index, array("q", tokens.token_ids.tolist()), items, tokens.prompt_hash(), sample_count,
                             ordinal)

    async def _in_broker_thread(self, call):
        return await asyncio.get_running_loop().run_in_executor(self._broker_thread, call)


def _refusal(refused: dict[int, RollplexError], row_count: int) -> BadInput:
    lines = [f"prompt {index}: {error}" for index, error in sorted(refused.items())[:MOST_EXPLAINED]]
    if len(refused) > MOST_EXPLAINED:
        lines.append(f"{len(refused) - MOST_EXPLAINED} more, see the indices")
    others = f"; the other {row_count - len(refused)} are untouched" if row_count > len(refused) else ""
    first = refused[min(refused)]
    return BadInput(f"{len(refused)} of {row_count} prompts are refused{others}. " + "; ".join(lines),
                    reason=first.reason, indices=",".join(str(index) for index in sorted(refused)))
