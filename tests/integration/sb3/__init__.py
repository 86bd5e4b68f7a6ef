"""The drop-ins for Stable-Baselines3, compared with Stable-Baselines3's own buffers, bit for bit."""
