#!/bin/bash
# sbatch accelerate_configs/slurm.sh train_bi_encoder.py runs/first/args.yaml
#
# From the folder of the scripts, which all nodes share, with the environment that holds them active. --resume is added:
# a job that is requeued, or submitted again after its time was up, goes on from its newest checkpoint.
#SBATCH --job-name=evenstep
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
# One launcher a node; it starts one process for each GPU.
#SBATCH --ntasks-per-node=1
# Two minutes before the end every process receives SIGTERM: a checkpoint of the last step is written.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MAIN_NODE=${nodes[0]}
export PORT=$((20000 + SLURM_JOB_ID % 10000)) # jobs that share a node need ports of their own
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # a launcher that receives SIGTERM kills its processes after so many seconds
# If a process dies, the job ends, is queued again, up to three times, and goes on from its newest checkpoint. Not by
# --max_restarts: a launcher with a fixed main process gives new processes the addresses of those that are gone.
# A node knows its own number only in a task, hence the inner shell.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file accelerate_configs/multi_node.yaml \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$MAIN_NODE" --main_process_port "$PORT" "$@" --resume' task "$@" ||
    { [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] && scontrol requeue "$SLURM_JOB_ID"; }
