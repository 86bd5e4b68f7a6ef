"""Rollouts: frames stored once, advantages in place, minibatches without a flattened copy."""
