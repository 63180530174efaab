"""Parts of the backend `cinch` of torch.distributed in one process, without a GPU. Takes seconds.

python python/tests/torch_units.py
"""

import contextlib
import datetime
import importlib.machinery
import importlib.util
import os
import pathlib
import pickle
import tempfile
import threading
import time
import types
from unittest import mock

import torch
import torch.distributed as dist

import cinch
from cinch import _arrays
from cinch.torch import CinchProcessGroup, calls, errors, messages, residuals

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "test-torch-cpu"


@contextlib.contextmanager
def raises(kind, *parts):
    """Requires an error of a kind, with parts of its text."""
    try:
        yield
    except kind as error:
        assert all(part in str(error) for part in parts), f"the text lacks one of {parts}: {error}"
    else:
        raise AssertionError(f"no {kind}")


def alone():
    """Returns a group of this process alone."""
    return CinchProcessGroup(dist.HashStore(), 0, 1, 60.0)


def second_of_two(timeout=60.0):
    """Returns rank 1 of a group whose rank 0 never comes."""
    return CinchProcessGroup(dist.HashStore(), 1, 2, timeout)


class FakeStream:
    """A stream of a GPU that this machine lacks."""

    device, cuda_stream = torch.device("cpu"), 4711

    def record_event(self):
        return self

    def wait_event(self, event):
        pass

    def query(self):
        return True


def communicators_do_not_wait_for_each_other():
    """The first call on a GPU goes on while the communicator of host memory waits for other ranks."""
    group, is_created = alone(), threading.Event()

    def connect(device):
        if device == "host":
            assert is_created.wait(10), "the communicator of the GPU waited for that of host memory"
        else:
            is_created.set()
        return types.SimpleNamespace(is_destroyed=False)

    with mock.patch.object(group, "_connect", connect):
        first = threading.Thread(target=group._host_communicator, daemon=True)
        first.start()
        time.sleep(0.1)
        other = threading.Thread(target=group._gpu_communicator, args=(torch.device("cuda:0"),), daemon=True)
        other.start()
        for thread in (other, first):
            thread.join(5)
            assert not thread.is_alive()


def errors_travel():
    """Errors survive pickling, and are errors in the futures that C++ reads."""
    for kind in (cinch.RemoteError, cinch.TimeoutError, cinch.Error):
        error = pickle.loads(pickle.dumps(errors.torch_error(kind("rank 3 ended"))))
        assert isinstance(error, kind) and isinstance(error, dist.DistBackendError) and str(error) == "rank 3 ended"
    group = second_of_two(0.2)
    work = group.allreduce([torch.ones(3)])
    future = work.get_future()
    assert work.get_future() is future
    with raises(RuntimeError, "TimeoutError", "rank 0 of the group has not offered a communicator within 0.2 s"):
        future.wait()
    # A value of a future in C++ would reach this callback as a value.
    with raises(RuntimeError, "has not offered"):
        torch.futures.collect_all([future]).wait()[0].value()
    with raises(dist.DistBackendError, "has not offered"):
        work.wait()
    with raises(cinch.TimeoutError, "rank 0 has not reported that all ranks came", "0.2 s"):
        group.monitored_barrier(datetime.timedelta(seconds=0.1))


def forked_children_are_refused():
    """A forked child gets an error at once: its copy of the group has no thread."""
    group = alone()
    group.allreduce([torch.ones(3)]).wait()
    pending = calls.HostWork("a call", None, group._worker)
    with pending._lock, group._worker._changed:
        child = os.fork()
        if child == 0:
            is_good = True
            for call in (
                lambda: group.allreduce([torch.ones(3)]),
                lambda: group.send([torch.ones(3)], 0),
                lambda: group.communicator(),
                lambda: pending.wait(),
            ):
                try:
                    call()
                    is_good = False
                except RuntimeError as error:
                    is_good = is_good and f"process {os.getppid()}" in str(error) and str(os.getpid()) in str(error)
            group.shutdown()
            os._exit(0 if is_good else 1)
    ends = time.monotonic() + 10
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < ends:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended and status == 0, "the forked child hung" if not ended else f"status {status}"
    group.shutdown()


def sparse_tensors_are_recorded():
    """Indices and values of a sparse tensor are kept for the stream: the tensor itself has no memory."""
    recorded = []
    torch.sparse.check_sparse_tensor_invariants.enable()
    sparse = torch.sparse_coo_tensor([[0, 2]], torch.tensor([1.0, 2.0]), (4,))

    def record(tensor, stream):
        assert tensor.layout == torch.strided
        recorded.append((tensor.data_ptr(), stream))

    with mock.patch.object(torch.Tensor, "record_stream", record):
        calls._record(sparse, 5)
        dense = torch.ones(2)
        calls._record(dense, 6)
    expected = [(sparse._indices().data_ptr(), 5), (sparse._values().data_ptr(), 5), (dense.data_ptr(), 6)]
    assert recorded == expected, recorded


def torch_streams():
    """Without a stream, a torch tensor's call is on torch's current stream, which keeps its memory."""
    recorded, tensor = [], torch.ones(3)
    described = _arrays.describe(tensor, "array")
    assert _arrays.stream_of(None, [described]) is None
    described.on_gpu = True
    current = mock.patch.object(torch.cuda, "current_stream", lambda device: FakeStream())
    record = mock.patch.object(torch.Tensor, "record_stream", lambda *arguments: recorded.append(arguments))
    with current, record:
        assert _arrays.stream_of(None, [None, described]) == FakeStream.cuda_stream
        assert len(recorded) == 1 and recorded[0][0] is tensor
        assert _arrays.stream_of(0, [described]) is None and _arrays.stream_of(9, [described]) == 9


def messages_to_itself_on_a_gpu():
    """Both sides of a message whose sizes differ get the error, and a receive without a send times out."""
    with mock.patch.object(torch.cuda, "current_stream", lambda device: FakeStream()):
        links = messages.Messages(dist.HashStore(), 0, 1, 0.3, lambda: None)
        receive = links._queue_to_self(torch.zeros(3), False)
        with raises(ValueError, "2 torch.float32 sent, 3 torch.float32 received"):
            links._queue_to_self(torch.ones(2), True)
        with raises(ValueError, "2 torch.float32 sent"):
            receive.wait()
        late = links._queue_to_self(torch.zeros(2), False)
        with raises(cinch.TimeoutError, "a message to this rank did not end within 0.3 s"):
            late.wait()
        room = torch.zeros(2)
        links._queue_to_self(torch.ones(2), True).wait()
        links._queue_to_self(room, False).wait()
        assert room.tolist() == [1, 1]


def receives_that_time_out_stop():
    """A receive that has timed out no longer looks for its sender in the store."""
    group = second_of_two()
    with raises(cinch.TimeoutError, "a receive from rank 0"):
        group.recv([torch.zeros(1)], 0).wait(datetime.timedelta(seconds=0.2))
    ends = time.monotonic() + 2
    while group._messages._waiting and time.monotonic() < ends:
        time.sleep(0.01)
    assert not group._messages._waiting


def exported(rank, size, tensors):
    """Returns residuals in the format of docs/format.md: by id, the arrays' elements as bytes."""
    words = [b"cinchEF1", rank.to_bytes(4, "little"), size.to_bytes(4, "little"), len(tensors).to_bytes(8, "little")]
    for number, arrays in sorted(tensors.items()):
        words += [word.to_bytes(8, "little") for word in (number, 7, 6, 3, 2, len(arrays))]
        for chunk, each in enumerate(arrays):
            words += [word.to_bytes(8, "little") for word in (0, chunk, len(each) // 4)] + [each]
    return b"".join(words)


def residuals_by_tensor():
    """Tensors of one range of ids are taken out, numbered anew and put back; the others stay."""
    one, two, three = [b"aaaabbbb", b"cccc"], [b"dddd"], [b"eeeeffffgggg"]
    every = exported(1, 4, {5: one, 6: two, 100: three})
    assert residuals.join(residuals.split(every), 1, 4) == every
    taken = residuals.select(every, range(5, 50))
    assert sorted(taken) == [0, 1]
    moved = residuals.replace(every, range(100, 200), taken, 1, 4)
    assert moved == exported(1, 4, {5: one, 6: two, 100: one, 101: two})
    assert residuals.replace(every, range(5, 50), {}, 1, 4) == exported(1, 4, {100: three})
    for damaged in (every[:-1], every[:40], b"", every + b"x", b"cinchEF2" + every[8:]):
        with raises(ValueError, "residuals"):
            residuals.split(damaged)


def script():
    """Returns scripts/test-torch-cpu as a module."""
    loader = importlib.machinery.SourceFileLoader("test_torch_cpu", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("test_torch_cpu", loader))
    loader.exec_module(module)
    return module


def the_script_takes_the_newest_library():
    """A build that is newer than the library in the package takes its place; an older one does not."""
    module = script()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        built, target = folder / "built", folder / "package" / "placed"
        with raises(SystemExit, "does not exist"):
            module.place_one(None, built, target)
        for age, text, expected in ((300, "first", "first"), (200, "second", "second"), (400, "old", "second")):
            built.write_text(text)
            os.utime(built, (time.time() - age,) * 2)
            module.place_one(None, built, target)
            assert target.read_text() == expected, (age, target.read_text())
        module.place_one(built, folder / "missing", target)
        assert target.read_text() == "old"
        module.place_one(None, folder / "missing", target)


def the_script_knows_its_failures():
    """Failures that are not expected, expected ones that pass, and too few tests fail the script."""
    module = script()
    passed, failed = {"outcome": "passed", "reason": ""}, {"outcome": "failed", "reason": "ValueError: x"}
    expected = sorted(module.EXPECTED_FAILURES)
    wanted = [f"test_{number}" for number in range(module.LEAST_TESTS - len(expected))] + expected
    good = {test: failed if test in expected else passed for test in wanted}
    assert module.complaints(wanted, good) == []
    assert module.complaints(wanted, {**good, "test_3": failed}) == ["test_3 failed, which is not expected"]
    assert module.complaints(wanted, {test: each for test, each in good.items() if test != "test_3"})
    assert module.complaints(wanted, {**good, expected[0]: passed}) == [
        f"{expected[0]} passed: remove it from EXPECTED_FAILURES"
    ]
    assert module.complaints(wanted[1:], good) == ["gloo passes 89 tests, fewer than 90"]


def main():
    """Runs all checks."""
    for check in (
        communicators_do_not_wait_for_each_other,
        errors_travel,
        forked_children_are_refused,
        sparse_tensors_are_recorded,
        torch_streams,
        messages_to_itself_on_a_gpu,
        receives_that_time_out_stop,
        residuals_by_tensor,
        the_script_takes_the_newest_library,
        the_script_knows_its_failures,
    ):
        check()
        print(f"passed {check.__name__}", flush=True)


if __name__ == "__main__":
    main()
