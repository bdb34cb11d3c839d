"""For the hot copies only, until they go."""

from aotc.store.maintenance.retention import GRACE as GRACE
from aotc.store.maintenance.retention import Policy as Policy
