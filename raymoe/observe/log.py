"""Logging of every process of a server: one line per event, the part's name in each."""

from __future__ import annotations

import logging
import sys
from typing import TextIO


def setup_logging(part: str, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send raymoe's log records of this process to `stream` (default stderr), each naming `part`.

    Only the `raymoe` logger is touched: Ray and Serve keep theirs. Calling it again replaces the part.
    """
    logger = logging.getLogger("raymoe")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    part = part.replace("%", "%%")
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{part}] %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
