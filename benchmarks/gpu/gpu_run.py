"""The description of a run on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from results import describe_run


def describe_gpu_run(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the description of this run, with the name of the GPU and the versions of torch and CUDA."""
    run = describe_run(settings)
    run["machine"]["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    run["versions"] |= {"torch": torch.__version__}
    return run
