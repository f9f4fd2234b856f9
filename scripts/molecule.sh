#!/bin/sh
# Runs Molecule scenarios one after another; each destroys its hosts, also when it fails.
# Usage: scripts/molecule.sh SCENARIO [SCENARIO ...]
set -u
cd "$(dirname "$0")/.." || exit 1
for scenario in "$@"; do
  printf '\nMolecule: %s\n' "$scenario"
  NANOFLEET_TEST_LAB="${NANOFLEET_TEST_LAB:-t}-$scenario" molecule test --scenario-name "$scenario" || exit 1
done
