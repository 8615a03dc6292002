"""Log lines name their part, and other loggers are left alone."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from raymoe.observe.log import setup_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("raymoe")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def test_each_line_names_the_part_that_said_it() -> None:
    out = io.StringIO()
    setup_logging("group g0r1 100%", stream=out)
    logging.getLogger("raymoe.experts").warning("slot %d is empty", 3)
    assert out.getvalue().rstrip().endswith("WARNING [group g0r1 100%] raymoe.experts: slot 3 is empty")


def test_setting_up_again_replaces_the_part() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("one", stream=first)
    setup_logging("two", stream=second)
    logging.getLogger("raymoe").info("hello")
    assert first.getvalue() == "" and second.getvalue().count("[two]") == 1


def test_other_loggers_stay_as_they_are() -> None:
    root = list(logging.getLogger().handlers)
    setup_logging("one", stream=io.StringIO())
    assert logging.getLogger().handlers == root
