"""torchft, asked for before it is imported."""

from __future__ import annotations

import logging
import os

from thinwire.installed import check_installed


class OneLine(logging.Filter):
    """Without the traceback: a connection that could not be made is nothing unusual where members come and go. Nothing
    is said of NCCL's recorder, which no group here has, in every quorum."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        return "NCCL flight recorder" not in record.getMessage()


ONE_LINE = OneLine()


def require_torchft() -> None:
    """UsageError where it is not installed. What it logs: warnings, in one line each; RUST_LOG may say more."""
    check_installed("elastic training", ("torchft",), "elastic")
    os.environ.setdefault("RUST_LOG", "warn")
    logging.getLogger("torchft.manager").addFilter(ONE_LINE)
