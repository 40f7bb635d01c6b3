#!/bin/bash
# What mpirun and mpiexec call instead of ssh.
exec "$(dirname "$0")/hosts.sh" agent "$@"
