"""What an update takes: tensors without memory against real ones, and the model that they belong to."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("stable_baselines3")

from holdall.errors import ArgumentError
from holdall.tools.plan.environments import run_probe
from holdall.tools.plan.phases import UpdateBytes
from holdall.tools.plan.sb3_model import build_model, fill_without_writing, trace_update
from holdall.tools.plan.spec import ALGORITHMS, Spec

_VECTOR = spaces.Box(-1, 1, (7,), np.float32)
_IMAGE = spaces.Box(0, 255, (3, 36, 40), np.uint8)
_BOTH = spaces.Dict({"image": _IMAGE, "vector": _VECTOR})
_CHOICE, _NUMBERS = spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values())


@pytest.mark.parametrize(
    "spec",
    [
        Spec("dqn", _IMAGE, _CHOICE, batch_size=16),
        Spec("sac", _VECTOR, _NUMBERS, batch_size=32, policy_kwargs={"net_arch": [64, 32], "activation_fn": "Tanh"}),
        Spec("td3", _BOTH, _NUMBERS, batch_size=8),
        Spec("ppo", _BOTH, _CHOICE, batch_size=16, n_steps=16, num_envs=2),
        Spec("a2c", _VECTOR, _NUMBERS, n_steps=5, num_envs=3),
    ],
    ids=lambda spec: spec.algo,
)
def test_weights_gradients_and_optimizer_are_those_of_the_real_model(spec: Spec) -> None:
    traced = trace_update(spec)
    model = build_model(spec.but(num_envs=1), capacity=spec.batch)
    parameters = list(model.policy.parameters()) + ([model.log_ent_coef] if spec.algo == "sac" else [])
    assert traced.weights == pytest.approx(_nbytes(parameters), rel=0.02, abs=4096)
    fill_without_writing(model)
    for _ in range(2):
        model.train() if spec.on_policy else model.train(gradient_steps=1, batch_size=spec.batch)
    optimizers = [value for value in vars(model).values() if hasattr(value, "param_groups")]
    modules = (model.policy, *model.policy.children())
    optimizers += [module.optimizer for module in modules if hasattr(module, "optimizer")]
    unique = {id(optimizer): optimizer for optimizer in optimizers}.values()
    moments = [t for optimizer in unique for state in optimizer.state.values() for t in state.values() if t.dim()]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert traced.settled == pytest.approx(_nbytes([*parameters, *moments, *grads]), rel=0.03, abs=8192)
    assert traced.live > traced.settled


def test_activations_grow_with_the_batch_in_a_straight_line() -> None:
    live = [trace_update(Spec("dqn", _IMAGE, _CHOICE, batch_size=batch)).live for batch in (64, 128, 256)]
    assert live[2] - live[1] == pytest.approx(2 * (live[1] - live[0]), rel=0.02)


@pytest.mark.parametrize("algo", [name for name, known in ALGORITHMS.items() if known.package == "stable_baselines3"])
def test_defaults_are_those_of_the_installed_version(algo: str) -> None:
    import stable_baselines3

    known = ALGORITHMS[algo]
    signature = inspect.signature(getattr(stable_baselines3, known.name)).parameters
    if known.batch_size is not None:
        assert signature["batch_size"].default == known.batch_size
    assert signature["n_steps"].default == known.n_steps
    if not known.on_policy:
        assert signature["buffer_size"].default == 1_000_000


def test_a_class_that_torch_does_not_have_is_refused() -> None:
    spec = Spec("sac", _VECTOR, _NUMBERS, policy_kwargs={"activation_fn": "os.system"})
    with pytest.raises(ArgumentError, match="activation_fn"):
        build_model(spec, capacity=10)


def test_real_updates_stretch_the_process_by_more_than_lives_in_it() -> None:
    answer = run_probe("baseline", spec=Spec("dqn", _IMAGE, _CHOICE, batch_size=128), networks=True)
    traced = UpdateBytes(*answer["traced"]["once"])
    batch, grown, _ = answer["growth"]
    assert batch == 128  # its activations are small: nothing has to be scaled
    assert 0.9 * traced.live < grown < 6 * traced.live + 32 * 2**20
