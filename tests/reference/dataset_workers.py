"""Functions of DataLoader workers. Spawned processes import them, and cannot import the tests themselves."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

import holdall


def collate_nothing(rows: Any) -> Any:
    """Return the rows of a batch as they are."""
    return rows


def read_and_keep(dataset: holdall.Dataset, answers: Any) -> None:
    """Send batches as a DataLoader worker does, while the process itself keeps and changes some of them."""
    from torch.utils.data import _utils

    worker_dataset: Any = dataset  # torch's annotation asks for its own class.
    _utils.worker._worker_info = _utils.worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=worker_dataset)
    kept = []
    for first in range(0, 60, 3):
        rows = dataset[np.arange(first, first + 40)]
        answers.put(rows)
        answers.put(rows)  # The second one is sent by value, because the memory is used again after the first.
        copied = pickle.loads(pickle.dumps(rows))
        kept.append((rows if first % 2 else {"observation.image": rows["observation.image"][3:9]}, copied))
    answers.put([(dict(rows), copied) for rows, copied in kept])
    answers.close()
    answers.join_thread()
