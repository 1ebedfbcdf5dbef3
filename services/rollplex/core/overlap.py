"""The paper's equation 1: what running prefixes beside decode should save."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlapEstimate:
    """Seconds. `decode_s` and `prefix_s` stand alone, as a serial iteration of the same lengths has them."""

    decode_s: float
    prefix_s: float
    post_s: float
    decode_slowdown_s: float = 0.0
    prefix_slowdown_s: float = 0.0

    @property
    def serial_s(self) -> float:
        return self.decode_s + self.prefix_s + self.post_s

    @property
    def window_s(self) -> float:
        """max(T_D + dD, T_P + dP): the overlapped part."""
        return max(self.decode_s + self.decode_slowdown_s, self.prefix_s + self.prefix_slowdown_s)

    @property
    def overlap_s(self) -> float:
        """T = max(T_D + dD, T_P + dP) + T_post (arXiv 2608.14498, eq. 1, with a slowdown of the prefix too)."""
        return self.window_s + self.post_s
