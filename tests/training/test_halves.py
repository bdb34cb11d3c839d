"""The two graphs of a training step, run by torch before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F

from aotc.compiler.capture.export import capture
from aotc.compiler.training.halves import Halves, halves_of
from aotc.compiler.training.training_compile import check_sparse
from aotc.errors import BuildError
from aotc.records import Argument, Parameter, Saved, Signature, TensorLeaf


class Net(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def halves(module: nn.Module, memory: float = 1.0, *, rows: int = 3) -> Halves:
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (rows, 4)),))
    captured = capture(module, signature, [torch.randn(rows, 4)], None, False, train=True)
    wanted = [*(Argument(state=name) for name, _ in module.named_parameters()), Argument(leaf=0)]
    return halves_of(captured, wanted, memory)


def run(module: nn.Module, split: Halves, x: Tensor, gradients: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The results, and the gradients by the names of arguments."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    arguments = [x if each.state is None else state[each.state].detach() for each in split.forward.arguments]
    with torch.no_grad():
        outputs = split.forward.graph(*arguments)
        given = [_saved(each, arguments, outputs, gradients) for each in split.saved]
        found = split.backward.graph(*given)
    names = [each.state or "x" for each in split.forward.arguments]
    return list(outputs[: split.results]), {names[each.argument]: found[each.output] for each in split.gradients}


def _saved(each: Saved, arguments: list[Tensor], outputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
    if each.argument is not None:
        return arguments[each.argument]
    return gradients[each.gradient] if each.gradient is not None else outputs[each.output or 0]


def deep(net: Any, x: Tensor) -> Tensor:
    hidden = net.enter(x)
    for _ in range(4):
        hidden = torch.tanh(hidden.sin().exp() + hidden.cos())
    return net.leave(hidden)


MODELS: dict[str, Callable[[Any, Tensor], Any]] = {
    "deep": deep,
    "views of one value": lambda net, x: ((hidden := F.gelu(net.enter(x))), hidden[:, :4], hidden.T),
    "views of an input": lambda net, x: (x[:, :2], net.enter(x).sum()),
    "one gradient for two": lambda net, x: x + net.leave(net.enter(x)) + net.leave.bias,
    "a constant": lambda net, x: net.enter(x) * torch.arange(8),
    "a buffer that is written after it was read": lambda net, x: (
        net.enter(x) * (net.seen.sum() + 2).sqrt(),
        net.seen.add_(x.detach().sum(0)).clone(),
    ),
    "a saved view": lambda net, x: F.softmax(net.enter(x), -1).view(-1),
}


@pytest.mark.parametrize("memory", [1.0, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_the_graphs_compute_what_autograd_does(name: str, memory: float) -> None:
    module = Net(MODELS[name])
    x = torch.randn(3, 4, requires_grad=True)
    expected = module(x)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    weights = [torch.randn(each.shape) for each in expected]
    pairs = [pair for pair in zip(expected, weights, strict=True) if pair[0].requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))
    module.seen.zero_()
    results, gradients = run(module, halves(module, memory), x.detach(), weights)
    torch.testing.assert_close(results, [each.detach() for each in expected])
    named = {**dict(module.named_parameters()), "x": x}
    for key, tensor in named.items():
        if tensor.grad is not None:
            torch.testing.assert_close(gradients[key], tensor.grad)
        else:
            assert key not in gradients or not gradients[key].any()


@pytest.mark.parametrize("name", ["views of one value", "views of an input", "one gradient for two"])
def test_no_result_and_no_gradient_shares_memory_with_another(name: str) -> None:
    """Autograd keeps gradients that it is given as they are, and a caller may write to a result."""
    module, x = Net(MODELS[name]), torch.randn(3, 4)
    split = halves(module)
    expected = module(x)
    weights = [torch.ones(each.shape) for each in (expected if isinstance(expected, tuple) else [expected])]
    results, gradients = run(module, split, x, weights)
    distinct = {id(each): each for each in (x, *weights, *results, *gradients.values())}
    memory = [each.untyped_storage().data_ptr() for each in distinct.values()]
    assert len(set(memory)) == len(memory)


def test_a_write_to_a_result_is_noticed_where_a_view_of_it_is_saved() -> None:
    split = halves(Net(MODELS["a saved view"]))
    kept = {each.output for each in (*split.saved, *split.held)}
    assert 0 in kept


def test_lazy_zeros_of_a_gradient_are_real_ones() -> None:
    """Which compiled code would read, and which autograd refuses on `cpu:0`."""
    module = Net(lambda net, x: net.enter(x) * torch.sgn(net.leave.bias).sum())
    split, x = halves(module), torch.randn(3, 4)
    _, gradients = run(module, split, x, [torch.ones(3, 8)])
    assert not gradients["leave.bias"]._is_zerotensor()
    assert torch.equal(gradients["leave.bias"], torch.zeros_like(module.leave.bias))


def test_a_small_budget_saves_less() -> None:
    def saved(memory: float) -> int:
        split = halves(Net(deep), memory, rows=64)
        outputs = split.forward.graph.graph.output_node().args[0][split.results :]
        return sum(each.meta["val"].nbytes for each in outputs)

    assert saved(0.0) < saved(1.0)


@pytest.mark.parametrize("memory", [1.0, 0.5, 0.0])
def test_no_budget_has_the_backward_draw_random_numbers_again(memory: float) -> None:
    split = halves(Net(lambda net, x: F.dropout(x.sin().exp(), 0.5) * 2), memory)
    targets = [[str(node.target) for node in each.graph.graph.nodes] for each in (split.forward, split.backward)]
    assert ["prims.inductor_seeds.default" in each for each in targets] == [True, False]


@pytest.mark.parametrize("memory", [1.0, 0.5])
def test_numbers_of_eagers_are_saved_or_the_build_is_refused(memory: float) -> None:
    """Option `fallback_random`: with a budget, torch's partitioner may draw them again."""
    module, x = Net(lambda net, x: F.dropout(x.sin().exp(), 0.5) * 2), torch.randn(3, 4)
    with inductor_config.patch(fallback_random=True):
        try:
            split = halves(module, memory)
        except BuildError as error:
            assert memory < 1
            assert "would draw random numbers again" in str(error)
            return
        results, gradients = run(module, split, x, [torch.ones(3, 4)])
    assert torch.equal(results[0] == 0, gradients["x"] == 0)


def test_casts_of_autocast_are_in_both_graphs() -> None:
    module = Net(deep)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        split = halves(module)
        expected = module(x)
    expected.backward(torch.ones_like(expected))
    results, gradients = run(module, split, x, [torch.ones_like(expected)])
    assert results[0].dtype == torch.bfloat16
    torch.testing.assert_close(results[0], expected.detach(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradients["enter.weight"], module.enter.weight.grad, rtol=5e-2, atol=5e-2)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(BuildError, match="nothing of the model can be trained"):
        halves(Net(lambda net, x: net.enter(x.detach()).detach() + net.seen.sum()))
    with pytest.raises(BuildError, match="writes to `input 0`, which gets a gradient"):
        halves(Net(lambda net, x: net.enter(x.mul_(2))))


def test_operators_without_a_backward_of_the_compilers_are_refused_by_name() -> None:
    def solved(net: Any, x: Tensor) -> Tensor:
        return torch.linalg.solve(x.T @ x + torch.eye(4), net.leave.weight)

    if torch.__version__ >= "2.13":  # older ones leave the check of the values out
        with pytest.raises(BuildError, match=r"`torch\.linalg\.solve` may raise an error") as error:
            halves(Net(solved))
        assert "solve_ex" in error.value.hint
        assert error.value.fields["source"].startswith("test_halves.py:")
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "int64", (3,)),))
    for layer in (nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True)):
        net = Net(lambda net, x, layer=layer: layer(x.view(1, -1)))
        net.table = layer
        captured = capture(net, signature, [torch.tensor([1, 2, 3])], None, False, train=True)
        with pytest.raises(BuildError, match="sparse tensor, which compiled code cannot make"):
            check_sparse(captured)


def test_what_no_result_depends_on_gets_no_gradient_and_may_require_one() -> None:
    """A parameter that is read under `detach` only, and an input that is unused."""
    split = halves(Net(lambda net, x: net.leave(net.enter.weight.sum(1)) * net.enter.bias.detach().sum()))
    assert set(split.without) == {Argument(state="enter.bias"), Argument(leaf=0)}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_gradients(kind: Any) -> None:
    """Also those whose input requires none."""
    module = Net(lambda net, x: net.layer(x.detach())[0])
    module.layer = kind(4, 3, num_layers=2, bidirectional=True)
    x, weights = torch.randn(5, 4), torch.randn(5, 6)
    module(x).backward(weights)
    _, gradients = run(module, halves(module, rows=5), x, [weights])
    expected = {f"layer.{name}": each.grad for name, each in module.layer.named_parameters()}
    torch.testing.assert_close(gradients, expected)


def test_a_function_with_a_backward_of_its_own_reads_and_writes_nothing_else() -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, size: Any, rule: str, net: Any) -> Any:
            ctx.rule, ctx.size = rule, size
            if rule == "write":
                x.mul_(2)
            given = x * net.leave.bias.sum() if rule == "read" else x * 3
            return given, x.detach() > 0, None

        @staticmethod
        def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
            return gradient.reshape(ctx.size) * 7, None, None, None

    def net(rule: str) -> Net:
        return Net(lambda net, x: (given := Function.apply(net.enter(x), (3, 8), rule, net))[0] * given[1])

    module, x, weights = net(""), torch.randn(3, 4), torch.randn(3, 8)
    module(x).backward(weights)
    _, gradients = run(module, halves(module), x, [weights])
    torch.testing.assert_close(gradients["enter.weight"], module.enter.weight.grad)
    for rule, text in {"read": "reads a tensor that is not among its arguments", "write": "writes to its arg"}.items():
        with pytest.raises(BuildError, match=text) as error:
            halves(net(rule))
        assert "test_halves.py" in error.value.source


def test_hooks_that_forward_registers_are_refused() -> None:
    def hooked(net: Any, x: Tensor) -> Tensor:
        hidden = net.enter(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        return net.leave(hidden)

    with pytest.raises(BuildError, match="forward calls `register_hook` of a tensor") as error:
        halves(Net(hooked))
    assert "hidden.register_hook" in error.value.source
    module = Net(deep)
    module.leave.register_full_backward_hook(lambda *_: None)
    with pytest.raises(BuildError, match="a module has full backward hooks"):
        halves(module)


def test_buffers_are_written_in_place() -> None:
    def counting(net: Any, x: Tensor) -> Tensor:
        net.seen.add_(x.detach().sum(0))
        return net.enter(x * net.seen)

    module = Net(counting)
    split = halves(module)
    assert split.forward.mutated_state == ("seen",)
    x = torch.ones(3, 4)
    run(module, split, x, [torch.ones(3, 8)])
    torch.testing.assert_close(module.seen, torch.full((4,), 3.0))
