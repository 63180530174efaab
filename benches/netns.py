"""Simulates hosts by network namespaces on a common bridge, with rates, loss and cut links."""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

# The network device of each simulated host, and the port of the rendezvous.
DEVICE = "eth0"
PORT = 29511


def missing():
    """Returns why no namespaces can be created here, or None if they can."""
    absent = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if absent:
        return f"{' and '.join(absent)} not found (package iproute2)"
    if os.geteuid() != 0:
        return "needs root"
    # Root in a container may lack the capability to create namespaces; only an attempt shows
    # whether it has it.
    space = f"cinch-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", space], stderr=subprocess.PIPE, text=True)
    subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
    return None if made.returncode == 0 else f"ip netns add: {made.stderr.strip() or made.returncode}"


def ip(*arguments):
    subprocess.run(["ip", *map(str, arguments)], check=True)


class Net:
    """Namespaces of hosts, joined by bridges in one more namespace. A context manager that removes them.

    All hosts are on one bridge, or each on one of `switches`: (bridge, bridge above it, rate of the link between both).
    `places` has the bridge of each host. With `one_host` all namespaces have one /dev/shm, so ranks in them are containers
    of one host.
    """

    def __init__(self, hosts, rate=None, switches=(), places=None, one_host=False):
        # Names contain the process id, so that two runs cannot remove each other's namespaces.
        self.spaces = [f"cinch-{os.getpid()}-{host}" for host in range(hosts)]
        self.switch = f"cinch-{os.getpid()}-switch"
        self.rate = rate
        self.switches = list(switches)
        self.places = places or ["bridge"] * hosts
        self.one_host = one_host
        self.secret = None
        self.directory = None

    def __enter__(self):
        try:
            self.set_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in [*self.spaces, self.switch]:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
        if self.secret:
            self.secret.close()
        if self.directory:
            self.directory.cleanup()

    def set_up(self):
        for space in [self.switch, *self.spaces]:
            ip("netns", "add", space)
        self.add_bridge("bridge")
        for bridge, above, rate in self.switches:
            self.add_bridge(bridge)
            up, down = f"{bridge}-up", f"{bridge}-down"
            ip("-n", self.switch, "link", "add", up, "type", "veth", "peer", "name", down)
            for device, master in [(up, bridge), (down, above)]:
                ip("-n", self.switch, "link", "set", device, "master", master, "up")
                self.shape(self.switch, device, rate)
        for host, space in enumerate(self.spaces):
            port = f"port{host}"
            ip("link", "add", DEVICE, "netns", space, "type", "veth",
               "peer", "name", port, "netns", self.switch)
            ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", DEVICE)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", DEVICE, "up")
            ip("-n", self.switch, "link", "set", port, "master", self.places[host], "up")
            if self.rate:
                # Both ends of the link get a rate limit, so that it holds in both directions.
                self.shape(space, DEVICE, self.rate)
                self.shape(self.switch, port, self.rate)
        self.directory = tempfile.TemporaryDirectory(prefix="cinch-hosts-")
        for host in range(len(self.spaces)):
            self.shared_memory(host).mkdir(mode=0o1777, exist_ok=True)
        self.secret = tempfile.NamedTemporaryFile("w", suffix=".secret")  # made with mode 0600
        self.secret.write(secrets.token_hex(32))
        self.secret.flush()

    def add_bridge(self, name):
        ip("-n", self.switch, "link", "add", name, "type", "bridge", "forward_delay", 0)
        ip("-n", self.switch, "link", "set", name, "up")

    @staticmethod
    def shape(space, device, rate):
        # A burst of 128 KiB holds two of TCP's packets of 64 KiB. With a smaller burst the token bucket
        # limits the speed below the configured rate.
        subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", "rate",
                        rate, "burst", "128k", "latency", "20ms"], check=True)

    @staticmethod
    def address(host):
        return f"10.231.77.{host + 1}"

    def cut(self, host):
        """Takes the bridge's end of the link down. The host's own device stays up, as with an unplugged cable."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def lose(self, host, percent):
        """Drops `percent` of the packets that a host receives. Raises if nft cannot."""
        space = self.spaces[host]
        # Without segmentation offload, packets in the kernel are as small as packets on a wire.
        for end in self.spaces:
            ip("-n", end, "link", "set", DEVICE, "gso_max_segs", 1)
        subprocess.run(["ip", "netns", "exec", space, "nft", "-f", "-"], check=True, text=True, input=f"""
            table inet loss {{
                chain input {{
                    type filter hook input priority 0;
                    iifname "{DEVICE}" numgen random mod 1000 < {int(percent * 10)} counter drop
                }}
            }}""")

    def lost(self, host):
        """Returns how many packets `lose` has dropped."""
        done = subprocess.run(["ip", "netns", "exec", self.spaces[host], "nft", "list", "chain",
                               "inet", "loss", "input"], check=True, text=True,
                              stdout=subprocess.PIPE)
        return int(done.stdout.split("counter packets ")[1].split()[0])

    def shared_memory(self, host):
        """Returns the folder that is /dev/shm in a namespace."""
        name = "one-host" if self.one_host else self.spaces[host]
        return pathlib.Path(self.directory.name) / name

    def inside(self, host):
        """Returns the words before a command that runs in the namespace of a host, with the /dev/shm of the host.

        Ranks in different network namespaces with one /dev/shm are containers of one host.
        """
        space = self.spaces[host]
        # `ip netns exec` gives the command a mount namespace of its own, so the mount ends with it.
        return ["ip", "netns", "exec", space, "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"',
                str(self.shared_memory(host))]

    def popen(self, host, command, environment=None, **options):
        """Starts a command in the namespace of a host."""
        command = [*self.inside(host), *map(str, command)]
        return subprocess.Popen(command, env=os.environ | (environment or {}), text=True, **options)

    def ranks(self, hosts, command, last=(), seconds=120, environment=None, beside=contextlib.nullcontext):
        """Runs a command as ranks; `hosts` has the host of each rank. Appends `last` for rank 0.

        `beside` makes a context of the processes, in which they run. Returns their codes and outputs.
        """
        children = [
            self.popen(host, [*command, *(last if rank == 0 else ())],
                       self.rank_environment(hosts, rank) | (environment or {}),
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for rank, host in enumerate(hosts)
        ]
        with beside(children):
            return collect(children, seconds)

    def rank_environment(self, hosts, rank):
        return {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0",
                "MASTER_ADDR": self.address(hosts[0]), "MASTER_PORT": str(PORT),
                "CINCH_SECRET_FILE": self.secret.name, "CINCH_SOCKET_IFNAME": DEVICE}


@contextlib.contextmanager
def stopped_at_times(children):
    """Stops the last of the processes for 20 ms of every 40 ms, until the context ends."""
    victim, over = children[-1], threading.Event()

    def stop_and_continue():
        while not over.wait(0.02):
            victim.send_signal(signal.SIGSTOP)
            over.wait(0.02)
            victim.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def collect(children, seconds):
    """Waits for processes, and kills those that take too long. Returns their codes and outputs."""
    done = []
    try:
        for child in children:
            try:
                output = child.communicate(timeout=seconds)[0]
                done.append((child.returncode, output))
            except subprocess.TimeoutExpired:
                child.kill()
                done.append((-9, f"no end after {seconds} s\n{child.communicate()[0]}"))
                seconds = 1
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    return done


if __name__ == "__main__":
    sys.exit(f"{pathlib.Path(__file__).name} is a module for scripts")
