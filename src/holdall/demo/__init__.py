"""The demonstration: will it fit, train, watch, checkpoint, kill, resume, and compare with Stable-Baselines3's buffer.

camera.py is the task, eyes.py its network, training.py one training in a process of its own; fitting.py plans, live.py
reads what the watch records, story.py runs it all, comparison.py sets the two trainings beside each other.
"""
