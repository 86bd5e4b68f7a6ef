"""Phases, verdicts and answers: arithmetic on given measurements, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdall.cli.plan import write_plan_page
from holdall.machine import Limit
from holdall.tools.plan import planner
from holdall.tools.plan.config import spec_from_settings
from holdall.tools.plan.phases import (
    FitVerdict,
    HoldallNeed,
    MachineLimits,
    MeasuredCosts,
    PlanInputs,
    UpdateBytes,
    host_phases,
    process_bytes,
    vram_phases,
)
from holdall.tools.plan.planner import Plan, both_units, plan_from_inputs
from holdall.tools.plan.spec import Spec

MIB, GB = 2**20, 10**9
LIBRARIES = 350 * MIB
TRACED = UpdateBytes(weights=10 * MIB, settled=40 * MIB, settled_heap=40 * MIB, mapped=0, heap=60 * MIB, live=55 * MIB)
TWICE = UpdateBytes(weights=10 * MIB, settled=40 * MIB, settled_heap=40 * MIB, mapped=0, heap=80 * MIB, live=70 * MIB)


def _spec(**settings: Any) -> Spec:
    given = {"algo": "sac", "obs": {"image": "84x84x3:uint8", "vector": "31"}, "action": 8}
    return spec_from_settings(given | settings)[0]


def _ppo(**settings: Any) -> Spec:
    given = {"algo": "ppo", "obs": "144x160x12:uint8", "action": "discrete(8)", "n_steps": 8192, "num_envs": 2}
    return spec_from_settings(given | {"batch_size": 2048} | settings)[0]


def _measured(spec: Spec, **changes: Any) -> MeasuredCosts:
    return MeasuredCosts(
        libraries=LIBRARIES, libraries_anonymous=160 * MIB, traced_batch=spec.batch, traced=TRACED, traced_twice=TWICE
    ) if not changes else MeasuredCosts(
        **({"libraries": LIBRARIES, "libraries_anonymous": 160 * MIB, "traced_batch": spec.batch} | changes)
    )  # fmt: skip


def _known(spec: Spec, limit: int, experience: HoldallNeed | None = None, **room: Any) -> PlanInputs:
    return PlanInputs(_measured(spec), MachineLimits((Limit("test", limit, limit),), **room), experience)


HOLDALL = HoldallNeed(21_338.0, None, 30 * MIB, 0, {})
COMPRESSED = HoldallNeed(21_338.0, 4_400.0, 30 * MIB, 2000, {})


def test_a_rollout_of_several_environments_is_there_twice_while_it_is_flattened() -> None:
    phases = {phase.name: phase for phase in host_phases(_ppo(), _measured(_ppo()))}
    rollout = 4_529_848_320
    assert phases["flatten"].nbytes - phases["collect"].nbytes == rollout
    assert phases["flatten"].nbytes > phases["train"].nbytes
    alone = {phase.name: phase for phase in host_phases(_ppo(num_envs=1), _measured(_ppo(num_envs=1)))}
    assert alone["flatten"].nbytes == alone["collect"].nbytes


def test_stable_baselines3_2_7_0_takes_four_times_as_much_for_images() -> None:
    new, old = (host_phases(spec, _measured(spec)) for spec in (_ppo(), _ppo(sb3="2.7.0")))
    rollout = 4_529_848_320
    assert max(p.nbytes for p in old) - max(p.nbytes for p in new) == pytest.approx(2 * 3 * rollout, rel=1e-3)


def test_the_need_is_the_largest_phase_and_never_the_sum() -> None:
    spec = _spec(capacity=300_000)
    phases = host_phases(spec, _measured(spec))
    assert [phase.name for phase in phases] == ["construct", "collect", "train", "save", "load"]
    check = _known(spec, GB).need_bytes(spec, holdall=False)
    assert check == max(phase.nbytes for phase in phases if phase.happens) < sum(phase.nbytes for phase in phases)
    assert phases[0].nbytes == LIBRARIES + TRACED.weights  # untouched pages cost nothing
    assert phases[1].nbytes == LIBRARIES + TRACED.settled + 300_000 * 42_628


def test_a_run_that_never_fills_its_buffer_needs_less() -> None:
    spec = _spec(capacity=1_000_000, total_timesteps=100_000)
    collect = host_phases(spec, _measured(spec))[1]
    assert collect.nbytes == LIBRARIES + TRACED.settled + 100_000 * 42_628


def test_an_array_larger_than_all_memory_is_refused_even_if_it_is_never_filled() -> None:
    spec = _spec(capacity=1_000_000, total_timesteps=1_000)
    known = _known(spec, 8 * GB, largest_mapping=20 * GB)
    assert known.verdict(spec, holdall=False) is FitVerdict.DOES_NOT_FIT
    assert known.verdict(spec.but(capacity=900_000), holdall=False) is FitVerdict.FITS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"vec_env": "dummy"}, 0),
        ({"vec_env": "subproc", "start_method": "fork"}, 4 * 6),
        ({"vec_env": "subproc", "start_method": "spawn"}, 4 * 160 + 6),
        ({"vec_env": "subproc", "start_method": "forkserver"}, 4 * 160 + 12),
        ({"vec_env": "subproc", "start_method": "forkserver", "preloads": True}, 4 * 10 + 160 + 6),
    ],
)
def test_processes_cost_what_they_do_not_share(settings: dict[str, Any], expected: int) -> None:
    spec = _spec(num_envs=4, **settings)
    assert process_bytes(spec, _measured(spec)) == expected * MIB


def test_fits_is_said_only_below_the_upper_bound() -> None:
    spec = _spec(capacity=300_000)
    peak = max(host_phases(spec, _measured(spec)), key=lambda phase: phase.most_bytes)
    assert peak.nbytes < peak.most_bytes
    for limit, verdict in [
        (peak.most_bytes, FitVerdict.FITS),
        (peak.most_bytes - 1, FitVerdict.TIGHT),
        (peak.nbytes, FitVerdict.TIGHT),
        (peak.nbytes - 1, FitVerdict.DOES_NOT_FIT),
    ]:
        assert _known(spec, limit).verdict(spec, holdall=False) is verdict


def test_a_checkpoint_that_the_disk_does_not_hold_does_not_fit() -> None:
    spec = _spec(capacity=100_000, saves_buffer=True)
    known = _known(spec, 50 * GB, disk=Limit("disk", 4 * GB, 4 * GB))
    assert known.verdict(spec, holdall=False) is FitVerdict.DOES_NOT_FIT
    assert known.verdict(spec.but(saves_buffer=False), holdall=False) is FitVerdict.FITS


def test_shared_observations_are_held_against_the_shared_memory_that_is_left() -> None:
    spec = _ppo(num_envs=64, n_steps=16, vec_env="shared", start_method="fork")
    known = _known(spec, 50 * GB, shared_memory=Limit("/dev/shm", 64 * 144 * 160 * 12 - 1, 10**9))
    assert known.verdict(spec, holdall=False) is FitVerdict.DOES_NOT_FIT
    assert known.verdict(spec.but(num_envs=63), holdall=False) is FitVerdict.FITS
    assert known.verdict(spec.but(vec_env="subproc"), holdall=False) is FitVerdict.FITS


def test_note_000_table_names_both_units_and_the_size_that_really_fits() -> None:
    spec = _spec(capacity=1_000_000)
    known = _known(spec, int(9.21 * GB), HOLDALL)
    rows = {row.size: row for row in planner.capacity_table(spec, known)}
    assert both_units(rows[300_000].sb3_bytes) == "12.79 GB = 11.91 GiB"
    assert rows[400_000].sb3_verdict is FitVerdict.DOES_NOT_FIT
    assert rows[300_000].sb3_verdict is FitVerdict.DOES_NOT_FIT
    assert rows[200_000].sb3_verdict is FitVerdict.FITS
    assert rows[300_000].holdall_verdict is FitVerdict.FITS


def test_the_largest_size_fits_and_one_more_does_not() -> None:
    spec = _spec(capacity=1_000_000)
    known = _known(spec, 10 * GB, HOLDALL)
    for holdall in (False, True):
        size = planner.largest_size(spec, known, holdall=holdall)
        assert known.fits(spec.but(capacity=size), holdall=holdall)
        assert not known.fits(spec.but(capacity=size + 1), holdall=holdall)


def test_the_largest_rollout_batch_and_number_of_environments_fit_and_no_more() -> None:
    spec = _ppo()
    known = _known(spec, 12 * GB)
    steps = planner.largest_size(spec, known, holdall=False)
    assert known.fits(spec.but(n_steps=steps), holdall=False)
    assert not known.fits(spec.but(n_steps=steps + 1), holdall=False)
    envs = planner.largest_num_envs(spec, known)
    assert envs is not None
    assert known.fits(spec.but(num_envs=envs), holdall=False)
    assert not known.fits(spec.but(num_envs=envs + 1), holdall=False)
    batch = planner.largest_batch(spec, known)
    assert batch is not None
    assert known.fits(spec.but(batch_size=batch), holdall=False)


def test_profiles_are_shares_of_the_limit_and_fit_into_them() -> None:
    spec = _spec()
    known = _known(spec, 16 * GB, HOLDALL)
    found = {profile.name: profile for profile in planner.share_profiles(spec, known)}
    assert list(found) == ["memory-efficient", "fast", "balanced", "quality", "aggressive"]
    sizes = [found[name].sb3_size for name in ("memory-efficient", "fast", "balanced", "quality")]
    assert sizes == sorted(sizes)
    assert found["aggressive"].batch_size == 4 * found["balanced"].batch_size
    for profile in found.values():
        smaller = known.within(profile.limit_bytes)
        run = spec.but(capacity=profile.sb3_size, batch_size=profile.batch_size)
        assert smaller.fits(run, holdall=False)
        assert profile.holdall_size is not None
        assert profile.holdall_size > profile.sb3_size


@pytest.mark.parametrize(
    ("spec", "limit", "experience", "title"),
    [
        (_spec(capacity=300_000), 9.21 * GB, HOLDALL, "holdall's buffer"),
        (_spec(capacity=1_000_000), 9.21 * GB, COMPRESSED, "holdall's buffer"),
        (_spec(capacity=1_000_000), 20 * GB, None, "a capacity of"),
        (_ppo(sb3="2.7.0"), 12 * GB, None, "upgrade"),
        (_ppo(), 8 * GB, None, "rollouts of"),
        (_ppo(), 8 * GB, HoldallNeed(276_500.0, None, 0, 0, {}), "holdall's buffer"),
        (_spec(capacity=10_000, num_envs=16, vec_env="subproc"), 2 * GB, None, "fork server"),
    ],
)
def test_the_cheapest_change_makes_it_fit(spec: Spec, limit: float, experience: HoldallNeed | None, title: str) -> None:
    known = _known(spec, int(limit), experience)
    assert not known.fits(spec, holdall=False)
    change = planner.cheapest_change(spec, known)
    assert change is not None
    assert title in change.title
    assert known.fits(change.spec, holdall=change.spec.uses_holdall)


def test_holdalls_buffer_is_no_part_of_a_change_that_does_without_it() -> None:
    spec = _ppo(device="cuda")
    vram = Limit("test", 1_090 * MIB, 1_090 * MIB)
    known = _known(spec, 100 * GB, HoldallNeed(276_500.0, None, 0, 0, {}))
    known = replace(known, limits=replace(known.limits, vram=vram))
    assert not known.fits(spec, holdall=False)
    change = planner.cheapest_change(spec, known)
    assert change is not None
    assert (change.title.startswith("batches of"), change.spec.uses_holdall) == (True, False)


def test_nothing_is_advised_where_libraries_alone_are_too_much() -> None:
    spec = _spec()
    assert planner.cheapest_change(spec, _known(spec, 100 * MIB, HOLDALL)) is None


def test_the_line_to_paste_is_python() -> None:
    spec = _spec(capacity=300_000)
    text = planner.code_to_paste(spec, holdall=True, compressed=True)
    compile(text, "pasted", "exec")
    assert "replay_buffer_class=ReplayBuffer" in text
    assert "buffer_size=300_000" in text
    compile(planner.code_to_paste(_ppo(), holdall=False), "pasted", "exec")
    long = planner.code_to_paste(spec.but(holdall_budget=9 * GB), holdall=True)
    compile(long, "pasted", "exec")
    assert max(map(len, long.splitlines())) <= 100


def test_gpu_memory_is_counted_on_the_gpu_and_not_in_the_host() -> None:
    cpu, gpu = _spec(capacity=1000), _spec(capacity=1000, device="cuda")
    phases = {phase.name: phase for phase in vram_phases(gpu, _measured(gpu, traced=TRACED, traced_twice=TWICE))}
    assert phases["train"].nbytes > TRACED.live
    assert vram_phases(cpu, _measured(cpu)) == []
    host = host_phases(gpu, _measured(gpu))
    assert all("optimizer" not in part.name for phase in host for part in phase.parts)


def _plan(limit: float = 9.21 * GB, **settings: Any) -> Plan:
    spec = _spec(**({"capacity": 300_000} | settings))
    return plan_from_inputs(spec, _known(spec, int(limit), COMPRESSED), ["a note"])


def test_plain_data_say_the_same_as_the_plan() -> None:
    import json

    plan = _plan()
    data = json.loads(json.dumps(plan.as_dict()))
    assert data["schema"] == "holdall.plan/1"
    assert (data["verdict"], data["exit_code"]) == ("does not fit", 2)
    assert data["buffer"]["bytes"] == 300_000 * 42_628
    assert data["change"]["title"] == "keep the experience in holdall's buffer"
    assert data["phases"][1]["bytes"] == plan.phases[1].nbytes


def test_the_page_shows_phases_and_capacities_and_escapes_what_the_user_wrote() -> None:
    text = write_plan_page(_plan(name="<script>alert(1)</script>"))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert all(phase.name in text for phase in _plan().phases)
    assert text.count("<svg") >= 3
    assert "replay_buffer_class=ReplayBuffer" in text


def test_both_units_are_named() -> None:
    assert both_units(12_787_200_000) == "12.79 GB = 11.91 GiB"
    assert both_units(5_000_000) == "5.0 MB = 4.8 MiB"
