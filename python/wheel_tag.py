"""Names the systems that the wheel runs on: any Python 3, Linux with glibc 2.28 or newer, the libraries' architecture."""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Architectures by the number of the machine in an ELF header.
MACHINES = {62: "x86_64", 183: "aarch64"}


class WheelTag(BuildHookInterface):
    """Build hook that sets the wheel's tag. The libraries do not depend on the version of Python."""

    def initialize(self, version, build_data):
        """Sets the tag; scripts/package checks that the libraries keep to it."""
        header = (Path(self.root) / "cinch/lib/libcinch.so.0").read_bytes()[:20]
        arch = MACHINES[int.from_bytes(header[18:20], "little")]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_28_{arch}"
