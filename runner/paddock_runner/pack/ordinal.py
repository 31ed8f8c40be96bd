"""By which number CUDA calls a GPU in this process: it may count in another order than the driver's tools. Opens no CUDA context."""

from __future__ import annotations

import ctypes

from ..errors import PackError


def cuda_ordinal(uuid: str, library: str = "libcuda.so.1") -> int:
    """The number of the GPU with this UUID ("GPU-..." or "MIG-..."). Raises: PackError.

    Source: CUDA driver API (cuDeviceGetUuid_v2; CUDA_DEVICE_ORDER is FASTEST_FIRST unless told otherwise).
    """
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        raise PackError(f"the NVIDIA driver's library {library} is missing", "--device cpu serves on the CPU") from None
    n, device, found = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n))
    if code:
        raise PackError(f"CUDA cannot be used: error {code} of the driver", "--device cpu serves on the CPU")
    wanted = uuid.partition("-")[2].replace("-", "").lower()
    for ordinal in range(n.value):
        if not cuda.cuDeviceGet(ctypes.byref(device), ordinal) and not cuda.cuDeviceGetUuid_v2(found, device) and found.raw.hex() == wanted:
            return ordinal
    raise PackError(f"CUDA does not show GPU {uuid} among its {n.value}", "CUDA_VISIBLE_DEVICES hides it; name one that is shown, or unset the variable")
