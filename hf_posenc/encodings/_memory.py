"""What a field may cost: told before torch's allocator fails, or the system ends a process that takes too much."""

from __future__ import annotations

import os

from hf_posenc.encoding import Encoding, EncodingError


def check_memory(encoding: Encoding, field: str, size: int) -> None:
    """Raise where `field` asks for more than this machine has.

    Args:
        size: bytes that are needed at once, about.

    Raises:
        EncodingError: naming the field and both sizes.
    """
    there = _memory()
    if there is not None and size > there:
        raise EncodingError(
            f"{encoding.name}: {field}={getattr(encoding, field)!r} is not allowed; it would take about "
            f"{size / 2**30:,.0f} GiB of memory, and this machine has {there / 2**30:,.0f} GiB."
        )


def _memory() -> int | None:
    """Bytes of this machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None
