"""What batch systems are told: their own files, written for them (pure)."""

from rearview.sites.condor import submit_file
from rearview.sites.job import Job
from rearview.sites.slurm import batch_script

__all__ = ["Job", "batch_script", "submit_file"]
