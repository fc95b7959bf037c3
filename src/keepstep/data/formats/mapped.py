"""Map files into memory without keeping a file handle: a data set may have more files than a process may have open.

Python's own mmap keeps a handle for as long as the mapping exists (optional from 3.13 on).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepstep.core.errors import DataError

_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> NDArray[np.uint8]:
    """All bytes of a file, read when they are accessed. They stay readable after the file is removed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        size_bytes = os.fstat(handle).st_size
        if not size_bytes:
            return np.empty(0, np.uint8)
        address = _libc().mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, handle, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            if code == errno.ENOMEM:
                raise DataError(
                    f"{path} cannot be mapped: this process has all the mappings it may have",
                    "keepstep data merge joins .bin/.idx pairs; or raise vm.max_map_count with sysctl",
                )
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(handle)
    owner: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    # Not at exit: other exit handlers may still read the bytes, and the end of the process removes all mappings.
    weakref.finalize(owner, _libc().munmap, address, size_bytes).atexit = False
    found: NDArray[np.uint8] = np.frombuffer(owner, np.uint8)
    found.flags.writeable = False
    return found


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
