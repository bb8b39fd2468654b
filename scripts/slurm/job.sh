# shellcheck shell=bash
# What the job scripts in this folder share; they source it from the checkout, as Slurm runs a copy of them elsewhere.
#
# run_job PYTHON [SRUN OPTION...] -- CONFIG [KEY=VALUE...] trains on all nodes of the job and ends the script:
#   with the status of the training, if that ended by itself;
#   by a requeue, if SIGUSR1 told the script that its time is up, and the training then saved a checkpoint and ended;
#   with a failure, if it made no progress or could not be requeued: a requeue needs a newer checkpoint than the job
#   began with, so that there are never more requeues than iterations.
#
# Environment:
#   LOCO_LOG_DIR  where the output of the nodes goes (default: runs/slurm in the folder of the job)

# shellcheck disable=SC2016  # the node expands it
ON_A_NODE='NODE_RANK=$SLURM_NODEID exec "$@"'
SECONDS_BETWEEN_SIGNALS=10 # the notice is repeated: one that comes before Megatron listens is lost

say() { printf '%(%F %T)T job %s, restart %s: %s\n' -1 "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# The iteration of the newest checkpoint in a folder; 0 where there is none.
newest_iteration() {
  local content=''
  [[ ! -f $1/latest_checkpointed_iteration.txt ]] || content=$(<"$1/latest_checkpointed_iteration.txt")
  [[ $content =~ ^[0-9]+$ ]] || content=0
  printf '%d\n' "$((10#$content))"
}

stopper='' # the process that repeats the notice, once there was one
repeat_notice() {
  while :; do
    scancel --quiet --signal=URG "$SLURM_JOB_ID" || true # reaches the steps of the job, and not this script
    sleep "$SECONDS_BETWEEN_SIGNALS"
  done
}
stop_training() {
  [[ -z $stopper ]] || return 0
  say "the time is up: telling the training to save and end"
  stopper=$(repeat_notice >/dev/null 2>&1 & printf '%s\n' "$!") # started in a subshell: $! stays that of srun
}

run_job() {
  local python=$1 hosts logs plan save srun before after status=0
  local -a options=() ask=() words
  shift
  while [[ ${1:?} != -- ]]; do
    options+=("$1")
    shift
  done
  shift
  (($#)) || die "usage: sbatch [OPTION...] SCRIPT CONFIG [KEY=VALUE...]"

  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || die "scontrol does not name the hosts of the job"
  [[ -n $hosts ]] || die "scontrol names no host in $SLURM_JOB_NODELIST"
  export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
  # Since Slurm 22.05 srun does not take this from sbatch, and would bind the ranks of a node to one core.
  export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:?}}
  export PYTHONPATH=$LOCO_DIR${PYTHONPATH:+:$PYTHONPATH}

  # Mistakes are told here, once, before anything starts.
  ((${#options[@]} == 0)) || ask=(srun --nodes=1 --ntasks=1 "${options[@]}") # Python is in the container
  plan=$("${ask[@]}" "$python" -m megatron_loco.launch.slurm "$@") || exit
  mapfile -t words <<<"$plan"
  save=${words[0]}
  before=$(newest_iteration "$save")

  logs=${LOCO_LOG_DIR:-$PWD/runs/slurm}
  mkdir -p -- "$logs"
  logs+=/$SLURM_JOB_NAME-$SLURM_JOB_ID-node
  say "from iteration $before, checkpoints in $save, ${hosts//$'\n'/ } meet at $MASTER_ADDR:$MASTER_PORT"
  say "output of the nodes: $logs*.log"
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    --export=ALL --kill-on-bad-exit=1 --open-mode=append --output="$logs%n.log" "${options[@]}" \
    bash -c "$ON_A_NODE" node "$python" -m megatron_loco.launch "$@" "${words[@]:1}" &
  srun=$!
  while kill -0 "$srun" 2>/dev/null; do wait "$srun" || true; done # a signal ends the wait, not srun
  wait "$srun" || status=$?
  trap '' USR1

  [[ -z $stopper ]] || kill "$stopper" || true
  after=$(newest_iteration "$save")
  if ((status != 0)); then
    say "the training failed with status $status at a newest checkpoint of iteration $after; not requeued"
    grep -h '^error: ' -- "$logs"*.log || tail -n 20 -- "${logs}0.log" || true
    exit "$status"
  elif [[ -z $stopper ]]; then
    say "complete"
    exit 0
  elif ((after <= before)); then
    say "stopped, but without a checkpoint newer than iteration $before; not requeued"
    exit 1
  fi
  trap '' TERM # which a requeue sends; a script that dies of it leaves the job failed
  say "stopped at iteration $after; requeued"
  scontrol requeue "$SLURM_JOB_ID" || die "Slurm refuses to requeue the job; the same sbatch command continues the run"
  exit 0
}

for name in SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES; do
  [[ -n ${!name:-} ]] || die "$name is not set: this script is for sbatch"
done
trap stop_training USR1
