# Every target sets up what it needs in .venv; CI and people call the same ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
PEER_NAMES := torchrec ray mxnet openembedding paddle tensorflow redis
PYTHONS ?= $(foreach version,3.11 3.12 3.13,$(firstword $(wildcard $(HOME)/.pyenv/versions/$(version).*/bin/python) python$(version)))
# for peers that know no newer one
PYTHON38 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.8.*/bin/python) python3.8)
# threads of torch x processes <= cores: the processes of one job share the machine
export OMP_NUM_THREADS ?= 1
# images of containers set it; every worker of pytest would compile all tests again, and every process all of embershard
unexport PYTHONDONTWRITEBYTECODE
# the machine with the GPU: a Python that has torch (GPU_PYTHON=python3; else .venv), its version, and what it has already
GPU_PYTHON ?=
GPU_PYTHON_VERSION ?= 3.12
GPU_PLATFORMS ?= $(foreach name,_2_28 _2_27 _2_17 2014 1,manylinux$(name)_x86_64)
GPU_HAS ?= torch numpy

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(MAKEFILE_LIST))

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: $(VENV)/.ready  ## create .venv with every version pinned

# One make at a time makes the environment: two that install into it leave a broken one. The other waits, and finds it.
LOCKED := $(PYTHON) -c 'import fcntl, subprocess, sys; lock = open(sys.argv[1], "w"); fcntl.flock(lock, fcntl.LOCK_EX); sys.exit(subprocess.call(sys.argv[2:]))' $(VENV).lock

$(VENV)/.ready: pyproject.toml constraints.txt
ifndef HOLDS_LOCK
	@$(LOCKED) $(MAKE) --no-print-directory HOLDS_LOCK=1 $@
else
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "embershard needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/embershard compile
	touch $@
endif

$(VENV)/.ray: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	touch $@

$(VENV)/.compose: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt podman-compose
	touch $@

# s3fs and gcsfs in an environment of their own, which finds the packages of .venv behind them
$(VENV)-objects/.ready: $(VENV)/.ready bench/objects/packages.txt
	$(BIN)/python -m venv --clear $(VENV)-objects
	$(VENV)-objects/bin/python -m pip install --quiet --disable-pip-version-check -r bench/objects/packages.txt
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0], "$(CURDIR)/src", sep="\n")' > $$(echo $(VENV)-objects/lib/python3*/site-packages)/embershard.pth
	touch $@

$(VENV)-emulators/.ready: bench/objects/emulators.txt
	$(PYTHON) -m venv --clear $(VENV)-emulators
	$(VENV)-emulators/bin/python -m pip install --quiet --disable-pip-version-check -r bench/objects/emulators.txt
	touch $@

$(VENV)/.outside: $(VENV)/.ready bench/wrap/packages.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[outside]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r bench/wrap/packages.txt
	touch $@

DOCS := .venv-docs

# Sphinx in an environment of its own, which finds embershard's packages behind its own ones
$(DOCS)/.ready: $(VENV)/.ready docs/requirements.txt
	$(BIN)/python -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(echo $(DOCS)/lib/python3*/site-packages)/embershard.pth
	touch $@

docs: $(DOCS)/.ready  ## the site, in build/docs/index.html
	$(BIN)/python docs/generate.py
	rm -rf build/docs
	$(DOCS)/bin/python -m sphinx -W --keep-going --quiet -b html docs build/docs

bar-docs: docs  ## every code block of README and docs, the tutorial in 15 minutes, links, the site in Chromium (20 minutes)
	$(BIN)/python bench/bar_docs.py $(ARGS)

$(VENV)-data/.ready: bench/data/packages.txt
	$(PYTHON) -m venv $(VENV)-data
	$(VENV)-data/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r bench/data/packages.txt
	touch $@

demo: setup  ## two shards and two workers train DLRM on a click stream
	$(BIN)/embershard train examples/demo.yaml

test: setup  ## everything that CI runs, and the seconds that each part took
	@for part in "lint unit" integration; do \
		start=$$(date +%s); \
		$(MAKE) --no-print-directory -j2 $$part || exit; \
		times="$$times$$part $$(($$(date +%s) - start)) s, "; \
	done; \
	echo "$${times%, }"

test-pythons:  ## make test with each of PYTHONS (3.11 to 3.13) that is installed, in .venv-<version>
	@for python in $(PYTHONS); do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])') || continue; \
		$(MAKE) PYTHON=$$python VENV=.venv-$$version test || exit; \
	done

unit: setup  ## the tests that start no processes
	$(BIN)/python -m pytest -m 'not integration and not long' -n 3 --dist loadfile --no-loadscope-reorder

integration: setup  ## the tests that start processes
	$(BIN)/python -m pytest -m 'integration and not long' -n 3 --dist loadfile --no-loadscope-reorder $$(grep -rl mark.integration tests --include='test_*.py')

test-long: setup  ## the tests that take minutes each
	$(BIN)/python -m pytest -m long

test-ray: $(VENV)/.ray  ## the tests of Ray, those with a cluster of two nodes too (3 minutes)
	$(BIN)/python -m pytest tests/deploy/test_ray.py

fuzz: setup  ## a million hostile frames and payloads for their readers (a quarter of an hour)
	EMBERSHARD_FUZZ_FRAMES=1000000 $(BIN)/python -m pytest tests/fuzz --timeout 3600

coverage: setup  ## line and branch coverage of all tests, by folder
	$(BIN)/coverage erase
	$(BIN)/python -m pytest -m 'not integration' -n 2 --dist loadfile --cov --cov-report=
	$(BIN)/python -m pytest -m integration --cov --cov-append --cov-report=
	$(BIN)/python bench/coverage_by_folder.py

bench-mutants: setup  ## whether two states of the code find the same 100 small mistakes (ARGS="--before DIR COVERAGE --after DIR COVERAGE")
	$(BIN)/python bench/mutants.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

proto: setup  ## generate the code of proto/embershard.proto
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src embershard/proto/embershard.proto

build: setup  ## sdist and wheel in dist/, with kernels for the Python of each environment here (.venv, .venv-3.*)
	rm -rf build/lib build/bdist.* proto/compiled/kernels
	$(BIN)/python -m build --sdist
	for venv in $(sort $(VENV) $(wildcard .venv-3.*)); do $$venv/bin/embershard compile --for-wheel || exit; done
	$(BIN)/python -m build --wheel
	rm -rf build/lib build/bdist.* proto/compiled/kernels

bar-ncf: setup  ## quality on MovieLens-1M against the published numbers
	$(BIN)/python bench/bar_ncf.py

bar-ctr: setup  ## quality on Frappe and Adult against plain torch, beside the published numbers (about an hour, in as many goes as it takes; ARGS=--all: three seeds of every job)
	$(BIN)/python bench/bar_ctr.py $(ARGS)

bar-defaults: setup  ## examples without their first values: the default serves as well (ARGS=frappe-fm: one of them)
	$(BIN)/python bench/bar_defaults.py $(ARGS)

bar-models: setup  ## SASRec, SimpleX, two towers and MMoE against published figures and plain torch (each under an hour, in as many goes as it takes; ARGS="--only sasrec --seeds 3")
	$(BIN)/python bench/bar_models.py $(ARGS)

bar-models-long: setup  ## the same with longer runs and higher bars (hours)
	$(BIN)/python bench/bar_models.py --long $(ARGS)

bar-modes: setup  ## the quality bars in every mode: staleness 0, 4, off; dense on shards and by DDP (three hours, in as many goes as it takes; ARGS=--quick)
	$(BIN)/python bench/bar_modes.py $(ARGS)

bar-equal: setup  ## bit-identical over shards and transports; equal to torch in one process
	$(BIN)/python bench/bar_equal.py

bar-sync: setup  ## synchronous workers equal one process on the joint batch
	$(BIN)/python bench/bar_sync.py

bar-wrap: setup $(VENV)/.outside  ## other people's models, in their own loops, against plain torch (12 minutes)
	$(BIN)/python bench/bar_wrap.py

bar-jobs: setup  ## a model, reader, loss, metrics and callback of a user's own through every command (6 minutes)
	$(BIN)/python bench/bar_jobs.py $(ARGS)

bar-data: setup $(VENV)-data/.ready  ## tables of other programs, trained at the first try or refused with the right line; readers against pyarrow (10 minutes; ARGS=--look)
	$(BIN)/python bench/bar_data.py --writer $(VENV)-data/bin/python $(ARGS)

bar-tables: setup  ## a hundred small tables in one model against torch's sparse gradients, and what a table costs a step (2 minutes)
	$(BIN)/python bench/many_tables.py $(ARGS)

bar-kernels: setup  ## pull and push against torch's index ops and memcpy
	$(BIN)/python bench/kernels.py

bar-rows: setup  ## 100 million rows on one machine, at their first touch and touched (16 GiB; ARGS="--rows 10000000")
	$(BIN)/python bench/rows.py $(ARGS)

bench-growth: setup  ## worst pull while a table grows to 20 million rows: at most 8 times the median (10 GiB)
	$(BIN)/python bench/growth.py $(ARGS)

bench-lookup: setup  ## forward and backward of a lookup against torch's own
	$(BIN)/python bench/lookup.py

bench-linear: setup  ## a linear layer by oneDNN against torch's own
	$(BIN)/python bench/linear.py

bench-prefetch: setup  ## what train.prefetch costs in quality and buys in speed, over seeds (45 runs of seconds each)
	$(BIN)/python bench/prefetch_quality.py $(ARGS)

bench-cache: setup  ## what the cache of hot rows finds, against others of its size
	$(BIN)/python bench/row_cache.py

bench-loader: setup  ## a batch made here, by the loader process, by the DataLoader of torch
	$(BIN)/python bench/loader.py

bar-snapshot: setup  ## snapshots while training, restored onto other shards, killed at random moments (10 minutes)
	$(BIN)/python bench/bar_snapshot.py

bar-way: setup  ## files entered and requests sent by a forward, and by a backward and step (ARGS=--verbose)
	$(BIN)/python bench/way.py $(ARGS)

bench-copy-on-write: setup  ## what a snapshot costs a shard, by copies of rows and by fork
	$(BIN)/python bench/copy_on_write.py

bar-workers: setup  ## a worker that is killed, in every mode, and one that is unresponsive (20 minutes)
	$(BIN)/python bench/bar_workers.py

bench-startup: setup  ## from a command to a serving shard, an imported worker, a job's first step, all warm (ARGS="--tree DIR --tree DIR")
	$(BIN)/python bench/startup.py $(ARGS)

bar-cold: setup  ## the first start from a clean checkout, from a new wheel, and warm: two shards and a worker (5 minutes)
	$(BIN)/python bench/bar_cold.py $(ARGS)

bench-push-then-pull: setup  ## what it could save to send a push and the next pull together (1 minute)
	$(BIN)/python bench/push_then_pull.py

bench-wire: setup  ## what a frame costs, and a checksum of its buffers
	$(BIN)/python bench/wire.py

bar-scale: setup  ## how cost grows with rows, shards, workers and batch (5 minutes, 16 GiB)
	$(BIN)/python bench/scale.py $(ARGS)

bar-link: setup  ## a link of 1 Gbit/s and of 100 Mbit/s is kept busy (root, iproute2)
	$(BIN)/python bench/link.py

bar-tls: setup  ## what TLS costs over TCP, and 100 rotations of certificates under load (root, iproute2)
	$(BIN)/python bench/bar_tls.py

bar-bandwidth: setup  ## codecs over 100 Mbit/s and without limit (10 minutes; ARGS=--netns: a real link beside it)
	$(BIN)/python bench/bar_bandwidth.py $(ARGS)

bar-leak: setup  ## 10^5 steps with memory flat on both sides (up to 10 minutes)
	$(BIN)/python bench/leak.py

bar-serve: setup  ## two exported rankers over HTTP: the trainer's scores, and 50 requests a second of 100 candidates (4 minutes)
	$(BIN)/python bench/bar_serve.py $(ARGS)

bar-panel: setup  ## the panel in Chromium: sample to pixel, no stranger asked, a flat heap, 100 shards (5 minutes; apt-get install chromium)
	$(BIN)/python bench/bar_panel.py $(ARGS)

bench-sampler: setup  ## what the panel's sampler costs it and two shards (1 minute)
	$(BIN)/python bench/sampler.py $(ARGS)

bar-codecs: setup  ## what codecs cost and save: speed against copying, bytes of real messages
	$(BIN)/python bench/codecs.py

bar-codec-quality: setup  ## models whose gradients and rows travel compressed are as good (an hour; ARGS=--quick)
	$(BIN)/python bench/bar_codec_quality.py $(ARGS)

bench-ages: setup  ## what delay does to an optimizer's learning rate, with and without the ages of rows
	$(BIN)/python bench/ages.py

bar-metrics: setup  ## Prometheus scrapes a live job: every query has an answer, and training does not notice (15 minutes; apt-get install prometheus; ARGS="--only queries")
	$(BIN)/python bench/bar_metrics.py $(ARGS)

bench-trace: setup  ## what traces cost a step: one in so many against none (10 minutes)
	$(BIN)/python bench/trace.py $(ARGS)

bar-torn: setup  ## a shard's log cut at every byte of its last records, and 10^5 flipped bits (3 minutes)
	$(BIN)/python bench/bar_torn.py $(ARGS)

bar-kill: setup  ## kill -9 of shards with a log, a thousand times: no acknowledged push lost or doubled (half an hour; ARGS="--kills 50")
	$(BIN)/python bench/bar_kill.py $(ARGS)

bar-recover: setup  ## a shard killed at 20 random moments, with a log and without: what is lost, and how long it takes (10 minutes)
	$(BIN)/python bench/bar_recover.py $(ARGS)

bar-slurm: setup  ## a job on four Slurm nodes: the bits of this machine, a lost shard, worker and nodes (6 minutes; root; apt-get install slurm-wlm munge iproute2)
	$(BIN)/python bench/bar_slurm.py $(ARGS)

bar-ray: $(VENV)/.ray  ## a job on four Ray nodes: the bits of this machine, a lost shard, worker and node, Ctrl-C (5 minutes)
	$(BIN)/python bench/bar_ray.py $(ARGS)

bar-containers: $(VENV)/.compose  ## images are built, and run a job in four containers with TLS: the bits of this machine, a lost shard and worker (15 minutes, 8 GB; root; the packages of apt that it names; ARGS=--fresh: build all anew)
	$(BIN)/python bench/bar_containers.py $(ARGS)

bar-objects: $(VENV)-objects/.ready $(VENV)-emulators/.ready  ## checkpoints and data on s3:// and gs:// against emulators: bits, a lost shard, two jobs in one folder, wrong credentials, a slow and a broken link (10 minutes)
	$(VENV)-objects/bin/python bench/bar_objects.py $(ARGS)

bar-install: setup  ## both installs in empty environments: sizes, times, a shard without torch (3 minutes, 3 GB)
	$(BIN)/python bench/bar_install.py

check-manifests: setup  ## what `embershard manifests` prints, by the engines' own validators (systemd-analyze is not skipped)
	$(BIN)/python bench/check_manifests.py

bar-secure: setup  ## attack a shard: every method, role and transport, 100,000 hostile handshakes, paths and URLs, its audit log, without TLS and with it (10 minutes; ARGS="--handshakes 2000")
	$(BIN)/python bench/bar_secure.py $(ARGS)

bar-log: setup  ## what a shard's log costs a step: memory against the commit before it, log and fsync against memory (15 minutes, 12 GB; ARGS=--priority)
	$(BIN)/python bench/bar_log.py $(ARGS)

bar-recovery: setup  ## from kill -9 to serving again at 0.1, 1 and 5 GB of rows, out of the page cache (ARGS="--gb 0.1 1"; 14 GiB)
	$(BIN)/python bench/bar_recovery.py $(ARGS)

bar-undisturbed: setup  ## a training job whose shards are killed ten times learns what an undisturbed one does, one worker to the same bits (10 minutes; ARGS="--runs 3")
	$(BIN)/python bench/bar_undisturbed.py $(ARGS)

bar-soak: setup  ## half an hour of kills, stops, cuts, full disks and losses of power: nothing is lost, nothing grows (ARGS="--minutes 5"; root)
	$(BIN)/python bench/bar_soak.py $(ARGS)

bar-simulation: setup  ## 10^4 simulated jobs whose shards, disks, links and workers fail; planted mutants (an hour, in as many goes as it takes; ARGS="--seeds 500")
	$(BIN)/python bench/bar_simulation.py $(ARGS)

bench-restore: setup  ## what restoring rows costs a table, against applying gradients to as many
	$(BIN)/python bench/restore.py $(ARGS)

bar-increment: setup  ## an increment of a snapshot: its bytes, what it takes of training, what its bitmap adds to a push (half an hour, 4 GiB)
	$(BIN)/python bench/bar_increment.py $(ARGS)

bar-conservation: setup  ## no gradient lost or applied twice, under lost replies, repeats and kills (2 minutes)
	$(BIN)/python bench/bar_conservation.py

bench-cluster: setup  ## what bar-scale measured, carried by simulation to 1,000 shards and 10,000 workers (a quarter of an hour)
	$(BIN)/python bench/cluster/run.py $(ARGS)

bar-floor: setup  ## a pull and push of 13,677 rows against the least that can do this work on the same machine (3 minutes, 12 GB)
	$(BIN)/python bench/bar_floor.py $(ARGS)

bar-latency: setup  ## small pulls: one client, up to 64 at once, and a small step beside torch (2 minutes; ARGS="--tree DIR --tree DIR")
	$(BIN)/python bench/bar_latency.py $(ARGS)

bar-cluster: setup  ## that simulation against real shards and workers, 1 to 8 of each: within 25 % (10 minutes; ARGS="--work train")
	$(BIN)/python bench/cluster/bar_cluster.py $(ARGS)

bar-peers: setup  ## what a user would pick instead, beside ours in one run (an hour with all peers)
	$(BIN)/python bench/peers.py $(ARGS)

gpu: $(if $(GPU_PYTHON),,setup)  ## what only a GPU shows, in under 9 minutes (GPU_PYTHON=python3; ARGS='--wheels .wheels')
	$(or $(GPU_PYTHON),$(BIN)/python) bench/gpu/run.py --device cuda $(ARGS)

gpu-rehearsal: setup  ## the lines of make gpu on the CPU
	$(BIN)/python bench/gpu/run.py --device cpu --output runs/gpu-rehearsal $(ARGS)

gpu-wheels: setup  ## fetch what GPU_HAS lacks for make gpu on a machine without network, into .wheels (ARGS='--limit-mib 60')
	$(BIN)/python bench/gpu/wheels.py --python $(GPU_PYTHON_VERSION) $(GPU_PLATFORMS:%=--platform %) --has $(GPU_HAS) $(ARGS)

peers-env:  ## the environments of the peers that need more than torch, in .venv-peers (8 GB)
	-$(MAKE) --keep-going $(patsubst %,$(PEERS)/%/.ready,$(PEER_NAMES))

$(PEERS)/%/.ready: bench/peer_environments/%.txt
	$(if $(filter mxnet openembedding,$*),$(PYTHON38),$(PYTHON)) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	test ! -e $(basename $<).last.txt || $(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation -r $(basename $<).last.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-3.* $(DOCS) $(PEERS) build dist runs
