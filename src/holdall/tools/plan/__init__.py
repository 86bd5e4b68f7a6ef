"""Plan: check whether a training run fits in memory before it starts, what would fit, and what to change.

    config       settings from options and files
    stand_in     a script for a run that settings describe
    planner      probes a command (`holdall.tools.probe`), and makes a Plan of its report
    needs        the arithmetic: parts of the peak, bounds, verdicts
    algorithms   algorithms of Stable-Baselines3 and their defaults
    environments spaces as text and as data, environments by name

`holdall.cli.plan` shows a Plan.
"""
