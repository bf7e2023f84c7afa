"""A child process that answers requests, for work that may abort the process it runs in.

The child lives until its parent ends, because most of a short request is the start of Python; one
that dies or takes too long is reported, and the next request gets a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO

_LENGTH = struct.Struct("<Q")
_FINE, _REFUSED = b"+", b"-"


class UnsupportedError(Exception):
    """A program that cannot be partitioned here; says what stands in the way."""


def ask(command: Sequence[str], message: bytes, deadline_s: float) -> bytes:
    """The answer of the child that ``command`` starts.

    Args:
        command: What to run; its program calls :func:`serve`.
        message: The request.
        deadline_s: Time until the child is ended [s].

    Raises:
        UnsupportedError: It refused, died or took too long; says which, and what it said last.
    """
    key = tuple(command)
    with _LOCK:
        child = _CHILDREN.get(key)
        if child is None or child.parent != os.getpid() or child.process.poll() is not None:
            try:
                child = _CHILDREN[key] = _Child(key)
            except OSError as error:
                raise UnsupportedError(f"no child process could be started: {error}") from error
        status, answer = child.ask(message, deadline_s)
    if status != _FINE:
        raise UnsupportedError(answer.decode(errors="replace"))
    return answer


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer requests on the standard input until it ends; other output goes to standard error."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while header := sys.stdin.buffer.read(_LENGTH.size):
        try:
            status, body = _FINE, answer(sys.stdin.buffer.read(*_LENGTH.unpack(header)))
        except Exception as error:  # whatever it is, the parent has another way
            known = isinstance(error, UnsupportedError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            status, body = _REFUSED, text.encode()
        replies.write(status + _LENGTH.pack(len(body)) + body)
        replies.flush()


class _Child:
    def __init__(self, command: Sequence[str]) -> None:
        self.parent = os.getpid()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), JAX_PLATFORMS="cpu")
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                env=environment,
            )
        except OSError:
            self.log.close()
            raise

    def ask(self, message: bytes, deadline_s: float) -> tuple[bytes, bytes]:
        """Status and body of the reply."""
        requests, replies = self.process.stdin, self.process.stdout
        assert requests is not None
        assert replies is not None
        late = threading.Event()
        timer = threading.Timer(deadline_s, self._end, [late])
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                requests.write(_LENGTH.pack(len(message)) + message)
                requests.flush()
            status = replies.read(1)
            header = replies.read(_LENGTH.size)
            if len(header) == _LENGTH.size:
                body = replies.read(*_LENGTH.unpack(header))
                return status, body
        except BaseException:  # the reply that is still to come must not answer the next request
            self.process.kill()
            self.close()
            raise
        finally:
            timer.cancel()
        self.process.wait()
        reason = _death(self.process.returncode, self.log)
        self.close()
        return _REFUSED, (
            f"it took more than {deadline_s:g} s" if late.is_set() else reason
        ).encode()

    def _end(self, late: threading.Event) -> None:
        late.set()
        self.process.kill()

    def close(self) -> None:
        """End the child and wait for it."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.wait()
        self.log.close()


def _death(status: int, log: IO[bytes]) -> str:
    """How a child ended, with what it said last."""
    how = f"the process ended with status {status}"
    if status < 0:
        how = f"the process died of {signal.Signals(-status).name}"
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    telling = [line for line in lines if "heck failed" in line or "rror:" in line] or lines[-1:]
    return f"{how}: {telling[-1][:300]}" if telling and telling[-1] else how


_LOCK = threading.Lock()
_CHILDREN: dict[tuple[str, ...], _Child] = {}


@atexit.register
def _close_all() -> None:
    for child in _CHILDREN.values():
        if child.parent == os.getpid():
            child.close()
