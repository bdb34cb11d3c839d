"""Reading artifacts for people: what is in one, and what differs between two. Typed data; printing is the CLI's."""

from aotc.inspection.blobs import read_picks, read_report
from aotc.inspection.compare import BundleDifference, Side, compare_bundles, open_side

__all__ = ["BundleDifference", "Side", "compare_bundles", "open_side", "read_picks", "read_report"]
