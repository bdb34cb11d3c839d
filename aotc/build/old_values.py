"""What a model keeps of a tensor's old value, before it writes to the tensor.

Inductor takes a copy of an input for the input itself where nothing in the graph but its end writes to it. There the
new values are written in the order of the inputs: `previous.copy_(current); current.copy_(x)` then copies what was just
written. torch 2.15 keeps copies of what is written to (`remove_noop_ops` of its post_grad.py); so do these for others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import fx


@contextmanager
def old_values_kept() -> Iterator[None]:
    """Within, no copy of a tensor that the graph writes to is taken for that tensor."""
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_utils import get_node_storage as storage_of

    same_meta = post_grad.same_meta

    def interchangeable(node: fx.Node, source: fx.Node) -> bool:
        if not same_meta(node, source):
            return False
        storage = storage_of(source)
        if storage == storage_of(node):
            return True
        copies = source.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        return storage not in {storage_of(copy.args[0]) for copy in copies}

    with mock.patch.object(post_grad, "same_meta", interchangeable):
        yield
