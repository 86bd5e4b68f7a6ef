"""Fuzzing: damaged blocks for the decoder, damaged and forged checkpoints, and a soak of whole memories."""
