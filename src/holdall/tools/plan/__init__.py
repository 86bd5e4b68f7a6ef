"""Plan: check whether a training run fits in memory before it starts, what would fit, and what to change.

config (options, a file, a live model) -> spec (a run and its buffer) and environments -> sb3_model and
measure_memory (what is measured, in throwaway processes) -> phases (memory by phase, checks against limits) -> planner
(the Plan, and what would fit). `holdall.cli.plan` shows it.

Nothing is loaded here before it is used: lint needs only the layouts of buffers, and what a process has loaded counts
among what it measures.
"""
