"""The folder that a probed command finds on its PYTHONPATH."""
