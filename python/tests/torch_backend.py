"""Backend `cinch` of torch.distributed on CPU tensors, beside results computed from all ranks' known inputs.

python -m cinch run -n 4 python/tests/torch_backend.py            all checks
python -m cinch run -n 4 python/tests/torch_backend.py mismatch   ranks that disagree get an error
python python/tests/torch_backend.py killed                       starts ranks, ends one: the others get an error
python python/tests/torch_backend.py registered                   torch finds the backend by its entry point
"""

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import cinch
import cinch.torch

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOVED = (*INTEGERS, *FLOATS, torch.bool, torch.complex64, torch.float8_e4m3fn)
FOLDS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def require(condition, text):
    """Ends the process unless a condition holds."""
    if not condition:
        raise SystemExit(f"rank {dist.get_rank()}: {text}")


def equal(found, expected, what):
    """Requires equal shapes, types and bits."""
    as_bytes = [one.contiguous().reshape(-1).view(torch.uint8) for one in (found, expected)]
    is_same = found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(*as_bytes)
    require(is_same, f"{what}: found {found}, expected {expected}")


def raises(kind, part, function, *arguments, **options):
    """Requires an error of a kind, with a part of its text."""
    try:
        function(*arguments, **options)
    except kind as error:
        require(part in str(error), f"the text lacks {part!r}: {error}")
    else:
        require(False, f"{function} raised no {kind}")


def data(rank, shape, dtype, salt=0):
    """Returns a rank's input: small whole numbers, whose reductions are exact in every type."""
    generator = torch.Generator().manual_seed(100 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype == torch.uint8 else -3
    whole = torch.randint(low, 4, shape, generator=generator)
    return whole.to(dtype) if not dtype.is_complex else torch.complex(whole.float(), whole.float().flip(0)).to(dtype)


def everyone(shape, dtype, salt=0):
    """Returns all ranks' inputs."""
    return [data(rank, shape, dtype, salt) for rank in range(dist.get_world_size())]


def folded(op, tensors):
    """Reduces a list in rank order."""
    total = tensors[0].clone()
    for one in tensors[1:]:
        total = FOLDS[op](total, one)
    return total


def reductions():
    """Checks every operator on every type in all_reduce, reduce and reduce_scatter."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (*INTEGERS, *FLOATS):
        for op in FOLDS:
            if op in BITWISE and dtype.is_floating_point:
                raises(ValueError, "does not reduce", dist.all_reduce, data(rank, (4,), dtype), op)
                continue
            every = everyone((size, 5), dtype)
            expected = folded(op, every)
            tensor = every[rank].clone()
            dist.all_reduce(tensor, op)
            equal(tensor, expected, f"all_reduce {dtype} {op}")
            tensor = every[rank].clone()
            dist.reduce(tensor, size - 1, op)
            equal(tensor, expected if rank == size - 1 else every[rank], f"reduce {dtype} {op}")
            output = torch.empty(5, dtype=dtype)
            dist.reduce_scatter_tensor(output, every[rank], op)
            equal(output, expected[rank], f"reduce_scatter_tensor {dtype} {op}")
            output = torch.empty(5, dtype=dtype)
            dist.reduce_scatter(output, list(every[rank]), op)
            equal(output, expected[rank], f"reduce_scatter {dtype} {op}")


def other_reductions():
    """Checks bool, complex, averages, factors, uneven blocks and sparse sums."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = everyone((50,), torch.bool)
    rows = torch.stack(every)
    for ops, expected in (
        ((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), rows.any(0)),
        ((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), rows.all(0)),
        ((ReduceOp.BXOR,), rows.sum(0) % 2 == 1),
    ):
        for op in ops:
            tensor = every[rank].clone()
            dist.all_reduce(tensor, op)
            equal(tensor, expected, f"bool {op}")
    tensor = data(rank, (9,), torch.complex64)
    dist.all_reduce(tensor)
    equal(tensor, sum(everyone((9,), torch.complex64)), "complex sum")
    for dtype in (torch.int8, torch.int32, torch.int64):
        large = torch.tensor([torch.iinfo(dtype).max - rank, torch.iinfo(dtype).min + rank, rank - 2], dtype=dtype)
        exact = [sum(column) for column in zip(*(
            [torch.iinfo(dtype).max - one, torch.iinfo(dtype).min + one, one - 2] for one in range(size)
        ))]
        dist.all_reduce(large, ReduceOp.AVG)
        expected = [abs(total) // size * (1 if total >= 0 else -1) for total in exact]
        equal(large, torch.tensor(expected, dtype=dtype), f"average of {dtype}")
    average = torch.full((3,), float(rank))
    dist.all_reduce(average, ReduceOp.AVG)
    equal(average, torch.full((3,), sum(range(size)) / size), "average")
    scaled = torch.full((3,), float(rank))
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    equal(scaled, torch.full((3,), sum(range(size)) / 2), "sum with a factor")
    blocks = [torch.full((one + 1,), float(rank)) for one in range(size)]
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, blocks)
    equal(output, torch.full((rank + 1,), float(sum(range(size)))), "uneven reduce_scatter")
    places = [[rank, size]]
    torch.sparse.check_sparse_tensor_invariants.enable()
    sparse = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (size + 1,))
    dist.all_reduce(sparse)
    equal(sparse.to_dense(), torch.tensor([1.0] * size + [2.0 * size]), "sparse sum")


def movements():
    """Checks the collectives that move data, in every type."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        every = everyone((size, 3), dtype)
        own = every[rank]
        tensor = own.clone()
        dist.broadcast(tensor, size - 1)
        equal(tensor, every[size - 1], f"broadcast {dtype}")
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own)
        equal(torch.stack(parts), torch.stack(every), f"all_gather {dtype}")
        output = torch.empty((size * size, 3), dtype=dtype)
        dist.all_gather_into_tensor(output, own)
        equal(output, torch.cat(every), f"all_gather_into_tensor {dtype}")
        received = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
        dist.gather(own, received, 0)
        if rank == 0:
            equal(torch.stack(received), torch.stack(every), f"gather {dtype}")
        output = torch.empty(3, dtype=dtype)
        dist.scatter(output, list(own) if rank == size - 1 else None, size - 1)
        equal(output, every[size - 1][rank], f"scatter {dtype}")
        output = torch.empty_like(own)
        dist.all_to_all_single(output, own)
        equal(output, torch.stack([one[rank] for one in every]), f"all_to_all_single {dtype}")
        outputs = [torch.empty(3, dtype=dtype) for _ in range(size)]
        dist.all_to_all(outputs, list(own))
        equal(torch.stack(outputs), torch.stack([one[rank] for one in every]), f"all_to_all {dtype}")


def uneven():
    """Checks blocks of different sizes, empty ones included, and tensors with strides."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [(rank + peer) % size for peer in range(size)]
    received = [(peer + rank) % size for peer in range(size)]
    given = torch.cat([torch.full((count, 2), float(10 * rank + peer)) for peer, count in enumerate(sent)])
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, given, received, sent)
    expected = [torch.full((count, 2), float(10 * peer + rank)) for peer, count in enumerate(received)]
    equal(output, torch.cat(expected), "uneven all_to_all_single")
    parts = [torch.empty(one) for one in range(size)]
    dist.all_gather(parts, torch.full((rank,), float(rank)))
    equal(torch.cat(parts), torch.cat([torch.full((one,), float(one)) for one in range(size)]), "uneven all_gather")

    grid = torch.arange(24.0).reshape(4, 6) * (rank + 1)
    total = torch.arange(24.0).reshape(4, 6) * sum(range(1, size + 1))
    column = grid[:, 1::2]
    dist.all_reduce(column)
    equal(column, total[:, 1::2], "all_reduce of columns")
    equal(grid[:, ::2], (torch.arange(24.0).reshape(4, 6) * (rank + 1))[:, ::2], "columns beside them")
    turned = (torch.arange(24.0).reshape(4, 6) * (rank + 1)).t()
    dist.broadcast(turned, 0)
    equal(turned, torch.arange(24.0).reshape(4, 6).t(), "broadcast of a transposed tensor")
    output = torch.zeros(3, 2 * size).t()
    dist.all_gather_into_tensor(output, torch.full((2, 3), float(rank)))
    equal(output, torch.arange(float(size)).repeat_interleave(6).reshape(-1, 3), "all_gather into a transposed one")
    nothing = torch.empty(0)
    dist.all_reduce(nothing)
    dist.all_reduce(torch.empty(0, dtype=torch.int32), ReduceOp.BOR)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    equal(scalar, torch.tensor(float(sum(range(size)))), "all_reduce of a scalar")


def messages():
    """Checks sends and receives: both directions first, tags, any source, sizes that no buffer holds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    large = torch.full((3_000_000,), float(rank))
    room = torch.empty_like(large)
    sending = dist.isend(large, after)
    dist.recv(room, before)
    sending.wait()
    equal(room, torch.full_like(large, float(before)), "a ring of large messages")
    works = [dist.isend(torch.tensor([10.0 * rank + tag]), after, tag=tag) for tag in (1, 2, 3)]
    for tag in (3, 1, 2):
        got = torch.empty(1)
        dist.recv(got, before, tag=tag)
        equal(got, torch.tensor([10.0 * before + tag]), f"tag {tag}")
    for work in works:
        work.wait()
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            got = torch.empty(2, dtype=torch.int16)
            source = dist.recv(got)
            equal(got, torch.full((2,), source, dtype=torch.int16), "any source")
            seen.add(source)
        require(seen == set(range(1, size)), f"messages came from {seen}")
    else:
        dist.send(torch.full((2,), rank, dtype=torch.int16), 0)
    # A later message of a rank must not meet the receives from any source.
    dist.barrier()
    operations = [dist.P2POp(dist.isend, large, after), dist.P2POp(dist.irecv, room.zero_(), before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    equal(room, torch.full_like(large, float(before)), "a batch")
    own = [torch.zeros(3), torch.zeros(3)]
    world = dist.group.WORLD
    early = world.recv([own[0]], rank, 5)
    world.send([torch.full((3,), 5.0)], rank, 5).wait()
    world.send([torch.full((3,), 6.0)], rank, 6).wait()
    world.recv([own[1]], rank, 6).wait()
    early.wait()
    equal(torch.stack(own), torch.tensor([[5.0] * 3, [6.0] * 3]), "messages to itself")
    if rank == 1:
        raises(ValueError, "has 8 bytes, the receive's tensor 12", dist.recv, torch.empty(3), 0)
    if rank == 0:
        dist.send(torch.zeros(2), 1)
    dist.barrier()


def asynchronous():
    """Checks that calls run in order, and that works and futures report them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor, works = torch.ones(1000, dtype=torch.float64), []
    for _ in range(10):
        works.append(dist.all_reduce(tensor, async_op=True))
    works[-1].wait()
    require(all(work.is_completed() and work.is_success() for work in works), "an earlier call has not ended")
    require(works[0].exception() is None, "an exception without an error")
    equal(tensor, torch.full((1000,), float(size) ** 10, dtype=torch.float64), "ten all_reduces")

    def again(future):
        # Runs on the worker's thread, where a wait must not block the calls behind it.
        dist.all_reduce(future.value()[0])
        return future.value()[0] * 2

    chained = torch.ones(3)
    result = dist.all_reduce(chained, async_op=True).get_future().then(again).wait()
    equal(result, torch.full((3,), 2.0 * size * size), "a call in a callback")
    tensors = [torch.full((n,), float(rank)) for n in (1, 5, 9)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for one in tensors:
            dist.all_reduce(one)
    manager.wait()
    equal(torch.cat(tensors), torch.full((15,), float(sum(range(size)))), "coalesced all_reduces")
    barrier = dist.barrier(async_op=True)
    barrier.wait()
    require(barrier.result() is None or barrier.is_success(), "the barrier failed")


def groups():
    """Checks subgroups, object collectives and functional collectives."""
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(start, size, 2))) for start in range(min(2, size))]
    own = halves[rank % 2]
    require(dist.get_backend(own) == "cinch", f"backend {dist.get_backend(own)}")
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=own)
    equal(tensor, torch.tensor([sum(range(rank % 2, size, 2))]), "all_reduce of a subgroup")
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    require([one["rank"] for one in objects] == list(range(size)), f"{objects}")
    total = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    equal(total + 0, torch.full((4,), float(size)), "functional all_reduce")
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, dist.group.WORLD)
    equal(gathered + 0, torch.arange(float(size)).repeat_interleave(2), "functional all_gather")
    dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=60))
    for group in halves:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def refusals():
    """Checks that wrong arguments are errors before anything moves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    raises(ValueError, "convert the tensor", dist.all_reduce, torch.zeros(2, dtype=torch.bool), ReduceOp.AVG)
    raises(ValueError, "elements", dist.all_gather_into_tensor, torch.zeros(size + 1), torch.zeros(1))
    raises(ValueError, "no rank of this group", world.send, [torch.zeros(1)], size, 0)
    raises(ValueError, "splits", dist.all_to_all_single, torch.zeros(size), torch.zeros(size), [1] * size, [2] * size)
    raises(ValueError, "not on meta", dist.all_reduce, torch.zeros(2, device="meta"))
    if rank == 0:
        work = world.recv([torch.zeros(1)], 1, 0)
        raises(cinch.TimeoutError, "a receive from rank 1", work.wait, datetime.timedelta(seconds=0.2))
    dist.barrier()


def mismatch():
    """Ranks that disagree about a call get an error that names both."""
    try:
        dist.all_reduce(torch.ones(10 + dist.get_rank() % 2))
    except dist.DistBackendError as error:
        require(isinstance(error, cinch.Error), f"{type(error)}")
        print(f"rank {dist.get_rank()}: mismatch reported: {error}", file=sys.stderr)
        os._exit(0)
    require(False, "different sizes were accepted")


def survivor():
    """Reports how long a rank whose peer has died waits for its error."""
    dist.all_reduce(torch.ones(10))
    print("connected", flush=True)
    if dist.get_rank() == 0:
        time.sleep(600)
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(10))
    except dist.DistBackendError as error:
        print(f"error after {time.monotonic() - started:.1f} s: {error}", flush=True)
        os._exit(0)
    os._exit(1)


def killed():
    """Starts 3 ranks, ends rank 0, and requires an error on the others within 20 s."""
    store = pathlib.Path(tempfile.gettempdir()) / f"cinch-store-{os.getpid()}"
    environment = {**os.environ, "WORLD_SIZE": "3", "CINCH_TEST_STORE": str(store)}
    command = [sys.executable, __file__, "survivor"]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        for process in ranks:
            assert process.stdout.readline() == "connected\n"
        time.sleep(0.5)
        ranks[0].kill()
        started = time.monotonic()
        texts = [process.communicate(timeout=20)[0] for process in ranks[1:]]
    finally:
        for process in ranks:
            process.kill()
        store.unlink(missing_ok=True)
    for process, text in zip(ranks[1:], texts):
        assert process.returncode == 0 and "error after" in text, text
    print(f"both ranks had an error {time.monotonic() - started:.1f} s after the end of rank 0: {texts[0].strip()}")


def registered():
    """Requires that torch registers the backend without an import, as in an environment with the wheel."""
    package = pathlib.Path(cinch.__file__).resolve().parent.parent
    program = (
        "import sys, torch, torch.distributed as dist;"
        "assert 'cinch' in dist.Backend.backend_list, dist.Backend.backend_list;"
        "assert 'cinch._library' not in sys.modules, 'libcinch was loaded by import torch';"
        "dist.init_process_group('cinch', store=dist.HashStore(), rank=0, world_size=1);"
        "one = torch.ones(3); dist.all_reduce(one); assert one.tolist() == [1, 1, 1];"
        "dist.destroy_process_group()"
    )
    with tempfile.TemporaryDirectory() as folder:
        # Files that an installed wheel has beside the package.
        facts = pathlib.Path(folder) / "cinch_ccl-0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: cinch-ccl\nVersion: 0\n")
        (facts / "entry_points.txt").write_text("[torch.backends]\ncinch = cinch.torch:register\n")
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{package}"}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def join():
    """Joins the default group."""
    timeout = datetime.timedelta(seconds=120)
    path = os.environ.get("CINCH_TEST_STORE")
    if path is None:
        dist.init_process_group("cinch", init_method="cinch://", timeout=timeout)
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("cinch", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timeout)


def main():
    """Runs the part that is named, or all checks in one job."""
    part = sys.argv[1] if len(sys.argv) > 1 else "checks"
    if part in ("killed", "registered"):
        {"killed": killed, "registered": registered}[part]()
        return
    join()
    if part in ("mismatch", "survivor"):
        {"mismatch": mismatch, "survivor": survivor}[part]()
    for check in (reductions, other_reductions, movements, uneven, messages, asynchronous, groups, refusals):
        check()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all backend checks passed", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
