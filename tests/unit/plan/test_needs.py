"""The arithmetic of a plan: parts add up, bounds hold, and every recommendation fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdall.machine import Limit
from holdall.tools.plan.needs import (
    MARGIN,
    ROOM_BYTES,
    Experience,
    FitVerdict,
    HoldallUse,
    MachineLimits,
    RunNeeds,
    largest_count,
)
from holdall.tools.plan.planner import PlanError, change_needs, find_change, plan_snapshot, write_model_code
from holdall.tools.probe.snapshot import FoundArray, FoundBuffer, FoundMemory, FoundModel, Snapshot, StoredSteps
from holdall.units import parse_bytes

MIB = 2**20
GIB = 2**30
STORED = StoredSteps(1000, raw_bytes=20_000, compressed_bytes=2_000, worst_bytes=2_200, working_bytes=30 * MIB)
REPLAY = Experience("model.replay_buffer", "SB3", rows=400_000, n_envs=1, row_bytes=42_628)
NEEDS = RunNeeds(
    REPLAY,
    base_bytes=300 * MIB,
    update_bytes=100 * MIB,
    settled_bytes=50 * MIB,
    update_source="measured",
    batch_size=256,
    measured_batch_size=256,
    stored=STORED,
    free_bytes=8 * GIB,
)


def _limits(free: int) -> MachineLimits:
    return MachineLimits((Limit("test", free, free),))


def test_exact_parts_have_no_margin_and_all_others_have_the_same() -> None:
    assert NEEDS.need_bytes(None) == 450 * MIB + 400_000 * 42_628
    assert (
        NEEDS.most_bytes(None)
        == int(300 * MIB * (1 + MARGIN))
        + int(100 * MIB * (1 + MARGIN))
        + int(50 * MIB * (1 + MARGIN))
        + ROOM_BYTES
        + 400_000 * 42_628
    )


def test_the_verdict_compares_need_and_bound() -> None:
    assert NEEDS.verdict(None, _limits(NEEDS.most_bytes(None))) is FitVerdict.FITS
    assert NEEDS.verdict(None, _limits(NEEDS.need_bytes(None))) is FitVerdict.TIGHT
    assert NEEDS.verdict(None, _limits(NEEDS.need_bytes(None) - 1)) is FitVerdict.DOES_NOT_FIT


def test_a_buffer_that_never_fills_costs_what_is_written() -> None:
    short = replace(NEEDS, experience=replace(REPLAY, max_rows=1000))
    assert NEEDS.need_bytes(None) - short.need_bytes(None) == 399_000 * 42_628


def test_a_rollout_of_several_environments_is_copied_once() -> None:
    rollout = Experience("r", "SB3", 1000, 4, row_bytes=4e6, copied_row_bytes=3.9e6, is_rollout=True)
    needs = replace(NEEDS, experience=rollout)
    assert needs.need_bytes(None) == 350 * MIB + round(1000 * (4e6 + 3.9e6))
    assert "copy" not in " ".join(part.name for part in needs.parts(HoldallUse()))


def test_a_budget_bounds_holdalls_memory() -> None:
    free = NEEDS.holdall_bytes(HoldallUse())
    assert 400_000 * 2_000 < free < 400_000 * 2_200 + 30 * MIB + 64 * MIB
    bounded = HoldallUse(budget_bytes=200 * MIB, spill_dir="disk")
    assert NEEDS.holdall_bytes(bounded) == 200 * MIB
    assert NEEDS.disk_bytes(bounded) > 0
    assert NEEDS.held_transitions(bounded) == 400_000
    assert NEEDS.held_transitions(HoldallUse(budget_bytes=200 * MIB)) < 110_000


def test_transitions_stay_raw_while_they_fit_into_a_budget() -> None:
    """A run under 128 MiB was planned with its compressed size, 49 MiB below the truth."""
    assert NEEDS.stored is not None
    raw = round(400_000 * NEEDS.stored.raw_bytes)
    assert NEEDS.holdall_bytes(HoldallUse(budget_bytes=raw - MIB)) == raw - MIB
    assert NEEDS.holdall_bytes(HoldallUse(budget_bytes=2 * raw)) == raw + NEEDS.stored.working_bytes


def test_auto_keeps_a_quarter_of_the_free_memory_raw() -> None:
    assert NEEDS.holdall_bytes(HoldallUse(is_auto=True)) > 2 * GIB


def test_the_largest_size_fits_and_the_next_does_not() -> None:
    for use in (None, HoldallUse()):
        size = NEEDS.largest_size(use, _limits(8 * GIB))
        assert NEEDS.resized(size).verdict(use, _limits(8 * GIB)) is FitVerdict.FITS
        assert NEEDS.resized(size + 1).verdict(use, _limits(8 * GIB)) is not FitVerdict.FITS


def test_more_environments_keep_the_capacity() -> None:
    four = NEEDS.with_envs(4)
    assert four.experience.transitions == 400_000
    assert four.need_bytes(None) == NEEDS.need_bytes(None)


@pytest.mark.parametrize("bound", [0, 1, 2, 3, 17, 64, 1000])
def test_largest_count_finds_the_bound(bound: int) -> None:
    assert largest_count(lambda count: count <= bound) == bound


def _snapshot(**changes: object) -> Snapshot:
    observation = {"kind": "box", "shape": [3, 84, 84], "dtype": "uint8", "low": 0.0, "high": 255.0}
    model = FoundModel(
        "stable_baselines3.sac.sac.SAC",
        "stable_baselines3.sac.policies.CnnPolicy",
        {"batch_size": 256, "buffer_size": 400_000},
        1,
        "cpu",
        observation,
        {"kind": "box", "shape": [8], "dtype": "float32", "low": -1.0, "high": 1.0},
        None,
        10 * MIB,
        "model.replay_buffer",
    )
    array = FoundArray("observations", (400_000, 1, 42_628), "uint8", 400_000 * 42_628)
    buffer = FoundBuffer(
        "model.replay_buffer",
        "stable_baselines3.common.buffers.ReplayBuffer",
        "replay",
        400_000 * 42_628,
        400_000,
        1,
        400_000 * 42_628,
        0,
        (array,),
    )
    facts = {"models": (model,), "buffers": (buffer,), "resident_bytes": 300 * MIB, "stored": STORED}
    return Snapshot("learn", "learn", **(facts | changes))  # type: ignore[arg-type]


def test_advice_that_is_followed_is_planned_as_fitting() -> None:
    limits = _limits(3 * GIB)
    plan = plan_snapshot(_snapshot(), None, limits)
    assert plan.verdict is FitVerdict.DOES_NOT_FIT
    assert plan.change is not None
    assert "holdall" in plan.change.title
    assert "replay_buffer_class=ReplayBuffer" in plan.code
    memory = FoundMemory(
        "model.replay_buffer", "holdall.sb3.replay.ReplayBuffer", 400_000, 1, None, "balanced", None, None, 0, 0, 0, 0
    )
    followed = plan_snapshot(_snapshot(buffers=(), memories=(memory,)), None, limits)
    assert followed.verdict is FitVerdict.FITS
    assert followed.needs.holdall == HoldallUse()
    assert followed.needs.experience.row_bytes == 2 * 3 * 84 * 84 + 8 * 4 + 3 * 4


def test_a_budget_with_a_disk_tier_is_suggested_where_compression_is_not_enough() -> None:
    limits = _limits(1300 * MIB)
    plan = plan_snapshot(_snapshot(), None, limits)
    assert plan.change is not None
    assert plan.change.use is not None
    assert plan.change.use.budget_bytes is not None
    budget = plan.code.partition('"budget": "')[2].partition('"')[0]
    assert parse_bytes(budget, "budget") <= 1300 * MIB
    memory = FoundMemory(
        "model.replay_buffer", "holdall.sb3.ReplayBuffer", 400_000, 1, budget, "memory", "disk", None, 0, 0, 0, 0
    )
    assert plan_snapshot(_snapshot(buffers=(), memories=(memory,)), None, limits).verdict is FitVerdict.FITS


def test_smaller_sizes_come_last() -> None:
    needs = replace(NEEDS, stored=None)
    change = find_change(_snapshot(stored=None), needs, _limits(8 * GIB))
    assert change is not None
    assert "capacity" in change.title
    assert change.needs.experience.size < 400_000
    code = write_model_code("SAC", "CnnPolicy", change.needs, None)
    assert f"buffer_size={change.needs.experience.size:_}" in code


@pytest.mark.parametrize("has_images", [True, False])
def test_an_upgrade_is_suggested_only_where_it_makes_rollouts_smaller(has_images: bool) -> None:
    """Vectors are float32 in every version. A rollout of vectors was planned with a quarter of its size."""
    snapshot = _snapshot(stored=None, versions={"stable_baselines3": "2.6.0"})
    if not has_images:
        vector = {"kind": "box", "shape": [21_168], "dtype": "float32", "low": None, "high": None}
        snapshot = replace(snapshot, models=(replace(snapshot.models[0], observation_space=vector),))
    rollout = replace(REPLAY, rows=100_000, row_bytes=4 * 21_168 + 56, is_rollout=True)
    change = find_change(snapshot, replace(NEEDS, experience=rollout, stored=None), _limits(4 * GIB))
    assert change is not None
    assert (change.title == "upgrade Stable-Baselines3") == has_images


def test_a_folder_is_written_unchanged_into_the_lines() -> None:
    use = HoldallUse(GIB, prefer="memory", spill_dir="/mnt/null")
    assert '"spill_dir": "/mnt/null"}' in write_model_code("SAC", "CnnPolicy", NEEDS, use)


def test_changes_that_do_not_apply_are_refused() -> None:
    assert change_needs(NEEDS, "capacity", 100).experience.rows == 100
    assert change_needs(NEEDS, "batch_size", 512).need_bytes(None) == NEEDS.need_bytes(None) + 100 * MIB
    with pytest.raises(PlanError, match="n_steps"):
        change_needs(NEEDS, "n_steps", 5)


def test_a_command_without_a_buffer_cannot_be_planned() -> None:
    with pytest.raises(PlanError, match="no buffer"):
        plan_snapshot(Snapshot("the first step", "optimizer"), None, _limits(GIB))
    with pytest.raises(PlanError, match="larger --timeout"):
        plan_snapshot(Snapshot("the timeout of 3 s", "timeout"), None, _limits(GIB))
    with pytest.raises(PlanError, match="ValueError: no rom"):
        plan_snapshot(Snapshot("error", "error", error="Traceback\nValueError: no rom"), None, _limits(GIB))


def test_verdict_table_largest_size_and_change_agree_when_one_array_is_too_large() -> None:
    limits = replace(_limits(24 * GIB), mapping_bytes=24 * GIB)
    model = replace(_snapshot().models[0], total_timesteps=100_000)
    snapshot = _snapshot(models=(model,))
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


def test_a_failing_check_of_the_disk_is_seen_in_the_table_too() -> None:
    memory = FoundMemory(
        "memory", "holdall.memory.ReplayMemory", 4_000_000, 1, "256MiB", "memory", "disk", None, 0, 0, 0, 0
    )
    limits = replace(_limits(8 * GIB), disk=Limit("disk", GIB, GIB))
    plan = plan_snapshot(_snapshot(models=(), buffers=(), memories=(memory,)), None, limits)
    assert plan.verdict is plan.table[0].holdall_verdict is FitVerdict.DOES_NOT_FIT
    assert plan.change is not None


def test_environments_in_the_same_process_cost_memory_of_their_own() -> None:
    needs = replace(NEEDS, environment_bytes=MIB, measured_envs=4, experience=replace(REPLAY, n_envs=4))
    more = needs.with_envs(1004)
    assert more.need_bytes(None) - needs.need_bytes(None) == pytest.approx(1000 * MIB, abs=20 * MIB)
    assert ("1,000 further environments", "estimate") in {(part.name, part.source) for part in more.parts(None)}
    fewer = needs.with_envs(1)
    assert needs.need_bytes(None) - fewer.need_bytes(None) == pytest.approx(3 * MIB, abs=MIB)


def test_one_of_holdalls_memories_is_what_a_loop_without_a_model_is_planned_for() -> None:
    training, evaluation = (
        FoundMemory(name, "holdall.memory.ReplayMemory", capacity, 1, "1GiB", "balanced", None, None, 10, 0, 0, 1000)
        for name, capacity in (("memory", 100_000), ("evaluation", 1_000))
    )
    array = FoundArray("features", (3_000_000,), "float64", 24_000_000, resident_bytes=24_000_000)
    features = FoundBuffer("features", "", "arrays", 24_000_000, 3_000_000, 1, 24_000_000, 0, (array,))
    facts = {"models": (), "buffers": (features,), "memories": (evaluation, training), "probe_bytes": 50 * MIB}
    plan = plan_snapshot(_snapshot(**facts), None, _limits(8 * GIB))
    assert plan.needs.experience.name == "memory"
    parts = {part.name: part.nbytes for part in plan.needs.parts(plan.needs.holdall)}
    assert parts["features (arrays)"] == 24_000_000
    assert 0 < parts["evaluation (holdall)"] < parts["replay buffer (holdall)"]
    assert parts["interpreter, libraries, environments, weights"] == 300 * MIB - 50 * MIB - 24_000_000


def test_a_loop_gets_the_lines_of_the_memory_that_it_has() -> None:
    lines = {}
    for name in ("ReplayMemory", "RolloutMemory"):
        memory = FoundMemory("memory", f"holdall.memory.{name}", 512, 4, "1GiB", "memory", None, None, 0, 0, 0, 0)
        plan = plan_snapshot(_snapshot(models=(), buffers=(), memories=(memory,)), None, _limits(8 * GIB))
        lines[name] = [line.strip(" ,") for line in plan.code.splitlines()[3:-1]]
        assert plan.code.startswith(f"memory = holdall.{name}(")
    assert lines["ReplayMemory"] == ["capacity=512", "num_envs=4", 'budget="1.0 GiB"', 'prefer="memory"']
    assert lines["RolloutMemory"] == ["num_steps=128", "num_envs=4"]


@pytest.mark.parametrize(
    ("class_name", "kind", "words"),
    [("deque", "deque", "this deque"), ("", "arrays", "these arrays"), ("train.Replay", "arrays", "this Replay")],
)
def test_a_buffer_without_a_library_is_named_by_what_it_is(class_name: str, kind: str, words: str) -> None:
    arrays = () if kind == "deque" else (FoundArray("obs", (1_000, 30_000), "uint8", 30_000_000),)
    buffer = FoundBuffer("buffer.data", class_name, kind, 30_000_000, 1_000, 1, 30_000_000, 0, arrays)
    limits = replace(_limits(GIB), mapping_bytes=GIB)
    plan = plan_snapshot(_snapshot(models=(), buffers=(buffer,)), None, limits)
    assert f"capacity with {words}" in plan.largest
    # The items of a deque are allocated one by one.
    assert ("largest array" in {check.what for check in plan.checks}) == (kind == "arrays")


@pytest.mark.parametrize(("budget", "prefer"), [("auto", "balanced"), ("2.5GiB", "speed")])
def test_a_run_with_holdalls_buffer_is_advised_to_compress_before_it_holds_less(budget: str, prefer: str) -> None:
    memory = FoundMemory(
        "model.replay_buffer", "holdall.sb3.replay.ReplayBuffer", 400_000, 1, budget, prefer, None, None, 0, 0, 0, 0
    )
    plan = plan_snapshot(_snapshot(buffers=(), memories=(memory,)), None, _limits(1700 * MIB))
    assert plan.verdict is not FitVerdict.FITS
    assert plan.change is not None
    assert plan.change.title == "budget=None for holdall's buffer"
    assert plan.change.use == HoldallUse(prefer=prefer)
    assert "buffer_size=400_000" in plan.code
    kwargs = '{"budget": None}' if prefer == "balanced" else '{"budget": None, "prefer": "speed"}'
    assert f"replay_buffer_kwargs={kwargs}" in plan.code


@pytest.mark.parametrize("n_envs", [1, 4])
def test_a_rollout_in_holdalls_buffer_is_compared_with_stable_baselines3s(n_envs: int) -> None:
    memory = FoundMemory(
        "model.rollout_buffer",
        "holdall.sb3.rollout.RolloutBuffer",
        512 * n_envs,
        n_envs,
        None,
        "",
        None,
        None,
        0,
        0,
        0,
        0,
    )
    model = replace(_snapshot().models[0], buffer_owner="model.rollout_buffer", is_on_policy=True)
    plan = plan_snapshot(_snapshot(models=(model,), buffers=(), memories=(memory,)), None, _limits(8 * GIB))
    experience = plan.needs.experience
    observed = 3 * 84 * 84
    assert (experience.is_rollout, experience.rows, experience.n_envs) == (True, 512, n_envs)
    # Reward, return, start, value, log probability and advantage are float32.
    assert experience.row_bytes == n_envs * (observed + 8 * 4 + 6 * 4)
    # Flattening the rollouts of several environments copies the observations.
    assert experience.copied_row_bytes == (n_envs * observed if n_envs > 1 else 0)
    assert "rollout_buffer_class=RolloutBuffer" in plan.code
    assert "rollout buffer (holdall)" in {part.name for part in plan.needs.parts(plan.needs.holdall)}


@pytest.mark.parametrize("library", ["stable_baselines3.common.buffers.ReplayBuffer", "holdall.cleanrl.ReplayBuffer"])
def test_a_loop_with_cleanrls_buffer_gets_the_lines_of_holdalls(library: str) -> None:
    snapshot = _snapshot(models=())
    if library.startswith("holdall"):
        memory = FoundMemory("rb", library, 400_000, 1, "auto", "balanced", None, None, 10, 0, 0, 400_000)
        plan = plan_snapshot(replace(snapshot, buffers=(), memories=(memory,)), None, _limits(1700 * MIB))
    else:
        buffer = replace(snapshot.buffers[0], owner="rb", class_name=library)
        plan = plan_snapshot(replace(snapshot, buffers=(buffer,)), None, _limits(3 * GIB))
    assert plan.change is not None
    assert plan.code == (
        "from holdall.cleanrl import ReplayBuffer\n"
        "rb = ReplayBuffer(\n    400_000,\n    ...,  # the other arguments stay\n    budget=None,\n)"
    )


def test_a_loop_with_torchrls_buffer_gets_the_lines_of_holdalls_storage() -> None:
    memory = FoundMemory(
        "storage", "holdall.torchrl.HoldallStorage", 1_000, 1, "1GiB", "memory", "disk", None, 0, 0, 0, 0
    )
    plan = plan_snapshot(_snapshot(models=(), buffers=(), memories=(memory,)), None, _limits(8 * GIB))
    assert plan.code.splitlines() == [
        "from holdall.torchrl import HoldallStorage",
        'storage = HoldallStorage(1_000, budget="1.0 GiB", prefer="memory", spill_dir="disk")',
    ]


@pytest.mark.parametrize(
    ("algorithm", "policy", "first", "last"),
    [
        ("PPO", "CnnPolicy", "from holdall.sb3 import RolloutBuffer", ")"),
        ("MaskablePPO", "MlpPolicy", "from holdall.sb3.contrib import MaskableRolloutBuffer", ")"),
        ("MaskablePPO", "MultiInputPolicy", "from holdall.sb3.contrib import MaskableDictRolloutBuffer", ")"),
        ("RecurrentPPO", "MlpLstmPolicy", "from holdall.sb3.contrib import equip", "equip(model)"),
    ],
)
def test_every_algorithm_gets_the_lines_of_its_own_rollout_buffer(
    algorithm: str, policy: str, first: str, last: str
) -> None:
    needs = replace(NEEDS, experience=replace(REPLAY, rows=512, is_rollout=True))
    lines = write_model_code(algorithm, policy, needs, HoldallUse()).splitlines()
    assert lines[0] == first
    assert lines[-1].endswith(last)
    assert ("rollout_buffer_class=" in "".join(lines)) == (algorithm != "RecurrentPPO")


def test_hidden_states_take_the_same_in_holdalls_rollout_buffer() -> None:
    snapshot = _snapshot()
    model = replace(
        snapshot.models[0], class_name="sb3_contrib.ppo_recurrent.ppo_recurrent.RecurrentPPO", is_on_policy=True
    )
    step_bytes = 3 * 84 * 84 + 8 * 4 + 6 * 4
    buffer = replace(snapshot.buffers[0], kind="rollout", rows=512, nbytes=512 * (step_bytes + 4_096), arrays=())
    plan = plan_snapshot(replace(snapshot, models=(model,), buffers=(buffer,)), None, _limits(8 * GIB))
    assert plan.needs.stored is not None
    assert plan.needs.stored.raw_bytes == STORED.raw_bytes + 4_096
