"""The parts of holdall that are written in C."""

class Handle:
    """A context or a dictionary of Zstandard or LZ4, which is freed with this object."""

    @property
    def address(self) -> int:
        """The address of the context or dictionary, for structs that C reads."""

def new_decompressor() -> Handle:
    """Return a context of Zstandard that decompresses. Only one thread at a time may use it."""

def new_decompression_dictionary(content: bytes, /) -> Handle:
    """Return a dictionary to decompress with. Raise ValueError if `content` is no dictionary of Zstandard."""

def new_compressor(level: int, shortest_match: int, table_log: int, dictionary: bytes | None, /) -> Handle:
    """Return a context of Zstandard that compresses. Only one thread at a time may use it.

    Args:
        shortest_match: Bytes of the shortest match that is looked for. 0: the default of the level.
        table_log: Binary logarithm of the entries of the tables that matches are found with. 0: the default.
        dictionary: Content of a dictionary, or None.
    """

def new_lz4_stream() -> Handle:
    """Return a state of LZ4 that compresses against other bytes. Only one thread at a time may use it."""
