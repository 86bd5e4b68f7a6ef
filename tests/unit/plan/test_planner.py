"""Plans of the runs that a probe finds: every recommendation fits, and the parts of a plan agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdall.machine import Limit
from holdall.tools.plan.measured import PlanError
from holdall.tools.plan.needs import FitVerdict, HoldallUse
from holdall.tools.plan.planner import change_needs, find_change, plan_snapshot
from holdall.tools.probe.snapshot import FoundArray, FoundBuffer, MeasuredUpdate, Snapshot
from holdall.units import parse_bytes

from .runs import GIB, MIB, NEEDS, REPLAY, STORED, limit_memory, make_memory, make_snapshot


def test_a_run_that_follows_the_advice_is_planned_as_fitting() -> None:
    limits = limit_memory(3 * GIB)
    plan = plan_snapshot(make_snapshot(), None, limits)
    assert plan.verdict is FitVerdict.DOES_NOT_FIT
    assert plan.change is not None
    assert "holdall" in plan.change.title
    assert "replay_buffer_class=ReplayBuffer" in plan.code
    memory = make_memory("model.replay_buffer", "holdall.sb3.replay.ReplayBuffer", 400_000)
    followed = plan_snapshot(make_snapshot(buffers=(), memories=(memory,)), None, limits)
    assert followed.verdict is FitVerdict.FITS
    assert followed.needs.holdall == HoldallUse()
    assert followed.needs.experience.row_bytes == 2 * 3 * 84 * 84 + 8 * 4 + 3 * 4


def test_a_budget_with_a_disk_tier_is_suggested_where_compression_is_not_enough() -> None:
    limits = limit_memory(1300 * MIB)
    plan = plan_snapshot(make_snapshot(), None, limits)
    assert plan.change is not None
    assert plan.change.needs.holdall is not None
    assert plan.change.needs.holdall.budget_bytes is not None
    budget = plan.code.partition('"budget": "')[2].partition('"')[0]
    assert parse_bytes(budget, "budget") <= 1300 * MIB
    memory = make_memory(
        "model.replay_buffer", "holdall.sb3.ReplayBuffer", 400_000, budget=budget, prefer="memory", spill_dir="disk"
    )
    assert plan_snapshot(make_snapshot(buffers=(), memories=(memory,)), None, limits).verdict is FitVerdict.FITS


def test_a_smaller_capacity_is_suggested_if_nothing_else_helps() -> None:
    needs = replace(NEEDS, stored=None)
    change = find_change(make_snapshot(stored=None), needs, limit_memory(8 * GIB))
    assert change is not None
    assert "capacity" in change.title
    assert change.needs.experience.size < 400_000


@pytest.mark.parametrize("has_images", [True, False])
def test_an_upgrade_is_suggested_only_where_it_makes_rollouts_smaller(has_images: bool) -> None:
    """Vectors are float32 in every version. A rollout of vectors was planned with a quarter of its size."""
    snapshot = make_snapshot(stored=None, versions={"stable_baselines3": "2.6.0"})
    if not has_images:
        vector = {"kind": "box", "shape": [21_168], "dtype": "float32", "low": None, "high": None}
        snapshot = replace(snapshot, models=(replace(snapshot.models[0], observation_space=vector),))
    rollout = replace(REPLAY, rows=100_000, row_bytes=4 * 21_168 + 56, is_rollout=True)
    change = find_change(snapshot, replace(NEEDS, experience=rollout, stored=None), limit_memory(4 * GIB))
    assert change is not None
    assert (change.title == "upgrade Stable-Baselines3") == has_images


@pytest.mark.parametrize("name", ["capacity", "buffer_size"])
def test_a_change_is_accepted_under_every_name_of_its_setting(name: str) -> None:
    assert change_needs(NEEDS, name, 100).experience.rows == 100


def test_an_update_grows_with_the_batch() -> None:
    assert change_needs(NEEDS, "batch_size", 512).need_bytes() == NEEDS.need_bytes() + 100 * MIB


@pytest.mark.parametrize("gpu_bytes", [0, 2 * GIB])
def test_a_note_says_with_which_batch_the_gpu_was_measured(gpu_bytes: int) -> None:
    """The GPU's need is not scaled to other batches."""
    update = MeasuredUpdate(256, 100 * MIB, 50 * MIB, gpu_bytes, gpu_bytes)
    plan = plan_snapshot(make_snapshot(update=update), {"batch_size": 512}, limit_memory(24 * GIB))
    assert plan.needs.gpu_reserved_bytes == gpu_bytes
    assert any("The GPU's need was measured with batches of 256" in note for note in plan.notes) == bool(gpu_bytes)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("n_steps", 5, "Set capacity or buffer_size instead"),
        ("learning_rate", 5, "learning_rate is unknown"),
        ("policy", 5, "policy is unknown"),
        ("n_envs", 0, r"n_envs \(0\) must be at least 1"),
    ],
)
def test_a_change_that_does_not_apply_is_refused(name: str, value: int, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        change_needs(NEEDS, name, value)


@pytest.mark.parametrize(
    ("snapshot", "named"),
    [
        (Snapshot("the first step", "optimizer"), "no buffer"),
        (Snapshot("the timeout of 3 s", "timeout"), "larger --timeout"),
        (Snapshot("error", "error", error="Traceback\nValueError: no rom"), "ValueError: no rom"),
    ],
    ids=["no buffer", "timeout", "error"],
)
def test_a_command_without_a_buffer_is_refused_with_the_reason(snapshot: Snapshot, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        plan_snapshot(snapshot, None, limit_memory(GIB))


def test_verdict_table_largest_size_and_change_agree_when_one_array_is_too_large() -> None:
    limits = replace(limit_memory(24 * GIB), mapping_bytes=24 * GIB)
    model = replace(make_snapshot().models[0], total_timesteps=100_000)
    snapshot = make_snapshot(models=(model,))
    plan = plan_snapshot(snapshot, {"buffer_size": 3_000_000}, limits)
    assert {check.what: check.verdict for check in plan.checks} == {
        "memory": FitVerdict.FITS,
        "largest array": FitVerdict.DOES_NOT_FIT,
    }
    assert plan.verdict is FitVerdict.DOES_NOT_FIT
    assert plan.table[0].size == 3_000_000
    assert plan.table[0].plain_verdict is FitVerdict.DOES_NOT_FIT
    largest = plan.largest["capacity with SB3's buffer"]
    assert largest == 24 * GIB // 42_628
    assert all((row.plain_verdict is FitVerdict.FITS) == (row.size <= largest) for row in plan.table)
    # The run ends after 100,000 steps, so a smaller buffer loses nothing.
    assert plan.change is not None
    assert plan.change.title == "a capacity of 100,000"
    assert "buffer_size=100_000" in plan.code
    assert plan_snapshot(snapshot, {"buffer_size": 100_000}, limits).verdict is FitVerdict.FITS


def test_a_failing_check_of_the_disk_counts_in_the_table_too() -> None:
    memory = make_memory(
        "memory", "holdall.memory.ReplayMemory", 4_000_000, budget="256MiB", prefer="memory", spill_dir="disk"
    )
    limits = replace(limit_memory(8 * GIB), disk=Limit("disk", GIB, GIB))
    plan = plan_snapshot(make_snapshot(models=(), buffers=(), memories=(memory,)), None, limits)
    assert plan.verdict is plan.table[0].holdall_verdict is FitVerdict.DOES_NOT_FIT
    assert plan.change is not None


def test_a_loop_without_a_model_is_planned_for_its_largest_memory_of_holdall() -> None:
    training, evaluation = (
        make_memory(name, "holdall.memory.ReplayMemory", capacity, budget="1GiB", transitions=10, plain_bytes=1000)
        for name, capacity in (("memory", 100_000), ("evaluation", 1_000))
    )
    array = FoundArray("features", (3_000_000,), "float64", 24_000_000, resident_bytes=24_000_000)
    features = FoundBuffer("features", "", "arrays", 24_000_000, 3_000_000, 1, 24_000_000, 0, (array,))
    facts = {"models": (), "buffers": (features,), "memories": (evaluation, training), "probe_bytes": 50 * MIB}
    plan = plan_snapshot(make_snapshot(**facts), None, limit_memory(8 * GIB))
    assert plan.needs.experience.name == "memory"
    parts = {part.name: part.nbytes for part in plan.needs.parts()}
    assert parts["features (arrays)"] == 24_000_000
    assert 0 < parts["evaluation (holdall)"] < parts["replay buffer (holdall)"]
    assert parts["interpreter, libraries, environments, weights"] == 300 * MIB - 50 * MIB - 24_000_000


@pytest.mark.parametrize(
    ("class_name", "kind", "words"),
    [("deque", "deque", "this deque"), ("", "arrays", "these arrays"), ("train.Replay", "arrays", "this Replay")],
)
def test_a_buffer_without_a_library_is_named_by_what_it_is(class_name: str, kind: str, words: str) -> None:
    arrays = () if kind == "deque" else (FoundArray("obs", (1_000, 30_000), "uint8", 30_000_000),)
    buffer = FoundBuffer("buffer.data", class_name, kind, 30_000_000, 1_000, 1, 30_000_000, 0, arrays)
    limits = replace(limit_memory(GIB), mapping_bytes=GIB)
    plan = plan_snapshot(make_snapshot(models=(), buffers=(buffer,)), None, limits)
    assert f"capacity with {words}" in plan.largest
    # The items of a deque are allocated one by one.
    assert ("largest array" in {check.what for check in plan.checks}) == (kind == "arrays")


@pytest.mark.parametrize(("budget", "prefer"), [("auto", "balanced"), ("2.5GiB", "speed")])
def test_a_run_with_holdalls_buffer_is_advised_to_compress_before_it_holds_less(budget: str, prefer: str) -> None:
    memory = make_memory(
        "model.replay_buffer", "holdall.sb3.replay.ReplayBuffer", 400_000, budget=budget, prefer=prefer
    )
    plan = plan_snapshot(make_snapshot(buffers=(), memories=(memory,)), None, limit_memory(1700 * MIB))
    assert plan.verdict is not FitVerdict.FITS
    assert plan.change is not None
    assert plan.change.title == "budget=None for holdall's buffer"
    assert plan.change.needs.holdall == HoldallUse(prefer=prefer)
    assert "buffer_size=400_000" in plan.code
    kwargs = '{"budget": None}' if prefer == "balanced" else '{"budget": None, "prefer": "speed"}'
    assert f"replay_buffer_kwargs={kwargs}" in plan.code


@pytest.mark.parametrize("n_envs", [1, 4])
def test_a_rollout_in_holdalls_buffer_is_compared_with_stable_baselines3s(n_envs: int) -> None:
    memory = make_memory("model.rollout_buffer", "holdall.sb3.rollout.RolloutBuffer", 512 * n_envs, n_envs=n_envs)
    model = replace(make_snapshot().models[0], buffer_owner="model.rollout_buffer", is_on_policy=True)
    plan = plan_snapshot(make_snapshot(models=(model,), buffers=(), memories=(memory,)), None, limit_memory(8 * GIB))
    experience = plan.needs.experience
    observed = 3 * 84 * 84
    assert (experience.is_rollout, experience.rows, experience.n_envs) == (True, 512, n_envs)
    # Reward, return, start, value, log probability and advantage are float32.
    assert experience.row_bytes == n_envs * (observed + 8 * 4 + 6 * 4)
    # Flattening the rollouts of several environments copies the observations.
    assert experience.copied_row_bytes == (n_envs * observed if n_envs > 1 else 0)
    assert "rollout_buffer_class=RolloutBuffer" in plan.code
    assert "rollout buffer (holdall)" in {part.name for part in plan.needs.parts()}


def test_hidden_states_take_as_many_bytes_in_holdalls_rollout_buffer() -> None:
    snapshot = make_snapshot()
    model = replace(
        snapshot.models[0], class_name="sb3_contrib.ppo_recurrent.ppo_recurrent.RecurrentPPO", is_on_policy=True
    )
    step_bytes = 3 * 84 * 84 + 8 * 4 + 6 * 4
    buffer = replace(snapshot.buffers[0], kind="rollout", rows=512, nbytes=512 * (step_bytes + 4_096), arrays=())
    plan = plan_snapshot(replace(snapshot, models=(model,), buffers=(buffer,)), None, limit_memory(8 * GIB))
    assert plan.needs.stored is not None
    assert plan.needs.stored.raw_bytes == STORED.raw_bytes + 4_096
