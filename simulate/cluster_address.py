"""A scheduler that others started. Its workers must have exitwave installed and see the data set's folder."""

from __future__ import annotations

from typing import Any

import distributed

from exitwave.ingest.errors import UsageError
from exitwave.simulate.cluster_dask import DaskCluster
from exitwave.simulate.cluster_outcome import describe
from exitwave.simulate.cluster_tls import security

__all__ = ["ExistingCluster"]

_FIRST_TRY_S = 5.0


class ExistingCluster(DaskCluster):
    """Joins by address; comes back by itself when the scheduler dies and is started again at the same address."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.name = address
        self._security = security(own=False) if address.startswith("tls://") else None

    def _connect(self, timeout_s: float) -> Any:
        return distributed.Client(self.name, timeout=timeout_s, security=self._security, set_as_default=False)

    def _connect_first(self) -> Any:
        try:
            client = self._connect(_FIRST_TRY_S)
        except (OSError, TimeoutError) as error:
            raise UsageError(f"--cluster {self.name}: no scheduler answers there ({describe(error)})") from None
        workers = client.scheduler_info(n_workers=-1)["workers"]
        try:
            if not workers:
                raise UsageError(f"--cluster {self.name}: the scheduler has no workers; start some with `dask worker`")
            threaded = [f"{w['name']} ({w['nthreads']} threads)" for w in workers.values() if w["nthreads"] != 1]
            if threaded:
                raise UsageError(
                    f"--cluster {self.name}: workers of one thread each expected, since simulations in one process "
                    f"disturb one another; found {', '.join(threaded[:3])}. Start them with "
                    "`dask worker --nthreads 1 --nworkers N`"
                )
        except UsageError:
            client.close(timeout=5)
            raise
        return client
