"""What one would write without exitwave: abTEM, Dask and h5py, a task for each sample.

    python benchmarks/peers/abtem_dask_script.py jobs.json out.h5 --workers 1

Each worker has one thread, builds a structure's potential once, and calls abTEM eagerly with its own defaults
otherwise; the patterns come back to this process, which writes them to one HDF5 file. A job is what one sample needs:
energy_eV, semiangle_mrad, defocus_A, positions_xy_A, and the structure (numbers, positions_A, cell_A, repeat, gpts,
slice_thickness_A, and the RMS displacement_A of its atoms with a seed). Prints {"seconds", "samples", "first_s"}:
seconds from the first task to the closed file. Before that workers have started and imported, and each has done one
position of the first sample, which plans its transforms and builds its potential: first_s, which a campaign of hours
does not feel.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"


@lru_cache(maxsize=2)
def potential(structure: str) -> Any:
    import abtem
    from ase import Atoms

    s = json.loads(structure)
    atoms = Atoms(numbers=s["numbers"], positions=s["positions_A"], cell=s["cell_A"], pbc=True) * s["repeat"]
    if s["displacement_A"]:
        atoms = abtem.FrozenPhonons(atoms, 1, s["displacement_A"], seed=s["seed"] % 2**32)
    return abtem.Potential(atoms, gpts=s["gpts"], slice_thickness=s["slice_thickness_A"]).build(lazy=False)


def simulate(job: dict[str, Any]) -> Any:
    import abtem

    probe = abtem.Probe(
        energy=job["energy_eV"], semiangle_cutoff=job["semiangle_mrad"], defocus=job["defocus_A"], soft=True
    )
    slices = potential(job["structure"])
    probe.grid.match(slices)
    measurement = probe.multislice(
        slices,
        scan=abtem.CustomScan(job["positions_xy_A"]),
        detectors=abtem.PixelatedDetector(max_angle=job["max_angle_mrad"]),
        lazy=False,
    )
    return measurement.array


def warm_up() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import abtem

    abtem.config.set({"fftw.threads": 1, "num-workers": 1, "diagnostics.progress_bar": False})
    return str(abtem.__version__)


def main() -> None:
    import h5py
    from distributed import Client, LocalCluster, as_completed

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    jobs = json.loads(arguments.jobs.read_text())
    cluster = LocalCluster(n_workers=arguments.workers, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster) as client:
        client.run(warm_up)
        began = time.perf_counter()
        client.run(simulate, {**jobs[0], "positions_xy_A": jobs[0]["positions_xy_A"][:1]})
        first = time.perf_counter() - began
        began = time.perf_counter()
        futures = client.map(simulate, jobs, pure=False)
        place = {future.key: index for index, future in enumerate(futures)}
        with h5py.File(arguments.out, "w") as file:
            patterns = None
            for future, found in as_completed(futures, with_results=True):
                if patterns is None:
                    patterns = file.create_dataset("patterns", (len(jobs), *found.shape), dtype="f4")
                patterns[place[future.key]] = found
                future.release()
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "samples": len(jobs), "first_s": first}))


if __name__ == "__main__":
    main()
