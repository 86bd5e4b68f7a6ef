"""Sealing: how slices are compressed in the background, and which codec a field gets."""
