#!/usr/bin/env bash
# Prints on stdout the Python interpreter that the other scripts use, and nothing else; messages go to stderr.
#
#   1. An active environment that has torch, Megatron and the rest (a container, say) is used untouched.
#   2. Otherwise .venv, if it was made from the present requirements.lock and setup.py.
#   3. Otherwise .venv is made with a Python 3.12 or 3.13 found on this machine, and the lock is installed in it.
#
# Environment:
#   PYTHON  the interpreter to use, or to make .venv with; no other is tried
#   VENV    where the environment goes (default: .venv in the checkout)
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
home=${HOME:-/nonexistent}
venv=${VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
lock_file=$root/requirements.lock
mark=$venv/.megatron-loco.lock   # this script made the folder and may empty it; calls take turns on this file
stamp=$venv/.megatron-loco.stamp # what the environment was made from; written last

say() { printf 'bootstrap: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}
finish() {
  printf '%s\n' "$venv/bin/python"
  exit 0
}

# The absolute path of a command or file. Symbolic links are kept: a venv's python is a link to the one outside it.
locate() {
  local path
  path=$(type -P -- "$1") || return 1
  [[ $path == /* ]] || path=$PWD/$path
  printf '%s\n' "$path"
}

# Prints "VERSION PLATFORM venv|bare PREFIX" of an interpreter that can run the library, and fails for any other.
# A candidate is run, not only looked for: a version manager's shim is there even where its Python is not.
# Free-threaded builds and PyPy are left out because megatron-core has no wheels for them.
describe() {
  "$1" -c '
import importlib.util as u, sys, sysconfig
known = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
if not (known and (3, 12) <= sys.version_info[:2] <= (3, 13)):
    sys.exit(1)
venv = "venv" if u.find_spec("ensurepip") and u.find_spec("venv") else "bare"
print("%d.%d" % sys.version_info[:2], sysconfig.get_platform(), venv, sys.prefix)
' </dev/null 2>/dev/null
}

# Prints which of the needed modules an interpreter lacks. -P: what lies in the current folder does not count.
missing_modules() {
  "$1" -P -c '
import importlib.util as u
def found(name):
    try:
        return u.find_spec(name) is not None
    except ImportError:
        return False
names = "torch megatron.core megatron.training numpy ruamel.yaml rich psutil einops tensorboard".split()
print(*(name for name in names if not found(name)))
' </dev/null 2>/dev/null
}

# --- 1. an active environment that has everything

wanted='' # "VERSION PLATFORM" of $PYTHON
names=(python3 python)
if [[ -n ${PYTHON:-} ]]; then
  given=$(locate "$PYTHON") || die "PYTHON=$PYTHON is not there or not executable; name a Python 3.12 or 3.13"
  about=$(describe "$given") ||
    die "PYTHON=$PYTHON is no usable Python 3.12 or 3.13; it says: $("$given" --version 2>&1 </dev/null | head -n 1)"
  read -r version platform _ prefix <<<"$about"
  [[ ! $prefix -ef $venv ]] || die "PYTHON=$PYTHON is in $venv, which this script looks after: unset PYTHON"
  wanted="$version $platform"
  names=("$given")
fi
for name in "${names[@]}"; do
  python=$(locate "$name") || continue
  about=$(describe "$python") || continue
  read -r _ _ _ prefix <<<"$about"
  [[ ! $prefix -ef $venv ]] || continue # our own, perhaps out of date or half made: the stamp decides
  missing=$(missing_modules "$python") || continue
  if [[ -z $missing ]]; then
    say "using $python as it is: it has torch and Megatron"
    printf '%s\n' "$python"
    exit 0
  elif [[ " $missing " != *" torch "* ]]; then
    say "note: $python has torch, but not $missing; to use it: '$python' -m pip install -e '$root'"
  fi
done

# --- 2. an environment made earlier

fingerprint() { # of an environment for "VERSION PLATFORM"; the checkout's folder is in it, since the install names it
  { printf '%s\n' "$1" "$root" && cat -- "$lock_file" "$root/setup.py"; } | sha256sum | cut -d' ' -f1
}
up_to_date() {
  local about version platform
  [[ -f $stamp ]] || return 1
  about=$(describe "$venv/bin/python") || return 1
  read -r version platform _ <<<"$about"
  [[ -z $wanted || $wanted == "$version $platform" ]] || return 1
  [[ $(<"$stamp") == "$(fingerprint "$version $platform")" ]]
}
if up_to_date; then finish; fi

# --- 3. find a Python and make the environment

unset PYTHONPATH PYTHONHOME # would let packages from elsewhere pass for installed
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

uv=''
for name in uv "$home/.local/bin/uv" "$home/.cargo/bin/uv"; do
  if path=$(locate "$name") && "$path" --version >/dev/null 2>&1; then
    uv=$path
    break
  fi
done

candidates() {
  local name folder
  for name in python3.12 python3.13 python3 python; do type -aP "$name" || true; done
  shopt -s nullglob
  printf '%s\n' "${PYENV_ROOT:-$home/.pyenv}"/versions/3.1[23].*/bin/python3
  for folder in "${CONDA_PREFIX:-/nonexistent}" "$home"/{miniconda3,anaconda3,miniforge3,mambaforge} /opt/conda; do
    printf '%s\n' "$folder"/bin/python3 "$folder"/envs/*/bin/python3
  done
  printf '%s\n' /opt/python/cp31[23]-*/bin/python3 /usr/local/bin/python3.1[23] /usr/bin/python3.1[23]
  [[ -z $uv ]] || "$uv" python find --managed-python '>=3.12,<3.14' 2>/dev/null || true
}

base='' bare='' # the first that can make environments, and the first that cannot (Debian splits ensurepip off)
while read -r python; do
  about=$(describe "$python") || continue
  read -r _ _ modules prefix <<<"$about"
  [[ ! $prefix -ef $venv ]] || continue
  if [[ $modules == venv ]]; then
    base=$python
    break
  fi
  bare=${bare:-$python}
done < <(if [[ -n $wanted ]]; then printf '%s\n' "$given"; else candidates; fi)

if [[ -n $base ]]; then
  make=("$base" -m venv "$venv")
elif [[ -n $bare && -n $uv ]]; then
  make=("$uv" venv --quiet --no-project --allow-existing --seed --python "$bare" "$venv")
elif [[ -n $bare ]] && path=$(locate virtualenv); then
  make=("$path" --quiet --python "$bare" "$venv")
elif [[ -n $bare ]]; then
  version=$("$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  die "$bare cannot make environments: install the package python$version-venv (Debian, Ubuntu), or uv"
elif [[ -n $uv ]]; then
  make=("$uv" venv --quiet --no-project --allow-existing --seed --managed-python --python 3.12 "$venv")
else
  die "no Python 3.12 or 3.13 found on this machine: set PYTHON=/path/to/python3.12, or install uv, which brings one"
fi

empty() { find "$venv" -mindepth 1 -maxdepth 1 ! -name "${mark##*/}" -exec rm -rf -- {} +; }

content=$(ls -A -- "$venv" 2>/dev/null || true) # before the look at the mark, which another call may just be setting
if [[ -n $content && ! -e $mark ]]; then
  die "$venv was not made by this script: activate it, remove it, or set VENV to another folder"
fi
{ mkdir -p -- "$venv" && : >>"$mark"; } 2>/dev/null || die "cannot write in $venv: set VENV to another folder"
exec 9>>"$mark"
if command -v flock >/dev/null && ! flock -n 9; then
  say "another call is making $venv; waiting for it"
  flock 9 || say "this file system has no locks; going on"
fi
if up_to_date; then finish; fi # another call was faster
empty # an interruption from here on leaves a folder without a stamp, which the next call empties again

# step MESSAGE COMMAND...: runs it with its output on stderr and in $output, and says how long it took.
output=''
step() {
  local message=$1 begin=$SECONDS
  shift
  say "$message"
  output=$("$@" 2>&1 </dev/null | while IFS= read -r line || [[ -n $line ]]; do
    [[ $line == ' '[+~-]' '* ]] || printf '%s\n' "$line" >&2 # uv's list of packages is long
    printf '%s\n' "$line"
  done) || return 1
  say "  done in $((SECONDS - begin)) s"
}
fail() {
  local reason="see the messages above"
  if grep -qiE 'no space left|quota exceeded' <<<"$output"; then
    reason="the disk is full: the environment takes 5.5 GB; free some, or set VENV to a folder on another disk"
  elif grep -qiE 'name resolution|dns error|connect|timed? ?out|unreachable|failed to fetch' <<<"$output"; then
    reason="the network or the package registry cannot be reached: set HTTPS_PROXY, or PIP_INDEX_URL and"
    reason+=" UV_DEFAULT_INDEX to a mirror, or PYTHON to an environment that has torch and megatron-core"
  fi
  empty
  die "$1: $reason"
}

step "making $venv with ${base:-${bare:-a Python 3.12 that uv downloads}}" "${make[@]}" ||
  fail "no environment was made"
about=$(describe "$venv/bin/python") || fail "the environment's Python does not run"
read -r version platform _ <<<"$about"

# Without caches: one on another disk would keep a second copy of several GB. --system-certs: a proxy or mirror inside a
# company is known to the system's certificates, not to those that uv brings.
pip=("$venv/bin/python" -m pip install --quiet --no-cache-dir)
with_uv() {
  step "installing uv" "${pip[@]}" --constraint "$lock_file" uv &&
    step "installing requirements.lock with uv (about 3 GB to download, 5.5 GB on disk)" \
      "$venv/bin/uv" pip install --no-cache --system-certs --python "$venv/bin/python" --requirement "$lock_file"
}
with_pip() { # pip's own settings may name a mirror or wheels on disk, which uv does not read
  say "that did not work; trying pip, which is slower"
  step "installing requirements.lock with pip" "${pip[@]}" --requirement "$lock_file"
}
with_uv || with_pip || fail "the packages were not installed"
step "installing this checkout" "${pip[@]}" --no-deps --no-build-isolation --editable "$root" ||
  fail "the checkout was not installed"
missing=$(missing_modules "$venv/bin/python") || fail "the environment's Python does not run"
[[ -z $missing ]] || fail "modules are missing after the installation ($missing)"

fingerprint "$version $platform" >"$stamp.new"
mv -- "$stamp.new" "$stamp"
say "ready after $SECONDS s, $(du -sh -- "$venv" | cut -f1) on disk"
finish
