"""bitsandbytes' warnings about its four-bit kernels, held back until a model needs them.

PEFT imports bitsandbytes for every model, and the import already warns.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("bitsandbytes.backends.cpu.ops")
_held: list[logging.LogRecord] = []


def _hold(record: logging.LogRecord) -> bool:
    _held.append(record)
    return False


def hold_warnings() -> None:
    """Keep the warnings back from now on."""
    LOGGER.addFilter(_hold)


def release_warnings() -> None:
    """Print what was kept back, and keep nothing back any more."""
    LOGGER.removeFilter(_hold)
    while _held:
        LOGGER.handle(_held.pop(0))
