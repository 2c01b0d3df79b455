#!/usr/bin/env bash
# One vLLM or SGLang server per GPU for `python -m deepspec.data regenerate regenerate.engine=openai …`; Ctrl-C stops all.
#   scripts/launch_servers.sh [--engine vllm|sglang] [--gpus 0,1,2] [--port 8000] [--host 127.0.0.1] MODEL [server options …]
set -euo pipefail

engine=vllm gpus="" port=8000 host=127.0.0.1
while [[ $# -gt 0 ]]; do
  case $1 in
    --engine) engine=$2; shift 2 ;;
    --gpus) gpus=$2; shift 2 ;;
    --port) port=$2; shift 2 ;;
    --host) host=$2; shift 2 ;;
    -h | --help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --) shift; break ;;
    -*) echo "unknown option $1; server options go after the model" >&2; exit 2 ;;
    *) break ;;
  esac
done
[[ $# -ge 1 ]] || { echo "usage: $0 [--engine vllm|sglang] [--gpus 0,1] [--port 8000] MODEL [server options …]" >&2; exit 2; }
model=$1; shift
[[ $engine == vllm || $engine == sglang ]] || { echo "engine '$engine' is neither vllm nor sglang" >&2; exit 2; }
if [[ -z $gpus ]]; then
  gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd, -) || true
  [[ -n $gpus ]] || { echo "no GPU found: name them with --gpus 0,1,…" >&2; exit 1; }
fi

pids=() urls=()
stop() { kill "${pids[@]}" 2>/dev/null || true; wait 2>/dev/null || true; }
trap stop EXIT
trap 'exit 130' INT TERM
for gpu in ${gpus//,/ }; do
  if [[ $engine == vllm ]]; then
    command=(vllm serve "$model" --host "$host" --port "$port" "$@")
  else
    command=(python -m sglang.launch_server --model-path "$model" --host "$host" --port "$port" "$@")
  fi
  echo "GPU $gpu: ${command[*]} > server-$port.log"
  CUDA_VISIBLE_DEVICES=$gpu "${command[@]}" >"server-$port.log" 2>&1 &
  pids+=($!) urls+=("http://$host:$port/v1")
  port=$((port + 1))
done
echo "next: python -m deepspec.data regenerate regenerate.engine=openai 'regenerate.servers=[$(IFS=,; echo "${urls[*]}")]' target=…"
# One dead server does not stop the others: regenerate drops it and carries on.
wait
