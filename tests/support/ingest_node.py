"""One node of a cluster, as a process of its own: stages a data set with its peers and prints its report as JSON.

python ingest_node.py '{"dataset": …, "cache": …, "me": …, "nodes": […], "secret": …, "limits": {…}, "die_at": …}'
"""

from __future__ import annotations

import json
import sys

from ingest_child import die_at

from exitwave.ingest.peers_staging import PeerOptions
from exitwave.ingest.staging import Share, stage
from exitwave.ingest.staging_run import Limits

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    die_at(asked.get("die_at", "never"))
    options = PeerOptions(
        me=asked["me"],
        nodes=tuple(asked["nodes"]),
        secret=asked["secret"].encode(),
        join_s=asked.get("join_s", 20.0),
        linger_s=20.0,
        down_s=asked.get("down_s", 30.0),
        timeout_s=asked.get("timeout_s", 5.0),
    )
    limits = Limits(**asked.get("limits", {}))

    def tell(kind: str, **fields: object) -> None:
        if kind == "cache_retry":
            print(asked["me"], kind, fields, file=sys.stderr, flush=True)

    share = Share(**asked["share"]) if "share" in asked else None
    report = stage(asked["dataset"], asked["cache"], peers=options, limits=limits, emit=tell, share=share)
    print(json.dumps(report.to_json()), flush=True)
