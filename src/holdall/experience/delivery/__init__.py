"""Batches: from what was drawn to tensors on the device that was asked for."""
