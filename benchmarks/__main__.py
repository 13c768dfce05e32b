"""``python -m benchmarks [names...] [--pairs N] [--without SIDE] [--json FILE] [--record]``."""

import argparse
import importlib
import json
from pathlib import Path

from benchmarks import records
from benchmarks.measure import Bench, machine, scratch

NAMES = (
    *(
        "report",
        "sustained",
        "soak",
        "loggers",
        "end",
        "start_local",
        "start_script",
        "start_ray",
        "warm_trainer",
        "memory",
        "steps",
        "lightning",
        "scale",
        "ranks",
    ),
    *("checkpoint_local", "checkpoint_async", "commit", "s3", "upload_memory"),
    *("recovery", "lost_node", "noticed", "hang_cost"),
    *("transformers_steps", "accelerate_steps", "fabric_steps", "horovod_steps", "tensorflow_steps", "jax_steps"),
    *("gbdt", "ingest", "loader"),
    *("tune", "page"),
)


def main() -> None:
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES}
    listed = "\n".join(f"  {name:16} {modules[name].__doc__.splitlines()[0]}" for name in NAMES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures drivetrain and its peers in pairs of runs.",
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="the benchmarks to run (default: all)")
    parser.add_argument("--pairs", type=int, help="how many times each side runs (each benchmark has a default)")
    parser.add_argument(
        "--without", action="append", default=[], metavar="SIDE", help="leave out a side, such as 'Ray Train'"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the file for all values")
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the results in benchmarks/records.json, with which later ones compare",
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; expected one of {', '.join(NAMES)}")

    found = {"machine": machine(), "benchmarks": {}}
    print(json.dumps(found["machine"]))
    for name in options.names or NAMES:
        module = modules[name]
        print(f"\n== {name}: {module.__doc__.splitlines()[0]}", flush=True)
        with scratch() as directory:
            bench = Bench(directory, options.pairs or module.PAIRS, options.without)
            quantities = []
            for quantity in module.measure(bench):
                quantities.append(quantity)
                print("\n" + "\n".join(quantity.lines(records.previous(name))), flush=True)
        if options.record:
            results = {key: value for quantity in quantities for key, value in quantity.results().items()}
            records.record(name, found["machine"], results)
        for command, side in bench.commands.items():
            print(f"\n{side}:\n  {command}")
        for failure in bench.failures:
            print(f"\nFAILED {failure}", flush=True)
        found["benchmarks"][name] = {
            "pairs": bench.pairs,
            "commands": bench.commands,
            "quantities": [quantity.as_dict() for quantity in quantities],
            "failures": bench.failures,
        }
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
