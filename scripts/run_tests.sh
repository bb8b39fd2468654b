#!/usr/bin/env bash
# Lint, types, then the tests: scripts/run_tests.sh [PYTEST ARGUMENTS...]
# Fails when one of the three fails; pytest's summary comes last in any case.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/bootstrap.sh")
cd -- "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

has() { "$python" -c "import $1" 2>/dev/null; }
has pytest || {
  echo "run_tests: $python has no pytest: '$python' -m pip install pytest ruff mypy" >&2
  exit 1
}

failed=0
check() { # check MODULE ARGUMENTS...; an environment that is used as it is may not have it
  if has "$1"; then
    echo "run_tests: $*"
    "$python" -m "$@" || failed=1
  else
    echo "run_tests: $1 is not installed here, left out"
  fi
}
check ruff check .
check mypy
((failed == 0)) || echo "run_tests: the checks above failed, and so will this run, whatever pytest says"

"$python" -m pytest "$@" # its exit code 5, no test, ends this script too
exit "$failed"
