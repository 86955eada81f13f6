"""The controller of the chaos test: `python chaos_controller.py CHAOS.json DATASET CLUSTER [no-locks]`.

CHAOS.json: {"campaign": …, "deeds": {structure index: deed}, "pause_s", "task_s", "task_memory_bytes"}. CLUSTER:
inline, or an address. `no-locks`: as on a file system whose locks do not reach other machines. SIGTERM and SIGINT set
the stop event, as the command line does. Exit codes as there.
"""

from __future__ import annotations

import fcntl
import json
import signal
import sys
import threading
from pathlib import Path

from chaos_tasks import with_deeds

from exitwave.ingest.errors import ExitwaveError
from exitwave.simulate import CampaignSpec, make_cluster, make_plan
from exitwave.simulate.campaign import Patience, run_campaign


def main() -> int:
    chaos, dataset, cluster, *locks = sys.argv[1:]
    if locks:
        fcntl.flock = lambda *_: None
    content = json.loads(Path(chaos).read_text())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    spec = CampaignSpec.model_validate(content["campaign"])
    plan = with_deeds(
        make_plan(spec, base_dir=Path(chaos).parent),
        {int(k): deed for k, deed in content["deeds"].items()},
        content["pause_s"],
    )
    patience = Patience(task_s=content["task_s"], task_memory_bytes=content["task_memory_bytes"], drain_s=10.0)
    try:
        result = run_campaign(plan, Path(dataset), make_cluster(cluster), stop=stop, patience=patience)
    except ExitwaveError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 3 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
