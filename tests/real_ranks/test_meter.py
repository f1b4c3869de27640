"""What the kernel counts, and the model that explains it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerosim.real_ranks import meter
from zerosim.real_ranks.connection import Arrived, Connection
from zerosim.real_ranks.meter import Counters, Kernel

counted = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this platform has no /proc/self/io")


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far


# -- the kernel


@counted
def test_what_is_written_is_counted_to_the_byte(tmp_path: Path) -> None:
    """The counter grows by what this process writes to a file, and not by what it reads."""
    kernel = Kernel()
    before = kernel.read()
    (tmp_path / "file").write_bytes(b"x" * 1013)
    (tmp_path / "file").read_bytes()
    assert kernel.read().since(before).written == 1013
    kernel.close()


@counted
def test_messages_on_a_connection_are_not_counted() -> None:
    """What ranks say to whoever watches them does not show in the counter that they are watched by."""
    ours, theirs = (Connection(end) for end in socket.socketpair())
    kernel = Kernel()
    before = kernel.read()
    ours.send(Arrived())
    assert theirs.receive() == Arrived()
    assert kernel.read().since(before).written == 0
    for each in (ours, theirs, kernel):
        each.close()


@counted
def test_sockets_count_what_they_carry(wire: tuple[socket.socket, socket.socket]) -> None:
    """A TCP socket has sent what went in at one end and received what came out at the other, and no other socket's."""
    near, far = wire
    every = meter.tcp_sockets()
    kernels = Kernel(every - {near.fileno()}), Kernel(every - {far.fileno()})
    before = [kernel.read() for kernel in kernels]
    near.sendall(b"x" * 1013)
    far.recv(1013, socket.MSG_WAITALL)
    far.sendall(b"x" * 17)
    near.recv(17, socket.MSG_WAITALL)
    after = [kernel.read().since(was) for kernel, was in zip(kernels, before, strict=True)]
    assert [(each.tcp_sent, each.tcp_received) for each in after] == [(1013, 17), (17, 1013)]
    for kernel in kernels:
        kernel.close()


@counted
def test_a_socket_that_is_opened_meanwhile_is_counted(wire: tuple[socket.socket, socket.socket]) -> None:
    """What goes over a connection that was not there at the first reading counts from its beginning."""
    kernel = Kernel(meter.tcp_sockets() - {wire[0].fileno()})
    before = kernel.read()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        near.sendall(b"x" * 1013)
        far.recv(1013, socket.MSG_WAITALL)
        after = kernel.read().since(before)
        far.close()
    assert (after.tcp_sent, after.tcp_received) == (1013, 1013)
    assert after.opened is None or after.opened >= 1
    kernel.close()


@counted
def test_datagrams_are_counted_in_the_namespace() -> None:
    """A datagram, which no other counter sees, is among those that the network namespace has sent."""
    kernel = Kernel()
    before = kernel.read()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", ("127.0.0.1", 9))
    found = kernel.read().since(before)
    assert found.written == 0
    assert found.datagrams is None or found.datagrams >= 1
    kernel.close()


@counted
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "not listed"])
def test_connected_tcp_sockets_are_found(
    wire: tuple[socket.socket, socket.socket], listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends of a connection are found, with or without /proc; a listening or a Unix socket is not."""
    if not listed:
        monkeypatch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        one, other = socket.socketpair()
        with one, other:
            found = meter.tcp_sockets()
            assert {end.fileno() for end in wire} <= found
            assert not found & {server.fileno(), one.fileno(), other.fileno()}
    assert meter.addresses([end.fileno() for end in wire]) == ["127.0.0.1"]


def test_what_cannot_be_measured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc and without sockets both meters say why, and their readings are None, not zero."""

    def absent(path: str, flags: int) -> int:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "open", absent)
    kernel = Kernel()
    assert set(kernel.unmeasured) == {"process", "sockets", "namespace"}
    assert "/proc/self/io" in kernel.unmeasured["process"]
    nothing = Counters(None, None, None, None, None)
    assert kernel.read() == nothing
    assert kernel.read().since(Counters(1, 2, 3, 4, 5)) == nothing
    kernel.close()


# -- memory


def test_the_highest_memory_grows_with_what_is_written_and_stays() -> None:
    """A process that has written to a large piece of memory has had it, also once it is free again."""
    before = meter.highest_memory()
    large = b"x" * (before + 50_000_000)
    assert meter.highest_memory() > before + 50_000_000
    del large
    assert meter.highest_memory() > before + 50_000_000


@counted
def test_the_highest_memory_is_this_programs_and_not_its_parents() -> None:
    """What a process has had that starts another is not counted as the other's."""
    large = b"x" * 200_000_000
    code = "from zerosim.real_ranks.meter import highest_memory; print(highest_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1_000_000 < int(done.stdout) < len(large)
