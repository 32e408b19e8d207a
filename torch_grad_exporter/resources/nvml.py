"""NVML, the library of NVIDIA's driver, through the optional package nvidia-ml-py.

Its calls are not CUDA calls and touch no context, so any thread may make them. What a device or a driver refuses is `None`; a
device or a library that has gone raises.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch_grad_exporter.resources.cuda_visible_devices import SILENT, Installed

_NOT_HERE = ("LibraryNotFound", "DriverNotLoaded", "NoPermission", "FunctionNotFound", "NotFound")
"""At the start: there is no GPU of NVIDIA's, or none for this process."""

_CLOSED = ("Uninitialized", "LibraryNotFound", "DriverNotLoaded")
"""From any call: further calls are useless before NVML has been opened anew."""

_LOST = ("GpuIsLost",)
"""From a call on a device: further calls on it are useless."""

_STALE = ("InvalidArgument",)
"""MIG devices answer so to questions that only whole GPUs understand; and so does whatever has gone to any question."""

_REFUSED = ("NotSupported", "NoPermission", "FunctionNotFound", "ArgumentVersionMismatch", "Deprecated")
"""From a call on a device: the device, its driver or the user's rights do not support it."""

_NO_SUCH = ("NotFound", "InvalidArgument", "NotSupported", "NoPermission")
"""When a device is looked up by its UUID."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG device: its UUID as NVML prints it, with its prefix, and NVML's handle."""

    uuid: str
    handle: object


def find_nvml() -> ModuleType | None:
    """The package's module, `None` if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


class Library:
    """NVML, open until `close`. Opened several times, it closes with the last one, so others may use it too.

    `error`: what every call may raise; `closed`: that of it after which the library must be opened anew.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.error: type[Exception] = module.NVMLError
        self.closed = _errors(module, _CLOSED)
        self._lost = _errors(module, _LOST)
        self._refused, self._stale = _errors(module, _REFUSED), _errors(module, _STALE)
        module.nvmlInit()

    @classmethod
    def open(cls, load: Callable[[], ModuleType | None]) -> Library | None:
        """The library, `None` where there is no package, no library or no driver."""
        module = load()
        if module is None:
            return None
        try:
            return cls(module)
        except _errors(module, _NOT_HERE):
            return None

    def close(self) -> None:
        """Gives the library back; a failure to do so has no effect."""
        with contextlib.suppress(self.error):
            self._module.nvmlShutdown()

    def ask(self, gpu: Gpu, *calls: tuple[str, ...]) -> Any | None:  # noqa: ANN401 - numbers and structures of NVML
        """What the first call returns that the device, its driver and the package know; `None` where there is no answer.

        A call is a function and the names of its further arguments. A healthy device may still fail to give one value: only one
        that is lost raises, and a library that has gone.
        """
        try:
            for function, *constants in calls:
                with contextlib.suppress(*self._stale):
                    if (found := self._answer(function, gpu, *constants)) is not None:
                        return found
        except (*self.closed, *self._lost):
            raise
        except self.error:
            pass
        return None

    def probe(self, gpu: Gpu) -> None:
        """Raises if the device does not answer at all: every kind of device reports its memory."""
        self._answer("nvmlDeviceGetMemoryInfo", gpu)

    def device(self, uuid: str) -> Gpu | None:
        """The device with a UUID, which may lack its prefix; `None` if there is none for this process."""
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
        for name in names:
            with contextlib.suppress(*_errors(self._module, _NO_SUCH)):
                return self._gpu(self._module.nvmlDeviceGetHandleByUUID(name))
        return None

    def installed(self) -> list[Installed]:
        """The GPUs of the machine that this process may use, in the driver's order; raises if none of them answers."""
        found: list[Installed] = []
        failure: Exception | None = None
        for index in range(self._module.nvmlDeviceGetCount()):
            try:
                # Those that it may not use are none to CUDA either.
                with contextlib.suppress(*_errors(self._module, ("NoPermission",))):
                    found.append(self._installed(index))
            except self.closed:
                raise
            except self.error as error:
                found.append(SILENT)
                failure = error.with_traceback(None)  # Which would hold this frame, and so itself.
        if failure is not None and set(found) == {SILENT}:
            raise failure
        return found

    def _installed(self, index: int) -> Installed:
        gpu = self._gpu(self._module.nvmlDeviceGetHandleByIndex(index))
        partitioned = self._answer("nvmlDeviceGetMigMode", gpu)
        model = _text(self._module.nvmlDeviceGetName(gpu.handle))
        return Installed(gpu.uuid, model, bool(partitioned and partitioned[0]))

    def _answer(self, function: str, gpu: Gpu, *constants: str) -> Any | None:  # noqa: ANN401 - as `ask`
        """As `ask`, but raises for all errors other than a refusal."""
        call = getattr(self._module, function, None)
        arguments = [getattr(self._module, name, None) for name in constants]
        if call is None or None in arguments:
            return None  # An older package.
        try:
            return call(gpu.handle, *arguments)
        except self._refused:
            return None

    def _gpu(self, handle: object) -> Gpu:
        return Gpu(_text(self._module.nvmlDeviceGetUUID(handle)), handle)


def _errors(module: ModuleType, names: tuple[str, ...]) -> tuple[type[Exception], ...]:
    """The exception classes of these names, as far as the package's version has them."""
    found = (getattr(module, f"NVMLError_{name}", None) for name in names)
    return tuple(error for error in found if error is not None)


def _text(value: str | bytes) -> str:
    """Older packages give bytes."""
    return value.decode() if isinstance(value, bytes) else value
