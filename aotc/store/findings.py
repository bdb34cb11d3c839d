"""For the hot copies only, until they go."""

from aotc.store.maintenance.reports import Finding as Finding
from aotc.store.maintenance.reports import FsckReport as FsckReport
from aotc.store.maintenance.reports import Repair as Repair
