"""Dictionaries on their way between writers, shards and learners.

In:  a dictionary.  Out: a checked record that names it by its content; and back.
"""

from __future__ import annotations

from holdall.errors import DamageError
from holdall.experience.disk.record import pack
from holdall.experience.disk.slice_record import dictionary_name
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.block import open_record, read_part

DICTIONARY = "dictionary"


def pack_dictionary(dictionary: Dictionary) -> bytes:
    """Return a dictionary as a record."""
    name = dictionary_name(dictionary)
    return b"".join(pack(DICTIONARY, {"name": name}, {"content": dictionary.content}, frozenset()))


def unpack_dictionary(payload: bytes) -> Dictionary:
    """Read a dictionary that was received."""
    record = open_record(payload, DICTIONARY)
    dictionary = Dictionary(read_part(record, payload, "content"))
    if dictionary_name(dictionary) != record.head.get("name"):
        raise DamageError("a dictionary was received that is not what its name says; it is not used")
    return dictionary
