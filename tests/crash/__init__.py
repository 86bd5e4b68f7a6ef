"""Crashes: power cuts on a simulated disk, real kills, disks that fail, bytes that rot."""
