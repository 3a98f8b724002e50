"""What the machine says of this process."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """The largest resident set that this process has had, in bytes.

    Linux says it in `/proc/self/status`. The figure of `getrusage` starts there from that of the process which forked
    this one (`fs/exec.c`, `exec_mmap`), and is taken only where there is nothing else.
    """
    try:
        high_water = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        high_water = None
    if high_water:
        return int(high_water[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int | None:
    """What of this process lies in memory now, in bytes; None where the system does not say (Linux does)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None
