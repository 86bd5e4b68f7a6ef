"""Plan from Python: `holdall.plan.model(model)`; the work is in `holdall.tools.plan`."""

from holdall.tools.plan import model

__all__ = ["model"]
