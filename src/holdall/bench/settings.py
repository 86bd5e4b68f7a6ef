"""What a bench measures: an environment, an algorithm, profiles, seeds, buffers, under one limit.

In:  what was asked for.  Out: settings that are complete, as plain data for a file and for other processes.
Invariant: profiles are shares of the limit; what is scaled down for the shipped environment is said to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holdall.errors import ArgumentError
from holdall.machine import memory_limits
from holdall.plan.answers import PROFILES
from holdall.plan.spec import ALGORITHMS
from holdall.units import parse_bytes

ALGOS = ("sac", "td3", "dqn", "ppo")
BUFFERS = ("sb3", "holdall")


@dataclass(frozen=True, slots=True)
class Shipped:
    """An environment that comes with holdall, and the sizes at which a bench of it takes minutes."""

    env: str
    features: str  # the extractor of its policy
    limit: str
    timesteps: int
    batch_size: int
    threads: int  # more than one wait for each other longer than networks of this size take


SHIPPED = {
    "demo": Shipped(
        "holdall.demo.camera:CameraRover",
        "holdall.demo.eyes:SmallEyes",
        limit="2GiB",
        timesteps=400,
        batch_size=16,
        threads=1,
    )
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that decides what is run; what is left out takes its default."""

    env: str
    algo: str
    profiles: tuple[str, ...]
    timesteps: int
    seeds: int
    buffers: tuple[str, ...]
    limit_bytes: int
    batch_size: int
    fills: bool = True
    limit_said: str = ""  # where the limit comes from
    env_id: str = ""
    features: str = ""
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0  # of torch; 0: as many as it takes by itself

    @property
    def on_policy(self) -> bool:
        """Whether experience is used once and then dropped."""
        return ALGORITHMS[self.algo].on_policy

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"policy_kwargs": dict(self.policy_kwargs)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """Make settings of what `as_dict` returned."""
        return cls(**{**data, "profiles": tuple(data["profiles"]), "buffers": tuple(data["buffers"])})


def settings_of(
    env: str,
    algo: str,
    profiles: list[str],
    timesteps: int | None,
    seeds: int,
    buffers: list[str],
    limit: str | None,
    *,
    fills: bool = True,
    threads: int | None = None,
) -> Settings:
    """Check what was asked for, and complete it."""
    names = list(PROFILES) if profiles == ["all"] else profiles
    _require("algo", [algo], ALGOS)
    _require("profiles", names, tuple(PROFILES))
    _require("buffers", buffers, BUFFERS)
    shipped = SHIPPED.get(env)
    limit_bytes, said = _limit(limit, shipped)
    return Settings(
        env=env,
        algo=algo,
        profiles=tuple(dict.fromkeys(names)),
        timesteps=timesteps or (shipped.timesteps if shipped else 5_000),
        seeds=seeds,
        buffers=tuple(dict.fromkeys(buffers)),
        limit_bytes=limit_bytes,
        batch_size=shipped.batch_size if shipped else ALGORITHMS[algo].batch_size or 0,
        fills=fills,
        limit_said=said,
        env_id=shipped.env if shipped else env,
        features=shipped.features if shipped else "",
        policy_kwargs={"net_arch": [64, 64]} if shipped else {},
        threads=threads if threads is not None else shipped.threads if shipped else 0,
    )


def _limit(limit: str | None, shipped: Shipped | None) -> tuple[int, str]:
    here = memory_limits()[0]
    if limit == "machine" or (limit is None and shipped is None):
        return here.free_bytes, here.name
    if limit is None and shipped is not None:
        return parse_bytes(shipped.limit), "scaled down so that this takes minutes; --limit machine for all there is"
    given = parse_bytes(limit, "limit")
    if given > here.free_bytes:
        raise ArgumentError(
            f"limit ({limit}) is more than the {here.free_bytes} bytes that are free ({here.name}); lower it, or write "
            "--limit machine"
        )
    return given, "--limit"


def _require(name: str, values: list[str], known: tuple[str, ...]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        raise ArgumentError(f"{name} ({', '.join(unknown) or None}) must be among {', '.join(known)}")
