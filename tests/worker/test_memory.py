import subprocess
import sys

import pytest

# blocks larger than glibc's own threshold, freed and taken again
SCRIPT = """
import resource, torch, embershard as es
kept = {keep} and es.keep_freed_memory()
def step(): return [torch.ones(2**20) for _ in range(8)]
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> tuple[str, int]:
    """Whether malloc took the settings, and page faults of ten steps."""
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(keep=keep)], capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.integration
def test_memory_that_was_kept_costs_no_page_faults():
    kept, count = faults(keep=True)
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    assert count < faults(keep=False)[1] / 10
