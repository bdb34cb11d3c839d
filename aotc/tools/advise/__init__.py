"""Which buckets to compile, from the sizes that a service has seen. Nothing here imports torch.

In the order of use:

- `trace`: JSON lines, an access log or `compiled.stats()` → distinct sizes and how often each came
- `costs`: what a call at some sizes costs: elements, an expression over dims, or a fitted latency
- `today`: the buckets, padded dims and inputs of a manifest
- `partition`: the buckets of one padded dim, optimal
- `cover`: those of several, greedy, and a cost that no set of so many buckets can get below
- `arrays`: sizes as arrays
- `bucket_dispatch`: which bucket takes which sizes, by the loader's rule, and what that costs
- `advice`: all of it together
- `advice_page`: the advice as an HTML page; `picture`: its chart as a PNG
"""

from aotc.tools.advise.advice import Advice, Goal, advise
from aotc.tools.advise.trace import Trace, read_trace

__all__ = ["Advice", "Goal", "Trace", "advise", "read_trace"]
