"""On a GPU: values that a loop logs, weights in bfloat16 and compiled models. Needs CUDA (`-m cuda`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.capture.test_cuda import nothing_waits, settled
from tests.support.models import Perceptron
from tests.support.record import norm, wide
from tests.support.scrape import errors, value
from tests.support.tools import eventually
from torch_grad_exporter import start_exporter

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # CUDA libraries warn of what is theirs
]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield
    torch.cuda.synchronize()


def test_logged_values_are_not_waited_for() -> None:
    """Tensors that a loop logs, of reinforcement learning too, are shown as they were, and nothing waits for them."""
    with start_exporter(Perceptron(), port=None) as exporter:
        exporter.log({"reward": torch.tensor(0.0), "kl": torch.tensor(0.0)})  # the first buffer is allocated, which may wait
        numbers = torch.linspace(0.0, 1.0, 33)
        with nothing_waits():
            for number in numbers:
                exporter.log({"reward": number, "reward_std": 2 * number, "kl": number.to(torch.bfloat16), "mine": number})
        exporter.log({"mine": torch.tensor(7, dtype=torch.int64)})
        assert eventually(lambda: value(exporter, "torch_train_value", name="mine") == 7.0)
        assert value(exporter, "torch_rl_reward_mean") == 1.0
        assert value(exporter, "torch_rl_reward_std") == 2.0
        assert value(exporter, "torch_rl_kl_divergence") == 1.0
        assert errors(exporter) == {}


def test_weights_and_their_updates() -> None:
    """Norm, update and unchanged share of a bfloat16 layer are those of float64."""
    layer = torch.nn.Linear(64, 32, bias=False).to(torch.bfloat16)
    model = torch.nn.Sequential(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with start_exporter(model, port=None, every=1, weights=True) as exporter:
        for step in range(4):
            before = wide(layer.weight)
            optimizer.zero_grad()
            model(torch.randn(16, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            assert settled(exporter, step + 1)
        after = wide(layer.weight)
        assert value(exporter, "torch_weight_norm", layer="0") == pytest.approx(norm([after]), rel=1e-5)
        assert value(exporter, "torch_weight_update_ratio", layer="0") == pytest.approx(
            norm([after - before]) / norm([before]), rel=1e-4
        )
        assert value(exporter, "torch_weight_unchanged_ratio", layer="0") == (after == before).double().mean().item()
        assert errors(exporter) == {}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model(mode: str) -> None:
    """Norms of a compiled model are those of its gradients, also where its kernels are replayed as CUDA graphs."""
    torch.set_default_device(None)  # which compiled code cannot be entered with
    model = Perceptron().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compiled = torch.compile(model, mode=mode)
    with start_exporter(model, port=None, every=1) as exporter:
        for step in range(8):
            optimizer.zero_grad()
            compiled(torch.randn(5, 6, device="cuda")).square().mean().backward()
            expected = norm(wide(p.grad) for p in model.parameters() if p.grad is not None)
            optimizer.step()
            assert settled(exporter, step + 1)
            assert value(exporter, "torch_grad_global_norm") == pytest.approx(expected, rel=1e-5)
        assert errors(exporter) == {}


@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"foreach": True, "capturable": True}], ids=["foreach", "fused", "capturable"]
)
def test_moments_of_an_optimizer(options: dict[str, bool]) -> None:
    """The ratio of gradients to the second moment is that of float64, and nothing waits for it."""
    layer = torch.nn.Linear(64, 32, bias=False)
    model = torch.nn.Sequential(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), **options)
    inputs = torch.randn(6, 16, 64)
    with start_exporter(model, port=None, every=1, optimizer_state=True) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            model(inputs[step]).square().mean().backward()
            second = wide(optimizer.state[layer.weight]["exp_avg_sq"]) if step else None
            with nothing_waits() if step > 2 and options else contextlib.nullcontext():  # without them the optimizer itself waits
                optimizer.step()
            assert settled(exporter, step + 1)
        gradient = wide(layer.weight.grad)
        expected = (gradient**2 / ((0.95 * second + 0.05 * gradient**2) / (1 - 0.95**6))).mean().sqrt().item()
        assert value(exporter, "torch_optimizer_rms_ratio", layer="0") == pytest.approx(expected, rel=1e-5)
        assert errors(exporter) == {}


def test_attention_and_activations() -> None:
    """The largest logit and the kurtosis of units are those of float64, and nothing waits for them."""
    size, heads, length = 64, 4, 32

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys, self.values = (torch.nn.Linear(size, size) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                layer(x).view(-1, length, heads, size // heads).transpose(1, 2) for layer in (self.queries, self.keys, self.values)
            )
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    layer = Attention()
    model = torch.nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(6, 2, length, size)
    with start_exporter(model, port=None, every=1, attention=True, activations=True) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            weights = [(wide(part.weight), wide(part.bias)) for part in (layer.queries, layer.keys)]
            with nothing_waits() if step > 2 else contextlib.nullcontext():
                model(inputs[step]).square().mean().backward()
                optimizer.step()
            assert settled(exporter, step + 1)
        x = wide(inputs[-1])
        q, k = ((x @ weight.T + bias).view(-1, length, heads, size // heads).transpose(1, 2) for weight, bias in weights)
        logits = (q @ k.transpose(-1, -2)) / (size // heads) ** 0.5
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        largest = logits.masked_fill(~allowed, -torch.inf).max().item()
        shown = value(exporter, "torch_attention_max_logit", layer="0")
        assert shown == pytest.approx(largest, rel=1e-4)
        squares = (x @ weights[0][0].T + weights[0][1]).square().mean(dim=(0, 1))
        kurtosis = (squares.square().mean() / squares.mean().square()).item()
        assert value(exporter, "torch_activation_kurtosis", layer="0.queries") == pytest.approx(kurtosis, rel=1e-4)
        assert errors(exporter) == {}


def test_routers_of_a_loop() -> None:
    """Loads of experts are counted exactly, and nothing waits for them."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    choices = torch.randint(8, (6, 64, 2))
    with start_exporter(model, port=None, every=1) as exporter:
        for step in range(6):
            optimizer.zero_grad()
            with nothing_waits() if step > 2 else contextlib.nullcontext():
                exporter.router("mine", choices[step], experts=8)
                model(torch.randn(5, 6)).square().mean().backward()
                optimizer.step()
            assert settled(exporter, step + 1)
        tokens = [(choices[-1] == expert).sum().item() for expert in range(8)]
        assert eventually(
            lambda: value(exporter, "torch_moe_load_imbalance_ratio", layer="mine") == pytest.approx(max(tokens) / 16, rel=1e-6)
        )
        assert errors(exporter) == {}
