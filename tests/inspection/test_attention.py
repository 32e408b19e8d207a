"""Attention: each number against a float64 reference of the queries and keys that the test's own modules kept."""

from __future__ import annotations

import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.inspection.support import EachOperation, refuse_reads
from tests.matrix.compiled import EAGER, compilations, dynamo
from tests.support.scrape import errors, key, value, values
from torch_grad_exporter import Exporter, start_exporter

NAMES = ("max_logit", "logit_bound", "entropy")
FUNCTION = F.scaled_dot_product_attention
OTHERS = dict.fromkeys(("host", "process", "container"), False)


def reference(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float | None = None) -> dict[str, float]:
    """Return the definitions in float64, of all rows, with a mask that is added to the logits."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    logits = q @ k.mT * factor
    biased = logits if mask is None else logits + mask.double()
    seen = logits[biased > -1e30]
    known = (biased > -1e30).any(-1)
    entropy = torch.special.entr(biased[known].softmax(-1)).sum(-1).mean()
    bound = q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1) * abs(factor)
    return {"max_logit": float(seen.max()), "logit_bound": float(bound.max()), "entropy": float(entropy)}


def shown(exporter: Exporter, layer: str) -> dict[str, float | None]:
    """Return what the scrape has of a layer."""
    return {name: value(exporter, f"torch_attention_{name}", layer=layer) for name in NAMES}


class Attention(nn.Module):
    """Attention by hand, which keeps its queries and keys."""

    def __init__(self, width: int = 32, heads: int = 4, key_heads: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.q, self.kv = (nn.Linear(width, n * width // heads, dtype=dtype) for n in (heads, 2 * key_heads))
        nn.init.normal_(self.q.weight, std=0.5)
        self.options: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.key_heads, -1)).transpose(1, 2).chunk(2, 1)
        self.kept = q.detach().clone(), k.detach().clone()
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)


class Net(nn.Module):
    """A layer of attention between two others."""

    def __init__(self, attention: nn.Module, width: int = 32, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width, dtype=dtype)
        self.attention = attention
        self.head = nn.Linear(width, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(self.embed(x)))


def start(model: nn.Module, **options: Any) -> Exporter:  # noqa: ANN401 - its own
    """Start an exporter that samples each step."""
    return start_exporter(model, None, every=1, attention=True, collectors=OTHERS, **options)


def train(model: nn.Module, *batches: torch.Tensor) -> None:
    """Make a step with a backward for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in batches:
        model(x).float().square().mean().backward()
    optimizer.step()


def inputs(length: int = 20, examples: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a batch."""
    return torch.randn(examples, length, 6, dtype=dtype)


def causal(length: int) -> torch.Tensor:
    """Return the mask that hides later keys."""
    return torch.full((length, length), -math.inf).triu(1)


PADDED = torch.ones(3, 1, 1, 20, dtype=torch.bool)
PADDED[1, ..., 12:] = PADDED[2, ..., 5:] = False
AS_ADDED = torch.zeros(PADDED.shape).masked_fill(~PADDED, -math.inf)
BIAS = torch.linspace(-3, 3, 80).reshape(4, 1, 20) + torch.zeros(20, 20).masked_fill(~PADDED[1], torch.finfo(torch.float32).min)
ROW = torch.ones(20, 20, dtype=torch.bool)
ROW[3:5] = False  # which hides all keys from two queries

CASES: dict[str, tuple[dict[str, Any], torch.Tensor | None, int]] = {
    "plain": ({}, None, 4),
    "scale": ({"scale": 0.7}, None, 4),
    "causal": ({"is_causal": True}, causal(20), 4),
    "padding": ({"attn_mask": PADDED}, AS_ADDED, 4),
    "bias": ({"attn_mask": BIAS}, BIAS, 4),
    "rows": ({"attn_mask": ROW}, torch.zeros(20, 20).masked_fill(~ROW, -math.inf), 4),
    "groups": ({"is_causal": True, "enable_gqa": True}, causal(20), 2),
    "groups padded": ({"attn_mask": PADDED, "enable_gqa": True, "scale": 0.3}, AS_ADDED, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_of_queries_and_keys(case: str, dtype: torch.dtype) -> None:
    """All three values are those of the queries and keys, whatever masks, scale and groups of heads."""
    options, mask, key_heads = CASES[case]
    torch.manual_seed(0)
    model = Net(Attention(key_heads=key_heads, dtype=dtype), dtype=dtype)
    model.attention.options = {n: v.to(dtype) if n == "attn_mask" and v.is_floating_point() else v for n, v in options.items()}
    if case == "bias":
        mask = model.attention.options["attn_mask"]
    with start(model) as exporter:
        train(model, inputs(dtype=dtype))
        q, k = model.attention.kept
        expected = reference(q, k, mask, options.get("scale"))
        rel = 1e-5 if dtype is torch.float32 else 1e-2
        assert shown(exporter, "attention") == pytest.approx(expected, rel=rel)
        assert expected["max_logit"] <= expected["logit_bound"]
        assert errors(exporter) == {}


def test_long_sequences() -> None:
    """Of 200 rows those shown are every fourth one of the first example, with the last row; the bound is of all."""
    torch.manual_seed(0)
    model = Net(Attention())
    model.attention.options = {"is_causal": True}
    with start(model) as exporter:
        train(model, inputs(200))
        q, k = model.attention.kept
        expected = reference(q[:1, :, 3::4], k[:1], causal(200)[3::4])
        expected["logit_bound"] = reference(q, k, None)["logit_bound"]
        assert shown(exporter, "attention") == pytest.approx(expected, rel=1e-5)


def projected(module: nn.MultiheadAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries and keys of self-attention, by their definition."""
    q, k, _ = F.linear(x.double(), module.in_proj_weight.double(), module.in_proj_bias.double()).chunk(3, -1)
    q, k = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k))
    return q.detach(), k.detach()


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` with masks of both kinds."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.expected = projected(self.inner, x)
        masks = {"attn_mask": causal(20), "key_padding_mask": AS_ADDED[:, 0, 0]}
        return self.inner(x, x, x, need_weights=self.weights, **masks)[0]


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention(weights: bool) -> None:
    """`nn.MultiheadAttention` is seen; where it returns its weights, without a bound."""
    torch.manual_seed(0)
    model = Net(SelfAttention(weights=weights))
    with start(model) as exporter:
        train(model, inputs())
        expected: dict[str, float | None] = {**reference(*model.attention.expected, causal(20) + AS_ADDED)}
        found = shown(exporter, "attention.inner")
        if weights:
            assert found.pop("logit_bound") is None
            del expected["logit_bound"]
        assert found == pytest.approx(expected, rel=1e-5)


def test_encoder_layers() -> None:
    """In training, each layer of `nn.TransformerEncoder` is shown under its module."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True)
    model = Net(nn.TransformerEncoder(layer, 2))
    x = inputs()
    first = model.attention.layers[0].self_attn
    expected = reference(*projected(first, model.embed(x)), None)
    with start(model) as exporter:
        train(model, x)
        assert shown(exporter, "attention.layers.0.self_attn") == pytest.approx(expected, rel=1e-5)
        assert None not in shown(exporter, "attention.layers.1.self_attn").values()


class Eager(Attention):
    """Attention that is written out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.key_heads, -1)).transpose(1, 2).chunk(2, 1)
        self.kept = q.detach().clone(), k.detach().clone()
        weights = F.softmax(q @ k.mT / math.sqrt(q.shape[-1]) + causal(x.shape[1]), dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_written_out() -> None:
    """A softmax over the last of four dimensions is attention, whose bound is not known; other ones are not."""
    torch.manual_seed(0)
    model = nn.Sequential(Net(Eager()), nn.Softmax(dim=-1), nn.Unflatten(1, (2, 10)), nn.Softmax(dim=1))
    with start(model) as exporter:
        train(model, inputs())
        expected, found = reference(*model[0].attention.kept, causal(20)), shown(exporter, "0.attention")
        assert found.pop("logit_bound") is None
        del expected["logit_bound"]
        assert found == pytest.approx(expected, rel=1e-5)
        assert {dict(labels)["layer"] for name, labels in values(exporter) if "attention_entropy" in name} == {"0.attention"}


def test_micro_batches() -> None:
    """Of a round's micro-batches the largest logit and the mean entropy are shown; forwards without a backward do not count."""
    torch.manual_seed(0)
    model, expected = Net(Attention()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with start(model) as exporter:
        for size in (1, 3):
            model(size * inputs()).square().mean().backward()
            expected.append(reference(*model.attention.kept, None))
            with torch.no_grad():
                model(100 * inputs())
            model(100 * inputs())
        optimizer.step()
        largest = {name: max(each[name] for each in expected) for name in NAMES}
        largest["entropy"] = sum(each["entropy"] for each in expected) / 2
        assert shown(exporter, "attention") == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """What a checkpoint computes again in the backward does not count, though it differs here."""
    torch.manual_seed(0)

    class Checkpointed(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = 0
            return torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=reentrant)

        def inside(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            out = super().forward(x)
            if self.calls == 1:
                self.first = self.kept
                self.options = {"scale": 5.0}
            return out

    model = Net(Checkpointed())
    with start(model) as exporter:
        train(model, inputs())
        assert model.attention.calls == 2
        assert shown(exporter, "attention") == pytest.approx(reference(*model.attention.first, None), rel=1e-5)


def trained(options: dict[str, Any] | None, act: Callable[[str], object] = lambda _name: None) -> list[torch.Tensor]:
    """Return the parameters, and the random state, after three steps with dropout under autocast."""
    torch.manual_seed(0)
    model = Net(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 32, dropout=0.2, batch_first=True), 2))
    exporter = None if options is None else start_exporter(model, None, every=1, collectors=OTHERS, **options)
    with EachOperation(act), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            train(model, inputs(70))
    if exporter is not None:
        exporter.close()
        assert errors(exporter) == {}
    return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def test_training_is_unchanged() -> None:
    """With the option, training ends in the same bits, no operation waits for a device, and the function is PyTorch's again."""
    expected = trained(None)
    found = trained({"attention": True}, refuse_reads)
    assert all(map(torch.equal, found, expected))
    assert F.scaled_dot_product_attention is FUNCTION


def test_a_forward_that_raises() -> None:
    """The function is PyTorch's again at once; what an evaluation computes then is not shown, a later step is."""
    torch.manual_seed(0)
    model = Net(Attention())
    with start(model) as exporter:
        model.attention.options = {"attn_mask": torch.zeros(7, 7)}
        with pytest.raises(RuntimeError, match="size"):
            model(inputs())
        assert F.scaled_dot_product_attention is FUNCTION
        model.attention.options = {}
        with torch.no_grad():
            model(1000 * inputs())
        train(model, inputs())
        assert shown(exporter, "attention") == pytest.approx(reference(*model.attention.kept, None), rel=1e-5)
        assert errors(exporter) == {}
        assert F.scaled_dot_product_attention is FUNCTION
    model.attention.options = {"attn_mask": torch.zeros(7, 7)}
    with pytest.raises(RuntimeError, match="size"), start(model):
        model(inputs())
    assert F.scaled_dot_product_attention is FUNCTION


class Seen(TorchFunctionMode):
    """A mode of the user's that counts calls of the function, as the module has it, and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.others = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - as its base
        if func is F.scaled_dot_product_attention:
            self.attention += 1
        elif func not in (torch.Tensor.requires_grad.__get__, torch.Tensor.grad_fn.__get__):
            self.others += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user() -> None:
    """A mode around a sampled forward sees the function that PyTorch has, and no operation of the measurement."""
    counts = []
    for attention in (False, True):
        torch.manual_seed(0)
        model = Net(Attention())
        with start_exporter(model, None, every=1, attention=attention, collectors=OTHERS):
            train(model, inputs())
            with Seen() as seen:
                model(inputs())
            counts.append((seen.attention, seen.others))
    assert counts[0][0] == counts[1][0] == 1
    assert counts[1][1] == counts[0][1]


def test_other_threads() -> None:
    """Attention of another thread, during a sampled forward, does not count."""
    torch.manual_seed(0)
    model = Net(Attention())
    large = torch.full((1, 1, 8, 8), 100.0)

    def elsewhere(*_arguments: object) -> None:
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(large, large, large))
        thread.start()
        thread.join()

    model.embed.register_forward_hook(elsewhere)
    with start(model) as exporter:
        train(model, inputs())
        assert shown(exporter, "attention") == pytest.approx(reference(*model.attention.kept, None), rel=1e-5)
        assert set(shown(exporter, "embed").values()) == {None}  # whose forward runs meanwhile


def test_excluded_layers() -> None:
    """Modules that `exclude` matches are not shown."""
    torch.manual_seed(0)
    model = nn.Sequential(Net(Attention()), nn.Linear(2, 6), Net(Attention()))
    with start(model, exclude=[r"^2\."]) as exporter:
        train(model, inputs())
        assert None not in shown(exporter, "0.attention").values()
        assert set(shown(exporter, "2.attention").values()) == {None}


def test_many_layers() -> None:
    """Beyond `max_layers`, modules share a row, which has the largest logit of them."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.Sequential(*(Attention() for _ in range(4)))})
    model.forward = model["blocks"].forward  # type: ignore[method-assign]
    with start(model, max_layers=2) as exporter:
        train(model, torch.randn(3, 20, 32))
        expected = max(reference(*each.kept, None)["max_logit"] for each in model["blocks"])
        found = {dict(k[1])["layer"]: n for k, n in values(exporter).items() if k[0] == "torch_attention_max_logit"}
        assert len(found) <= 2
        assert max(found.values()) == pytest.approx(expected, rel=1e-5)


def test_without_attention(caplog: pytest.LogCaptureFixture) -> None:
    """Where no call is seen, there are no rows, and the log says so once."""
    model = Net(nn.Identity())
    with caplog.at_level(logging.WARNING), start(model) as exporter:
        for _ in range(3):
            train(model, inputs())
        assert [k for k in values(exporter) if k[0].startswith("torch_attention_")] == []
    assert sum("no attention was seen" in record.message for record in caplog.records) == 1


def test_a_function_that_is_replaced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that another library has put in its place is left alone, and the log says so once."""
    torch.manual_seed(0)
    model = Net(Attention())
    with caplog.at_level(logging.WARNING), start(model) as exporter:
        other = functools.partial(FUNCTION)
        monkeypatch.setattr(F, "scaled_dot_product_attention", other)
        for _ in range(2):
            train(model, inputs())
        assert F.scaled_dot_product_attention is other
        assert key("torch_attention_entropy", layer="attention") not in values(exporter)
    assert sum("another library" in record.message for record in caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "block", "other"])
def test_compiled_code(part: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is compiled is compiled no second time, and not measured; the log says so once."""
    torch.manual_seed(0)
    with dynamo(), torch._dynamo.config.patch(error_on_recompile=True):
        model = Net(Attention())
        step: nn.Module = model
        if part == "model":
            step = torch.compile(model, backend=EAGER)
        elif part == "block":
            model.attention = torch.compile(model.attention, backend=EAGER)
        else:
            model.head = torch.compile(model.head, backend=EAGER)
        counts = []
        with caplog.at_level(logging.WARNING), start(model) as exporter:
            for _ in range(4):
                train(step, inputs())
                counts.append(compilations())
            assert errors(exporter) == {}
            assert [k for k in values(exporter) if k[0].startswith("torch_attention_")] == []
    assert counts[0] == counts[-1]
    assert sum("this process uses torch.compile" in record.message for record in caplog.records) == 1


def test_no_tensor_of_the_forward_is_kept() -> None:
    """Logits that the user's code lets go of are gone, in a sampled forward as well."""
    gone: list[bool] = []

    class WrittenOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = (self.queries(x) @ self.keys(x).mT).unsqueeze(1)
            logits = weakref.ref(weights)
            weights = F.softmax(weights, dim=-1)
            gone.append(logits() is None)
            return weights.squeeze(1) @ x

    model = WrittenOut()
    with start(model) as exporter:
        for _ in range(3):
            train(model, torch.randn(2, 5, 8))
        assert value(exporter, "torch_attention_max_logit", layer="model") is not None
    assert all(gone)
