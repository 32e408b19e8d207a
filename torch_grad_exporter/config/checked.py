"""Everything that `start_exporter` was given, checked: what an exporter is built from, and what of it each stage gets."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_grad_exporter.actions.clip.at_steps import Wanted
from torch_grad_exporter.actions.clip.clipping import check_fits
from torch_grad_exporter.actions.clip.policy import OnFailure, policy_name
from torch_grad_exporter.capture.parts import CaptureOptions
from torch_grad_exporter.config.option import resolve, source
from torch_grad_exporter.config.settings import Arguments, Settings
from torch_grad_exporter.distributed.identity import Identity, identity
from torch_grad_exporter.distributed.store import JobStore, run_name
from torch_grad_exporter.errors import say
from torch_grad_exporter.inspection.modules import InnerModules, found_by, with_parameters, without_children
from torch_grad_exporter.model import given as model_given
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.names import LayerFilter, layers_of
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.outputs.announcement import Rank
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.otlp import push_settings
from torch_grad_exporter.outputs.outputs import OutputOptions

logger = logging.getLogger("torch_grad_exporter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """All choices, valid, and the objects that they are about. `run`, `rank`: as the series carry them.

    `clip`: how gradients are clipped, `None` if the exporter only watches. `modules`: those whose activations are shown, `timed`:
    those whose times are; `None` where that is not asked for.
    """

    models: Mapping[str, torch.nn.Module]
    index: LayerIndex
    settings: Settings
    identity: Identity
    rank: int
    run: str
    store: JobStore
    arguments: Arguments
    web_config: WebConfigFile | None
    push: push_settings.PushSettings | None
    clip: Wanted | None = None
    modules: InnerModules | None = None
    timed: InnerModules | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Those of every series."""
        return {"run": self.run, "rank": str(self.rank), **self.settings.labels}

    @property
    def whose(self) -> Rank:
        """Which process the values belong to, for outputs."""
        return Rank(self.run, self.rank, self.identity, self.labels)

    @property
    def capture(self) -> CaptureOptions:
        """For the capture."""
        return CaptureOptions(local_norm=self.settings.local_norm, weights=self.settings.weights)

    @property
    def outputs(self) -> OutputOptions:
        """For the outputs."""
        return OutputOptions(
            port=self.settings.port,
            addr=self.settings.addr,
            textfile_dir=self.settings.textfile_dir,
            web_config_file=self.settings.web_config_file,
            linger=self.settings.linger,
        )


def checked(given: Mapping[str, object], environment: Mapping[str, str]) -> Checked:
    """Checks all arguments by name, and the environment. Raises `TypeError`, `ValueError` or `ImportError` that says what is wrong.

    Nothing is registered, started or opened; the ranks of a job that has no name agree on one.
    """
    settings, chosen = resolve(Settings, given, environment), resolve(Arguments, given, {})
    push = push_settings.resolve(
        chosen.otlp_endpoint, chosen.otlp_protocol, chosen.otlp_headers, chosen.otlp_interval, environment=environment
    )
    place, store = identity(environment), JobStore()
    models = model_given.models(given["model"])
    rank = place.rank if settings.rank is None else settings.rank
    index = _index(models, settings, given, Replicas(settings.ranks, rank, place.world_size))
    _check_ownership(index, chosen.optimizers)
    modules = _modules(models, settings, given)
    layers = LayerFilter(settings.include, settings.exclude)
    timed = InnerModules(models, with_parameters(layers), settings.max_layers) if settings.layer_times else None
    return Checked(
        models=models,
        index=index,
        settings=settings,
        identity=place,
        rank=rank,
        web_config=_web_config(settings, given),
        run=run_name(place, settings.run, store),
        store=store,
        arguments=chosen,
        push=push,
        clip=_clip(settings, chosen, index),
        modules=modules,
        timed=timed,
    )


def _clip(settings: Settings, chosen: Arguments, index: LayerIndex) -> Wanted | None:
    """How gradients are to be clipped. Raises where a policy fits none of the layers, or is tried twice."""
    wanted = Wanted(policy=chosen.clip, dry_run=chosen.dry_run, raises=settings.on_failure is OnFailure.RAISE)
    names = [policy_name(one) for one in wanted.dry_run]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"dry_run=[...]: {twice} is there twice; each policy is shown under its name")
    if not wanted.policies:
        return None
    check_fits(wanted.policies, index.all_layers())
    return wanted


def _modules(models: Mapping[str, torch.nn.Module], settings: Settings, arguments: Mapping[str, object]) -> InnerModules | None:
    """The modules that `activations` asks for; raises where there are none."""
    if settings.activations is False:
        return None
    wanted = None if settings.activations is True else settings.activations
    wants = without_children(LayerFilter(settings.include, settings.exclude)) if wanted is None else found_by(wanted)
    found = InnerModules(models, wants, settings.max_layers)
    chosen = found.chosen()
    if not chosen.inner and not chosen.compiled:
        names = found.names()
        where = f"{source(arguments, 'activations')}={True if wanted is None else wanted.pattern!r}"
        raise ValueError(
            f"{where}: is found in the name of none of the {len(names)} modules; there are {', '.join(map(repr, names[:3]))}"
        )
    return found


def _index(
    models: Mapping[str, torch.nn.Module], settings: Settings, arguments: Mapping[str, object], replicas: Replicas
) -> LayerIndex:
    """The index of the layers that are to be watched; raises where there are none, or a pattern matches none."""
    if not any(True for module in models.values() for _ in module.parameters()):
        raise ValueError("model: it has no parameters, so there are no gradients to watch; pass the module that is trained")
    everything = layers_of((number, *named) for number, named in enumerate(models.items()))
    for name, patterns in (("include", settings.include), ("exclude", settings.exclude)):
        for pattern in patterns:
            if not any(pattern.search(layer) for layer in everything):
                where = f"{source(arguments, name)}={pattern.pattern!r}"
                raise ValueError(f"{where}: matches none of the {len(everything)} layers; the first is {everything[0]!r}")
    layer_filter = LayerFilter(settings.include, settings.exclude)
    if not any(layer_filter.accepts(layer) for layer in everything):
        raise ValueError("include and exclude leave no layer of the model; loosen one of them")
    index = LayerIndex(models, layer_filter, settings.max_layers, replicas)
    if not index.table.tracked:
        message = "no parameter of the model requires a gradient yet; those that do later are picked up then"
        say(logger, logging.WARNING, message)
    if index.table.folded:
        message = (
            "%d layers are shown in %d rows, %d of them together with others; raise max_layers=%d, or choose layers with include="
        )
        layers = {one.layer for one in index.table.tracked}
        say(logger, logging.WARNING, message, len(layers), len(index.table.layers), index.table.folded, settings.max_layers)
    return index


def _check_ownership(index: LayerIndex, named: Mapping[str, torch.optim.Optimizer]) -> None:
    """Raises on an optimizer that owns nothing of what is watched."""
    known = Optimizers(index)
    for name, optimizer in named.items():
        if not known.concerns(optimizer):
            raise ValueError(
                f"optimizers[{name!r}]={type(optimizer).__name__}: owns no parameter that is watched; "
                "pass the optimizer of this model, made after the model was moved or wrapped"
            )


def _web_config(settings: Settings, arguments: Mapping[str, object]) -> WebConfigFile | None:
    """The web configuration, read and checked, or `None` if none was named; raises on one that is wrong."""
    if not settings.web_config_file:
        return None
    try:
        return WebConfigFile(settings.web_config_file)
    except ValueError as error:
        raise ValueError(f"{source(arguments, 'web_config_file')}={settings.web_config_file!r}: {error}") from error
