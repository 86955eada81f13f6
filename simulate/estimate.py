"""What a campaign would cost that is too large to be drawn sample by sample: from an index and a given cost.

Nothing is simulated. Structures, splits and shards are counted exactly; of `cost.drawn` structures, spread evenly over
the index, one sample each is planned as `make_plan` would, and from these follow the share of samples that cannot be
simulated, core-hours (with their standard error) and memory.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exitwave.ingest.errors import UsageError
from exitwave.ingest.schema import PARAMS_DTYPE
from exitwave.simulate.cost import sample_bytes, worker_memory_bytes
from exitwave.simulate.plan import prepare_crystal
from exitwave.simulate.scanning import probe_count
from exitwave.simulate.spec import CampaignSpec, CostSpec
from exitwave.simulate.splits import SplitUnit, assign_splits
from exitwave.simulate.structures.index import IndexLine, read_index
from exitwave.simulate.structures.sources import Crystal, Rejected
from exitwave.simulate.tasks import SampleSpec, draw_sample, fields_of, reject_sample

__all__ = ["can_estimate", "estimate_campaign", "staging_times"]


def can_estimate(spec: CampaignSpec) -> bool:
    """Whether the campaign says what `estimate_campaign` needs: its cost, and structures from indices alone."""
    axes = all(isinstance(source.zone_axes, tuple) for source in spec.structures)
    return spec.cost is not None and axes and all(source.index is not None for source in spec.structures)


def estimate_campaign(spec: CampaignSpec, *, base_dir: Path, workers: int = 1) -> dict[str, Any]:
    """The contract's `plan` document, with `core_hours_error`, `staging` and `estimated_from`.

    Raises UsageError as `make_plan` does; `can_estimate(spec)` is expected.
    """
    assert spec.cost is not None
    lines = list(_lines(spec, base_dir))
    axes = [zone for _, crystal_axes, _ in lines for zone in crystal_axes]
    units = [SplitUnit.of(line, split) for line, zones, split in lines for _ in zones]
    splits = Counter(name for name in assign_splits(units, spec.split, spec.seed) if name is not None)
    structures = sum(splits.values())
    drawn, rejected, lost = _draw(spec, lines)
    if not drawn:
        raise UsageError(f"structures: none of {len(rejected) + lost} that were tried can be simulated")
    asked = len(rejected) + lost + len(drawn)
    kept = len(drawn) / asked
    samples = round(structures * spec.samples_per_structure * kept)
    shards = round(structures * kept) * math.ceil(spec.samples_per_structure / spec.samples_per_shard)
    fields = fields_of(spec.recipe())
    size = samples * (sample_bytes(fields) + PARAMS_DTYPE.itemsize + 12) + 64_000 * shards
    seconds = [_core_seconds(sample, spec.cost) for sample in drawn]
    mean = statistics.fmean(seconds)
    error = statistics.stdev(seconds) / math.sqrt(len(seconds)) if len(seconds) > 1 else 0.0
    return {
        "samples": samples,
        "shards": shards,
        "structures": structures,
        "rejected": [{"source": r.source, "why": r.why} for r in rejected[:20]],
        "rejected_samples": structures * spec.samples_per_structure - samples,
        "splits": {name: round(count * spec.samples_per_structure * kept) for name, count in splits.items()},
        "bytes": size,
        "core_hours": samples * mean / 3600.0,
        "core_hours_error": samples * error / 3600.0,
        "eta_s": samples * mean / max(1, workers),
        "workers": workers,
        "calibrated": True,
        "memory_per_worker_bytes": max(worker_memory_bytes(sample, spec.simulator) for sample in drawn),
        "staging": staging_times(size, spec.cost),
        "estimated_from": {"crystals": len(lines), "zone_axes": len(axes), "drawn_samples": asked},
        "warnings": [],
    }


def _lines(
    spec: CampaignSpec, base_dir: Path
) -> Iterator[tuple[IndexLine, tuple[tuple[int, int, int], ...], str | None]]:
    for number, source in enumerate(spec.structures):
        assert source.index is not None and isinstance(source.zone_axes, tuple)
        for line in read_index(base_dir / Path(source.index).expanduser(), where=f"structures[{number}].index"):
            yield line, source.zone_axes, source.split


def _draw(spec: CampaignSpec, lines: list[Any]) -> tuple[list[SampleSpec], list[Rejected], int]:
    """One sample of each of some structures; the structures that were rejected; how many samples were."""
    assert spec.cost is not None
    count = min(spec.cost.drawn, len(lines))
    drawn: list[SampleSpec] = []
    rejected: list[Rejected] = []
    lost = 0
    recipe = spec.recipe()
    for place in range(count):
        line, zones, split = lines[place * len(lines) // count]
        crystal = Crystal(
            atoms=line.atoms(),
            source=line.source,
            licence=line.licence,
            key=line.key,
            zone_axes=(zones[place % len(zones)],),
            split=split,
        )
        for outcome in prepare_crystal(crystal, spec):
            if isinstance(outcome, Rejected):
                rejected.append(outcome)
                continue
            sample = draw_sample(outcome, recipe, place % spec.samples_per_structure, "train")
            if reject_sample(sample) is None:
                drawn.append(sample)
            else:
                lost += 1
    return drawn, rejected, lost


def _core_seconds(sample: SampleSpec, cost: CostSpec) -> float:
    """Probes x slices x the given time, by points of the grid; each frozen-phonon configuration anew."""
    rows, columns = sample.grid_yx
    configurations = max(1, sample.recipe.phonons.count)
    waves = probe_count(sample) * sample.exit_plane * configurations
    return waves * cost.us_per_probe_slice * 1e-6 * rows * columns / cost.grid**2


def staging_times(nbytes: int, cost: CostSpec) -> list[dict[str, Any]]:
    """For each number of nodes: GB a node when every shard goes to one node, whether they fit, and seconds.

    What is slower decides: the file system that all nodes share, or what one node takes in.
    """
    rows = []
    for nodes in cost.nodes:
        share = nbytes / nodes / 1e9
        seconds = max(nbytes / 1e9 / cost.shared_GB_per_s, share / cost.node_GB_per_s)
        rows.append(
            {
                "nodes": nodes,
                "GB_per_node": round(share, 1),
                "fits": share <= cost.node_disk_GB,
                "seconds": round(seconds),
            }
        )
    return rows
