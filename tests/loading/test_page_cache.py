"""Processes that read one file of weights hold it in memory once."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

_READER = """
import sys
from pathlib import Path
from octavo.loading.mapping import MappedFile
file = MappedFile(Path(sys.argv[1]))
total = int(file.data[::4096].sum())
print(total, flush=True)
sys.stdin.read()
"""
_BYTES = 32 << 20


def mapped(pid: int, path: Path) -> dict[str, int]:
    """Bytes of a process's mappings of a file, by kind."""
    sums: dict[str, int] = {}
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            ours = line.endswith(str(path))
        elif ours and rest.strip().endswith("kB"):
            sums[word[:-1]] = sums.get(word[:-1], 0) + int(rest.split()[0]) * 1024
    return sums


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mappings")
def test_two_readers_share_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\1" * _BYTES)
    with ExitStack() as readers:
        processes = []
        for _ in range(2):
            process = readers.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _READER, str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            assert process.stdout is not None
            assert process.stdout.readline().strip() == str(_BYTES // 4096)
            processes.append(process)
        for process in processes:
            sums = mapped(process.pid, path)
            assert sums["Rss"] == _BYTES
            assert sums["Private_Dirty"] == 0
            # Half of every page is the other's.
            assert sums["Pss"] <= _BYTES // 2 + (1 << 20)
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
