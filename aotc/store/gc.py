"""For the hot copies only, until they go."""

from aotc.store.maintenance.gc import collect as collect
