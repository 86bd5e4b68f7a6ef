"""Plan: will a training run fit, what would fit, and what is the cheapest change that makes it fit."""
