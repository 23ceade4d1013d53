"""Keep drawn tensors: claims of a contract, wrong subjects and both modes of a case are judged on the same ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor

MOST_BYTES = 2**29


class Drawn:
    """Tensors by key, the least used dropped first. Callers get copies: a subject may write to its arguments."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        """Keep at most so many bytes."""
        self.most, self.bytes = most, 0
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable, draw: Callable[[], Tensor]) -> Tensor:
        """Return a copy of what `draw` gave for this key."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            found = draw()
            self._keep(key, found)
        return found.clone()

    def _keep(self, key: Hashable, tensor: Tensor) -> None:
        with self._lock:
            if tensor.nbytes > self.most or key in self._kept:
                return
            self._kept[key] = tensor
            self.bytes += tensor.nbytes
            while self.bytes > self.most:
                self.bytes -= self._kept.popitem(last=False)[1].nbytes
