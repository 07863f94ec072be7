"""Keeping the host's allocator from giving memory back between steps."""

import ctypes
import sys

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_KEPT_BYTES = 2**31 - 1  # the largest value that mallopt takes


def keep_freed_memory() -> bool:
    """Tell glibc to reuse large buffers instead of returning them to the system.

    XLA:CPU allocates its temporaries anew for every step. By default each of them is mapped, zeroed
    page by page as it is touched, and unmapped: a tenth to a third of a step's time. The setting
    holds for the whole process, so the commands make it, and no import does.

    Returns:
      Whether the allocator took it (False where there is no glibc).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_TOP_PAD, 1 << 26))
    taken = [mallopt(option, value) == 1 for option, value in options]  # each of them, always
    return all(taken)
