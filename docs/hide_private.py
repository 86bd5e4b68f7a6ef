"""Extension of Griffe that leaves parameters such as `_tuning` out of the API reference. Users do not pass them."""

from __future__ import annotations

from typing import Any

import griffe


class HidePrivateParameters(griffe.Extension):
    """Remove the parameters whose names begin with an underscore from every signature."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Change the parameters of one function."""
        for parameter in list(func.parameters):
            if parameter.name.startswith("_"):
                del func.parameters[parameter.name]
