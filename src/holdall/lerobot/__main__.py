"""LeRobot's learner with holdall's replay buffer: `python -m holdall.lerobot --config_path CONFIG`."""

from holdall.lerobot.learner import run_learner

if __name__ == "__main__":
    run_learner()
