"""Plan: check before a training run whether it fits in memory, which sizes would fit, and what to change.

    settings     the table of settings that describe a run
    config       settings from files and texts
    stand_in     the script that is probed if settings describe a run
    planner      probes a command (`holdall.tools.probe`), and makes a Plan from its report
    measured     from the report of a probe to needs
    needs        the arithmetic: parts of the peak, bounds, verdicts
    code         the lines to paste
    algorithms   algorithms of Stable-Baselines3 and their defaults
    environments spaces as text and as data, environments by name

`holdall.cli.plan` shows a Plan.
"""
