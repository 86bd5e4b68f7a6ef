"""Fuzzing: damaged blocks for the decoder, damaged and forged checkpoints, a soak of whole memories."""
