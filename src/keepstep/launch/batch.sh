# What every keepstep job does on Slurm; the lines above say what to run. The batch shell runs on the first node.
set -uo pipefail
# Signals are for the steps, which save; the shell must live to requeue. (A handler, not '', so that children get the default.)
trap : TERM USR1 INT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export KEEPSTEP_HEAD=${nodes[0]}
# Jobs that share a node start at different ports and step over those in use.
port=$((20000 + SLURM_JOB_ID % 10000))
while (exec 3<>"/dev/tcp/$KEEPSTEP_HEAD/$port" || exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
export KEEPSTEP_PORT=$port
# A process left over from the last attempt must not join this one.
export KEEPSTEP_ATTEMPT=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
rm -f "$KEEPSTEP_JOB_FOLDER/failed-nodes" "$KEEPSTEP_JOB_FOLDER/saved"
echo "keepstep: job $SLURM_JOB_ID attempt ${SLURM_RESTART_COUNT:-0} on ${#nodes[@]} node(s) $SLURM_JOB_NODELIST, meeting at $KEEPSTEP_HEAD:$port"

srun --ntasks="${#nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 --cpu-bind=none "${KEEPSTEP_SRUN[@]}" \
  "${KEEPSTEP_LAUNCH[@]}" launch node --nodes "${KEEPSTEP_MIN_NODES:-${#nodes[@]}}:${#nodes[@]}" \
  --processes "$KEEPSTEP_PROCESSES" --max-restarts "$KEEPSTEP_RESTARTS" "${KEEPSTEP_UPDATES[@]}" -- "${KEEPSTEP_WORDS[@]}"
code=$?
# srun ends the other nodes at the first failure and reports the highest code, so the nodes leave word themselves.
[ "$code" -ne 0 ] || [ ! -e "$KEEPSTEP_JOB_FOLDER/saved" ] || code=75
[ "$code" -eq 0 ] || [ ! -s "$KEEPSTEP_JOB_FOLDER/failed-nodes" ] || code=5
echo "keepstep: job $SLURM_JOB_ID attempt ${SLURM_RESTART_COUNT:-0} ended with $code"

# A controller that is busy or restarts has forgotten nothing: a run that saved must not end because nobody answered once.
ask_slurm() {
  local tries said
  for ((tries = 0; tries < 360; tries++)); do
    # The answer is the last line: warnings come before it.
    said=$("$@" 2>&1) && { answer=${said##*$'\n'}; return 0; }
    [[ $said != *'Invalid job id'* ]] || return 1
    [ "$tries" -ne 0 ] || echo "keepstep: $1 failed, asking on: $said"
    sleep "${KEEPSTEP_ASK_S:-5}"
  done
  return 1
}

# A task of an array: one of them has the number of the whole array, which Slurm would take for all of them.
job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job_id=${job_id:-$SLURM_JOB_ID}
# Cancelled or already requeued by Slurm: nothing is left to decide here.
ask_slurm squeue -h -j "$job_id" -o %T && [ "$answer" = RUNNING ] || exit "$code"
# Somebody wanted it to stop: whatever came of that, nothing starts by itself again.
[ ! -e "$KEEPSTEP_JOB_FOLDER/stop" ] || exit "$code"
if [ "$code" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -ge "$KEEPSTEP_REQUEUES" ]; then
  echo "keepstep: saved; not requeued, for the job has started again ${SLURM_RESTART_COUNT:-0} times (max_requeues is $KEEPSTEP_REQUEUES)"
elif [ "$code" -eq 75 ]; then
  echo "keepstep: saved; requeued"
  ask_slurm scontrol requeue "$job_id"
elif [ "$code" -eq 5 ] && [ -s "$KEEPSTEP_JOB_FOLDER/failed-nodes" ] && [ "${KEEPSTEP_TRY:-0}" -lt "$KEEPSTEP_REQUEUES" ]; then
  failed=$(sort -u "$KEEPSTEP_JOB_FOLDER/failed-nodes" | paste -sd, -)
  # Where every node complains the nodes are not the cause, and without them the job could never start.
  if [ "$(sort -u "$KEEPSTEP_JOB_FOLDER/failed-nodes" | wc -l)" -lt "${#nodes[@]}" ]; then
    # sbatch's option replaces the script's, so what this job does without must be named again.
    before=$(scontrol -o show job "$job_id" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p')
    [ "$before" != '(null)' ] || before=
    excluded=$failed${before:+,$before}
    if next=$(KEEPSTEP_TRY=$((${KEEPSTEP_TRY:-0} + 1)) \
      env -u SLURM_RESTART_COUNT sbatch --parsable --exclude="$excluded" "$KEEPSTEP_JOB_FOLDER/job.sbatch"); then
      echo "keepstep: hardware failed on $failed; job ${next%%;*} goes on without them"
      [ ! -e "$KEEPSTEP_JOB_FOLDER/job.json" ] || sed -i "s/\"job_id\": \"[0-9]*\"/\"job_id\": \"${next%%;*}\"/" "$KEEPSTEP_JOB_FOLDER/job.json"
    fi
  fi
fi
exit "$code"
