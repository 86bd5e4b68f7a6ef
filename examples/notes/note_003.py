"""A process of 20 GB with 53 threads, and what was set to make it smaller.

For `holdall lint` to read. The mistakes are the note's and are left in; it is not meant to be run.
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
