#!/bin/sh
# Runs Molecule scenarios, two at a time: each waits for its hosts most of the time. Each destroys its hosts, also when it fails.
# Prints the output of a scenario when it has ended. If scenarios have failed, names them in the end, with the end of the
# output of each, and fails.
# Usage: scripts/molecule.sh SCENARIO [SCENARIO ...]
set -u
cd "$(dirname "$0")/.." || exit 1
logs=$(mktemp -d) || exit 1
trap 'rm -rf "$logs"' EXIT
export logs NANOFLEET_TEST_LAB="${NANOFLEET_TEST_LAB:-t}"
mkdir "$logs/failed"
status=0
# shellcheck disable=SC2016  # expanded by the inner shell
printf '%s\n' "$@" | xargs -P 2 -I {} sh -c '
  printf "Molecule: %s begins\n" {}
  began=$(date +%s)
  NANOFLEET_TEST_LAB="$NANOFLEET_TEST_LAB-{}" molecule test --scenario-name {} >"$logs/{}" 2>&1
  result=$?
  flock "$logs" cat "$logs/{}"
  printf "\nMolecule: %s has ended after %d s, exit status %d\n" {} $(($(date +%s) - began)) $result
  test $result = 0 && exit
  touch "$logs/failed/{}"
  exit 1
' || status=1
for log in "$logs"/failed/*; do
  test -e "$log" || break
  scenario=$(basename "$log")
  line=$(grep -n "fatal: " "$logs/$scenario" | tail -n 1 | cut -d : -f 1)
  printf "\nMolecule: %s has failed. From its output:\n" "$scenario"
  if test -n "$line"; then sed -n "$line,$((line + 40))p" "$logs/$scenario"; else tail -n 40 "$logs/$scenario"; fi
done
exit $status
