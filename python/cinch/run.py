"""Puts libnccl.so.2 of this package in the place of NCCL, and runs the tool `cinch`."""

import ctypes
import os
import pathlib
import shutil
import sys
from typing import Callable, List, Optional, Tuple

FOLDER = pathlib.Path(__file__).resolve().parent / "lib"

#: Variables in which some programs expect the path of the libnccl to open.
PATHS = ("VLLM_NCCL_SO_PATH", "SGLANG_NCCL_SO_PATH")


def nccl_path() -> str:
    """Returns the path of the libnccl.so.2 of this package, for LD_PRELOAD and VLLM_NCCL_SO_PATH.

    Raises FileNotFoundError if this is not an installed wheel.
    """
    path = FOLDER / "libnccl.so.2"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: only an installed wheel contains libnccl.so.2")
    return str(path)


def tool_path() -> str:
    """Returns the path of the tool `cinch`: that of this package, else that of PATH."""
    packaged = FOLDER.parent / "bin" / "cinch"
    found = str(packaged) if packaged.exists() else shutil.which("cinch")
    if found is None:
        raise FileNotFoundError(f"the tool cinch is neither at {packaged} nor in PATH")
    return found


def preload(children: bool = True) -> str:
    """Loads libnccl.so.2 of this package, so that PyTorch and others, imported later, use it in place of NCCL.

    With `children`, LD_PRELOAD and the variables of vLLM and SGLang are set as well, for processes that this one
    starts. Returns the path of the library. Raises RuntimeError if a libnccl is loaded already.
    """
    path = nccl_path()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = {line.split(None, 5)[5].strip() for line in maps if "/libnccl" in line}
    if mapped - {path}:
        raise RuntimeError(f"{', '.join(sorted(mapped - {path}))} is loaded already: call cinch.preload() before import torch")
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    if children:
        others = [it for it in os.environ.get("LD_PRELOAD", "").split(":") if it and it != path]
        os.environ["LD_PRELOAD"] = ":".join([path, *others])
        for name in PATHS:
            os.environ[name] = path
    return path


def command(words: List[str]) -> List[str]:
    """Returns the tool's command for the words behind `python -m cinch`.

    `run [OPTIONS] SCRIPT.py ...` and `run [OPTIONS] -m MODULE ...` run this Python, with libnccl.so.2 preloaded.
    All other words go to the tool unchanged.
    """
    if words[:1] != ["run"]:
        return [tool_path(), *words]
    options, program = _split(words[1:])
    if program and (program[0].endswith(".py") or program[0] == "-m"):
        program = [sys.executable, *program]
    if not any(option.split("=")[0] == "--preload" for option in options):
        options.append(f"--preload={nccl_path()}")
    return [tool_path(), "run", *options, "--", *program]


#: Options of `cinch run` that take a value in the next word.
WITH_VALUE = {"-n", "--ranks", "--hosts", "--ssh", "--remote-cinch", "--env", "--transport", "--grace"}


def _split(words: List[str]) -> Tuple[List[str], List[str]]:
    """Returns the options of `cinch run` and the program behind them."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("--", "-m"):
        at += 2 if words[at] in WITH_VALUE else 1
    program = words[at:]
    return words[:at], program[1:] if program[:1] == ["--"] else program


def tool() -> None:
    """Becomes the tool, with the words of the command line unchanged: the program `cinch` of the package."""
    _become(lambda words: [tool_path(), *words], sys.argv[1:])


def main(words: Optional[List[str]] = None) -> None:
    """Becomes the tool, with Python programs as `command` starts them: `python -m cinch`."""
    _become(command, sys.argv[1:] if words is None else words)


def _become(arguments_of: Callable[[List[str]], List[str]], words: List[str]) -> None:
    try:
        arguments = arguments_of(words)
    except FileNotFoundError as error:
        raise SystemExit(f"cinch: {error}") from None
    os.execv(arguments[0], arguments)
