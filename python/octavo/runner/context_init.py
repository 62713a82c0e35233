"""Makes the CUDA context in a thread while torch is imported, which takes much longer and does not need it yet."""

from __future__ import annotations

import ctypes
import threading

__all__ = ["EarlyContext"]


class EarlyContext:
    """Starts to make a device's primary context, the one that torch uses, through the driver alone.

    Whatever fails here fails again, and with a message, when torch uses the device.

    Args:
        device: index among the devices that the process sees.

    Attributes:
        made: whether there is a context, once `wait` has returned.
    """

    def __init__(self, device: int = 0) -> None:
        self.made = False
        self._thread = threading.Thread(target=self._make, args=(device,), name="octavo-context", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the context is made, or cannot be."""
        self._thread.join()

    def _make(self, index: int) -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        # The process holds on to the context until it ends, as torch does.
        self.made = not (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        )
