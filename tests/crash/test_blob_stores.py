"""Every blob store of holdall passes the contract of blob stores."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdall.checkpoint import BlobStore, open_blobs
from holdall.checkpoint.directory_blobs import DirectoryBlobs
from holdall.testing import BlobStoreContract

from .servers import MissingServerError, Weed, run_azurite, run_google_emulator
from .simulated import ROOT, SimulatedDisk


class TestDirectory(BlobStoreContract):
    """A directory of this machine."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.place = tmp_path / "runs" / "dog"

    def open_store(self) -> BlobStore:
        return open_blobs(self.place)


class TestSimulatedDisk(BlobStoreContract):
    """The simulated disk of the power cuts."""

    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self.disk = SimulatedDisk()

    def open_store(self) -> BlobStore:
        return DirectoryBlobs(ROOT / "runs" / "dog", self.disk)


class TestS3(BlobStoreContract):
    """SeaweedFS, which checks signatures and conditions."""

    @pytest.fixture(autouse=True)
    def _place(self, weed: Weed) -> None:
        open_blobs("s3://runs/first").create("a", b"1")  # The first object creates the bucket.
        self.place = f"s3://runs/{secrets.token_hex(4)}"

    def open_store(self) -> BlobStore:
        from holdall.checkpoint.object_blobs import ObjectBlobs

        return ObjectBlobs(self.place, lease_s=2.0)


@contextlib.contextmanager
def _set_environment(variables: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setitem(os.environ, name, value)
        yield


@pytest.mark.skipif(sys.platform == "win32", reason="its lock needs POSIX")
class TestZip(BlobStoreContract):
    """The example of docs/extending.md."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "run.zip"

    def open_store(self) -> BlobStore:
        from .zip_blobs import ZipBlobs

        return ZipBlobs(self.path)


@pytest.mark.nightly
class TestAzure(TestS3):
    """Azurite."""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> Iterator[None]:
        pytest.importorskip("obstore")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_set_environment(stack.enter_context(run_azurite(tmp_path, "runs"))))
            except MissingServerError as error:
                pytest.skip(str(error))
            self.place = f"az://runs/{secrets.token_hex(4)}"
            yield


@pytest.mark.nightly
class TestGoogle(TestS3):
    """moto, with Google's conditions in front of it."""

    @pytest.fixture(autouse=True)
    def _place(self) -> Iterator[None]:
        pytest.importorskip("obstore")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_set_environment(stack.enter_context(run_google_emulator("runs"))))
            except MissingServerError as error:
                pytest.skip(str(error))
            self.place = f"gs://runs/{secrets.token_hex(4)}"
            yield
