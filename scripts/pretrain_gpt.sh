#!/usr/bin/env bash
# Trains a GPT model as a YAML file says: scripts/pretrain_gpt.sh CONFIG [KEY=VALUE...]
set -euo pipefail

if (($# == 0)); then
  cat >&2 <<'USAGE'
usage: pretrain_gpt.sh CONFIG [KEY=VALUE...]

  CONFIG     a YAML file, such as configs/llama_quickstart.yaml
  KEY=VALUE  overrides one of its values: train-iters=200 run.output_dir=/tmp/run

The first call makes .venv (scripts/bootstrap.sh); PYTHON=... names an environment to use instead.
USAGE
  exit 2
fi

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/scripts/bootstrap.sh")
# In an environment that is used as it is, the library may not be installed; the ranks inherit this.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m megatron_loco.launch "$@"
