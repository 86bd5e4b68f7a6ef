"""Memories whose transitions are stored on a torch device.

    store           DeviceStore: the counterpart of `holdall.store.Store`
    ring            the newest ticks, and the room for the next ones
    tensors         all fields, for one choice of windows
    fields          one field: rows, or observations whose slices are stored once
    graph           a CUDA graph that finds places for the observations of a tick
    samplers        draws on the device
    batch_source    batches of a DeviceStore
    arguments       checks of tensors that are added
    rollout         DeviceRollout: the counterpart for on-policy memories

`store` and `batch_source` can be imported without torch.
"""
