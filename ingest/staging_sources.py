"""Where the copies of a stager come from: what it asks of a source, and the data set's own storage as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from exitwave.ingest.records import ShardRecord
from exitwave.ingest.storage import Reader, Storage

__all__ = ["Source", "Sources", "StorageSource"]


class Source(Protocol):
    """Where a copy comes from."""

    @property
    def name(self) -> str: ...
    @property
    def shared(self) -> bool:
        """Whether it is the shared storage itself, rather than a peer."""
        ...

    def open(self, shard: ShardRecord) -> Reader:
        """OSError when it is not there, or not now."""
        ...


class Sources(Protocol):
    """Chooses where the next try of a shard reads from."""

    def choose(self, shard: ShardRecord) -> Source: ...
    def failed(self, source: Source) -> None: ...
    def lacks(self, source: Source, shard: ShardRecord) -> None: ...
    def worked(self, source: Source) -> None: ...


@dataclass(frozen=True)
class StorageSource:
    """The data set's own storage, for every try."""

    storage: Storage
    name: str = "the data set"
    shared: bool = True

    def open(self, shard: ShardRecord) -> Reader:
        return self.storage.open(shard.path)

    def choose(self, shard: ShardRecord) -> Source:
        return self

    def failed(self, source: Source) -> None:
        pass

    def lacks(self, source: Source, shard: ShardRecord) -> None:
        pass

    def worked(self, source: Source) -> None:
        pass
