"""Streams of messages over TCP between network namespaces, beside plain connections: parts of scripts/bench-net."""

import contextlib
import json
import operator
import pathlib
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile

import baseline
import netns

PROBES = baseline.ROOT / "benches" / "net"


def probe(net, connections=1, seconds=1.5, beside=contextlib.nullcontext):
    """Returns the Gbit/s of TCP connections between two hosts in each direction, both at once."""
    program = [sys.executable, PROBES / "link_probe.py"]
    tail = [net.address(0), netns.PORT, seconds, connections]
    children = [net.popen(host, [*program, role, *tail], stdout=subprocess.PIPE)
                for host, role in enumerate(["listen", "connect"])]
    with beside(children):
        done = netns.collect(children, 60)
    if any(code != 0 for code, _ in done):
        sys.exit("the link probe failed")
    return [round(float(output) / 1e9, 3) for _, output in done]


def calls(net, hosts, words, environment=None, collective="all_reduce", beside=contextlib.nullcontext):
    """Runs a benchmark with ranks on `hosts`, and returns its rows."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [baseline.CINCH, "bench", collective, *words]
        done = net.ranks(hosts, command, ["--json", out.name], 300, environment, beside)
        if failed := [output for code, output in done if code != 0]:
            sys.exit(f"failed: {shlex.join(map(str, command))}\n{failed[0]}")
        return baseline.rows(out.name)


def stream(net, size, iterations, beside=contextlib.nullcontext):
    """Returns the Gbit/s of messages of `size` bytes in all from rank 0 to rank 1, and the number of sockets."""
    # A broadcast in place between two ranks is one stream of messages. Each channel has a socket.
    words = ["-b", size, "-e", size, "-n", iterations, "-w", 1, "-c", 0, "-d", "u8", "--transport", "tcp",
             "--codec", "raw"]
    row = calls(net, [0, 1], words, collective="broadcast", beside=beside)[0]
    return size * 8 / row["in_place"]["time_us"] / 1e3, row["channels"]


# Cases of --adverse: percentage of packets that are lost, and what happens beside both programs.
ADVERSE = {
    "nothing": (0, contextlib.nullcontext),
    "1 % of packets lost each way": (1, contextlib.nullcontext),
    "receiver stopped for 20 ms of every 40 ms": (0, netns.stopped_at_times),
}


def adverse(size, options):
    """Returns the rows of --adverse and the number of missed goals."""
    rows, missed, goal = [], 0, 0.9
    for name, (percent, beside) in ADVERSE.items():
        ours, theirs, sockets = [], [], 0
        with netns.Net(2, "1gbit") as net:
            for host in (0, 1) if percent else ():
                net.lose(host, percent)

            def one_stream():
                gbit, channels = stream(net, size, options.iterations, beside)
                ours.append(gbit)
                return channels

            def one_probe():
                # The direction of the stream: from the first host to the second.
                theirs.append(probe(net, sockets, 3, beside)[1])

            sockets = one_stream()
            ours.clear()
            for turn in range(options.turns):
                for side in (one_stream, one_probe)[::1 - turn % 2 * 2]:
                    side()
        ratio = round(statistics.median(map(operator.truediv, ours, theirs)), 3)
        missed += ratio < goal
        print(f"{name}: cinch {statistics.median(ours):.3f} Gbit/s, {sockets} plain connections "
              f"{statistics.median(theirs):.3f}: {ratio:.2f}, goal {goal} {'pass' if ratio >= goal else 'MISSED'}",
              flush=True)
        rows.append({"collective": "broadcast", "ranks": 2, "size": size, "dtype": "u8", "codec": "raw",
                     "transport": "tcp", "case": name, "sockets": sockets, "gbit": statistics.median(ours),
                     "plain_gbit": statistics.median(theirs), "turns": options.turns, "ratio": ratio,
                     "goal": goal, "met": ratio >= goal})
    return rows, missed


# Ways of --ways: of the receiver and of the sender, as stream_probe.c explains them.
WAYS = {
    "send": ("recv", "send"),
    "MSG_ZEROCOPY": ("recv", "zerocopy"),
    "io_uring": ("uring", "uring"),
    "io_uring, registered buffers": ("uring", "uring_zc"),
}
WAYS_BLOCK, WAYS_CALLS = 128 << 10, 10


def ways(size, options):
    """Returns the rows of --ways; there is no goal."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "stream_probe"
        built = subprocess.run(["cc", "-O2", "-o", program, PROBES / "stream_probe.c"])
        if built.returncode != 0:
            sys.exit("stream_probe.c was not compiled")
        for rate in ["10gbit", "25gbit"]:
            found = {}
            with netns.Net(2, rate) as net:
                for turn in range(options.turns):
                    for way in [*WAYS, "cinch"][::1 - turn % 2 * 2]:
                        done = one_way(net, program, way, size)
                        found.setdefault(way, []).append(done)
            for way in [*WAYS, "cinch"]:
                gbit, cost, copied = (statistics.median(column) for column in zip(*found[way]))
                print(f"{rate} {way}: {gbit:.2f} Gbit/s, {cost:.2f} processor seconds per GB of both ends, "
                      f"{copied:.0%} of the blocks copied", flush=True)
                rows.append({"rate": rate, "way": way, "block": WAYS_BLOCK, "turns": options.turns, "gbit": gbit,
                             "processor_seconds_per_gb": cost, "copied": copied})
    return rows, 0


def one_way(net, program, way, size):
    """Returns Gbit/s, processor seconds of both ends per 10^9 bytes, and the share of blocks that the kernel copied."""
    if way == "cinch":
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        gbit, _ = stream(net, size, WAYS_CALLS)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # The calls and one to warm up, out of place and in place. The start of the ranks is in the time.
        return gbit, used / (2 * (WAYS_CALLS + 1) * size / 1e9), 1.0
    total = 2 * (WAYS_CALLS + 1) * size
    ends = list(zip(["listen", "connect"], WAYS[way]))
    children = [net.popen(host, [program, role, net.address(0), netns.PORT, end, WAYS_BLOCK, total],
                          stdout=subprocess.PIPE)
                for host, (role, end) in enumerate(ends)]
    done = netns.collect(children, 120)
    if any(code != 0 for code, _ in done):
        sys.exit(f"stream_probe failed by {way}:\n" + "\n".join(output for _, output in done))
    received, sent = (json.loads(output) for _, output in done)
    used = received["processor_seconds"] + sent["processor_seconds"]
    copied = sent["copied_blocks"] / (total // WAYS_BLOCK) if sent["copied_blocks"] >= 0 else 1.0
    return received["bytes"] * 8 / received["seconds"] / 1e9, used / (total / 1e9), copied
