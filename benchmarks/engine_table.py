"""Runs `twinjet bench` and keeps what it measured under benchmarks/results, with medians.

`others_cores` in the result says whether the machine was quiet: what other programs took of it meanwhile.

Arguments that are not its own go to the command:

    python -m benchmarks.engine_table --json FILE [MODEL] [-p N,...] [-g N,...] [-c N,...] [-r N]
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time

from benchmarks.provenance import others_cpu_s, report, write_json


def with_median(record: dict) -> dict:
    """A record of the command with the middle and the ends of its repetitions."""
    samples = record["samples_tokens_per_s"]
    spread = {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
    return {**record, "tokens_per_s_spread": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", required=True, help="write the results here, - for standard output")
    own, passed_on = parser.parse_known_args()
    load_average = os.getloadavg()[0]
    command = [sys.executable, "-m", "twinjet", "bench", *passed_on, "--json", "-"]
    began_s, others_s = time.monotonic(), others_cpu_s()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    figures = {
        "command": shlex.join(["twinjet", "bench", *passed_on]),
        "others_cores": round((others_cpu_s() - others_s) / (time.monotonic() - began_s), 3),
        "results": [with_median(record) for record in json.loads(done.stdout)],
    }
    write_json(own.json, report("engine_table", load_average, figures))


if __name__ == "__main__":
    main()
