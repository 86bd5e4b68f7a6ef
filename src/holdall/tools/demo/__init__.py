"""The demo: plan, train, watch, checkpoint, kill, resume, and compare with Stable-Baselines3's buffer.

camera.py is the environment, training.py one training in a process of its own; `holdall.cli.demo` runs everything.
Nothing is imported here: plan measures what the environment alone takes.
"""
