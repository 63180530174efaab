"""Emulated machines with a Debian kernel, for tests that need kernel modules.

A guest is qemu without KVM. Its whole system is an initramfs; its steps report over serial lines.
Packages are downloaded once by apt from the configured registry, and kept unpacked in
$XDG_CACHE_HOME/cinch (default ~/.cache/cinch).
"""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time

QEMU = "qemu-system-x86_64"
# Kernel with which the published figures were measured. If the registry no longer has it, the
# kernel of linux-image-amd64 is used.
KERNEL = "linux-image-6.1.0-56-amd64"
PACKAGES = ["busybox-static", "iproute2", "libibverbs1", "ibverbs-providers", "libibumad3",
            "librdmacm1", "libpci3", "libnl-3-200", "libnl-route-3-200", "libmnl0", "libelf1",
            "libbpf1", "libcap2", "libdb5.3", "libtirpc3", "libxtables12", "zlib1g", "perftest",
            "libgcc-s1", "libc6", "libudev1", "libgssapi-krb5-2", "libkrb5-3", "libk5crypto3",
            "libkrb5support0", "libcom-err2", "libkeyutils1"]
# Seconds that the download of 100 MB may take.
DOWNLOAD_TIMEOUT = 200
MODULES = ["crc32_generic", "rdma_rxe", "dummy", "veth", "e1000", "sch_netem"]


class Missing(Exception):
    """The reason why no guest can run here."""


def missing():
    """Returns why no guest can run here, or None if one can."""
    tools = (QEMU, "apt-get", "dpkg-deb", "cpio", "strip")
    absent = [tool for tool in tools if not shutil.which(tool)]
    if absent:
        return f"{' and '.join(absent)} not found (packages qemu-system-x86, cpio, binutils)"
    return None


def cache():
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "cinch"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(*command, **options):
    return subprocess.run([*map(str, command)], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **options)


def folder_of(kernel):
    """Returns the folder for the files of all packages with this kernel."""
    return cache() / f"guest-{kernel.removeprefix('linux-image-')}"


def kernel_package():
    """Returns the pinned kernel's package, or the distribution's newest if that is gone."""
    if (folder_of(KERNEL) / "complete").exists():
        return KERNEL
    if run("apt-cache", "show", "--no-all-versions", KERNEL).returncode == 0:
        return KERNEL
    depends = run("apt-cache", "depends", "linux-image-amd64").stdout
    if found := re.search(r"Depends: (linux-image-\S+-amd64)\b", depends):
        print(f"the registry has no {KERNEL}; taking {found[1]}", flush=True)
        return found[1]
    raise Missing("apt knows no Debian kernel (linux-image-amd64); run apt-get update if the package lists "
                  "are missing")


def packages():
    """Downloads and unpacks the packages if needed; returns the folder with their files."""
    kernel = kernel_package()
    folder = folder_of(kernel)
    if (folder / "complete").exists():
        return folder
    with tempfile.TemporaryDirectory(dir=cache()) as scratch:
        root = pathlib.Path(scratch, "root")
        root.mkdir()
        try:
            done = run("apt-get", "download", kernel, *PACKAGES, cwd=scratch, timeout=DOWNLOAD_TIMEOUT)
        except subprocess.TimeoutExpired as late:
            raise Missing(f"the download of packages took more than {DOWNLOAD_TIMEOUT} s") from late
        if done.returncode != 0:
            raise Missing(f"packages cannot be downloaded: {done.stdout.strip().splitlines()[-1]}")
        for package in pathlib.Path(scratch).glob("*.deb"):
            done = run("dpkg-deb", "-x", package, root)
            if done.returncode != 0:
                raise Missing(f"{package.name} cannot be unpacked: {done.stdout}")
        (root / "complete").touch()
        shutil.rmtree(folder, ignore_errors=True)
        root.rename(folder)
    return folder


def modules(root):
    """Returns the files of MODULES and of their dependencies, in load order."""
    files = {path.name.split(".ko")[0].replace("-", "_"): path
             for path in root.glob("lib/modules/*/kernel/**/*.ko*")}
    ordered = []

    def add(name):
        path = files.get(name)
        if path is None or path in ordered:
            return  # compiled in, or already listed
        text = path.read_bytes()
        if found := re.search(rb"\0depends=([^\0]*)\0", text):
            for needed in filter(None, found[1].decode().split(",")):
                add(needed.replace("-", "_"))
        ordered.append(path)

    for name in MODULES:
        add(name)
    return ordered


def libraries(program, root):
    """Returns the shared objects that a program needs, by name; the packages' come first."""
    folders = [root / "usr/lib/x86_64-linux-gnu", root / "lib/x86_64-linux-gnu"]
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
    found = {}
    for line in run("ldd", program, env=environment).stdout.splitlines():
        if match := re.match(r"\s*(?:(\S+) => )?(/\S+) \(0x", line):
            found[match[1] or match[2]] = match[2]
        elif "not found" in line:
            raise Missing(f"{program} needs {line.strip()}")
    return found


INIT = """#!/bin/sh
export PATH=/bin:/sbin HOME=/tmp LD_LIBRARY_PATH=/lib/x86_64-linux-gnu
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
mkdir -p /dev/shm; mount -t tmpfs none /dev/shm; mount -t tmpfs none /tmp
ln -sf /proc/self/fd /dev/fd
echo 1 > /proc/sys/kernel/printk
# The emulator caches translated code by address. Without address randomisation all processes use
# equal addresses and so share the cache.
echo 0 > /proc/sys/kernel/randomize_va_space
ulimit -l unlimited; ulimit -n 4096
for module in $(cat /modules); do insmod /modules.d/$module || echo "no module $module"; done
ip link set lo up
node=$(sed 's/.*node=\\([0-9]*\\).*/\\1/' /proc/cmdline)
export node
step() {  # NAME COMMAND...: runs a command, and reports its output and code on the second serial line
    name=$1; shift
    echo "@@ begin $name" > /dev/ttyS1
    begin=$(cut -d' ' -f1 /proc/uptime)
    "$@" > /tmp/output 2>&1 < /dev/null
    code=$?
    cat /tmp/output > /dev/ttyS1
    echo "@@ end $name $code $begin $(cut -d' ' -f1 /proc/uptime)" > /dev/ttyS1
}
stty -F /dev/ttyS1 -echo -opost 2>/dev/null
. /steps
sync
poweroff -f
"""


def image(root, folder, programs, steps):
    """Builds an initramfs with `programs` (name: path) that runs the shell text `steps`."""
    tree = pathlib.Path(folder, "tree")
    for place in ("bin", "dev", "proc", "sys", "tmp", "etc/libibverbs.d", "modules.d", "lib64",
                  "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/libibverbs"):
        (tree / place).mkdir(parents=True, exist_ok=True)
    busybox = next(root.glob("**/bin/busybox"))
    shutil.copy(busybox, tree / "bin/busybox")
    for name in run(busybox, "--list").stdout.split():
        if not (tree / "bin" / name).exists():
            (tree / "bin" / name).symlink_to("busybox")
    (tree / "sbin").symlink_to("bin")
    wanted = dict(programs)
    for name in ("ip", "tc", "rdma"):
        wanted[name] = next(path for path in root.glob(f"**/*bin/{name}") if path.is_file())
    for name in ("ib_write_bw",):
        wanted[name] = next(root.glob(f"**/bin/{name}"))
    provider = next(root.glob("**/libibverbs/librxe-rdmav*.so"))
    needed = {}
    for path in [*wanted.values(), provider, next(root.glob("**/libibverbs.so.1"))]:
        needed |= libraries(path, root)
    needed["libibverbs.so.1"] = next(root.glob("**/libibverbs.so.1")).resolve()
    for name, path in needed.items():
        place = tree / name.lstrip("/") if "/" in name else tree / "lib/x86_64-linux-gnu" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(pathlib.Path(path).resolve(), place)
    shutil.copy(provider, tree / "usr/lib/x86_64-linux-gnu/libibverbs")
    (tree / "etc/libibverbs.d/rxe.driver").write_text("driver rxe\n", encoding="utf-8")
    for name, path in wanted.items():
        (tree / "bin" / name).unlink(missing_ok=True)
        strip = run("strip", "-o", tree / "bin" / name, path)
        if strip.returncode != 0:
            shutil.copy(path, tree / "bin" / name)
        (tree / "bin" / name).chmod(0o755)
    ordered = modules(root)
    for path in ordered:
        shutil.copy(path, tree / "modules.d")
    (tree / "modules").write_text("\n".join(path.name for path in ordered), encoding="utf-8")
    (tree / "steps").write_text(steps, encoding="utf-8")
    (tree / "init").write_text(INIT, encoding="utf-8")
    (tree / "init").chmod(0o755)
    archive = pathlib.Path(folder, "initramfs")
    with open(archive, "wb") as out:
        files = subprocess.run(["find", "."], cwd=tree, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet", "-R", "0:0"], cwd=tree, input=files,
                       stdout=out, check=True)
    shutil.rmtree(tree)
    return archive


class Guest:
    """An emulated machine, as a context manager that kills it at the end."""

    def __init__(self, root, archive, folder, node=0, devices=(), memory=1536):
        self.log = pathlib.Path(folder, f"console-{node}")
        self.out = pathlib.Path(folder, f"output-{node}")
        kernel = next(root.glob("boot/vmlinuz-*"))
        self.command = [
            QEMU, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(memory),
            "-nodefaults", "-no-reboot", "-display", "none", "-kernel", kernel, "-initrd", archive,
            # On a busy host the timer interrupt comes late. The kernel would then panic at boot
            # without no_timer_check.
            "-append", f"console=ttyS0 quiet panic=-1 no_timer_check node={node}",
            "-serial", f"file:{self.log}", "-serial", f"file:{self.out}",
            *(devices or ("-nic", "none"))]

    def __enter__(self):
        self.process = subprocess.Popen([*map(str, self.command)], stdin=subprocess.DEVNULL)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def steps(self):
        """Returns the steps so far, by name: (code, or None while it runs; seconds; output)."""
        found = {}
        text = self.out.read_text(encoding="utf-8", errors="replace") if self.out.exists() else ""
        for part in re.split(r"^@@ begin ", text, flags=re.M)[1:]:
            name, _, rest = part.partition("\n")
            name = name.strip()
            end = re.search(rf"^@@ end {re.escape(name)} (\d+) (\S+) (\S+)", rest, re.M)
            if end:
                seconds = float(end[3]) - float(end[2])
                found[name] = (int(end[1]), seconds, rest[:end.start()])
            else:
                found[name] = (None, 0.0, rest)
        return found

    def wait(self, deadline):
        """Waits until the machine is off; returns whether it was before the deadline."""
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return self.process.poll() is not None

    def last_words(self):
        """Returns the last lines of the console."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-15:])
