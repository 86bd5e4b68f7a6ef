"""Probe: run a training command until training is about to start, and report what it built.

`launch.probe(command, timeout_s)` runs the command with a startup hook, and returns a `snapshot.Snapshot`.

    launch        starts the command, waits for the report, ends every process       (holdall's process)
    snapshot      the report: dataclasses and their JSON                              (both)
    startup/      the `sitecustomize` module that loads the hook
    hook          installs the triggers, writes the report                            (the command's process)
    import_hook   calls functions right after a module was imported
    triggers      the events that stop the command: add a new one here
    inspection    finds models, buffers, arrays, environments among the live objects; lists the modules that it uses
    measurement   measures a real update and the storage of a few hundred steps, for `holdall plan`
    stored        fills holdall's memories with these steps; the only module of this process that imports holdall

The modules that run in the command's process import only the standard library and what the command has imported itself.
The command may use another Python installation, so they are loaded by their path, as the package `holdall_probe`.
"""
