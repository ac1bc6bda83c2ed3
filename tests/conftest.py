"""Tiers: each folder of tests needs something of the machine. What it lacks is skipped, and the report says so."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

# Examples are derandomised, so that a failure in CI is the same failure at the desk; -m full looks further.
settings.register_profile(
    "pyflash", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pyflash")


def _no_compiler() -> str | None:
    return None if shutil.which("g++") else "no C++ compiler (g++) on the path"


def _no_nvrtc() -> str | None:
    from pyflash import compile
    from pyflash.errors import CompileError

    try:
        compile.nvrtc_version()
    except CompileError as error:
        return str(error).partition("\n")[0]
    return None


def _no_gpu() -> str | None:
    try:
        from cupy.cuda import runtime

        count = runtime.getDeviceCount()
    except Exception as error:  # an ImportError without CuPy, CuPy's own type without a driver
        return f"no GPU: {error}".partition("\n")[0]
    return (None if count else "no GPU") or _no_nvrtc()


TIERS = {"nogpu": lambda: None, "emulator": _no_compiler, "compile": _no_nvrtc, "gpu": _no_gpu}
missing = {tier: cache(probe) for tier, probe in TIERS.items()}


def _tier(item: pytest.Item) -> str | None:
    parents = item.path.relative_to(TESTS).parts if item.path.is_relative_to(TESTS) else ()
    return parents[0] if parents and parents[0] in TIERS else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nvrtc",
        action="append",
        default=[],
        metavar="LIBRARY",
        help="compile tier: also compile with this libnvrtc.so (repeatable)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = _tier(item)
        if tier and (reason := missing[tier]()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """A tier that is skipped is one line of the summary."""
    report = yield
    tier = _tier(item)
    if report.skipped and tier and (reason := missing[tier]()):
        report.longrepr = (f"tests/{tier}", None, reason)
    return report


def pytest_terminal_summary(terminalreporter) -> None:
    ran: dict[str, int] = dict.fromkeys(TIERS, 0)
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            parts = Path(report.nodeid.partition("::")[0]).parts
            tier = next((part for part in parts if part in TIERS), None)
            if tier:
                ran[tier] += 1
    terminalreporter.section("tiers")
    for tier, count in ran.items():
        reason = missing[tier]()
        terminalreporter.write_line(f"{tier:9} {f'skipped: {reason}' if reason else f'{count} ran'}")
