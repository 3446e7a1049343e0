"""Streams of a node whose network is cut and joined again. It takes root and Linux' network namespaces."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.failover import lost, replica

CUT_SECONDS = 6.0
CLONE_NEWNET = 0x40000000  # linux/sched.h


def refusal() -> str:
    """Why there can be no such network here, or an empty text."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "takes root and the command ip (iproute2)"
    name = f"lmkit-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        _ip("netns", "del", name)
    return made.stderr.strip()


class Network:
    """A namespace joined to this one by a pair of virtual cables. `with` takes it away again.

    `host` is the address of the far end. `prefix` begins a command that runs there.
    """

    def __init__(self) -> None:
        tag = secrets.token_hex(4)
        self._name, self._near, self._far = f"lmkit-{tag}", f"lm{tag}a", f"lm{tag}b"
        net = secrets.randbelow(1 << 14) * 4  # one of the smallest networks in 198.18.0.0/16, which is for tests
        near, self.host = (f"198.18.{net >> 8}.{(net & 255) + i}" for i in (1, 2))
        self.prefix = ("ip", "netns", "exec", self._name)
        _ip("netns", "add", self._name)
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
            _ip("addr", "add", f"{near}/30", "dev", self._near)
            _ip("link", "set", self._near, "up")
            self._there("addr", "add", f"{self.host}/30", "dev", self._far)
            self._there("link", "set", "lo", "up")
            self.join()
        except BaseException:
            self.__exit__()
            raise

    def cut(self) -> None:
        """From now on nothing passes. Neither side is told."""
        self._there("link", "set", self._far, "down")

    def join(self) -> None:
        self._there("link", "set", self._far, "up")

    def socket(self) -> socket.socket:
        """A listening socket there. It stays there, whatever thread uses it."""

        def make() -> socket.socket:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path("/run/netns", self._name).open() as namespace:
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.create_server((self.host, 0))

        return _in_own_thread(make)

    def _there(self, *arguments: str) -> None:
        _ip("-n", self._name, *arguments)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        _ip("netns", "del", self._name)  # and the cables with it, once the last socket is closed
        subprocess.run(["ip", "link", "del", self._near], capture_output=True, check=False)


def _in_own_thread(make: Callable[[], socket.socket]) -> socket.socket:
    """A thread that has gone to another namespace must not be used again."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def lost_streams(setting: Setting) -> float:
    """Streams that fail or change while one of two nodes is cut off, and when it is there again."""
    with Network() as network, ThreadPoolExecutor(2) as pool:
        starts = [
            pool.submit(replica, "--port", "0"),
            pool.submit(replica, "--port", "0", "--host", network.host, within=network.prefix),
        ]
        nodes = [start.result() for start in starts]

        def cut() -> None:
            network.cut()
            time.sleep(CUT_SECONDS)
            network.join()

        try:
            return lost(setting, nodes, [cut], 42 if setting.quick else 200)
        finally:
            for node in nodes:
                node.stop()


CASES = (Case("node cut off from the network: streams that fail or change", "", 0, lost_streams, refusal),)
