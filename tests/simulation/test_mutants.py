"""Each planted fault fits the package as it is, and compiles."""

import pytest

from simulation import mutants


@pytest.mark.parametrize("name", mutants.names())
def test_a_mutant_fits_the_package(name):
    for path, source in mutants.changed_sources(name).items():
        assert source != (mutants.ROOT / path).read_text()
        compile(source, path, "exec")


def test_there_are_at_least_twenty():
    assert len(mutants.names()) >= 20
