"""`--all-packages`: a test whose package is missing fails instead of being skipped.

A user's environment may lack one; those that the Makefile makes have them all, so there a skip hides a fault.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-packages", action="store_true", help="a package that is missing is a failure"
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    return _judged(collector.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    return _judged(item.config, (yield))


def _judged(config: pytest.Config, report: Any) -> Any:
    """`importorskip` without a reason of its own says that it could not import.

    A failure that was expected counts as skipped too, and has a traceback for a reason.
    """
    is_skip = report.skipped and isinstance(report.longrepr, tuple)
    if config.getoption("--all-packages") and is_skip:
        *_, reason = report.longrepr
        if "could not import" in reason:
            report.outcome, report.longrepr = "failed", reason
    return report
