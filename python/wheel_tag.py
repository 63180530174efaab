"""Names the systems that the wheel runs on: any Python 3, Linux with glibc 2.28 or newer, x86-64."""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelTag(BuildHookInterface):
    """Build hook that sets the wheel's tag. The libraries do not depend on the version of Python."""

    def initialize(self, version, build_data):
        """Sets the tag; scripts/package checks that the libraries keep to it."""
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_2_28_x86_64"
