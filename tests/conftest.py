"""What all tests need."""

import gc
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as make does; before torch is imported

from harness import warm_start

# A shell that runs the tests in the background has them, and every process they start, ignore Ctrl-C; nohup has them
# ignore a hangup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

warm_start.install()
gc.disable()  # until the tests are collected: what is imported stays


def pytest_sessionstart(session):
    """Load torch and the fixtures where tests run; a process that hands them to workers of xdist needs neither."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        session.config.pluginmanager.import_plugin("harness.fixtures")


def pytest_runtest_setup(item):
    """A test about starting starts interpreters; for others, the fixtures of modules included, processes start warm."""
    warm_start.WarmPopen.cold = item.get_closest_marker("cold_start") is not None


# files of ten seconds and more begin first: at the end, one core would work alone
LONGEST = {
    *("test_kill", "test_train_command", "test_strategies", "test_recover", "test_resume", "test_scaling"),
    *("test_elastic", "test_slurm", "test_supervisor", "test_dash", "test_rpc_transport"),
    *("test_export", "test_simulation", "test_elastic_training", "test_kinds_of_models", "test_app", "test_checkpoint"),
    *("test_prefetch", "test_top", "test_stream", "test_compare_report", "test_trainer", "test_serving"),
}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish():
    """Garbage is searched for in what tests make, and not in the modules: a search of them takes half a second."""
    gc.freeze()
    gc.set_threshold(5000)  # a search of all that tests have left takes a tenth of a second
    gc.enable()


def pytest_sessionfinish():
    """Nothing outlives the tests, however they end."""
    warm_start.kill_all()


def pytest_addoption(parser):
    parser.addoption("--gpu-rehearsal", action="store_true", help="run the tests marked cuda on the CPU")
