"""Runs a Python command as a processor with AVX2 and nothing newer would: no AVX-512, no VNNI.

    python benchmarks/avx2.py -m tcompress bench MODEL --against DENSE --runtime torch,onnx-int8 \\
        --batch 32 --length 32 --threads 2

Libraries choose their kernels by what `cpuid` says. Under gdb every such instruction of PyTorch and
ONNX Runtime is answered here; all others run as they are, so that times are those of the kernels
that are chosen. Needs gdb and objdump (binutils). The same file is what gdb runs. Names of
instruction sets in what the command prints are those of the processor itself.
"""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = ("onnxruntime_pybind11_state", "libtorch_cpu.so")
SETTINGS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
# Of leaf 7, registers ebx, ecx, edx: AVX-512 in all its parts, VNNI, AMX.
NEWER = ((16, 17, 21, 26, 27, 28, 30, 31), (1, 6, 8, 9, 10, 11, 12, 14), (2, 3, 8, 22, 23, 24, 25))
# push rbx; mov eax, edi; mov ecx, esi; mov r8, rdx; cpuid; store all four at r8; pop rbx; ret
_CPUID = bytes.fromhex("53 89f8 89f1 4989d0 0fa2 418900 41895804 41894808 4189500c 5b c3")


def cpuid(leaf, part):
    """What the instruction says, without what is newer than AVX2: eax, ebx, ecx, edx."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_CPUID)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    said = (ctypes.c_uint32 * 4)()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    kind(address)(leaf, part, ctypes.addressof(said))
    if leaf != 7:
        return tuple(said)
    if part:
        return 0, 0, 0, 0
    masked = (
        value & ~sum(1 << bit for bit in bits) for value, bits in zip(said[1:], NEWER, strict=True)
    )
    return 0, *masked


def offsets(file):
    """Where a library has the instruction; kept, since a large one takes a minute to read."""
    facts = file.stat()
    kept = Path(tempfile.gettempdir()) / f"cpuid-{file.name}-{facts.st_size}-{facts.st_mtime_ns}"
    if not kept.is_file():
        command = ["objdump", "-d", "--no-show-raw-insn", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lines:
            found = [line.split(":")[0].strip() for line in lines.stdout if "\tcpuid" in line]
        kept.write_text(json.dumps([int(item, 16) for item in found]))
    return json.loads(kept.read_text())


def watch():
    """Answers for the processor, in gdb."""
    import gdb

    known = {}
    done = set()

    class Answer(gdb.Breakpoint):
        def stop(self):
            where = tuple(
                int(gdb.parse_and_eval(f"(unsigned int)${name}")) for name in ("eax", "ecx")
            )
            if where not in known:
                known[where] = cpuid(*where)
            for name, value in zip(("rax", "rbx", "rcx", "rdx"), known[where], strict=True):
                gdb.execute(f"set ${name}={value}")
            gdb.execute("set $pc=$pc+2")
            return False

    def loaded(event):
        name = event.new_objfile.filename or ""
        if name in done or not any(file in name for file in FILES):
            return
        done.add(name)
        maps = Path(f"/proc/{gdb.selected_inferior().pid}/maps").read_text().splitlines()
        start = min(int(line.split("-")[0], 16) for line in maps if Path(name).name in line)
        for offset in offsets(Path(name)):
            Answer(f"*{start + offset:#x}", internal=True).silent = True

    gdb.events.new_objfile.connect(loaded)
    for setting in ("pagination off", "confirm off", "breakpoint pending on"):
        gdb.execute(f"set {setting}")
    gdb.execute("handle SIGSEGV nostop noprint pass")
    gdb.execute("run")
    code = gdb.parse_and_eval("$_exitcode")  # nothing, where a signal ended it
    gdb.execute(f"quit {1 if code.type.code == gdb.TYPE_CODE_VOID else int(code)}")


def main():
    """Runs gdb on the command."""
    missing = [name for name in ("gdb", "objdump") if shutil.which(name) is None]
    if missing or len(sys.argv) < 2:
        sys.exit(f"not installed: {missing}" if missing else __doc__)
    command = ["gdb", "-batch", "-nx", "-x", __file__, "--args", sys.executable, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env={**os.environ, **SETTINGS}, check=False).returncode)


if __name__ == "__main__":
    if "gdb" in sys.modules:
        watch()
    else:
        main()
