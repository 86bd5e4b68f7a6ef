"""The demonstration: train once with Stable-Baselines3's buffer, once with holdall's, and compare.

camera.py is the task, training.py one training in a process of its own, comparison.py the two beside each other.
"""
