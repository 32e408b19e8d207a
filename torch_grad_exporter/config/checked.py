"""The options of `start_exporter`, checked alone and against the models."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_grad_exporter.actions.clip.options import ClipOptions, OnFailure
from torch_grad_exporter.actions.clip.policy import policy_name
from torch_grad_exporter.collectors import REGISTRY
from torch_grad_exporter.collectors.extra import ExtraRegistries
from torch_grad_exporter.config.option import check_names, misspelt, resolve, source
from torch_grad_exporter.config.settings import Arguments, Settings
from torch_grad_exporter.distributed.identity import Identity, identity, process_group
from torch_grad_exporter.distributed.store import JobStore, run_name
from torch_grad_exporter.errors import say
from torch_grad_exporter.inspection.modules import InnerModules, ModuleKind
from torch_grad_exporter.model.layers import LayerIndex
from torch_grad_exporter.model.names import LayerFilter, layers_of
from torch_grad_exporter.model.optimizers import Optimizers
from torch_grad_exporter.model.replicas import Replicas
from torch_grad_exporter.outputs.http.web_config import WebConfigFile
from torch_grad_exporter.outputs.otlp import push_settings
from torch_grad_exporter.outputs.otlp.push_settings import Signal

logger = logging.getLogger("torch_grad_exporter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The user's choices, all valid, and what was derived from them and the models.

    Attributes:
        index: The layers to watch.
        settings: The options that have a variable.
        arguments: The options that take objects.
        identity: This process in its job.
        rank: The rank on every series; the user may have chosen it.
        run: The name of the run, on every series.
        store: The job's store, which may be connected already; the owner of this closes it.
        web_config: TLS and users of the server, None for plain HTTP.
        extra: Registries whose metrics are shown as well.
        push: Where to push metrics and log records over OTLP, empty for nowhere.
        clip: How to clip gradients, None to only watch.
        modules: The modules whose activations are shown, None for none.
        timed: The modules whose times are shown, None for none.
    """

    index: LayerIndex
    settings: Settings
    arguments: Arguments
    identity: Identity
    rank: int
    run: str
    store: JobStore
    web_config: WebConfigFile | None
    extra: ExtraRegistries
    push: tuple[push_settings.PushSettings, ...]
    clip: ClipOptions | None
    modules: InnerModules | None
    timed: InnerModules | None

    @property
    def labels(self) -> dict[str, str]:
        """The labels of every series."""
        return {"run": self.run, "rank": str(self.rank), **self.settings.labels}


def check(models: Mapping[str, torch.nn.Module], environment: Mapping[str, str], **given: object) -> Checked:
    """Check the options of `start_exporter`, and whether they fit the models.

    Nothing is registered or started. Last, ranks of a job without a name agree on one, for which
    the job's store may be connected.

    Args:
        models: The models to watch, by name.
        environment: The environment variables.
        given: The arguments by name.

    Raises:
        TypeError: An argument is of a wrong type; the message names it, the value and the fix.
        ValueError: An argument or a variable is wrong; the message names it, the value and the fix.
        ImportError: An option needs a package that is not installed.
    """
    check_names(given)
    settings, arguments = resolve(given, environment), Arguments.checked(given)
    if settings.peak_flops is not None and settings.flops_per_step is None:
        where = f"{source(given, 'peak_flops')}={settings.peak_flops:g}"
        raise ValueError(f"{where}: there is nothing to compare it with; set flops_per_step=")
    otlp = (arguments.otlp_endpoint, arguments.otlp_protocol, arguments.otlp_headers, arguments.otlp_interval)
    each = [push_settings.resolve(*otlp, signal=signal, environment=environment) for signal in Signal]
    place = identity(environment, process_group())
    rank = place.rank if settings.rank is None else settings.rank
    for sentence in misspelt(environment) if rank == 0 else ():
        say(logger, logging.WARNING, sentence)
    index = _index(models, settings, given, Replicas(settings.ranks, rank, place.world_size))
    _check_ownership(index, arguments.optimizers)
    clip, modules = _clip(settings, arguments, index, place.world_size), _modules(models, settings, given)
    web_config = _web_config(settings, given)
    _check_folders(settings, given, place)
    layers = LayerFilter(settings.include, settings.exclude)
    timed = InnerModules(models, layers, ModuleKind.OWNERS, settings.max_layers) if settings.layer_times else None
    extra = ExtraRegistries(arguments.extra_registries, REGISTRY.catalogue)
    # Last, since it may open a connection.
    store = JobStore()
    try:
        run = run_name(place, settings.run, store)
    except BaseException:  # Ctrl-C while other ranks are waited for
        store.close()
        raise
    return Checked(
        index=index,
        settings=settings,
        arguments=arguments,
        identity=place,
        rank=rank,
        run=run,
        store=store,
        web_config=web_config,
        extra=extra,
        push=tuple(push for push in each if push is not None),
        clip=clip,
        modules=modules,
        timed=timed,
    )


def _clip(settings: Settings, arguments: Arguments, index: LayerIndex, world_size: int) -> ClipOptions | None:
    """Return how to clip, None for not at all. Raises on a policy that does not fit, or a duplicate."""
    options = ClipOptions(clip=arguments.clip, dry_run=arguments.dry_run, raises=settings.on_failure is OnFailure.RAISE)
    names = [policy_name(policy) for policy in options.dry_run]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"dry_run=[...]: duplicate policy {duplicate}; each is shown under its name, so list it once")
    layers = index.all_layers()
    for policy in options.policies:
        policy.check_layers(layers)
        policy.check_ranks(world_size)
    return options if options.policies else None


def _modules(models: Mapping[str, torch.nn.Module], settings: Settings, given: Mapping[str, object]) -> InnerModules | None:
    """Return the modules that `activations` asks for. Raises if there are none."""
    pattern = settings.activations
    if pattern is False:
        return None
    if isinstance(pattern, re.Pattern):
        modules = InnerModules(models, LayerFilter((pattern,)), ModuleKind.ANY, settings.max_layers)
    else:
        layers = LayerFilter(settings.include, settings.exclude)
        modules = InnerModules(models, layers, ModuleKind.LEAVES, settings.max_layers)
    selected = modules.selected()
    if not selected.by_root and not selected.compiled:
        names = modules.names()
        where = f"{source(given, 'activations')}={getattr(pattern, 'pattern', True)!r}"
        raise ValueError(f"{where}: matches none of the {len(names)} modules, for example {', '.join(map(repr, names[:3]))}")
    return modules


def _index(
    models: Mapping[str, torch.nn.Module], settings: Settings, given: Mapping[str, object], replicas: Replicas
) -> LayerIndex:
    """Return the layers to watch. Raises if there are none, or a pattern matches none."""
    if not any(True for module in models.values() for _ in module.parameters()):
        raise ValueError("model: it has no parameters, so there are no gradients to watch; pass the module that is trained")
    layers = layers_of((number, *named) for number, named in enumerate(models.items()))
    for name, patterns in (("include", settings.include), ("exclude", settings.exclude)):
        for pattern in patterns:
            if not any(pattern.search(layer) for layer in layers):
                where = f"{source(given, name)}={pattern.pattern!r}"
                raise ValueError(f"{where}: matches none of the {len(layers)} layers; the first is {layers[0]!r}")
    layer_filter = LayerFilter(settings.include, settings.exclude)
    if not any(layer_filter.accepts(layer) for layer in layers):
        raise ValueError("include and exclude leave no layer of the model; loosen one of them")
    index = LayerIndex(models, layer_filter, settings.max_layers, replicas)
    table = index.table
    if not table.tracked:
        message = "no parameter of the model requires a gradient yet; those that do later are picked up then"
        say(logger, logging.WARNING, message)
    if table.folded:
        message = (
            "%d layers are shown in %d rows, %d of them together with others; raise max_layers=%d, or choose layers with include="
        )
        names = {parameter.layer for parameter in table.tracked}
        say(logger, logging.WARNING, message, len(names), len(table.layers), table.folded, settings.max_layers)
    return index


def _check_ownership(index: LayerIndex, named: Mapping[str, torch.optim.Optimizer]) -> None:
    known = Optimizers(index)
    for name, optimizer in named.items():
        if not known.concerns(optimizer):
            raise ValueError(
                f"optimizers[{name!r}]={type(optimizer).__name__}: owns no parameter that is watched; "
                "pass the optimizer of this model, made after the model was moved or wrapped"
            )


def _check_folders(settings: Settings, given: Mapping[str, object], place: Identity) -> None:
    """Make the folders that are written to, and raise if one cannot be; warn of a state that a restart would not find."""
    for name, folder in (("black_box", settings.black_box), ("state_dir", settings.state_dir)):
        if folder:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(bytes(4096))
            except OSError as error:
                where = f"{source(given, name)}={folder!r}"
                fix = "expected a directory that this process can write to"
                raise ValueError(f"{where}: cannot be written to: {error.strerror}; {fix}") from error
    if settings.state_dir and not settings.run and not place.run:
        where = f"{source(given, 'state_dir')}={settings.state_dir!r}"
        say(logger, logging.WARNING, "%s: a restart will be another run; pass run=, so that it finds its state", where)


def _web_config(settings: Settings, given: Mapping[str, object]) -> WebConfigFile | None:
    if not settings.web_config_file:
        return None
    try:
        return WebConfigFile(settings.web_config_file)
    except ValueError as error:
        raise ValueError(f"{source(given, 'web_config_file')}={settings.web_config_file!r}: {error}") from error
