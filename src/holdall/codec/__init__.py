"""Lossless codecs for the slices of one field. `Codec` says how slices are encoded; the loops are in C."""
