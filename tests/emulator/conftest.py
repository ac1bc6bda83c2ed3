import emulator
import pytest


@pytest.fixture(scope="session", autouse=True)
def emulated():
    if reason := emulator.unavailable():
        pytest.skip(reason)
