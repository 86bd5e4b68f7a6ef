"""Batches of shards as arrays of JAX. tests/unit/delivery/test_jax.py runs this file in a process of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="needs the extra jax")

from holdall.delivery import new_delivery

from .test_answers import SCHEMA, require_exact


def test_jax_gets_the_transitions_that_were_added() -> None:
    require_exact(new_delivery(SCHEMA, "jax"))
