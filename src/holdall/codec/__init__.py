"""Lossless codecs for the slices of one field. `Codec` says how slices are encoded. The loops are in C."""
