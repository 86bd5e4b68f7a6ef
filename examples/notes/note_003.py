"""A process of 20 GB with 53 threads, and the settings that were meant to make it smaller.

`holdall lint` reads this file. It has the mistakes of the note, and is not meant to be run.
"""

import os

import psutil
import torch


def objective(trial, args):
    args.net_dim = trial.suggest_int("net_dim", 512, 1536)
    args.worker_num = 3
    args.thread_num = trial.suggest_int("thread_num", 4, 12)
    torch.set_num_threads(args.thread_num)

    torch.cuda.empty_cache()
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:512"

    for update in range(args.updates):
        train(args, update)
        torch.cuda.empty_cache()
        report()


def report():
    used = sum(process.memory_info().rss for process in psutil.Process().children(recursive=True))
    print(f"RAM: {used / 1024**3:.1f} GB")
