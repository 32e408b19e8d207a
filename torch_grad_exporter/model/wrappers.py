"""What `DistributedDataParallel` is around, or within: it makes the gradients of ranks equal. Reads attributes only.

Found are the class of that name, around a module, and the composable `replicate`, which changes a module in place.
"""

from __future__ import annotations

import gc

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_grad_exporter.torch_compat import active_wrapper, composed_wrapper


def around(root: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper whose forward is running, or that the root, or what was compiled to be it, is itself."""
    return active_wrapper() or wrapper_of(root)


def wrapper_of(module: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper that a module is, or that replicates it in place; that one is made in the module's first forward."""
    module = getattr(module, "_orig_mod", module)
    if isinstance(module, DistributedDataParallel):
        return module
    wrapper: DistributedDataParallel | None = composed_wrapper(module)
    return wrapper


def within(root: torch.nn.Module) -> list[tuple[torch.nn.Module, DistributedDataParallel]]:
    """The modules below the root, or the root, that a wrapper replicates, each with its wrapper."""
    return [(module, wrapper) for module in root.modules() if (wrapper := wrapper_of(module)) is not None]


def anywhere(root: torch.nn.Module) -> DistributedDataParallel | None:
    """A wrapper that contains the root. Visits every object of the process, which takes a tenth of a second."""
    for one in gc.get_objects():
        # Not `isinstance`, which asks an object for its `__class__`: some answer with a side effect.
        if issubclass(type(one), DistributedDataParallel) and any(module is root for module in one.modules()):
            found: DistributedDataParallel = one
            return found
    return None
