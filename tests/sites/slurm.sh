#!/bin/sh
#SBATCH --requeue --open-mode=append --output=out.txt --ntasks=1
# The step gets the signal; 85 asks for the job to be queued again.
srun python -m rearview.checkpointer.supervisor -- "$@"
code=$?
[ "$code" = 85 ] && exec scontrol requeue "$SLURM_JOB_ID"
exit "$code"
