"""A training loop's own float64 record of what each gradient metric should say.

`Recorder` looks at `parameter.grad` right after a backward and right before a step, keeps what it saw, and does plain
arithmetic over it afterwards. It knows nothing of how the exporter captures, and shares no code with it but the bounds of
the histograms.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tests.support.scrape import Key, errors_in, key, values
from torch_grad_exporter import Exporter
from torch_grad_exporter.metrics.buckets import DECADES, HALF_DECADES

GAUGES_OF_A_LAYER = (
    "torch_grad_norm", "torch_grad_norm_squared", "torch_grad_norm_recent_max", "torch_grad_norm_zscore",
    "torch_grad_max_magnitude", "torch_grad_zero_ratio", "torch_grad_zero_units_ratio", "torch_grad_dead_ratio",
    "torch_grad_missing_parameters", "torch_grad_mean", "torch_grad_stddev", "torch_grad_min", "torch_grad_max",
    "torch_grad_shard_norm", "torch_grad_units",
)  # fmt: skip
COUNTERS_OF_A_LAYER = (
    "torch_grad_captures_total", "torch_grad_norm_squared_accumulated_total", "torch_grad_norm_spikes_total",
    "torch_grad_nonfinite_elements_total", "torch_grad_norm_distribution_count",
)  # fmt: skip

SURPLUS = (*GAUGES_OF_A_LAYER, "torch_grad_clip_coefficient", "torch_grad_clipped_steps_total")
"""What may be shown only where it is recorded."""

OF_A_WHOLE_LAYER = ("torch_grad_max_magnitude", "torch_grad_norm_recent_max", "torch_grad_norm_distribution")
OF_ALL_LAYERS = (
    "torch_grad_global_norm", "torch_grad_global_norm_distribution", "torch_grad_global_norm_after_clip",
    "torch_grad_clip_coefficient", "torch_grad_clipped_steps_total",
)  # fmt: skip
"""What a rank cannot know of a layer that it has a part of, or of all layers where one is such."""

MOMENTS = ("torch_grad_mean", "torch_grad_stddev", "torch_grad_min", "torch_grad_max")


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A dense float64 copy; a complex element becomes two, in a last dimension of its own."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if hasattr(dense, "to_local"):
        dense = dense.to_local()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double().clone()


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """The L2 norm over float64 tensors."""
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def in_parts(parameter: torch.nn.Parameter, models: Iterable[torch.nn.Module] = ()) -> bool:
    """Return whether this rank has only a part of a parameter."""
    cut = any(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))
    return cut or (getattr(parameter, "_fsdp_flattened", False) and cut_flat(models))


def cut_flat(models: Iterable[torch.nn.Module]) -> bool:
    """Return whether `FullyShardedDataParallel` gives each rank a part of flat parameters."""
    strategies = (getattr(module, "sharding_strategy", None) for model in models for module in model.modules())
    return any(strategy is not None and strategy.name != "NO_SHARD" for strategy in strategies)


def filled(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient in float64 without what fills up the last rank's piece of a flat parameter."""
    if not (getattr(parameter, "_is_flat_param", False) and hasattr(parameter, "_padded_unsharded_size")):
        return wide(gradient)
    size = parameter._unpadded_unsharded_size  # private: FSDP1 has no public name for the size without padding
    left = size.numel() - dist.get_rank() * gradient.numel()
    return wide(gradient)[: max(0, left)]


def counting(models: Iterable[torch.nn.Module]) -> Callable[[torch.nn.Parameter], bool]:
    """Return whether a parameter counts here in sums over ranks: one copy does. Ranks without DTensors have copies."""
    models = [*models]
    parts = any(hasattr(parameter, "placements") for model in models for parameter in model.parameters()) or cut_flat(models)
    rank = dist.get_rank() if dist.is_initialized() and dist.get_world_size() > 1 and not parts else 0

    def counts(parameter: torch.nn.Parameter) -> bool:
        placements = enumerate(getattr(parameter, "placements", ()))
        copied = [parameter.device_mesh.get_local_rank(dim) for dim, one in placements if one.is_replicate()]
        return not any(copied) and rank == 0

    return counts


def telling(parameter: torch.nn.Parameter) -> bool:
    """Return whether this rank has elements of a gradient, and not only summands that others have to be added to."""
    gradient = parameter.grad
    if gradient is None:
        return not (getattr(parameter, "_fsdp_flattened", False) and parameter.numel() == 0)
    summand = any(placement.is_partial() for placement in getattr(gradient, "placements", ()))
    return not summand and filled(parameter, gradient).numel() > 0


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients as they are now, in float64, by the parameter's name."""
    return {n: wide(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@dataclass(eq=False)
class Named:
    """A parameter with its layer. `units`: its gradient as (units, rest), or nothing if it has no output units."""

    name: str
    layer: str
    parameter: torch.nn.Parameter
    units: Callable[[torch.Tensor], torch.Tensor] | None


def named_parameters(models: Mapping[str, torch.nn.Module], *, frozen: bool = False) -> list[Named]:
    """The parameters that require a gradient, and the frozen ones if asked for, each once, with the layer that owns it."""
    found: dict[int, Named] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            owner, _, own = name.rpartition(".")
            for wrapper in ("_orig_mod", "module", "_module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
                owner = ".".join(part for part in owner.split(".") if part != wrapper)
            layer = ".".join(part for part in (prefix, owner or own) if part)
            full = f"{prefix}.{name}" if prefix else name
            if parameter.requires_grad or frozen:
                lazy = torch.nn.parameter.is_lazy(parameter)
                units = None if lazy else _units_of(model.get_submodule(name.rpartition(".")[0]), own, parameter)
                found.setdefault(id(parameter), Named(full, layer, parameter, units))
    return list(found.values())


def _units_of(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """How a gradient splits into units. A test's own module may say which dimensions are those of its outputs: `output_dims`."""
    dims = getattr(module, "output_dims", {}).get(name, (0,))
    if any(placement.is_shard() and placement.dim not in dims for placement in getattr(parameter, "placements", ())):
        return None  # each rank has a part of every unit
    if parameter.dim() < 2 or parameter.numel() == 0 or isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or not dims:
        return None
    if isinstance(module, torch.nn.ConvTranspose1d | torch.nn.ConvTranspose2d):
        assert module.groups == 1
        return lambda gradient: gradient.transpose(0, 1).flatten(1)
    return lambda gradient: gradient.movedim(dims, tuple(range(len(dims)))).flatten(0, len(dims) - 1).flatten(1)


def baseline(norms: Iterable[float]) -> tuple[float | None, int]:
    """The last robust z-score of the logarithms and how many spikes there were, by the definition in docs/metrics.md."""
    kept: list[float] = []
    score, spikes = None, 0
    for one in norms:
        score = None
        if not math.isfinite(one) or one <= 0:
            continue
        log = math.log(one)
        spike = False
        if len(kept) >= 20:
            past = kept[-128:]
            median = statistics.median(past)
            sigma = max(1.4826 * statistics.median(abs(v - median) for v in past), 0.1)
            score = (log - median) / sigma
            spike = score > 6 and log - median > math.log(3)
            spikes += spike
        if not spike:
            kept.append(log)
    return score, spikes


class _Sample:
    """The gradients of one layer in one sample. `counted`: the norm of those that count here in sums over ranks."""

    def __init__(self, gradients: list[tuple[Named, torch.Tensor]], counts: Callable[[torch.nn.Parameter], bool]) -> None:
        counted = [gradient for named, gradient in gradients if counts(named.parameter)]
        self.gradients = gradients
        self.norm = norm(gradient for _, gradient in gradients)
        self.counted = norm(counted)
        self.nan = sum(int(gradient.isnan().sum()) for gradient in counted)
        self.inf = sum(int(gradient.isinf().sum()) for gradient in counted)

    def __iter__(self) -> Iterator[tuple[Named, torch.Tensor]]:
        return iter(self.gradients)


@dataclass
class _Layer:
    """What was seen of one layer: by sample, its parameters' gradients.

    `live`: its optimizer's last sample had it; `missing`: what it missed there, `None` if it was frozen. `frozen`: it is now;
    `in_turn`: it was before, and came back.
    """

    samples: list[_Sample] = field(default_factory=list)
    live: bool = False
    missing: int | None = None
    frozen: bool = False
    in_turn: bool = False

    @property
    def tracked(self) -> bool:
        """Return whether more than its totals are shown: what is frozen for the first time is not known to come back."""
        return not self.frozen or self.in_turn


@dataclass
class _Optimizer:
    """What was seen of one optimizer. `undecided`: samples that were clipped or divided."""

    owned: Callable[[], set[int]]
    steps: int = 0
    sample_step: int = 0
    after: float | None = None
    coefficient: float | None = None
    clipped: int = 0
    undecided: set[int] = field(default_factory=set)
    nonfinite: dict[str, int] = field(default_factory=lambda: {"stepped": 0, "skipped": 0, "unknown": 0})
    norms: list[float] = field(default_factory=list)


def _owner(optimizer: torch.optim.Optimizer) -> Callable[[], set[int]]:
    return lambda: {id(p) for g in optimizer.param_groups for p in g["params"]}


class Recorder:
    """Records a loop. `optimizers`: one, or a mapping of the names that the exporter gives them.

    `unscale`: what gradients after a backward are multiplied with. `told`: the exporter knows of all factors before clipping.
    `stages`: ranks have different models.
    `dead_window`, `moments`: as the exporter was told.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        dead_window: int = 100,
        moments: bool = False,
    ) -> None:
        self.models = dict(model) if isinstance(model, Mapping) else {"": model}
        self.optimizers: dict[str, _Optimizer] = {}
        self.use(optimizers)
        self.layers: dict[str, _Layer] = {}
        self.removed: dict[Key, float] = {}
        self._exist: set[str] = set()
        self._in_parts: set[str] = set()
        self._counts: Callable[[torch.nn.Parameter], bool] = lambda _: True
        self._ever_in_parts: set[str] = set()
        self.backwards = 0
        self.skips = 0
        self.unscale = 1.0
        self.told = False
        self._judged = 0
        self._shortened: dict[frozenset[str], list[tuple[int, float, float]]] = {}
        self.stages = False
        self._dead_window = dead_window
        self._moments = moments
        self._gradients: dict[int, torch.Tensor] = {}
        self._after: dict[str, dict[int, torch.Tensor]] = {}
        self._skipping: set[str] = set()
        self._seen: list[Named] = []
        self._started = time.monotonic()

    def use(self, optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]) -> None:
        """Takes these optimizers from now on, those of a known name in the place of the one before."""
        named = optimizers if isinstance(optimizers, Mapping) else {"": optimizers}
        for name, optimizer in named.items():
            self.optimizers.setdefault(name, _Optimizer(_owner(optimizer))).owned = _owner(optimizer)

    # In the loop

    def backward(self, loss: torch.Tensor, *, unused: Iterable[str] = (), **options: bool) -> None:
        """Runs a backward and looks at the gradients that it left; `unused`: parameters that it did not reach."""
        loss.backward(**options)
        self.passed(unused=unused)

    def passed(self, *, unused: Iterable[str] = ()) -> None:
        """A backward is over: looks at the gradients that it left."""
        if self._after:
            self._settle("stepped")
        self.backwards += 1
        # A gradient that says nothing is neither read nor missing.
        self._exist = {n.layer for n in named_parameters(self.models, frozen=True)}
        self._seen = [n for n in named_parameters(self.models) if telling(n.parameter)]
        skip = set(unused)
        self._gradients = {
            id(n.parameter): filled(n.parameter, n.parameter.grad) * self.unscale
            for n in self._seen
            if n.parameter.grad is not None and n.name not in skip
        }

    def stepping(self, name: str = "") -> None:
        """An optimizer is about to step: looks at what it sees."""
        one = self.optimizers[name]
        one.steps += 1
        if not self._gradients:  # a step that no backward came before
            return
        owned = one.owned()
        mine = [n for n in self._seen if id(n.parameter) in owned and id(n.parameter) in self._gradients]
        self._after[name] = {id(n.parameter): filled(n.parameter, n.parameter.grad) for n in mine if n.parameter.grad is not None}

    def step(self, optimizer: torch.optim.Optimizer, name: str = "") -> None:
        """An optimizer's step, looked at right before."""
        self.stepping(name)
        optimizer.step()

    def skipped(self, outcome: str = "skipped", name: str | None = None) -> None:
        """The step of the last backward does not take place, or only that of the optimizer `name`."""
        if name is not None:
            self._skipping.add(name)
            return
        self.skips += outcome == "skipped"
        self._settle(outcome)

    def _settle(self, outcome: str) -> None:
        """The round is over; of layers that are frozen only the totals are shown, and of those that are gone their sum."""
        self._in_parts = {one.layer for one in self._seen if in_parts(one.parameter, self.models.values())}
        self._ever_in_parts |= self._in_parts
        self._counts = (lambda _: True) if self.stages else counting(self.models.values())
        self._remove()
        stepped = {*self._after, *self._skipping} or set(self.optimizers)
        owned = set().union(*(self.optimizers[name].owned() for name in stepped))
        self._open(owned)
        samples: dict[str, list[tuple[Named, torch.Tensor]]] = {}
        for one in self._seen:
            if id(one.parameter) not in owned:
                continue
            gradient = self._gradients.get(id(one.parameter))
            if gradient is None:
                self.layers[one.layer].missing = (self.layers[one.layer].missing or 0) + 1
            else:
                samples.setdefault(one.layer, []).append((one, gradient))
        for layer, sample in samples.items():
            self.layers[layer].samples.append(_Sample(sample, self._counts))
            self.layers[layer].live = True
        self._judge_changes()
        for name in stepped:
            own_outcome = "skipped" if name in self._skipping else outcome
            self._settle_optimizer(self.optimizers[name], self._after.get(name), own_outcome)
        self._after, self._gradients, self._skipping = {}, {}, set()

    def _open(self, owned: set[int]) -> None:
        """What the optimizers of a sample own has no values but those of it."""
        every = named_parameters(self.models, frozen=True)
        trained = {one.layer for one in self._seen}
        for name in {one.layer for one in every}:
            layer = self.layers.setdefault(name, _Layer())
            layer.in_turn |= layer.frozen and name in trained
            layer.frozen = name not in trained
        for one in every:
            if id(one.parameter) in owned:
                self.layers[one.layer].live, self.layers[one.layer].missing = False, None
        for one in self._seen:
            if id(one.parameter) in owned:
                self.layers[one.layer].missing = 0

    def _remove(self) -> None:
        """Adds up the totals of layers that are gone."""
        for name in self.layers.keys() - self._exist:
            for one, total in self._totals_of(name, self.layers.pop(name)):
                if not self._of_others_too(one):
                    whole = key(one[0], **{**dict(one[1]), "layer": "(removed)"})
                    self.removed[whole] = self.removed.get(whole, 0) + total

    def _settle_optimizer(self, one: _Optimizer, after: dict[int, torch.Tensor] | None, outcome: str) -> None:
        owned = one.owned()
        mine = [g for i, g in self._gradients.items() if i in owned]
        if not mine:
            return
        whole = norm(mine)
        one.norms.append(whole)
        one.sample_step = one.steps
        one.nonfinite[outcome] += not math.isfinite(whole)
        one.after = None if after is None or not math.isfinite(whole) else norm(after.values())

    # What happened between backward and step

    def _judge_changes(self) -> None:
        """Says of each optimizer that stepped by what its gradients were clipped, as far as norms can tell.

        Factors that differ, or some gradient that is as it was, are a clipping. A factor that all have in common is one if the norm
        that comes out, of the optimizer or of all that were cut alike, has come out twice before of other factors, and then these
        were clipped, too; else it may be a division.
        """
        self._judged += 1
        alike: dict[str, tuple[float, float]] = {}
        for name, after in self._after.items():
            one, owned = self.optimizers[name], self.optimizers[name].owned()
            before = {i: norm([g]) for i, g in self._gradients.items() if i in owned}
            whole, seen = math.hypot(*before.values()), norm(after.values())
            one.coefficient = seen / whole if whole and math.isfinite(whole) else None
            factors = [norm([after[i]]) / n if i in after else 0.0 for i, n in before.items() if n]
            if one.coefficient is None or not math.isfinite(seen) or all(abs(f - 1) < 1e-6 for f in factors):
                continue
            same = max(factors) - min(factors) <= 4e-3 * max(factors) and not any(abs(f - 1) < 1e-6 for f in factors)
            if not same:
                one.clipped += max(factors) <= 1 + 1e-6
            elif self.told and one.coefficient <= 1:
                one.clipped += one.coefficient < 1 - 4e-3
            elif one.coefficient >= 1:
                one.coefficient = None
            else:
                one.undecided.add(self._judged)
                if not self._comes_again(frozenset({name}), seen, one.coefficient):
                    alike[name] = seen, one.coefficient
                    one.coefficient = None
        together = math.hypot(*(seen for seen, _ in alike.values()))
        factors = [factor for _, factor in alike.values()]
        if len(alike) > 1 and max(factors) < 1.004 * min(factors) and self._comes_again(frozenset(alike), together, factors[0]):
            for name, (_, factor) in alike.items():
                self.optimizers[name].coefficient = factor

    def _comes_again(self, names: frozenset[str], seen: float, factor: float) -> bool:
        before = self._shortened.setdefault(names, [])
        equal = {number: other for number, one, other in before[-16:] if math.isclose(one, seen, rel_tol=1e-4)}
        before.append((self._judged, seen, factor))
        known = len(equal) >= 2 and sum(not math.isclose(other, factor, rel_tol=1e-4) for other in equal.values()) >= 2
        for name in names if known else ():
            one = self.optimizers[name]
            one.clipped += len(one.undecided & {*equal, self._judged})
            one.undecided -= {*equal, self._judged}
        return known

    # After the loop

    def expected(self) -> dict[Key, float]:
        """All that is known of what a scrape should show."""
        if self._after:
            self._settle("stepped")
        found: dict[Key, float] = {
            key("torch_train_backward_passes_total"): self.backwards,
            key("torch_train_skipped_steps_total"): self.skips,
            key("torch_train_steps_total"): sum(one.steps for one in self.optimizers.values()),
        }
        for name, layer in self.layers.items():
            if layer.samples or not layer.frozen:
                found.update(self._of_layer(name, layer) if layer.tracked else self._totals_of(name, layer))
        found.update(self.removed)
        for name, optimizer in self.optimizers.items():
            found.update(_of_optimizer(name, optimizer))
        if not self._ever_in_parts:
            return found
        return {self._as_part(one): value for one, value in found.items() if not self._of_others_too(one)}

    def _as_part(self, one: Key) -> Key:
        """The norm of a layer's part has a name of its own."""
        own = one[0] == "torch_grad_norm" and dict(one[1])["layer"] in self._in_parts
        return ("torch_grad_shard_norm", one[1]) if own else one

    def _of_others_too(self, one: Key) -> bool:
        """Return whether this rank alone cannot know it."""
        if not self._ever_in_parts:
            return False
        name = one[0].removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        part = dict(one[1]).get("layer") in self._ever_in_parts
        return (part and name in OF_A_WHOLE_LAYER) or (bool(self._in_parts) and name in OF_ALL_LAYERS)

    def _totals_of(self, name: str, layer: _Layer) -> Iterator[tuple[Key, float]]:
        """What only grows."""
        norms = [sample.norm for sample in layer.samples]
        yield key("torch_grad_captures_total", layer=name), len(norms)
        yield (
            key("torch_grad_norm_squared_accumulated_total", layer=name),
            sum(sample.counted**2 for sample in layer.samples if math.isfinite(sample.counted)),
        )
        yield key("torch_grad_nonfinite_elements_total", layer=name, kind="nan"), sum(sample.nan for sample in layer.samples)
        yield key("torch_grad_nonfinite_elements_total", layer=name, kind="inf"), sum(sample.inf for sample in layer.samples)
        yield from _histogram("torch_grad_norm_distribution", [n for n in norms if math.isfinite(n)], DECADES, layer=name)
        yield key("torch_grad_norm_spikes_total", layer=name), baseline(norms)[1]

    def _of_layer(self, name: str, layer: _Layer) -> Iterator[tuple[Key, float]]:
        if layer.missing is not None:
            yield key("torch_grad_missing_parameters", layer=name), layer.missing
        yield from self._totals_of(name, layer)
        if not layer.samples:
            return
        norms = [sample.norm for sample in layer.samples]
        finite, score = [n for n in norms if math.isfinite(n)], baseline(norms)[0]
        if finite and time.monotonic() - self._started < 50:
            yield key("torch_grad_norm_recent_max", layer=name), max(finite)
        if not layer.live:
            return
        if score is not None:
            yield key("torch_grad_norm_zscore", layer=name), score
        for metric, value in self._of_last_sample(layer, layer.samples[-1]):
            yield key(metric, layer=name), value

    def _of_last_sample(self, layer: _Layer, last: _Sample) -> Iterator[tuple[str, float]]:
        elements = torch.cat([gradient.flatten() for _, gradient in last.gradients])
        yield "torch_grad_norm", last.norm
        yield "torch_grad_norm_squared", last.counted**2
        yield "torch_grad_max_magnitude", float(elements.abs().max()) if elements.numel() else 0.0
        yield "torch_grad_zero_ratio", float((elements == 0).double().mean()) if elements.numel() else 0.0
        units = [row for one, gradient in last.gradients if one.units is not None for row in one.units(gradient)]
        if units:
            yield "torch_grad_units", len(units)
            yield "torch_grad_zero_units_ratio", sum(bool((row == 0).all()) for row in units) / len(units)
            if len(layer.samples) >= min(20, self._dead_window):
                yield "torch_grad_dead_ratio", self._dead(layer) / len(units)
        if self._moments and elements.numel():
            yield "torch_grad_mean", float(elements.mean())
            yield "torch_grad_stddev", float(elements.std(correction=0))
            yield "torch_grad_min", float(elements.min())
            yield "torch_grad_max", float(elements.max())

    def _dead(self, layer: _Layer) -> int:
        """Units of the last sample's parameters that were silent in each of the window's samples that had no NaN."""
        dead = 0
        for one, _ in layer.samples[-1].gradients:
            if one.units is None:
                continue
            pairs = [pair for sample in layer.samples for pair in sample.gradients]
            history = torch.stack([one.units(g) for other, g in pairs if other.parameter is one.parameter])
            silent = (history == 0).all(2)
            told = ~history.isnan().any(2)
            for row in range(history.shape[1]):
                last = silent[told[:, row], row][-self._dead_window :]
                dead += last.numel() > 0 and bool(last.all())
        return dead

    def check(self, exporter: Exporter, *, without: Iterable[str] = (), optional: Iterable[str] = (), rel: float = 1e-5) -> None:
        """Asserts that a scrape shows what was recorded and nothing else, and that nothing failed inside the exporter.

        `optional`: beginnings of the names of metrics that may be absent where they cannot be known. `rel`: for whatever
        is a norm; counts, ratios and buckets are exact, and averages close on the scale of the norm.
        """
        wrong = self.differences(exporter, without=without, optional=optional, rel=rel)
        assert not wrong, "\n" + "\n".join(wrong)

    def differences(
        self, exporter: Exporter, *, without: Iterable[str] = (), optional: Iterable[str] = (), rel: float = 1e-5
    ) -> list[str]:
        """What a scrape shows otherwise than it was recorded, a line each."""
        left_out, may_be_absent = tuple(without), tuple(optional)
        actual = values(exporter)
        steps = key("torch_train_steps_total")
        actual[steps] = sum(v for k, v in actual.items() if k[0] == steps[0])
        expected = self.expected()
        wrong = []
        for one, value in expected.items():
            shown = actual.get(one)
            if shown == value or one[0].startswith(left_out) or (shown is None and one[0].startswith(may_be_absent)):
                continue
            if shown is None or not _close(one, shown, value, self._scale(one, expected), rel):
                wrong.append(f"{one[0]}{dict(one[1])}: shown {shown}, recorded {value}")
        for one in actual.keys() - expected.keys():
            shown = actual[one]
            surplus = one[0] in SURPLUS or (one[0] in COUNTERS_OF_A_LAYER and shown) or self._of_others_too(one)
            if surplus and not one[0].startswith(left_out) and not self._unknown(one):
                wrong.append(f"{one[0]}{dict(one[1])}: shown {shown}, nothing recorded")
        failures = errors_in(actual)
        return wrong + ([f"errors: {failures}"] if failures else [])

    def _unknown(self, one: Key) -> bool:
        """Return whether there is no record of this series."""
        layer = self.layers.get(dict(one[1]).get("layer", ""))
        slow = time.monotonic() - self._started >= 50 or (layer is not None and layer.frozen)
        return (one[0] == "torch_grad_norm_recent_max" and slow) or (one[0] in MOMENTS and not self._moments)

    def _scale(self, one: Key, expected: Mapping[Key, float]) -> float:
        """What an error of this series is measured against: the norm for sums of signed numbers, else itself."""
        if one[0] in ("torch_grad_mean", "torch_grad_stddev"):
            layer = dict(one[1])["layer"]
            count = sum(g.numel() for _, g in self.layers[layer].samples[-1].gradients)
            return expected[self._as_part(("torch_grad_norm", one[1]))] / math.sqrt(count)
        if one[0] == "torch_grad_norm_zscore":
            return 10.0
        return abs(expected[one])


EXACT = ("_total", "_units", "_count", "_bucket", "_ratio", "_parameters", "_step")


def _close(one: Key, shown: float, value: float, scale: float, rel: float) -> bool:
    if not math.isfinite(value):
        return repr(shown) == repr(value)
    exact = one[0].endswith(EXACT) and not one[0].endswith("_accumulated_total")
    return math.isclose(shown, value, rel_tol=1e-12, abs_tol=1e-12 if exact else rel * (2 if "squared" in one[0] else 1) * scale)


def _of_optimizer(name: str, one: _Optimizer) -> Iterator[tuple[Key, float]]:
    if not one.undecided:
        yield key("torch_grad_clipped_steps_total", optimizer=name), one.clipped
    for outcome, count in one.nonfinite.items():
        yield key("torch_grad_nonfinite_steps_total", optimizer=name, outcome=outcome), count
    if not one.norms:
        return
    finite = [n for n in one.norms if math.isfinite(n)]
    yield key("torch_grad_global_norm", optimizer=name), one.norms[-1]
    yield from _histogram("torch_grad_global_norm_distribution", finite, HALF_DECADES, optimizer=name)
    yield key("torch_grad_global_norm_spikes_total", optimizer=name), baseline(one.norms)[1]
    yield key("torch_grad_sample_step", optimizer=name), one.sample_step
    if one.after is not None:
        yield key("torch_grad_global_norm_after_clip", optimizer=name), one.after
        if one.coefficient is not None:
            yield key("torch_grad_clip_coefficient", optimizer=name), one.coefficient


@functools.cache
def _buckets(name: str, bounds: tuple[float, ...], labels: tuple[tuple[str, str], ...]) -> list[Key]:
    return [key(name + "_bucket", le=bound, **dict(labels)) for bound in (*map(str, bounds), "+Inf")]


def _histogram(name: str, observed: list[float], bounds: tuple[float, ...], **labels: str) -> Iterator[tuple[Key, float]]:
    """The series of a histogram; buckets are cumulative, an observation on a bound belongs below it."""
    counts = [0] * (len(bounds) + 1)
    for one in observed:
        counts[bisect.bisect_left(bounds, one)] += 1
    yield from zip(_buckets(name, bounds, tuple(labels.items())), itertools.accumulate(counts), strict=True)
    yield key(name + "_count", **labels), len(observed)
    yield key(name + "_sum", **labels), sum(observed)
