"""Part of the second GPU job: NVIDIA's sanitizer on the cases of the kernels; a refusal by the machine is a result.

python3 jobs/gpu/sanitizer.py DEVICE
"""

import shutil
import subprocess
import sys
import time

from result import emit, micro

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
GROUPS = (
    "linears",
    "norms",
    "steps",
    "totals",
    "conversions",
    "losses",
    "embeddings",
    "tensor_attentions",
    "tensor",
)
TEST = "tests/gpu/test_kernels.py::test_a_kernel_computes_on_the_gpu_what_the_reference_says"
SECONDS = 60
FOUND = 9  # what the sanitizer then ends with


def main(kind: str) -> None:
    """A result for each tool and group of cases."""
    if kind != "cuda" or not shutil.which("compute-sanitizer"):
        emit(
            f"compute-sanitizer: skipped, {'it is not installed' if kind == 'cuda' else 'there is no GPU here'}"
        )
        return
    for tool in TOOLS:
        for group in GROUPS:
            start = time.perf_counter()
            words = [
                "compute-sanitizer",
                "--tool",
                tool,
                "--error-exitcode",
                str(FOUND),
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                f"{TEST}[{group}]",
            ]
            try:
                done = subprocess.run(
                    words,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=SECONDS,
                )
            except subprocess.TimeoutExpired:
                emit(f"{tool} on {group}: not done after {SECONDS} s")
                continue
            print(done.stdout, flush=True)
            refusal = next(
                (
                    line
                    for line in done.stdout.splitlines()
                    if "not supported" in line or "Unable to" in line
                ),
                "",
            )
            if refusal:
                emit(f"{tool}: refused: {refusal.strip('= ')[:100]}")
                break
            errors = sum("=========     at " in line for line in done.stdout.splitlines())
            emit(
                f"{tool} on {group}: {'nothing found' if done.returncode == 0 else f'exit code {done.returncode}'}"
                f"{f', {errors} errors' if errors else ''}",
                micro(time.perf_counter() - start),
                ok=done.returncode == 0,
            )


if __name__ == "__main__":
    main(sys.argv[1])
