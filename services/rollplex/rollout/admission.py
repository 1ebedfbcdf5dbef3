"""Which waiting groups join the decode batch: continuous batching by whole groups, in request order."""

from __future__ import annotations

from collections.abc import Sequence


def admitted_count(waiting_rows: Sequence[int], busy_rows: int, max_rows: int, *, deterministic: bool) -> int:
    """How many groups from the front may start now.

    `waiting_rows`: samples of each waiting group. `busy_rows`: rows of groups that still decode. A step costs by the
    number of batches more than by their rows, so few free rows are not worth a batch: groups wait until half are free.
    """
    if deterministic:
        return 1 if waiting_rows and not busy_rows else 0
    count, rows = 0, busy_rows
    for wanted in waiting_rows:
        if rows + wanted > max_rows:
            break
        count, rows = count + 1, rows + wanted
    if not busy_rows:
        return max(count, 1 if waiting_rows else 0)
    enough = 2 * (max_rows - busy_rows) >= max_rows or count == len(waiting_rows)
    return count if enough else 0
