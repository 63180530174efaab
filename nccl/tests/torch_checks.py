"""What torch.distributed must do, each check as one rank: `check(rank, ranks, device)` asserts.

Every rank knows the data of all others (it is made from their numbers), so that results are
computed here without communication. Numbers are small whole ones where sums must be exact.
"""

import hashlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

CHECKS = {}


class Skip(Exception):
    """Torch itself refuses this, or lacks it."""


def check(name):
    def add(function):
        assert name not in CHECKS
        CHECKS[name] = function
        return function

    return add


INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
COUNTS = [1, 7, 1000, 65537]


def numbers(rank, count, dtype, salt=0, product=False):
    """A rank's data, on the host: whole numbers that every type has, also when they are summed."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    low, high = (1, 3) if product else (0, 5) if dtype == torch.uint8 else (-4, 5)
    if dtype in EIGHT_BITS:
        low, high = (1, 2) if product else (-1, 2)
    return torch.randint(low, high, (count,), generator=generator).to(dtype)


def wide(tensor):
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor.to(torch.int64)


def equal(found, expected, what=""):
    found = found.detach().cpu()
    if found.shape != expected.shape or not torch.equal(wide(found), wide(expected)):
        where = (wide(found) != wide(expected)).nonzero() if found.shape == expected.shape else []
        at = where[0].tolist() if len(where) else None
        raise AssertionError(f"{what} differs, first at {at} of {tuple(expected.shape)}")


def on(device):
    """As arguments called device_ids take it."""
    return None if device.index is None else [device.index]


def refusing(call):
    """Runs a call; what torch refuses before it reaches the library is no failure of ours."""
    try:
        return call()
    except dist.DistBackendError:
        raise
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as why:
        raise Skip(f"torch refuses it: {str(why).splitlines()[0][:120]}") from None


def poisoned(count, dtype, device):
    """An output that no call has written to."""
    if dtype.is_floating_point:
        return torch.full((count,), float("nan"), device=device).to(dtype)
    return torch.full((count,), 77, dtype=dtype, device=device)


def rounded(found, expected, size, ranks, dtype, what):
    """Whether `found` is `expected` but for roundings, of which every contribution, all of them together
    of mean magnitude `size`, meets one of 1/n, one of its product, and one of each partial sum."""
    unit = torch.finfo(dtype).eps / 2
    least = torch.finfo(dtype).smallest_normal * 2 * unit
    off = (wide(found.cpu()) - expected).abs()
    bound = ((1 + unit) ** (ranks + 3) - 1) * size + (ranks + 2) * least
    assert (off <= bound).all(), f"{what} is off by {off.max().item()}"
    if dtype in EIGHT_BITS and len(expected) >= 256:
        # The bounds for single errors exceed the result itself, so the root mean square of all errors is
        # judged. Roundings partly cancel: it is 0.08 in e5m2, simulated up to 16 ranks. Zeros would be off by
        # 1, and a sum without one rank by more than 0.08.
        together = (off.square().mean() / expected.square().mean()).sqrt()
        assert together <= 2 * unit, f"{what} is off by {together.item()} of its size"


def combined(ranks, count, dtype, op, salt):
    """The reduction of all ranks' data."""
    product = op == ReduceOp.PRODUCT
    all_data = [wide(numbers(rank, count, dtype, salt, product)) for rank in range(ranks)]
    stacked = torch.stack(all_data)
    if op == ReduceOp.SUM:
        result = stacked.sum(0)
    elif op == ReduceOp.PRODUCT:
        result = stacked.prod(0)
    elif op == ReduceOp.MIN:
        result = stacked.min(0).values
    elif op == ReduceOp.MAX:
        result = stacked.max(0).values
    elif op == ReduceOp.AVG:
        total = stacked.sum(0)
        if dtype.is_floating_point:
            result = total / ranks
        else:
            result = torch.div(total, ranks, rounding_mode="trunc")
    return result


def mean_size(ranks, count, dtype, salt):
    """The mean of the magnitudes of all ranks' data."""
    return sum(numbers(rank, count, dtype, salt).to(torch.float64).abs() for rank in range(ranks)) / ranks


OPS = {"sum": ReduceOp.SUM, "product": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX,
       "avg": ReduceOp.AVG}


def reductions(dtype, op_name):
    op = OPS[op_name]

    def run(rank, ranks, device):
        for salt, count in enumerate(COUNTS):
            product = op == ReduceOp.PRODUCT
            mine = lambda elements: numbers(rank, elements, dtype, salt, product).to(device)

            def judge(found, expected, size, what):
                what = f"{what} of {count}"
                if op == ReduceOp.AVG and dtype.is_floating_point:
                    rounded(found, expected, size, ranks, dtype, what)
                else:
                    equal(found, expected.to(dtype), what)

            data = mine(count)
            refusing(lambda: dist.all_reduce(data, op))
            expected = combined(ranks, count, dtype, op, salt)
            size = mean_size(ranks, count, dtype, salt)
            judge(data, expected, size, "all_reduce")

            root = salt % ranks
            data = mine(count)
            refusing(lambda: dist.reduce(data, root, op))
            if rank == root:
                judge(data, expected, size, "reduce")

            blocks = combined(ranks, ranks * count, dtype, op, salt)
            place = slice(rank * count, (rank + 1) * count)
            own, size = blocks[place], mean_size(ranks, ranks * count, dtype, salt)[place]
            output = poisoned(count, dtype, device)
            data = mine(ranks * count)
            refusing(lambda: dist.reduce_scatter_tensor(output, data, op))
            judge(output, own, size, "reduce_scatter_tensor")
            output = poisoned(count, dtype, device)
            refusing(lambda: dist.reduce_scatter(output, list(data.chunk(ranks)), op))
            judge(output, own, size, "reduce_scatter")

    return run


for _dtype in INTEGERS + FLOATS + EIGHT_BITS:
    for _name in OPS:
        check(f"reduce/{str(_dtype)[6:]}/{_name}")(reductions(_dtype, _name))


@check("reduce/bool")
def reduce_bool(rank, ranks, device):
    for op, fold in [(ReduceOp.SUM, torch.any), (ReduceOp.MAX, torch.any), (ReduceOp.MIN, torch.all)]:
        data = numbers(rank, 1000, torch.bool).to(device)
        refusing(lambda: dist.all_reduce(data, op))
        expected = fold(torch.stack([numbers(one, 1000, torch.bool) for one in range(ranks)]), dim=0)
        equal(data, expected, f"{op}")


@check("reduce/complex64")
def reduce_complex(rank, ranks, device):
    make = lambda one: torch.complex(numbers(one, 1000, torch.float32), numbers(one, 1000, torch.float32, 9))
    data = make(rank).to(device)
    dist.all_reduce(data)
    expected = sum(make(one) for one in range(ranks))
    equal(torch.view_as_real(data), torch.view_as_real(expected))


@check("reduce/premulsum")
def reduce_premulsum(rank, ranks, device):
    if not hasattr(dist, "_make_nccl_premul_sum"):
        raise Skip("this torch has no premulsum")
    refused = []
    for dtype in FLOATS:
        # Tests a factor that is a number, and a factor that lies on the GPU.
        scalars = [2.0, torch.tensor([0.5], dtype=dtype, device=device)]
        if dtype == torch.bfloat16:
            # torch 2.11 passes the number as fp32 but declares it bfloat16, which no library can detect.
            scalars = scalars[1:]
        for scalar in scalars:
            op = dist._make_nccl_premul_sum(scalar)
            data = numbers(rank, 4097, dtype).to(device)
            try:
                refusing(lambda: dist.all_reduce(data, op))
            except Skip as why:
                refused.append(f"{str(dtype)[6:]} times a {type(scalar).__name__}: {why}")
                continue
            total = sum(wide(numbers(one, 4097, dtype)) for one in range(ranks))
            equal(data, (total * float(scalar)).to(dtype), f"{dtype} times {float(scalar)}")
    if len(refused) == 2 * len(FLOATS) - 1:
        raise Skip(refused[0])
    return "; ".join(refused)


@check("reduce/random floats within rounding")
def reduce_random(rank, ranks, device):
    for dtype in FLOATS:
        make = lambda one: torch.randn(100_003, generator=torch.Generator().manual_seed(one),
                                       dtype=torch.float64).to(dtype)
        data = make(rank).to(device)
        dist.all_reduce(data)
        all_data = torch.stack([make(one).to(torch.float64) for one in range(ranks)])
        off = (data.cpu().to(torch.float64) - all_data.sum(0)).abs()
        bound = ranks * torch.finfo(dtype).eps / 2 * all_data.abs().sum(0)
        if dtype == torch.float64:
            bound *= 2  # What it is compared with is rounded too.
        assert (off <= bound).all(), f"{dtype} is off by {(off - bound).max().item()} too much"


def movements(dtype):
    def run(rank, ranks, device):
        for salt, count in enumerate(COUNTS):
            make = lambda one, elements=count: numbers(one, elements, dtype, salt)
            root = (salt + 1) % ranks
            data = make(rank).to(device)
            refusing(lambda: dist.broadcast(data, root))
            equal(data, make(root), "broadcast")

            everything = torch.cat([wide(make(one)) for one in range(ranks)]).to(dtype)
            output = torch.empty(ranks * count, dtype=dtype, device=device)
            refusing(lambda: dist.all_gather_into_tensor(output, make(rank).to(device)))
            equal(output, everything, "all_gather_into_tensor")

            parts = [torch.empty(count, dtype=dtype, device=device) for _ in range(ranks)]
            dist.all_gather(parts, make(rank).to(device))
            for one in range(ranks):
                equal(parts[one], make(one), f"all_gather from {one}")

            here = rank == root
            parts = [torch.empty(count, dtype=dtype, device=device) for _ in range(ranks)] if here else None
            dist.gather(make(rank).to(device), parts, dst=root)
            for one in range(ranks if here else 0):
                equal(parts[one], make(one), f"gather from {one}")

            parts = list(make(root, ranks * count).to(device).chunk(ranks)) if here else None
            output = torch.empty(count, dtype=dtype, device=device)
            dist.scatter(output, parts, src=root)
            equal(output, make(root, ranks * count)[rank * count:(rank + 1) * count], "scatter")

            mine = make(rank, ranks * count).to(device)
            block = lambda one: make(one, ranks * count)[rank * count:(rank + 1) * count]
            expected = torch.cat([wide(block(one)) for one in range(ranks)]).to(dtype)
            output = torch.empty_like(mine)
            dist.all_to_all_single(output, mine)
            equal(output, expected, "all_to_all_single")
            parts = [torch.empty(count, dtype=dtype, device=device) for _ in range(ranks)]
            dist.all_to_all(parts, list(mine.chunk(ranks)))
            for one in range(ranks):
                equal(parts[one], block(one), f"all_to_all from {one}")

    return run


for _dtype in INTEGERS + FLOATS + EIGHT_BITS + [torch.bool]:
    check(f"move/{str(_dtype)[6:]}")(movements(_dtype))


@check("move/all_gather, uneven")
def uneven_all_gather(rank, ranks, device):
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for count in COUNTS:
            make = lambda one: numbers(one, count + 3 * one, dtype)
            parts = [torch.empty(count + 3 * one, dtype=dtype, device=device) for one in range(ranks)]
            dist.all_gather(parts, make(rank).to(device))
            for one in range(ranks):
                equal(parts[one], make(one), f"{dtype} from {one}")


@check("move/all_to_all_single, uneven splits")
def uneven_all_to_all(rank, ranks, device):
    # Rank i sends (i + 2j) % 5 rows to rank j, so some pairs send nothing.
    rows = lambda source, target: (source + 2 * target) % 5
    width = 33
    sent = [rows(rank, one) for one in range(ranks)]
    received = [rows(one, rank) for one in range(ranks)]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        data = lambda one: numbers(one, sum(rows(one, j) for j in range(ranks)) * width, dtype).view(-1, width)
        output = torch.empty(sum(received), width, dtype=dtype, device=device)
        dist.all_to_all_single(output, data(rank).to(device), received, sent)
        parts = []
        for one in range(ranks):
            start = sum(rows(one, j) for j in range(rank))
            parts.append(data(one)[start:start + rows(one, rank)])
        equal(output, torch.cat(parts), f"{dtype}")


@check("messages/send and recv")
def send_recv(rank, ranks, device):
    if ranks == 1:
        raise Skip("there is nobody to send to")
    for count in COUNTS:
        if rank == 0:
            for one in range(1, ranks):
                dist.send(numbers(one, count, torch.float32).to(device), one)
            data = torch.empty(count, device=device)
            for one in range(1, ranks):
                dist.recv(data, one)
                equal(data, numbers(100 + one, count, torch.float32), f"from {one}")
        else:
            data = torch.empty(count, device=device)
            dist.recv(data, 0)
            equal(data, numbers(rank, count, torch.float32), "from 0")
            dist.send(numbers(100 + rank, count, torch.float32).to(device), 0)


@check("messages/batch_isend_irecv")
def batch(rank, ranks, device):
    # Sends around the ring in both directions, and to every rank; a single rank sends to itself.
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for count in COUNTS:
        sent = numbers(rank, count, torch.bfloat16).to(device)
        one, two = (torch.empty(count, dtype=torch.bfloat16, device=device) for _ in range(2))
        works = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, one, before)]
        if ranks > 2:
            works += [dist.P2POp(dist.isend, sent, before), dist.P2POp(dist.irecv, two, after)]
        for request in dist.batch_isend_irecv(works):
            request.wait()
        equal(one, numbers(before, count, torch.bfloat16), "from before")
        if ranks > 2:
            equal(two, numbers(after, count, torch.bfloat16), "from after")


@check("messages/batch_isend_irecv, all to all and oneself")
def batch_of_all(rank, ranks, device):
    outputs = [torch.empty(100 + one, device=device) for one in range(ranks)]
    works = []
    for one in range(ranks):
        works.append(dist.P2POp(dist.isend, numbers(rank, 100 + rank, torch.float32).to(device), one))
        works.append(dist.P2POp(dist.irecv, outputs[one], one))
    for request in dist.batch_isend_irecv(works):
        request.wait()
    for one in range(ranks):
        equal(outputs[one], numbers(one, 100 + one, torch.float32), f"from {one}")


@check("objects")
def objects(rank, ranks, device):
    mine = {"rank": rank, "text": "x" * (1000 * rank + 1), "list": list(range(rank))}
    make = lambda one: {"rank": one, "text": "x" * (1000 * one + 1), "list": list(range(one))}
    found = [None] * ranks
    dist.all_gather_object(found, mine)
    assert found == [make(one) for one in range(ranks)]
    found = [make(0), 5, "text"] if rank == 0 else [None] * 3
    dist.broadcast_object_list(found, src=0)
    assert found == [make(0), 5, "text"]
    found = [None] * ranks if rank == ranks - 1 else None
    dist.gather_object(mine, found, dst=ranks - 1)
    assert rank != ranks - 1 or found == [make(one) for one in range(ranks)]
    found = [None]
    dist.scatter_object_list(found, [make(one) for one in range(ranks)] if rank == 0 else None, src=0)
    assert found == [mine]


@check("barriers")
def barriers(rank, ranks, device):
    for _ in range(20):
        dist.barrier(device_ids=on(device))
    dist.barrier(async_op=True, device_ids=on(device)).wait()


@check("async calls on several streams")
def streams(rank, ranks, device):
    if device.type == "cpu":
        raise Skip("needs a GPU")
    side = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for turn in range(12):
        with torch.cuda.stream(side[turn % 3]):
            data = torch.full((50_000 + turn,), float(rank + turn), device=device)
            results.append((data, dist.all_reduce(data, async_op=True), side[turn % 3]))
    for turn, (data, request, stream) in enumerate(results):
        with torch.cuda.stream(stream):
            request.wait()
        stream.synchronize()
        assert (data == ranks * (ranks - 1) / 2 + ranks * turn).all()


@check("coalesced calls")
def coalesced(rank, ranks, device):
    from torch.distributed.distributed_c10d import _coalescing_manager

    data = [numbers(rank, 100 * turn + 1, torch.float32, turn).to(device) for turn in range(8)]
    with _coalescing_manager(device=device, async_ops=True) as manager:
        for one in data:
            dist.all_reduce(one)
    manager.wait()
    for turn, one in enumerate(data):
        equal(one, combined(ranks, 100 * turn + 1, torch.float32, ReduceOp.SUM, turn).float())


@check("sub-groups")
def subgroups(rank, ranks, device):
    halves = [list(range(0, ranks, 2)), list(range(1, ranks, 2))]
    made = [dist.new_group(half, timeout=timedelta(seconds=60)) if half else None for half in halves]
    for half, group in zip(halves, made):
        if rank in half:
            data = numbers(rank, 3000, torch.int64).to(device)
            dist.all_reduce(data, group=group)
            equal(data, sum(numbers(one, 3000, torch.int64) for one in half), "half")
            data = numbers(rank, 3000, torch.int64).to(device)
            dist.broadcast(data, half[-1], group=group)
            equal(data, numbers(half[-1], 3000, torch.int64), "broadcast in a half")
    # Alternates between calls on the world and calls on its subgroups.
    data = torch.ones(10, device=device)
    dist.all_reduce(data)
    assert (data == ranks).all()
    for group in made:
        if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    dist.barrier(device_ids=on(device))


@check("aborted groups")
def aborted(rank, ranks, device):
    """Two that both wait for ranks which do not come: the driver frees nothing of one beside the other."""
    if device.type == "cpu":
        raise Skip("needs a GPU")
    if ranks == 1:
        raise Skip("nobody to wait for")
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is None:
        raise Skip("torch has no call for it")
    dist.barrier(device_ids=on(device))
    free = torch.cuda.mem_get_info(device)[0]
    groups = [dist.new_group(timeout=timedelta(seconds=60)) for _ in range(2)]
    data = [torch.ones(5000, device=device) for _ in groups]
    for one, group in zip(data, groups):
        dist.all_reduce(one, group=group)
        assert (one == ranks).all()
    dist.barrier(device_ids=on(device))
    taken = free - torch.cuda.mem_get_info(device)[0]
    if rank == 0:
        works = [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(data, groups)]
        time.sleep(0.2)
        assert not any(work.is_completed() for work in works)
        begin = time.monotonic()
        for group in groups:
            abort(group)
        torch.cuda.synchronize()
        took = time.monotonic() - begin
        assert took < 5, f"{took:.1f} s"
    dist.barrier(device_ids=on(device))
    if rank != 0:
        for group in groups:
            abort(group)
    # Creating another group frees the communicators that earlier groups left.
    again = dist.new_group(timeout=timedelta(seconds=60))
    one = torch.ones(10, device=device)
    dist.all_reduce(one, group=again)
    assert (one == ranks).all()
    dist.destroy_process_group(again)
    # Every group is freed except the last one, which other ranks may still use.
    until = time.monotonic() + 10
    while free - torch.cuda.mem_get_info(device)[0] > 0.75 * taken:
        assert time.monotonic() < until, f"{taken} bytes for two groups, and they are not given back"
        time.sleep(0.05)
    dist.barrier(device_ids=on(device))


@check("graph capture")
def graphs(rank, ranks, device):
    if device.type == "cpu":
        raise Skip("needs a GPU")
    data = torch.zeros(100_003, device=device)
    gathered = torch.zeros(ranks * 1000, device=device)
    part = torch.zeros(1000, device=device)
    # Connecting and warm-up cannot be captured, so these calls precede the capture.
    dist.all_reduce(data)
    dist.all_gather_into_tensor(gathered, part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = data * 2
        dist.all_reduce(doubled)
        dist.all_gather_into_tensor(gathered, part)
        result = doubled + 1
    for turn in range(10):
        data.fill_(float(rank + turn))
        part.fill_(float(10 * rank + turn))
        graph.replay()
        torch.cuda.synchronize()
        assert (result == ranks * (ranks - 1) + 2 * ranks * turn + 1).all(), f"sum of replay {turn}"
        expected = torch.cat([torch.full((1000,), float(10 * one + turn)) for one in range(ranks)])
        equal(gathered, expected, f"gather of replay {turn}")
    del graph


def network():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512),
                               torch.nn.ReLU(), torch.nn.Linear(512, 10)).double()


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(16, 64, generator=generator, dtype=torch.float64),
            torch.randint(0, 10, (16,), generator=generator))


def trained_alone(ranks, steps, device):
    """The network after the same steps on all ranks' batches, without communication."""
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            inputs, labels = (one.to(device) for one in batch_of(rank, step))
            (torch.nn.functional.cross_entropy(model(inputs), labels) / ranks).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train(model, rank, steps, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, labels = (one.to(device) for one in batch_of(rank, step))
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def close(found, expected):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        off = (one - other).abs().max().item()
        # Both fp64 sums add about ten numbers in different orders, over a few steps, so they differ
        # by little.
        assert off < 1e-11, f"parameter {number} is off by {off}"


@check("DistributedDataParallel")
def ddp(rank, ranks, device):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(network().to(device), device_ids=on(device), bucket_cap_mb=1)
    train(model, rank, 4, device)
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    close(found, trained_alone(ranks, 4, device))
    raw = b"".join(bytes(one.contiguous().view(torch.uint8).flatten().tolist()) for one in found)
    mine = hashlib.sha256(raw).hexdigest()
    all_hashes = [None] * ranks
    dist.all_gather_object(all_hashes, mine)
    assert len(set(all_hashes)) == 1, "replicas differ"


@check("FSDP2")
def fsdp2(rank, ranks, device):
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise Skip("this torch has no fully_shard") from None
    model = network().to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank, 4, device)
    found = [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]
    close(found, trained_alone(ranks, 4, device))
