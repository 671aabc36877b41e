"""Numbers on their way from the device to the host, read later than they were sent."""

from __future__ import annotations

from collections import deque

import torch


class Mailbox:
    """Tensors that the host reads once the next token has been launched.

    What was sent with the newest token is still being computed and is left alone, so that reading
    waits for nothing that the scheduler has not waited for; and what a reader sees depends on
    positions alone, not on how fast the device was.
    """

    def __init__(self) -> None:
        self._sent: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()

    def send(self, position: int, values: torch.Tensor) -> None:
        """Send what belongs to the token at a logical position; positions do not decrease."""
        if not values.is_cuda:
            self._sent.append((position, values, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._sent.append((position, host, arrived))

    def collect(self, before: int) -> list[torch.Tensor]:
        """Take what was sent with tokens before a logical position, in order."""
        taken = []
        while self._sent and self._sent[0][0] < before:
            _, values, arrived = self._sent.popleft()
            if arrived is not None:
                arrived.synchronize()
            taken.append(values)
        return taken

    def clear(self) -> None:
        """Throw away what nobody has read."""
        self._sent.clear()
