"""`CuttingRelay`: stands between a courier's two ends and breaks connections after random numbers of bytes."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress


class CuttingRelay:
    """Relays to `port` of this machine from `self.port` (`at`; 0: any).

    Each connection breaks after a number of bytes from `seed`.
    """

    def __init__(self, port: int, seed: int, mean_bytes: int, at: int = 0) -> None:
        self._target, self._rng, self._mean_bytes = port, random.Random(seed), mean_bytes
        self._listener = socket.create_server(("127.0.0.1", at))
        self.port: int = self._listener.getsockname()[1]
        self.num_cuts = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """End every connection and thread."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                self._sockets += [near, far]
                left = [round(self._rng.expovariate(1 / self._mean_bytes)) + 1]
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pump, args=(*ends, left)))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, left: list[int]) -> None:
        """Relay until the bytes of both directions are used up; what had arrived by then is lost or delivered."""
        with suppress(OSError):
            while data := source.recv(65536):
                left[0] -= len(data)
                if left[0] <= 0:
                    self.num_cuts += 1
                    target.sendall(data[: max(0, len(data) + left[0])])
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
