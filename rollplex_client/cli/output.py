"""What a command prints: a result for people or as JSON, an error as one line and its reason."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rollplex.core.errors import BadInput, RollplexError

if TYPE_CHECKING:
    from rich.console import Console

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130


class Output:
    """Results go to stdout, progress and errors to stderr."""

    def __init__(self, *, json: bool = False, debug: bool = False) -> None:
        self.json, self.debug = json, debug

    @cached_property
    def console(self) -> Console:
        """For people, on stderr: progress must not end up in a pipe."""
        from rich.console import Console

        return Console(stderr=True, highlight=False)

    def result(self, data: Mapping[str, Any], *renderables: Any) -> None:
        """`data` as JSON with --json, else the renderables (or `key: value` lines)."""
        if self.json:
            print(json.dumps(data, default=str))
            return
        from rich.console import Console

        screen = Console(highlight=False)
        for item in renderables or [f"{key}: {value}" for key, value in data.items()]:
            screen.print(item, soft_wrap=isinstance(item, str))

    def note(self, message: str) -> None:
        """A line of progress for people; nothing with --json."""
        if not self.json:
            self.console.print(message, markup=False, soft_wrap=True)

    def error(self, error: RollplexError) -> None:
        print(f"error: {error} [{error.reason}]", file=sys.stderr)
        if self.json:
            print(json.dumps({"error": {"kind": type(error).__name__, "reason": error.reason, "message": str(error),
                                        "metadata": error.metadata}}))


def report_failures(output: Output, command: Callable[[], int | None]) -> int:
    """Runs a command; every error becomes one line and a status, with a traceback only on request."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return command() or 0
    except RollplexError as error:
        if output.debug:
            traceback.print_exc()
        output.error(error)
        return BAD_USAGE if isinstance(error, BadInput) else FAILED
    except KeyboardInterrupt:
        output.error(RollplexError("interrupted", reason="INTERRUPTED"))
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    except Exception as error:  # noqa: BLE001  the command's last resort: it is shown, and --debug shows where
        if output.debug:
            traceback.print_exc()
        kind = "OS_ERROR" if isinstance(error, OSError) else "INTERNAL"
        output.error(RollplexError(f"{type(error).__name__}: {error}; --debug shows where", reason=kind))
        return FAILED
