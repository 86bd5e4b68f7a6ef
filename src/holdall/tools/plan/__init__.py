"""Plan: check whether a training run fits in memory before it starts, what would fit, and what to change.

    config       settings from options and files
    stand_in     a script for a run that settings describe
    planner      probes a command, and makes a Plan of what was found (`holdall.tools.probe`)
    needs        the arithmetic: parts of the peak, bounds, verdicts
    spec         algorithms of Stable-Baselines3, and checks of a described run
    environments spaces as text and as data, environments by their name

`holdall.cli.plan` shows a Plan.
"""
