"""Compress recorded observations: bytes, the chosen codec, and the time of a batch compared with a raw one.

    python benchmarks/memory/trace_codecs.py FOLDER [--traces seaquest,dog] [--prefer balanced,memory] [--lanes 16]
    python benchmarks/memory/trace_codecs.py FOLDER --traces dog --presets     # every preset, not only the chosen one
    python benchmarks/memory/trace_codecs.py FOLDER --video                    # compared with FFV1 and x264

FOLDER holds traces as `holdall.tools.bench.trace` describes them. A trace is played again and again, each time
mirrored, inverted or brighter, so that no pass repeats an older one. With `--lanes`, each lane plays a piece of the
trace. The codec of a field is chosen on its first block and used for three blocks. Batches of 256 transitions are then
read from these blocks, raw and compressed. Times are CPU times of one thread, the least of several batches. The raw
blocks fit into the cache of a large processor, so a raw gather from a large memory takes longer than the one here.
`--video` needs the package imageio-ffmpeg.

`gate.py --traces FOLDER` compares whole buffers with Stable-Baselines3's.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdall._native import Block, Coded, Raw, Reader, encode
from holdall.codec.choice import FieldCodec, try_presets
from holdall.codec.presets import describe_codec, estimate_cost
from holdall.codec.sample import Sample
from holdall.schema import Leaf, Schema
from holdall.store.budget import Budget
from holdall.store.layouts import SlicedLayout
from holdall.store.store import Store
from holdall.store.tuning import Tuning
from holdall.store.windows import Window
from holdall.tools.bench.trace import Trace, TraceStep

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, store
from shared.streams import Step, Stream

TRACES = {
    "minigrid": "minigrid_FourRooms_rgb56_3000.npz",
    "procgen": "procgen_coinrun_rgb64_1200.npz",
    "game_boy": "gb_renegaderush_600.npz",
    "pong": "atari_Pong_gray84_random_2000.npz",
    "seaquest": "atari_Seaquest_gray84_random.npz",
    "crafter": "crafter_rgb64_600.npz",
    "quadruped": "dmc_quadruped_walk_rgb84_dict_200.npz",
    "dog": "pidog_cam84_stand.npz",
    "nethack": "nle_score_dict_400.npz",
}
MAX_BLOCKS = 3
MAX_TICKS = 60_000
TICKS_BETWEEN_CHECKS = 64
RAW_BYTES = 2**40
"""Memory that the store believes to have, so that it compresses nothing by itself."""
BATCH = 256
ROUNDS = 6
BRIGHTER = 5
"""What every eighth pass adds to all pixels, modulo 256."""


# ---------------------------------------------------------------- frames


def vary(arrays: dict[str, Any], number: int) -> dict[str, Any]:
    """Mirror, invert or brighten all images of a trace."""
    changed = {}
    for name, rows in arrays.items():
        changed[name] = rows[:, None] if name.startswith("f_") and rows.ndim == 1 else rows
        if name.startswith("f_") and rows.dtype == np.uint8 and rows.ndim >= 3 and rows.shape[2] > 8:
            turned = rows[:, :: -1 if number & 1 else 1, :: -1 if number & 2 else 1]
            shown = 255 - turned if number & 4 else turned
            changed[name] = shown + np.uint8(number // 8 * BRIGHTER % 256)
    return changed


def play(file: Path, lanes: int) -> Stream:
    """Play a trace without end. With several lanes, each lane plays a piece of the trace."""
    with np.load(file, allow_pickle=False) as loaded:
        arrays = {name: loaded[name] for name in loaded.files}
    if "quadruped" in file.name:  # A Dict of which one part is stacked is not a trace that `holdall bench` plays.
        arrays["meta"] = np.array(json.dumps({"stack": 1}))
    trace = Trace(vary(arrays, 0), file.name)
    return Stream(trace.observation_space, trace.action_space, lanes, play_pieces(arrays, file.name, lanes))


def play_pieces(arrays: dict[str, Any], name: str, lanes: int) -> Iterator[Step]:
    """Play pieces of a trace side by side, pass after pass."""
    for number in itertools.count():
        trace = Trace(vary(arrays, number), name)
        length = len(trace) // lanes
        pieces = [itertools.islice(trace.steps(), lane * length, (lane + 1) * length) for lane in range(lanes)]
        for position, steps in enumerate(zip(*pieces, strict=True)):
            yield join_lanes(steps, is_last=position == length - 1)


def join_lanes(steps: tuple[TraceStep, ...], *, is_last: bool) -> Step:
    """Return the steps of all lanes as one. The last step of a piece ends its episode."""
    obs, action, reward, next_obs, terminated, truncated = (join(parts) for parts in zip(*steps, strict=True))
    return Step(obs, action, reward, next_obs, terminated, truncated | (is_last & ~terminated))


def join(parts: Iterable[Any]) -> Any:
    """Concatenate arrays, or Dicts of arrays."""
    listed = list(parts)
    if isinstance(listed[0], dict):
        return {key: join(part[key] for part in listed) for key in listed[0]}
    return np.concatenate(listed)


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Field:
    """The full blocks of one observation leaf, uncompressed."""

    number: int
    leaf: Leaf
    window: Window
    blocks: list[Block]
    raw: list[Raw]  # Forms of the blocks.

    @property
    def raw_bytes(self) -> int:
        """Bytes of all slices."""
        return sum(block.slice_count * block.slice_bytes for block in self.blocks)

    @property
    def slice_count(self) -> int:
        """Number of all slices."""
        return sum(block.slice_count for block in self.blocks)


def fill(stream: Stream) -> tuple[Store, list[Field]]:
    """Write steps until every field that is cut into slices has several full blocks."""
    schema = Schema.of(stream.observation_space, stream.action_space, None, stream.lanes)
    tuning = Tuning()
    budget = Budget.automatic(RAW_BYTES, can_spill=False, tuning=tuning)
    store = Store(schema, 10**8, budget, tuning=tuning, threads=1)
    fields: list[Field] = []
    for tick, step in enumerate(itertools.islice(stream.steps, MAX_TICKS)):
        store.append(step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated)
        if tick % TICKS_BETWEEN_CHECKS == 0:
            fields = list_fields(store)
            counts = [len(field.blocks) for field in fields]
            # Some fields show few different slices and take very long to fill a block.
            if counts and (min(counts) >= MAX_BLOCKS or max(counts) >= 2 * MAX_BLOCKS):
                break
    kept = [replace(field, blocks=field.blocks[:MAX_BLOCKS], raw=field.raw[:MAX_BLOCKS]) for field in fields]
    return store, [field for field in kept if field.blocks]


def list_fields(store: Store) -> list[Field]:
    """Return the fields that are cut into slices, with the full blocks of their present window."""
    state = store.snapshot()
    fields = []
    for number, window in enumerate(state.windows):
        if not isinstance(state.layouts[number], SlicedLayout):
            continue
        blocks: dict[Block, None] = {}
        for segment in state.segments:
            block = segment.parts[number].block
            if block is not None and not block.is_open and block.slice_bytes == window.slice_bytes:
                blocks[block] = None
        leaf = store.schema.observation.leaves[number]
        raw = [block.form for block in blocks if isinstance(block.form, Raw)]
        fields.append(Field(number, leaf, window, list(blocks), raw))
    return fields


def time_batches(store: Store, field: Field, forms: Sequence[Raw | Coded]) -> float:
    """Return the microseconds of one thread for a transition of a batch, with blocks in the given forms."""
    for block, form in zip(field.blocks, forms, strict=True):
        block.form = form
    catalog = store.catalog
    ids = list_ids(store, field)
    outputs = (store.columns.obs_outputs[field.number], store.columns.next_obs_outputs[field.number])
    reader = Reader(2**28)
    least = np.inf
    for round_number in range(ROUNDS):
        batch = np.random.default_rng(round_number).choice(ids, BATCH)
        start = time.thread_time()
        reader.gather(catalog, batch, outputs)
        least = min(least, time.thread_time() - start)
    return float(least) / BATCH * 1e6


def list_ids(store: Store, field: Field) -> Any:
    """Return the ids of all transitions whose slices are in the blocks of `field`."""
    lanes = store.schema.num_envs
    ids = [
        np.arange(segment.first_tick * lanes, (segment.first_tick + segment.ticks) * lanes)
        for segment in store.catalog.segments
        if segment.parts[field.number].block in field.blocks
    ]
    return np.concatenate(ids)


# ---------------------------------------------------------------- measurements


def measure_choice(store: Store, field: Field, prefer: str) -> dict[str, Any]:
    """Compress the blocks of a field as the store does."""
    raw_us = time_batches(store, field, field.raw)
    codec = FieldCodec(field.leaf, field.window, prefer, Tuning())
    start = time.thread_time()
    coded = [codec.encode(field.blocks[0], is_behind=False)]
    first_s = time.thread_time() - start
    start = time.thread_time()
    coded += [codec.encode(block, is_behind=False) for block in field.blocks[1:]]
    encode_s = time.thread_time() - start
    decode_us = time_batches(store, field, coded)
    time_batches(store, field, field.raw)
    later_bytes = sum(block.slice_count * block.slice_bytes for block in field.blocks[1:])
    return {
        "bytes": sum(form.nbytes for form in coded) / field.slice_count,
        "raw_bytes": field.leaf.nbytes // field.window.count,
        "plain_bytes": 2 * field.leaf.nbytes,
        "gather_us": decode_us,
        "gather_over_raw": decode_us / raw_us,
        "choose_s": first_s,
        "encode_mb_per_s": later_bytes / 1e6 / max(encode_s, 1e-9),
        "codec": describe_codec(coded[0].codec),
        "reason": codec.describe(),
    }


def measure_presets(store: Store, field: Field) -> list[dict[str, Any]]:
    """Compress the blocks of a field with every preset of its kind."""
    raw_us = time_batches(store, field, field.raw)
    sample = Sample.from_block(field.blocks[0])
    rows = []
    for codec in [choice.codec for choice in try_presets(field.leaf, field.window, sample)]:
        coded = [encode(block, codec, block.lane_order()) for block in field.blocks]
        fitting = [form for form in coded if form is not None]
        if len(fitting) < len(coded):
            continue
        nbytes = sum(form.nbytes for form in fitting)
        gather_us = time_batches(store, field, fitting)
        time_batches(store, field, field.raw)
        rows.append(
            {
                "codec": describe_codec(codec),
                "bytes": nbytes / field.slice_count,
                "gather_over_raw": gather_us / raw_us,
                "estimated": estimate_cost(codec, field.window, nbytes / field.raw_bytes),
            }
        )
    return sorted(rows, key=lambda row: row["bytes"])


def measure_traces(wanted: argparse.Namespace) -> dict[str, Any]:
    """Measure traces and preferences, and print a line for each."""
    results: dict[str, Any] = {}
    for name in wanted.traces:
        store, fields = fill(play(wanted.folder / TRACES[name], wanted.lanes))
        for field, prefer in itertools.product(fields, wanted.prefer):
            row = measure_choice(store, field, prefer)
            lanes = f" {wanted.lanes} lanes" if wanted.lanes > 1 else ""
            results[f"{name} {prefer}{lanes}"] = row
            print(
                f"{name:10}{lanes} {field.leaf.name:8} {prefer:9} {row['bytes']:9,.1f} of {row['raw_bytes']:,} B  "
                f"gather {row['gather_over_raw']:.2f} of raw  {row['reason']}",
                flush=True,
            )
    return results


def show_presets(wanted: argparse.Namespace) -> None:
    """Print what every preset makes of the traces. A star marks presets that no smaller one beats in time."""
    for name in wanted.traces:
        store, fields = fill(play(wanted.folder / TRACES[name], wanted.lanes))
        for field in fields:
            print(f"{name} {field.leaf.name}: slices of {field.window.slice_bytes:,} B")
            least = np.inf
            for row in measure_presets(store, field):
                star = "*" if row["gather_over_raw"] < least else " "
                least = min(least, row["gather_over_raw"])
                print(
                    f"  {star} {row['bytes']:10,.1f} B  gather {row['gather_over_raw']:6.2f} of raw, "
                    f"estimated {row['estimated']:6.2f}  {row['codec']}",
                    flush=True,
                )


TITLES = {
    "minigrid": "MiniGrid, 56 x 56 RGB",
    "procgen": "Procgen, 64 x 64 RGB",
    "game_boy": "Game Boy, 144 x 160 RGB",
    "pong": "Pong, 84 x 84 gray",
    "seaquest": "Seaquest, 84 x 84 gray",
    "crafter": "Crafter, 64 x 64 RGB",
    "quadruped": "a simulated quadruped's camera, 84 x 84 RGB",
    "dog": "a robot dog's camera, 84 x 84 RGB",
}


def figures_of(name: str, row: dict[str, Any]) -> list[Figure]:
    """Return the figures of a field with one preference. The name has the trace, the preference and the lanes."""
    case = f"transitions: {name}"
    return [
        Figure(case, "slice", "B", row["bytes"]),
        Figure(case, "raw slice", "B", row["raw_bytes"]),
        Figure(case, "transition in a plain buffer", "B", row["plain_bytes"]),
        Figure(case, "gather", "of a raw gather's time", row["gather_over_raw"]),
        Figure(case, "encode", "MB/s", row["encode_mb_per_s"]),
        Figure(case, "choose", "s", row["choose_s"]),
        Figure(case, "codec", "", row["codec"]),
    ]


def figures_of_video(name: str, row: dict[str, Any]) -> list[Figure]:
    """Return the bytes of a frame, and those of lossless video."""
    case = f"frames: {TITLES[name]}"
    return [
        Figure(case, "raw", "B", row["raw"]),
        Figure(case, '`prefer="balanced"`', "B", row["balanced"]),
        Figure(case, '`prefer="memory"`', "B", row["memory"]),
        Figure(case, "FFV1", "B", row["ffv1"]),
        Figure(case, "x264", "B", row["x264"]),
    ]


def main() -> None:
    """Read the command line, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the traces")
    parser.add_argument(
        "--traces", type=lambda text: text.split(","), default=list(TRACES), metavar="NAMES", help="default: all"
    )
    parser.add_argument("--prefer", type=lambda text: text.split(","), default=["balanced", "memory"], metavar="NAMES")
    parser.add_argument("--lanes", type=int, default=1, help="lanes of the memory (%(default)s)")
    parser.add_argument("--presets", action="store_true", help="print every preset, not only the chosen one")
    parser.add_argument("--video", action="store_true", help="compare with FFV1 and x264")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    wanted = parser.parse_args()
    if wanted.presets:
        show_presets(wanted)
        return
    if wanted.video:
        named = {name: TRACES[name] for name in wanted.traces if name in TITLES}  # The others are no images.
        found = importlib.import_module("video").compare_with_video(wanted.folder, named)
        figures = [figure for name, row in found.items() for figure in figures_of_video(name, row)]
    else:
        figures = [figure for name, row in measure_traces(wanted).items() for figure in figures_of(name, row)]
    if wanted.json is not None:
        store(wanted.json, figures, describe_run({"lanes": wanted.lanes}))


if __name__ == "__main__":
    main()
