"""Sharing evaluation among the processes that `accelerate launch` started, with the same numbers as one process.

Work is dealt out item by item and every process keeps a full-length vector that is zero where it did nothing, so that
a sum over processes puts every number in its place exactly: no means of means, no duplicated last batch.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

if torch.distributed.is_available():
    # Before there is a process group: its functions keep the group of the moment they are imported as a default, and
    # a group that is kept so cannot be closed by `leave`.
    import torch.distributed.nn.functional


@dataclass(frozen=True)
class Processes:
    """The processes that take part: `count` of them, of which this one is `rank`."""

    rank: int = 0
    count: int = 1

    @classmethod
    def find(cls, distributed: bool | None = None) -> Processes:
        """The processes of torch.distributed; this one alone where it is not initialised or `distributed` is False."""
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and not ready:
            raise ValueError(
                "distributed=True needs torch.distributed: start with `accelerate launch` and create"
                " accelerate.PartialState()."
            )
        if not ready or distributed is False:
            return cls()
        return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())

    @property
    def is_first(self) -> bool:
        """True in the one process that writes files and shows progress."""
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """True where item `number` is this process's to do."""
        return number % self.count == self.rank

    def sum(self, values: Tensor, device: torch.device) -> Tensor:
        """Sum of `values` over the processes, on the CPU. `device`: where NCCL wants it."""
        if self.count == 1:
            return values
        on_device = values.to("cpu" if torch.distributed.get_backend() == "gloo" else device)
        torch.distributed.all_reduce(on_device)
        return on_device.cpu()

    def gather(self, items: dict[int, Any]) -> dict[int, Any]:
        """Items of all processes by number."""
        if self.count == 1:
            return items
        parts: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(parts, items)
        return {number: item for part in parts for number, item in part.items()}

    def first_says(self, value: Any) -> Any:
        """The first process's `value`, in every process: so that all decide alike."""
        if self.count == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            torch.distributed.barrier()

    @contextlib.contextmanager
    def progress(self, total: int, title: str, show: bool | None, unit: str = "token") -> Iterator[Any]:
        """A progress bar with the time left, in the first process. `show` None: on a terminal, after a few seconds."""
        from tqdm.auto import tqdm

        disable = True if not self.is_first or show is False else (None if show is None else False)
        delay = 0 if show else 3
        with tqdm(
            total=total, desc=title, unit=unit, unit_scale=True, disable=disable, delay=delay, leave=False
        ) as bar:
            yield bar


@contextlib.contextmanager
def launched() -> Iterator[Processes]:
    """The processes `accelerate launch` started (this one alone where it did not), which it leaves afterwards."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState()
    yield Processes.find()
    leave()


def leave() -> None:
    """Close the process group, where there is one. Until then it has threads, and one that still lets go of a tensor
    while the interpreter goes down aborts the process (exit status -6), after all is done and written.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        gc.collect()  # a Trainer and its DistributedDataParallel, which hold the group, are cycles
