"""The rules of a blob store, as a test class."""

from __future__ import annotations

import os
import threading
from functools import partial

from holdall.checkpoint import BlobStore
from holdall.errors import ArgumentError, BlobMissingError, CheckpointError, DamageError, FencedError, LockedError
from holdall.testing.rules import require, require_raises

_THREADS = 6
_CREATIONS = 12
_REPLACEMENTS = 30
_BAD_NAMES = ("", "/a", "a/", "a//b", "../a", "a/../b", ".hidden", "-a", "a b", "a\\b", "a\x00", "ä", "a" * 300)


class BlobStoreContract:
    """The rules of `holdall.checkpoint.BlobStore`. Override `open_store` to test a store of your own.

    A test calls `open_store` several times, to stand for several processes that use the same place.
    """

    def open_store(self) -> BlobStore:
        """Return a store. All stores of one test have the same place, which is empty when the test starts."""
        raise NotImplementedError

    def test_a_new_place_is_empty(self) -> None:
        """Listing such a place, and deleting a blob from it, is not an error."""
        store = self.open_store()
        require(list(store.list("")) == [], "a new store has blobs")
        require_raises(BlobMissingError, lambda: store.read("segments/a", 0, 1))
        store.delete("segments/a")

    def test_created_blobs_are_read_by_every_store(self) -> None:
        """Any content comes back, whole and in parts: empty, one byte, and several megabytes."""
        store = self.open_store()
        for number, content in enumerate((b"", b"x", os.urandom(1000), os.urandom(5 * 2**20 + 3))):
            name = f"segments/{number:04d}.seg"
            require(store.create(name, memoryview(content)), f"{name} was not created")
            other = self.open_store()
            require(other.read(name, 0, len(content)) == content, f"{name} has another content")
            for start, length in ((0, 1), (len(content) // 2, len(content) // 3), (len(content) - 1, 1)):
                if start >= 0 and start + length <= len(content):
                    found = other.read(name, start, length)
                    require(found == content[start : start + length], f"bytes {start}+{length} of {name} differ")

    def test_reading_past_the_end_is_damage(self) -> None:
        """A blob that is shorter than requested is never returned in part."""
        store = self.open_store()
        store.create("a", b"12345")
        for start, length in ((0, 6), (4, 2), (5, 1), (100, 1)):
            require_raises(DamageError, partial(store.read, "a", start, length))

    def test_a_blob_is_created_once(self) -> None:
        """Creating a blob with another content changes nothing. Creating it with the same content again succeeds."""
        store = self.open_store()
        require(store.create("manifests/1", b"first"), "the blob was not created")
        require(not self.open_store().create("manifests/1", b"other"), "an existing blob was created again")
        require(not self.open_store().create("manifests/1", b"first, and more"), "an existing blob was created again")
        require(self.open_store().create("manifests/1", b"first"), "a repeated attempt was not recognised")
        require(store.read("manifests/1", 0, 5) == b"first", "an existing blob was changed")
        require(dict(store.list("")) == {"manifests/1": 5}, "an attempt left something")

    def test_one_of_several_creators_wins(self) -> None:
        """Exactly one of several threads creates a name, and its content is the one that is read."""
        for attempt in range(5):
            name = f"race/{attempt}"
            results = self._race(name)
            winners = [number for number, is_created in results.items() if is_created]
            require(len(results) == _THREADS, "a creator failed")
            require(len(winners) == 1, f"{len(winners)} of {_THREADS} created {name}")
            require(self.open_store().read(name, 0, 1) == b"%d" % winners[0], "the content is not the winner's")

    def test_a_reader_sees_all_of_a_blob_or_nothing(self) -> None:
        """A blob that is listed while others are created has all of its bytes, and they can be read."""
        content = os.urandom(2**20)
        is_over = threading.Event()
        problems: list[str] = []

        def read() -> None:
            store = self.open_store()
            while not is_over.is_set() and not problems:
                for name, nbytes in store.list("parts/"):
                    if nbytes != len(content) or store.read(name, 0, nbytes) != content:
                        problems.append(f"{name} is listed with {nbytes} bytes before it is complete")

        reader = threading.Thread(target=read)
        reader.start()
        try:
            store = self.open_store()
            for number in range(_CREATIONS):
                store.create(f"parts/{number}", content)
        finally:
            is_over.set()
            reader.join()
        require(not problems, "; ".join(problems))

    def test_list_shows_names_and_sizes(self) -> None:
        """`list` yields all blobs whose names start with a prefix, at any depth."""
        store = self.open_store()
        sizes = {"a": 1, "ab": 2, "b/a": 3, "b/ab": 4, "b/c/d.seg": 5, "bc/e": 6}
        for name, nbytes in sizes.items():
            store.create(name, bytes(nbytes))
        for prefix in ("", "a", "b", "b/", "b/a", "b/c/", "bc/", "x", "x/y"):
            expected = {name: nbytes for name, nbytes in sizes.items() if name.startswith(prefix)}
            found = list(self.open_store().list(prefix))
            require(dict(found) == expected, f"list({prefix!r}) gives {found}")
            require(len(found) == len(expected), f"list({prefix!r}) gives a name twice")

    def test_a_blob_or_its_successor_is_listed(self) -> None:
        """A listing never misses both a blob that is deleted meanwhile and one that was created before the deletion."""
        store = self.open_store()
        store.create("manifests/0", b"0")
        is_over = threading.Event()
        empty_listings: list[int] = []

        def read() -> None:
            reader = self.open_store()
            while not is_over.is_set():
                if not list(reader.list("manifests/")):
                    empty_listings.append(1)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for number in range(_REPLACEMENTS):
                store.create(f"manifests/{number + 1}", b"%d" % number)
                store.delete(f"manifests/{number}")
        finally:
            is_over.set()
            thread.join()
        require(not empty_listings, f"{len(empty_listings)} listings show neither a blob nor its successor")

    def test_deleted_blobs_are_gone(self) -> None:
        """A deleted name can be created again. Deleting a blob that does not exist has no effect."""
        store = self.open_store()
        store.create("b/a", b"1")
        store.create("b/c", b"2")
        self.open_store().delete("b/a")
        self.open_store().delete("b/a")
        require_raises(BlobMissingError, lambda: store.read("b/a", 0, 1))
        require(dict(store.list("")) == {"b/c": 1}, "another blob was deleted")
        require(store.create("b/a", b"again"), "a deleted name cannot be created")

    def test_names_lead_nowhere_else(self) -> None:
        """Every operation refuses a name that the protocol does not allow."""
        store = self.open_store()
        for name in _BAD_NAMES:
            require_raises(ArgumentError, partial(store.create, name, b"x"))
            require_raises(ArgumentError, partial(store.read, name, 0, 1))
            require_raises(ArgumentError, partial(store.delete, name))
        require(list(store.list("")) == [], "a refused name was created")

    def test_one_writer_holds_the_lock(self) -> None:
        """The error of a second writer names the owner. A released lock can be taken. The lock is not a blob."""
        store = self.open_store()
        lease = store.lock("the first writer")
        lease.check()
        error = require_raises(LockedError, lambda: self.open_store().lock("the second writer"))
        require("the first writer" in str(error), f"{error} does not name the owner")
        require(list(store.list("")) == [], "the lock is listed as a blob")
        lease.release()
        lease.release()
        require_raises(FencedError, lease.check)
        second = self.open_store().lock("the second writer")
        second.check()
        second.release()

    def test_blobs_need_no_lock(self) -> None:
        """Blobs can be created, read and deleted while another store has the lock."""
        lease = self.open_store().lock("a writer")
        store = self.open_store()
        require(store.create("a", b"1"), "the blob was not created")
        require(store.read("a", 0, 1) == b"1", "the blob has another content")
        store.delete("a")
        lease.check()
        lease.release()

    def test_a_cancelled_store_creates_nothing(self) -> None:
        """A call of a cancelled store raises CheckpointError, and leaves no part of a blob."""
        store = self.open_store()
        store.waiting.cancel()
        require_raises(CheckpointError, lambda: store.create("a", os.urandom(2**20)))
        require(list(self.open_store().list("")) == [], "a cancelled store has created a blob")
        store.waiting.begin()
        require(store.create("a", b"1"), "the store cannot be used again")

    def _race(self, name: str) -> dict[int, bool]:
        """Create `name` in several threads at once. Return the results of `create` by thread number."""
        results: dict[int, bool] = {}
        gate = threading.Barrier(_THREADS)

        def create(number: int) -> None:
            store = self.open_store()
            gate.wait()
            results[number] = store.create(name, b"%d" % number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results
