"""Lowered programs as CUDA graphs: what a call does around the replay, and every refusal, with a graph in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.launches import Recorder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor
from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, simulate
from dtensor.lowering import capture as lower_capture
from dtensor.lowering.capture import Captured
from dtensor.lowering.guards import flatten, surroundings
from dtensor.lowering.record import LowerError

R = Replicate()


class PythonGraph:
    """Repeats a program on its captured tensors, as a CUDA graph does; recording leaves no trace in `keep`."""

    def __init__(self, keep: list[torch.Tensor]) -> None:
        self.keep, self.warmed = keep, 0

    def warm(self, run: Callable[[], Any], times: int) -> None:
        before = [t.clone() for t in self.keep]
        for _ in range(times):
            run()
        assert all(torch.equal(a, b) for a, b in zip(before, self.keep, strict=True)), "warming up changed something"
        self.warmed = times

    def record(self, run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        before = [t.clone() for t in self.keep]
        self.run, self.values = run, run()
        for t, old in zip(self.keep, before, strict=True):
            t.copy_(old)
        return self.values

    def replay(self) -> None:
        for value, new in zip(self.values, self.run(), strict=True):
            value.copy_(new)


def captured(step: Any, keep: list[torch.Tensor], *args: Any) -> Captured:
    leaves, structure = flatten(args, {})
    variant = next((v for v in step._variants if v.suits(leaves, structure, surroundings())), None)
    return Captured("step", variant or step._traced(args, {}), leaves, 2, PythonGraph(keep))


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower_capture, "device_of", lambda given: given[0].device)


class Net(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(distribute_tensor(torch.randn(8, 4, generator=g), mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(4, 8, generator=g), mesh, [Shard(1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


def train(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = (net(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def local(t: Any) -> torch.Tensor:
    return t._local_tensor if isinstance(t, DTensor) else t


def test_a_replayed_step_is_an_eager_one(one_device: None) -> None:
    """Losses, parameters and momentum over some steps; inputs and results of earlier calls stay what they were."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (1,))
        net, other = Net(mesh), Net(mesh)
        opts = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (net, other)]
        inputs = [distribute_tensor(torch.randn(6, 4), mesh, [R]) for _ in range(5)]
        copies = [local(x).clone() for x in inputs]
        for n, o in zip((net, other), opts, strict=True):
            train(n, o, inputs[0])
        step = dtensor.lower(train, net, opts[0], inputs[0])
        state = [local(s["momentum_buffer"]) for s in opts[0].state.values()]
        keep = [*(local(p) for p in net.parameters()), *(local(p.grad) for p in net.parameters()), *state]
        fast = captured(step, keep, net, opts[0], inputs[1])
        results = []
        for x in inputs[1:]:
            version = net.up._version
            results.append((fast(net, opts[0], x), train(other, opts[1], x)))
            assert net.up._version > version, "autograd must know that the parameter was written"
        for got, want in results:
            assert_close(local(got), local(want))
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            assert_close(local(p), local(q))
        for x, copy in zip(inputs, copies, strict=True):
            assert torch.equal(local(x), copy), "an input of an earlier call was written to"

    simulate(1)(body)


def test_what_a_call_must_bring(one_device: None) -> None:
    """Another shape, another mode, a parameter whose memory is another: an error that says so, and nothing changed."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (1,))
        net = Net(mesh)
        run = lambda net, x: net(x)  # noqa: E731
        x = distribute_tensor(torch.randn(6, 4), mesh, [R])
        with torch.no_grad():
            step = dtensor.lower(run, net, x)
            fast = captured(step, [], net, x)
            assert_close(local(fast(net, x * 2)), local(run(net, x * 2)))
            with pytest.raises(LowerError, match="other arguments or another state"):
                fast(net, x[:3])
            net.up._local_tensor = net.up._local_tensor.clone()
            with pytest.raises(LowerError, match="up lies elsewhere"):
                fast(net, x)
        with pytest.raises(LowerError, match="other arguments or another state"):
            fast(net, x)

    simulate(1)(body)


def refusal(ranks: int, make: Callable[[Any, Any], tuple[Any, ...]], layout: Any = R) -> str:
    def body() -> str:
        mesh = init_device_mesh("cpu", (ranks,))
        net = Net(mesh)
        x = distribute_tensor(torch.randn(6, 4), mesh, [layout])
        fn, *args = make(net, x)
        step = dtensor.lower(fn, *args)
        with pytest.raises(LowerError) as caught:
            captured(step, [], *args)
        return str(caught.value)

    found = simulate(ranks)(body)
    assert len(set(found)) == 1, "the ranks differ"
    return found[0]


def test_refusals(one_device: None) -> None:
    """What a replay would not repeat is refused, alike on all ranks."""
    adam = lambda net: torch.optim.Adam(net.parameters(), lr=0.1)  # noqa: E731
    assert "puts something new into a container" in refusal(1, lambda net, x: (train, net, adam(net), x))
    assert "collectives of simulated ranks" in refusal(2, lambda net, x: (lambda net, x: net(x).full_tensor(), net, x))
    assert "random numbers" in refusal(2, lambda net, x: (lambda x: torch.bernoulli(x * 0 + 0.5), x), Shard(0))
    assert "writes to an argument" in refusal(1, lambda net, x: (lambda x: x.add_(1), x))

    def renew(net: Net) -> None:
        net.up.grad = net.up.grad * 2  # type: ignore[operator]

    def given(net: Net, x: Any) -> tuple[Any, ...]:
        net(x).sum().backward()
        return renew, net

    assert "puts another in its place" in refusal(1, given)


def test_the_host_is_no_device() -> None:
    """On the CPU there is nothing to capture; inputs that are left there are named."""
    text = refusal(1, lambda net, x: (lambda net, x: net(x), net, x))
    assert "inputs on ['cpu']" in text and "one device" in text and "capturable=True" in text


# ------------------------------------------------------------ on process groups, and what torch.cuda is asked
def test_collectives_of_process_groups(one_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a backend that the host takes part in are refused; NCCL's are captured, in order, and replayed."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    net = Net(mesh)
    x = distribute_tensor(torch.randn(6, 4), mesh, [R], src_data_rank=None)
    with torch.no_grad():
        run = lambda net, x: net(x).full_tensor()  # noqa: E731
        step = dtensor.lower(run, net, x)
        with pytest.raises(LowerError, match="(?s)a collective of .*fake.*run on NCCL"):
            captured(step, [], net, x)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        fast = captured(step, [], net, x)
        for i in range(2):
            with Recorder() as seen:
                got = fast(net, x * i)
            with Recorder() as eager:
                want = run(net, x * i)
            assert [c.kind for c in seen.calls] == [c.kind for c in eager.calls] and seen.calls
            assert_close(got, want)


def test_a_copy_to_the_host_is_refused() -> None:
    graph = torch.fx.Graph()
    with FakeTensorMode():
        source = graph.placeholder("x")
        source.meta["val"] = torch.empty(2, device="cuda")
        for device, fine in (("cuda", True), ("cpu", False)):
            node = graph.call_function(torch.ops.aten._to_copy.default, (source,), {"device": torch.device(device)})
            node.meta["val"] = torch.empty(2, device=device)
            if fine:
                lower_capture._check_node(node, "step.capture")
                continue
            with pytest.raises(LowerError, match="a copy to the host"):
                lower_capture._check_node(node, "step.capture")


class Cuda:
    """torch.cuda, as far as a capture needs it: writes down what is asked, on which stream the program runs."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"
        cuda = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                cuda.log.append(f"{self.name} waits for {other.name}")

        class CUDAGraph:
            def replay(self) -> None:
                cuda.log.append("replay")

        self.Stream, self.CUDAGraph = Stream, CUDAGraph

    def current_stream(self) -> Any:
        return self.Stream(self.now)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before

    @contextmanager
    def graph(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        self.log.append(f"capture, {capture_error_mode}")
        yield
        self.log.append("captured")

    def synchronize(self) -> None:
        self.log.append("synchronize")


def test_what_a_capture_asks_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming up runs on a stream beside, between two waits, and ends before the capture; a replay is one launch."""
    cuda = Cuda()
    for name in ("Stream", "CUDAGraph", "current_stream", "stream", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    graph, value = lower_capture.Graph(), torch.ones(1)

    def run() -> tuple[torch.Tensor, ...]:
        cuda.log.append(f"run on {cuda.now}")
        return (value,)

    graph.warm(run, 2)
    assert graph.record(run)[0] is value
    graph.replay()
    assert cuda.log == [
        "side waits for main", "run on side", "run on side", "main waits for side", "synchronize",
        "capture, thread_local", "run on main", "captured", "replay",
    ]  # fmt: skip


def test_inputs_lie_on_one_cuda_device() -> None:
    with FakeTensorMode():
        here, there, host = (torch.empty(1, device=d) for d in ("cuda:0", "cuda:1", "cpu"))
    assert lower_capture.device_of([here, here]) == torch.device("cuda", 0)
    assert lower_capture.device_of([here, there]) is lower_capture.device_of([here, host]) is None
    assert lower_capture.device_of([host]) is lower_capture.device_of([]) is None
