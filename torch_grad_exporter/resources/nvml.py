"""NVML, the library of NVIDIA's driver, through the optional package nvidia-ml-py.

Its calls are not CUDA calls and touch no context, so any thread may make them. What a device or a driver refuses is `None`; a
device or a library that has gone raises.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# At the start: there is no GPU of NVIDIA's, or none for this process.
_NOT_HERE = ("LibraryNotFound", "DriverNotLoaded", "NoPermission", "FunctionNotFound", "NotFound")

# From any call: further calls are useless before NVML has been opened again.
_CLOSED = ("Uninitialized", "LibraryNotFound", "DriverNotLoaded")

# From a call on a device: further calls on it are useless.
_LOST = ("GpuIsLost",)

# MIG devices answer so to questions that only whole GPUs understand; and so does a device that has gone, to any question.
_STALE = ("InvalidArgument",)

# From a call on a device: the device, its driver or the user's rights do not support it.
_REFUSED = ("NotSupported", "NoPermission", "FunctionNotFound", "ArgumentVersionMismatch", "Deprecated")

# When a device is looked up by its UUID.
_NO_SUCH = ("NotFound", "InvalidArgument", "NotSupported", "NoPermission")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG device: its UUID as NVML prints it, with its prefix, and NVML's handle."""

    uuid: str
    handle: object


def find_nvml() -> ModuleType | None:
    """Return the package's module, None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


class Library:
    """NVML, open until `close`. Opened several times, it closes with the last one, so others may use it too.

    `error`: what every call may raise; `closed`: that of it after which the library must be opened again.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.error: type[Exception] = module.NVMLError
        self.closed = _errors(module, _CLOSED)
        self._lost = _errors(module, _LOST)
        self._refused, self._stale = _errors(module, _REFUSED), _errors(module, _STALE)
        module.nvmlInit()

    @classmethod
    def open(cls, module: ModuleType) -> Library | None:
        """Return the library, None if there is no library or no driver."""
        try:
            return cls(module)
        except _errors(module, _NOT_HERE):
            return None

    def close(self) -> None:
        """Give the library back; a failure to do so has no effect."""
        with contextlib.suppress(self.error):
            self._module.nvmlShutdown()

    def ask(self, gpu: Gpu, *calls: tuple[str, ...]) -> Any | None:  # noqa: ANN401 - numbers and structures of NVML
        """Return the result of the first call that the device, its driver and the package know, None if there is no answer.

        A call is a function and the names of its further arguments. A healthy device may still fail to give one value: only one
        that is lost raises, and a library that has gone.
        """
        try:
            for function, *constants in calls:
                with contextlib.suppress(*self._stale):
                    if (answer := self._answer(function, gpu, *constants)) is not None:
                        return answer
        except (*self.closed, *self._lost):
            raise
        except self.error:
            pass
        return None

    def probe(self, gpu: Gpu) -> None:
        """Raise if the device does not answer at all: every kind of device reports its memory."""
        self._answer("nvmlDeviceGetMemoryInfo", gpu)

    def device(self, uuid: str) -> Gpu | None:
        """Return the device with a UUID, which may lack its prefix, None if there is none for this process."""
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
        for name in names:
            with contextlib.suppress(*_errors(self._module, _NO_SUCH)):
                return self._gpu(self._module.nvmlDeviceGetHandleByUUID(name))
        return None

    def _answer(self, function: str, gpu: Gpu, *constants: str) -> Any | None:  # noqa: ANN401 - as `ask`
        """Do the same as `ask`, but raise all errors other than a refusal."""
        call = getattr(self._module, function, None)
        arguments = [getattr(self._module, name, None) for name in constants]
        if call is None or None in arguments:
            return None  # an older package
        try:
            return call(gpu.handle, *arguments)
        except self._refused:
            return None

    def _gpu(self, handle: object) -> Gpu:
        return Gpu(_text(self._module.nvmlDeviceGetUUID(handle)), handle)


def _errors(module: ModuleType, names: tuple[str, ...]) -> tuple[type[Exception], ...]:
    """Return the exception classes of these names, as far as the package's version has them."""
    errors = (getattr(module, f"NVMLError_{name}", None) for name in names)
    return tuple(error for error in errors if error is not None)


def _text(value: str | bytes) -> str:
    # Older packages give bytes.
    return value.decode() if isinstance(value, bytes) else value
