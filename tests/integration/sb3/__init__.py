"""The Stable-Baselines3 drop-in held to Stable-Baselines3's own buffers, bit for bit."""
