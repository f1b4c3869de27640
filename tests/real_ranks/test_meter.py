"""What the kernel counts, and the model that explains it."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerosim.real_ranks import meter
from zerosim.real_ranks.messages import Arrived, Line
from zerosim.real_ranks.meter import HEADER, MAX_SEGMENT, Counters, Kernel, Moved, Op

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
    kernel = Kernel([])
    before = kernel.read()
    (tmp_path / "file").write_bytes(b"x" * 1013)
    (tmp_path / "file").read_bytes()
    assert kernel.read().since(before).written == 1013
    kernel.close()


@counted
def test_messages_on_a_line_are_not_counted() -> None:
    """What ranks say to whoever watches them does not show in the counter that they are watched by."""
    ours, theirs = (Line(end) for end in socket.socketpair())
    kernel = Kernel([])
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
    kernels = Kernel([near.fileno()]), Kernel([far.fileno()])
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
def test_connected_tcp_sockets_are_found(wire: tuple[socket.socket, socket.socket]) -> None:
    """Both ends of a connection are found, with their address; a listening or a Unix socket is not."""
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
    kernel = Kernel([])
    assert set(kernel.unmeasured) == {"process", "sockets"}
    assert "/proc/self/io" in kernel.unmeasured["process"]
    nothing = Counters(None, None, None)
    assert kernel.read() == nothing
    assert kernel.read().since(Counters(1, 2, 3)) == nothing
    kernel.close()


# -- the model


def test_a_message_costs_three_headers() -> None:
    """Its source sends two headers and its destination one, so that who sends and receives one pays for three."""
    assert Moved(messages_sent=1).framing() == (2 * HEADER, HEADER)
    assert Moved(messages_received=1).framing() == (HEADER, 2 * HEADER)
    assert Moved(messages_sent=5, messages_received=5).framing() == (5 * 3 * HEADER,) * 2


@pytest.mark.parametrize(
    ("op", "nbytes", "payload", "messages"),
    [
        (Op.ALL_REDUCE, 16_000, 2 * 3 * 4_000, 2 * 3 * 2),
        (Op.REDUCE_SCATTER, 16_000, 2 * 3 * 4_000, 2 * 3 * 2),
        (Op.ALL_GATHER, 16_000, 3 * 4_000, 3 * 2),
        (Op.ALL_REDUCE, 4 * 3 * MAX_SEGMENT, 2 * 3 * 3 * MAX_SEGMENT, 2 * 3 * 3),
        (Op.ALL_REDUCE, 4 * 2 * MAX_SEGMENT + 16, 2 * 3 * (2 * MAX_SEGMENT + 4), 2 * 3 * 3),
        (Op.ALL_GATHER, 4 * 3 * MAX_SEGMENT, 3 * 3 * MAX_SEGMENT, 3 * 2),
    ],
)
def test_gloo_moves_this_on_four_ranks(op: Op, nbytes: int, payload: int, messages: int) -> None:
    """Payload and messages of each collective, both ways; a chunk goes in two segments, or more of 1 MiB at most."""
    assert meter.moved(op, nbytes, 4) == (payload, payload, messages, messages)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_only_reduce_scatter_departs_from_the_textbook(size: int) -> None:
    """gloo's payloads are the textbook's, but a reduce-scatter costs as much as the all-reduce that it is."""
    nbytes = size * 1013
    for op in Op:
        expected = meter.textbook(Op.ALL_REDUCE if op is Op.REDUCE_SCATTER else op, nbytes, size)
        assert meter.moved(op, nbytes, size)[:2] == expected[:2]
    assert meter.textbook(Op.REDUCE_SCATTER, nbytes, size).sent == (size - 1) * 1013
    assert meter.moved(Op.REDUCE_SCATTER, nbytes, size).sent == 2 * (size - 1) * 1013


def test_totals_add_up_field_by_field() -> None:
    """A hop is what was sent and what was received, and the total of nothing is nothing."""
    hop = meter.total([meter.moved(Op.SEND, 7, 3), meter.moved(Op.RECEIVE, 11, 3)])
    assert hop == Moved(sent=7, received=11, messages_sent=1, messages_received=1)
    assert meter.total([]) == Moved()
