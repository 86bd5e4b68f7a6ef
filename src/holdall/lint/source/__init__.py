"""From a file, or a live model, to runs: what can be read without executing anything."""
