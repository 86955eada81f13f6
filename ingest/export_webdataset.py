"""The selection as tar files in the convention of WebDataset: members of one sample follow each other, `KEY.EXTENSION`.

The key is the uid in hexadecimal; `KEY.<field>.npy` is an array, `KEY.params.json` what makes the sample again.
`webdataset.WebDataset("PATH/data-{000000..000012}.tar").decode()` gives arrays and dictionaries, under names in lower
case as that package has it (`focus_a.npy`). `dataset.json` beside them says what the fields are. Names and times of
members are fixed: the same selection makes the same bytes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exitwave.ingest.building import build_file
from exitwave.ingest.calibration import plain_params

if TYPE_CHECKING:
    from exitwave.ingest.exporting import Samples

__all__ = ["write_webdataset"]

_TARGET = 256 << 20  # bytes of a tar file


def write_webdataset(folder: Path, samples: Samples, told: Callable[[int], None]) -> None:
    """Tar files `data-000000.tar`, … of at most 256 MiB (or one sample) each in `folder`; whole ones are kept."""
    from exitwave.ingest.exporting import as_json, describe_fields

    size = sum(field.nbytes for field in samples.fields)
    per_file = max(1, _TARGET // max(1, size))
    count = -(-len(samples) // per_file)
    for number in range(count):
        path = folder / f"data-{number:06d}.tar"
        rows = range(number * per_file, min((number + 1) * per_file, len(samples)))
        if path.exists():
            told(rows.stop)
            continue
        with build_file(path) as part, tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as tar:
            for k in rows:
                uid, params, arrays = samples.read(k)
                record, _ = samples.data.record_of(samples.numbers[k])
                for name, array in arrays.items():
                    buffer = io.BytesIO()
                    np.save(buffer, array, allow_pickle=False)
                    _add(tar, f"{uid:016x}.{name}.npy", buffer.getvalue())
                plain = plain_params(params)
                formula = next((s.formula for s in record.structures if s.index == plain.get("structure")), "")
                about = {**samples.provenance, "uid": f"{uid:016x}", "formula": formula}
                _add(tar, f"{uid:016x}.params.json", as_json({**plain, **about}))
                told(k + 1)
    about = {
        **samples.provenance,
        "format": "exitwave-webdataset",
        "samples": len(samples),
        "files": count,
        "urls": f"data-{{000000..{count - 1:06d}}}.tar",
        "fields": list(describe_fields(samples)),
    }
    (folder / "dataset.json").write_bytes(as_json(about))


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o644
    tar.addfile(member, io.BytesIO(data))
