"""Hosts of one machine: network namespaces on a common bridge, with rates, loss and cut links."""

import os
import pathlib
import secrets
import shutil
import subprocess
import sys
import tempfile

# The device of a host in its namespace, and the port where ranks meet.
DEVICE = "eth0"
PORT = 29511


def missing():
    """Why there can be no namespaces here; None if there can."""
    absent = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if absent:
        return f"{' and '.join(absent)} not found (package iproute2)"
    if os.geteuid() != 0:
        return "needs root"
    # Root of a container may lack what it takes: only trying tells.
    space = f"cinch-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", space], stderr=subprocess.PIPE, text=True)
    subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)
    return None if made.returncode == 0 else f"ip netns add: {made.stderr.strip() or made.returncode}"


def ip(*arguments):
    subprocess.run(["ip", *map(str, arguments)], check=True)


class Net:
    """`hosts` namespaces on a bridge in one more. A context: leaves nothing behind."""

    def __init__(self, hosts, rate=None):
        # Names carry the process id: two runs do not take each other's namespaces away.
        self.spaces = [f"cinch-{os.getpid()}-{host}" for host in range(hosts)]
        self.switch = f"cinch-{os.getpid()}-switch"
        self.rate = rate
        self.secret = None

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

    def set_up(self):
        for space in [self.switch, *self.spaces]:
            ip("netns", "add", space)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge", "forward_delay", 0)
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for host, space in enumerate(self.spaces):
            port = f"port{host}"
            ip("link", "add", DEVICE, "netns", space, "type", "veth",
               "peer", "name", port, "netns", self.switch)
            ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", DEVICE)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", DEVICE, "up")
            ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
            if self.rate:
                # Both ends: what a host sends, and what is sent to it.
                self.shape(space, DEVICE)
                self.shape(self.switch, port)
        self.secret = tempfile.NamedTemporaryFile("w", suffix=".secret")  # made with mode 0600
        self.secret.write(secrets.token_hex(32))
        self.secret.flush()

    def shape(self, space, device):
        # 128 KiB of burst holds two of the 64 KiB packets that TCP hands down; with less the
        # bucket, not the rate, sets the pace (32 KiB: 0.44 to 0.75 Gbit/s).
        subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", "rate",
                        self.rate, "burst", "128k", "latency", "20ms"], check=True)

    @staticmethod
    def address(host):
        return f"10.231.77.{host + 1}"

    def cut(self, host):
        """Takes the cable out: the host's own device stays up."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def lose(self, host, percent):
        """Drops that part of the packets that come to a host. Raises if nothing here can."""
        space = self.spaces[host]
        # A packet of the kernel may be 64 KiB long; the wire's are what gets lost.
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
        """How many packets `lose` has dropped."""
        done = subprocess.run(["ip", "netns", "exec", self.spaces[host], "nft", "list", "chain",
                               "inet", "loss", "input"], check=True, text=True,
                              stdout=subprocess.PIPE)
        return int(done.stdout.split("counter packets ")[1].split()[0])

    def popen(self, host, command, environment=None, **options):
        """Starts a command on a host."""
        command = ["ip", "netns", "exec", self.spaces[host], *map(str, command)]
        return subprocess.Popen(command, env=os.environ | (environment or {}), text=True, **options)

    def ranks(self, hosts, command, last=(), seconds=120, environment=None):
        """Runs one command as ranks, `hosts` naming each one's host; rank 0's has `last` behind it.
        Returns their codes and outputs."""
        children = [
            self.popen(host, [*command, *(last if rank == 0 else ())],
                       self.rank_environment(hosts, rank) | (environment or {}),
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for rank, host in enumerate(hosts)
        ]
        return collect(children, seconds)

    def rank_environment(self, hosts, rank):
        return {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0",
                "MASTER_ADDR": self.address(hosts[0]), "MASTER_PORT": str(PORT),
                "CINCH_SECRET_FILE": self.secret.name, "CINCH_SOCKET_IFNAME": DEVICE}


def collect(children, seconds):
    """Codes and outputs of processes that end by themselves; those that do not are killed."""
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
    sys.exit(f"{pathlib.Path(__file__).name} is for scripts to import")
