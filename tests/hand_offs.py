"""What a reader of one training step meets: functions, their lines and their files, on rank 0 of threads.

python -m tests.hand_offs [--files]
"""

import sys
from inspect import CO_OPTIMIZED
from pathlib import Path

import mpitrain
from mpitrain.config import with_settings
from mpitrain.transport.threads import run_ranks

PACKAGE = Path(mpitrain.__file__).parent
LAYOUTS = {
    "dp 2": [],
    "tp 2": ["layout.tp=2"],
    "pp 2": ["layout.pp=2"],
    "ZeRO 3": ["replication.zero=3"],
}


def functions_of(function, *arguments):
    """Call a function; return its result, and (file, first line, lines) of each function of the package in the call."""
    codes = set()
    sys.setprofile(lambda frame, event, argument: event == "call" and codes.add(frame.f_code))
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
    entered = set()
    for code in codes:
        path = Path(code.co_filename)
        if code.co_flags & CO_OPTIMIZED and path.is_relative_to(PACKAGE):
            first, lines = code.co_firstlineno, [line for *_, line in code.co_lines() if line]
            entered.add((path.relative_to(PACKAGE).as_posix(), first, max(lines) - first + 1))
    return result, entered


def profiles(transport, config):
    """Return the functions of `build` and those of the third step."""
    job, build = functions_of(mpitrain.build, transport, config)
    for step in range(2):
        job.trainer.step(step, *job.trainer.replica.batch(job.source, step))
    batch = job.trainer.replica.batch(job.source, 2)
    return build, functions_of(job.trainer.step, 2, *batch)[1]


def main():
    print(f"{'':16}{'functions':>10}{'lines':>8}{'files':>7}")
    for layout, settings in LAYOUTS.items():
        config = mpitrain.parse(with_settings({}, ["device.kind=cpu", *settings]))
        for part, entered in zip(
            ("build", "third step"), run_ranks(2, profiles, config)[0], strict=True
        ):
            files = {file for file, *_ in entered}
            lines = sum(count for *_, count in entered)
            print(f"{part + ', ' + layout:20}{len(entered):6}{lines:8}{len(files):7}")
            if "--files" in sys.argv:
                print(*(f"    {file}" for file in sorted(files)), sep="\n")


if __name__ == "__main__":
    main()
