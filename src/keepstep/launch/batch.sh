# The common part of every keepstep job on Slurm; the lines above set what to run. The batch shell runs on the first node.
set -uo pipefail
# The job steps handle the signals and save; the shell must survive to requeue. (A handler, not '', so that children get the default.)
trap : TERM USR1 INT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export KEEPSTEP_HEAD=${nodes[0]}
# Jobs that share a node start at different ports and skip ports in use.
port=$((20000 + SLURM_JOB_ID % 10000))
while (exec 3<>"/dev/tcp/$KEEPSTEP_HEAD/$port" || exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
export KEEPSTEP_PORT=$port
# A process left over from the last attempt must not join this one.
export KEEPSTEP_ATTEMPT=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
rm -f "$KEEPSTEP_JOB_FOLDER/failed-nodes" "$KEEPSTEP_JOB_FOLDER/saved" "$KEEPSTEP_JOB_FOLDER/done"
# Why there is another attempt, where the shell of the last one was lost.
[ ! -e "$KEEPSTEP_JOB_FOLDER/requeued" ] || { cat "$KEEPSTEP_JOB_FOLDER/requeued"; rm -f "$KEEPSTEP_JOB_FOLDER/requeued"; }
echo "keepstep: job $SLURM_JOB_ID attempt ${SLURM_RESTART_COUNT:-0} on ${#nodes[@]} node(s) $SLURM_JOB_NODELIST, rendezvous at $KEEPSTEP_HEAD:$port"

# NCCL's topology file and SHARP's plugin and library belong to the machine: a container gets the node's, where it has them.
parts=
[ ! -f "${NCCL_TOPO_FILE:-}" ] || parts+=,$NCCL_TOPO_FILE:$NCCL_TOPO_FILE
if [ "${NCCL_COLLNET_ENABLE:-0}" = 1 ]; then
  # Where Azure's machine images install them, and where our image looks for them.
  plugin=/usr/local/nccl-rdma-sharp-plugins library=/opt/mellanox/sharp
  plugin_here=${KEEPSTEP_SHARP_PLUGIN:-$plugin} library_here=${KEEPSTEP_SHARP_LIBRARY:-$library}
  [ ! -d "$plugin_here" ] || parts+=,$plugin_here:$plugin
  [ ! -d "$library_here" ] || parts+=,$library_here:$library
  export LD_LIBRARY_PATH=$plugin_here/lib:$library_here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
for option in "${!KEEPSTEP_SRUN[@]}"; do
  [[ ${KEEPSTEP_SRUN[option]} != --container-mounts=* ]] || KEEPSTEP_SRUN[option]+=$parts
done

# One task of an array has the array's own id, and Slurm would apply a command with that id to all tasks.
job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job_id=${job_id:-$SLURM_JOB_ID}

# Replicas survive the loss of any node but this one. Slurm takes it out of the job, and without this script the job would wait
# for its time limit. So two other nodes watch, outside of any container, and requeue the job.
watch='trap : USR1
while :; do
  sleep "${KEEPSTEP_WATCH_S:-15}"
  read -r state left < <(squeue -h -j "$1" -o "%T %N" 2>/dev/null) && [ "$state" = RUNNING ] || continue
  left=$(scontrol show hostnames "$left") || continue
  [[ " ${left//$'\''\n'\''/ } " != *" $2 "* ]] || continue
  if [ -e "$KEEPSTEP_JOB_FOLDER/stop" ] || [ "${SLURM_RESTART_COUNT:-0}" -ge "$3" ]; then scancel "$1"; else
    echo "keepstep: job $1 lost its first node $2; $SLURMD_NODENAME requeued it" > "$KEEPSTEP_JOB_FOLDER/requeued"
    scontrol requeue "$1"
  fi
done'
survives=false watcher=
[[ " ${KEEPSTEP_SRUN[*]} " != *' --no-kill '* ]] || survives=true
if $survives && [ "${#nodes[@]}" -gt 1 ]; then
  watching=("${nodes[1]}")
  [ "${#nodes[@]}" -eq 2 ] || watching+=("${nodes[-1]}")
  # What it prints is about its own end.
  srun --overlap --no-kill --kill-on-bad-exit=0 --cpu-bind=none --nodes="${#watching[@]}" --ntasks="${#watching[@]}" \
    --ntasks-per-node=1 --nodelist="$(IFS=,; echo "${watching[*]}")" \
    bash -c "$watch" watch "$job_id" "$KEEPSTEP_HEAD" "$KEEPSTEP_REQUEUES" 2>/dev/null &
  watcher=$!
fi

# Nodes prove to each other that they know this secret. Only srun gets it: no script, record, log or later job contains it.
KEEPSTEP_RENDEZVOUS_SECRET=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n') \
  srun --ntasks="${#nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "${KEEPSTEP_SRUN[@]}" \
  "${KEEPSTEP_LAUNCH[@]}" launch node --nodes "${KEEPSTEP_MIN_NODES:-${#nodes[@]}}:${#nodes[@]}" \
  --processes "$KEEPSTEP_PROCESSES" --max-restarts "$KEEPSTEP_RESTARTS" "${KEEPSTEP_UPDATES[@]}" -- "${KEEPSTEP_WORDS[@]}"
code=$?
[ -z "$watcher" ] || kill "$watcher" 2>/dev/null
# srun ends the other nodes at the first failure and reports the highest code, so the nodes report their results in files.
[ "$code" -ne 0 ] || [ ! -e "$KEEPSTEP_JOB_FOLDER/saved" ] || code=75
[ "$code" -eq 0 ] || [ ! -s "$KEEPSTEP_JOB_FOLDER/failed-nodes" ] || code=5
# Replicas that survive save or finish without lost nodes, whose tasks srun counts as failed.
if $survives; then
  [ ! -e "$KEEPSTEP_JOB_FOLDER/saved" ] || code=75
  [ ! -e "$KEEPSTEP_JOB_FOLDER/done" ] || code=0
fi
echo "keepstep: job $SLURM_JOB_ID attempt ${SLURM_RESTART_COUNT:-0} ended with $code"

# A busy or restarting controller keeps its state. Retry, so that one failed call does not end a run that has saved.
ask_slurm() {
  local tries said
  for ((tries = 0; tries < 360; tries++)); do
    # The answer is the last line; warnings come before it.
    said=$("$@" 2>&1) && { answer=${said##*$'\n'}; return 0; }
    [[ $said != *'Invalid job id'* ]] || return 1
    [ "$tries" -ne 0 ] || echo "keepstep: $1 failed, retrying: $said"
    sleep "${KEEPSTEP_ASK_S:-5}"
  done
  return 1
}

# Slurm has cancelled or requeued the job: nothing to decide here.
ask_slurm squeue -h -j "$job_id" -o %T && [ "$answer" = RUNNING ] || exit "$code"
# The user stopped the job: whatever the result, do not start it again.
[ ! -e "$KEEPSTEP_JOB_FOLDER/stop" ] || exit "$code"
if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -ge "$KEEPSTEP_REQUEUES" ]; then
  echo "keepstep: saved; not requeued, because the job has restarted ${SLURM_RESTART_COUNT:-0} times (max_requeues is $KEEPSTEP_REQUEUES)"
elif [ "$code" -eq 75 ]; then
  echo "keepstep: saved; requeued"
  ask_slurm scontrol requeue "$job_id"
elif [ "$code" -eq 5 ] && [ -s "$KEEPSTEP_JOB_FOLDER/failed-nodes" ] && [ "${KEEPSTEP_TRY:-0}" -lt "$KEEPSTEP_REQUEUES" ]; then
  failed=$(sort -u "$KEEPSTEP_JOB_FOLDER/failed-nodes" | paste -sd, -)
  # If every node failed, the nodes are not the cause, and without them the job could never start.
  if [ "$(sort -u "$KEEPSTEP_JOB_FOLDER/failed-nodes" | wc -l)" -lt "${#nodes[@]}" ]; then
    # sbatch's --exclude replaces the script's, so list the nodes that this job already excludes.
    before=$(scontrol -o show job "$job_id" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p')
    [ "$before" != '(null)' ] || before=
    excluded=$failed${before:+,$before}
    if next=$(KEEPSTEP_TRY=$((${KEEPSTEP_TRY:-0} + 1)) \
      env -u SLURM_RESTART_COUNT sbatch --parsable --exclude="$excluded" "$KEEPSTEP_JOB_FOLDER/job.sbatch"); then
      echo "keepstep: hardware failed on $failed; job ${next%%;*} continues without them"
      [ ! -e "$KEEPSTEP_JOB_FOLDER/job.json" ] || sed -i "s/\"job_id\": \"[0-9]*\"/\"job_id\": \"${next%%;*}\"/" "$KEEPSTEP_JOB_FOLDER/job.json"
    fi
  fi
fi
exit "$code"
