"""A controller as a process of its own, for the tests that kill it: `python sim_controller.py CAMPAIGN.json DATASET N`.

Prints one line of JSON per event. SIGTERM and SIGINT set the stop event, as the command line does. Exit codes as there.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

from exitwave.ingest.errors import ExitwaveError
from exitwave.simulate import CampaignSpec, make_cluster, make_plan, run_campaign


def main() -> int:
    campaign, dataset, workers = sys.argv[1:]
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    spec = CampaignSpec.model_validate(json.loads(Path(campaign).read_text()))
    plan = make_plan(spec, base_dir=Path(campaign).parent)
    cluster = make_cluster(
        "inline" if workers == "inline" else "local", workers=1 if workers == "inline" else int(workers)
    )
    try:
        result = run_campaign(
            plan, Path(dataset), cluster, stop=stop, listeners=[lambda event: print(json.dumps(event), flush=True)]
        )
    except ExitwaveError as error:
        print(json.dumps({"kind": "refused", "error": type(error).__name__, "why": str(error)}), flush=True)
        return error.exit_code
    return 3 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
