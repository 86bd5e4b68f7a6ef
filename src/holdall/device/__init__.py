"""Memories whose transitions live on a torch device.

    store       DeviceStore: the counterpart of `holdall.store.Store`
    tensors     all fields, for one choice of windows
    fields      one field: rows, or observations whose slices are stored once
    samplers    draws on the device
    arguments   checks of tensors that are added
    rollout     DeviceRollout: the counterpart for on-policy memories

Only `store` can be imported without torch.
"""
