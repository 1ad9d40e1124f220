"""Makes a PyTorch wheel for CUDA usable on the CPU without gigabytes of CUDA libraries.

    python cpu_torch.py FOLDER

FOLDER is where `pip install --no-deps --target` has put PyTorch. Its libraries are linked against CUDA's, of which a
CPU run calls nothing: libraries without content take their places. What a loader resolves before the first call has a
name there, and ends the process if it is ever called.
"""

import re
import subprocess
import sys
from pathlib import Path

# By what they are loaded as; the CUDA runtime and CUPTI, which are small, are the real ones.
EMPTY = [
    "libcusparse.so.12",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libcurand.so.10",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
]
# The one that has all names.
NAMED = "libnvshmem_host.so.3"
OURS = re.compile(r"(nvshmem|nccl|cublas|cusparse|cufft|cuFile|curand|cudnn)\w*")


def build(path, source):
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{path.name}", "-o", str(path)]
    subprocess.run(command, input=source.encode(), check=True)


def main(folder):
    names = set()
    for library in (folder / "torch/lib").glob("*.so"):
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
        for line in listed.stdout.splitlines():
            name = line.split()[-1].split("@")[0]
            if OURS.fullmatch(name):
                names.add(name)
    # Among the places where PyTorch's libraries look.
    place = folder / "nvidia/cu13/lib"
    for name in EMPTY:
        build(place / name, "")
    calls = "".join(f"void {name}(void) {{ abort(); }}\n" for name in sorted(names))
    build(place / NAMED, f"void abort(void);\n{calls}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
