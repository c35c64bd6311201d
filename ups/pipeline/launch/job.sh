
# --- what is done; the values above are all that differs from one launch to another -------------------------
# Every exit status is looked at: results go up, and the machine goes off, whatever happened before.
set -uo pipefail
export LC_ALL=C

say() { printf '%s %s\n' "$(date -u +%H:%M:%S)" "$*"; }
milliseconds() { date +%s%3N; }

# phase NAME COMMAND...: notes how long it took, and how it ended.
phase() {
  local name=$1 status=0 began seconds
  shift
  began=$(milliseconds)
  "$@" || status=$?
  seconds=$(awk -v ms="$(($(milliseconds) - began))" 'BEGIN { printf "%.3f", ms / 1000 }')
  printf '%s\t%s\t%s\t%s\n' "$LAUNCH_ID" "$name" "$seconds" "$status" >> "$JOB_DIR/phases.tsv"
  say "$name: $seconds s, exit code $status"
  return "$status"
}

# Waits for a command, to which a signal for this script is passed on: a training saves itself then. A signal
# ends the waiting, not what is waited for, so that is waited for again.
attend() {
  local status seen
  [ "$num_signals" = 0 ] || return 5
  "$@" &
  child=$!
  [ "$num_signals" = 0 ] || kill -TERM "$child"
  while :; do
    seen=$num_signals status=0
    wait "$child" || status=$?
    [ "$num_signals" != "$seen" ] || break
  done
  child=
  return "$status"
}

ups_in_time() {
  local limit=()
  if [ -n "$MAX_SECONDS" ]; then
    limit=(timeout --signal=TERM --kill-after=300 $((MAX_SECONDS > SECONDS ? MAX_SECONDS - SECONDS : 1)))
  fi
  attend "${limit[@]}" ups "$@"
}

install() {
  if [ -f /venv/main/bin/activate ]; then # images of vast.ai
    # shellcheck disable=SC1091
    . /venv/main/bin/activate
  fi
  if [ -n "$REMOTE$RESULTS" ] && ! command -v rclone > /dev/null; then
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y rclone; } || return
  fi
  [ -z "$PACKAGE" ] || python3 -m pip install --quiet "$PACKAGE"
}

# The remote B2TRAIN is Backblaze's bucket, with the keys of the environment; others are rclone's own.
set_remote() {
  case $REMOTE$RESULTS in *B2TRAIN:*) ;; *) return 0 ;; esac
  if [ -z "${B2_KEY_ID:-}" ] || [ -z "${B2_APP_KEY:-}" ]; then
    say "error: B2_KEY_ID and B2_APP_KEY aren't set: export them before the launch, or in the account"
    return 2
  fi
  export RCLONE_CONFIG_B2TRAIN_TYPE=b2
  export RCLONE_CONFIG_B2TRAIN_ACCOUNT=$B2_KEY_ID RCLONE_CONFIG_B2TRAIN_KEY=$B2_APP_KEY
  if [ -n "${B2_S3_ENDPOINT:-}" ]; then
    export RCLONE_CONFIG_B2TRAIN_TYPE=s3 RCLONE_CONFIG_B2TRAIN_PROVIDER=Other
    export RCLONE_CONFIG_B2TRAIN_ACCESS_KEY_ID=$B2_KEY_ID
    export RCLONE_CONFIG_B2TRAIN_SECRET_ACCESS_KEY=$B2_APP_KEY
    export RCLONE_CONFIG_B2TRAIN_ENDPOINT=$B2_S3_ENDPOINT RCLONE_CONFIG_B2TRAIN_REGION=${B2_S3_REGION:-}
    export RCLONE_CONFIG_B2TRAIN_NO_CHECK_BUCKET=true
  fi
}

copy() { rclone copy "$@" --skip-links --retries 5 --stats 1m --stats-one-line --stats-log-level NOTICE; }

# fetch TASK SPLIT: what is there already, and of the same size, isn't fetched again. Files that are of no
# split as a whole come with train: they are shared out.
fetch() {
  local to=$DATA_ROOT/$1 val='{val,valid,validation}' filters
  case $2 in
    train) filters=("- *_{val,valid,validation,test}{.,_}*" "- {val,valid,validation,test}/**") ;;
    val) filters=("+ *_$val{.,_}*" "+ $val/**" "- *") ;;
    test) filters=("+ *_test{.,_}*" "+ test/**" "- *") ;;
  esac
  filters+=("+ *.{h5,hdf5}" "- *")
  copy "$REMOTE/$1" "$to" "${filters[@]/#/--filter=}" || return
  [ -n "$(rclone lsf "$to" --recursive --files-only --skip-links "${filters[@]/#/--filter=}")" ]
}

download() {
  [ -n "$REMOTE" ] || return 0
  local task split i status is_bad=0 pids=() names=()
  for task in "${TASKS[@]}"; do
    mkdir -p "$DATA_ROOT/$task" || return
    for split in train val test; do
      fetch "$task" "$split" &
      pids+=("$!") names+=("$task, $split")
    done
  done
  for i in "${!pids[@]}"; do
    status=0
    wait "${pids[i]}" || status=$?
    case $status,${names[i]} in
      0,*) ;;
      *,*train) is_bad=3 && say "error: ${names[i]}: no files from $REMOTE (exit code $status)" ;;
      *) say "warning: ${names[i]}: no files of its own from $REMOTE (exit code $status)" ;;
    esac
  done
  [ "$num_signals" = 0 ] || return 5
  return "$is_bad"
}

# Names that earlier tools look for, where there is no file of that name.
link_names() {
  [ -n "$REMOTE" ] || return 0
  local file name
  find "$DATA_ROOT" -name '*_val.h5' -o -name '*_train.h5' | while read -r file; do
    case $file in *_val.h5) name=${file%_val.h5}_valid.h5 ;; *) name=${file%.h5}_000.h5 ;; esac
    [ -e "$name" ] || ln -sfn "${file##*/}" "$name"
  done
}

# build_stores NODE: with smaller batches, then on the CPU, where the machine can't do it as it is told. That
# helps nothing that a configuration, a source, a disk or another build is to blame for.
build_stores() {
  local other words status=0
  for other in "" "reading.batch_size=1" "reading.batch_size=1 latent.device=cpu"; do
    read -ra words <<< "$other"
    status=0
    ups_in_time run "$CONFIG_FILE" --only "$1" "${words[@]}" || status=$?
    case $status in 0 | 2 | 3 | 5 | 6 | 7 | 8 | 124) return "$status" ;; esac
    say "warning: $1 ended with exit code $status${other:+ ($other)}"
  done
  return "$status"
}

precompute() {
  local nodes node
  nodes=$(ups run "$CONFIG_FILE" --dry-run | awk '{ print $1 }') || return
  case $'\n'$nodes$'\n' in *$'\n'latent-stores$'\n'*) ;; *) return 0 ;; esac
  for node in $nodes; do
    case $node in
      autoencoder | joint) ups_in_time run "$CONFIG_FILE" --only "$node" || return ;;
      field-stores) build_stores "$node" || return ;;
      latent-stores)
        build_stores "$node"
        return
        ;;
    esac
  done
}

train() {
  ups_in_time run "$CONFIG_FILE" ${PRICE_PER_HOUR:+--price-per-hour "$PRICE_PER_HOUR"}
}

main() {
  cd "$WORKDIR" || return
  printf '%s' "$CONFIG_TEXT" > "$CONFIG_FILE" || return
  if [ "$INSTALLS" = 1 ]; then phase install install || return; fi
  set_remote || return
  phase download download || return
  link_names || return
  phase precompute precompute || return
  phase run train
}

upload() {
  [ -n "$RESULTS" ] || return 0
  local folder is_bad=0
  for folder in "${RESULT_FOLDERS[@]}" "$JOB_DIR"; do
    [ ! -d "$folder" ] || copy "$folder" "$RESULTS/$NAME/$LAUNCH_ID/$(basename "$folder")" || is_bad=1
  done
  return "$is_bad"
}

of_container() { tr '\0' '\n' < /proc/1/environ 2> /dev/null | sed -n "s/^$1=//p"; }

stop_instance() {
  python3 - << 'PYTHON'
import os, urllib.request

url = os.environ.get("VAST_URL") or "https://console.vast.ai"
request = urllib.request.Request(
    f"{url}/api/v0/instances/{os.environ['CONTAINER_ID']}/",
    data=b'{"state": "stopped"}',
    headers={"Authorization": f"Bearer {os.environ['CONTAINER_API_KEY']}", "Content-Type": "application/json"},
    method="PUT",
)
urllib.request.urlopen(request, timeout=60)
PYTHON
}

# A container that ends itself is paid for until the instance is stopped.
power_off() {
  local pause
  export CONTAINER_ID=${CONTAINER_ID:-$(of_container CONTAINER_ID)}
  export CONTAINER_API_KEY=${CONTAINER_API_KEY:-$(of_container CONTAINER_API_KEY)}
  if [ -n "$CONTAINER_ID" ] && [ -n "$CONTAINER_API_KEY" ]; then
    for pause in 10 60 300 0; do
      stop_instance && return
      sleep "$pause"
    done
  fi
  shutdown -h now
}

finish() {
  local code=$?
  trap - EXIT
  trap '' TERM INT
  phase upload upload || code=$((code ? code : 1))
  printf '%s\n' "$code" > "$JOB_DIR/exit_code"
  say "$NAME: ended with exit code $code; what it said: $JOB_DIR/job.log"
  if [ "$REQUEUES" = 1 ] && [ "$code" = 5 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
  if [ "$SHUTS_DOWN" = 1 ]; then power_off; fi
  exec >&3 2>&3
  for _ in {1..20}; do # until the log has it all, unless something that was left behind holds it open
    kill -0 "$tee" 2> /dev/null && sleep 0.1
  done
  exit "$code"
}

child='' num_signals=0
JOB_DIR=$WORKDIR/launches/$NAME
CONFIG_FILE=$JOB_DIR/$NAME.yaml
mkdir -p "$JOB_DIR" || exit
exec 3>&1 > >(tee -a "$JOB_DIR/job.log" >&3) 2>&1
tee=$!
trap finish EXIT
trap 'num_signals=$((num_signals + 1)); [ -z "$child" ] || kill -TERM "$child"' TERM INT
main
