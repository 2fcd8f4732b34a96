"""Write the results of `bash scripts/engines --long` into docs/engines.json and the tables of docs/engines.md.

Run it in the environment of the tests: python docs/engines.py results.xml flower --commit 1a2b3c [--note "..."]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

FOUND, PAGE = (Path(__file__).with_suffix(ending) for ending in (".json", ".md"))
BEGIN = "<!-- made by docs/engines.py -->\n"
END = "<!-- end -->\n"
PACKAGES = ("descant", "torch", "numpy", "safetensors", "flwr", "ray")


def versions() -> dict[str, str]:
    """Return the versions of the packages that take part, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if "flwr" in found:
        from descant.deployment.nginx_proxy import find_nginx

        output = subprocess.run([find_nginx(), "-v"], capture_output=True, text=True, check=True).stderr
        found["nginx"] = output.strip().rpartition("/")[2]
    return found


def outcomes(report: Path) -> list[dict[str, Any]]:
    """Return every test with its outcome and its seconds."""
    tests = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        tests.append({"test": name, "outcome": bad[0] if bad else "passed", "seconds": float(case.get("time", 0))})
    return sorted(tests, key=lambda one: str(one["test"]))


def table(engine: str, found: Mapping[str, Any]) -> str:
    tests = found["tests"]
    made = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    passed = sum(one["outcome"] == "passed" for one in tests)
    lines = [f"### {engine}: {passed} of {len(tests)} passed, {found['date']}, commit {found['commit']}", ""]
    lines += [f"{made}; {found['machine']}, {found['cores']} cores. {found['note']}".strip(), ""]
    lines += ["| test | outcome | seconds |", "|---|---|---:|"]
    lines += [f"| {re.sub(r'[|]', '/', one['test'])} | {one['outcome']} | {one['seconds']:.0f} |" for one in tests]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("engine", choices=["flower", "ray"])
    parser.add_argument("--note", default="", help="a remark on the machine during the run")
    parser.add_argument("--commit", required=True, help="the commit that was tested")
    given = parser.parse_args()
    kept = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    kept[given.engine] = {
        "commit": given.commit,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "note": given.note,
        "versions": versions(),
        "tests": outcomes(given.report),
    }
    FOUND.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    made = "\n".join(table(engine, found) for engine, found in sorted(kept.items()))
    PAGE.write_text(before + BEGIN + "\n" + made + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
