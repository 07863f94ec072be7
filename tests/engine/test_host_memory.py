"""The allocator setting of the commands."""

import subprocess
import sys

import pytest

# Page faults of touching 32 MiB ten times, after the first. In a process of its own: the setting
# cannot be taken back.
PROGRAM = """
import resource, sys
import numpy as np
from pagedjax.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(1 << 25, np.uint8)
before = faults()
for _ in range(10):
    np.ones(1 << 25, np.uint8)
print(faults() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_buffers_are_reused_without_page_faults():
    faults = {}
    for mode in ("keep", "default"):
        run = [sys.executable, "-c", PROGRAM, mode]
        faults[mode] = int(subprocess.run(run, capture_output=True, check=True, text=True).stdout)
    assert faults["keep"] < 20 < faults["default"]
