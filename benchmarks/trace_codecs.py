"""What codecs make of recorded frames beside Stable-Baselines3's buffer: bytes a transition, and the time of a batch.

    python benchmarks/trace_codecs.py FOLDER [--traces seaquest,dog] [--prefer balanced,memory] [--json FILE]
    python benchmarks/trace_codecs.py FOLDER --lanes 16     bytes of 16 lanes over those of one
    python benchmarks/trace_codecs.py --live Pong,Seaquest --lanes 16 --held 40000    the same for games
    python benchmarks/trace_codecs.py FOLDER --chosen 20    which codec is chosen in 20 processes, 10 of them under load
    python benchmarks/trace_codecs.py FOLDER --slices       bytes and CPU time of a slice alone, whatever else runs
    python benchmarks/trace_codecs.py FOLDER --mechanisms --lanes 16 --prefer balanced,memory
                                                            bytes without pairs, without keys, without lane order
    python benchmarks/trace_codecs.py FOLDER --video        beside FFV1 and x264 in groups of 16; needs imageio-ffmpeg

FOLDER holds traces as `holdall.tools.bench.trace` describes them. A trace is played again and again, each time
mirrored, inverted or brighter, so that no pass repeats an older one. Bytes are the slope of the process's own
memory and of what the memory counts, from one compressed block to the next, in a process that only adds until many of
them are; the first third is not read, while tables and pools grow that are made once. Batches of 256 are drawn by each
side alone in three processes, and by both in turns in another.

Of a trace each of 16 lanes plays a piece again and again; one lane plays what all of them play, pass after pass. So
its images change as a whole once a pass, and those of 16 lanes 16 times. With `--stretch 78` one lane plays so many
steps of the first lane, then those of the second at the same time: about what one block of the 16 lanes holds.
Games that are played live (by ale-py, at random, a seed a lane) have no such passes. Shown are compressed bytes, and
all that the memory counts for a transition.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401  both sides need it, so it is here before memory is counted
from cases import BATCH, Side, SideName, libraries_of
from footprint import line_through
from process import commit, emit, machine, versions
from streams import Step, Stream

from holdall.machine import held_bytes
from holdall.tools.bench.trace import Trace, TraceStep

HERE = Path(__file__).parent
TRACES = {
    "minigrid": "minigrid_FourRooms_rgb56_3000.npz",
    "procgen": "procgen_coinrun_rgb64_1200.npz",
    "game_boy": "gb_renegaderush_600.npz",
    "pong": "atari_Pong_gray84_random_2000.npz",
    "seaquest": "atari_Seaquest_gray84_random.npz",
    "crafter": "crafter_rgb64_600.npz",
    "quadruped": "dmc_quadruped_walk_rgb84_dict_200.npz",
    "dog": "pidog_cam84_stand.npz",
    "minatar": "minatar_spaceinvaders_bool_5000.npz",
    "nethack": "nle_score_dict_400.npz",
}
NOT_PLAYED = {"quadruped"}
"""Its slices alone are measured: a Dict of which one part is stacked is no trace that `holdall bench` plays."""
SB3_BYTES = 1_200_000_000
MOST_HELD = 20_000
READINGS = 40
GROWN_BLOCKS, LEAST_GROWN, MOST_GROWN = 40, 48_000, 240_000
"""Compressed blocks that bytes a transition are read from, and the fewest and most transitions for that."""
LOOK_EVERY = 16
"""Transitions between two looks whether another block is compressed: as many may lie raw behind it."""
BATCHES, IN_A_ROW, ROUNDS = 200, 5, 3
CHOSEN_BLOCKS, BURNING = 3, 4
"""Blocks that are added before it is read which codec was chosen, and processes that are the load."""
BURN = "import numpy as np\na = np.zeros(30_000_000, np.uint8)\nwhile True: a.copy(), sum(range(20_000))"
BRIGHTER = 5
"""What every eighth pass adds to all pixels; beyond 255 they begin at 0 again."""
Reading = tuple[int, int]


# ---------------------------------------------------------------- frames


def varied(arrays: dict[str, Any], number: int, rooms: dict[str, Any]) -> dict[str, Any]:
    """Mirror, invert or brighten all images of a trace, in the same memory each time."""
    changed = {
        name: rows[:, None] if name.startswith("f_") and rows.ndim == 1 else rows for name, rows in arrays.items()
    }
    for name, frames in changed.items():
        if name.startswith("f_") and frames.dtype == np.uint8 and frames.ndim >= 3 and frames.shape[2] > 8:
            turned = frames[:, :: -1 if number & 1 else 1, :: -1 if number & 2 else 1]
            room = rooms.setdefault(name, np.empty_like(frames))
            np.subtract(255, turned, out=room) if number & 4 else np.copyto(room, turned)
            room += np.uint8(number // 8 * BRIGHTER % 256)
            changed[name] = room
    return changed


def played(file: Path, lanes: int = 1, pieces: int = 1, stretch: int = 0) -> Stream:
    """Play a trace for ever: whole, or each of its pieces in a lane of its own, or stretches of these in one lane."""
    with np.load(file, allow_pickle=False) as loaded:
        arrays = {name: loaded[name] for name in loaded.files}
    if "quadruped" in file.name:
        arrays["meta"] = np.array(json.dumps({"stack": 1}))
    rooms: dict[str, Any] = {}
    trace = Trace(varied(arrays, 0, rooms), file.name)
    length = len(trace) // pieces
    steps = _played_pieces(arrays, file.name, rooms, pieces, length)
    if lanes < pieces:
        steps = one_by_one(steps, pieces, stretch or length)
    return Stream(trace.observation_space, trace.action_space, lanes, steps)


def live(game: str, lanes: int) -> Stream:
    """Play a game at random for ever, another one in every lane."""
    atari = importlib.import_module("streams.atari")
    played_so = [atari.stream(seed, game=game) for seed in range(lanes)]
    names = TraceStep._fields
    steps = (
        _beside(tuple(TraceStep(*(getattr(step, name) for name in names)) for step in together), is_last=False)
        for together in zip(*(stream.steps for stream in played_so), strict=True)
    )
    return Stream(played_so[0].observation_space, played_so[0].action_space, lanes, steps)


def _played_pieces(
    arrays: dict[str, Any], name: str, rooms: dict[str, Any], pieces: int, length: int
) -> Iterator[Step]:
    """Play pieces of a trace side by side, pass after pass."""
    for number in itertools.count():
        trace = Trace(varied(arrays, number, rooms), name)
        if pieces == 1:
            yield from (Step(*step) for step in trace.steps())
            continue
        cut = [itertools.islice(trace.steps(), piece * length, (piece + 1) * length) for piece in range(pieces)]
        for place, side_by_side in enumerate(zip(*cut, strict=True)):
            yield _beside(side_by_side, is_last=place == length - 1)


def one_by_one(steps: Iterator[Step], lanes: int, stretch: int) -> Iterator[Step]:
    """Play what lanes play in one: so many steps of the first lane, then those of the second at the same time."""
    while together := list(itertools.islice(steps, stretch)):
        for lane in range(lanes):
            for number, step in enumerate(together, 1):
                obs, action, reward, next_obs, terminated, truncated = (
                    _lane(part, lane) for part in (getattr(step, name) for name in TraceStep._fields)
                )
                yield Step(obs, action, reward, next_obs, terminated, truncated | ((number == stretch) & ~terminated))


def _lane(part: Any, lane: int) -> Any:
    return {key: _lane(one, lane) for key, one in part.items()} if isinstance(part, dict) else part[lane : lane + 1]


def _beside(steps: tuple[TraceStep, ...], *, is_last: bool) -> Step:
    def joined(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {key: joined([part[key] for part in parts]) for key in parts[0]}
        return np.concatenate(parts)

    obs, action, reward, next_obs, terminated, truncated = (joined(list(parts)) for parts in zip(*steps, strict=True))
    return Step(obs, action, reward, next_obs, terminated, truncated | (is_last & ~terminated))


# ---------------------------------------------------------------- one process


def measure(stream: Stream, sides: list[SideName], prefer: str, held: int) -> dict[str, Any]:
    """Fill the sides, draw batches in turns, and say what one side alone takes."""
    lanes = stream.lanes
    for name in sides:
        libraries_of(name)
    observation = sum(part.nbytes for part in _parts(next(stream.steps).obs)) // lanes
    most = held if sides == ["core"] else SB3_BYTES // (2 * observation)
    held = min(held, most) // lanes * lanes
    opened = [Side(name, stream, held, prefer) for name in sides]
    readings, counted, sealed = filled(opened, stream, held // lanes, lanes)
    found = {}
    for side in opened:
        if side.name != "sb3":
            side.memory.drain()
            report = side.memory.report()
            found = {field.name: field.finding for field in report.fields}
            found["bytes"] = report.bytes_per_transition
    times = drawn(opened)
    result: dict[str, Any] = {"transitions": held, "found": found, "sample_us": times}
    if sides == ["sb3"]:
        result["bytes_per_transition"] = line_through(readings)[0]
    if sides == ["core"]:
        # From one sealed block to the last: what lies raw between them is another in every lane.
        result["bytes_per_transition"] = (sealed[-1][1] - sealed[1][1]) / (sealed[-1][0] - sealed[1][0])
        result["counted_bytes_per_transition"] = line_through(counted)[0]
    return result


def grown(file: Path, prefer: str) -> dict[str, Any]:
    """Add until several blocks are compressed; return bytes a transition by the process, and as the memory counts."""
    libraries_of("holdall")
    stream = played(file)
    side = Side("holdall", stream, MOST_GROWN, prefer)
    readings, counted, _ = filled([side], stream, MOST_GROWN, 1, GROWN_BLOCKS)
    first = len(readings) // 3
    slopes = {"process": line_through(readings[first:])[0], "counted": line_through(counted[first:])[0]}
    return slopes | {"transitions": readings[-1][0], "blocks": len(readings)}


def chosen(file: Path, prefer: str) -> dict[str, Any]:
    """Add some blocks as fast as can be; return which codecs were chosen, and what is compressed."""
    stream = played(file)
    side = Side("core", stream, MOST_GROWN, prefer)
    slices = CHOSEN_BLOCKS * 2**24 // sum(part.nbytes for part in _parts(next(stream.steps).next_obs))
    for step in itertools.islice(stream.steps, 4 * slices):  # of a stack of 4, a quarter is new
        side.add(*side.arguments(step))
    side.memory.drain()
    fields = [field for field in side.memory.report().fields if field.sealed_bytes]
    return {"found": {field.name: f"{field.finding}, {field.sealed_bytes} B" for field in fields}}


def filled(
    opened: list[Side], stream: Stream, ticks: int, lanes: int, blocks: int = 1 << 30
) -> tuple[list[Reading], ...]:
    """Fill the sides; return transitions and bytes: of the process, as a memory counts all, and what is compressed."""
    readings, counted, sealed = list[Reading](), list[Reading](), [(0, 0)]
    memory = opened[0].memory if len(opened) == 1 and opened[0].name != "sb3" else None
    for tick, step in enumerate(itertools.islice(stream.steps, ticks), start=1):
        for side in opened:
            side.add(*side.arguments(step))
        if memory is None and tick % max(1, ticks // READINGS) == 0 and tick >= ticks * 0.3:
            readings.append((tick * lanes, held_bytes().anonymous))
        if memory is not None and tick % max(1, LOOK_EVERY // lanes) == 0:
            memory.drain()
            fields = memory.report().fields
            total = sum(field.sealed_bytes for field in fields)
            if total > sealed[-1][1]:  # another block: what is open and raw is as large as it was at the last one
                sealed.append((tick * lanes, total))
                readings.append((tick * lanes, held_bytes().anonymous))
                counted.append((tick * lanes, sum(field.total_bytes for field in fields)))
                if len(readings) >= blocks and tick * lanes >= LEAST_GROWN:
                    break
    return readings, counted, sealed


def drawn(sides: list[Side]) -> dict[str, dict[str, float]]:
    """Draw batches, some in a row from each side; return median and minimum in microseconds."""
    np.random.seed(0)  # noqa: NPY002  what Stable-Baselines3 draws from
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.sample(BATCH)
    for _ in range(BATCHES // IN_A_ROW):
        for side in sides:
            kept = None  # as in training, the last batch is held until the next one was drawn
            for _ in range(IN_A_ROW):
                start = time.perf_counter()
                kept = side.sample(BATCH)
                times[side.name].append((time.perf_counter() - start) * 1e6)
            del kept
    return {name: {"median": statistics.median(taken), "min": min(taken)} for name, taken in times.items()}


def _parts(observation: Any) -> list[Any]:
    return list(observation.values()) if isinstance(observation, dict) else [observation]


# ---------------------------------------------------------------- all of them


def beside_sb3(wanted: argparse.Namespace) -> dict[str, Any]:
    """Measure traces and preferences; ratios are holdall's over Stable-Baselines3's."""
    results = {}
    for name, prefer in itertools.product(wanted.traces, wanted.prefer):
        rounds = [{side: _child(wanted, name, prefer, [side]) for side in ("sb3", "holdall")} for _ in range(ROUNDS)]
        own = {side: _of_rounds([alone[side]["sample_us"][side] for alone in rounds]) for side in ("sb3", "holdall")}
        alone = rounds[-1]
        turns = _child(wanted, name, prefer, ["sb3", "holdall"])["sample_us"]
        slopes = _child(wanted, name, prefer, ["grown"])
        row = {
            "bytes_per_transition": slopes["process"],
            "counted_bytes_per_transition": slopes["counted"],
            "read_from": {"blocks": slopes["blocks"], "transitions": slopes["transitions"]},
            "sb3_bytes_per_transition": alone["sb3"]["bytes_per_transition"],
            "sample_of_sb3": {
                "alone": {kind: own["holdall"][kind] / own["sb3"][kind] for kind in ("median", "min")},
                "in_turns": {kind: turns["holdall"][kind] / turns["sb3"][kind] for kind in ("median", "min")},
            },
            "sample_us": {"alone": own, "in_turns": turns},
            "transitions": alone["holdall"]["transitions"],
            "found": alone["holdall"]["found"],
        }
        results[f"{name} {prefer}"] = row
        _say(name, prefer, row)
    return results


def _of_rounds(times: list[dict[str, float]]) -> dict[str, float]:
    return {"median": statistics.median(one["median"] for one in times), "min": min(one["min"] for one in times)}


def _say(name: str, prefer: str, row: dict[str, Any]) -> None:
    ratios = row["sample_of_sb3"]
    text = f"{name:10} {prefer:9} {row['bytes_per_transition']:8,.0f} B"
    text += f" (its own count {row['counted_bytes_per_transition']:,.0f})  sample of SB3's"
    for how in ratios:
        text += f"  {how} {ratios[how]['median']:.2f} (min {ratios[how]['min']:.2f})"
    print(text, flush=True)
    for field, finding in row["found"].items():
        if "sealed" in str(finding):
            print(f"    {field}: {finding}", flush=True)


def beside_one_lane(wanted: argparse.Namespace) -> dict[str, Any]:
    """Compare the bytes of many lanes with those of one that plays the same pieces, one after another."""
    results = {}
    for name, prefer in itertools.product(wanted.traces, wanted.prefer):
        taken = {lanes: _child(wanted, name, prefer, ["core"], lanes, wanted.lanes) for lanes in (1, wanted.lanes)}
        row: dict[str, Any] = {"found": {str(lanes): child["found"] for lanes, child in taken.items()}}
        for key, what in (("bytes_per_transition", "compressed"), ("counted_bytes_per_transition", "whole")):
            one, many = (child[key] for child in taken.values())
            row[what] = {"one": one, "many": many, "ratio": many / one}
            print(
                f"{name:10} {prefer:9} {what}: {one:,.1f} B, {wanted.lanes} lanes {many:,.1f} B: {many / one:.3f}",
                flush=True,
            )
        how = " live" if wanted.live else f" in stretches of {wanted.stretch}" if wanted.stretch else ""
        results[f"{name} {prefer}{how}"] = row | {"transitions": taken[1]["transitions"]}
    return results


def beside_load(wanted: argparse.Namespace) -> dict[str, Any]:
    """Say which codecs many processes choose, every second of them beside others that keep all cores busy."""
    results = {}
    for name, prefer in itertools.product(wanted.traces, wanted.prefer):
        answers: dict[str, list[Any]] = {"quiet": [], "loaded": []}
        for number in range(wanted.chosen):
            is_loaded = number % 2 == 1
            burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(BURNING if is_loaded else 0)]
            try:
                answers["loaded" if is_loaded else "quiet"].append(_child(wanted, name, prefer, ["chosen"])["found"])
            finally:
                for process in burning:
                    process.kill()
                    process.wait()
        different = {json.dumps(one, sort_keys=True) for of in answers.values() for one in of}
        results[f"{name} {prefer}"] = {"runs": wanted.chosen, "chosen": [json.loads(one) for one in sorted(different)]}
        print(
            f"{name:10} {prefer:9} {wanted.chosen} runs, {len(different)} choices: {', '.join(different)}", flush=True
        )
    return results


MECHANISMS = ("pairs", "keys", "lanes")


def exclude(mechanisms: list[str]) -> None:
    """Switch mechanisms of the codecs off in this process."""
    choice = importlib.import_module("holdall.storage.codec_choice")
    slices = importlib.import_module("holdall.storage.slices")
    if "pairs" in mechanisms:
        vars(choice)["_measure_pairs"] = lambda *_: None
    if "keys" in mechanisms:
        vars(choice)["measure_behind_keys"] = lambda *_: []
    if "lanes" in mechanisms:
        slices.FrozenBlock.lane_order = lambda _: None


def by_mechanism(wanted: argparse.Namespace) -> dict[str, Any]:
    """Compare the compressed bytes of a transition with and without each mechanism, in one lane and in several."""
    results: dict[str, Any] = {}
    held = wanted.held
    for name, lanes, prefer in itertools.product(wanted.traces, (1, wanted.lanes), wanted.prefer):
        row = {}
        for without in ([], *([one] for one in MECHANISMS), list(MECHANISMS)):
            if without == ["lanes"] and lanes == 1:
                continue
            if prefer != "memory" and (without == ["pairs"] or (lanes == 1 and len(without) > 1)):
                continue
            wanted.without = without
            wanted.held = min(held, HELD_OF.get(name, held))
            child = _child(wanted, name, prefer, ["core"], lanes, lanes)
            label = "without " + ",".join(without) if without else "with all"
            row[label] = {
                "compressed": child["bytes_per_transition"],
                "counted": child["counted_bytes_per_transition"],
                "sample_us": child["sample_us"]["core"],
                "found": child["found"],
                "transitions": child["transitions"],
            }
            sealed = {field: text for field, text in child["found"].items() if "sealed" in str(text)}
            print(
                f"{name:10} {prefer:9} {lanes:2} {label:25} {child['bytes_per_transition']:9,.1f} B {sealed}",
                flush=True,
            )
        results[f"{name} {prefer} {lanes}"] = row
        written = json.loads(wanted.json.read_text("utf-8")) if wanted.json.exists() else {}
        wanted.json.write_text(json.dumps(written | {f"{name} {prefer} {lanes}": row}, indent=1) + "\n", "utf-8")
    return results


HELD_OF = {"game_boy": 3200, "dog": 10_000, "quadruped": 10_000, "nethack": 1600, "crafter": 16_000, "procgen": 16_000}


def _child(
    wanted: argparse.Namespace, name: str, prefer: str, sides: list[str], lanes: int = 1, pieces: int = 1
) -> dict[str, Any]:
    command = [sys.executable, __file__, *([str(wanted.folder)] if wanted.folder else []), "--prefer", prefer]
    command += ["--live" if wanted.live else "--traces", name]
    command += [
        "--child",
        ",".join(sides),
        "--lanes",
        str(lanes),
        "--pieces",
        str(pieces),
        "--stretch",
        str(wanted.stretch),
        "--held",
        str(wanted.held),
        "--without",
        ",".join(wanted.without),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["result"]
    return result


def _in_child(wanted: argparse.Namespace, name: str, prefer: str) -> dict[str, Any]:
    if wanted.live:
        return measure(live(name, wanted.lanes), wanted.child, prefer, wanted.held)
    file = wanted.folder / TRACES[name]
    if wanted.child == ["grown"]:
        return grown(file, prefer)
    if wanted.child == ["chosen"]:
        return chosen(file, prefer)
    return measure(played(file, wanted.lanes, wanted.pieces, wanted.stretch), wanted.child, prefer, wanted.held)


def main() -> None:
    """Read the command line, measure, write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--traces", type=lambda text: text.split(","))
    parser.add_argument("--live", type=lambda text: text.split(","), help="games in place of traces, with --lanes")
    parser.add_argument("--prefer", type=lambda text: text.split(","), default=["balanced"])
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--stretch", type=int, default=0, help="steps of a lane before those of the next, with --lanes")
    parser.add_argument("--held", type=int, default=MOST_HELD)
    parser.add_argument("--chosen", type=int, default=0, metavar="RUNS")
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--slices", action="store_true")
    parser.add_argument("--mechanisms", action="store_true")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[])
    parser.add_argument("--pieces", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=lambda text: text.split(","), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "codecs.json")
    wanted = parser.parse_args()
    is_played = not (wanted.video or wanted.slices)
    if not (wanted.folder or wanted.live):
        parser.error("name the folder of traces, or --live and games")
    wanted.traces = wanted.live or wanted.traces or [t for t in TRACES if not (is_played and t in NOT_PLAYED)]
    wanted.named = {} if wanted.live else {name: TRACES[name] for name in wanted.traces}
    exclude(wanted.without)
    if wanted.child:
        emit({"result": _in_child(wanted, wanted.traces[0], wanted.prefer[0])})
        return
    if wanted.mechanisms:
        kind, found = "mechanisms", by_mechanism(wanted)
    elif wanted.video:
        kind, found = "video", importlib.import_module("video").beside_video(wanted.folder, wanted.named)
    elif wanted.slices:
        kind, found = "slices", importlib.import_module("video").slice_costs(wanted.folder, wanted.named, wanted.prefer)
    elif wanted.chosen:
        kind, found = "chosen", beside_load(wanted)
    elif wanted.lanes > 1:
        kind, found = "lanes", beside_one_lane(wanted)
    else:
        kind, found = "beside_sb3", beside_sb3(wanted)
    written = json.loads(wanted.json.read_text("utf-8")) if wanted.json.exists() else {}
    written[kind] = written.get(kind, {}) | found
    written |= {"commit": commit(), "versions": versions(), "machine": machine()}
    wanted.json.write_text(json.dumps(written, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
