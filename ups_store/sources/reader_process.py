"""A reader process: takes requests from its supervisor, runs them, and puts the arrays into shared slots.

The process imports what reading needs and nothing else, so it is there within 0.3 s. It ends when the
supervisor closes the socket between them, and is killed when the supervisor ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import os
import pickle
import resource
import signal
import socket
import sys
import traceback

from ups_store.errors import MissingExtraError, SourceError, StoreError
from ups_store.sources.reader import Reader, Request
from ups_store.sources.requests import MAX_MESSAGE_BYTES, STACK_SIGNAL, Done, Failed
from ups_store.sources.slots import SlotFiller, SlotMemory

_TRANSIENT = (errno.EIO, errno.ESTALE)  # a disk or a server that may be back in a moment
_PR_SET_PDEATHSIG = 1


def serve(channel: socket.socket, memory: SlotMemory) -> None:
    """Run requests until the supervisor closes its end."""
    reader = Reader(memory.write_status)
    reader.doing("idle")
    while message := channel.recv(MAX_MESSAGE_BYTES):
        request_id, slot, request = pickle.loads(message)
        answer = pickle.dumps(_answer(reader, request, request_id, SlotFiller(memory, slot)))
        assert len(answer) < MAX_MESSAGE_BYTES, f"{request.subject}: a result of {len(answer)} bytes"
        channel.send(answer)
    reader.close()


def _answer(reader: Reader, request: Request, request_id: int, filler: SlotFiller) -> Done | Failed:
    try:
        value = reader.run(request, request_id=request_id, place=filler.place)
        return Done(request_id, tuple(filler.placed), value)
    except StoreError as error:
        return Failed(request_id, error, is_transient(error))
    except MemoryError:
        return Failed(request_id, _out_of_memory(request), is_transient=False)
    except Exception as error:  # a defect of ours: reported by the process that asked
        return Failed(request_id, _unexpected(request, error), is_transient(error))


def is_transient(error: BaseException | None) -> bool:
    """Whether an error goes back to one of the system that may not come again."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        error = error.__cause__ or error.__context__
    return False


def _out_of_memory(request: Request) -> SourceError:
    return SourceError(
        f"out of memory while reading {request.subject}",
        kind="no_memory",
        path=request.path,
        sample=request.first_sample,
        hint="lower reading.num_workers, or raise the limit on memory",
    )


def _unexpected(request: Request, error: Exception) -> StoreError:
    wrapped = StoreError(
        f"unexpected {type(error).__name__} while reading {request.subject}: {error}",
        kind="reader_failed",
        path=request.path,
        sample=request.first_sample,
        hint="run it with -vv and report what it prints",
    )
    wrapped.add_note("".join(traceback.format_exception(error)))
    return wrapped


def main() -> None:
    """Serve; arguments: process id of the supervisor, descriptors of socket and memory, slots, their size."""
    supervisor, channel_fd, memory_fd, num_slots, slot_nbytes = map(int, sys.argv[1:])
    _end_with(supervisor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its log says what ended it, not by a file "core"
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)

    with contextlib.suppress(MissingExtraError):  # while it starts, which has a deadline of its own
        import ups_store.sources.source  # noqa: F401
    memory = SlotMemory(memory_fd, num_slots=num_slots, slot_nbytes=slot_nbytes)
    os.close(memory_fd)
    with socket.socket(fileno=channel_fd) as channel:
        serve(channel, memory)


def _end_with(supervisor: int) -> None:
    """Have this process killed when the thread that started it ends, which a hung read would not notice."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it ended before that call
        os._exit(1)
