# Wadi. `make help` lists what there is to make.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

CARGO ?= cargo
# How often tests with random or repeated rounds go round; `make soak` raises it.
WADI_ROUNDS ?= 1
export WADI_ROUNDS
# KEEP=1 leaves the demo's pod up.
KEEP ?=
export KEEP

# Of PyPI, in a place of its own; another version finds other things, and is to be chosen on purpose.
SCHEMATHESIS := 4.32.5
SCHEMATHESIS_HOME := target/schemathesis-$(SCHEMATHESIS)

# The crates whose programs a pod consists of, and the demo.
PROGRAMS := cxl-pool pod-controller vhost-blk-cxl vhost-net-cxl vmm wadi-tests

# What `make install` puts in place. Packagers set DESTDIR.
INSTALLED := wadi-pool pod-controller podctl vhost-net-cxl vhost-blk-cxl vmm
BUILT ?= target/release
DESTDIR ?=
PREFIX ?= /usr
BIN_DIRECTORY = $(DESTDIR)$(PREFIX)/bin
LIBRARY_DIRECTORY = $(DESTDIR)$(PREFIX)/lib/wadi
UNIT_DIRECTORY = $(DESTDIR)$(PREFIX)/lib/systemd/system
DOC_DIRECTORY = $(DESTDIR)$(PREFIX)/share/doc/wadi
# Empty: what is there to configure, the examples show.
CONFIGURATION_DIRECTORY = $(DESTDIR)/etc/wadi
# Where shells look for what completes a command.
BASH_COMPLETIONS = $(DESTDIR)$(PREFIX)/share/bash-completion/completions
ZSH_COMPLETIONS = $(DESTDIR)$(PREFIX)/share/zsh/vendor-completions
FISH_COMPLETIONS = $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
# libvirt looks for hooks here and nowhere else.
HOOK_DIRECTORY = $(DESTDIR)/etc/libvirt/hooks/qemu.d
# So does logrotate.
ROTATION_DIRECTORY = $(DESTDIR)/etc/logrotate.d

SHELL_SCRIPTS := .ci/run tests/run.sh $(wildcard deploy/*.sh deploy/debian/p* deploy/libvirt/wadi guest-images/guest/*.sh tests/packaging/*.sh)

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

# Says so before anything is installed or compiled. rustup's cargo is its user's: root does not find it by itself.
.PHONY: toolchain
toolchain:
	@wanted=$$(sed -n 's/^rust-version = "\(.*\)"$$/\1/p' Cargo.toml); \
	found=$$($(CARGO) --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p') || true; \
	if [ -z "$$found" ]; then \
	  echo "$(CARGO) is not in PATH: Wadi needs Rust $$wanted or newer, such as rustup installs (https://rustup.rs)" >&2; exit 1; \
	elif ! printf '%s\n' "$$wanted" "$$found" | sort --check=quiet --version-sort; then \
	  echo "$(CARGO) is of Rust $$found, and Wadi needs $$wanted or newer: rustup update" >&2; exit 1; \
	fi

.PHONY: setup
setup: setup-test ## install what is missing from Debian's packages for all but benchmarks (needs root if something is)

# Each goal installs what it needs itself, and not what only others do: the tests take a browser, an etcd and more.
.PHONY: setup-build setup-demo setup-test setup-bench
setup-build setup-demo setup-test setup-bench: setup-%: toolchain
	@deploy/setup-debian.sh $*

.PHONY: build
build: setup-build ## build the daemons and tools (release)
	$(CARGO) build --release --bins $(addprefix -p ,$(PROGRAMS))

.PHONY: install
install: ## put programs, systemd units, libvirt's hook and documentation below DESTDIR; run make build first
	@for program in $(INSTALLED); do \
	  [ -x $(BUILT)/$$program ] || { echo "install: $(BUILT)/$$program is not there: run make build first" >&2; exit 1; }; \
	done
	install -d $(BIN_DIRECTORY) $(LIBRARY_DIRECTORY) $(UNIT_DIRECTORY)/wadi-.service.d $(UNIT_DIRECTORY)/wadi-slice@.service.d $(DOC_DIRECTORY)/examples $(DOC_DIRECTORY)/decisions $(HOOK_DIRECTORY) \
	  $(BASH_COMPLETIONS) $(ZSH_COMPLETIONS) $(FISH_COMPLETIONS) $(ROTATION_DIRECTORY) $(CONFIGURATION_DIRECTORY)
	install -m 755 $(addprefix $(BUILT)/,$(INSTALLED)) $(BIN_DIRECTORY)/
	install -m 644 $(BUILT)/deps/libvcpu_shim.so $(LIBRARY_DIRECTORY)/
	$(BUILT)/podctl completion bash >$(BASH_COMPLETIONS)/podctl
	$(BUILT)/podctl completion zsh >$(ZSH_COMPLETIONS)/_podctl
	$(BUILT)/podctl completion fish >$(FISH_COMPLETIONS)/podctl.fish
	install -m 644 deploy/systemd/*.service $(UNIT_DIRECTORY)/
	install -m 644 deploy/systemd/wadi-.service.d/*.conf $(UNIT_DIRECTORY)/wadi-.service.d/
	install -m 644 deploy/systemd/wadi-slice@.service.d/*.conf $(UNIT_DIRECTORY)/wadi-slice@.service.d/
	@# It says where the controller is: whoever has said so does not want to say it again.
	@[ -e $(HOOK_DIRECTORY)/wadi ] || { \
	  sed 's,/usr/bin/,$(PREFIX)/bin/,' deploy/libvirt/wadi >$(HOOK_DIRECTORY)/wadi && chmod 755 $(HOOK_DIRECTORY)/wadi; }
	@# How long logs are kept, somebody may have said already.
	[ -e $(ROTATION_DIRECTORY)/wadi ] || install -m 644 deploy/logrotate/wadi $(ROTATION_DIRECTORY)/
	install -m 644 CHANGELOG.md docs/*.md docs/*.svg docs/openapi.json $(DOC_DIRECTORY)/
	install -m 644 docs/decisions/*.md $(DOC_DIRECTORY)/decisions/
	install -m 644 LICENSE $(DOC_DIRECTORY)/copyright
	install -m 644 deploy/examples/*.toml deploy/prometheus/*.yml deploy/grafana/wadi.json $(DOC_DIRECTORY)/examples/

.PHONY: deb
deb: build ## a Debian package in target/debian
	@deploy/build-deb.sh $(BUILT) target/debian

.PHONY: demo
demo: setup-demo build ## a VM works through a NIC and an SSD of other hosts; KEEP=1 leaves it running
	target/release/wadi-demo

.PHONY: test
test: setup-test ## every test, whole pods with real VMs included (as root)
	@# With the programs that they run. At once: for each of several selections libraries would be built again, with other features.
	$(CARGO) build --workspace --tests
	@$(MAKE) --no-print-directory $(SCHEMATHESIS_HOME)/bin/schemathesis || { [ -z "$$WADI_REQUIRE_SCHEMATHESIS" ] && \
	  echo "schemathesis cannot be had, see above: this time it does not test the API" >&2; }
	tester=$(abspath $(SCHEMATHESIS_HOME))/bin/schemathesis; [ ! -x "$$tester" ] || export WADI_SCHEMATHESIS="$$tester"; \
	CARGO="$(CARGO)" WADI_REQUIRE_BROWSER=1 tests/run.sh

.PHONY: soak
soak: ## the same tests for longer (WADI_ROUNDS=20, or as given)
	@$(MAKE) --no-print-directory test WADI_ROUNDS=$(if $(filter-out 1,$(WADI_ROUNDS)),$(WADI_ROUNDS),20)

.PHONY: lint
lint: ## formatting, clippy, shell scripts; writes nothing
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@if command -v shellcheck >/dev/null; then \
	  echo "shellcheck $(SHELL_SCRIPTS)"; shellcheck $(SHELL_SCRIPTS); \
	else echo "shellcheck: not installed, skipped (apt-get install shellcheck)"; fi

.PHONY: verify
verify: lint ## lint, documentation and licences; writes nothing
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny --locked check; \
	else echo "cargo-deny: not installed, skipped (cargo install cargo-deny)"; fi

.PHONY: verify-api
verify-api: $(SCHEMATHESIS_HOME)/bin/schemathesis ## schemathesis against a running controller, by itself; needs PyPI once
	WADI_SCHEMATHESIS=$(abspath $<) $(CARGO) test -p pod-controller --test service schemathesis -- --nocapture

$(SCHEMATHESIS_HOME)/bin/schemathesis:
	python3 -m venv $(SCHEMATHESIS_HOME)
	@# Whoever ends pip says nothing by itself.
	timeout 300 $(SCHEMATHESIS_HOME)/bin/pip install --quiet --disable-pip-version-check schemathesis==$(SCHEMATHESIS) || { \
	  status=$$?; [ $$status != 124 ] || echo "PyPI has not given schemathesis within 300 s" >&2; exit $$status; }

.PHONY: fix
fix: ## format, and apply what clippy can
	$(CARGO) clippy --workspace --all-targets --fix --allow-dirty --allow-staged
	$(CARGO) fmt --all

# How long each fuzz target runs; 0 for ever.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := $(basename $(notdir $(wildcard tests/fuzz/fuzz_targets/*.rs)))

.PHONY: fuzz
fuzz: $(addprefix fuzz-,$(FUZZ_TARGETS)) ## every fuzz target, FUZZ_SECONDS each; needs cargo-fuzz

# The compiler of the project will do: told so, it takes the options of a nightly one that instrument for a fuzzer.
# What it finds on its way goes to tests/fuzz/found; the corpus is read and stays small.
.PHONY: fuzz-%
fuzz-%: ## one fuzz target, such as fuzz-chain
	@$(CARGO) fuzz --version >/dev/null 2>&1 || { echo "fuzzing needs cargo-fuzz: cargo install cargo-fuzz --locked" >&2; exit 1; }
	@mkdir -p tests/fuzz/found/$*
	RUSTC_BOOTSTRAP=1 $(CARGO) fuzz run --fuzz-dir tests/fuzz $* tests/fuzz/found/$* tests/fuzz/corpus/$* -- -max_total_time=$(FUZZ_SECONDS)

.PHONY: bench
bench: setup-bench build ## every benchmark: a table, SVG plots and target/bench/*.json
	$(CARGO) run --release -p wadi-benches -- all

.PHONY: bench-failover
bench-failover: setup-bench build ## pulled cables and moves between NICs, through a whole pod
	$(CARGO) run --release -p wadi-benches -- failover

.PHONY: bench-migration
bench-migration: setup-bench build ## how long a guest that moves to another host is out of reach
	$(CARGO) run --release -p wadi-benches -- migration

.PHONY: bench-replication
bench-replication: build ## how long a pod is without a leader when a controller dies
	$(CARGO) run --release -p wadi-benches -- replication

.PHONY: bench-slicing
bench-slicing: setup-bench build ## how exactly vCPUs are held to a share, and what a guest of a pod sees of it
	$(CARGO) run --release -p wadi-benches -- slicing

.PHONY: bench-%
bench-%: setup-bench ## one benchmark, such as bench-channel
	$(CARGO) run --release -p wadi-benches -- $*
