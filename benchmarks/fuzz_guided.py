"""Case files that are fuzzed where coverage leads, with atheris (libFuzzer): `pip install atheris` on Python 3.11.

    python benchmarks/fuzz_guided.py --inputs 20000 --seed 1 --output results/fuzz/guided

Begins with the bundled cases, and keeps under --output what reached new code. libFuzzer stops at the first input that
gives a traceback, takes over 5 s or 4 GiB, and writes it there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["attncheck.reading", "ruamel.yaml"]):
    import fuzz_mutations
    import fuzz_targets


def main(arguments: Sequence[str] | None = None) -> None:
    """Run libFuzzer, which ends the process itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("results/fuzz/guided"))
    options = parser.parse_args(arguments)
    corpus: Path = options.output / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(dict.fromkeys(fuzz_mutations.case_texts())):
        (corpus / f"bundled-{number:03d}.yaml").write_bytes(text)
    limits = [f"-runs={options.inputs}", f"-seed={options.seed}", "-timeout=5", "-rss_limit_mb=4096", "-max_len=8192"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={options.output}/", str(corpus)], _taker())
    atheris.Fuzz()


def _taker() -> Callable[[bytes], None]:
    folder = Path(tempfile.mkdtemp(prefix="attncheck-fuzz-"))

    def take(content: bytes) -> None:
        (folder / "case.yaml").write_bytes(content)
        fuzz_targets.TARGETS["loader"].take(folder)

    return take


if __name__ == "__main__":
    main()
