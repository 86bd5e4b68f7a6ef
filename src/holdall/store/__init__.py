"""Storage of transitions: raw, compressed, or on disk."""
